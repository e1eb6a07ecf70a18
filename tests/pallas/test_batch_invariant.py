"""A row's delta has the same bits in calls of any number of rows, in any mix, place and slot."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jlora import ops
from jlora.errors import LoRAError
from tests.pallas.lowering import lowered_text
from tests.pallas.running import interpret_of
from tests.pallas.scales import with_scales
from tests.pallas.test_ranks import BACKENDS as MODULES
from tests.pallas.test_ranks import MOSAIC, TRITON

pytestmark = [pytest.mark.device, pytest.mark.usefixtures("quickly_compiled")]

# On a GPU the rule cuts a K of 1300 into 6 parts for up to 512 rows, and into 2 for more.
SIZES, K, RANK, SLOTS, EXPERTS = (20, 9), 1300, 24, 5, 3
NUMBERS = [1, 40]
SLOW_MOSAIC = pytest.param(*MOSAIC.values, marks=[*MOSAIC.marks, pytest.mark.slow])
BACKENDS = pytest.mark.parametrize("backend", [TRITON, SLOW_MOSAIC])


@pytest.fixture
def factors():
    """a, b and ranks with scales; slots 1 and 3 hold the same adapter."""
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(SLOTS, 2, RANK, K)) / np.sqrt(K), rng.normal(size=(SLOTS, RANK, sum(SIZES)))
    ranks, scales = rng.integers(1, RANK + 1, (SLOTS, 2)), rng.uniform(-2, 2, (SLOTS, 2))
    for array in (a, b, ranks, scales):
        array[3] = array[1]
    return *(jnp.asarray(v, jnp.bfloat16) for v in (a, b)), with_scales(ranks, scales)


def bits(array):
    return np.asarray(array).view(np.uint16 if array.dtype == jnp.bfloat16 else np.uint32)


def of_one_row(run, factors, numbers=NUMBERS):
    """Return the bits of one row of slot 1 or 3, computed in calls of these numbers of rows, at random places."""
    rng = np.random.default_rng(1)
    own = jnp.asarray(rng.normal(size=K), jnp.bfloat16)
    found = []
    for rows in numbers:
        for slot in (1, 3):
            place, ids = rng.integers(rows), rng.integers(-1, SLOTS + 1, rows)
            ids[place] = slot
            x = jnp.asarray(rng.normal(size=(rows, K)), jnp.bfloat16).at[place].set(own)
            plan = ops.make_plan(jnp.asarray(ids, jnp.int32), num_groups=SLOTS, batch_invariant=True)
            found.append(bits(run(x, plan, *factors))[..., place, :])
    return found


def alike(found):
    return all((one == found[0]).all() for one in found)


@pytest.mark.parametrize("backend", [pytest.param("xla", marks=pytest.mark.device("cpu")), TRITON, SLOW_MOSAIC])
def test_add_lora(factors, backend, interpret):
    calls = interpret()

    @jax.jit
    def run(x, plan, a, b, ranks):
        base = jnp.ones((len(x), sum(SIZES)), jnp.bfloat16)
        options = {"slice_sizes": SIZES, "ranks": ranks, "batch_invariant": True}
        return ops.add_lora(base, x, a, b, plan, backend=backend, **options)

    assert alike(of_one_row(run, factors))
    assert bool(calls) == (backend != "xla")


@pytest.mark.slow
def test_parts_of_k_do_not_follow_the_number_of_rows(factors, interpret):
    """They do in calls that are not batch invariant."""
    interpret()
    for batch_invariant in (True, False):

        @jax.jit
        def run(x, plan, a, b, ranks, batch_invariant=batch_invariant):
            base = jnp.zeros((len(x), sum(SIZES)), jnp.bfloat16)
            options = {"slice_sizes": SIZES, "ranks": ranks, "batch_invariant": batch_invariant}
            return ops.add_lora(base, x, a, b, plan, backend="triton", **options)

        assert alike(of_one_row(run, factors, [1, 520])) == batch_invariant


@BACKENDS
def test_shrink_and_expand(factors, backend):
    options = {"batch_invariant": True, "interpret": interpret_of(backend)}
    shrink_of, expand_of = (partial(getattr(MODULES[backend], op), **options) for op in ("shrink", "expand"))
    h = jnp.asarray(np.random.default_rng(2).normal(size=(2, RANK)), jnp.float32)

    @jax.jit
    def shrink(x, plan, a, b, ranks):
        return shrink_of(x, a, plan, ranks=ranks)

    @jax.jit
    def expand(x, plan, a, b, ranks):
        given = jnp.broadcast_to(h[:, None], (2, len(x), RANK))
        return expand_of(given, b, plan, slice_sizes=SIZES, base=None, ranks=ranks)

    for run in (shrink, expand):
        assert alike(of_one_row(run, factors))


def test_blocks_of_k_on_a_tpu_do_not_follow_the_number_of_rows():
    """The shape of the kernel's buffer of a, [2, slices, ranks of a bundle, block of K]."""
    struct, k = jax.ShapeDtypeStruct, 32768

    def block_of(rows, batch_invariant):
        arrays = [struct(s, "bfloat16") for s in ((rows, 256), (rows, k), (8, 1, 16, k), (8, 16, 256))]
        plan = jax.eval_shape(partial(ops.make_plan, num_groups=8, tile_m=16), struct((rows,), "int32"))
        run = partial(ops.add_lora, batch_invariant=batch_invariant, backend="mosaic_tpu")
        (block,) = set(re.findall(r"bf16\[2,1,128,(\d+)\]", str(jax.make_jaxpr(run)(*arrays, plan))))
        return int(block)

    assert block_of(16, batch_invariant=False) != block_of(1024, batch_invariant=False)
    assert block_of(16, batch_invariant=True) == block_of(1024, batch_invariant=True)


