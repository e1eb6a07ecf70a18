"""Loads in the background: futures, one load for each adapter, cancellation, and independence of other calls."""

import contextlib
import dataclasses
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from functools import partial
from types import SimpleNamespace

import huggingface_hub
import jax
import numpy as np
import pytest

import jlora
from jlora.adapters.adapter import open_adapter
from jlora.fit import read as fit_read
from tests.manager.tiny import MAX_RANK, World, make_adapter, make_world, same
from tests.records import content_of, evict, evicted, on_host, slot_names, waiting
from tests.small_device import on_small_device

pytestmark = pytest.mark.device


class Store:
    """Adapters in folders, and the reads of them, which wait while their name is in `closed`."""

    def __init__(self, folder):
        self.folder = folder
        self.reads: list[str] = []
        self.threads: list[threading.Thread] = []
        self.closed: set[str] = set()

    def request(self, name, version=0, **options) -> jlora.LoRARequest:
        folder = self.folder / f"{name}{version}"
        if not folder.exists():
            make_adapter(name, version).save_pretrained(folder)
            for file in folder.iterdir():
                os.utime(file, (1, 1))  # a file of just now would be waited for
        return jlora.LoRARequest(name, folder, **options)

    def spoil(self, name):
        """Cut the weights of an adapter short, and return a function that mends them."""
        weights = self.folder / f"{name}0" / "adapter_model.safetensors"
        sound = weights.read_bytes()
        weights.write_bytes(sound[:-3])
        os.utime(weights, (1, 1))

        def mend():
            weights.write_bytes(sound)
            os.utime(weights, (2, 2))

        return mend

    def open_adapter(self, found, **options):
        name = found.name
        self.reads.append(name)
        self.threads.append(threading.current_thread())
        while name in self.closed:
            time.sleep(0.001)
        return open_adapter(found, **options)

    def until_read(self, name, times=1):
        until(lambda: self.reads.count(name) >= times)


def until(true: Callable[[], bool], seconds=30.0):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.001)


def running() -> bool:
    """Return whether a load runs."""
    return any(thread.name == "jlora-load" for thread in threading.enumerate())


@pytest.fixture
def store(tmp_path, monkeypatch) -> Iterator[Store]:
    made = Store(tmp_path)
    monkeypatch.setattr(fit_read, "open_adapter", made.open_adapter)
    yield made
    made.closed.clear()
    until(lambda: not running())


@contextlib.contextmanager
def thread(work: Callable[[], object]) -> Iterator[list]:
    """Run work beside the block, and append its result or exception to the list."""
    outcome: list = []

    def run():
        try:
            outcome.append(work())
        except BaseException as error:
            outcome.append(error)

    beside = threading.Thread(target=run)
    beside.start()
    try:
        yield outcome
    finally:
        beside.join(60)
        assert not beside.is_alive()


def check(world: World, *names, versions=()):
    adapters = [None if n is None else make_adapter(n, dict(versions).get(n, 0)) for n in names]
    world.check(world.serve(list(names)), adapters)


# --- futures ----------------------------------------------------------------------------------------------------------


def test_a_prefetch_is_an_add_in_the_background(world, store):
    store.closed.add("a")
    future = world.manager.prefetch(store.request("a"))
    store.until_read("a")
    assert not future.done()
    assert world.manager.list_adapters() == {}
    with pytest.raises(jlora.AdapterNotFoundError):  # prepare takes the request; the name is not known yet
        world.manager.prepare(["a"])
    store.closed.clear()
    assert future.result(30) is True
    check(world, "a", None, "a")
    assert world.manager.prefetch(store.request("a")).result(30) is False
    assert store.reads == ["a"]
    assert threading.current_thread() not in store.threads


@pytest.mark.parametrize("again", ["add", "prepare"])
def test_failed_load_raises_and_can_be_repeated(world, store, again):
    world.manager.add_adapter(make_adapter("b"))
    world.serve(["b", None, None])
    request = store.request("a")
    mend = store.spoil("a")
    before, stats = world.held(), world.manager.stats()
    future = world.manager.prefetch(request)
    assert isinstance(future.exception(30), jlora.AdapterFormatError)
    assert "'a'" in str(future.exception())
    assert same(before, world.held())
    assert world.manager.stats() == stats
    mend()
    if again == "add":
        assert world.manager.add_adapter(request)
    else:
        with pytest.raises(jlora.AdapterFormatError):  # of the failed load, raised to the next caller
            world.manager.prepare([request])
        world.manager.prepare([request]).close()
    check(world, "a", "b", None)
    assert store.reads == ["a", "a"]


