"""`save` and `restore`: another manager goes on where the first one ended, and reads no adapter again."""

import dataclasses
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np
import pytest

import jlora
from jlora.manager import saved, saved_content
from tests.manager.tiny import MAX_RANK, Model, make_adapter, make_world

pytestmark = pytest.mark.device

TENSOR = "base_model.model.layers.0.q_proj.lora_A.weight"


def request(folder, name, version=0):
    path = folder / f"{name}-{version}"
    if not path.exists():
        make_adapter(name, version).save_pretrained(path)
    return jlora.LoRARequest(name, str(path))


def as_new(world):
    """The same manager as one that never had an adapter: a new one compiles for a second."""
    world.manager.remove_all_adapters()
    world.manager._cache.clear()
    return world


def infos(world):
    """What is to come back; which slot it is in may differ."""
    listed = world.manager.list_adapters().values()
    return [dataclasses.replace(info, slot=None if info.slot is None else 0) for info in listed]


@pytest.fixture
def served(world, tmp_path):
    """a evicted, b on the host, c pinned, d in a slot; c from memory."""
    as_new(world)  # versions of other tests' names would be saved, too
    for name in "ab":
        world.manager.add_adapter(request(tmp_path, name))
    world.manager.add_adapter(make_adapter("c"))
    world.manager.pin_adapter("c")
    for name in "de":
        world.manager.add_adapter(request(tmp_path, name))
    world.serve(["e", "c", None])
    world.serve(["d", "c", None])
    assert list(world.manager.list_evicted()) == ["a"]
    return world


def gone(tmp_path, *names):
    for name in names:
        (tmp_path / f"{name}-0").rename(tmp_path / f"gone-{name}")


# --- what comes back ------------------------------------------------------------------------------------------------


def test_another_manager_goes_on_warm(served, tmp_path):
    requests = served.manager.list_evicted()
    logits = served.serve(["d", "c", None])
    order = list(served.manager.list_adapters())
    served.manager.save(tmp_path / "saved")
    before = infos(served)
    gone(tmp_path, "b", "d", "e")  # nothing of them is read again
    other = make_world()
    assert other.manager.restore(tmp_path / "saved") == set("abcde")
    assert infos(other) == before
    assert list(other.manager.list_adapters()) == order
    assert other.manager.list_evicted() == requests
    assert sorted(name for name in other.manager.slot_names if name) == ["c", "d"]
    hits = other.manager.stats().slot_hits
    np.testing.assert_array_equal(other.serve(["d", "c", None]), logits)
    assert other.manager.stats().slot_hits == hits + 2
    other.check(other.serve(["b", "c", None]), [make_adapter("b"), make_adapter("c"), None])
    other.check(other.serve(["a", "c", None]), [make_adapter("a"), make_adapter("c"), None])  # loaded on demand
    assert other.manager.list_adapters()["c"].pinned


def test_orders_of_use_go_on(world, tmp_path):
    """The first to be evicted, from slots and from the host, are those that would have been."""
    for name in "abcd":
        world.manager.add_adapter(request(tmp_path, name))
    for name in "dab":
        world.serve([name, None, None])
    world.manager.add_adapter(request(tmp_path, "c"))  # a use on the host alone
    host = list(world.manager.list_adapters())
    world.manager.save(tmp_path / "saved")
    manager = as_new(world).manager
    manager.restore(tmp_path / "saved")
    assert list(manager.list_adapters()) == host
    world.serve(["c", None, None])
    assert set(manager.slot_names) == {"b", "c"}  # a was used before b
    manager.add_adapter(request(tmp_path, "e"))
    assert "d" not in manager.list_adapters()


def test_a_name_and_a_version_mean_the_same_bytes(world, tmp_path):
    """Content keeps its version; what is new has a larger one than any before, also where that was not saved."""
    manager = world.manager
    manager.add_adapter(request(tmp_path, "a"))
    manager.add_adapter(request(tmp_path, "b"))
    manager.add_adapter(make_adapter("c"))
    manager.add_adapter(make_adapter("gone"))
    manager.remove_adapter("gone")
    manager.remove_adapter("b")
    manager.save(tmp_path / "saved")
    first = {name: info.version for name, info in manager.list_adapters().items()}
    for version in (1, 2, 3):  # after the save, and lost with this process
        manager.add_adapter(make_adapter("c", version), load_inplace=True)
        manager.add_adapter(make_adapter("new", version), load_inplace=True)
    lost = {name: info.version for name, info in manager.list_adapters().items()}
    as_new(world).manager.restore(tmp_path / "saved")
    assert {name: info.version for name, info in manager.list_adapters().items()} == first
    while manager.remove_oldest_adapter():
        pass
    manager.activate_adapter("a")
    assert manager.list_adapters()["a"].version == first["a"]  # recalled from the same files
    manager.remove_adapter("a")
    manager.add_adapter(request(tmp_path, "a"))
    manager.add_adapter(request(tmp_path, "b"))
    for name in "ab":
        assert manager.list_adapters()[name].version > first.get(name, 0)
    for name in ("c", "new", "gone"):
        manager.add_adapter(make_adapter(name, 9), load_inplace=True)
        assert manager.list_adapters()[name].version > lost.get(name, 0)


