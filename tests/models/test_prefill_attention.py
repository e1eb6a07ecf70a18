"""Attention by a library: its two parts, splash attention interpreted and compiled for TPUs, and cuDNN's calls."""

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jlora._compat
from benchmarks.aot_tpu import operand_of
from jlora.models import Decoder, DecoderConfig, attention, prefill_attention
from jlora.models.prefill_attention import attend, cudnn, kernel_of, splash
from tests.models.test_mesh import make_mesh
from tests.pallas.lowering import for_gpu

NAN = float("nan")


def plain(q, k, v, causal, window, lengths, alone):
    """A kernel with what the libraries offer and no more.

    Masked values are multiplied by weights of 0, the results of no keys and of more than there are may be NaN.
    """
    repeats = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(rows.astype(jnp.float32), repeats, axis=2) for rows in (k, v))
    scores = jnp.einsum("blhd,bchd->bhlc", q.astype(jnp.float32), k) * q.shape[3] ** -0.5
    distance = jnp.arange(q.shape[1])[:, None] - jnp.arange(k.shape[1])[None]
    seen = (distance >= 0) | (not causal)
    seen &= distance < (window or 1 << 30)
    live = jnp.arange(k.shape[1])[None] < (k.shape[1] if lengths is None else lengths[:, None])
    scores = jnp.where(seen[None, None] & live[:, None, None], scores, -1e30)
    sums = jax.nn.logsumexp(scores, axis=-1)
    out = jnp.einsum("bhlc,bchd->blhd", jnp.exp(scores - sums[..., None]), v).astype(q.dtype)
    if lengths is not None:
        sums = jnp.where((lengths > 0)[:, None, None], sums, -jnp.inf)
        sums = jnp.where((lengths > k.shape[1])[:, None, None], NAN, sums)
        out = jnp.where((lengths > 0)[:, None, None, None], out, jnp.asarray(NAN, out.dtype))
    return out, None if alone else sums