def test_few_of_the_loads_that_fail_are_kept(world, tmp_path):
    """Failed loads are remembered for the next caller, but only the last few, because clients can invent names."""
    requests = [jlora.LoRARequest(f"x{i}", tmp_path) for i in range(200)]
    for request in requests:
        assert isinstance(world.manager.prefetch(request).exception(30), jlora.AdapterFormatError)
    make_adapter("x").save_pretrained(tmp_path)
    with pytest.raises(jlora.AdapterFormatError, match="'x136'"):  # the oldest of 64
        world.manager.prepare([requests[136]])
    world.manager.prepare([requests[135]]).close()  # tried anew
    until(lambda: not running())


def test_a_cancelled_load_that_waits_for_its_turn_is_never_read(world, store):
    busy = [world.manager.prefetch(store.request(name)) for name in "abcd" if not store.closed.add(name)]
    for name in "abcd":
        store.until_read(name)
    future = world.manager.prefetch(store.request("e"))
    assert future.cancel()
    store.closed.clear()
    assert all(f.result(30) for f in busy)
    until(lambda: not running())
    assert sorted(store.reads) == list("abcd")
    with pytest.raises(CancelledError):
        future.result(1)
    assert "e" not in world.manager.list_adapters()
    assert world.manager.add_adapter(store.request("e"))


def test_a_load_cancelled_while_it_reads_is_dropped_unless_another_waits_for_it(world, store):
    store.closed.add("a")
    before = world.held()
    future = world.manager.prefetch(store.request("a"))
    store.until_read("a")
    assert future.cancel()
    store.closed.clear()
    until(lambda: not running())
    assert same(before, world.held())
    store.closed.add("a")
    first, second = (world.manager.prefetch(store.request("a")) for _ in range(2))
    store.until_read("a", 2)
    assert first.cancel()
    store.closed.clear()
    assert second.result(30)
    assert first.cancelled()
    assert not second.cancel()  # too late
    assert list(world.manager.list_adapters()) == ["a"]


def test_concurrent_requests_share_one_load(world, store):
    store.closed.add("a")
    request = store.request("a")
    futures = [world.manager.prefetch(request) for _ in range(3)]
    world.manager.add_adapter(make_adapter("b"))
    with (
        thread(lambda: world.manager.add_adapter(request)) as added,
        thread(lambda: world.serve([request, None, "b"])) as served,
    ):
        store.until_read("a")
        time.sleep(0.05)
        store.closed.clear()
    assert [future.result(30) for future in futures] == [True] * 3
    assert added == [True]
    world.check(served[0], [make_adapter("a"), None, make_adapter("b")])
    assert store.reads == ["a"]


def test_a_failed_load_is_raised_while_another_of_the_batch_hangs(world, store):
    store.closed.add("a")
    requests = [store.request("a"), store.request("b")]
    store.spoil("b")
    with pytest.raises(jlora.AdapterFormatError, match="'b'"):
        world.manager.prepare(requests, timeout=2)


def test_a_replacement_is_loaded_again_if_a_load_beside_it_found_no_room(world, store):
    m = world.manager  # its host cache has room for four
    m.add_adapter(store.request("a"))
    m.pin_adapter("a")
    for name in "cd":
        m.add_adapter(make_adapter(name))
    store.closed.update("ab")
    newer = store.request("a", 1, load_inplace=True)
    with thread(lambda: m.prepare([store.request("b"), newer, None], timeout=30)) as outcome:
        store.until_read("a", 2)
        store.until_read("b")
        m.add_adapter(make_adapter("e"))
        store.closed.remove("b")
        until(lambda: waiting(m) == 1)
        store.closed.clear()
        m.remove_adapter("e")
    with outcome[0] as batch:
        world.check(world.logits(batch), [make_adapter("b"), make_adapter("a", 1), None])


