"""Rows of experts through the TPU kernel, in interpret mode, against the oracle: groups by the hundred, most empty."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jlora import ops
from jlora.errors import LoRAError
from jlora.pallas.mosaic_tpu import lora as mosaic_tpu
from tests import oracle
from tests.pallas.lowering import lowered_text
from tests.pallas.mosaic_tpu.test_lora import TOLERANCE, same_bits
from tests.pallas.running import interpret_of
from tests.pallas.scales import with_scales

pytestmark = pytest.mark.device("tpu")

INTERPRET = interpret_of("mosaic_tpu")


def batch(seed, tokens, k, slots, experts, rank, n_in, sizes, dtype="float32"):
    """A routed batch in the order of tokens, and factors of all groups.

    Expert 2 is chosen by all tokens and half the experts by none; slot 1 is of rank 0 and has half of the tokens that
    have a slot; a fifth of the tokens has none.

    Returns a dict: x [T, K], base [T, k, N], a, b, ranks, slot [T], expert [T, k], weights [T, k].
    """
    rng = np.random.default_rng(seed)
    used = np.concatenate([[2], 3 + rng.permutation(experts - 3)[: max(experts // 2, k)]])
    expert = np.stack([[2, *rng.permutation(used[1:])[: k - 1]] for _ in range(tokens)])
    expert = rng.permuted(expert, axis=1)
    slot = np.where(rng.random(tokens) < 0.5, 1, rng.integers(0, slots, tokens))
    slot = np.where(rng.random(tokens) < 0.2, rng.choice([-1, slots, 9999], tokens), slot)
    n, groups = len(sizes), slots * experts
    ranks = rng.integers(0, rank + 1, (groups, n))
    ranks[2 * experts + 2 :: 7] = 0
    keep = np.arange(rank) < ranks[..., None]
    a = rng.normal(size=(groups, n, rank, n_in)) / np.sqrt(n_in) * keep[..., None]
    b = [rng.normal(size=(groups, rank, s)) * keep[:, i, :, None] for i, s in enumerate(sizes)]
    floats = {
        "x": rng.normal(size=(tokens, n_in)), "base": rng.normal(size=(tokens, k, sum(sizes))), "a": a,
        "b": np.concatenate(b, axis=2), "weights": rng.uniform(size=(tokens, k)),
    }  # fmt: skip
    ints = {"ranks": ranks, "slot": slot, "expert": expert}
    arrays = {name: jnp.asarray(v, dtype) for name, v in floats.items()}
    return arrays | {name: jnp.asarray(v, jnp.int32) for name, v in ints.items()} | {"sizes": sizes, "slots": slots}


def groups_of(d):
    """[T, k]: the group of every pair, past all groups where it has none."""
    slot, experts = np.asarray(d["slot"])[:, None], d["a"].shape[0] // d["slots"]
    inside = (slot >= 0) & (slot < d["slots"])
    return np.where(inside, slot * experts + np.asarray(d["expert"]), d["a"].shape[0])


def rows_and_plan(d):
    """Rows sorted by expert, as grouped products have them: their token, [T, k] where a token's are, their plan."""
    experts = d["a"].shape[0] // d["slots"]
    flat = d["expert"].ravel()
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    token = order // d["expert"].shape[1]
    rows = jnp.zeros(len(flat), jnp.int32).at[order].set(jnp.arange(len(flat), dtype=jnp.int32))
    plan = ops.plan_experts(d["slot"], token, flat[order], num_slots=d["slots"], num_experts=experts, tile_m=16)
    return order, token, rows.reshape(d["expert"].shape), plan


def run(d):
    """[T, k, N] through the kernel."""
    n = d["base"].shape[2]

    def call(base, x, a, b, ranks, slot, expert):
        pairs = d | {"slot": slot, "expert": expert}
        order, token, rows, plan = rows_and_plan(pairs)
        out = mosaic_tpu.add_lora(
            base.reshape(-1, n)[order], x, a, b, plan, slice_sizes=d["sizes"], ranks=with_scales(ranks), x_rows=token,
            interpret=INTERPRET,
        )  # fmt: skip
        return out[rows]

    # Unoptimised, since compiling is what takes the time.
    jitted = jax.jit(call, compiler_options={"xla_backend_optimization_level": 0})
    # By name, as they are given when it runs again: it would be compiled again for another way.
    names = ("base", "x", "a", "b", "ranks", "slot", "expert")
    return jitted, np.asarray(jitted(**{name: d[name] for name in names}))


