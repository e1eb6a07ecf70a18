"""Invariants of the plan, over drawn mixes of groups (empty ones, a single one, all dropped)."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jlora.errors import LoRAError
from jlora.pallas.plan import Plan, make_plan
from jlora.pallas.tiles import max_tiles

pytestmark = pytest.mark.device


@st.composite
def mixes(draw):
    groups = draw(st.sampled_from([1, 5]))
    rows = draw(st.sampled_from([0, 1, 7, 40]))  # few sizes, so that few programs are compiled
    ids = draw(st.lists(st.integers(-2, groups + 2), min_size=rows, max_size=rows))
    return np.array(ids, np.int32), groups, draw(st.sampled_from([1, 3, 8]))


build = jax.jit(make_plan, static_argnames=("num_groups", "tile_m", "max_active", "num_rows"))


def check(plan: Plan, row_ids: np.ndarray, groups: int):
    """Everything a kernel relies on, from the plan's arrays and the rows' ids alone."""
    rows, t = len(row_ids), plan.tile_m
    order, slot, group, start, end = (
        np.asarray(v) for v in (plan.row_order, plan.row_slot, plan.tile_group, plan.tile_start, plan.tile_end)
    )
    assert sorted(order) == list(range(rows))
    assert plan.tiles_used.tolist() == [(end > start).sum()]
    covered = []
    for k in range(plan.num_tiles):
        assert 0 <= group[k] < groups
        assert 0 <= start[k] <= end[k] <= rows
        assert end[k] - start[k] <= t
        if start[k] == end[k]:
            assert start[k] == rows
            assert (start[k:] == rows).all()  # only empty tiles follow
        members = order[start[k] : end[k]]
        assert (row_ids[members] == group[k]).all()
        padded = [*members, *[rows] * (t - len(members))]
        assert np.asarray(plan.tile_rows)[k * t : (k + 1) * t].tolist() == padded
        assert (np.diff(members) > 0).all()  # rows keep their order
        for place, row in enumerate(members):
            assert slot[row] == k * t + place
        covered += list(members)
    active = [m for m in range(rows) if 0 <= row_ids[m] < groups]
    assert sorted(covered) == active
    assert (slot[[m for m in range(rows) if m not in active]] == plan.num_tiles * t).all()
    assert set(order[: len(active)]) == set(active)  # dropped rows are last


@given(mixes())
def test_rows_are_covered_once(mix):
    ids, groups, tile_m = mix
    check(build(jnp.asarray(ids), num_groups=groups, tile_m=tile_m), ids, groups)


@given(mixes())
def test_a_true_bound_on_active_groups_loses_no_row(mix):
    ids, groups, tile_m = mix
    present = len({i for i in ids.tolist() if 0 <= i < groups})
    plan = build(jnp.asarray(ids), num_groups=groups, tile_m=tile_m, max_active=max(1, present))
    check(plan, ids, groups)


@given(mixes(), st.data())
def test_runs_of_rows(mix, data):
    ids, groups, tile_m = mix
    ids = ids[:7]
    lengths = np.array([data.draw(st.integers(0, 7)) for _ in ids], np.int32)
    row_ids = np.concatenate([np.repeat(ids, lengths), np.full(50 - lengths.sum(), groups)])  # padded
    plan = build(jnp.asarray(ids), num_groups=groups, tile_m=tile_m, repeats=jnp.asarray(lengths), num_rows=50)
    check(plan, row_ids, groups)


@pytest.mark.parametrize("length", [1, 5])
def test_equal_runs_are_the_repeated_ids(length):
    ids = np.array([2, 0, 7, 2, 1], np.int32)
    one = make_plan(jnp.asarray(ids), num_groups=3, tile_m=4, repeats=length)
    each = make_plan(jnp.repeat(jnp.asarray(ids), length), num_groups=3, tile_m=4, max_active=3)
    chex.assert_trees_all_equal(one, each)


def test_bound_is_reached_and_never_beaten():
    for rows in range(1, 30):
        for tile_m in (1, 3, 8):
            for active in range(1, 8):
                most, per = 0, min(active, rows)
                for spread in range(per, 0, -1):  # `spread` groups: all of one row but the last
                    most = max(most, spread - 1 + -(-(rows - spread + 1) // tile_m))
                assert most <= max_tiles(rows, tile_m, active) <= rows


def test_sizes_are_static_under_jit_vmap_and_scan():
    @jax.jit
    @chex.assert_max_traces(n=1)
    def plan(ids):
        return make_plan(ids, num_groups=4, tile_m=2)

    for ids in ([0, 1, 2, 3], [0, 0, 0, 0], [9, 9, 9, 9]):
        check(plan(jnp.array(ids)), np.array(ids), 4)
    batch = jnp.array([[0, 1, 2, 3], [3, 9, 0, 0]])
    stacked = jax.vmap(plan)(batch)
    scanned = jax.lax.scan(lambda _, ids: (None, plan(ids)), None, batch)[1]
    for i in range(2):
        check(jax.tree.map(lambda v, i=i: v[i], stacked), np.asarray(batch[i]), 4)
        check(jax.tree.map(lambda v, i=i: v[i], scanned), np.asarray(batch[i]), 4)


@pytest.mark.usefixtures("unchecked_calls")
@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"group_ids": jnp.zeros((2, 2), jnp.int32)}, "vector of integers"),
        ({"group_ids": jnp.zeros(2)}, "vector of integers"),
        ({"repeats": jnp.ones(3, jnp.int32), "num_rows": 3}, "repeats must be"),
        ({"repeats": jnp.ones(2, jnp.int32)}, "num_rows"),
        ({"num_groups": 0}, "at least 1"),
        ({"max_active": 0}, "at least 1"),
        ({"tile_m": 0}, "at least 1"),
    ],
)
def test_bad_arguments(args, message):
    with pytest.raises(LoRAError, match=message):
        make_plan(**{"group_ids": jnp.zeros(2, jnp.int32), "num_groups": 2, **args})
