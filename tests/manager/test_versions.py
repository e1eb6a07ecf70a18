"""One content of a name is one version: versions of batches, and handles that keep an old version."""

import contextlib
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

import huggingface_hub
import jax.numpy as jnp
import numpy as np
import pytest

import jlora
from jlora.adapters.adapter import open_adapter
from jlora.fit import read as fit_read
from jlora.manager import loading, update
from tests.manager.tiny import MODULES, lora, make_adapter, make_world, tensors
from tests.records import content_of, evict, slot_names

pytestmark = pytest.mark.device


def load(world, *names, version=0):
    for name in names:
        world.manager.add_adapter(make_adapter(name, version), load_inplace=version > 0)


def versions(world, *names):
    with world.manager.prepare([*names, *[None] * (3 - len(names))]) as batch:
        return batch.versions[: len(names)]


def test_each_content_of_a_name_counts_on(world):
    """Arrays in memory have no identity, so a prefix cache must not match them: equal ones are another content."""
    load(world, "a", "b")
    first, other = versions(world, "a", "b")
    for count, version in enumerate((1, 2, 2), 1):
        load(world, "a", version=version)
        with world.manager.prepare(["a", "b", None]) as batch:
            assert batch.versions == (first + count, other, None)
            world.check(world.logits(batch), [make_adapter("a", version), make_adapter("b"), None])
    assert world.manager.list_adapters()["a"].version == first + 3
    world.manager.remove_adapter("a")
    load(world, "a")
    assert versions(world, "a") == (first + 4,)


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


def load_again(world, folder, how):
    """Load "a" again, by a call or, once it is evicted, on demand."""
    if how == "removed":
        world.manager.remove_adapter("a")
    elif "evicted" in how:
        assert evict(world.manager)
    if how != "evicted":
        world.manager.add_adapter(jlora.LoRARequest("a", folder, load_inplace=how != "removed"))


BY_A_CALL = ["in place", "removed", "evicted, in place"]


@pytest.mark.parametrize(
    ("again", "how"), [*((again, "rewritten") for again in (*BY_A_CALL, "evicted")), ("evicted", "copied")]
)
def test_other_weights_in_files_of_the_same_size_and_time_are_another_version(world, folder, again, how):
    world.manager.add_adapter(jlora.LoRARequest("a", folder))
    seen = {versions(world, "a")}
    for version in (1, 2, 3):
        write_twin(folder, version, how)
        load_again(world, folder, again)
        seen.add(versions(world, "a"))
        assert len(seen) == version + 1
        world.check(world.serve(["a", None, "a"]), [twin(version), None, twin(version)])


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_a_folder_that_changed_since_the_eviction_is_a_new_version_with_one_warning(world, folder, caplog):
    request = jlora.LoRARequest("a", folder)
    world.manager.add_adapter(request)
    (first,) = versions(world, "a")
    for again, warned in (("evicted", 0), ("rewritten", 1), ("evicted", 1)):
        if again == "rewritten":
            write_twin(folder, 1, "rewritten")
        assert evict(world.manager)
        assert versions(world, request) == (first + warned,)
        world.check(world.serve(["a", None, None]), [twin(warned), None, None])
        assert len(warnings_of(caplog)) == warned
    assert (
        f"have changed since they were loaded, and it comes back with their content as version {first + 1}"
        in (warnings_of(caplog)[0])
    )
    other = folder.parent / "other"
    twin(2).save_pretrained(other)
    assert evict(world.manager)
    world.manager.add_adapter(jlora.LoRARequest("a", other))  # by a call, of other files
    assert versions(world, "a") == (first + 2,)
    assert len(warnings_of(caplog)) == 1


