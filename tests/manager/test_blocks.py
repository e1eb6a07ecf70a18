"""How slots are cut into blocks, against dense arrays."""

import math
import os
import threading
from pathlib import Path

import chex
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jlora._memory import fresh
from jlora.layers.site import Site, SlotSpec
from jlora.manager.blocks import MAX_ROWS, cut, pack, unpack

SPECS = st.builds(
    SlotSpec,
    layers=st.none() | st.integers(1, 5),
    num_slots=st.just(2),
    in_features=st.integers(1, 5),
    out_sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple),
    max_rank=st.integers(1, 40),
    dtype=st.sampled_from(["float32", "float16"]),
)


@st.composite
def pools(draw):
    """Sites of a few specs, in any order, and how many bytes a block may have."""
    specs = draw(st.lists(SPECS, min_size=1, max_size=3))
    kinds = draw(st.lists(st.sampled_from(specs), min_size=1, max_size=40))
    sites = tuple(
        Site(f"layers.{i}.m{i % 3}", (f"layers.{i}.m{i % 3}",), "linear", spec, {}, "auto")
        for i, spec in enumerate(kinds)
    )
    return sites, draw(st.sampled_from([1, 300, 3000, 10**9]))


@st.composite
def adapters(draw):
    """A pool, and factors for some of its rows, of any ranks."""
    sites, limit = draw(pools())
    rows = [(site, layer) for site in sites for layer in range(site.spec.layers or 1)]
    brought = draw(st.lists(st.sampled_from(rows), unique=True) | st.just(rows))
    rng = np.random.default_rng(0)
    factors = {}
    for site, layer in brought:
        spec, rank = site.spec, draw(st.integers(1, site.spec.max_rank))
        a = rng.normal(size=(spec.slices, rank, spec.in_features)).astype(spec.dtype)
        factors[site, layer] = a, rng.normal(size=(rank, spec.out_features)).astype(spec.dtype)
    return sites, limit, factors


def step(spec):
    return min(16, spec.max_rank)


def row_bytes(spec):
    width = spec.slices * spec.in_features + sum(spec.out_sizes)
    return step(spec) * width * np.dtype(spec.dtype).itemsize


@given(pools())
def test_chunks_hold_every_row_once_and_no_more_than_they_may(pool):
    sites, limit = pool
    chunks = cut(sites, limit)
    rows = [row for chunk in chunks for row in chunk.rows]
    assert len(rows) == len(set(rows)) == sum(site.spec.layers or 1 for site in sites)
    for chunk in chunks:
        assert len(chunk.rows) == chunk.count <= MAX_ROWS
        assert {site.spec for site, _ in chunk.rows} == {chunk.spec}
        assert chunk.count == 1 or chunk.count * row_bytes(chunk.spec) <= limit
    for spec in {site.spec for site in sites}:  # one program for all of them but the last
        assert len({chunk.count for chunk in chunks if chunk.spec == spec and spec.layers is None}) <= 2


@given(adapters())
def test_blocks_hold_what_an_adapter_brings_and_nothing_else(adapter):
    """Written over slots full of NaN, as a slot's former owner leaves them: exact within each row's blocks."""
    sites, limit, factors = adapter
    blocks = pack(cut(sites, limit), factors)
    slots = {}
    for site in sites:
        spec = site.spec
        for layer in range(spec.layers or 1):
            a = np.full((spec.slices, spec.max_rank, spec.in_features), np.nan, spec.dtype)
            slots[site, layer] = a, np.full((spec.max_rank, sum(spec.out_sizes)), np.nan, spec.dtype)
    for block in blocks:
        spec = block.chunk.spec
        rows = block.chunk.rows if block.row is None else [block.chunk.rows[block.row]]
        chex.assert_shape(block.a, (len(rows), spec.slices, step(spec), spec.in_features))
        chex.assert_shape(block.b, (len(rows), step(spec), sum(spec.out_sizes)))
        assert block.a.dtype == block.b.dtype == spec.dtype
        assert 0 <= block.start <= spec.max_rank - step(spec)
        for i, row in enumerate(rows):
            assert row in factors
            slots[row][0][:, block.start : block.start + step(spec)] = block.a[i]
            slots[row][1][block.start : block.start + step(spec)] = block.b[i]
    for row, (a, b) in slots.items():
        if row not in factors:
            assert np.isnan(a).all()
            assert np.isnan(b).all()
            continue
        rank = len(factors[row][1])
        np.testing.assert_array_equal(a[:, :rank], factors[row][0])
        np.testing.assert_array_equal(b[:rank], factors[row][1])
        covered = ~np.isnan(b).any(axis=1)
        assert not a[:, rank:][:, covered[rank:]].any()
        assert not b[rank:][covered[rank:]].any()


@given(adapters())
def test_no_byte_is_packed_that_is_not_needed(adapter):
    """A row moves its own rank in steps of 16, or that of its chunk where the chunk moves as one."""
    sites, limit, factors = adapter
    want = 0
    for chunk in cut(sites, limit):
        ranks = [len(factors[row][1]) for row in chunk.rows if row in factors]
        if len(ranks) == chunk.count:
            ranks = [max(ranks)] * chunk.count
        want += sum(row_bytes(chunk.spec) * math.ceil(rank / step(chunk.spec)) for rank in ranks)
    assert sum(block.nbytes for block in pack(cut(sites, limit), factors)) == want


@given(adapters())
def test_unpack_undoes_pack(adapter):
    sites, limit, factors = adapter
    blocks = pack(cut(sites, limit), factors)
    wanted = list(factors)[::2]
    found = unpack(blocks, wanted)
    assert found.keys() == set(wanted)
    for row in wanted:
        (a, b), (own_a, own_b) = found[row], factors[row]
        rank = len(own_b)
        np.testing.assert_array_equal(a[:, :rank], own_a)
        np.testing.assert_array_equal(b[:rank], own_b)
        assert a.shape[1] == len(b) <= row[0].spec.max_rank
        assert not a[:, rank:].any()
        assert not b[rank:].any()
    again = unpack(pack(cut(sites, limit), unpack(blocks, list(factors))), list(factors))
    for row, (a, b) in unpack(blocks, list(factors)).items():
        np.testing.assert_array_equal(again[row][0], a)
        np.testing.assert_array_equal(again[row][1], b)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads how much memory the process has from Linux")
def test_what_a_load_packed_goes_back_to_the_system():
    """Whatever thread it was that loaded."""

    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def load():
        blocks = [fresh(12 << 20, np.dtype(np.uint16)) for _ in range(4)]  # 24 MB each
        for block in blocks:
            assert not block[:: 1 << 20].any()
            block[:] = 1

    before = resident()
    for _ in range(4):
        thread = threading.Thread(target=load)
        thread.start()
        thread.join()
    assert resident() - before < 24e6
