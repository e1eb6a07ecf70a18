"""A model of another codebase joins by `config`, `init_cache` and `extend`; engines begin and end."""

import threading
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jlora
from jlora.models import Decoder, DecoderConfig
from jlora.serve import Engine, EngineClosedError, EngineOptions, SamplingParams
from jlora.serve.engine.steps import Steps

pytestmark = pytest.mark.slow

VOCAB, WIDTH, CONTEXT = 11, 16, 32
GREEDY = SamplingParams(temperature=0, max_tokens=6)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.kv = nnx.Linear(WIDTH, 2 * WIDTH, use_bias=False, rngs=rngs)
        self.q = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)


class Recurrent(nnx.Module):
    """Another style: learned positions, one array for all layers with positions first, written by a loop over rows."""

    def __init__(self, rngs, blocks=2):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.sources = nnx.Embed(2 * CONTEXT, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(blocks)])
        self.config = SimpleNamespace(vocab_size=VOCAB, max_position_embeddings=CONTEXT, eos_token_ids=(0,))

    def init_cache(self, batch, capacity):
        return {"memory": jnp.zeros((len(self.blocks), capacity, batch, 2, WIDTH))}

    def extend(self, tokens, positions, cache, last):
        memory = cache["memory"]
        x = self.embed(tokens) + self.sources(positions)
        for i, block in enumerate(self.blocks):
            new = block.kv(x).reshape(*tokens.shape, 2, WIDTH)
            for row in range(tokens.shape[0]):
                memory = jax.lax.dynamic_update_slice(
                    memory, new[row][None, :, None], (i, positions[row, 0], row, 0, 0)
                )
            keys, values = memory[i, :, :, 0], memory[i, :, :, 1]  # [C, B, W]
            scores = jnp.einsum("blw,cbw->blc", block.q(x), keys)
            seen = jnp.arange(keys.shape[0])[None, None] <= positions[:, :, None]
            ends = jnp.take_along_axis(positions, last[:, None], 1)[:, 0]
            values = jnp.where((jnp.arange(values.shape[0])[:, None] <= ends[None])[..., None], values, 0)
            x = x + block.out(jnp.einsum("blc,cbw->blw", jax.nn.softmax(jnp.where(seen, scores, -1e30)), values))
        return self.embed.attend(x[jnp.arange(tokens.shape[0]), last]), {"memory": memory}


def adapter(name, seed):
    rng = np.random.default_rng(seed)
    shapes = {"q": (WIDTH, WIDTH), "kv": (WIDTH, 2 * WIDTH)}
    arrays = {
        f"blocks.{i}.{module}": (rng.normal(size=(2, k)), rng.normal(size=(n, 2)))
        for i in range(2)
        for module, (k, n) in shapes.items()
    }
    return jlora.Adapter.from_arrays(
        name, {k: (a.astype("f4"), b.astype("f4")) for k, (a, b) in arrays.items()}, alpha=2
    )


def numpy_greedy(model, lora, prompt, count):
    """The same model with merged weights, whole, in float64."""

    def weight(i, module):
        base = np.asarray(getattr(model.blocks[i], module).kernel[...], np.float64)
        if lora is None or f"blocks.{i}.{module}" not in lora.modules:
            return base
        one = lora.modules[f"blocks.{i}.{module}"]
        return base + one.scaling * (np.asarray(one.b, np.float64) @ np.asarray(one.a, np.float64)).T

    table, places = (np.asarray(e.embedding[...], np.float64) for e in (model.embed, model.sources))
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count and (len(tokens) == len(prompt) or tokens[-1] != 0):
        x = table[tokens] + places[: len(tokens)]
        for i in range(2):
            keys, values = np.split(x @ weight(i, "kv"), 2, axis=1)
            scores = x @ weight(i, "q") @ keys.T
            scores[np.triu_indices(len(tokens), 1)] = -np.inf
            chances = np.exp(scores - scores.max(axis=1, keepdims=True))
            x = x + (chances / chances.sum(axis=1, keepdims=True)) @ values @ weight(i, "out")
        tokens.append(int((table @ x[-1]).argmax()))
    return tokens[len(prompt) :]


