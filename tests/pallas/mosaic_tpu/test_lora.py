"""The TPU kernel in interpret mode (simulated copies and semaphores, memory that starts as NaN) against the oracle."""

from dataclasses import replace
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.specs import PROJECTIONS
from jlora.errors import LoRAError
from jlora.pallas.mosaic_tpu import lora as mosaic_tpu
from jlora.pallas.mosaic_tpu.kernel import Listing
from jlora.pallas.mosaic_tpu.schedule import visits
from jlora.pallas.plan import make_plan
from tests import oracle
from tests.pallas.lowering import lowered_text
from tests.pallas.running import interpret_of
from tests.pallas.scales import with_scales
from tests.pallas.test_xla import problem as xla_problem

pytestmark = pytest.mark.device("tpu")

INTERPRET = interpret_of("mosaic_tpu")
TOLERANCE = {"float32": 1e-5, "bfloat16": 5e-3}


def problem(seed, rows, k, slices, rank, groups, dtype="float32"):
    base, x, a, b, _, ranks = xla_problem(seed, rows, k, slices, rank, groups, dtype=dtype)
    return base, x, a / k**0.5, b, ranks


@lru_cache
def compiled(slices, groups, tiling, finite):
    """Return the jitted kernel, unoptimised to compile faster. `tiling` separates cache entries of `force_tiles`."""

    def call(base, x, a, b, ids, ranks):
        plan = make_plan(ids, num_groups=groups)
        return mosaic_tpu.add_lora(
            base, x, a, b, plan, slice_sizes=slices, ranks=with_scales(ranks), finite=finite, interpret=INTERPRET
        )

    return jax.jit(call, compiler_options={"xla_backend_optimization_level": 0})


def run(base, x, a, b, ids, slices, ranks, tiling=None, finite=False):
    return np.asarray(compiled(slices, a.shape[0], tiling, finite)(base, x, a, b, jnp.asarray(ids, jnp.int32), ranks))


def check(base, x, a, b, ids, slices, ranks, tiling=None, finite=False):
    """Values against the oracle; rows without a group, and slices of rank 0, bit by bit."""
    out = run(base, x, a, b, ids, slices, ranks, tiling, finite)
    want = oracle.add_lora(base, x, ids, a, b, slices)
    error = np.abs(out.astype(np.float64) - want).max(initial=0) / np.abs(want).max(initial=1)
    assert error <= TOLERANCE[str(base.dtype)]
    owned = (ids >= 0) & (ids < a.shape[0])
    assert same_bits(out[~owned], np.asarray(base)[~owned])
    if ranks is not None:
        column = np.repeat(np.asarray(ranks)[np.where(owned, ids, 0)] == 0, slices, axis=1)
        assert same_bits(out[column & owned[:, None]], np.asarray(base)[column & owned[:, None]])
    return out


def same_bits(left, right):
    return left.dtype == right.dtype and left.tobytes() == right.tobytes()


