"""`prepare`: refusals, the content of a batch, and no transfer for an unchanged batch."""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jlora
from jlora.manager import loading
from tests.manager.test_loader import until
from tests.manager.tiny import World, make_adapter, make_world, request, same
from tests.records import slot_names, waiting

pytestmark = pytest.mark.device


@pytest.mark.usefixtures("unchecked_calls")
@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((["a", ["a"]],), r"adapter names, LoRARequests, handles, Mix and None, got \['a'\]"),
        ((frozenset("a"),), "in a list, got frozenset"),
        ((iter(["a"]),), "in a list, got list_iterator"),
        ((None,), "in a list, got NoneType"),
        ((["a", None], []), "0 token_counts for 2 sequences"),
        ((["a", None], 4), "must be integers"),
        ((["a", None], ["3", "1"]), "must be integers"),
        ((["a", None], [3, 2], 8.0), "must be integers"),
        ((["a", None], None, None, 0), "length must be positive, got 0"),
        ((["a", None], None, None, 1.0), "length must be integers, got float"),
        ((["a", None], [3, 2], None, 4), "packed rows have token_counts"),
    ],
)
def test_bad_arguments_change_nothing(world, args, message):
    world.load("b", "c", "a")
    world.serve(["b", "c", None])
    before, stats = world.held(), world.manager.stats()
    with pytest.raises(jlora.LoRAUsageError, match=message):
        world.manager.prepare(*args[:3], **({"length": args[3]} if args[3:] else {}))
    assert same(before, world.held())
    assert world.manager.stats() == stats


@pytest.mark.usefixtures("unchecked_calls")
def test_slots_and_rows_of_a_batch(world):
    world.load("a", "b")
    world.manager.prepare(["b"]).close()
    with world.manager.prepare(["a", None, "b", "a"]) as batch:
        assert batch.slots.dtype == jnp.int32
        assert batch.slots.tolist() == [1, 2, 0, 1]  # 2 slots: 2 is no adapter
        assert batch.token_slots is None
    with world.manager.prepare(["a", None, "b"], [2, 3, 0], pad_to=7) as batch:
        assert batch.slots.tolist() == [1, 2, 0]
        assert batch.token_slots.dtype == jnp.int32
        assert batch.token_slots.tolist() == [1, 1, 2, 2, 2, 2, 2]
    with world.manager.prepare(["a", "b"], [1, 1]) as batch:
        assert batch.token_slots.tolist() == [1, 0]
    for names in (("a", None), np.array(["a", None], object), deque(["a", None])):
        with world.manager.prepare(names) as batch:
            assert batch.slots.tolist() == [1, 2]


@pytest.mark.usefixtures("unchecked_calls")
def test_an_unchanged_batch_moves_nothing_and_reuses_its_arrays(world, moved):
    world.load("a", "b")
    names = ["a", None, "b"] * 21 + [None]
    counts = [3, 1, 2] * 21 + [5]
    with world.manager.prepare(names) as first, world.manager.prepare(names, counts, 200) as packed:
        pass
    moved.clear()
    with jax.transfer_guard("disallow_explicit"):
        for _ in range(3):
            with world.manager.prepare(list(names)) as again:
                assert again is not first
                assert again.slots is first.slots
            with world.manager.prepare(tuple(names), np.array(counts), 200) as again:
                assert again.slots is packed.slots
                assert again.token_slots is packed.token_slots
    assert moved == []
    world.manager.prepare(names[::-1]).close()
    assert len(moved) == 2  # the count can see them: slots and stamps


def test_a_kept_batch_does_not_outlive_a_change(world):
    """The same names again, after the slots behind them moved: served from where the adapters are now."""
    world.load("a", "b", "c")
    m, names, version = world.manager, ["a", "b", None], 0
    for change in (
        lambda: [world.serve(["c", "b", None]), world.serve(["b", "b", None])],
        lambda: [world.serve(["c", "a", None]), world.serve(["c", "b", None])],  # a and b change slots
        lambda: [m.remove_adapter("a"), m.warmup(), world.load("a")],
        lambda: m.remove_adapter("a"),
        lambda: m.add_adapter(make_adapter("a", 2), load_inplace=True),
    ):
        world.check(world.serve(names), [make_adapter("a", version), make_adapter("b"), None])
        change()
        if "a" not in m.list_adapters():
            with pytest.raises(jlora.AdapterNotFoundError):
                m.prepare(names)
            version = 1
            m.add_adapter(make_adapter("a", 1))
    world.check(world.serve(names), [make_adapter("a", 2), make_adapter("b"), None])


