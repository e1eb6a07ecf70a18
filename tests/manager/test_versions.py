"""One content of a name is one version: versions of batches, and handles that keep an old version."""

import copy
import dataclasses
import gc
import os
import shutil
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

import jlora
from jlora.manager import loading, stage, update
from tests.manager.tiny import MODULES, make_adapter, make_world, tensors
from tests.matrix import thinned
from tests.records import content_of, on_host, slot_names

pytestmark = pytest.mark.device


def load(world, *names, version=0):
    for name in names:
        world.manager.add_adapter(make_adapter(name, version), load_inplace=version > 0)


def versions(world, *names):
    with world.manager.prepare([*names, *[None] * (3 - len(names))]) as batch:
        return batch.versions[: len(names)]


def saved(folder, name, version=0):
    make_adapter(name, version).save_pretrained(folder / f"{name}-{version}")
    return str(folder / f"{name}-{version}")


# --- Counting -------------------------------------------------------------------------------------------------------


def test_load_inplace_counts_on(world):
    load(world, "a", "b")
    first, other = versions(world, "a", "b")
    for version in (1, 2, 3):
        load(world, "a", version=version)
        with world.manager.prepare(["a", "b", None]) as batch:
            assert batch.versions == (first + version, other, None)
            world.check(world.logits(batch), [make_adapter("a", version), make_adapter("b"), None])
    assert world.manager.list_adapters()["a"].version == first + 3


def test_a_batch_keeps_its_versions(world):
    """Also when the name has gone on since, and in copies."""
    load(world, "a")
    handle = world.manager.hold("a")
    with world.manager.prepare([handle, None, handle]) as batch:
        before = batch.versions
        load(world, "a", version=1)
        assert batch.versions == copy.copy(batch).versions == before
        assert before == (handle.version, None, handle.version)
    handle.close()
    assert versions(world, "a") == (before[0] + 1,)


def test_arrays_in_memory_are_new_content_each_time(world):
    """Arrays in memory have no identity, so a prefix cache must not match them."""
    load(world, "a")
    (first,) = versions(world, "a")
    world.manager.add_adapter(make_adapter("a"), load_inplace=True)
    assert versions(world, "a") == (first + 1,)


def test_a_removed_name_counts_on(world):
    load(world, "a")
    (first,) = versions(world, "a")
    world.manager.remove_adapter("a")
    load(world, "a")
    assert versions(world, "a") == (first + 1,)


def twin(version):
    """Adapter "a" of a version; all versions have files of the same sizes."""
    return make_adapter("a", version, rank=2, modules=list(MODULES))


def write_twin(folder, version, how):
    """Put the files of another version in the place of those that are there, with the same sizes and times."""
    new = folder.parent / "new"
    twin(version).save_pretrained(new)
    for file in folder.iterdir():
        before = file.stat()
        if how == "copied":  # onto a new inode, often the one that was just freed
            file.unlink()
            shutil.copy(new / file.name, file)
        else:
            file.write_bytes((new / file.name).read_bytes())
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


@pytest.fixture
def folder(tmp_path):
    """The files of "a", version 0, with an old time."""
    twin(0).save_pretrained(tmp_path / "a")
    for file in (tmp_path / "a").iterdir():
        os.utime(file, (1, 1))
    return tmp_path / "a"


def reload_in_place(world, path):
    world.manager.add_adapter(jlora.LoRARequest("a", path, load_inplace=True))


def remove_and_add(world, path):
    world.manager.remove_adapter("a")
    world.manager.add_adapter(jlora.LoRARequest("a", path))


def remove_all_and_add(world, path):
    world.manager.remove_all_adapters()
    world.manager.add_adapter(jlora.LoRARequest("a", path))


def evict_remove_and_add(world, path):
    world.manager.remove_oldest_adapter()
    remove_and_add(world, path)


def evict_remove_all_and_add(world, path):
    world.manager.remove_oldest_adapter()
    remove_all_and_add(world, path)


def evict_and_load_in_place(world, path):
    world.manager.remove_oldest_adapter()
    reload_in_place(world, path)


def evict(world, path):
    assert world.manager.remove_oldest_adapter()


EXPLICIT = [
    reload_in_place,
    remove_and_add,
    remove_all_and_add,
    evict_remove_and_add,
    evict_remove_all_and_add,
    evict_and_load_in_place,
]


