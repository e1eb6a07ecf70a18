"""The search of tiles, with costs that a formula gives: its choices, its table, limits of time, and interruptions."""

import itertools
import math
from dataclasses import fields, replace

import pytest

from jlora.pallas.gpus import GPU, H200
from jlora.pallas.search import Shape, Task, neighbours, search, similar_tiles, tasks_of
from jlora.pallas.tables import Key, gpu_tiles, own_table, product_tiles, read_table, tuned_tables
from jlora.pallas.tiles import GPUTiles, ProductTiles, expand_shared_bytes, product_shared_bytes, shrink_shared_bytes
from tests.pallas.lowering import for_gpu

QKV = Shape(3584, (3584, 512, 512), 16, "bfloat16", "bfloat16", 64, fusible=True)
EXPERTS = Shape(1408, (2048,), 16, "bfloat16", "bfloat16", 8, experts=64)
BEST = GPUTiles(64, 7, 16, 2, 4, 1056, 64, 1056, 1, 2, 2, 1056)
TOGETHER = ProductTiles(64, 64, 4, 4, 6, lora=replace(BEST, shrink_warps=1, shrink_stages=1))  # not used beside it
L4 = GPU("nvidia_l4", 99 << 10, 89)


def cost(tiles) -> float:
    """Return microseconds that grow with the distance of each size from those of BEST or TOGETHER."""
    if tiles is None:
        return 30.0
    return 10 * 1.05 ** distance(tiles, TOGETHER if isinstance(tiles, ProductTiles) else BEST)


def distance(tiles, best) -> float:
    own = [f.name for f in fields(best) if f.name != "lora"]
    total = sum(abs(math.log2(getattr(tiles, name) / getattr(best, name))) for name in own)
    return total + distance(tiles.lora, best.lora) if isinstance(tiles, ProductTiles) else total


class Costs:
    """A `Measure` by `cost`. It records its calls; `wrong` names tiles that fail the check of values."""

    def __init__(self, cost=cost, wrong=lambda tiles: False, interrupt_at=None):
        self.cost, self.wrong, self.interrupt_at = cost, wrong, interrupt_at
        self.tasks, self.tried, self.finals = [], [], []

    def __call__(self, task, tiles, finals):
        if task not in self.tasks:
            self.tasks.append(task)
            if len(self.tasks) == self.interrupt_at:
                raise KeyboardInterrupt
        (self.finals if finals else self.tried).extend(tiles)
        return [math.inf if finals and self.wrong(each) else self.cost(each) for each in tiles]


@pytest.fixture(autouse=True)
def on_an_h200():
    with for_gpu():
        yield


def run(tasks, measure, **options):
    path = search(tasks, measure, **{"seconds": 1e9, **options})
    assert path == own_table("nvidia_h200")
    return read_table(path)


def test_tasks_are_the_keys_of_a_table_each_once():
    twin = Shape(3584, (4608,), 16, "bfloat16", "bfloat16", 64)
    tasks = tasks_of([QKV, twin, EXPERTS], [64, 33, 2048], per_token=6)
    made = [(task.op, task.key.rows, task.key.k, task.key.n) for task in tasks]
    assert made == [
        ("add_lora", 64, 3584, 4608), ("linear_lora", 64, 3584, 4608), ("add_lora_experts", 512, 1408, 2048),
        ("add_lora_experts", 256, 1408, 2048), ("add_lora", 2048, 3584, 4608),
        ("add_lora_experts", 16384, 1408, 2048),
    ]  # fmt: skip
    assert [task.rows for task in tasks] == [64, 64, 384, 198, 2048, 12288]


@pytest.mark.parametrize(
    ("task", "most"),
    [(Task("add_lora", QKV, 64), 40), (Task("linear_lora", QKV, 64), 45), (Task("add_lora", QKV, 4096), 40)],
)
def test_the_search_comes_close_to_the_best_with_few_candidates(task, most):
    measure = Costs()
    present = product_tiles(task.problem, H200) if task.op == "linear_lora" else gpu_tiles(task.problem, H200)
    (tiles,) = run([task], measure).values()
    assert cost(tiles) <= 0.8 * cost(present)
    assert cost(tiles) <= 1.3 * 10
    assert len(measure.tried) == len(set(measure.tried)) <= most
    assert tiles in measure.finals


def test_a_shape_is_searched_widely_once_for_decode_and_once_for_prefill():
    counts = []
    for tokens in ([64], [64, 32], [64, 32, 8], [64, 32, 8, 2048], [64, 32, 8, 2048, 8192]):
        measure = Costs()
        run(tasks_of([EXPERTS], tokens, 1), measure, again=True)
        counts.append(len(measure.tried))
    wide, narrow, further, prefill, last = (b - a for a, b in itertools.pairwise([0, *counts]))
    assert max(narrow, further, last) <= 4
    assert min(wide, prefill) >= 15


def test_steps_found_are_the_tiles_of_the_next_trace():
    task = Task("add_lora", QKV, 64)
    (tiles,) = run([task], Costs()).values()
    assert gpu_tiles(task.problem, H200) == tiles


