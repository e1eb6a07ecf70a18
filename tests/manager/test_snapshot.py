"""`save` and `restore`: another manager goes on where the first one ended, with the same bits and versions."""

import dataclasses
import errno
import hashlib
import itertools
import json
import os
import resource
import stat
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx
from jax.sharding import AxisType

import jlora
from jlora.manager import snapshot
from tests.adapters.reading import contents
from tests.layers.expert_models import Gathering, Ragged, Scanned
from tests.layers.expert_models import Model as ExpertModel
from tests.layers.merging import make_adapter as adapter_of
from tests.layers.mesh_models import SMALL, SMALL_TARGETS, Small, mesh_of, placed
from tests.manager.test_experts import each
from tests.manager.test_shared_experts import shared
from tests.manager.test_versions import twin, write_twin
from tests.manager.tiny import (
    MAX_RANK,
    MODULES,
    DeviceError,
    Model,
    as_new,
    failing_write,
    infos,
    make_adapter,
    make_world,
    refused,
    request,
)
from tests.records import content_of, evict, evicted, on_host, slot_names
from tests.small_device import on_small_device

pytestmark = pytest.mark.device

TENSOR = "base_model.model.layers.0.q_proj.lora_A.weight"


def slot_bits(world):
    """Name -> the bytes of its slot in each layer that it has weights for: the ranks, and A and B."""
    layers = defaultdict(dict)
    for path, array in world.slots():
        layers[path[:-1]][path[-1]] = np.asarray(array)
    return {
        name: {
            path: [arrays[key][slot].tobytes() for key in ("jlora_ranks", "jlora_a", "jlora_b")]
            for path, arrays in layers.items()
            if arrays["jlora_ranks"][slot].any()
        }
        for slot, name in enumerate(slot_names(world.manager))
        if name is not None
    }


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
    assert list(evicted(world.manager)) == ["a"]
    return world


def versions(world):
    return {name: info.version for name, info in world.manager.list_adapters().items()}


def restored(world, folder):
    """Restore the manager as one that never had an adapter, and return it."""
    as_new(world).manager.restore(folder)
    return world.manager


# --- the same bits, orders and versions -------------------------------------------------------------------------------


def test_another_manager_goes_on(served, tmp_path):
    requests = evicted(served.manager)
    logits, bits = served.serve(["d", "c", None]), slot_bits(served)
    served.manager.save(tmp_path / "saved")
    before = infos(served)
    other = make_world()
    assert other.manager.restore(tmp_path / "saved") == set("abcde")
    assert infos(other) == before
    assert evicted(other.manager) == requests
    assert slot_bits(other) == bits
    assert set(bits) == {"c", "d"}
    hits = other.manager.stats().slot_hits
    np.testing.assert_array_equal(other.serve(["d", "c", None]), logits)
    assert other.manager.stats().slot_hits == hits + 2
    other.check(other.serve(["b", "c", None]), [make_adapter("b"), make_adapter("c"), None])
    other.check(other.serve(["a", "c", None]), [make_adapter("a"), make_adapter("c"), None])  # loaded on demand
    assert other.manager.list_adapters()["c"].pinned
    assert versions(other) == dict.fromkeys("abcde", 0)
    (file,) = (tmp_path / "saved" / "weights").iterdir()  # of c alone, which came from memory
    served.manager.remove_adapter("c")
    served.manager.save(tmp_path / "saved")
    assert not file.exists()


def test_adapters_from_memory_that_were_saved_are_not_saved_again(world, tmp_path):
    adapters = {name: make_adapter(name) for name in "ab"}
    as_new(world)
    for name, adapter in adapters.items():
        world.manager.add_adapter(adapter)
        world.manager.set_request(adapter, request(tmp_path, name))
    assert evict(world.manager)
    world.manager.save(tmp_path / "saved")
    assert not list((tmp_path / "saved" / "weights").iterdir())
    manager = restored(world, tmp_path / "saved")
    assert evicted(manager).keys() == {"a"}
    world.check(world.serve(["a", "b", None]), [*adapters.values(), None])