def test_a_name_that_was_saved_as_removed_comes_back_as_another_version(world, tmp_path):
    manager = world.manager
    manager.add_adapter(request(tmp_path, "a"))
    manager.add_adapter(request(tmp_path, "b"))
    first = manager.list_adapters()["a"].version
    manager.save(tmp_path / "saved", without=lambda: {"a"})
    as_new(world).manager.restore(tmp_path / "saved")
    manager.add_adapter(request(tmp_path, "a"))
    assert manager.list_adapters()["a"].version > first


@pytest.mark.parametrize("weights", [True, False])
def test_files_rewritten_with_their_times_after_a_save_are_another_version(world, tmp_path, weights):
    make_adapter("a", 0, rank=2, modules=["embed"]).save_pretrained(tmp_path / "a")
    manager = world.manager
    manager.add_adapter(jlora.LoRARequest("a", tmp_path / "a"))
    first = manager.list_adapters()["a"].version
    manager.save(tmp_path / "saved", weights=weights)
    times = {file: file.stat() for file in (tmp_path / "a").iterdir()}
    new = make_adapter("a", 1, rank=2, modules=["embed"])
    new.save_pretrained(tmp_path / "new")
    for file, was in times.items():
        file.write_bytes((tmp_path / "new" / file.name).read_bytes())
        os.utime(file, ns=(was.st_atime_ns, was.st_mtime_ns))
    as_new(world).manager.restore(tmp_path / "saved")
    if weights:
        world.check(world.serve(["a", None, None]), [make_adapter("a", 0, rank=2, modules=["embed"]), None, None])
        assert manager.list_adapters()["a"].version == first
        assert manager.remove_oldest_adapter()
    world.check(world.serve(["a", None, None]), [new, None, None])
    assert manager.list_adapters()["a"].version > first


def test_updated_weights_come_back(world, tmp_path):
    """From host arrays and from device arrays: they are no longer what the request would load."""
    manager = world.manager
    manager.add_adapter(request(tmp_path, "a"))
    manager.add_adapter(make_adapter("b", rank=2, modules=["layers.0.q_proj", "layers.0.k_proj", "embed"]))
    manager.activate_adapter("b")
    new = np.random.default_rng(0).normal(size=(2, 16)).astype(np.float32)
    manager.update_adapter("b", {TENSOR: new})
    manager.update_adapter("b", {TENSOR: jnp.asarray(new + 1)})
    manager.save(tmp_path / "saved")  # maybe before they are copied back
    before, logits = infos(world), world.serve(["b", None, "a"])
    as_new(world).manager.restore(tmp_path / "saved")
    assert [info.path for info in infos(world)] == [info.path for info in before]
    np.testing.assert_array_equal(world.serve(["b", None, "a"]), logits)
    manager.update_adapter("b", {TENSOR: new + 2})  # it is an adapter like any other
    assert manager.export_adapter("b").modules["layers.0.q_proj"].a.shape == (2, 16)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_bits_come_back_in_any_dtype(tmp_path, dtype):
    world = make_world(dtype=dtype)
    world.manager.add_adapter(make_adapter("a"))
    blocks = world.manager._cache.contents["a"].blocks
    world.manager.save(tmp_path)
    as_new(world).manager.restore(tmp_path)
    again = world.manager._cache.contents["a"].blocks
    for block, other in zip(blocks, again, strict=True):
        assert (block.chunk, block.row, block.start) == (other.chunk, other.row, other.start)
        assert np.asarray(block.a).tobytes() == np.asarray(other.a).tobytes()
        assert np.asarray(block.b).tobytes() == np.asarray(other.b).tobytes()


