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
from tests.pallas.test_moe import routed

pytestmark = pytest.mark.device("tpu")

INTERPRET = interpret_of("mosaic_tpu")


def check(tokens, k, slots, experts, rank, n_in, sizes, dtype="float32"):
    """Compare rows of experts with the oracle; without a group, or of rank 0, bit by bit.

    Return a function that gives the rows of all pairs for other tokens, and the operands of those.
    """
    d = routed(tokens, tokens, k, slots, experts, rank, n_in, sizes, dtype)
    a, b, ranks = d["a"] / n_in**0.5, d["b"], d["ranks"]
    base = jnp.zeros((tokens * k, sum(sizes)), dtype).at[d["order"]].set(d["base"])  # token by token

    def call(base, x, slot, expert, a, b, ranks):
        order = jnp.argsort(expert.ravel(), stable=True).astype(jnp.int32)
        token, options = order // k, {"num_slots": slots, "num_experts": experts, "tile_m": 16}
        plan = ops.plan_experts(slot, token, expert.ravel()[order], **options)
        options = {"slice_sizes": sizes, "ranks": with_scales(ranks), "x_rows": token, "interpret": INTERPRET}
        out = mosaic_tpu.add_lora(base.reshape(tokens * k, -1)[order], x, a, b, plan, **options)
        return jnp.zeros_like(out).at[order].set(out).reshape(tokens, k, -1)

    # Unoptimised, since compiling is what takes the time.
    run = partial(jax.jit(call, compiler_options={"xla_backend_optimization_level": 0}), a=a, b=b, ranks=ranks)
    given = {"base": base.reshape(tokens, k, -1), "x": d["x"], "slot": d["slot"], "expert": d["expert"]}
    out = np.asarray(run(**given)).reshape(tokens * k, -1)[d["order"]]
    want = oracle.add_lora(d["base"], d["x"][d["token"]], d["group"], a, b, sizes)
    assert np.abs(out.astype(np.float64) - want).max() <= TOLERANCE[dtype] * np.abs(want).max()
    of_rows = np.where(np.asarray(d["group"])[:, None] >= 0, np.asarray(ranks)[d["group"]], 0)
    idle = np.repeat(of_rows == 0, sizes, axis=1)
    assert idle.any()
    assert same_bits(out[idle], np.asarray(d["base"])[idle])
    return run, given


MANY = [  # tokens, k, slots, experts, R, K, sizes: more groups than are compared with the rows
    (13, 4, 10, 27, 8, 33, (20, 12)),
    (9, 8, 31, 17, 32, 130, (140,)),
]


@pytest.mark.parametrize(("tokens", "k", "slots", "experts", "rank", "n_in", "sizes"), MANY)
@pytest.mark.slow
def test_rows_of_experts(tokens, k, slots, experts, rank, n_in, sizes):
    run, given = check(tokens, k, slots, experts, rank, n_in, sizes)
    out, order = np.asarray(run(**given)), np.random.default_rng(0).permutation(tokens)
    assert same_bits(np.asarray(run(**{name: v[order] for name, v in given.items()})), out[order])
    others = {name: v.at[1:].set(jnp.roll(v[1:], 1, axis=0)) for name, v in given.items()}  # who else is there
    others["slot"] = others["slot"].at[tokens // 2 :].set(3)
    assert same_bits(np.asarray(run(**others))[0], out[0])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_of_experts_in_many_small_tiles(dtype, force_tiles):
    force_tiles(tile_m=16, tile_k=128, tile_n=128, chunk=2)  # the second chunk has a single tile
    check(9, 4, 12, 25, 8, 256, (200, 56), dtype)


@pytest.mark.slow
def test_rows_of_few_groups_that_share_a_place_in_a_bundle():
    """All rows of an expert may have groups that share a place, here slot * 8 + expert."""
    check(11, 3, 3, 8, 16, 20, (12,))


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