def test_adapters_that_fit_beside_open_batches(world: World) -> None:
    """Two slots: repeated names and the base need no further one, slots that are pinned or leased are not evicted."""
    world.load("a", "b", "c")
    fits = world.manager.fits
    assert fits(["a", None, "b", "a", None, "a"])
    assert fits([jlora.Mix({"a": 1.0}), "a"])
    assert fits([None])
    assert not fits(["a", "b", "c"])
    with world.manager.prepare(["a", None, None]):
        assert fits(["b"])
        assert fits(["a", "c"])
        assert not fits(["b", "c"])
    world.manager.pin_adapter("b")
    assert fits(["a", "b"])
    assert not fits(["a", "c"])
    before = world.held(), world.manager.stats()
    for names, error in ((["x"], jlora.AdapterNotFoundError), ("a", jlora.LoRAUsageError), ([], jlora.LoRAUsageError)):
        for call in (fits, world.manager.prepare):
            with pytest.raises(error):
                call(names)
    assert fits(["c", "b"])
    assert same(before[0], world.held())
    assert world.manager.stats() == before[1]


ENTRIES = st.lists(st.none() | st.sampled_from("abcdefgh"), min_size=1, max_size=4)
CHANGES = st.tuples(st.sampled_from(["lease", "close", "pin", "unpin", "replace"]), st.integers(0, 7))


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> tuple[World, list[jlora.LoRARequest]]:
    """Three slots, five places on the host, and eight adapters."""
    folder = tmp_path_factory.mktemp("adapters")
    return make_world(max_loras=3, max_cpu_loras=5), [request(folder, name) for name in "abcdefgh"]