@pytest.mark.parametrize("how", ["rewritten", "copied"])
@pytest.mark.parametrize("again", [*EXPLICIT, evict])
def test_other_weights_in_files_of_the_same_size_and_time_are_another_version(world, folder, again, how):
    world.manager.add_adapter(jlora.LoRARequest("a", folder))
    seen = {versions(world, "a")}
    for version in (1, 2, 3):
        write_twin(folder, version, how)
        again(world, folder)
        seen.add(versions(world, "a"))
        assert len(seen) == version + 1
        world.check(world.serve(["a", None, "a"]), [twin(version), None, twin(version)])


@pytest.mark.parametrize("again", EXPLICIT)
def test_the_same_files_loaded_by_a_call_are_another_version(world, folder, again):
    world.manager.add_adapter(jlora.LoRARequest("a", folder))
    (first,) = versions(world, "a")
    again(world, folder)
    (second,) = versions(world, "a")
    assert second > first
    evict(world, folder)
    assert versions(world, "a") == (second,)  # recalled
    world.check(world.serve(["a", None, None]), [twin(0), None, None])


def test_a_recall_of_the_same_files_is_the_same_version(world, folder):
    world.manager.add_adapter(jlora.LoRARequest("a", folder))
    first, version = world.serve(["a", None, None]), versions(world, "a")
    evict(world, folder)
    assert versions(world, "a") == version
    np.testing.assert_array_equal(world.serve(["a", None, None]), first)


def test_an_adapter_in_memory_is_not_the_content_of_its_files(world, folder):
    """`from_pretrained` notes the files; other arrays, or another dtype, may have come in since."""
    world.manager.add_adapter(jlora.LoRARequest("a", folder))
    read = jlora.Adapter.from_pretrained(folder, name="a")
    changed = dataclasses.replace(read, modules=twin(1).modules)
    seen = {versions(world, "a")}
    for adapter in (changed, read, changed):
        if len(seen) == 1:
            evict(world, folder)
        else:
            world.manager.remove_adapter("a")
        world.manager.add_adapter(adapter)
        seen.add(versions(world, "a"))
        world.check(world.serve(["a", None, None]), [adapter, None, None])
    assert len(seen) == 4


def test_a_replacement_reads_the_files_as_they_are_when_it_is_called(world, folder, monkeypatch):
    """Also while another of the same request has read them and waits for an open batch."""
    world.manager.add_adapter(jlora.LoRARequest("a", folder))
    request = jlora.LoRARequest("a", folder, load_inplace=True)
    batch = world.manager.prepare(["a", None, None])
    reads, read = [], stage.pack_files
    monkeypatch.setattr(loading, "pack_files", lambda *args, **options: (read(*args, **options), reads.append(1))[0])
    first = world.manager.prefetch(request)
    while not reads:
        time.sleep(0.001)
    write_twin(folder, 1, "rewritten")
    second = world.manager.prefetch(request)
    time.sleep(0.05)
    batch.close()
    assert first.result(30)
    assert second.result(30)
    world.check(world.serve(["a", None, None]), [twin(1), None, None])


def test_a_loading_that_fails_counts_nothing(world, tmp_path):
    load(world, "a")
    (first,) = versions(world, "a")
    with pytest.raises(jlora.LoRAError):
        world.manager.add_adapter(jlora.LoRARequest("a", str(tmp_path), load_inplace=True))
    assert versions(world, "a") == (first,)


# --- Handles --------------------------------------------------------------------------------------------------------


def test_a_handle_outlives_its_name(world):
    load(world, "a", "b", "c")
    old = world.manager.hold("a")
    with world.manager.prepare([old, None, None]) as batch:
        first = world.logits(batch)
        world.manager.remove_adapter("a")  # the handle keeps the weights of the batch
        for name in ("b", "c", "b"):  # which take the other slot
            world.serve([name, None, None])
        np.testing.assert_array_equal(world.logits(batch), first)
    with pytest.raises(jlora.AdapterNotFoundError):
        world.manager.prepare(["a", None, None])
    world.serve(["b", "c", None])  # out of its slot
    with world.manager.prepare([old, "b", None]) as batch:  # and back
        world.check(world.logits(batch), [make_adapter("a"), make_adapter("b"), None])
        assert batch.versions[0] == old.version
    load(world, "a", version=1)
    assert versions(world, "a", old) == (old.version + 1, old.version)
    old.close()