# --- how long ---------------------------------------------------------------------------------------------------------


def poll(call: Callable[[], object]):
    """Repeat a call until its loads have ended, at most once after that."""
    ended = False
    while True:
        try:
            return call()
        except jlora.LoadTimeoutError:
            assert not ended, "the load has ended, and is not found"
        time.sleep(0.001)
        ended = not running()


@pytest.mark.parametrize(("call", "timeout"), [("add_adapter", 0.02), ("prepare", 0)])
def test_loads_that_time_out_run_on(world, store, call, timeout):
    """The message names the adapters that are missing alone."""
    m, added = world.manager, call == "add_adapter"
    m.add_adapter(store.request("b"))
    store.closed.add("a")
    request = store.request("a")
    again = partial(m.add_adapter, request) if added else partial(m.prepare, [request, "b", None])
    for _ in range(3):
        started = time.monotonic()
        with pytest.raises(jlora.LoadTimeoutError, match=r"'a' from .*a0'; loads run on") as caught:
            again(timeout=timeout)
        assert "'b'" not in str(caught.value)
        assert timeout <= time.monotonic() - started < timeout + 5
    assert issubclass(jlora.LoadTimeoutError, TimeoutError)
    assert list(m.list_adapters()) == ["b"]
    store.closed.clear()
    got = poll(partial(again, timeout=timeout))
    if added:
        assert got in (True, False)  # loaded during this poll, or before it
    else:
        got.close()
    check(world, "a", "b", None)
    assert store.reads == ["b", "a"]


@pytest.mark.parametrize("call", ["add_adapter", "prepare"])
def test_the_error_of_a_load_that_ran_on_is_raised_once(world, store, call):
    request = store.request("a")
    mend = store.spoil("a")
    again = partial(getattr(world.manager, call), request if call == "add_adapter" else [request], timeout=0)
    for tries in (1, 2):
        store.closed.add("a")
        with pytest.raises(jlora.LoadTimeoutError):
            again()
        store.closed.clear()
        with pytest.raises(jlora.AdapterFormatError, match="'a'"):
            poll(again)
        assert store.reads == ["a"] * tries
    mend()
    poll(again)
    assert on_host(world.manager) == ["a"]


@pytest.mark.parametrize("call", ["add_adapter", "prepare"])
def test_a_replacement_that_times_out_is_abandoned(world, store, call):
    """It has read files that may be older than those of a later call."""
    world.manager.add_adapter(store.request("a"))
    newer = store.request("a", 1, load_inplace=True)
    store.closed.add("a")
    with pytest.raises(jlora.LoadTimeoutError, match=r"'a' from .*a1' \(with load_inplace, so a repeated call starts"):
        getattr(world.manager, call)(newer if call == "add_adapter" else [newer], timeout=0.02)
    store.closed.clear()
    until(lambda: not running())
    check(world, "a", None, None)
    assert world.manager.add_adapter(newer, timeout=30)
    check(world, "a", None, None, versions={"a": 1})


def test_replacement_waits_for_open_batches(world, store):
    world.manager.add_adapter(store.request("a"))
    newer = store.request("a", 1, load_inplace=True)
    batch = world.manager.prepare(["a", None, None])
    with pytest.raises(jlora.AdapterInUseError, match="'a' is held by an open batch"):
        world.manager.add_adapter(newer, timeout=1.0)  # most of it for the batch, some of it to read
    with pytest.raises(jlora.AdapterInUseError, match="'a' is held by an open batch"):
        world.manager.add_adapter(newer)  # this very thread has the batch: it would wait for ever
    future = world.manager.prefetch(newer)
    with thread(lambda: world.manager.prepare([newer, None, None], timeout=30)) as outcome:
        time.sleep(0.1)
        assert not future.done()
        assert outcome == []
        world.check(world.logits(batch), [make_adapter("a"), None, None])
        batch.close()
    with outcome[0] as replaced:
        world.check(world.logits(replaced), [make_adapter("a", 1), None, None])
    assert future.result(30)