@pytest.mark.parametrize("rank", [2, 3])  # as before, or of another shape than the old configuration says
def test_an_evicted_adapter_whose_folder_is_being_rewritten_is_read_when_it_is_whole(world, folder, rank):
    world.manager.add_adapter(jlora.LoRARequest("a", folder))
    (first,) = versions(world, "a")
    modules = {name: lora(name, rank, np.random.default_rng(1), scaling=2.0) for name in MODULES}
    new = jlora.Adapter(name="a", modules=modules)
    new.save_pretrained(folder.parent / "new")
    weights, config = "adapter_model.safetensors", "adapter_config.json"
    assert evict(world.manager)
    shutil.copy(folder.parent / "new" / weights, folder / weights)
    later = threading.Timer(0.1, shutil.copy, (folder.parent / "new" / config, folder / config))
    later.start()
    assert versions(world, "a") == (first + 1,)
    world.check(world.serve(["a", None, None]), [new, None, None])
    later.join()


def test_files_that_change_while_they_are_read_are_read_again(world, folder, monkeypatch):
    """No public call is made during a read."""
    changes = [2]

    @contextlib.contextmanager
    def changing(found, **options):
        with open_adapter(found, **options) as opened:
            yield opened
            if changes:
                write_twin(folder, changes.pop(0), "rewritten")

    monkeypatch.setattr(fit_read, "open_adapter", changing)
    world.manager.add_adapter(jlora.LoRARequest("a", folder))
    world.check(world.serve(["a", None, None]), [twin(2), None, None])
    changes += range(20)
    with pytest.raises(jlora.AdapterFormatError, match="change again and again while they are read"):
        world.manager.add_adapter(jlora.LoRARequest("a", folder, load_inplace=True))
    world.check(world.serve(["a", None, None]), [twin(2), None, None])


class Hub:
    """A repository with one branch, whose commits are adapters, in a cache as that of Hugging Face."""

    def __init__(self, folder):
        self.snapshots, self.head, self.lost, self.asked = folder / "models--org--a" / "snapshots", "", set(), []

    def commit(self, version):
        self.head = f"{version:040x}"
        twin(version).save_pretrained(self.snapshots / self.head)

    def download(self, repo, file, *, revision, local_files_only):
        self.asked.append(revision)
        commit = self.head if revision in (None, "main") else revision
        if commit in self.lost:
            raise OSError(f"no commit {commit}")
        return str(self.snapshots / commit / file)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    found = Hub(tmp_path)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", found.download)
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda url: None)
    found.commit(0)
    return found


@pytest.mark.parametrize("revision", [None, "main"])
def test_an_evicted_adapter_of_the_hub_comes_back_at_the_commit_of_its_load(world, hub, caplog, revision):
    request = jlora.LoRARequest("a", "org/a", revision=revision)
    world.manager.add_adapter(request)
    (first,) = versions(world, "a")
    hub.commit(1)
    for again in ("a", request):
        assert evict(world.manager)
        assert versions(world, again) == (first,)
        world.check(world.serve(["a", None, None]), [twin(0), None, None])
    assert warnings_of(caplog) == []
    assert world.manager.list_adapters()["a"].request == request
    world.manager.add_adapter(dataclasses.replace(request, load_inplace=True))
    assert versions(world, "a") == (first + 1,)
    world.check(world.serve(["a", None, None]), [twin(1), None, None])


def test_a_commit_that_the_hub_lost_is_replaced_by_a_new_version_with_one_warning(world, hub, caplog):
    world.manager.add_adapter(jlora.LoRARequest("a", "org/a"))
    (first,) = versions(world, "a")
    hub.lost.add(hub.head)
    hub.commit(1)
    assert evict(world.manager)
    assert versions(world, "a") == (first + 1,)
    world.check(world.serve(["a", None, None]), [twin(1), None, None])
    assert len(warnings_of(caplog)) == 1


@pytest.mark.parametrize("cached", [True, False])
def test_a_restored_manager_reads_the_commit_of_the_load(world, hub, tmp_path, cached):
    world.manager.add_adapter(jlora.LoRARequest("a", "org/a"))
    (first,) = versions(world, "a")
    if not cached:
        assert evict(world.manager)
    world.manager.save(tmp_path / "saved")
    hub.commit(1)
    restored = make_world()
    restored.manager.restore(tmp_path / "saved")
    assert versions(restored, "a") == (first,)
    restored.check(restored.serve(["a", None, None]), [twin(0), None, None])


