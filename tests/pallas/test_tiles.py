"""Tiles fit into shared memory, and the choice depends on static sizes and the kind of GPU only."""

import itertools
from dataclasses import replace

import jax.numpy as jnp
import pytest

from jlora.errors import LoRAError
from jlora.pallas.gpus import GPU, H200
from jlora.pallas.tiles import (
    GPUProblem,
    GPUTiles,
    ItemSizes,
    expand_shared_bytes,
    fitted,
    gpu_tiles,
    plan_tile_m,
    rule_of_thumb,
    shrink_shared_bytes,
    too_large,
)
from jlora.pallas.triton import lora as triton

L4 = GPU("nvidia_l4", 99 << 10, 89)
RANKS = (1, 8, 16, 17, 40, 64, 100, 128, 200, 256, 300, 512)
ROWS = (1, 8, 64, 256, 600, 2048, 8192)
SHAPES = ((4096, 3), (300, 2), (14336, 1))


def problem(dtype, rows, tile_m, k, slices, rank) -> GPUProblem:
    size = 4 if dtype == "float32" else 2
    return GPUProblem(
        dtype, rows, tile_m, k, slices, rank, ItemSizes(size, size, size, 2 if dtype == "bfloat16" else 4)
    )


def matrix(dtype, slots):
    for rank, rows, shape in itertools.product(RANKS, ROWS, SHAPES):
        yield problem(dtype, rows, plan_tile_m(rows, min(rows, slots), "triton"), *shape, rank)


def test_the_formula_equals_the_compilers_shared_memory():
    """Shared memory of kernels compiled for compute capability 9.0 (JAX 0.11.2), as their compiler reported it."""
    seen = [  # dtype, rows, tile_m, K, slices, rank, the tiles that differ from the rule's, shrink, expand
        ("bfloat16", 8192, 64, 4096, 3, 128, {}, 98304, 90112),
        ("bfloat16", 600, 64, 14336, 1, 200, {"block_n": 32}, 98304, 69632),
        ("bfloat16", 2048, 64, 14336, 1, 17, {"block_k": 128, "shrink_stages": 3}, 73728, 36864),
        ("float16", 40, 64, 300, 2, 64, {}, None, 65536),
        ("float32", 64, 16, 4096, 3, 16, {"block_n": 128}, None, 17408),
        ("float32", 64, 16, 4096, 3, 17, {"block_n": 128}, None, 26624),
        ("float32", 600, 64, 4096, 1, 200, {}, None, 147456),
    ]
    for dtype, rows, tile_m, k, slices, rank, change, shrink, expand in seen:
        p = problem(dtype, rows, tile_m, k, slices, rank)
        tiles = GPUTiles(**{**rule_of_thumb(p, H200).__dict__, **change})
        if shrink is not None:
            assert shrink_shared_bytes(tiles, p) == shrink, (dtype, rank)
        assert expand <= expand_shared_bytes(tiles, p) <= 1.6 * expand, (dtype, rank)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_rule_fits_an_h200_as_it_is(dtype):
    of_slots = [p for slots in (1, 4, 64) for p in matrix(dtype, slots)]
    of_experts = [replace(p, experts=True, tile_m=tile_m) for p in matrix(dtype, 64) for tile_m in (16, 32, 64)]
    for p in of_slots:
        assert gpu_tiles(p, H200) == rule_of_thumb(p, H200)
    for p in (*of_slots, *of_experts):
        if dtype != "float16" or p.rank <= 256:  # there the formula counts more of h than the compiler keeps
            assert shrink_shared_bytes(rule_of_thumb(p, H200), p) <= H200.shared_memory
            assert expand_shared_bytes(rule_of_thumb(p, H200), p) <= H200.shared_memory, p


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("slots", [1, 4, 64])
def test_chosen_tiles_fit_99_kb(dtype, slots):
    refused = set()
    for p in matrix(dtype, slots):
        if fitted(rule_of_thumb(p, L4), p, L4.shared_memory) is None:
            with pytest.raises(LoRAError, match=f"{99 << 10} bytes of shared memory of nvidia_l4 for R = {p.rank}"):
                gpu_tiles(p, L4)
            assert too_large(p, L4) is not None
            refused.add((p.tile_m, p.rank))
            continue
        tiles = gpu_tiles(p, L4)
        assert shrink_shared_bytes(tiles, p) <= L4.shared_memory, p
        assert expand_shared_bytes(tiles, p) <= L4.shared_memory, p
    # h of all ranks in float32, for 64 rows, is too much by itself
    assert refused <= ({(64, 300), (64, 512)} if dtype != "bfloat16" else set())


@pytest.mark.parametrize("multiprocessors", [58, 132, 148])
def test_programs_of_the_rule_follow_the_multiprocessors(multiprocessors):
    """The grid keeps each multiprocessor equally busy."""
    gpu = replace(H200, multiprocessors=multiprocessors)
    for p in matrix("bfloat16", 64):
        tiles = rule_of_thumb(p, gpu)
        assert tiles.programs % multiprocessors == tiles.shrink_programs % multiprocessors == 0


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("k", [64, 2880, 4096, 18944])
def test_no_part_of_k_is_empty(k, experts):
    for p in matrix("bfloat16", 64):
        tiles = rule_of_thumb(replace(p, k=k, experts=experts), H200)
        steps = -(-k // tiles.block_k)
        assert (tiles.split_k - 1) * -(-steps // tiles.split_k) < steps


def longest_program(slices, block_n, used, counts, programs):
    """Return the blocks of columns of the longest program, each unit's partial sums counted as two."""
    blocks = [-(-size // block_n) for size in slices]
    units = [2 + len(range(i, n, count)) for n, count in zip(blocks, counts, strict=True) for i in range(count)] * used
    return max(sum(units[p::programs]) for p in range(min(programs, len(units))))


@pytest.mark.parametrize("slices", [(28672,), (18944, 18944), (4096, 1024, 1024), (3584, 512, 512), (64, 8)])
@pytest.mark.parametrize("programs", [132, 528])
@pytest.mark.parametrize("block_n", [64, 256])
def test_chunks_keep_the_longest_program_short(slices, programs, block_n):
    """No cut into chunks of one length has a longest program that is shorter by more than 20%."""
    blocks = [-(-size // block_n) for size in slices]
    for used in (0, 1, 3, 8, 17, 35, 64, 77, 160, 200, 528):
        counts = [int(count) for count in triton.column_chunks(slices, block_n, jnp.int32(used), programs)]
        assert all(1 <= count <= most for count, most in zip(counts, blocks, strict=True))
        cuts = {tuple(-(-n // length) for n in blocks) for length in range(1, max(blocks) + 1)}
        if 0 < used * sum(blocks) <= programs:
            assert counts == blocks  # a chunk for each block
        if used:
            shortest = min(longest_program(slices, block_n, used, cut, programs) for cut in cuts)
            assert longest_program(slices, block_n, used, counts, programs) <= 1.2 * shortest


def test_plan_tiles_suit_the_backend():
    assert plan_tile_m(1, 1, "xla") == 1
    for rows in (1, 8, 64, 256, 2048, 8192):
        for active in (1, 8, 64):
            if active <= rows:
                assert plan_tile_m(rows, active, "triton") in (16, 32, 64)
    assert plan_tile_m(8192, 64, "triton") == 64
    assert plan_tile_m(64, 64, "triton") == 16
