"""Before traffic, counting, and giving the model back."""

import numpy as np
import pytest

import jlora
from tests.manager.tiny import (
    LAYERS,
    MAX_RANK,
    SEQUENCES,
    VOCAB,
    WIDTH,
    DeviceError,
    failing_write,
    make_adapter,
    make_world,
    request,
)
from tests.records import slot_names


def test_after_warmup_nothing_compiles():
    world = make_world()
    m = world.manager
    assert m.stats().compilations == 0
    m.warmup(world.logits, jlora.BatchShape(SEQUENCES))
    assert m.stats().compilations == len(world.traces) == 1
    assert slot_names(m) == (None, None)
    world.load(*"abc")
    for names in (["a", "b", None], [None, None, None], ["c", "c", "a"]):
        world.check(world.serve(names), [None if n is None else make_adapter(n) for n in names])
    m.warmup(world.logits, jlora.BatchShape(SEQUENCES))
    assert m.stats().compilations == len(world.traces) == 1
    assert world.forward._cache_size() == 1


def test_warmup_for_packed_rows():
    world = make_world()
    seen = []
    shape = jlora.BatchShape(1, token_counts=[3], pad_to=8)
    world.manager.warmup(lambda batch: seen.append((batch.slots, batch.token_slots)), shape)
    (slots, rows), (none, no_rows) = seen
    assert (slots.tolist(), rows.tolist()) == ([0], [0] * 3 + [2] * 5)
    assert (none.tolist(), no_rows.tolist()) == ([2], [2] * 8)
    with world.manager.prepare([None], [3], 8) as batch:
        assert (batch.slots.aval, batch.token_slots.aval) == (slots.aval, rows.aval)


def test_a_warmup_that_fails_holds_no_slot(world):
    with failing_write(world.manager, 1), pytest.raises(DeviceError) as caught:
        world.manager.warmup()
    assert world.manager.stats().open_leases == 0, caught  # whose traceback refers to all locals
    world.load(*"ab")
    world.check(world.serve(["a", "b", None]), [make_adapter("a"), make_adapter("b"), None])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"pad_to": 8}, "pad_to is .* needs token_counts"),
        ({"token_counts": [1]}, "1 token_counts for 3 sequences"),
        ({"token_counts": [2, 2, -1]}, "token_counts must not be negative, got -1"),
        ({"token_counts": [2, 2, 2], "pad_to": 5}, r"token_counts sum to 6, and there are 5 packed rows \(pad_to\)"),
        ({"token_counts": [2, 2, 2], "length": 2}, "length is for rows that are not packed"),
        ({"length": 0}, "length must be positive, got 0"),
        ({"length": 2, "active_from": [0, -1, 0]}, "active_from must be one first row"),
    ],
    ids=str,
)
def test_a_shape_that_disagrees_is_refused(world, rows, message):
    for make in (jlora.BatchShape, lambda count, **rows: world.manager.prepare([None] * count, **rows)):
        with pytest.raises(jlora.LoRAUsageError, match=message):
            make(SEQUENCES, **rows)


@pytest.mark.usefixtures("unchecked_calls")
def test_a_shape_holds_what_a_batch_needs(world):
    for count in (0, True, 1.5):
        with pytest.raises(jlora.LoRAUsageError, match="num_sequences"):
            jlora.BatchShape(count)
    shape = jlora.BatchShape(2, np.array([3, 1]))
    assert (shape.token_counts, shape.pad_to) == ((3, 1), 4)
    assert shape == jlora.BatchShape(2, [3, 1], 4)
    assert len({shape, jlora.BatchShape(2, [3, 1]), jlora.BatchShape(2, items={"images": jlora.Items([0])})}) == 2
    for call in (lambda s: world.manager.warmup(None, s), lambda s: world.manager.verify(world.logits, None, s)):
        with pytest.raises(jlora.LoRAUsageError, match="row groups of this manager are none"):
            call(jlora.BatchShape(2, items={"images": jlora.Items([0])}))
        with pytest.raises(jlora.LoRAUsageError, match="activated=True"):
            call(jlora.BatchShape(2, length=3, active_from=[0, 1]))


@pytest.mark.parametrize("active", ["", "a", "ab"])
def test_warmup_changes_nothing_that_is_loaded(world, active):
    m = world.manager
    m.warmup()  # compiles, if no test did before
    world.load(*"abc")
    for name in active:
        m.prepare([name]).close()
    names = [*active, None, None, None][:SEQUENCES]
    first = world.serve(names)
    before, stats = world.held(), m.stats()
    m.warmup(world.logits, jlora.BatchShape(SEQUENCES))
    after = world.held()
    assert before[:2] == after[:2]
    for (path, old), (_, new) in zip(before[2], after[2], strict=True):
        np.testing.assert_array_equal(old[: len(active)], new[: len(active)], err_msg=str(path))
    assert m.stats() == stats
    np.testing.assert_array_equal(world.serve(names), first)


