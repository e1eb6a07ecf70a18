"""Every TPU kernel in Pallas' interpreter with its detector of races, and two faults that it detects.

The interpreter prints what it detects. Copies arrive when they are started ("eager"), or when they are waited for
("on_wait").
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jlora.pallas import xla
from jlora.pallas.moe import plan_experts
from jlora.pallas.mosaic_tpu import backward
from jlora.pallas.mosaic_tpu import lora as mosaic_tpu
from jlora.pallas.plan import make_plan

RACE, UNAWAITED = "RACE DETECTED", "non-zero count"
MODES = "on_wait", "eager"


@pytest.fixture(params=MODES)
def detector(request):
    return pltpu.InterpretParams(detect_races=True, dma_execution_mode=request.param)


@pytest.fixture(autouse=True)
def reset_interpreter():
    """Leave no semaphore to the next kernel."""
    yield
    pltpu.reset_tpu_interpret_mode_state()


def detected(capsys) -> list[str]:
    printed = capsys.readouterr().out
    return [fault for fault in (RACE, UNAWAITED) if fault in printed]


def doubled(x, interpret, wait: str):
    """Return 2 x, copied to VMEM, with a wait "before" or "after" the use or "never"."""

    def kernel(x, out, buffer, sem):
        copy = pltpu.make_async_copy(x, buffer, sem)
        copy.start()
        if wait == "before":
            copy.wait()
        out[...] = 2 * buffer[...]
        if wait == "after":
            copy.wait()

    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        in_specs=[pl.BlockSpec(memory_space=pltpu.HBM)],
        scratch_shapes=[pltpu.VMEM(x.shape, x.dtype), pltpu.SemaphoreType.DMA],
        interpret=interpret,
    )(x)


@pytest.mark.parametrize(("wait", "faults"), [("before", []), ("after", [RACE])])
def test_the_detector_finds_a_wait_after_the_use(wait, faults, detector, capsys):
    jax.block_until_ready(doubled(jnp.ones((8, 128)), detector, wait))
    assert detected(capsys) == faults


def test_the_detector_finds_a_missing_wait(capsys):
    eager = pltpu.InterpretParams(detect_races=True, dma_execution_mode="eager")
    jax.block_until_ready(doubled(jnp.ones((8, 128)), eager, "never"))
    assert UNAWAITED in detected(capsys)


def normal(seed, *shape, dtype=jnp.bfloat16):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def close(out, want):
    out, want = (np.asarray(one.astype("float32")) for one in (out, want))
    assert np.abs(out - want).max() <= 0.01 * np.abs(want).max()


MIXED = [[[rank, 0.5]] * 2 for rank in (16, 8, 0, 3, 16, 16, 5, 16)]
STEPS = [[[rank, 1.0]] for rank in (64, 16, 33, 0)]
# Rows, slices, groups, rank, and the group of each row; then ranks, dtypes of rows and factors, and experts.
CASES = {
    "dense": dict(rows=16, slices=(256,), groups=8, rank=16, group=np.arange(16) % 8),
    "ranks of 0 to 16, rows of none": dict(
        rows=40, slices=(256, 128), groups=8, rank=16, group=np.arange(40) % 9 - 1, ranks=MIXED
    ),
    "loose columns": dict(rows=16, slices=(200, 104), groups=8, rank=16, group=np.arange(16) % 8, ranks=MIXED),
    "rank 64": dict(rows=16, slices=(256,), groups=4, rank=64, group=np.arange(16) % 4, ranks=STEPS),
    "rank 12": dict(rows=13, slices=(256, 128), groups=4, rank=12, group=np.arange(13) % 5 - 1),
    "two bundles": dict(rows=40, slices=(256, 128), groups=16, rank=16, group=np.arange(40) % 17 - 1),
    "one of eight": dict(rows=16, slices=(256,), groups=8, rank=16, group=np.full(16, 5)),
    "none": dict(rows=16, slices=(256,), groups=8, rank=16, group=np.full(16, -1)),
    "int8": dict(rows=16, slices=(256, 128), groups=8, rank=16, group=np.arange(16) % 8, factors="int8"),
    "by group": dict(rows=48, slices=(256,), groups=300, rank=16, group=np.arange(48) * 5),
    "experts": dict(rows=48, slices=(256,), groups=64, rank=16, group=np.arange(48) % 4, experts=16),
    "float32": dict(rows=16, slices=(256,), groups=8, rank=16, group=np.arange(16) % 8, dtype="float32"),
}
QUICK = ("ranks of 0 to 16, rows of none",)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_add_lora_has_no_race(name, detector, capsys):
    out, want = run(**CASES[name], detector=detector)
    assert detected(capsys) == []
    close(out, want)


def run(
    rows, slices, groups, rank, group, detector, ranks=None, dtype="bfloat16", factors="bfloat16", experts=1
):  # fmt: skip
    n, k, columns = len(slices), 256, sum(slices)
    base, x = normal(1, rows, columns, dtype=dtype), normal(2, rows, k, dtype=dtype)
    a, b = normal(3, groups, n, rank, k) / 16, normal(4, groups, rank, columns)
    ranks = None if ranks is None else jnp.asarray(ranks, jnp.float32)
    if factors == "int8":
        a, b = (jnp.round(9 * value).astype(jnp.int8) for value in (16 * a, b))
        ranks = jnp.full((groups, n, 1 + rank), 0.01).at[..., 0].set(rank)
    ids = jnp.asarray(group, jnp.int32)
    if experts > 1:
        expert = jnp.asarray(np.arange(rows) * 7 % experts, jnp.int32)
        options = {"num_slots": groups // experts, "num_experts": experts}
        plan = plan_experts(ids, jnp.arange(rows, dtype=jnp.int32), expert, backend="mosaic_tpu", **options)
    else:
        plan = make_plan(ids, num_groups=groups, backend="mosaic_tpu")
    call = (base, x, a, b, plan)
    out = jax.jit(partial(mosaic_tpu.add_lora, slice_sizes=slices, interpret=detector))(*call, ranks=ranks)
    return jax.block_until_ready(out), jax.jit(partial(xla.add_lora, slice_sizes=slices))(*call, ranks=ranks)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["expand", "shrink"])
def test_gradients_have_no_race(name, detector, capsys):
    rows, groups, rank, size = 24, 4, 16, 256
    plan = make_plan(jnp.arange(rows, dtype=jnp.int32) % groups, num_groups=groups, backend="mosaic_tpu")
    h = normal(1, 1, rows, rank, dtype=jnp.float32)
    if name == "expand":
        given = h, normal(2, rows, size), normal(3, groups, rank, size), plan, None, (size,)
    else:
        given = h[0], normal(2, rows, size), normal(3, groups, 1, rank, size), plan, None, None
    out = jax.block_until_ready(getattr(backward, f"{name}_grads")(*given, interpret=detector))
    want = getattr(xla, f"{name}_grads")(*given)
    assert detected(capsys) == []
    for one, other in zip(out, want, strict=True):
        close(one, other)