def test_orders_of_use_go_on(world, tmp_path):
    """The first to be evicted, from slots and from the host, are those that would have been."""
    for name in "abcd":
        world.manager.add_adapter(request(tmp_path, name))
    for name in "dab":
        world.serve([name, None, None])
    world.manager.add_adapter(request(tmp_path, "c"))  # a use on the host alone
    host = on_host(world.manager)
    world.manager.save(tmp_path / "saved")
    manager = as_new(world).manager
    manager.restore(tmp_path / "saved")
    assert on_host(manager) == host
    world.serve(["c", None, None])
    assert set(slot_names(manager)) == {"b", "c"}  # a was used before b
    manager.add_adapter(request(tmp_path, "e"))
    assert "d" not in on_host(manager)
    small = make_world(max_loras=1).manager
    small.restore(tmp_path / "saved")
    assert slot_names(small) == ("b",)  # of those in slots the last


def test_a_name_and_a_version_mean_the_same_bytes(world, tmp_path):
    """A content keeps its version; a new one has a larger one than any before, also where that was not saved."""
    manager = as_new(world).manager
    manager.add_adapter(request(tmp_path, "a"))
    manager.add_adapter(request(tmp_path, "b"))
    manager.add_adapter(make_adapter("c"))
    manager.add_adapter(make_adapter("gone"))
    manager.remove_adapter("gone")
    manager.remove_adapter("b")
    manager.save(tmp_path / "saved")
    first = versions(world)
    for version in (1, 2, 3):  # after the save, and lost with this process
        manager.add_adapter(make_adapter("c", version), load_inplace=True)
        manager.add_adapter(make_adapter("new", version), load_inplace=True)
    lost = versions(world)
    restored(world, tmp_path / "saved")
    assert versions(world) == first
    manager.remove_adapter("c")
    while evict(manager):
        pass
    manager.prepare(["a"]).close()
    assert versions(world)["a"] == first["a"]  # recalled: the same bytes
    manager.remove_adapter("a")
    manager.add_adapter(request(tmp_path, "a"))
    manager.add_adapter(request(tmp_path, "b"))
    for name in "ab":
        assert versions(world)[name] > first.get(name, 0)
    for name in ("c", "new", "gone"):
        manager.add_adapter(make_adapter(name, 9), load_inplace=True)
        assert versions(world)[name] > lost.get(name, 0)
    old = versions(world)["a"]
    manager.save(tmp_path / "saved", without={"a"})  # saved as removed
    assert "a" in as_new(world).manager.restore(tmp_path / "saved")
    assert "a" not in manager.list_adapters()
    manager.add_adapter(request(tmp_path, "a"))
    assert versions(world)["a"] > old


@pytest.mark.parametrize("evicted", [False, True])
def test_files_that_changed_are_another_version(world, tmp_path, evicted):
    """By their bytes, not their times: of two rewritten files that keep their times, the one that changed."""
    manager = as_new(world).manager
    for name in "ab":
        twin(0).save_pretrained(tmp_path / name)
        manager.add_adapter(jlora.LoRARequest(name, tmp_path / name))
        assert not evicted or evict(manager)
    manager.save(tmp_path / "saved")
    for version, name in enumerate("ba"):
        write_twin(tmp_path / name, version, "copied")
    restored(world, tmp_path / "saved")
    world.check(world.serve(["a", "b", None]), [twin(1), twin(0), None])
    assert versions(world)["a"] > 0
    assert versions(world)["b"] == 0


def test_updated_weights_come_back(world, tmp_path):
    """From host arrays and from device arrays, which differ from the files of the request."""
    manager = as_new(world).manager
    make_adapter("b", rank=2, modules=["layers.0.q_proj", "layers.0.k_proj", "embed"]).save_pretrained(tmp_path / "b-0")
    for name in "ab":
        manager.add_adapter(request(tmp_path, name))
    manager.prepare(["b"]).close()
    new = np.random.default_rng(0).normal(size=(2, 16)).astype(np.float32)
    manager.update_adapter("b", {TENSOR: new})
    manager.update_adapter("b", {TENSOR: jnp.asarray(new + 1)})
    manager.save(tmp_path / "saved")  # maybe before they are copied back
    before, logits, bits = versions(world), world.serve(["b", None, "a"]), slot_bits(world)
    restored(world, tmp_path / "saved")
    assert versions(world) == before == {"a": 0, "b": 2}
    np.testing.assert_array_equal(world.serve(["b", None, "a"]), logits)
    assert slot_bits(world) == bits
    manager.update_adapter("b", {TENSOR: new + 2})  # it is an adapter like any other
    assert manager.export_adapter("b").modules["layers.0.q_proj"].a.shape == (2, 16)