def check(d):
    """Values of all pairs against the oracle; without a group, or of rank 0, bit by bit. Returns it, to run again."""
    jitted, out = run(d)
    _, k, n = d["base"].shape
    group, base = groups_of(d), np.asarray(d["base"])
    x = np.repeat(np.asarray(d["x"], np.float64), k, axis=0)
    want = oracle.add_lora(base.reshape(-1, n), x, group.ravel(), d["a"], d["b"], d["sizes"]).reshape(out.shape)
    error = np.abs(out.astype(np.float64) - want).max() / np.abs(want).max()
    assert error <= TOLERANCE[str(base.dtype)]
    ranks = np.concatenate([np.asarray(d["ranks"]), np.zeros((1, len(d["sizes"])))])
    idle = np.repeat(ranks[group] == 0, d["sizes"], axis=2)
    assert same_bits(out[idle], base[idle])
    assert idle.any()
    assert (out[~idle] != base[~idle]).mean() > 0.9
    return partial(jitted, a=d["a"], b=d["b"], ranks=d["ranks"]), out


MANY = [  # tokens, k, slots, experts, R, K, sizes, dtype: more groups than are compared with the rows
    (13, 4, 10, 27, 8, 33, (20, 12), "float32"),
    pytest.param(9, 8, 31, 17, 32, 130, (140,), "float32", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("tokens", "k", "slots", "experts", "rank", "n_in", "sizes", "dtype"), MANY)
def test_rows_of_experts(tokens, k, slots, experts, rank, n_in, sizes, dtype):
    d = batch(tokens, tokens, k, slots, experts, rank, n_in, sizes, dtype)
    again, out = check(d)
    names = ("base", "x", "slot", "expert")
    order = np.random.default_rng(0).permutation(tokens)
    assert same_bits(np.asarray(again(**{name: d[name][order] for name in names})), out[order])
    others = {name: d[name].at[1:].set(jnp.roll(d[name][1:], 1, axis=0)) for name in names}  # who else is there
    others["slot"] = others["slot"].at[tokens // 2 :].set(3)
    assert same_bits(np.asarray(again(**others))[0], out[0])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_of_experts_in_many_small_tiles(dtype, force_tiles):
    d = batch(1, 9, 4, 12, 25, 8, 256, (200, 56), dtype)
    force_tiles(tile_m=16, tile_k=128, tile_n=128, chunk=2)  # the second chunk has a single tile
    check(d)


@pytest.mark.slow
def test_rows_of_few_groups_that_share_a_place_in_a_bundle():
    """All rows of an expert may have groups that share a place, here slot * 8 + expert."""
    check(batch(2, 11, 3, 3, 8, 16, 20, (12,)))


def shapes(tokens, hidden, inner, experts, k, rank, slots=64):
    """The operands of a model's two products with 64 slots: base, x, a, b, slice_sizes."""
    struct, groups, pairs = jax.ShapeDtypeStruct, slots * experts, tokens * k
    products = [(tokens, hidden, (inner, inner)), (pairs, inner, (hidden,))]
    return [
        (*(struct(s, jnp.bfloat16) for s in
           ((pairs, sum(sizes)), (m, n_in), (groups, len(sizes), rank, n_in), (groups, rank, sum(sizes)))), sizes)
        for m, n_in, sizes in products
    ]  # fmt: skip


REAL = [(2048, 768, 128, 8), (2880, 2880, 32, 4), (4096, 14336, 8, 2)]  # hidden, intermediate, experts, top k


@pytest.mark.parametrize("model", REAL)
def test_real_sizes_are_supported(model):
    """Includes a size whose list of visits fits SMEM only in smaller bundles: 8192 tokens, 128 experts, rank 8."""
    for tokens in (1, 64, 2048, 8192):
        for rank in (8, 16, 32, 64, 128):
            for *operands, sizes in shapes(tokens, *model, rank):
                assert ops.unsupported_reason("mosaic_tpu", *operands, slice_sizes=sizes) is None


def lowered(backend, operands, sizes, pairs, groups):
    def run(base, x, a, b, ids, x_rows):
        plan = ops.make_plan(ids, num_groups=groups, tile_m=16)
        return ops.add_lora(base, x, a, b, plan, slice_sizes=sizes, x_rows=x_rows, backend=backend)

    ints = [jax.ShapeDtypeStruct((pairs,), jnp.int32)] * 2
    return lowered_text(run, (*operands, *ints), "tpu")


def test_auto_runs_the_kernel_or_logs_the_reason(default_device, caplog):
    default_device("TPU v5 lite", "tpu")
    (*operands, sizes), _ = shapes(2048, 2048, 768, 128, 8, 16)
    assert "tpu_custom_call" in lowered("auto", operands, sizes, 16384, 8192)
    assert not caplog.records
    (*operands, sizes), _ = shapes(8192, 2048, 768, 4096, 8, 16)  # 4096 experts
    assert "tpu_custom_call" not in lowered("auto", operands, sizes, 65536, 64 * 4096)
    (record,) = caplog.records
    reason = r"'mosaic_tpu' needs \d+ bytes of SMEM for the schedule of 65536 rows in 262144 groups, of 655360"
    with pytest.raises(LoRAError, match=reason):
        lowered("mosaic_tpu", operands, sizes, 65536, 64 * 4096)
    for part in ("auto", "x bfloat16[8192, 2048]", "a bfloat16[262144, 2, 16, 2048]", "bytes of SMEM"):
        assert part in record.getMessage()
