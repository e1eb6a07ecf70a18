"""A model of another codebase, with `config`, `init_cache` and `extend`; start and end of engines."""

import contextlib
import threading
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jlora
from jlora.serve import Engine, EngineClosedError, EngineOptions, SamplingParams
from tests.serve.client import until
from tests.serve.conftest import Around

pytestmark = pytest.mark.slow

VOCAB, WIDTH, CONTEXT = 11, 16, 32
GREEDY = SamplingParams(temperature=0, max_tokens=6)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.kv = nnx.Linear(WIDTH, 2 * WIDTH, use_bias=False, rngs=rngs)
        self.q = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)


class Recurrent(nnx.Module):
    """Learned positions, and one cache array for all layers, positions first, written by a loop over rows."""

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
    """Return greedy tokens of the same model with merged weights, as whole forward passes in float64."""

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
    manager = Around(jlora.LoRAManager(model, jlora.LoRAConfig(max_loras=2, max_lora_rank=2, max_cpu_loras=3)))
    options = EngineOptions(**{"max_num_seqs": 3, "max_num_batched_tokens": 8, **options})
    return Engine(model, manager, options=options), manager


def test_model_of_another_codebase_is_served_and_drained(rng, caplog):
    engine, manager = make_engine()
    adapters = {name: adapter(name, seed) for seed, name in enumerate("abc")}
    for one in adapters.values():
        manager.add_adapter(one)
    with pytest.raises(EngineClosedError, match="new"):
        engine.submit([1, 2], GREEDY)
    before, progress = set(threading.enumerate()), []
    with caplog.at_level("INFO", "jlora.serve"):
        engine.start(lambda done, total: progress.append((done, total)))
    total = progress[-1][1]
    assert progress == [(done, total) for done in range(total + 1)]
    assert f"warm-up 2 of {total}: prefill of 8 tokens over 8 positions" in caplog.messages
    prompts = [rng.integers(1, VOCAB, size).tolist() for size in (1, 3, 8, 9, 20)]
    requests = [(prompt, name) for prompt in prompts for name in ("a", "b", "c", None)]
    found = [engine.submit(prompt, GREEDY, lora=name) for prompt, name in requests]
    want = [numpy_greedy(manager.model, adapters.get(name), prompt, 6) for prompt, name in requests]
    assert [list(one.result(60).tokens) for one in found] == want
    assert len({tuple(one) for one in want}) > 10
    with pytest.raises(jlora.LoRAUsageError, match="tokenizer"):
        engine.submit("text")
    assert {name: lora.info.rank for name, lora in engine.list_loras().items()} == {"a": 2, "b": 2, "c": 2}
    threads = {thread for thread in set(threading.enumerate()) - before if thread.name.startswith("jlora-serve")}
    assert len(threads) == 2

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
    assert manager.unwrap() is not None  # raises if a version is still held


def test_close_with_a_timeout_ends_running_and_waiting_requests():
    engine, _ = make_engine(Recurrent(nnx.Rngs(0), blocks=1), max_num_seqs=1, max_num_batched_tokens=32)
    engine.start()
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    requests = [engine.submit([1, 2], params) for _ in range(1000)]
    until(lambda: engine.stats().running)
    assert engine.close(0) is False
    whole = 0
    for one in requests:
        with contextlib.suppress(EngineClosedError):
            assert len(one.result(10).tokens) == 30
            whole += 1
    assert whole < 1000
    with pytest.raises(EngineClosedError, match="before the request ended"):
        requests[-1].result(10)


def test_failed_engine_refuses_requests_with_the_error():
    engine, manager = make_engine(Recurrent(nnx.Rngs(0), blocks=1), max_num_seqs=1, max_num_batched_tokens=32)
    engine.start()

    def fail(*args, **options):
        raise RuntimeError("no memory for another cache")

    manager.list_adapters = fail
    generation = engine.submit([1, 2], GREEDY)
    with pytest.raises(jlora.LoRAError, match="no memory"):
        generation.result(60)
    until(lambda: not engine.ready)
    with pytest.raises(EngineClosedError, match="no memory"):
        engine.submit([1, 2], GREEDY)
    engine.close(10)


class NoPositions(Recurrent):
    def init_cache(self, batch, capacity):
        return {"state": jnp.zeros((batch, WIDTH))}


def test_unservable_models_and_options_are_refused():
    model = Recurrent(nnx.Rngs(0))
    config = jlora.LoRAConfig(max_loras=1, max_lora_rank=2)
    manager = jlora.LoRAManager(model, config)
    for wrong, its, options, message in (
        (Recurrent(nnx.Rngs(0)), manager, {}, "another model"),
        (model, manager, {"max_model_len": 33}, "max_model_len=33"),
        (model, manager, {"max_num_seqs": 0}, "max_num_seqs"),
        (NoPositions(nnx.Rngs(0)), None, {}, "and one of positions"),
        (Block(nnx.Rngs(0)), None, {}, "config"),
    ):
        with pytest.raises(jlora.LoRAUsageError, match=message):
            Engine(wrong, its or jlora.LoRAManager(wrong, config), options=EngineOptions(**options))


def test_decode_updates_the_cache_in_place():
    """The engine's memory beside the weights does not grow while it serves: each step reuses the cache's buffers."""
    engine, _ = make_engine(max_num_seqs=3)
    engine.start()
    shape = jax.eval_shape(lambda: Recurrent(nnx.Rngs(0)).init_cache(3, CONTEXT))["memory"].shape
    caches = {array.unsafe_buffer_pointer() for array in jax.live_arrays() if array.shape == shape}
    assert len(caches) == 1
    for one in [engine.submit([1, 2], SamplingParams(max_tokens=20, ignore_eos=True)) for _ in range(6)]:
        one.result(60)
    assert {array.unsafe_buffer_pointer() for array in jax.live_arrays() if array.shape == shape} == caches
    assert engine.close(60)


def test_processed_log_probabilities_are_those_of_the_draw():
    prompt, drawn = [3, 1, 2], SamplingParams(temperature=2.0, top_k=4, seed=5, logprobs=VOCAB, max_tokens=4)
    greedy, found = replace(GREEDY, logprobs=2, max_tokens=4), {}
    for mode in ("raw_logprobs", "processed_logprobs"):
        engine, _ = make_engine(logprobs_mode=mode)
        engine.start()
        answers = [engine.submit(prompt, params) for params in (greedy, drawn)]
        found[mode] = [one.result(60) for one in answers]
        engine.close()
    raw, processed = found.values()
    assert raw[0] == processed[0]
    assert raw[1].tokens == processed[1].tokens
    for before, after in zip(raw[1].logprobs, processed[1].logprobs, strict=True):
        kept = before.top[:4]
        scores = np.array([value for _, value in kept]) / 2
        scores -= np.log(np.exp(scores).sum())
        assert [token for token, _ in after.top[:4]] == [token for token, _ in kept]
        np.testing.assert_allclose([value for _, value in after.top[:4]], scores, atol=1e-5)
        assert after.logprob == pytest.approx(scores[[token for token, _ in kept].index(after.token)], abs=1e-5)
        assert all(value == -np.inf for _, value in after.top[4:])
    with pytest.raises(jlora.LoRAUsageError, match="logprobs_mode must be 'raw_logprobs' or 'processed_logprobs'"):
        make_engine(logprobs_mode="raw")