def manager_of(model, *, max_loras=5, max_lora_rank=4, names=None, **config):
    config = jlora.LoRAConfig(max_loras=max_loras, max_lora_rank=max_lora_rank, **config)
    return jlora.LoRAManager(model, config, **(names or {}))


def on_mesh(kind=AxisType.Auto):
    return placed(Small(), mesh_of(kind, data=2, t=2), SMALL)


SHARING = {"expert_slots": {"per_expert": 2, "shared": 2}}
# (the manager that saves, the one that restores, the adapter)
LAYERS = {
    "experts that share": (
        *(lambda: manager_of(ExpertModel(Gathering, nnx.Rngs(0)), **SHARING),) * 2,
        lambda: shared("x", gate=True),
    ),
    "blocks of other sizes": (
        lambda: manager_of(Scanned(Ragged, nnx.Rngs(0))),
        lambda: on_small_device(1024, manager_of, Scanned(Ragged, nnx.Rngs(0)), max_loras=2, max_lora_rank=40),
        lambda: each("x", experts=[0, 2]),
    ),
    "onto a mesh": (
        lambda: manager_of(Small()), lambda: manager_of(on_mesh()), lambda: adapter_of("x", SMALL_TARGETS, 3),
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=[pytest.mark.slow] * (what == "blocks of other sizes")) for what in LAYERS]
)
@pytest.mark.device(devices=4)
def test_weights_of_layers_of_every_kind(tmp_path, what):
    """From memory: the restored blocks equal those that the other manager packs from the same adapter."""
    make, make_other, make_one = LAYERS[what]
    one, want, restored = make(), make_other(), make_other()
    for manager in (one, want):
        manager.add_adapter(make_one())
        manager.prepare(["x"]).close()
    one.save(tmp_path)
    restored.restore(tmp_path)
    known, found = (content_of(manager, "x").packed for manager in (want, restored))
    np.testing.assert_array_equal(found.ranks, known.ranks)
    found, known = ({(p.module, p.site.path, p.entry, p.rank) for p in each.placements} for each in (found, known))
    assert found == known
    for array, other in zip(jax.tree.leaves(restored.slots), jax.tree.leaves(want.slots), strict=True):
        if array.dtype != jnp.int32:  # stamps count writes
            np.testing.assert_array_equal(np.asarray(array), np.asarray(other))


