"""The decode kernel: values when interpreted, lowering for a GPU, and use by a decoder on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jlora.models import Decoder, DecoderConfig, attention, prefill_attention
from jlora.models import decode_attention as kernel
from jlora.models.decode_attention import decode_attention
from tests.models.test_attention import expected
from tests.pallas.lowering import lowered_text
from tests.pallas.running import interpret_of

pytestmark = pytest.mark.device("gpu")


@pytest.mark.parametrize(
    ("heads", "groups", "repeats", "sinks"), [(8, 2, 1, True), (3, 3, 48, False), (4, 1, 64, True)]
)
def test_values(rng, heads, groups, repeats, sinks):
    """The more rows and groups there are, the fewer programs share the keys of a sequence: three, one and two here."""
    rows, capacity, width = 4 * repeats, 300, 16
    shapes = (rows, heads, width), (rows, capacity, groups, width), (rows, capacity, groups, width)
    q, keys, values = (rng.normal(size=shape).astype(jnp.bfloat16) for shape in shapes)
    begin, end = np.array([0, 0, 70, 255] * repeats, np.int32), np.array([1, 300, 129, 256] * repeats, np.int32)
    dead = (np.arange(capacity) < begin[:, None]) | (np.arange(capacity) >= end[:, None])
    keys[dead], values[dead] = jnp.nan, jnp.nan  # never read
    given = rng.normal(size=heads).astype(jnp.bfloat16) if sinks else None
    operands = jax.device_put((q, keys, values, begin, end, given))
    found = decode_attention(*operands, interpret=interpret_of("triton"))
    want = expected(q[:, None], keys, values, ~dead[:, None], given)[:, 0]
    np.testing.assert_allclose(np.asarray(found, np.float64), want, atol=0.02)
    assert found.dtype == jnp.bfloat16


def test_unsupported_reason_names_the_limit():
    reason = kernel.unsupported_reason
    assert reason(jnp.bfloat16, 64) is None
    assert "float32" in reason(jnp.float32, 64)
    assert "48" in reason(jnp.bfloat16, 48)


CONFIG = DecoderConfig(
    vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, sliding_windows=(None, 9), sinks=True, max_position_embeddings=256,
)  # fmt: skip


@pytest.mark.slow
def test_a_decoder_on_a_gpu_decodes_with_the_kernel(monkeypatch):
    model = Decoder(CONFIG, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    cache = model.init_cache(3, 256)
    tokens = jax.random.randint(jax.random.key(0), (3, 40), 0, 32)
    positions = jnp.broadcast_to(jnp.arange(40), (3, 40))
    logits, cache = model.extend(tokens, positions, cache, jnp.array([39, 20, 3]))
    args = logits.argmax(-1)[:, None], jnp.array([[40], [21], [4]]), cache, jnp.zeros(3, jnp.int32)
    want, _ = model.extend(*args, extent=64)
    assert not model.reads_what_is_live
    calls = []

    def interpreted(*operands):
        calls.append(operands)
        return decode_attention(*operands, interpret=interpret_of("triton"))

    monkeypatch.setattr(attention, "own_backend", lambda: "triton")
    monkeypatch.setattr(prefill_attention, "kernel_of", lambda *_: None)  # of a library that this machine lacks
    monkeypatch.setattr(kernel, "decode_attention", interpreted)
    assert model.reads_what_is_live
    found, _ = model.extend(*args, extent=64)
    assert len(calls) == 2
    np.testing.assert_allclose(found, want, atol=0.02 * np.abs(want).max())
    model.extend(tokens, positions, cache, jnp.array([39, 20, 3]))  # several queries a sequence: not for this kernel
    assert len(calls) == 2


def test_it_lowers_for_a_gpu():
    shapes = [(64, 32, 128), (64, 8192, 8, 128), (64, 8192, 8, 128)]
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    args += [jax.ShapeDtypeStruct((64,), jnp.int32)] * 2
    lowered = lowered_text(decode_attention, args, "cuda")
    assert "decode_attention" in lowered
    assert "triton" in lowered
    assert lowered.count("stablehlo.transpose") == 0  # no transpose before the reads