@pytest.mark.parametrize(("apart", "together"), [(10.2, False), (10.29, False), (10.31, True), (30.0, True)])
def test_product_and_lora_are_fused_for_a_gain_of_three_percent(apart, together):
    """Otherwise the entry keeps them apart, whatever later tables have."""
    task = Task("linear_lora", Shape(4096, (4096, 1024, 1024), 16, "bfloat16", "bfloat16", 64, fusible=True), 64)
    assert product_tiles(task.problem, H200) is not None
    steps = []
    table = run(
        [task], Costs(lambda tiles: apart if tiles is None else max(10.0, cost(tiles) / 10)), progress=steps.append
    )
    assert (product_tiles(task.problem, H200) is not None) == together
    assert (table[task.key] is not None) == together
    (step,) = steps
    assert (step.together, step.before_us, step.us) == (together, apart, 10.0 if together else apart)


def test_wrong_values_are_never_chosen():
    task = Task("add_lora", QKV, 64)
    (right,) = run([task], Costs()).values()
    (tiles,) = run([task], Costs(wrong=lambda tiles: tiles == right), again=True).values()
    assert tiles != right
    both = [task, Task("linear_lora", QKV, 64)]
    steps = []
    table = run(both, Costs(wrong=lambda tiles: tiles is not None), again=True, progress=steps.append)
    assert steps[0].us == math.inf
    assert table[task.key] == tiles  # the former entry
    assert table[both[1].key] is None


def test_the_search_ends_in_time_and_goes_on_later():
    """It begins no entry that would take as long as the longest before and end too late."""
    tasks = tasks_of([QKV, EXPERTS], [64, 8], 1)
    assert len(tasks) == 6
    now, steps = [100.0], []

    def clock():
        return now[0]

    class Slow(Costs):
        def __call__(self, task, tiles, finals):
            now[0] += 5 * finals
            return super().__call__(task, tiles, finals)

    measure = Slow()
    assert len(run(tasks, measure, seconds=24, clock=clock, progress=steps.append)) == len(measure.tasks) == 4
    assert now[0] <= 124
    assert [(step.done, step.total) for step in steps] == [(i, 6) for i in range(1, 5)]
    later = Costs()
    assert len(run(tasks, later, progress=steps.append)) == 6
    assert later.tasks == tasks[4:]
    assert steps[-1].done == 6
    assert run(tasks, Costs(interrupt_at=1)).keys() == {task.key for task in tasks}
    with pytest.raises(KeyboardInterrupt):
        run(tasks, Costs(interrupt_at=1), again=True)


def test_an_interrupted_search_keeps_complete_entries():
    tasks = tasks_of([QKV, EXPERTS], [64, 8], 1)
    with pytest.raises(KeyboardInterrupt):
        run(tasks, Costs(interrupt_at=4))
    assert read_table(own_table("nvidia_h200")).keys() == {task.key for task in tasks[:3]}
    measure = Costs()
    assert run(tasks, measure).keys() == {task.key for task in tasks}
    assert measure.tasks == tasks[3:]


def test_the_given_folder_gets_the_table(tuned_folder):
    search([Task("add_lora", QKV, 64)], Costs(), seconds=1)
    assert len(read_table(tuned_folder / "nvidia_h200.json")) == 1


def test_the_most_similar_shapes_come_first():
    own = Key("add_lora", "bfloat16", 32, 3584, 4608, 16)
    tables = [{own: BEST}, *tuned_tables("nvidia_h200")]
    found = similar_tiles(Task("add_lora", QKV, 64), tables)
    assert found[0] == BEST
    assert len(found) > 20
    assert all(isinstance(tiles, GPUTiles) for tiles in found)
    wide = Task("add_lora", Shape(7168, (4608,), 16, "bfloat16", "bfloat16", 64), 64)
    (moved,) = similar_tiles(wide, tables[:1])
    assert moved == replace(BEST, split_k=2 * BEST.split_k)  # as many steps of K in a part


@pytest.mark.parametrize("tiles", [BEST, TOGETHER])
def test_neighbours_differ_by_one_step(tiles):
    found = neighbours(tiles)
    assert len(found) == len(set(found)) >= 14
    assert tiles not in found
    for each in found:
        names = [f.name for f in fields(each) if f.name != "lora" and getattr(each, f.name) != getattr(tiles, f.name)]
        lora = () if isinstance(each, GPUTiles) or each.lora == tiles.lora else ("lora",)
        assert len({*names, *lora} - {"chunks"}) == 1


def test_candidates_fit_the_shared_memory_of_a_small_gpu():
    with for_gpu("NVIDIA L4", 58):
        measure = Costs()
        tasks = tasks_of([Shape(3584, (3584, 512, 512), 128, "bfloat16", "bfloat16", 64, fusible=True)], [64, 1024], 1)
        path = search(tasks, measure, seconds=1e9)
    assert path.name == "nvidia_l4.json"
    assert len(read_table(path)) == 3
    (few, _, many) = (task.problem for task in tasks)
    for tiles in (tiles for tiles in measure.tried if tiles is not None):
        if isinstance(tiles, ProductTiles):
            assert product_shared_bytes(tiles, few) <= L4.shared_memory
        else:
            fits = [
                max(shrink_shared_bytes(tiles, p), expand_shared_bytes(tiles, p)) <= L4.shared_memory
                for p in (few, many)
            ]
            assert any(fits)