class TwoDtypes(nnx.Module):
    def __init__(self):
        self.first = nnx.Linear(8, 6, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
        self.second = nnx.Linear(6, 4, rngs=nnx.Rngs(1))


def test_saved_adapters_are_folders_of_peft(tmp_path):
    """With the names of the adapter and the bits of slots of several dtypes, also for adapters that only replace."""
    rng = np.random.default_rng(0)
    sizes = {"other.first": (8, 6), "other.second": (6, 4)}
    arrays = {name: (rng.normal(size=(2, k)), rng.normal(size=(n, 2))) for name, (k, n) in sizes.items()}
    metadata = {"base_model_name": "base", "task_type": "CAUSAL_LM", "fan_in_fan_out": True}
    lora = dataclasses.replace(jlora.Adapter.from_arrays("lora", arrays, alpha=3), **metadata)
    head = jlora.SavedHead(rng.normal(size=(3, 6)), rng.normal(size=3))
    one, other = (
        manager_of(TwoDtypes(), saved_heads={"second": 3}, names={"name_map": {r"^other\.": ""}}) for _ in range(2)
    )
    for adapter in (
        dataclasses.replace(lora, peft_fields={"lora_dropout": 0.1}),
        jlora.Adapter(name="head", modules={}, heads={"other.second": head}),
    ):
        one.add_adapter(adapter)
        one.prepare([adapter.name]).close()
    one.save(tmp_path)
    other.restore(tmp_path)
    entries = json.loads((tmp_path / "adapters.json").read_text())["saved"]["adapters"]
    for name, layers in (("lora", sizes.keys()), ("head", {"other.second"})):
        (folder,) = (tmp_path / "weights" / entry["weights"] for entry in entries if entry["name"] == name)
        want, read = one.export_adapter(name), jlora.Adapter.from_pretrained(folder)
        assert want.layers.keys() == layers
        assert contents(other.export_adapter(name)) == contents(read) == contents(want)
        assert read.peft_fields.get("lora_dropout") == (0.1 if name == "lora" else 0.0)


def test_an_adapter_that_peft_cannot_hold_is_not_saved(tmp_path):
    """The message names it, and the earlier save is there."""
    world = make_world()
    world.manager.add_adapter(make_adapter("a"))
    world.manager.save(tmp_path)
    adapter = make_adapter("b")
    odd = {name: dataclasses.replace(lora, scaling=0.3) for name, lora in adapter.modules.items()}
    world.manager.add_adapter(dataclasses.replace(adapter, modules=odd))
    with pytest.raises(jlora.LoRAError, match=r"'b' cannot be saved: .*has scaling 0\.3, but PEFT would compute"):
        world.manager.save(tmp_path)
    assert make_world().manager.restore(tmp_path) == {"a"}
    world.manager.save(tmp_path, without={"b"})


# --- files that are gone ----------------------------------------------------------------------------------------------


def test_files_that_are_gone_are_an_error_when_the_adapter_is_used(world, tmp_path):
    """Its version and its pin return with the files, if neither it nor its pin was removed meanwhile."""
    manager = as_new(world).manager
    for name in "ab":
        manager.add_adapter(request(tmp_path, name))
    manager.pin_adapter("a")
    manager.prepare(["b"]).close()
    manager.save(tmp_path / "saved")
    (tmp_path / "a-0").rename(tmp_path / "gone-a")
    restored(world, tmp_path / "saved")
    world.check(world.serve(["b", None, None]), [make_adapter("b"), None, None])
    with pytest.raises(jlora.AdapterNotFoundError, match="adapter 'a'"):
        manager.prepare(["a", None, None])
    manager.save(tmp_path / "saved")  # keeps them too
    (tmp_path / "gone-a").rename(tmp_path / "a-0")
    world.check(world.serve(["a", None, None]), [make_adapter("a"), None, None])
    assert manager.list_adapters()["a"].pinned
    assert versions(world)["a"] == 0
    restored(world, tmp_path / "saved")
    assert manager.list_adapters()["a"].pinned
    assert "a" in slot_names(manager)
    (tmp_path / "a-0").rename(tmp_path / "gone-a")
    for unpin in (manager.unpin_adapter, manager.remove_adapter):
        restored(world, tmp_path / "saved")
        assert unpin("a")
        manager.add_adapter(make_adapter("a"))
        assert not manager.list_adapters()["a"].pinned


# --- other sizes, models and layers -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_manager_of_other_sizes(served, tmp_path):
    """Fewer slots, a smaller cache, a larger rank: the pinned and the last used get the room, the rest is loaded."""
    served.manager.save(tmp_path / "saved")
    model = Model()
    manager = jlora.LoRAManager(model, jlora.LoRAConfig(max_loras=1, max_cpu_loras=2, max_lora_rank=MAX_RANK + 20))
    manager.restore(tmp_path / "saved")
    assert on_host(manager) == ["c", "d"]  # in the order of use that they had
    assert slot_names(manager) == ("c",)
    assert sorted(evicted(manager)) == ["a", "b", "e"]
    manager.unpin_adapter("c")
    other = dataclasses.replace(served, model=model, manager=manager, traces=[])
    for name in "cebda":
        other.check(other.serve([name] * 3), [make_adapter(name)] * 3)


@pytest.mark.slow
def test_restore_without_room_for_pinned_adapters_raises(world, tmp_path):
    for name in "ab":
        world.load(name)
        world.manager.pin_adapter(name)
    world.manager.save(tmp_path)
    for room, message in (
        (1, r"no room for adapter '.', which is pinned or came from memory"),
        (3, r"2 adapters need a slot \('a', 'b'\).*Raise max_loras"),
    ):
        small = make_world(max_loras=1, max_cpu_loras=room).manager
        with pytest.raises(jlora.NoFreeSlotError, match=message):
            small.restore(tmp_path)
        assert (small.list_adapters(), slot_names(small)) == ({}, (None,))
    world.manager.unpin_adapter("b")
    world.manager.save(tmp_path)
    small.restore(tmp_path)  # the one that was refused can still be restored into
    assert slot_names(small) == ("a",)


@pytest.mark.parametrize(
    "make",
    [
        lambda: make_world(seed=1).manager,
        lambda: manager_of(Model(), names={"name_map": {r"^layers\.0\.": "layers.1.", r"^layers\.1\.": "layers.0."}}),
        lambda: manager_of(Model(), names={"skip": ["o_proj"]}),
    ],
)
def test_another_base_is_refused(world, tmp_path, make):
    """Nothing changes then."""
    world.manager.add_adapter(request(tmp_path, "a"))
    world.manager.save(tmp_path / "saved")
    other = make()
    with pytest.raises(jlora.AdapterMismatchError, match=r"another base model.* or name_map or skip are others"):
        other.restore(tmp_path / "saved")
    assert other.list_adapters() == {}
    other.add_adapter(make_adapter("a", modules=["embed"]))
    assert other.list_adapters()["a"].version == 0


OTHER_LAYERS = [
    {"dtype": "bfloat16"},
    {"target_modules": ["o_proj"]},
    {"names": {"packed_modules": {"qkv_proj": {"q_proj": 16, "v_proj": 8, "k_proj": 8}}}},
]


@pytest.mark.parametrize("options", OTHER_LAYERS)
def test_other_layers_make_other_versions(world, tmp_path, options):
    """The same files are packed differently; weights from memory were packed once and are refused."""
    as_new(world)
    make_adapter("a", modules=["layers.0.o_proj"]).save_pretrained(tmp_path / "a-0")
    world.manager.add_adapter(request(tmp_path, "a"))
    world.manager.save(tmp_path / "saved")
    other = manager_of(Model(), **options)
    other.restore(tmp_path / "saved")
    assert other.list_adapters()["a"].version > 0
    world.manager.add_adapter(make_adapter("m"))
    world.manager.save(tmp_path / "saved")
    other = manager_of(Model(), **options)
    with pytest.raises(jlora.AdapterMismatchError, match=r"adapter 'm'.*other layers or slot dtypes"):
        other.restore(tmp_path / "saved")
    assert other.list_adapters() == {}


def test_only_a_new_manager_is_restored_into(world, tmp_path):
    world.manager.add_adapter(make_adapter("a"))
    world.manager.save(tmp_path)
    with pytest.raises(jlora.LoRAUsageError, match="has had adapters"):
        world.manager.restore(tmp_path)
    world.manager.remove_all_adapters()
    with pytest.raises(jlora.LoRAUsageError, match="has had adapters"):  # its versions would mean two things
        world.manager.restore(tmp_path)


# --- several at a time ------------------------------------------------------------------------------------------------


def test_steps_loads_and_evictions_go_on_while_it_saves(served, tmp_path, monkeypatch):
    """The state of one moment is saved, whatever comes while it is written."""
    manager, folder = served.manager, tmp_path / "saved"
    writing, go_on = threading.Event(), threading.Event()
    fsync = os.fsync

    def slow(number):
        if stat.S_ISREG(os.fstat(number).st_mode):  # folders are made before the state is taken
            writing.set()
            assert go_on.wait(60)
        fsync(number)

    monkeypatch.setattr(os, "fsync", slow)
    before = infos(served)
    with ThreadPoolExecutor(1) as threads:
        save = threads.submit(manager.save, folder)
        assert writing.wait(60)
        manager.add_adapter(make_adapter("c", 1), load_inplace=True)
        manager.add_adapter(request(tmp_path, "f"))
        manager.remove_adapter("e")
        served.check(served.serve(["f", None, "c"]), [make_adapter("f"), None, make_adapter("c", 1)])
        go_on.set()
        save.result()
    as_new(served).manager.restore(folder)
    assert infos(served) == before
    served.check(served.serve(["e", None, "c"]), [make_adapter("e"), None, make_adapter("c")])


# --- disks that fail -------------------------------------------------------------------


def two_states(world, folder):
    """Save one state, then change to another. Return the records of both."""
    as_new(world).load("a", "b")
    world.manager.save(folder)
    before = infos(world)
    world.manager.add_adapter(make_adapter("a", 1), load_inplace=True)
    world.manager.add_adapter(make_adapter("c"))
    world.manager.pin_adapter("c")
    world.manager.remove_adapter("b")
    return before, infos(world)


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_disk_is_full_at_the_nth_call(world, tmp_path, monkeypatch, call):
    """For every n: an error, and the old state or the new one is there."""
    before, after = two_states(world, tmp_path)
    real, found = getattr(os, call), []
    old = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    for n in itertools.count(1):
        with monkeypatch.context() as patched:
            calls = itertools.count(1)

            def full(*args, at=n, calls=calls, **kwargs):
                if next(calls) == at:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return real(*args, **kwargs)

            patched.setattr(os, call, full)
            error = refused(world.manager.save, tmp_path)
        if error is None:
            break
        assert "No space left on device" in str(error)
        assert str(tmp_path) in str(error)
        said = (tmp_path / "adapters.json").read_bytes()
        if said == old[tmp_path / "adapters.json"]:
            assert all(file.read_bytes() == data for file, data in old.items())
        found.append(said == old[tmp_path / "adapters.json"])
    assert len(found) == (10 if call == "fsync" else 6)
    assert found == [True] * (len(found) - (call == "fsync")) + [False] * (call == "fsync")  # all but the last sync
    assert len(list((tmp_path / "weights").iterdir())) == 2
    as_new(world).manager.restore(tmp_path)
    assert infos(world) == after != before


@pytest.mark.device("cpu")  # drivers write files too
def test_files_cannot_grow(world, tmp_path):
    before, _ = two_states(world, tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(jlora.LoRAError, match="could not be saved"):
            world.manager.save(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    as_new(world).manager.restore(tmp_path)
    assert infos(world) == before


def test_new_folders_are_on_the_disk_and_other_files_untouched(world, tmp_path, monkeypatch):
    saved, synced, fsync = tmp_path / "new" / "saved", set(), os.fsync
    monkeypatch.setattr(os, "fsync", lambda number: (synced.add(os.fstat(number).st_ino), fsync(number))[1])
    world.manager.save(saved)
    assert {folder.stat().st_ino for folder in (tmp_path, saved.parent, saved)} <= synced
    for name in ("mine", "weights/mine"):
        (saved / name).write_text("x")
    world.manager.save(saved)
    assert (saved / "mine").exists()
    assert (saved / "weights/mine").exists()


def test_a_write_that_fails_restores_nothing(world, tmp_path):
    """The second slot cannot be written: no name is there, and the slots mend themselves."""
    a, b = (make_adapter(name, modules=list(MODULES)) for name in "ab")
    b.save_pretrained(tmp_path / "b")
    as_new(world).manager.add_adapter(a)
    world.manager.add_adapter(jlora.LoRARequest("b", str(tmp_path / "b")))
    world.serve(["a", "b", None])
    world.manager.save(tmp_path)
    for _ in range(2):  # the first writes over what was served, and the second as many programs as the third
        with failing_write(as_new(world).manager, 0) as calls:  # count them: platforms differ
            world.manager.restore(tmp_path)
    with failing_write(as_new(world).manager, len(calls)), pytest.raises(DeviceError):
        world.manager.restore(tmp_path)
    assert world.held()[:2] == ((), (None, None))
    world.manager.restore(tmp_path)
    world.check(world.serve(["a", "b", None]), [a, b, None])


# --- damaged files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["adapters.json", "adapter_config.json", "adapter_model.safetensors"])
def test_damaged_files_are_refused(world, tmp_path, which):
    """Nothing changes in the manager, and the next save replaces them."""
    for damage in ("truncated", "one bit", "empty", "removed"):
        as_new(world).manager.add_adapter(make_adapter("a"))
        world.manager.save(tmp_path)
        file = tmp_path / which if which == "adapters.json" else next((tmp_path / "weights").iterdir()) / which
        data = file.read_bytes()
        half = len(data) // 2
        flipped = data[:half] + bytes([data[half] ^ 4]) + data[half + 1 :]
        file.write_bytes({"truncated": data[:half], "one bit": flipped}.get(damage, b""))
        if damage == "removed":
            file.unlink()
        as_new(world)
        nothing = which == "adapters.json" and damage == "removed"
        kind = jlora.AdapterNotFoundError if nothing else jlora.AdapterFormatError
        named = file if which == "adapters.json" else file.parent
        with pytest.raises(kind, match="no manager has been saved there" if nothing else str(named)):
            world.manager.restore(tmp_path)
        assert world.held()[:2] == ((), (None, None))
        world.manager.add_adapter(make_adapter("a"))
        assert world.manager.list_adapters()["a"].version == 0  # no version was restored
        world.manager.save(tmp_path)
        restored(world, tmp_path)
        world.check(world.serve(["a", None, None]), [make_adapter("a"), None, None])


def test_files_of_another_kind_are_refused(world, tmp_path):
    as_new(world).manager.add_adapter(request(tmp_path, "a"))
    world.manager.save(tmp_path)
    edited = (tmp_path / "adapters.json").read_text().replace('"version": 0', '"version": 1')
    as_new(world)
    for text in ("[]", "null", "3", '{"format": 3}', '{"format": 1}', "[" * 5000, "\x00", "{}", edited):
        (tmp_path / "adapters.json").write_text(text)
        said = "its SHA-256 is not the one that it names" if text == edited else r"adapters\.json"
        with pytest.raises(jlora.AdapterFormatError, match=said):
            world.manager.restore(tmp_path)
    world.manager.add_adapter(make_adapter("a"))
    assert world.manager.list_adapters()["a"].version == 0  # no version was restored


WRONG = {
    "base": 3, "layers": None, "adapters": {}, "slots": "a", "removed": [], "slots.0": 3, "removed.gone": "1",
    "adapters.0": "a", "adapters.0.name": 3, "adapters.0.version": "1", "adapters.0.version ": True,
    "adapters.0.fingerprint": 3, "adapters.0.request": ["a"], "adapters.0.request.path": 3, "adapters.0.weights": 3,
    "adapters.0.request.name": "b", "adapters.0.warnings": "a",
    "adapters.0.pinned": 1, "adapters.0.cached": None, "adapters.0.more": 1, "more": 1,
}  # fmt: skip


def test_fields_of_other_types_are_refused_by_name(world, tmp_path):
    """In a file with the digest of its content; nothing changes in the manager."""
    as_new(world).manager.add_adapter(request(tmp_path, "a"))
    world.manager.prepare(["a"]).close()
    world.manager.save(tmp_path)
    file = tmp_path / "adapters.json"
    whole = file.read_text()
    as_new(world)
    for where, value in WRONG.items():
        found = json.loads(whole)
        *parents, last = where.strip().split(".")
        owner = found["saved"]
        for name in parents:
            owner = owner[int(name) if name.isdigit() else name]
        owner[int(last) if last.isdigit() else last] = value
        write_saved(file, found)
        field = next(name for name in reversed(where.strip().split(".")) if not name.isdigit())
        with pytest.raises(jlora.AdapterFormatError, match=rf"adapters\.json: .*{field}"):
            world.manager.restore(tmp_path)
        assert world.held()[:2] == ((), (None, None))


def write_saved(file, found):
    """Write `adapters.json` with the digest of its content."""
    found["sha256"] = hashlib.sha256(json.dumps(found["saved"], sort_keys=True).encode()).hexdigest()
    file.write_text(json.dumps(found))


@pytest.mark.parametrize("edit", ["layer", "rank", "tensor", None])
def test_edited_weights_with_a_digest_of_their_own(world, tmp_path, edit):
    as_new(world).manager.add_adapter(make_adapter("a"))
    world.manager.save(tmp_path)
    saved = json.loads((tmp_path / "adapters.json").read_text())
    (folder,) = (tmp_path / "weights").iterdir()
    name = "\0"
    if edit is not None:
        config, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
        fields, tensors = json.loads(config.read_text()), safetensors.numpy.load_file(weights)
        if edit == "layer":
            fields["target_modules"][0] = "nowhere"
        elif edit == "rank":
            fields["r"] += 1
        else:
            del tensors[min(tensors)]
        config.write_text(json.dumps(fields))
        safetensors.numpy.save_file(tensors, weights)
        name = hashlib.sha256(b"".join(hashlib.sha256(f.read_bytes()).digest() for f in (config, weights))).hexdigest()
        folder.rename(folder.with_name(name))
    saved["saved"]["adapters"][0]["weights"] = name
    write_saved(tmp_path / "adapters.json", saved)
    as_new(world)
    with pytest.raises(jlora.LoRAError, match=r"adapter 'a'.*weights|adapters\[0\]: field 'weights'"):
        world.manager.restore(tmp_path)
    assert world.held()[:2] == ((), (None, None))


def test_nonfinite_weights_are_refused_unless_allowed(tmp_path):
    adapter = make_adapter("a", rank=1, modules=["embed"])
    adapter.modules["embed"].a[0, 0] = np.nan
    one = manager_of(Model(), allow_nonfinite=True)
    one.add_adapter(adapter)
    one.save(tmp_path)
    with pytest.raises(jlora.AdapterFormatError, match="holds NaN or infinity"):
        manager_of(Model()).restore(tmp_path)


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("unchecked_calls")
@pytest.mark.parametrize("path", [None, 3, ""])
def test_a_path_is_a_path(world, path):
    for call in (world.manager.save, world.manager.restore):
        with pytest.raises(jlora.LoRAUsageError, match="takes the path of a folder"):
            call(path)


@pytest.mark.device(devices=4)
def test_base_models_are_equal_on_any_device():
    assert snapshot.base_digest(Small()) == snapshot.base_digest(on_mesh())
    assert snapshot.base_digest(on_mesh()) == snapshot.base_digest(on_mesh(AxisType.Explicit))


class One(nnx.Module):
    def __init__(self, array):
        self.kernel = nnx.Param(array)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int8", "int4", "bool", "complex64"])
def test_each_value_and_place_of_a_base_parameter_counts(dtype):
    """Of a matrix: one value, exchanged rows and columns, a transposed square, a negated value, one row moved."""
    rng = np.random.default_rng(0)
    base = (rng.integers(0, 2, (6, 6)) if dtype == "bool" else rng.integers(-8, 8, (6, 6))).astype(np.float32)
    base[0], base[5], base[1, 1] = [0, 1, 1, 0, 1, 0], [1, 0, 1, 1, 0, 1], 1
    exchanged = [5, 1, 2, 3, 4, 0]
    one, negated = base.copy(), base.copy()
    one[3, 4], negated[1, 1] = float(base[3, 4] == 0), -1
    others = [one, base[exchanged], base[:, exchanged], base.T, np.roll(base, 1, axis=0)]
    others += [] if dtype == "bool" else [negated]
    digests = [snapshot.base_digest(One(jnp.asarray(each).astype(dtype))) for each in (base, *others)]
    assert len({*digests}) == len(digests)
    assert snapshot.base_digest(One(jnp.asarray(base).astype(dtype))) == digests[0]


@pytest.mark.filterwarnings("ignore::DeprecationWarning:qwix")  # of names of Flax
def test_values_of_quantized_parameters_count():
    qwix = pytest.importorskip("qwix")

    def digest(change=lambda kernel: kernel):
        model = Small()
        model.up.kernel[...] = change(model.up.kernel[...])
        rules = qwix.PtqProvider([qwix.QuantizationRule(module_path=".*", weight_qtype=jnp.int8)])
        return snapshot.base_digest(qwix.quantize_model(model, rules, jnp.zeros((1, 2), jnp.int32)))

    assert digest() == digest()
    assert len({digest(), digest(lambda kernel: kernel[::-1]), digest(lambda kernel: kernel * 2)}) == 3