def make_engine(model=None, **options):
    model = model or Recurrent(nnx.Rngs(0))
    manager = jlora.LoRAManager(model, jlora.LoRAConfig(max_loras=2, max_lora_rank=2, max_cpu_loras=3))
    options = EngineOptions(**{"max_num_seqs": 3, "max_num_batched_tokens": 8, **options})
    return Engine(model, manager, options=options), manager


def test_a_model_of_another_style_is_served(rng):
    engine, manager = make_engine()
    adapters = {name: adapter(name, seed) for seed, name in enumerate("abc")}
    for one in adapters.values():
        manager.add_adapter(one)
    with pytest.raises(EngineClosedError, match="new"):
        engine.submit([1, 2], GREEDY)
    told = []
    engine.start(lambda done, total: told.append((done, total)))
    assert told[-1][0] == told[-1][1] == len(told)
    compiled = engine._steps.compiled()
    prompts = [rng.integers(1, VOCAB, size).tolist() for size in (1, 3, 8, 9, 20)]
    asked = [(prompt, name) for prompt in prompts for name in ("a", "b", "c", None)]
    found = [engine.submit(prompt, GREEDY, lora=name) for prompt, name in asked]
    want = [numpy_greedy(manager.model, adapters.get(name), prompt, 6) for prompt, name in asked]
    assert [list(one.result(60).tokens) for one in found] == want
    assert len({tuple(one) for one in want}) > 10
    assert engine._steps.compiled() == compiled
    with pytest.raises(jlora.LoRAUsageError, match="tokenizer"):
        engine.submit("text")
    assert {name: lora.info.rank for name, lora in engine.list_loras().items()} == {"a": 2, "b": 2, "c": 2}
    threads = {engine._dispatcher.thread, engine._writer.thread}
    assert threads <= set(threading.enumerate())

    # It drains, refuses, and leaves no thread.
    late = [engine.submit([1], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)) for _ in range(9)]
    assert engine.close()
    assert [len(one.result(0).tokens) for one in late] == [20] * 9
    assert not engine.ready
    assert engine.close()
    for call in (lambda: engine.submit([1]), lambda: engine.remove_lora("a")):
        with pytest.raises(EngineClosedError):
            call()
    assert not threads & set(threading.enumerate())
    assert manager.leases() == ()
    assert manager.unwrap() is not None  # nothing is held any more


def test_closing_in_a_hurry_ends_what_runs_and_waits():
    engine, _ = make_engine(Recurrent(nnx.Rngs(0), blocks=1), max_num_seqs=1, max_num_batched_tokens=32)
    engine.start()
    dispatcher = engine._dispatcher
    dispatcher._decode = lambda: False  # nothing ends by itself
    open_ones = [engine.submit([1, 2], GREEDY) for _ in range(3)]
    assert engine.close(0.2) is False
    for one in open_ones:
        with pytest.raises(EngineClosedError, match="before the request ended"):
            one.result(10)


def test_an_engine_that_fails_for_good_says_so(caplog):
    engine, _ = make_engine(Recurrent(nnx.Rngs(0), blocks=1), max_num_seqs=1, max_num_batched_tokens=32)
    engine.start()

    def fail():
        raise RuntimeError("no memory for another cache")

    engine._steps.reset = fail
    engine._steps.decode = lambda *_: engine._steps.close() or fail()
    generation = engine.submit([1, 2], GREEDY)
    with pytest.raises(jlora.LoRAError, match="no memory"):
        generation.result(60)
    engine._dispatcher.thread.join(60)
    assert not engine.ready
    with pytest.raises(EngineClosedError, match="no memory"):
        engine.submit([1, 2], GREEDY)
    engine.close(10)


class NoPositions(Recurrent):
    def init_cache(self, batch, capacity):
        return {"state": jnp.zeros((batch, WIDTH))}