@pytest.mark.parametrize(
    ("rows", "k", "slices", "rank", "groups", "dtype"),
    [
        pytest.param(1, 33, (17,), 4, 3, "float32", marks=pytest.mark.slow),
        (37, 45, (40, 13), 8, 6, "float32"),
        pytest.param(70, 130, (140,), 1, 2, "float32", marks=pytest.mark.slow),
        pytest.param(21, 64, (48, 16, 16), 16, 20, "bfloat16", marks=pytest.mark.slow),
        pytest.param(50, 200, (72, 60), 64, 5, "bfloat16", marks=pytest.mark.slow),
        pytest.param(16, 77, (45,), 24, 9, "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_matches_oracle(rows, k, slices, rank, groups, dtype, rng):
    operands = problem(1, rows, k, slices, rank, groups, dtype)
    mixes = [
        rng.integers(-1, groups + 2, rows),  # any order, some without adapter
        np.sort(rng.integers(0, groups, rows)),
        np.full(rows, groups),  # all dropped
        np.full(rows, groups - 1),  # one group, the others empty
    ]
    *arrays, ranks = operands
    for ids in mixes:
        check(*arrays, ids, slices, ranks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("slices", "tiles"),
    [
        ((300, 85), dict(tile_m=16, tile_k=128, tile_n=128, chunk=2)),  # every loop runs; the last N tile is ragged
        ((256, 128), dict(tile_m=16, tile_n=128, chunk=1)),  # no tile straddles slices
        ((300,), dict(tile_m=8, tile_n=256, by_group=True)),
        ((192, 192), dict(tile_m=16, tile_n=256)),  # the last tile is short, but aligned
    ],
)
def test_every_tiling_matches_the_oracle(slices, tiles, force_tiles, rng):
    *arrays, ranks = problem(3, 53, 256, slices, 32, 6)
    ids = rng.integers(0, 7, 53)
    ids[16:32] = 6  # a row tile without any adapter
    force_tiles(**tiles)
    check(*arrays, ids, slices, ranks, str(tiles))


@pytest.mark.parametrize("by_group", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_last_tile_that_is_copied_in_two_parts(by_group, force_tiles):
    """One slice whose last N tile has whole tiles of lanes and others; groups of unequal ranks follow each other."""
    slices, tiles = (456,), {"tile_m": 16, "tile_n": 256, "bundle": 1, "by_group": by_group}
    base, x, a, b, ranks = problem(14, 48, 256, slices, 16, 6, "bfloat16")
    ranks = jnp.array([[16], [1], [9], [0], [16], [3]], ranks.dtype)
    a = jnp.where(jnp.arange(16)[None, None, :, None] < ranks[:, :, None, None], a, 0)
    b = jnp.where(jnp.arange(16)[None, :, None] < ranks[:, :, None], b, 0)
    force_tiles(**tiles)
    check(base, x, a, b, np.arange(48) % 6, slices, ranks, str(tiles))


def test_mixed_dtypes(rng):
    base, x, a, b, ranks = problem(6, 9, 40, (24,), 8, 4)
    ids = rng.integers(0, 5, 9)
    low = [v.astype(jnp.bfloat16) for v in (a, b)]
    out = run(base, x, *low, ids, (24,), ranks)
    want = oracle.add_lora(base, x, ids, *low, (24,))
    assert np.abs(out - want).max() <= 5e-3 * np.abs(want).max()


@pytest.mark.slow
def test_a_row_does_not_depend_on_its_batch(rng):
    base, x, a, b, ranks = problem(8, 40, 130, (64, 32), 16, 12, "bfloat16")
    ids = rng.integers(0, 13, 40)
    first = run(base, x, a, b, ids, (64, 32), ranks)
    assert same_bits(run(base, x, a, b, ids, (64, 32), ranks), first)
    order = rng.permutation(40)
    assert same_bits(run(base[order], x[order], a, b, ids[order], (64, 32), ranks), first[order])
    others = np.where(np.arange(40) < 10, ids, rng.integers(0, 13, 40))
    assert same_bits(run(base, x, a, b, others, (64, 32), ranks)[:10], first[:10])


@pytest.mark.parametrize(
    ("dtype", "bad"), [pytest.param("float32", np.inf, marks=pytest.mark.slow), ("bfloat16", np.nan)]
)
def test_a_broken_adapter_breaks_its_own_rows_only(dtype, bad, rng):
    base, x, a, b, _ = problem(9, 24, 40, (24,), 16, 10, dtype)
    ids = np.arange(24) % 11
    clean = run(base, x, a, b, ids, (24,), None)
    broken_a, broken_b = a.at[3, 0, 5, 7].set(bad), b.at[4, 9, 11].set(bad)
    out = run(base, x.at[0].set(bad), broken_a, broken_b, ids, (24,), None).astype(np.float32)
    touched = (ids == 3) | (ids == 4) | (np.arange(24) == 0)
    assert np.array_equal(out[~touched], clean[~touched].astype(np.float32))
    assert not np.isfinite(out[ids == 4][:, 11]).any()
    assert np.isfinite(out[ids == 4][:, :11]).all()
    assert not np.isfinite(out[ids == 3]).any()
    assert not np.isfinite(out[0]).any()


def test_unread_groups_may_hold_anything(rng):
    base, x, a, b, _ = problem(10, 24, 40, (24,), 16, 10, "bfloat16")
    ids = rng.choice([1, 4, 10], 24)
    want = run(base, x, a, b, ids, (24,), None)
    idle = jnp.asarray([g not in (1, 4) for g in range(10)])
    a, b = jnp.where(idle[:, None, None, None], jnp.nan, a), jnp.where(idle[:, None, None], jnp.nan, b)
    assert same_bits(run(base, x, a, b, ids, (24,), None), want)


@pytest.mark.parametrize(
    ("rank", "slices", "dtype"),
    [
        (20, (128, 40), "bfloat16"),
        pytest.param(16, (128, 256), "bfloat16", marks=pytest.mark.slow),
        pytest.param(24, (40, 13), "bfloat16", marks=pytest.mark.slow),
        pytest.param(48, (256, 128), "bfloat16", marks=pytest.mark.slow),
        pytest.param(40, (72, 60), "float32", marks=pytest.mark.slow),
    ],
)
def test_values_past_the_written_ranks_may_be_nan(rank, slices, dtype, rng):
    """Slots keep the ranks of earlier adapters from the true rank on, rounded up to 16. `finite` is not about these."""
    base, x, a, b, _ = problem(11, 18, 40, slices, rank, 6, dtype)
    true = rng.integers(0, rank + 1, (6, len(slices)))
    true[:3] = [[min(16, rank)] * len(slices), [rank] * len(slices), [1, *[0] * (len(slices) - 1)]]
    zero, past = (np.arange(rank) >= limit[..., None] for limit in (true, -(-true // 16) * 16))
    of_b = [np.repeat(mask, slices, axis=1).swapaxes(1, 2) for mask in (zero, past)]
    clean = jnp.where(zero[..., None], 0, a), jnp.where(of_b[0], 0, b)
    stale = jnp.where(past[..., None], jnp.nan, clean[0]), jnp.where(of_b[1], jnp.nan, clean[1])
    ids = rng.integers(-1, 6, 18)
    want = check(base, x, *clean, ids, slices, true, finite=True)
    for finite in (True, False):
        assert same_bits(run(base, x, *stale, ids, slices, true, finite=finite), want)


@pytest.mark.slow
def test_finite_factors_keep_a_broken_row_to_itself(rng):
    base, x, a, b, ranks = problem(12, 24, 40, (24,), 16, 10, "bfloat16")
    ids = np.arange(24) % 11
    want = run(base, x, a, b, ids, (24,), ranks, finite=True)
    assert same_bits(run(base, x, a, b, ids, (24,), ranks), want)
    idle = jnp.arange(10) == 7
    ids[ids == 7] = 2
    want = run(base, x, a, b, ids, (24,), ranks, finite=True)
    a, b = jnp.where(idle[:, None, None, None], jnp.nan, a), jnp.where(idle[:, None, None], jnp.inf, b)
    out = run(base, x.at[1].set(jnp.inf), a, b, ids, (24,), ranks, finite=True)
    assert same_bits(np.delete(out, 1, axis=0), np.delete(want, 1, axis=0))


def test_without_an_adapter_nothing_is_visited(force_tiles):
    """The grid is empty, and base keeps its bits, -0.0 included. A garbage factor is not read."""
    slices, tiles = (200,), {"tile_m": 8, "by_group": True, "chunk": 3}
    *_, a, b, ranks = problem(13, 53, 256, slices, 8, 6)
    base = jnp.tile(jnp.array([-0.0, jnp.nan, 1, 0, jnp.inf]), (53, sum(slices) // 5))
    force_tiles(**tiles)
    out = run(base, jnp.full((53, 256), jnp.nan), a, b, np.full(53, -1), slices, ranks, str(tiles))
    assert same_bits(out, np.asarray(base))
    for by_group in (False, True):
        s = Listing(rows=53, groups=6, bundle=2, tile_m=16, chunk=2, by_group=by_group)
        assert listing(s, np.full(53, -1))[0] == 0


def listing(s, ids):
    """Return the lists of `visits`. They are integers, so optimisation does not change them."""
    fast = {"compiler_options": {"xla_backend_optimization_level": 0}}
    return [np.asarray(one) for one in jax.jit(partial(visits, s), **fast)(ids.astype(np.int32))]


@pytest.mark.slow
@given(
    rows=st.integers(1, 90),
    groups=st.integers(1, 20),
    bundle=st.integers(1, 6),
    tile_m=st.integers(1, 24),
    chunk=st.integers(1, 4),
    sort=st.booleans(),
    data=st.data(),
)
def test_visits_cover_every_tile_and_group_once(rows, groups, bundle, tile_m, chunk, sort, data):
    ids = np.array(data.draw(st.lists(st.integers(-1, groups - 1), min_size=rows, max_size=rows)))
    if sort:
        ids = np.concatenate([np.sort(ids[ids >= 0]), ids[ids < 0]])
    s = Listing(rows=rows, groups=groups, bundle=bundle, tile_m=tile_m, chunk=chunk, by_group=sort)
    count, tile, active, fresh, *first = listing(s, ids)
    assert len(tile) == len(fresh) == s.listed
    assert len(active) == s.listed * bundle
    active = active.reshape(s.listed, bundle)
    assert (count > 0) == (ids >= 0).any()
    got, listed = [], []
    for c in range(s.chunks):
        at = [int(s.visit(c, v, *first)) for v in range(count)]
        listed += [(tile[v], *active[v]) for v in at]
        assert s.listed > max(at, default=0)
        assert (np.diff(tile[at]) >= 0).all()
        assert (tile[at] // chunk == c).all()
        assert len(set(at)) == count or (active[at[-1]] < 0).all()  # a visit that is made again is of no group
        for v in range(count):
            assert v == 0 or at[v] == at[v - 1] or fresh[at[v]] == (not np.array_equal(*active[[at[v], at[v] - 1]]))
            for place, g in enumerate(active[at[v]]):
                if g >= 0:
                    assert g % bundle == place
                    got.append((tile[at[v]], g))
    want = {(m // tile_m, g) for m, g in enumerate(ids) if g >= 0}
    assert len(got) == len(want)
    assert set(got) == want
    if sort:  # these are visited as if they might be in any order, so that no bit hangs on which schedule is taken
        s = replace(s, by_group=False)
        same, other_tile, other, _ = listing(s, ids)
        every = [c * s.max_visits + v for c in range(s.chunks) for v in range(same)]
        assert same == count
        assert listed == [(other_tile[v], *other.reshape(-1, bundle)[v]) for v in every]


def test_projections_share_the_list_of_visits():
    """The lowered program lists the visits in one function, for projections with other K, slices and columns."""
    projections, struct = [PROJECTIONS[name] for name in ("qkv", "down")], jax.ShapeDtypeStruct
    factors = [
        (struct((8, len(p.slices), 16, p.k), jnp.bfloat16), struct((8, 16, sum(p.slices)), jnp.bfloat16))
        for p in projections
    ]

    def step(ids, factors):
        plan = make_plan(ids, num_groups=8)
        return [
            mosaic_tpu.add_lora(None, jnp.zeros((64, p.k), a.dtype), a, b, plan, slice_sizes=p.slices, ranks=None)
            for (a, b), p in zip(factors, projections, strict=True)
        ]

    text = lowered_text(step, (struct((64,), jnp.int32), factors), "tpu")
    assert text.count("tpu_custom_call") == len(projections)
    assert text.count("func.func private @visits") == 1


def test_unsupported_reason_names_the_cause_and_the_fix():
    def reason(rows, k, columns, rank, groups=4, dtype=jnp.bfloat16):
        shapes = [(rows, columns), (rows, k), (groups, 1, rank, k), (groups, rank, columns)]
        return mosaic_tpu.unsupported_reason(*(jax.ShapeDtypeStruct(v, dtype) for v in shapes), slice_sizes=(columns,))

    assert reason(8, 4096, 4096, 16) is None
    assert reason(1, 2880, 128257, 512) is None
    assert "float16" in reason(8, 4096, 4096, 16, dtype=jnp.float16)
    assert "K=50001" in reason(8, 50001, 4096, 512)
    assert "SMEM" in reason(1 << 20, 4096, 4096, 16, groups=1 << 20)
    x = jnp.zeros((2, 8), jnp.float16)
    with pytest.raises(LoRAError, match=r"mosaic_tpu.*float16"):
        run(x, x, jnp.zeros((1, 1, 8, 8), jnp.float16), jnp.zeros((1, 8, 8), jnp.float16), np.array([0, 0]), (8,), None)