def test_a_handle_outlives_eviction_from_the_host(tmp_path):
    world = make_world(max_loras=1, max_cpu_loras=1)
    world.manager.add_adapter(jlora.LoRARequest("a", saved(tmp_path, "a")))
    old = world.manager.hold("a")
    load(world, "b")
    assert on_host(world.manager) == ["b"]
    world.serve(["b", None, None])
    world.check(world.serve([old, None, None]), [make_adapter("a"), None, None])
    world.check(world.serve([None, "b", None]), [None, make_adapter("b"), None])
    assert on_host(world.manager) == ["b"]


def test_in_place_waits_for_batches_by_name_only(world):
    load(world, "a")
    with world.manager.prepare(["a", None, None]), pytest.raises(jlora.AdapterInUseError):
        load(world, "a", version=1)
    with world.manager.prepare(["a", None, None]), world.manager.hold("a"):  # both can be served
        load(world, "a", version=1)


def test_a_handle_of_another_manager(world):
    other = make_world()
    load(other, "a")
    load(world, "a")
    with other.manager.hold("a") as handle:
        with pytest.raises(jlora.LoRAUsageError, match=r"AdapterHandle\('a', version=0\) is of another manager"):
            world.manager.prepare([handle, None, None])
        assert slot_names(world.manager) == (None,) * world.manager.config.max_loras
        other.check(other.serve([handle, None, None]), [make_adapter("a"), None, None])


@pytest.mark.parametrize("end", thinned(["close", "with", "collected"], 1))
def test_a_handle_ends(world, end):
    load(world, "a", "b", "c")
    handle = world.manager.hold("a")
    content = weakref.ref(handle.packed)
    load(world, "a", version=1)
    with world.manager.prepare([handle, "b", None]) as batch:
        world.check(world.logits(batch), [make_adapter("a"), make_adapter("b"), None])
    del batch
    if end == "close":
        handle.close()
        handle.close()
    elif end == "with":
        with handle as entered:
            assert entered is handle
    if end == "collected":
        del handle
    else:
        assert handle.packed is None
        with pytest.raises(jlora.LoRAUsageError, match=r"AdapterHandle\('a', version=\d+\) is closed"):
            world.manager.prepare([handle, None, None])
    gc.collect()
    assert not world.manager._state.leases.handled()
    assert "a" not in slot_names(world.manager)  # a slot that no name refers to is free
    for i in range(9):
        world.serve(["b" if i & 1 else None, "b" if i & 2 else None, "c" if i & 4 else "b"])
        versions(world, *["b", "c", None][: i % 3 + 1])
        world.manager.prepare([None] * (i + 4)).close()
    gc.collect()
    assert content() is None


def test_a_handle_that_ends_under_an_open_batch(world):
    load(world, "a", "b")
    handle = world.manager.hold("a")
    load(world, "a", version=1)
    with world.manager.prepare([handle, None, None]) as batch:
        first = world.logits(batch)
        handle.close()
        gc.collect()
        world.serve(["a", None, None])  # takes the other slot
        world.serve(["b", None, None])
        np.testing.assert_array_equal(world.logits(batch), first)
        world.check(first, [make_adapter("a"), None, None])
    world.check(world.serve(["a", "b", None]), [make_adapter("a", 1), make_adapter("b"), None])


def test_hold_of_an_unknown_name_raises(world):
    with pytest.raises(jlora.AdapterNotFoundError, match="'who' is not loaded"):
        world.manager.hold("who")


def test_hold_loads_an_evicted_adapter(tmp_path):
    world = make_world(max_loras=1, max_cpu_loras=1)
    for name in "ab":
        world.manager.add_adapter(jlora.LoRARequest(name, saved(tmp_path, name)))
    assert on_host(world.manager) == ["b"]
    with world.manager.hold("a") as handle:
        assert repr(handle) == "AdapterHandle('a', version=0)"
        world.check(world.serve([handle, None, None]), [make_adapter("a"), None, None])


# --- Where there is one slot ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def narrow():
    return make_world(max_loras=1)