def test_twins_share_again(world, tmp_path):
    for name in "ab":
        world.manager.add_adapter(jlora.Adapter(name=name, modules=make_adapter("x").modules))
    before = world.manager.stats().host_bytes
    world.manager.save(tmp_path)
    assert len(list((tmp_path / "contents").iterdir())) == 1
    as_new(world).manager.restore(tmp_path)
    assert world.manager.stats().host_bytes == before


def test_what_an_adapter_says_of_itself_comes_back(world, tmp_path):
    adapter = make_adapter(
        "a", base_model_name="base", task_type="CAUSAL_LM", use_rslora=True, peft_fields={"lora_dropout": 0.1, "x": [1]}
    )
    world.manager.add_adapter(adapter)
    world.manager.activate_adapter("a")
    before = world.manager.export_adapter("a")
    world.manager.save(tmp_path)
    as_new(world).manager.restore(tmp_path)
    after = world.manager.export_adapter("a")
    for field in ("base_model_name", "task_type", "use_rslora", "fan_in_fan_out", "unchecked"):
        assert getattr(after, field) == getattr(before, field)
    assert dict(after.peft_fields) == dict(before.peft_fields)
    assert {n: (m.rank, m.alpha, m.scaling) for n, m in after.modules.items()} == {
        n: (m.rank, m.alpha, m.scaling) for n, m in before.modules.items()
    }


# --- other sizes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name_map": {r"^layers\.0\.": "layers.1.", r"^layers\.1\.": "layers.0."}}, "or name_map or skip are others"),
        ({"skip": ["o_proj"]}, "or name_map or skip are others"),
        ({"packed_modules": {"qkv_proj": {"q_proj": 16, "v_proj": 8, "k_proj": 8}}}, "'layers.0.qkv_proj' has parts"),
    ],
)
def test_names_that_mean_other_layers_are_refused(world, tmp_path, options, message):
    """What was placed by the old meaning; and the same file is another content."""
    make_adapter("a", modules=["layers.0.q_proj", "layers.0.k_proj"]).save_pretrained(tmp_path / "a-0")
    world.manager.add_adapter(request(tmp_path, "a"))
    world.manager.save(tmp_path / "saved")
    other = jlora.LoRAManager(Model(), jlora.LoRAConfig(max_loras=1, max_lora_rank=MAX_RANK), **options)
    with pytest.raises(jlora.AdapterMismatchError, match=message):
        other.restore(tmp_path / "saved")
    other.restore(tmp_path / "saved", weights=False)
    other.hold("a").close()
    assert other.list_adapters()["a"].version > world.manager.list_adapters()["a"].version


@pytest.mark.slow
def test_a_manager_of_other_sizes(served, tmp_path):
    """Fewer slots, a smaller cache, a larger rank: the pinned and the last used get the room, the rest is loaded."""
    served.manager.save(tmp_path / "saved")
    model = Model()
    manager = jlora.LoRAManager(model, jlora.LoRAConfig(max_loras=1, max_cpu_loras=2, max_lora_rank=MAX_RANK + 20))
    manager.restore(tmp_path / "saved")
    assert list(manager.list_adapters()) == ["c", "d"]  # in the order of use that they had
    assert manager.slot_names == ("c",)
    assert sorted(manager.list_evicted()) == ["a", "b", "e"]
    manager.unpin_adapter("c")
    other = dataclasses.replace(served, model=model, manager=manager, traces=[])
    for name in "cebda":
        other.check(other.serve([name] * 3), [make_adapter(name)] * 3)