def test_removal_waits_for_batches_of_other_threads(world):
    world.manager.add_adapter(make_adapter("a"))
    opened, close = threading.Event(), threading.Event()

    def hold():
        with world.manager.prepare(["a", None, None]):
            opened.set()
            close.wait(60)

    with thread(hold):
        assert opened.wait(60)
        with pytest.raises(jlora.AdapterInUseError):
            world.manager.remove_adapter("a", timeout=0.05)
        with thread(lambda: world.manager.remove_adapter("a")) as outcome:
            time.sleep(0.05)
            assert outcome == []
            close.set()
        assert outcome == [True]


def test_a_slow_read_stalls_nothing(world, store):
    """The read of a takes for ever: a step, a batch of others, a swap and every query return during it."""
    world.load(*"bcd")
    check(world, "b", "c", None)
    world.manager.warmup()
    store.closed.add("a")
    future = world.manager.prefetch(store.request("a"))
    store.until_read("a")

    m = world.manager
    for call in (
        lambda: [world.serve(names) for names in (["b", "c", None], ["d", "b", None])],
        lambda: [m.list_adapters(), m.stats(), slot_names(m), m.slots, m.warmup(), m.add_adapter(make_adapter("b"))],
        lambda: m.prepare([store.request("a"), "b"], timeout=0),
    ):
        with contextlib.suppress(jlora.LoadTimeoutError):  # the last
            call()
        assert not future.done()


# --- prepare: requests, loads in progress, and order of arrival -------------------------------------------------------


@pytest.mark.usefixtures("python_handles_sigint")
def test_an_interrupted_wait_leaves_the_queue():
    world = make_world(max_loras=1, max_cpu_loras=2)
    world.load(*"ab")
    with world.manager.prepare(["a"]):
        threading.Timer(0.1, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            world.manager.prepare(["b"], timeout=30)
        with pytest.raises(jlora.NoFreeSlotError):
            world.manager.prepare(["b"], timeout=0.02)
    check(world, "b", None, None)
    assert waiting(world.manager) == 0


# --- the host cache ---------------------------------------------------------------------------------------------------


def test_an_evicted_adapter_is_listed_and_loaded_again_on_demand(world, store):
    m = world.manager
    for name in "abcde":  # the host has room for four
        m.add_adapter(store.request(name))
    with m.prepare(["b", None, None]):
        records = m.list_adapters()
    assert [*records] == ["a", "c", "d", "e", "b"]  # evicted ones first, then the least recently used
    assert [records[name].level for name in "abc"] == ["evicted", "slot", "host"]
    version, found = records["a"].version, records["a"]
    assert (found.slot, found.pinned, found.leases, found.nbytes) == (None, False, 0, 0)
    assert found.rank is found.modules is found.base_model_name is found.invocation_tokens is None
    assert evicted(m) == {"a": store.request("a")}
    with pytest.raises(jlora.AdapterNotFoundError, match="'a' was evicted from the host cache"):
        m.export_adapter("a")
    for call in (m.pin_adapter, m.hold, lambda name: m.prefetch(name).result(30)):
        call("a")
        assert "a" in on_host(m)
        assert m.list_adapters(["a"])["a"].version == version  # the same content
        assert m.prefetch("a").result(30) is False
        m.unpin_adapter("a")
        while evict(m):
            pass
        assert "a" not in on_host(m)
    check(world, "a", None, None)
    assert evict(m)
    assert m.remove_adapter("a")  # known, and forgotten now
    assert not m.remove_adapter("a")
    with pytest.raises(jlora.AdapterNotFoundError):
        m.prepare(["a"])
    with pytest.raises(jlora.AdapterNotFoundError, match="nobody"):
        m.prefetch("nobody")
    m.add_adapter(make_adapter("memory"))
    assert m.prefetch("memory").result(30) is False  # never read from anywhere


# --- ahead ------------------------------------------------------------------------------------------------------------


def test_a_prefetched_adapter_is_on_the_device_already(world, store, moved):
    m = world.manager
    m.warmup()
    m.prefetch(store.request("a")).result(30)
    content = content_of(m, "a")
    assert all(isinstance(block.a, jax.Array) for block in content.prefetched)
    moved.clear()
    batch = m.prepare(["a", None, None])
    assert not [array for array in moved if isinstance(array, np.ndarray) and array.ndim > 2]  # ranks are small
    with batch:
        world.check(world.logits(batch), [make_adapter("a"), None, None])
    assert content.prefetched is None  # the device keeps one copy, in the slot


def test_arrays_consumed_by_a_write_are_freed_by_the_next_load(world, store):
    """Not in the thread that steps; and it is no more than one write's."""
    m = world.manager
    gone = []
    for name in "abc":
        m.prefetch(store.request(name)).result(30)
        assert not any(array() is not None for array in gone)
        before = [weakref.ref(array) for path, array in world.slots() if path[-1].endswith(("_a", "_b"))]
        m.prepare([name, None, None]).close()
        gone = [array for array in before if array() is None or array().is_deleted()]
        assert gone
        assert all(array() is not None for array in gone)


def test_prefetched_bytes_on_device_are_bounded(store):
    room = 9000  # bytes; an adapter has 1000 to 6000
    world = on_small_device(room, make_world, max_loras=4, max_cpu_loras=8)
    m = world.manager
    for name in "abcde":
        m.prefetch(store.request(name)).result(30)
        ahead = [content for content in (content_of(m, n) for n in on_host(m)) if content.prefetched]
        assert sum(content.nbytes for content in ahead) <= room
        assert ahead[-1].name == name
    assert m.stats().host_bytes > room
    removed = content_of(m, "e")
    m.remove_adapter("e")
    assert removed.prefetched is None
    for name in "abcd":
        check(world, name, None, None)
    assert all(content_of(m, name).prefetched is None for name in "abcd")


# --- the hub, and callbacks -------------------------------------------------------------------------------------------


def test_a_hub_that_hangs_delays_no_load_from_a_folder(store, monkeypatch):
    """More hang than read at a time; each of them is loaded once the hub answers."""
    manager, answers, asked = make_world(max_cpu_loras=8).manager, threading.Event(), []
    folder = store.request("hub").path

    def download(repo, file, **options):
        asked.append(repo)
        assert answers.wait(30)
        return f"{folder}/{file}"

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda url: None)
    loads = [manager.prefetch(jlora.LoRARequest(f"remote{i}", f"nobody/remote{i}")) for i in range(6)]
    until(lambda: len(asked) == 4)
    assert manager.add_adapter(store.request("local"), timeout=10)
    answers.set()
    assert all(load.result(30) for load in loads)
    assert len(asked) == 12  # two files each