@pytest.mark.parametrize("again", BY_A_CALL)
def test_the_same_files_loaded_by_a_call_are_another_version(world, folder, again):
    world.manager.add_adapter(jlora.LoRARequest("a", folder))
    (first,) = versions(world, "a")
    load_again(world, folder, again)
    (second,) = versions(world, "a")
    assert second > first
    load_again(world, folder, "evicted")
    assert versions(world, "a") == (second,)
    world.check(world.serve(["a", None, None]), [twin(0), None, None])


def test_an_adapter_in_memory_is_not_the_content_of_its_files(world, folder):
    """`from_pretrained` notes the files; other arrays, or another dtype, may have come in since."""
    world.manager.add_adapter(jlora.LoRARequest("a", folder))
    read = jlora.Adapter.from_pretrained(folder, name="a")
    changed = dataclasses.replace(read, modules=twin(1).modules)
    seen = {versions(world, "a")}
    for adapter in (changed, read, changed):
        if len(seen) == 1:
            assert evict(world.manager)
        else:
            world.manager.remove_adapter("a")
        world.manager.add_adapter(adapter)
        seen.add(versions(world, "a"))
        world.check(world.serve(["a", None, None]), [adapter, None, None])
    assert len(seen) == 4


def test_fingerprint_of_a_handle_is_that_of_the_files_until_the_weights_change(world, folder):
    def of_handle():
        with world.manager.hold("a") as handle:
            return handle.fingerprint

    read = jlora.Adapter.from_pretrained(folder, name="a")
    in_body = [(folder / file).read_bytes() for file in ("adapter_model.safetensors", "adapter_config.json")]
    changed = dataclasses.replace(read, modules=twin(1).modules)
    sources = [jlora.LoRARequest("a", folder), jlora.Adapter.from_bytes(*in_body, name="a"), changed, twin(0)]
    seen = []
    for source in sources:
        world.manager.add_adapter(source)
        seen.append(of_handle())
        world.manager.remove_adapter("a")
    assert seen == [read.fingerprint, read.fingerprint, None, None]
    world.manager.add_adapter(sources[0])
    for _ in range(2):  # the second runs the program of the first
        world.manager.update_adapter("a", tensors(twin(1), jnp.asarray))
        assert of_handle() is None


def test_a_replacement_reads_the_files_as_they_are_when_it_is_called(world, folder, monkeypatch):
    """Also while another of the same request has read them and waits for an open batch."""
    world.manager.add_adapter(jlora.LoRARequest("a", folder))
    request = jlora.LoRARequest("a", folder, load_inplace=True)
    batch = world.manager.prepare(["a", None, None])
    reads, read = [], fit_read.pack_files
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


def test_a_handle_of_another_manager(world):
    other = make_world()
    load(other, "a")
    load(world, "a")
    with other.manager.hold("a") as handle:
        with pytest.raises(jlora.LoRAUsageError, match=r"AdapterHandle\('a', version=0\) is of another manager"):
            world.manager.prepare([handle, None, None])
        assert slot_names(world.manager) == (None,) * world.manager.config.max_loras
        other.check(other.serve([handle, None, None]), [make_adapter("a"), None, None])


