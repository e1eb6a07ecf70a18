"""The chains that a search times: their values against NumPy, their rows, and the lowering of candidates for CUDA."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from jlora.pallas.gpus import H200
from jlora.pallas.search import Shape, Task, neighbours, similar_tiles
from jlora.pallas.tables import gpu_tiles, tuned_tables
from jlora.pallas.tiles import GPUTiles, ProductTiles, product_shared_bytes
from jlora.pallas.trial import TOLERANCE, Chain, OnDevice, group_ids
from tests import oracle
from tests.pallas.lowering import for_gpu
from tests.pallas.running import interpret_of

pytestmark = [pytest.mark.device("gpu"), pytest.mark.usefixtures("quickly_compiled")]

TILES = GPUTiles(32, 2, 16, 1, 1, 4, block_n=16, chunks=4, programs=4)
TOGETHER = ProductTiles(16, 32, 2, 4, 2, lora=TILES)
SMALL = Shape(64, (24, 8), 8, "bfloat16", "bfloat16", 3, fusible=True)
WIDE = replace(SMALL, dtype="float32", slot_dtype="float32")
EXPERTS = Shape(64, (24,), 8, "bfloat16", "bfloat16", 2, experts=4)
INTERPRET = bool(interpret_of("triton"))


def chain(task, *tiles, layers=2) -> Chain:
    made = Chain(task, INTERPRET, layers)
    made.compile(tiles)
    return made


CASES = [
    (Task("add_lora", SMALL, 9), TILES), (Task("add_lora", WIDE, 3), TILES),
    (Task("add_lora_experts", EXPERTS, 5, 2), TILES), (Task("linear_lora", SMALL, 9), TOGETHER),
    (Task("linear_lora", SMALL, 5), None), (Task("add_lora", SMALL, 1), TILES),
]  # fmt: skip


@pytest.mark.parametrize(("task", "tiles"), CASES)
def test_chains_have_the_values_of_numpy_and_their_own_check_agrees(task, tiles):
    made = chain(task, tiles)
    for ids, plan in zip(made.mixes, made.plans, strict=True):
        start = made.x + 0 if task.op == "linear_lora" else np.zeros((task.rows, task.shape.n), made.x.dtype)
        got = np.asarray(made.runs[tiles](start, made.x, made.layers, plan, made.ranks)[1], np.float64)
        x, (*w, a, b) = np.asarray(made.x, np.float64), made.layers[0]
        base = x @ np.asarray(w[0], np.float64) if w else np.zeros((task.rows, task.shape.n))
        want = oracle.add_lora(base, x, ids, a, b, task.shape.slices)[:16]
        assert np.linalg.norm(got - want) <= TOLERANCE[task.shape.dtype] / 2 * np.linalg.norm(want)
    assert made.error(tiles) <= TOLERANCE[task.shape.dtype] / 2


@pytest.mark.parametrize("change", [lambda out: out * 1.05, lambda out: out.at[-1].set(0), lambda out: out * math.nan])
def test_wrong_values_are_found(change, caplog):
    made = chain(Task("add_lora", SMALL, 9), TILES)
    assert not made.is_wrong(TILES)
    run = made.runs[TILES]

    def broken(*args):
        base, rows = run(*args)
        return base, change(rows)

    made.runs[TILES] = broken
    assert made.is_wrong(TILES)
    assert "gives wrong values" in caplog.text
    calls = itertools.count()

    def changing(*args):
        base, rows = run(*args)
        return base, rows.at[-1].multiply(1 + next(calls) * 2**-7)

    made.runs[TILES] = changing
    assert made.error(TILES) == math.inf


def test_tiles_that_do_not_compile_take_forever():
    """Interpreted kernels compile with all tiles of their operation, so these are of another one."""
    measure, task = OnDevice(INTERPRET, layers=1), Task("add_lora", SMALL, 4)
    us = measure(task, [TILES, TOGETHER], True)
    assert 0 < us[0] < us[1] == math.inf
    assert measure(task, [], False) == []


@pytest.mark.parametrize(
    ("task", "adapters", "without"), [
        (Task("add_lora", replace(SMALL, slots=64), 64), 8, 1), (Task("add_lora", replace(SMALL, slots=64), 1), 1, 0),
        (Task("linear_lora", SMALL, 7), 0, 7), (Task("add_lora", replace(SMALL, slots=64), 4096), 8, 1),
    ],
)  # fmt: skip
def test_rows_are_those_of_a_step(task, adapters, without):
    """Mixed in decode and consecutive in a prefill; one row of several has no adapter."""
    ids = group_ids(task, adapters)
    groups = task.shape.slots
    assert ids.shape == (task.rows,)
    assert (ids == groups).sum() == without
    used = ids[ids < groups]
    assert len(np.unique(used)) == adapters
    changes = (np.diff(used) != 0).sum()
    assert (changes == max(0, adapters - 1)) == (task.tokens > 256 or adapters < 2)


def test_experts_of_a_token_are_distinct_and_of_its_slot():
    ids = group_ids(Task("add_lora_experts", replace(EXPERTS, experts=8, slots=4), 40, 3), 4).reshape(40, 3)
    rest = ids[1:]
    assert (rest // 8 == rest[:, :1] // 8).all()
    assert all(len(set(row)) == 3 for row in rest.tolist())


def test_candidates_are_lowered_for_cuda():
    """A sample of those that a search of each operation tries."""
    shape = Shape(512, (256, 64), 16, "bfloat16", "bfloat16", 8, fusible=True)
    for task in (Task("add_lora", shape, 64), Task("linear_lora", shape, 64)):
        similar = similar_tiles(task, list(tuned_tables(H200.kind)))
        present = gpu_tiles(task.problem, H200) if task.op == "add_lora" else None
        made = Chain(task, layers=1)
        for tiles in dict.fromkeys([present, similar[0], *neighbours(similar[0])[::5]]):
            if isinstance(tiles, ProductTiles) and product_shared_bytes(tiles, task.problem) > H200.shared_memory:
                continue
            run, args = made.job(tiles)
            with for_gpu():
                text = run.trace(*args).lower(lowering_platforms=("cuda",)).as_text()
            names = ("lora_shrink", "lora_expand") if not isinstance(tiles, ProductTiles) else ("lora_product",)
            assert all(name in text for name in names)