@pytest.fixture
def called(store):
    """A manager whose `resolve` is `called.resolve(request)`, and its store."""
    model = make_world().manager.unwrap()
    config = jlora.LoRAConfig(max_loras=2, max_cpu_loras=8, max_lora_rank=MAX_RANK)
    found = SimpleNamespace(store=store, resolve=lambda request: request.path, go=threading.Event())
    found.manager = jlora.LoRAManager(model, config, resolve=lambda request: found.resolve(request))
    yield found
    found.go.set()


def test_resolve_finds_folders_on_the_loading_thread(called):
    seen, manager = [], called.manager

    def resolve(request):
        seen.append((request, threading.current_thread()))
        if request.path == "store://broken":
            raise ConnectionError("the store is away")
        return str(called.store.folder / request.path.removeprefix("store://"))

    called.resolve = resolve
    called.store.request("a")
    request, broken = jlora.LoRARequest("a", "store://a0"), jlora.LoRARequest("b", "store://broken")
    assert manager.add_adapter(request)
    assert manager.list_adapters()["a"].request.path == "store://a0"
    for call in (manager.add_adapter, lambda request: manager.prefetch(request).result(30)):
        with pytest.raises(ConnectionError, match="the store is away"):
            call(broken)
    with pytest.raises(ConnectionError):
        manager.prepare([jlora.LoRARequest("c", "store://broken")])
    assert [asked for asked, _ in seen][:2] == [request, broken]
    assert threading.current_thread() not in [where for _, where in seen]
    assert list(manager.list_adapters()) == ["a"]