@pytest.mark.slow
def test_no_room_for_what_must_be_there(world, tmp_path):
    for name in "abc":
        world.manager.add_adapter(make_adapter(name))
    for name in "ab":
        world.manager.pin_adapter(name)
    world.manager.save(tmp_path)
    small = make_world(max_loras=1, max_cpu_loras=1).manager
    with pytest.raises(jlora.NoFreeSlotError, match=r"adapter 'b' is pinned.*max_cpu_loras"):
        small.restore(tmp_path)
    small = make_world(max_loras=1, max_cpu_loras=3)
    before = small.held()
    with pytest.raises(jlora.NoFreeSlotError, match=r"was pinned where it was saved.*raise max_loras"):
        small.manager.restore(tmp_path)
    assert small.held()[:2] == before[:2] == ((), (None,))
    world.manager.unpin_adapter("b")
    world.manager.save(tmp_path)
    small.manager.restore(tmp_path)  # the one that was refused can still be restored into
    assert small.manager.slot_names == ("a",)
    tiny = make_world(max_loras=1, max_cpu_loras=2).manager
    with pytest.raises(jlora.NoFreeSlotError, match=r"adapter 'b' can be loaded from nowhere else"):
        tiny.restore(tmp_path)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: make_world(seed=1), "another base model"),
        pytest.param(lambda: make_world(dtype=jnp.bfloat16), "another base model", marks=pytest.mark.slow),
    ],
)
def test_another_base_is_refused(world, tmp_path, make, message):
    world.manager.add_adapter(request(tmp_path, "a"))
    world.manager.save(tmp_path / "saved")
    other = make()
    with pytest.raises(jlora.AdapterMismatchError, match=message):
        other.manager.restore(tmp_path / "saved")
    assert other.manager.list_adapters() == {} == other.manager.list_evicted()
    other.manager.restore(tmp_path / "saved", weights=False)
    assert list(other.manager.list_evicted()) == ["a"]
    other.serve(["a", None, None])
    assert other.manager.list_adapters()["a"].version > 0  # the same file is another content here


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "bfloat16"}, "has dtype 'bfloat16' here, and had 'float32' where it was saved"),
        ({"target_modules": ["o_proj"]}, "does not wrap"),
    ],
)
def test_what_cannot_be_served_is_refused(world, tmp_path, options, message):
    world.manager.add_adapter(make_adapter("a", modules=["layers.0.q_proj", "layers.1.o_proj"]))
    world.manager.save(tmp_path)
    other = jlora.LoRAManager(Model(), jlora.LoRAConfig(max_loras=1, max_lora_rank=MAX_RANK, **options))
    with pytest.raises(jlora.AdapterMismatchError, match=message) as caught:
        other.restore(tmp_path)
    assert "adapter 'a'" in str(caught.value)
    assert other.list_adapters() == {}
    assert other._cache.last == {}


def test_a_rank_that_is_too_large_is_refused(world, tmp_path):
    world.manager.add_adapter(make_adapter("a", rank=MAX_RANK))
    world.manager.save(tmp_path)
    other = jlora.LoRAManager(Model(), jlora.LoRAConfig(max_loras=1, max_lora_rank=MAX_RANK - 1))
    with pytest.raises(jlora.AdapterMismatchError, match="rank 4 is above max_lora_rank=3"):
        other.restore(tmp_path)


def test_only_a_new_manager_is_restored_into(world, tmp_path):
    world.manager.add_adapter(make_adapter("a"))
    world.manager.save(tmp_path)
    with pytest.raises(jlora.LoRAUsageError, match="has had adapters"):
        world.manager.restore(tmp_path)
    world.manager.remove_all_adapters()
    with pytest.raises(jlora.LoRAUsageError, match="has had adapters"):  # its versions would mean two things
        world.manager.restore(tmp_path)


# --- names alone ----------------------------------------------------------------------------------------------------


def test_names_are_saved_without_weights(served, tmp_path, monkeypatch):
    """In between two saves with weights, whose weights stay; what has no request is written all the same."""
    manager = served.manager
    manager.save(tmp_path / "saved")
    written = []
    write = saved_content.write_content
    monkeypatch.setattr(
        saved, "write_content", lambda content, *at: written.append(content.name) or write(content, *at)
    )
    manager.add_adapter(request(tmp_path, "f"))
    manager.pin_adapter("f")
    manager.remove_adapter("b")
    manager.add_adapter(make_adapter("m"))
    manager.save(tmp_path / "saved", weights=False)
    assert written == ["m"]
    names = set(manager.list_adapters()) | set(manager.list_evicted())
    gone(tmp_path, "d")  # its weights are there still
    as_new(served).manager.restore(tmp_path / "saved")
    assert set(manager.list_adapters()) | set(manager.list_evicted()) == names
    assert {name for name, info in manager.list_adapters().items() if info.pinned} == {"c", "f"}
    assert set(manager.slot_names) == {"c", "f"}  # loaded again, for it was pinned
    served.check(served.serve(["f", "c", None]), [make_adapter("f"), make_adapter("c"), None])


def test_a_pinned_one_that_cannot_be_loaded_again(world, tmp_path):
    world.manager.add_adapter(request(tmp_path, "a"))
    world.manager.pin_adapter("a")
    world.manager.save(tmp_path / "saved", weights=False)
    gone(tmp_path, "a")
    as_new(world)
    before = world.held()
    with pytest.raises(jlora.AdapterNotFoundError, match="adapter 'a'"):
        world.manager.restore(tmp_path / "saved")
    assert world.held()[:2] == before[:2]
    (tmp_path / "gone-a").rename(tmp_path / "a-0")
    world.manager.restore(tmp_path / "saved")
    assert world.manager.list_adapters()["a"].pinned