def test_stats_count(tmp_path):
    world = make_world(max_loras=2, max_cpu_loras=3)
    m = world.manager

    def check(*expected):
        s = m.stats()
        assert (s.host_loads, s.host_evictions, s.slot_loads, s.slot_evictions, s.slot_hits) == expected

    for name in ("a", "b", "c", "a"):  # the last is known
        m.add_adapter(request(tmp_path, name))
    check(3, 0, 0, 0, 0)
    m.prepare(["b", "b", "c"]).close()
    check(3, 0, 2, 0, 0)
    m.prepare(["b", "b", "c"]).close()
    m.prepare(["c"]).close()
    check(3, 0, 2, 0, 3)
    m.prepare(["a", "c", None]).close()
    check(3, 0, 3, 1, 4)
    m.add_adapter(make_adapter("d"))  # pushes b out of the host; its slot went to a
    m.add_adapter(make_adapter("a", 1), load_inplace=True)  # its slot is written for the next batch with it
    check(5, 1, 3, 1, 4)
    m.prepare(["a"]).close()  # over its own old version: no eviction
    m.remove_adapter("a")  # removed from its slot: none either
    check(5, 1, 4, 1, 4)
    with m.prepare(["c", "c", None]):
        s = m.stats()
        assert (s.registered, s.active, s.leased, s.unevictable) == (2, 1, 1, 1)
    assert m.stats().slot_bytes * 2 == sum(array.nbytes for _, array in world.slots())


def test_list_adapters_shows_every_level(world):
    adapter = make_adapter("a", rank=3, modules=["embed", "layers.0.v_proj"], base_model_name="org/base")
    world.manager.add_adapter(adapter)
    info = world.manager.list_adapters()["a"]
    assert (info.name, info.level, info.rank, info.modules, info.slot) == ("a", "host", 3, 2, None)
    assert (info.pinned, info.leases, info.request, info.base_model_name) == (False, 0, None, "org/base")
    # one row of each of the two at max_lora_rank, A for all slices of the merged layer, and all ranks and scales
    assert info.nbytes == 4 * MAX_RANK * (VOCAB + WIDTH + 3 * WIDTH + 32) + 8 * (1 + 1 + LAYERS * (3 + 1))
    world.manager.pin_adapter("a")
    with world.manager.prepare(["a"]), world.manager.prepare(["a", "a", None]):
        info = world.manager.list_adapters()["a"]
        assert (info.level, info.slot, info.pinned, info.leases) == ("slot", 0, True, 2)


@pytest.mark.usefixtures("unchecked_calls")
def test_list_adapters_takes_names_and_a_level(world):
    m = world.manager
    world.load(*"abc")
    m.prepare(["c"]).close()
    m.prepare(["a"]).close()
    everything = m.list_adapters()
    assert list(everything) == ["b", "c", "a"]
    assert m.list_adapters(["a", "nobody", "b"]) == {name: everything[name] for name in "ab"}
    assert list(m.list_adapters(["a", "nobody", "b"])) == ["a", "b"]
    assert list(m.list_adapters(level="slot")) == ["c", "a"]
    assert list(m.list_adapters(level="host")) == ["b"]
    assert m.list_adapters(["b"], level="slot") == m.list_adapters(level="evicted") == m.list_adapters(["nobody"]) == {}
    for names, level, message in ((None, "device", "level must be .*'device'"), ("a", None, r"write \['a'\]")):
        with pytest.raises(jlora.LoRAUsageError, match=message):
            m.list_adapters(names, level=level)


def test_a_manager_that_gave_its_model_back_takes_nothing(tmp_path):
    world = make_world()
    world.manager.add_adapter(make_adapter("a"))
    world.manager.pin_adapter("a")
    world.manager.save(tmp_path)
    assert world.manager.unwrap() is world.model
    world.manager.unwrap()  # twice is once
    for call in (
        lambda: world.manager.add_adapter(make_adapter("a")),
        lambda: world.manager.prepare([None]),
        lambda: world.manager.restore(tmp_path),
        world.manager.warmup,
    ):
        with pytest.raises(jlora.LoRAError, match=r"gave its model back|unwrap"):
            call()
    again = jlora.LoRAManager(world.model, jlora.LoRAConfig(max_loras=1, max_lora_rank=2))
    again.add_adapter(make_adapter("z", rank=2))
    assert again.pin_adapter("z")