def hang(called):
    """Return names whose callbacks hang, requests for them, and those for which one was called."""
    names, asked = [f"hung{i}" for i in range(8)], []
    requests = [jlora.LoRARequest(name, called.store.request("a").path) for name in names]

    def resolve(request):
        if request.name in names:
            asked.append(request)
            assert called.go.wait(60)
        return request.path

    called.resolve = resolve
    return names, requests, asked


def test_callbacks_that_hang_in_loads_that_timed_out_delay_no_other_load(called):
    names, requests, asked = hang(called)
    for batch in zip(requests[::2], requests[1::2], strict=True):
        while not all(request in asked for request in batch):  # a slow machine may not call it in time
            with pytest.raises(jlora.LoadTimeoutError):
                called.manager.prepare(batch, timeout=0.1)
    assert called.manager.add_adapter(called.store.request("b"), timeout=10)
    names.clear()
    with pytest.raises(jlora.LoadTimeoutError):  # joins the load that runs on
        called.manager.add_adapter(requests[0], timeout=0.1)
    assert called.manager.remove_adapter("hung0")
    elsewhere = dataclasses.replace(requests[1], path=called.store.request("b").path)
    assert called.manager.add_adapter(elsewhere, timeout=10)
    assert called.manager.add_adapter(requests[0], timeout=10)
    called.go.set()
    until(lambda: not running())
    assert set(called.manager.list_adapters()) == {"b", *(request.name for request in requests)}


def test_polls_start_no_more_callbacks_than_other_calls(called):
    _, requests, asked = hang(called)
    batches = [*zip(requests[::2], requests[1::2], strict=True)]
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        for batch in batches:
            with pytest.raises(jlora.LoadTimeoutError):
                called.manager.prepare(batch, timeout=0)
    assert len(asked) == 4
    called.go.set()
    for batch in batches:
        poll(partial(called.manager.prepare, batch, timeout=0)).close()
    assert len(asked) == 8


def test_a_callback_that_calls_for_its_own_load_raises(called):
    manager, request = called.manager, called.store.request("a")
    for call in (
        manager.add_adapter,
        lambda request: manager.add_adapter(dataclasses.replace(request, path="elsewhere")),
        lambda request: manager.hold(request.name),
    ):
        called.resolve = lambda request: request.path
        assert manager.add_adapter(request, timeout=10)
        assert evict(manager)
        called.resolve = call
        error = manager.prefetch(request).exception(10)
        assert isinstance(error, jlora.LoRAUsageError)
        assert "inside resolve=, by the load of 'a'" in str(error)


# --- removed meanwhile ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verb", "known"), [("remove_adapter", "new"), ("remove_all_adapters", "evicted"), ("remove_adapter", "replaced")]
)
def test_removal_during_a_load_is_final(world, store, verb, known):
    manager = world.manager
    if known != "new":
        manager.add_adapter(store.request("a"))
        assert known == "replaced" or evict(manager)
    request = store.request("a", load_inplace=known == "replaced")
    reads = len(store.reads)
    store.closed.add("a")
    future = manager.prefetch(request)
    with (
        thread(lambda: manager.add_adapter(request)) as added,
        thread(lambda: manager.prepare(["a" if known == "evicted" else request])) as prepared,
    ):
        store.until_read("a", reads + 1)
        time.sleep(0.05)
        removed = manager.remove_adapter("a") if verb == "remove_adapter" else manager.remove_all_adapters()
    assert removed in (True, None)
    for error in (*added, *prepared, future.exception(10)):  # though it still reads
        assert isinstance(error, jlora.AdapterNotFoundError)
        assert "'a' was removed while it was loaded" in str(error)
    store.closed.clear()
    until(lambda: not running())
    assert manager.list_adapters() == {}
    assert manager.add_adapter(request)
    check(world, "a", None, None)


def test_other_names_are_loaded_while_one_is_removed(world, store):
    store.closed.update("ab")
    futures = {name: world.manager.prefetch(store.request(name)) for name in "ab"}
    for name in "ab":
        store.until_read(name)
    assert world.manager.remove_adapter("a")
    assert not world.manager.remove_adapter("a")
    again = world.manager.prefetch(store.request("a"))  # begun after the removal, so it stays
    store.closed.clear()
    assert futures["b"].result(30)
    assert again.result(30)
    assert set(world.manager.list_adapters()) == {"a", "b"}