def expected(q, k, v, start, count, past, sinks, window):
    """Compute attention of each sequence's real tokens in float64, each over the keys that it sees."""
    out = np.full(q.shape, np.nan)
    shared = q.shape[2] // k.shape[2]
    for b, h in np.ndindex(q.shape[0], q.shape[2]):
        old, new = int(start[b]), int(count[b])
        keys, values = (
            np.concatenate([np.zeros((old, q.shape[3])) if rows is None else rows[b, :old, h // shared], own])
            for rows, own in zip(past, (k[b, :new, h // shared], v[b, :new, h // shared]), strict=True)
        )
        for i in range(new):
            first = max(0, old + i + 1 - (window or 1 << 30), old if past[0] is None else 0)
            scores = keys[first : old + i + 1] @ q[b, i, h] / np.sqrt(q.shape[3])
            weights = np.exp(scores)
            total = weights.sum() + (0.0 if sinks is None else np.exp(float(sinks[h])))
            out[b, i, h] = weights @ values[first : old + i + 1] / total
    return out


def check(rng, kernel, window, sinks, capacity=40, heads=(4, 2), dtype="bfloat16"):
    """Compare three sequences with the oracle: a new one, one that fills the cache, and one with padding."""
    length, width = 12, 16

    def drawn(*shape):
        return rng.normal(size=shape).astype(jnp.dtype(dtype))

    q, k, v = (drawn(3, length, n, width) for n in (heads[0], heads[1], heads[1]))
    start, count = np.array([0, max(0, capacity - length), 5]), np.array([length, length, 7])
    real = np.arange(length) < count[:, None]
    k[~real], v[~real] = NAN, NAN
    past = None, None
    if capacity:
        past = drawn(3, capacity, heads[1], width), drawn(3, capacity, heads[1], width)
        unread = np.arange(capacity) >= start[:, None]
        unread |= np.arange(capacity) <= start[:, None] - (window or 1 << 30)
        past[0][unread], past[1][unread] = NAN, NAN
    given = drawn(heads[0]) if sinks else None
    step = jax.jit(partial(attend, window=window, kernel=kernel))
    found = step(q, k, v, start, count, past if capacity else None, given)
    assert found.dtype == q.dtype
    assert np.isfinite(np.asarray(found, np.float64)).all()  # padding too
    exact = jax.tree.map(lambda rows: np.asarray(rows, np.float64), (q, k, v, past, given))
    want = expected(*exact[:3], start, count, *exact[3:], window)
    np.testing.assert_allclose(np.asarray(found, np.float64)[real], want[real], atol=0.02)


WINDOWS = (None, 1, 12, 41)  # below, at and above the chunk's length and the capacity


@pytest.mark.parametrize("capacity", [0, 40])
@pytest.mark.parametrize("window", WINDOWS)
def test_values(rng, window, capacity):
    for sinks, heads, dtype in ((False, (4, 2), "bfloat16"), (True, (4, 4), "float16"), (True, (6, 1), "bfloat16")):
        check(rng, plain, window, sinks, capacity, heads, dtype)


@pytest.mark.parametrize(("window", "sinks", "capacity"), [(None, True, 40), (5, False, 140)])
def test_splash_attention(rng, window, sinks, capacity):
    check(rng, partial(splash, interpret=True), window, sinks, capacity)


@pytest.mark.slow
def test_splash_attention_has_a_gradient(rng):
    """A decoder that is trained attends to new tokens only. Padding gives and takes no gradient."""
    shapes = (2, 12, 4, 16), (2, 12, 2, 16), (2, 12, 2, 16), (2, 12, 4, 16)
    q, k, v, weights = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in shapes)
    start, count = jnp.zeros(2, jnp.int32), jnp.array([12, 7], jnp.int32)
    weights = jnp.where((np.arange(12) < np.array([[12], [7]]))[..., None, None], weights, jnp.bfloat16(0))

    def gradients(kernel):
        def total(q, k, v):
            out = attend(q, k, v, start, count, None, None, window=5, kernel=kernel)
            return (out.astype(jnp.float32) * weights.astype(jnp.float32)).sum()

        return [np.asarray(found, np.float32) for found in jax.grad(total, (0, 1, 2))(q, k, v)]

    for found, want in zip(gradients(partial(splash, interpret=True)), gradients(plain), strict=True):
        np.testing.assert_allclose(found, want, atol=0.02 * np.abs(want).max())


def test_a_gradient_through_two_parts_is_refused():
    q = jnp.ones((1, 2, 2, 8), jnp.bfloat16)
    start = jnp.zeros(1, jnp.int32)

    def total(q, past, sinks):
        return attend(q, q, q, start, None, past, sinks, window=None, kernel=plain).astype(jnp.float32).sum()

    assert np.isfinite(np.asarray(jax.jit(jax.grad(total))(q, None, None), np.float32)).all()
    for past, sinks in (((q, q), None), (None, jnp.ones(2, jnp.bfloat16))):
        with pytest.raises(NotImplementedError, match="no gradient"):
            jax.eval_shape(jax.grad(total), q, past, sinks)


def test_which_platforms_and_shapes_have_a_library(monkeypatch):
    def on(kind):
        with for_gpu(kind):
            return [kernel_of("gpu", dtype, width) for dtype, width in (("bfloat16", 128), ("float16", 256))]

    assert on("NVIDIA H100") == [cudnn, cudnn]
    assert on("NVIDIA A100") == [cudnn, None]  # heads wider than 128 since Hopper
    assert on("Tesla V100") == [None, None]
    assert on("gfx942") == [None, None]
    assert kernel_of("gpu", "float32", 128) is kernel_of("gpu", "bfloat16", 20) is kernel_of("cpu", "bfloat16", 128)
    assert kernel_of("tpu", "bfloat16", 128) is splash
    assert kernel_of("tpu", "float32", 128) is None


CONFIG = DecoderConfig(
    vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, sliding_windows=(None, 9), sinks=True, max_position_embeddings=64,
)  # fmt: skip


def answers(model, fill):
    """Return the logits of a call without a cache, and after each of two chunks with starts of their own."""
    tokens = jax.random.randint(jax.random.key(1), (4, 24), 0, 32)
    cache = jax.tree.map(lambda rows: jnp.full_like(rows, fill), model.init_cache(4, 48))
    found, starts = [jax.jit(lambda model, tokens: model(tokens))(model, tokens)], np.zeros(4, np.int32)
    for counts in (np.array([12, 1, 5, 12]), np.array([12, 12, 3, 1])):
        places = starts[:, None] + np.arange(12)
        given = jnp.take_along_axis(tokens, jnp.minimum(places, 23), 1), places, cache, counts - 1
        logits, cache = jax.jit(lambda model, *given: model.extend(*given, extent=40))(
            model, *map(jnp.asarray, given[:2]), cache, jnp.asarray(counts - 1)
        )
        found.append(logits)
        starts = starts + counts
    return [np.asarray(logits) for logits in found]


@pytest.fixture
def use(monkeypatch):
    """`use(kernel)` makes decoders run this kernel, and returns a list with an entry for each attention that does."""

    def start(kernel):
        runs = []

        def counted(*args):
            runs.append(args)
            return kernel(*args)

        monkeypatch.setattr(prefill_attention, "kernel_of", lambda *_: counted)
        return runs

    return start


@pytest.mark.slow
def test_a_decoder_gives_the_same_logits_by_a_library(use):
    model = Decoder(CONFIG, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    want = answers(model, 0)
    runs = use(plain)
    for found, expected in zip(answers(model, NAN), want, strict=True):
        np.testing.assert_allclose(found, expected, atol=0.02 * np.abs(expected).max())
    assert len(runs) == 4 + 4  # two parts with a cache, and one program for each chunk


@pytest.mark.mesh
def test_a_decoder_on_a_mesh_runs_the_library_on_each_shard(use):
    """With more shards than key heads, each shard has a copy of one."""
    one = Decoder(CONFIG, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    many = Decoder(CONFIG, dtype=jnp.bfloat16, rngs=nnx.Rngs(0), mesh=make_mesh({"tensor": 4}))
    runs = use(plain)
    want = answers(one, 0)
    assert {run[0].shape[::2] for run in runs} == {(4, 4)}
    runs.clear()
    for found, expected in zip(answers(many, NAN), want, strict=True):
        np.testing.assert_allclose(found, expected, atol=0.02 * np.abs(expected).max())
    assert {run[0].shape[::2] for run in runs} == {(4, 1)}


def abstract(batch, length, capacity, heads, groups, width, of=jax.ShapeDtypeStruct):
    """Return shapes of the arguments of `attend`."""
    q, k, past = ((batch, length, heads, width), (batch, length, groups, width), (batch, capacity, groups, width))
    rows = of((batch,), jnp.int32)
    return *(of(shape, jnp.bfloat16) for shape in (q, k, k)), rows, rows, (of(past, jnp.bfloat16),) * 2, None


@pytest.mark.parametrize(("window", "kinds"), [(None, ["CAUSAL", "PADDING"]), (100, ["CAUSAL", "PADDING_CAUSAL"])])
def test_cudnn_gets_no_scores_and_no_mask(monkeypatch, window, kinds):
    """JAX refuses to lower for cuDNN where it is not installed."""
    library = jlora._compat.jax._src.cudnn.fused_attention_stablehlo
    monkeypatch.setattr(library, "check_cudnn_version", lambda: 91000)
    traced = jax.jit(partial(attend, window=window, kernel=cudnn)).trace(*abstract(2, 512, 2048, 32, 8, 128))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in text.splitlines() if "__cudnn$fmhaSoftmax(" in line]
    assert len(calls) == text.count("__cudnn$fmha") == 2
    for call, kind in zip(calls, kinds, strict=True):
        assert f"mask_type\\22: \\22{kind}\\22" in call
        assert "x8x128xbf16>" in call  # grouped heads are not repeated
    assert "sliding_window_length\\22: 100" in calls[0] or window is None
    assert "512x2048" not in text


slow = pytest.mark.slow
# Chip, sequences, tokens, capacity, query heads, key heads, width, window.
SHAPES = [
    ("tpu7x", 2, 40, 4096, 8, 1, 64, 128),
    *(
        pytest.param(*shape, marks=slow)
        for shape in (("v5p", 1, 2048, 8192, 32, 8, 128, 4096), ("v6e", 1, 512, 1024, 8, 8, 256, None))
    ),
]


@pytest.mark.usefixtures("as_users_compile", "without_cache")
@pytest.mark.parametrize(("chip", "batch", "length", "capacity", "heads", "groups", "width", "window"), SHAPES)
def test_splash_attention_compiles_for_tpus(chip, batch, length, capacity, heads, groups, width, window):
    args = abstract(batch, length, capacity, heads, groups, width, of=partial(operand_of, chip))
    program = jax.jit(partial(attend, window=window, kernel=splash)).lower(*args).compile()
    text = program.as_text()
    assert text.count("conditional(") == 1  # the rows of the cache are read if a sequence has some
    assert "splash_mha_fwd_residuals" in text
    assert "splash_mha_fwd_segmented_residuals" in text
    assert program.memory_analysis().temp_size_in_bytes < 1 << 30


@pytest.mark.usefixtures("as_users_compile", "without_cache")
def test_a_decoder_has_a_gradient_on_tpus(monkeypatch):
    """Compiled ahead of time, by a kernel for each of two layers."""
    monkeypatch.setattr(attention, "platform", lambda: "tpu")
    of = partial(operand_of, "v6e")
    model = nnx.eval_shape(lambda: Decoder(replace(CONFIG, sinks=False), dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    graphdef, params = nnx.split(model)

    def loss(params, tokens):
        return jax.nn.log_softmax(nnx.merge(graphdef, params)(tokens)).mean()

    args = jax.tree.map(lambda leaf: of(leaf.shape, leaf.dtype), (params, jax.ShapeDtypeStruct((2, 256), "int32")))
    text = jax.jit(jax.grad(loss)).lower(*args).compile().as_text()
    for name in ("fwd", "dq", "dkv"):
        assert len(re.findall(rf"^ *%splash_mha_{name}_\S+ = .* custom-call\(", text, re.MULTILINE)) == 2


def test_scores_over_the_limit_are_computed_in_blocks(rng, monkeypatch):
    q, k, v = (
        jnp.asarray(rng.normal(size=(2, size, heads, 8)), jnp.float32) for size, heads in ((11, 4), (30, 2), (30, 2))
    )
    visible = jnp.asarray(rng.random((2, 11, 30)) < 0.5).at[:, :, 0].set(True).at[:, :, 29].set(False)
    k, v = k.at[:, 29].set(NAN), v.at[:, 29].set(NAN)
    sinks = jnp.asarray(rng.normal(size=4), jnp.float32)

    def run():
        return jax.jit(lambda *args: attention.attend(*args)).lower(q, k, v, visible, sinks).compile()

    want, whole = run()(q, k, v, visible, sinks), run().as_text()
    monkeypatch.setattr(attention, "_SCORES", 4 * 2 * 4 * 30 * 3)  # three queries of eleven
    np.testing.assert_allclose(run()(q, k, v, visible, sinks), want, rtol=1e-5, atol=1e-6)
    assert "while(" in run().as_text()
    assert "while(" not in whole
