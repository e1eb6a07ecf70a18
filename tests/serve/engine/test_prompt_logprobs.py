"""Log probabilities of prompts, by blocks of each chunk, compared with whole forwards of merged weights."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jlora
from jlora.models import Decoder, DecoderConfig
from jlora.serve import Engine, EngineOptions, SamplingParams
from jlora.serve.engine.steps import Steps
from tests.models.checkpoints import SIZES
from tests.serve.conftest import ADAPTERS, compilations

CALL = (9, 20, 3)
SIZES_OF = SIZES | {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
VOCAB, WIDTH = SIZES["vocab_size"], SIZES["hidden_size"]
HEAD, QUERY = "lm_head", "model.layers.1.self_attn.q_proj"
SHAPES = {HEAD: (WIDTH, VOCAB), QUERY: (WIDTH, WIDTH)}
TOP = 3


def made(name, *modules, **fields):
    """Return an adapter of rank 3 whose deltas are as large as the weights, with a saved head if so named."""
    rng, found = np.random.default_rng(len(name)), {}
    for module in modules:
        k, n = SHAPES[module]
        a, b = rng.normal(size=(3, k)) * WIDTH**-0.5, rng.normal(size=(n, 3)) * 0.5
        found[module] = jlora.ModuleLoRA(a=a.astype("f4"), b=b.astype("f4"), alpha=3, scaling=1.0)
    weight = rng.normal(size=(VOCAB, WIDTH)) * WIDTH**-0.5
    heads = {HEAD: jlora.SavedHead(weight.astype("f4"))} if name == "saved" else {}
    return jlora.Adapter(name=name, modules=found, heads=heads, **fields)


def merged(config, adapter):
    """Return an untied model with the adapter in its weights."""
    base = Decoder(config, rngs=nnx.Rngs(0))
    model = Decoder(dataclasses.replace(config, tie_word_embeddings=False), rngs=nnx.Rngs(0))
    nnx.update(model, nnx.state(base))
    if config.tie_word_embeddings:
        model.lm_head.kernel[...] = base.model.embed_tokens.embedding[...].T
    layers = {HEAD: model.lm_head.kernel, QUERY: model.model.layers[1].self_attn.qkv_proj.kernel}
    for name, module in ({} if adapter is None else {**adapter.modules, **adapter.heads}).items():
        kernel = layers[name]
        if isinstance(module, jlora.SavedHead):
            kernel[...] = jnp.asarray(module.weight.T)
        else:  # the queries are the first columns of their projection
            delta = (np.asarray(module.b, np.float64) @ np.asarray(module.a, np.float64)).T
            kernel[...] = kernel[...].at[:, : delta.shape[1]].add(delta.astype("f4"))
    return model


@jax.jit
def _whole(model, tokens):
    return jax.nn.log_softmax(model(tokens)[0])


class World:
    """An engine over a small model, and the log probabilities of whole forwards."""

    def __init__(self, kind, chunk, longest):
        tied, adapters, config = KINDS[kind]
        self.config = DecoderConfig(**SIZES_OF, tie_word_embeddings=tied)
        self.adapters = {None: None} | {one.name: one for one in adapters}
        manager = jlora.LoRAManager(
            Decoder(self.config, rngs=nnx.Rngs(0)), jlora.LoRAConfig(max_loras=4, max_lora_rank=4, **config)
        )
        for one in adapters:
            manager.add_adapter(one)
        options = EngineOptions(max_num_seqs=4, max_num_batched_tokens=chunk, max_model_len=longest)
        self.engine = Engine(manager.model, manager, options=options)
        self.models = {name: merged(self.config, one) for name, one in self.adapters.items()}

    def want(self, name, prompt):
        """Return log probabilities [L, V] of the token after each of a prompt."""
        padded = np.zeros((1, 200), np.int32)
        padded[0, : len(prompt)] = prompt
        own = np.array(_whole(self.models[name], padded))[: len(prompt)]
        calls = None if name is None else self.adapters[name].invocation_tokens
        if calls:
            first = min(len(prompt), jlora.active_from(prompt, calls))
            own[:first] = np.asarray(_whole(self.models[None], padded))[:first]
        return own

    def check(self, name, prompt, found):
        """Compare the report of a prompt with `want`."""
        want = self.want(name, prompt)
        first, *others = found
        assert first is None
        assert [one.token for one in others] == prompt[1:]
        for one, token, row in zip(others, prompt[1:], want, strict=False):
            np.testing.assert_allclose(one.logprob, row[token], atol=1e-4)
            np.testing.assert_allclose([value for _, value in one.top], np.sort(row)[::-1][:TOP], atol=1e-4)
            np.testing.assert_allclose([row[token] for token, _ in one.top], np.sort(row)[::-1][:TOP], atol=1e-4)
            assert np.sum(row > row[token] + 1e-4) < one.rank <= np.sum(row > row[token] - 1e-4)


def prompt_of(length, *places):
    prompt = np.random.default_rng(length).integers(30, 60, length)
    for place in places if length > 4 else ():
        prompt[place : place + len(CALL)] = CALL
    return prompt.tolist()


KINDS = {
    "untied, with a saved head": (
        False,
        [made("on the head", HEAD), made("both", HEAD, QUERY), made("saved", QUERY)],
        {"saved_heads": {HEAD: VOCAB}},
    ),
    "tied": (True, [made("on the head", HEAD), made("both", HEAD, QUERY)], {}),
    "activated": (
        False,
        [made("called", HEAD, invocation_tokens=CALL), made("both", HEAD, QUERY)],
        {"activated": True},
    ),
}


@pytest.mark.parametrize(
    ("kind", "chunk", "longest"),
    [
        ("untied, with a saved head", 16, 32),
        pytest.param("tied", 150, 200, marks=pytest.mark.slow),  # blocks of 128, which 150 is no multiple of
        pytest.param("activated", 20, 60, marks=pytest.mark.slow),
    ],
)
def test_adapters_of_the_head_in_every_chunk(kind, chunk, longest):
    world = World(kind, chunk, longest)
    world.engine.start()
    before = compilations(world.engine)
    lengths = {1, 7, chunk, chunk + 1, longest - 1}
    asked = [(name, prompt_of(length, length // 2)) for length in lengths for name in world.adapters]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=TOP)
    running = [world.engine.submit(prompt, params, lora=name) for name, prompt in asked]
    for (name, prompt), generation in zip(asked, running, strict=True):
        world.check(name, prompt, generation.result(60).prompt_logprobs)
    assert compilations(world.engine) == before
    assert world.engine.close(60)


def test_the_prompt_alone_or_before_its_completion(world):
    """`max_tokens=0` ends after the prompt, which may fill the context; others get both reports, in any company."""
    prompt, name = world.engine.encode("planet="), next(iter(ADAPTERS))
    asked = [SamplingParams(temperature=0, max_tokens=count, prompt_logprobs=2, logprobs=2) for count in (0, 1, 6)]
    asked += [SamplingParams(temperature=0, max_tokens=6, prompt_logprobs=0, logprobs=2), SamplingParams(max_tokens=3)]
    generations = [world.engine.submit(prompt, params, lora=name) for params in asked]
    alone, one, six, own, none = (generation.result(60) for generation in generations)
    assert (alone.tokens, alone.text, alone.logprobs, alone.finish_reason) == ((), "", (), "length")
    assert alone.prompt_logprobs == one.prompt_logprobs == six.prompt_logprobs
    assert len(alone.prompt_logprobs) == alone.prompt_tokens == len(prompt)
    assert own.prompt_logprobs == (None, *(dataclasses.replace(each, top=()) for each in alone.prompt_logprobs[1:]))
    assert [each.offset for each in alone.prompt_logprobs[1:]] == [0, 1, 2, 3, 4, 5, 6]  # <bos> has no text
    assert none.prompt_logprobs == ()
    assert six.tokens == own.tokens
    assert one.logprobs[0].rank == 1
    # The next token as a part of the prompt has the report that it had as the first of the completion.
    longer = world.engine.submit([*prompt, one.tokens[0]], asked[0], lora=name).result(60).prompt_logprobs[-1]
    np.testing.assert_allclose(longer.logprob, one.logprobs[0].logprob, atol=1e-4)
    assert longer.rank == 1
    whole = world.engine.submit([3] * world.engine.max_model_len, asked[0]).result(60)
    assert len(whole.prompt_logprobs) == world.engine.max_model_len
    pieces = list(world.engine.submit(prompt, asked[2], lora=name))
    assert [piece.prompt_logprobs for piece in pieces] == [six.prompt_logprobs, *[()] * (len(pieces) - 1)]


def test_wrong_numbers_are_refused(world):
    wrong = [({"prompt_logprobs": 21}, "prompt_logprobs"), ({"prompt_logprobs": -1}, "prompt_logprobs")]
    for fields, name in [*wrong, ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": 0, "logprobs": 1}, "max_tokens")]:
        with pytest.raises(jlora.LoRAUsageError, match=f"^{name} must be an integer from"):
            world.engine.submit([1, 2], SamplingParams(**fields))


class Closed(nnx.Module):
    """A model with `extend` alone."""

    def __init__(self, config):
        self.inner, self.config = Decoder(config, rngs=nnx.Rngs(0)), config

    def init_cache(self, *sizes):
        return self.inner.init_cache(*sizes)

    def extend(self, *args, **extent):
        return self.inner.extend(*args, **extent)


def test_model_without_hidden_states_is_refused_by_name():
    model = Closed(DecoderConfig(**SIZES_OF))
    manager = jlora.LoRAManager(model, jlora.LoRAConfig(max_loras=1, max_lora_rank=1))
    options = EngineOptions(max_num_seqs=1, max_num_batched_tokens=16, max_model_len=16)
    engine = Engine(model, manager, options=options)
    with pytest.raises(jlora.LoRAUsageError, match=r"prompt_logprobs.*hidden_states and logits.*Closed has only"):
        engine.submit([1, 2], SamplingParams(prompt_logprobs=0))


def test_logits_of_a_prompt_are_never_held():
    """Compiled for a prompt of 1024 tokens, no step has room for logits of all of them."""
    length, vocab = 1024, 2048
    sizes = {"vocab_size": vocab, "max_position_embeddings": length, "num_hidden_layers": 1}
    model = Decoder(DecoderConfig(**(SIZES_OF | sizes)), rngs=nnx.Rngs(0))
    manager = jlora.LoRAManager(model, jlora.LoRAConfig(max_loras=1, max_lora_rank=2))
    steps = Steps(model, manager, rows=1, max_model_len=length, chunk=length)
    steps.reset()
    with manager.prepare([None]) as batch:
        hidden = jax.ShapeDtypeStruct((1, length, WIDTH), jnp.float32)
        tokens = jax.ShapeDtypeStruct((128,), jnp.int32)
        memory = steps._score.lower(model, batch, hidden, np.int32(0), tokens).compile().memory_analysis()
    assert memory.temp_size_in_bytes < length * vocab * 4 / 2
