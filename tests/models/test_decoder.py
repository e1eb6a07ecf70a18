"""The decoder compared with committed values of transformers, and with its uncached forward."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jlora.models import Decoder, DecoderConfig, ModelError, MoEConfig, from_pretrained
from tests.models import goldens

pytestmark = pytest.mark.device

TINY = DecoderConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
)

EXPERTS = MoEConfig(
    num_experts=5,
    experts_per_token=2,
    intermediate_size=10,
    layers=(True, True),
    router="chosen_softmax",
    router_name="router",
    router_bias=True,
    expert_bias=True,
    shared_size=6,
)


@jax.jit
def forward(model, tokens):
    return model(tokens)


FEW = ["llama-biases-llama3", "qwen2-mixed-yarn", "gpt-oss-square", "gemma3-tied"]


@goldens.each
def test_logits_equal_transformers(golden, name):
    expected = goldens.expected(name)
    logits = forward(golden(name), expected["tokens"])
    assert logits.dtype == jnp.float32
    assert goldens.relative_error(logits, expected["logits"]) < goldens.TOLERANCE


@pytest.mark.parametrize("name", FEW)
def test_cached_logits_equal_uncached(golden, name):
    """Chunks of 12, 12, 1, 1, ... tokens through the cache give the logits of one uncached forward."""
    model, tokens = golden(name), goldens.expected(name)["tokens"]
    want = forward(model, tokens)
    extend = jax.jit(lambda model, *args: model.extend(*args))
    cache = model.init_cache(2, 64)
    start = 0
    for size in (12, 12, *(1,) * 24):
        chunk = tokens[:, start : start + size]
        positions = np.broadcast_to(np.arange(start, start + size), chunk.shape)
        logits, cache = extend(model, chunk, positions, cache, np.full(2, size - 1))
        start += size
        assert goldens.relative_error(logits, want[:, start - 1]) < 1e-5


def test_window_hides_earlier_tokens():
    """Through one layer, a changed token reaches exactly the `window` positions from its own on."""
    config = dataclasses.replace(TINY, num_hidden_layers=1, sliding_windows=(3,))
    model = Decoder(config, rngs=nnx.Rngs(0))
    tokens = np.arange(10, dtype=np.int32)[None]
    changed = tokens.copy()
    changed[0, 4] = 31
    difference = np.abs(forward(model, tokens) - forward(model, changed)).max(axis=(0, 2))
    assert np.flatnonzero(difference).tolist() == [4, 5, 6]


def test_embedding_scale_is_rounded_to_bfloat16():
    """Gemma's factor of 3072 features is 55.5 in bfloat16, and 55.43 in float32."""
    # Without layers, and with an epsilon that makes the last norm a multiplication by 2**-20.
    config = dataclasses.replace(
        TINY, num_hidden_layers=0, num_labels=0, rms_norm_eps=2.0**40, embedding_scale=3072**0.5
    )
    model = Decoder(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    table = np.asarray(model.model.embed_tokens.embedding[...])
    want = (table.astype(np.float32) * 55.5).astype(table.dtype).astype(np.float32) * 2.0**-20
    found = np.asarray(forward(model, np.arange(32, dtype=np.int32)[None])[0]).astype(np.float32)
    np.testing.assert_array_equal(found, want)


def test_bfloat16_stays_bfloat16_with_float32_logits():
    config = dataclasses.replace(TINY, tie_word_embeddings=True, moe=EXPERTS)
    model = Decoder(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    assert {param.dtype for _, param in nnx.to_flat_state(nnx.state(model))} == {jnp.dtype(jnp.bfloat16)}
    tokens = np.arange(12, dtype=np.int32).reshape(2, 6)
    logits = forward(model, tokens)
    positions = np.tile(np.arange(6), (2, 1))
    hidden = jax.eval_shape(lambda model, tokens: model.model(tokens, positions, None)[0], model, tokens)
    assert (hidden.dtype, logits.dtype) == (jnp.bfloat16, jnp.float32)


@pytest.mark.parametrize("name", FEW)
def test_bfloat16_is_near_float32(golden, name):
    """Rounding to 8 bits in some ten places adds up to 1-2.3% of the logits, root mean square.

    A rounded score may choose another expert and change a token much, so the test uses the median.
    """
    expected = goldens.expected(name)
    model = from_pretrained(goldens.FOLDER / name, dtype=jnp.bfloat16)
    error = np.asarray(forward(model, expected["tokens"])) - expected["logits"]
    squares = np.mean(error**2, axis=-1) / np.mean(expected["logits"] ** 2)
    assert np.sqrt(np.median(squares) if name in goldens.EXPERTS else np.mean(squares)) < 0.035


@pytest.mark.parametrize("name", ["gpt-oss-square", "qwen2-moe-shared"])
def test_gradient_is_finite_and_reaches_every_weight(golden, name):
    model = golden(name)
    tokens = goldens.expected(name)["tokens"]

    def loss(model):
        return -jnp.mean(jax.nn.log_softmax(model(tokens)[:, :-1])[:, :, 0])

    for path, param in nnx.to_flat_state(nnx.state(jax.jit(jax.grad(loss))(model))):
        assert np.isfinite(param[...]).all(), path
        assert np.abs(param[...]).max() > 0, path


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("moe", dataclasses.replace(EXPERTS, layers=(True,)), "moe.layers has 1 entries for 2 layers"),
        ("num_key_value_heads", 3, "num_key_value_heads"),
        ("head_dim", 7, "head_dim"),
        ("sliding_windows", (3,), "1 ent"),
    ],
)
def test_impossible_shapes_are_refused(field, value, message):
    with pytest.raises(ModelError, match=message):
        dataclasses.replace(TINY, **{field: value})