def test_a_load_into_a_held_name_needs_a_second_slot(narrow):
    """Without one, `prepare` raises, or waits for the batch of the old version to close."""
    world, m = narrow, narrow.manager
    load(world, "a")
    with m.hold("a") as old:
        batch = m.prepare([old, None, None])
        load(world, "a", version=1)
        with pytest.raises(jlora.NoFreeSlotError):
            m.prepare(["a", None, None])
        started = time.monotonic()
        with pytest.raises(jlora.NoFreeSlotError):
            m.prepare(["a", None, None], timeout=0.2)
        assert time.monotonic() - started >= 0.2
        with pytest.raises(jlora.NoFreeSlotError):
            m.prepare([old, "a", None], timeout=0.0)
        world.check(world.logits(batch), [make_adapter("a"), None, None])
        closer = threading.Timer(0.2, batch.close)
        closer.start()
        with m.prepare(["a", None, None], timeout=60.0) as newer:
            assert batch.lease.closed
            assert newer.versions == (old.version + 1, None, None)
            world.check(world.logits(newer), [make_adapter("a", 1), None, None])
        closer.join()
    world.reset()


def test_names_requests_and_handles_of_one_content_take_one_slot(narrow, tmp_path):
    world, m = narrow, narrow.manager
    request = jlora.LoRARequest("a", saved(tmp_path, "a"))
    m.add_adapter(request)
    with m.hold("a") as handle, m.hold("a") as other:
        for _ in range(2):
            hits = m.stats().slot_hits
            with m.prepare([handle, "a", request]) as batch:
                assert len(set(batch.versions)) == 1
                world.check(world.logits(batch), [make_adapter("a")] * 3)
            with m.prepare([other, handle, None]) as batch:
                world.check(world.logits(batch), [make_adapter("a"), make_adapter("a"), None])
        assert m.stats().slot_hits == hits + 2  # one for each batch
    world.reset()


# --- Mixed ----------------------------------------------------------------------------------------------------------


def test_names_requests_and_handles_mixed(tmp_path):
    world = make_world(max_loras=3)
    m = world.manager
    load(world, "a")
    old = m.hold("a")
    load(world, "a", version=1)
    request = jlora.LoRARequest("b", saved(tmp_path, "b"))  # loaded by its first call
    for names, adapters in (
        ([old, request, "a"], [make_adapter("a"), make_adapter("b"), make_adapter("a", 1)]),
        (["a", None, old], [make_adapter("a", 1), None, make_adapter("a")]),
        ([request, "b", old], [make_adapter("b"), make_adapter("b"), make_adapter("a")]),
        ([None, None, "b"], [None, None, make_adapter("b")]),
    ):
        with m.prepare(names) as batch:
            world.check(world.logits(batch), adapters)
            want = {None: None, "a": 1, "b": 0, old: 0, request: 0}
            assert batch.versions == tuple(want[name] for name in names)
    old.close()
    assert len(world.traces) == 1


def test_replacing_through_prepare_does_not_wait_for_its_own_thread(narrow, tmp_path):
    """It would wait for ever: the batch that holds the old version cannot close meanwhile."""
    m = narrow.manager
    again = jlora.LoRARequest("a", saved(tmp_path, "a"), load_inplace=True)
    found = []

    def work():
        with m.prepare([again, None, None]):
            try:
                m.prepare([again, None, None]).close()
            except jlora.AdapterInUseError as error:
                found.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(timeout=30)
    assert not thread.is_alive()
    assert "'a' is held by an open batch" in str(found[0])
    narrow.reset()


# --- Updates from the device, while they are copied back -------------------------------------------------------------


def updated_on_device(world, name: str, seed: int) -> jlora.Adapter:
    """The weights of another version put under a name from device arrays; the scaling stays."""
    old, new = (make_adapter(name, version, rank=2, modules=list(MODULES)).modules for version in (0, seed))
    new = jlora.Adapter(name=name, modules={m: dataclasses.replace(old[m], a=new[m].a, b=new[m].b) for m in old})
    world.manager.update_adapter(name, tensors(new, jnp.asarray))
    return new