@pytest.mark.parametrize("end", ["with", "collected"])
def test_a_handle_ends(world, end):
    load(world, "a", "b", "c")
    handle = world.manager.hold("a")
    content = weakref.ref(handle.adapter)
    load(world, "a", version=1)
    with world.manager.prepare([handle, "b", None]) as batch:
        world.check(world.logits(batch), [make_adapter("a"), make_adapter("b"), None])
    del batch
    if end == "with":
        with handle as entered:
            assert entered is handle
        handle.close()
        assert handle.adapter is None
        with pytest.raises(jlora.LoRAUsageError, match=r"AdapterHandle\('a', version=\d+\) is closed"):
            world.manager.prepare([handle, None, None])
    else:
        del handle
    gc.collect()
    assert not world.manager._state.leases.handled()
    assert "a" not in slot_names(world.manager)  # a slot that no name refers to is free
    for i in range(9):  # batches are kept
        world.serve(["b" if i & 1 else None, "b" if i & 2 else None, "c" if i & 4 else "b"])
    gc.collect()
    assert content() is None


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
        if threading.current_thread().name != "jlora-copy-back":  # blocks that an update from host arrays keeps
            return to_host(blocks)
        if found.fails:
            found.failed.set()
            raise MemoryError("no room on the host")
        assert found.go.wait(30)
        return to_host(blocks)

    monkeypatch.setattr(update, "to_host", copied)
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    yield found
    found.go.set()


def one_slot():
    """A world with "a" in its only slot, and "b" on the host."""
    world = make_world(max_loras=1, max_cpu_loras=2)
    world.manager.add_adapter(make_adapter("a", rank=2, modules=list(MODULES)))
    load(world, "b")
    world.manager.prepare(["a"]).close()
    return world


@pytest.mark.device("cpu")  # an accelerator has pinned memory that updates are copied to
@pytest.mark.parametrize("how", ["prepare", "pin_adapter"])
def test_prepare_waits_until_an_update_is_copied_back(copy_back, how):
    world = one_slot()
    new = updated_on_device(world, "a", 3)
    with pytest.raises(jlora.LoadTimeoutError, match="being copied from its slot"):
        world.manager.prepare(["b", None, None], timeout=0)  # does not wait, but may be repeated
    with ThreadPoolExecutor() as pool:
        waits = pool.submit(getattr(world.manager, how), "b" if how == "pin_adapter" else ["b", None, None])
        with pytest.raises(TimeoutError):
            waits.result(0.3)
        assert slot_names(world.manager) == ("a",)
        copy_back.go.set()
        found = waits.result(30)
    if how == "prepare":
        found.close()
    else:
        assert found is world.manager.unpin_adapter("b") is True
    assert slot_names(world.manager) == ("b",)
    world.check(world.serve(["a", None, None]), [new, None, None])


@pytest.mark.device("cpu")  # an accelerator has pinned memory that updates are copied to
def test_an_update_that_cannot_be_copied_back_keeps_its_slot(copy_back):
    """No call waits for the failed copy, and served values stay right."""
    world = one_slot()
    copy_back.fails = True
    new = updated_on_device(world, "a", 3)
    assert copy_back.failed.wait(30)
    with pytest.raises(jlora.NoFreeSlotError):
        world.manager.prepare(["b", None, None])
    world.check(world.serve(["a", None, None]), [new, None, None])


@pytest.mark.device("cpu")  # an accelerator has pinned memory
def test_host_arrays_while_an_update_is_copied_back(world, copy_back):
    """All of the new content is on the host, so no call waits for a copy."""
    manager = world.manager
    manager.add_adapter(make_adapter("a", rank=2, modules=list(MODULES)))
    world.load(*"bc")
    for name in "ab":
        manager.pin_adapter(name)
    new = updated_on_device(world, "a", 3)
    name = "layers.0.q_proj"
    changed = dataclasses.replace(new.modules[name], a=np.ones((2, 16), np.float32))
    manager.update_adapter("a", {f"{name}.lora_A.weight": changed.a})
    content = content_of(manager, "a")
    assert content.on_host
    assert not content.copying
    assert all(isinstance(half, np.ndarray) for block in content.packed.blocks for half in (block.a, block.b))
    with pytest.raises(jlora.NoFreeSlotError):
        manager.prepare(["c", None, None])
    copy_back.go.set()
    manager.unpin_adapter("a")
    world.serve(["c", None, None])  # evicts it
    want = dataclasses.replace(new, modules={**new.modules, name: changed})
    world.check(world.serve(["a", None, "a"]), [want, None, want])