@BACKENDS
def test_experts(backend, interpret):
    interpret()
    rng, k, groups = np.random.default_rng(0), 2, SLOTS * EXPERTS
    a, b = rng.normal(size=(groups, 1, 8, K)) / np.sqrt(K), rng.normal(size=(groups, 8, 20))
    a, b, ranks = *(jnp.asarray(v, jnp.bfloat16) for v in (a, b)), with_scales(np.full((groups, 1), 8), 0.5)
    own, own_experts = jnp.asarray(rng.normal(size=(k, K)), jnp.bfloat16), np.array([2, 0])

    @jax.jit
    def run(x, slot, experts):
        tokens = len(slot)
        plans = {"num_slots": SLOTS, "num_experts": EXPERTS, "batch_invariant": True}
        token = jnp.repeat(jnp.arange(tokens, dtype=jnp.int32), k)
        plan = ops.plan_experts(slot, token, experts.ravel(), **plans, backend="xla")
        options = {"ranks": ranks, "batch_invariant": True, "backend": backend}
        pairs = ops.add_lora(jnp.zeros((tokens * k, 20), jnp.bfloat16), x, a, b, plan, **options)
        return pairs.reshape(tokens, k, 20)

    found = []
    for tokens in (1, 40):
        place, slot = rng.integers(tokens), rng.integers(-1, SLOTS + 1, tokens)
        experts = np.stack([rng.permutation(EXPERTS)[:k] for _ in range(tokens)])
        x, slot[place], experts[place] = jnp.asarray(rng.normal(size=(tokens * k, K)), jnp.bfloat16), 4, own_experts
        x = x.at[place * k : place * k + k].set(own)
        out = run(x, jnp.asarray(slot, jnp.int32), jnp.asarray(experts, jnp.int32))
        found.append(bits(out)[place].ravel())
    assert alike(found)
    assert found[0].any()


@pytest.mark.usefixtures("unchecked_calls")
def test_plans_of_other_tiles_are_refused(factors):
    a, b, _ = factors
    ids = jnp.zeros(64, jnp.int32)
    with pytest.raises(LoRAError, match="make_plan: batch_invariant needs a tile_m of 16, got 32"):
        ops.make_plan(ids, num_groups=SLOTS, tile_m=32, batch_invariant=True)
    with pytest.raises(LoRAError, match="plan_experts: batch_invariant needs a tile_m of 16, got 32"):
        ops.plan_experts(ids, ids, ids, num_slots=SLOTS, num_experts=3, tile_m=32, batch_invariant=True)
    plan = ops.make_plan(ids, num_groups=SLOTS, tile_m=32)
    with pytest.raises(LoRAError, match="shrink: batch_invariant needs a plan with tile_m = 16, got 32"):
        ops.shrink(jnp.zeros((64, K)), a, plan, batch_invariant=True)
    with pytest.raises(LoRAError, match="add_lora: batch_invariant needs a plan"):
        ops.add_lora(jnp.zeros((64, 29)), jnp.zeros((64, K)), a, b, plan, slice_sizes=SIZES, batch_invariant=True)


def test_a_few_rows_of_experts_are_not_fused():
    struct = jax.ShapeDtypeStruct
    shapes = (4, 64), (4, 32), (8, 1, 16, 32), (8, 16, 64)
    args = *(struct(shape, "bfloat16") for shape in shapes), struct((4,), "int32")

    def run(base, x, a, b, ids, batch_invariant):
        plan = ops.plan_experts(ids, ids, ids, num_slots=2, num_experts=4, batch_invariant=True)
        return ops.add_lora(base, x, a, b, plan, batch_invariant=batch_invariant, backend="triton")

    for batch_invariant in (True, False):
        text = lowered_text(partial(run, batch_invariant=batch_invariant), args, "cuda")
        assert ("lora_fused" in text) != batch_invariant
        assert ("lora_shrink" in text) == batch_invariant