def test_what_cannot_be_served_is_refused():
    model = Recurrent(nnx.Rngs(0))
    config = jlora.LoRAConfig(max_loras=1, max_lora_rank=2)
    manager = jlora.LoRAManager(model, config)
    with pytest.raises(jlora.LoRAUsageError, match="another model"):
        Engine(Recurrent(nnx.Rngs(0)), manager)
    with pytest.raises(jlora.LoRAUsageError, match="max_model_len=33"):
        Engine(model, manager, options=EngineOptions(max_model_len=33))
    with pytest.raises(jlora.LoRAUsageError, match="max_num_seqs"):
        Engine(model, manager, options=EngineOptions(max_num_seqs=0))
    other = NoPositions(nnx.Rngs(0))
    with pytest.raises(jlora.LoRAUsageError, match="and one of positions"):
        Engine(other, jlora.LoRAManager(other, config))
    block = Block(nnx.Rngs(0))
    with pytest.raises(jlora.LoRAUsageError, match="config"):
        Engine(block, jlora.LoRAManager(block, config))


def test_the_cache_is_updated_in_place_and_read_as_far_as_it_is_live():
    config = DecoderConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=8192,
    )  # fmt: skip
    model = Decoder(config, rngs=nnx.Rngs(0))
    manager = jlora.LoRAManager(model, jlora.LoRAConfig(max_loras=1, max_lora_rank=2))
    steps = Steps(model, manager, rows=8, max_model_len=8192, chunk=64)
    assert steps.extents == [512, 1024, 2048, 4096, 8192]
    steps.reset()
    cache, rows = steps._state
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
    slots = jax.tree.leaves(manager.slots)
    tokens, where = np.zeros((1, 64), np.int32), np.zeros(3, np.int32)
    memory = {}
    for extent in (512, 8192):
        lowered = steps._decode.lower(slots, steps._rest, None, cache, rows, extent=extent)
        memory["decode", extent] = lowered.compile().memory_analysis()
    with manager.prepare([None]) as batch:
        lowered = steps._prefill.lower(slots, steps._rest, batch, cache, rows, tokens, where, extent=512)
        memory["prefill", 512] = lowered.compile().memory_analysis()
    for one in memory.values():
        assert one.alias_size_in_bytes >= nbytes  # what goes in comes out, in the same place
    for step in ("decode", "prefill"):
        assert memory[step, 512].temp_size_in_bytes < nbytes / 4  # and is copied nowhere: keys alone are half of it
    assert memory["decode", 512].temp_size_in_bytes < memory["decode", 8192].temp_size_in_bytes / 4


@pytest.mark.slow
def test_answers_across_extents_are_those_of_whole_forward_passes(monkeypatch, rng):
    monkeypatch.setattr("jlora.serve.engine.steps._LEAST_EXTENT", 8)
    config = DecoderConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=32,
    )  # fmt: skip
    model = Decoder(config, rngs=nnx.Rngs(0))
    nnx.update(model, jax.tree.map(lambda weight: 12 * weight, nnx.state(model)))  # so that attention matters
    manager = jlora.LoRAManager(model, jlora.LoRAConfig(max_loras=1, max_lora_rank=2))
    engine = Engine(model, manager, options=EngineOptions(max_num_seqs=3, max_num_batched_tokens=8))
    assert engine._steps.extents == [8, 16, 32]
    engine.start()
    prompts = [rng.integers(0, 64, size).tolist() for size in range(1, 25)]
    found = [engine.submit(prompt, SamplingParams(temperature=0, max_tokens=8)) for prompt in prompts]
    answers = [list(one.result(60).tokens) for one in found]
    assert engine.close(60)
    manager.unwrap()
    padded = np.zeros((len(prompts), 32), np.int32)
    for row, prompt, answer in zip(padded, prompts, answers, strict=True):
        row[: len(prompt) + 8] = prompt + answer
    likeliest = np.asarray(jax.jit(lambda model, tokens: model(tokens).argmax(-1))(model, padded))
    for row, prompt, answer in zip(likeliest, prompts, answers, strict=True):
        assert row[len(prompt) - 1 : len(prompt) + 7].tolist() == answer