def test_no_names_without_weights_of_what_came_from_memory(world, tmp_path):
    world.manager.add_adapter(make_adapter("a"))
    world.manager.save(tmp_path, weights=False)
    as_new(world)
    with pytest.raises(jlora.AdapterMismatchError, match="'a' was loaded from nowhere"):
        world.manager.restore(tmp_path, weights=False)
    world.manager.restore(tmp_path)
    world.check(world.serve(["a", None, None]), [make_adapter("a"), None, None])


# --- saving again, and meanwhile ------------------------------------------------------------------------------------


def test_only_what_is_new_is_written(served, tmp_path, monkeypatch):
    manager, folder = served.manager, tmp_path / "saved"
    manager.save(folder)
    first = {path.name: path.stat().st_ino for path in (folder / "contents").iterdir()}
    assert len(first) == 4
    manager.remove_adapter("b")
    manager.add_adapter(request(tmp_path, "f"))
    manager.save(folder)
    second = {path.name: path.stat().st_ino for path in (folder / "contents").iterdir()}
    assert len(second) == 4
    assert sum(second.get(name) == inode for name, inode in first.items()) == 3
    manager.remove_all_adapters()
    manager.save(folder)
    assert list((folder / "contents").iterdir()) == []
    as_new(served).manager.restore(folder)
    assert manager.list_adapters() == {} == manager.list_evicted()


def test_weights_that_were_damaged_are_written_anew(world, tmp_path):
    """By a manager that has read the adapter again: there is a folder of that name."""
    world.manager.add_adapter(request(tmp_path, "a"))
    world.manager.save(tmp_path / "saved")
    (folder,) = (tmp_path / "saved" / "contents").iterdir()
    (folder / "adapter" / "0").write_bytes(b"x")
    as_new(world).manager.restore(tmp_path / "saved", weights=False)
    world.serve(["a", None, None])
    world.manager.save(tmp_path / "saved")
    gone(tmp_path, "a")
    as_new(world).manager.restore(tmp_path / "saved")
    world.check(world.serve(["a", None, None]), [make_adapter("a"), None, None])


def test_what_an_interrupt_leaves_in_the_books(world, tmp_path):
    """A name that was about to be evicted is saved as one of the host; a content in two slots, once."""
    manager = world.manager
    manager.add_adapter(request(tmp_path, "a"))
    manager.activate_adapter("a")
    content = manager._cache.contents["a"]
    manager._cache.known["a"] = content.request
    manager._pool.write(1, content)
    before = infos(world)
    manager.save(tmp_path / "saved")
    as_new(world).manager.restore(tmp_path / "saved")
    assert infos(world) == before
    assert manager.list_evicted() == {}
    assert manager.slot_names == ("a", None)


def test_what_could_not_be_read_is_not_written(world, tmp_path):
    """What was saved before stays, and the next save is not refused."""
    manager = world.manager
    manager.add_adapter(request(tmp_path, "a"))
    manager.save(tmp_path / "saved")
    before = (tmp_path / "saved" / "names.json").read_bytes()
    manager.add_adapter(request(tmp_path, "b"))
    wrong = request(tmp_path, "b")
    object.__setattr__(wrong, "revision", 5)
    manager._cache.contents["b"].request = wrong
    with pytest.raises(jlora.LoRAError, match=r"saved: what the manager knows cannot be saved: .*'b'.*revision"):
        manager.save(tmp_path / "saved")
    assert (tmp_path / "saved" / "names.json").read_bytes() == before
    manager.remove_adapter("b")
    manager.save(tmp_path / "saved")


def test_new_folders_are_on_the_disk(world, tmp_path, monkeypatch):
    synced, fsync = set(), os.fsync
    monkeypatch.setattr(os, "fsync", lambda number: (synced.add(os.fstat(number).st_ino), fsync(number))[1])
    world.manager.save(tmp_path / "new" / "saved", weights=False)
    for folder in (tmp_path, tmp_path / "new", tmp_path / "new" / "saved"):
        assert folder.stat().st_ino in synced