@settings(max_examples=settings().max_examples // 2)
@given(rounds=st.lists(st.tuples(CHANGES, ENTRIES), min_size=25, max_size=30))
def test_adapters_fit_if_prepare_finds_slots(
    crowded: tuple[World, list[jlora.LoRARequest]], rounds: list[tuple[tuple[str, int], list[str | None]]]
) -> None:
    """Under random leases, pins, loads, evictions and new versions."""
    (world, requests), opened = crowded, deque[jlora.LoRABatch]()
    m = world.manager
    try:
        for each in requests:
            m.add_adapter(each)
        for (change, at), names in rounds:
            name = requests[at].name
            with contextlib.suppress(jlora.NoFreeSlotError, jlora.AdapterInUseError, jlora.AdapterNotFoundError):
                if change == "lease" and len(opened) < 2:
                    opened.append(m.prepare([name]))
                elif change == "close" and opened:
                    opened.popleft().close()
                elif change == "pin":
                    m.pin_adapter(name)
                elif change == "unpin":
                    m.unpin_adapter(name)
                elif change == "replace":
                    m.add_adapter(requests[at], load_inplace=True)
            before = m.list_adapters(), m.stats()
            fits = m.fits(names)
            assert (m.list_adapters(), m.stats()) == before
            try:
                m.prepare(names).close()
            except jlora.NoFreeSlotError:
                assert not fits
                assert m.stats() == before[1]  # nothing was loaded
            else:
                assert fits
    finally:
        while opened:
            opened.popleft().close()
        m.remove_all_adapters()


def in_time(call: Callable[[], Any]) -> Any:
    """Return or raise the result of a call, made in a thread because it may hang."""
    done: Future[Any] = Future()

    def work() -> None:
        try:
            done.set_result(call())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return done.result(20)


def test_more_adapters_than_fit_are_refused_before_any_is_loaded(tmp_path: Path) -> None:
    """Loaded all the same, they would evict each other from the host cache, and be loaded again, for ever."""
    world = make_world(max_loras=2, max_cpu_loras=2)
    m = world.manager
    a, b, c = (jlora.LoRARequest(name, str(tmp_path / name)) for name in "abc")
    for name in "abc":
        make_adapter(name).save_pretrained(tmp_path / name)
    assert m.fits([a, b])
    assert not m.fits([a, b, c])
    with pytest.raises(jlora.NoFreeSlotError, match="3 adapters need a slot, but of 2 slots 0 are"):
        in_time(lambda: m.prepare([a, b, c]))
    assert m.stats().host_loads == 0
    with m.prepare([a, None, None]) as batch:
        for timeout in (None, 0.05):
            with pytest.raises(jlora.NoFreeSlotError, match="2 adapters need a slot, but of 2 slots 1 are"):
                in_time(lambda timeout=timeout: m.prepare([b, c, None], timeout=timeout))
        assert m.stats().host_loads == 1
        # A call with a timeout waits, and loads when there is room.
        threading.Timer(0.1, batch.close).start()
        in_time(lambda: m.prepare([b, c, None], timeout=20)).close()
    assert set(slot_names(m)) == {"b", "c"}


def test_a_slot_that_a_pinned_name_keeps_for_its_new_version_counts_before_a_load(tmp_path: Path) -> None:
    world = make_world(max_loras=1, max_cpu_loras=2)
    m = world.manager
    m.add_adapter(request(tmp_path, "b"))
    m.add_adapter(request(tmp_path, "a"))
    m.pin_adapter("a")
    m.add_adapter(request(tmp_path, "a"), load_inplace=True)  # its slot still holds the old version
    m.add_adapter(request(tmp_path, "c"))  # evicts b
    loads = m.stats().host_loads
    assert not m.fits(["b"])
    with pytest.raises(jlora.NoFreeSlotError, match="1 adapters need a slot, but of 1 slots 1 are"):
        m.prepare(["b"])
    assert m.stats().host_loads == loads
    assert m.fits(["a"])
    m.prepare(["a"]).close()


def test_prepare_waits_for_room_taken_during_its_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world(max_loras=1, max_cpu_loras=1)
    m, taken = world.manager, deque[jlora.LoRABatch]()
    make_adapter("b").save_pretrained(tmp_path / "b")
    b, admit = jlora.LoRARequest("b", str(tmp_path / "b"), load_inplace=True), loading.admit

    def after_another(state: Any, content: Any, *args: Any) -> bool:
        if content.name == "b" and not taken:
            taken.append(in_time(lambda: m.prepare(["a", None, None])))  # of another thread: loads make no calls
        return admit(state, content, *args)

    monkeypatch.setattr(loading, "admit", after_another)
    m.add_adapter(request(tmp_path, "a"))
    with pytest.raises(jlora.NoFreeSlotError, match="host cache of 1 adapters is full"):
        in_time(lambda: m.prepare([b, None, None]))
    taken.pop().close()

    def close_it_later() -> None:
        until(lambda: len(taken) == 1)
        time.sleep(0.2)
        taken[0].close()

    threading.Thread(target=close_it_later, daemon=True).start()
    with in_time(lambda: m.prepare([b, None, None], timeout=20)) as batch:
        world.check(world.logits(batch), [make_adapter("b"), None, None])
    assert len(taken) == 1


def test_waiting_batches_load_in_order_of_arrival(tmp_path: Path) -> None:
    """Otherwise batches without a slot would evict each other's loads."""
    world = make_world(max_loras=1, max_cpu_loras=1)
    m, came = world.manager, deque[str]()
    m.add_adapter(request(tmp_path, "a"))
    for name in "bcde":
        make_adapter(name).save_pretrained(tmp_path / name)

    def serve(name: str) -> None:
        with m.prepare([jlora.LoRARequest(name, str(tmp_path / name)), None, None], timeout=20):
            came.append(name)

    with m.prepare(["a", None, None]):
        threads = [threading.Thread(target=serve, args=(name,)) for name in "bcde"]
        for count, thread in enumerate(threads):
            thread.start()
            until(lambda count=count: waiting(m) > count)
        assert m.fits(["a"])
        assert not m.fits([jlora.LoRARequest("e", str(tmp_path / "e"))])
        with pytest.raises(jlora.NoFreeSlotError, match="other batches wait for slots"):
            m.prepare([jlora.LoRARequest("e", str(tmp_path / "e")), None, None])
    for thread in threads:
        thread.join(20)
    assert list(came) == list("bcde")
    assert m.stats().host_loads == 5