@pytest.fixture
def copy_back(monkeypatch) -> Iterator[SimpleNamespace]:
    """Hold the copies of updated adapters to the host, until `go` is set; with `fails` set, they raise instead."""
    found, to_host = SimpleNamespace(go=threading.Event(), fails=False, failed=threading.Event()), update.to_host

    def copied(blocks):
        if found.fails:
            found.failed.set()
            raise MemoryError("no room on the host")
        assert found.go.wait(30)
        return to_host(blocks)

    monkeypatch.setattr(update, "to_host", copied)
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    yield found
    found.go.set()


@pytest.mark.device("cpu")  # an accelerator has pinned memory that updates are copied to
@pytest.mark.parametrize("how", ["prepare", "activate_adapter"])
def test_prepare_waits_until_an_update_is_copied_back(copy_back, how):
    world = make_world(max_loras=1, max_cpu_loras=2)
    world.manager.add_adapter(make_adapter("a", rank=2, modules=list(MODULES)))
    load(world, "b")
    world.manager.activate_adapter("a")
    new = updated_on_device(world, "a", 3)
    with pytest.raises(jlora.LoadTimeoutError, match="being copied from its slot"):
        world.manager.prepare(["b", None, None], timeout=0)  # does not wait, but may be repeated
    with ThreadPoolExecutor() as pool:
        call = {"prepare": lambda: world.manager.prepare(["b", None, None]).close()}.get(
            how, lambda: world.manager.activate_adapter("b")
        )
        waits = pool.submit(call)
        with pytest.raises(TimeoutError):
            waits.result(0.3)
        assert slot_names(world.manager) == ("a",)
        copy_back.go.set()
        waits.result(30)
    assert slot_names(world.manager) == ("b",)
    world.check(world.serve(["a", None, None]), [new, None, None])


@pytest.mark.device("cpu")  # an accelerator has pinned memory that updates are copied to
def test_an_update_that_cannot_be_copied_back_keeps_its_slot(copy_back):
    """No call waits for the failed copy, and served values stay right."""
    world = make_world(max_loras=1, max_cpu_loras=2)
    world.manager.add_adapter(make_adapter("a", rank=2, modules=list(MODULES)))
    load(world, "b")
    world.manager.activate_adapter("a")
    copy_back.fails = True
    new = updated_on_device(world, "a", 3)
    assert copy_back.failed.wait(30)
    with pytest.raises(jlora.NoFreeSlotError):
        world.manager.prepare(["b", None, None])
    world.check(world.serve(["a", None, None]), [new, None, None])


@pytest.mark.device("cpu")  # an accelerator has pinned memory that updates are copied to
@pytest.mark.parametrize("fail", [False, True])
def test_arrays_consumed_by_an_update_are_freed_in_the_background(world, copy_back, fail):
    world.manager.add_adapter(make_adapter("a", modules=list(MODULES)))
    world.manager.prepare(["a", None, None]).close()
    copy_back.fails = fail
    copy_back.go.set()
    before = [weakref.ref(array) for _, array in world.slots() if array.ndim > 2]
    updated_on_device(world, "a", 3)
    end = time.monotonic() + 30
    while any(array() is not None for array in before) and time.monotonic() < end:
        time.sleep(0.01)
    assert not any(array() is not None for array in before)
    assert content_of(world.manager, "a").life.on_host != fail


@pytest.mark.device("cpu")  # an accelerator has pinned memory
def test_host_arrays_while_an_update_is_copied_back(world, copy_back):
    """All of the new content is on the host, so no call waits for a copy."""
    manager = world.manager
    manager.add_adapter(make_adapter("a", rank=2, modules=list(MODULES)))
    for name in "bc":
        load(world, name)
    for name in "ab":
        manager.pin_adapter(name)
    new = updated_on_device(world, "a", 3)
    name = "layers.0.q_proj"
    changed = dataclasses.replace(new.modules[name], a=np.ones((2, 16), np.float32))
    manager.update_adapter("a", {f"{name}.lora_A.weight": changed.a})
    content = content_of(manager, "a")
    assert content.life.on_host
    assert not content.life.copying
    assert all(isinstance(half, np.ndarray) for block in content.blocks for half in (block.a, block.b))
    with pytest.raises(jlora.NoFreeSlotError):
        manager.prepare(["c", None, None])
    copy_back.go.set()
    manager.deactivate_adapter("a")
    want = dataclasses.replace(new, modules={**new.modules, name: changed})
    world.check(world.serve(["a", None, "a"]), [want, None, want])