def test_steps_loads_and_evictions_go_on_while_it_saves(served, tmp_path, monkeypatch):
    """What came meanwhile is saved without its weights; what went is not there; and what changed, as it was."""
    manager, folder = served.manager, tmp_path / "saved"
    writing, go_on = threading.Event(), threading.Event()
    write = saved_content.write_content

    def slow(content, *below):
        if content.name == "d":
            writing.set()
            assert go_on.wait(60)
        return write(content, *below)

    monkeypatch.setattr(saved, "write_content", slow)
    with ThreadPoolExecutor(1) as threads:
        save = threads.submit(manager.save, folder)
        assert writing.wait(60)
        manager.update_adapter("c", {next(iter(tensors(manager, "c"))): tensors(manager, "c").popitem()[1]})
        manager.add_adapter(request(tmp_path, "f"))
        manager.remove_adapter("e")
        served.serve(["f", None, "c"])
        go_on.set()
        save.result()
    names = set(manager.list_adapters()) | set(manager.list_evicted())
    as_new(served).manager.restore(folder)
    assert set(manager.list_adapters()) | set(manager.list_evicted()) == names
    assert "f" in manager.list_evicted()
    served.check(served.serve(["f", None, "c"]), [make_adapter("f"), None, make_adapter("c")])


def tensors(manager, name):
    placement = manager._cache.contents[name].placements[-1]
    kind = "lora_embedding_A" if placement.site.kind == "embedding" else "lora_A.weight"
    shape = (placement.rank, placement.site.spec.in_features)
    return {f"base_model.model.{placement.module}.{kind}": np.ones(shape, np.float32)}


@pytest.mark.slow
def test_two_saves_at_a_time(served, tmp_path):
    manager, folder = served.manager, tmp_path / "saved"
    with ThreadPoolExecutor(4) as threads:
        for save in [threads.submit(manager.save, folder, weights=i % 2 == 0) for i in range(8)]:
            save.result()
    before = infos(served)
    as_new(served).manager.restore(folder)
    assert infos(served) == before


@pytest.mark.slow
def test_a_folder_of_another_manager_is_replaced(world, tmp_path):
    """Two that save to one folder never give a mixture: the last one to save is the one that is restored."""
    other = make_world()
    for one, names in ((world, "abc"), (other, "bcd")):
        for version, name in enumerate(names):
            one.manager.add_adapter(make_adapter(name, version))
    for one in (world, other, world, other):
        one.manager.save(tmp_path)
    as_new(world).manager.restore(tmp_path)
    assert infos(world) == infos(other)
    with world.manager.prepare(["b", "c", None]) as batch:
        world.check(world.logits(batch), [make_adapter("b", 0), make_adapter("c", 1), None])


# --- mistakes -------------------------------------------------------------------------------------------------------


def test_nothing_was_saved_there(world, tmp_path):
    as_new(world)
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(jlora.AdapterNotFoundError, match="no manager has been saved there"):
            world.manager.restore(path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("unchecked_calls")
@pytest.mark.parametrize("path", [None, 3, ""])
def test_a_path_is_a_path(world, path):
    for call in (world.manager.save, world.manager.restore):
        with pytest.raises(jlora.LoRAUsageError, match="takes the path of a folder"):
            call(path)


def test_a_file_is_no_folder(world, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(jlora.LoRAError, match="could not be saved"):
        world.manager.save(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "x"


def test_fields_that_are_no_json(world, tmp_path):
    world.manager.add_adapter(make_adapter("a", peft_fields={"x": object()}))
    with pytest.raises(jlora.LoRAError, match=r"adapter 'a' cannot be saved: its fields are not JSON"):
        world.manager.save(tmp_path)
    assert not (tmp_path / "names.json").exists()


def test_nothing_else_in_the_folder_is_touched(world, tmp_path):
    (tmp_path / "contents").mkdir()
    for name in ("mine", "contents/mine"):
        (tmp_path / name).write_text("x")
    world.manager.save(tmp_path)
    assert (tmp_path / "mine").exists()
    assert (tmp_path / "contents/mine").exists()


@pytest.mark.slow
def test_an_unwrapped_manager_takes_nothing(tmp_path):
    world = make_world()
    world.manager.save(tmp_path)
    world.manager.unwrap()
    with pytest.raises(jlora.LoRAError, match="unwrap"):
        world.manager.restore(tmp_path)


def test_it_can_be_read_by_people(served, tmp_path):
    served.manager.save(tmp_path / "saved")
    said = json.loads((tmp_path / "saved" / "names.json").read_text())["saved"]
    assert [one["name"] for one in said["adapters"]] == list(served.manager.list_adapters())
