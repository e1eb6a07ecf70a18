"""int8 factors in the TPU kernel, in interpret mode, against the oracle with dequantized factors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jlora.pallas.moe import plan_experts
from jlora.pallas.mosaic_tpu import lora as mosaic_tpu
from jlora.pallas.plan import make_plan
from tests import oracle
from tests.pallas.mosaic_tpu.test_lora import same_bits
from tests.pallas.running import interpret_of

pytestmark = pytest.mark.device("tpu")

INTERPRET = interpret_of("mosaic_tpu")


def factors(rng, groups, k, slices, rank):
    """Return int8 a and b and ranks [G, n, 1 + R]. Past the ranks, factors are garbage and scales NaN."""
    n, columns = len(slices), sum(slices)
    true = rng.integers(0, rank + 1, (groups, n))
    true[0], true[-1] = 0, rank
    a, b = rng.integers(-127, 128, (groups, n, rank, k)), rng.integers(-127, 128, (groups, rank, columns))
    scales = rng.uniform(0.1, 1, (groups, n, rank)) / (127 * 127 * np.sqrt(k))
    scales = np.where(np.arange(rank) < true[..., None], scales, np.nan)
    ranks = np.concatenate([true[..., None], scales], axis=2)
    return jnp.asarray(a, jnp.int8), jnp.asarray(b, jnp.int8), jnp.asarray(ranks, jnp.float32)


def expected(base, x, ids, a, b, ranks, slices, row_scales):
    """The oracle with the scales in a, zero past the ranks."""
    rank, ranks = a.shape[2], np.asarray(ranks, np.float64)
    scales = np.where(np.arange(rank) < ranks[..., :1], ranks[..., 1:], 0)
    delta = oracle.lora_delta(x, ids, scales[..., None] * np.asarray(a, np.float64), b, slices)
    return np.asarray(base, np.float64) + delta * np.asarray(row_scales, np.float64)[:, None]


def run(*operands, plan, slices, x_rows=None):
    """Run the kernel unoptimised, to compile faster."""

    def call(base, x, a, b, ranks, plan):
        return mosaic_tpu.add_lora(
            base, x, a, b, plan, slice_sizes=slices, ranks=ranks, x_rows=x_rows, interpret=INTERPRET
        )

    return np.asarray(jax.jit(call, compiler_options={"xla_backend_optimization_level": 0})(*operands, plan))


def close(out, want, tolerance):
    return np.abs(out.astype(np.float64) - want).max() <= tolerance * np.abs(want).max()


@pytest.mark.parametrize(
    ("rows", "k", "slices", "rank", "groups", "dtype"),
    [
        pytest.param(37, 45, (40, 13, 7), 8, 6, "float32", marks=pytest.mark.slow),
        (21, 256, (140, 32), 16, 11, "bfloat16"),
        pytest.param(19, 130, (140,), 4, 3, "float32", marks=pytest.mark.slow),
        pytest.param(9, 33, (17,), 1, 3, "float32", marks=pytest.mark.slow),
        pytest.param(50, 200, (72, 60), 64, 5, "float32", marks=pytest.mark.slow),
    ],
)
def test_rows_of_slots(rows, k, slices, rank, groups, dtype, rng):
    a, b, ranks = factors(rng, groups, k, slices, rank)
    base, x = (jnp.asarray(rng.normal(size=(rows, size)), dtype) for size in (sum(slices), k))
    ids, row_scales = rng.integers(-1, groups + 1, rows), rng.uniform(0.5, 2, rows).astype(np.float32)
    plan = make_plan(jnp.asarray(ids), num_groups=groups).scaled(jnp.asarray(row_scales))
    out = run(base, x, a, b, ranks, plan=plan, slices=slices)
    assert close(out, expected(base, x, ids, a, b, ranks, slices, row_scales), 1e-4 if dtype == "float32" else 5e-3)
    owned = (ids >= 0) & (ids < groups)
    idle = np.repeat(~owned[:, None] | (np.asarray(ranks)[np.where(owned, ids, 0), :, 0] == 0), slices, axis=1)
    assert idle.any()
    assert same_bits(out[idle], np.asarray(base)[idle])


@pytest.mark.slow
def test_rows_of_experts(rng):
    tokens, top_k, slots, experts, rank, k, slices = 13, 4, 10, 27, 16, 33, (20, 12)
    a, b, ranks = factors(rng, slots * experts, k, slices, rank)
    pairs, token = tokens * top_k, np.repeat(np.arange(tokens), top_k)
    x, base = rng.normal(size=(tokens, k)).astype(np.float32), rng.normal(size=(pairs, 32)).astype(np.float32)
    slot, expert = rng.integers(-1, slots, tokens), rng.permuted(np.tile(np.arange(experts), (tokens, 1)), axis=1)
    expert = expert[:, :top_k].ravel()
    plan = plan_experts(*map(jnp.asarray, (slot, token, expert)), num_slots=slots, num_experts=experts)
    out = run(base, x, a, b, ranks, plan=plan, slices=slices, x_rows=jnp.asarray(token))
    ids = np.where(slot[token] < 0, -1, slot[token] * experts + expert)
    assert close(out, expected(base, x[token], ids, a, b, ranks, slices, np.ones(pairs)), 1e-4)
