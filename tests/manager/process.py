"""One of two processes that share a model: `python -m tests.manager.process NUMBER PORT FOLDER`.

Runs every scenario of this file, in order, and writes the result of each to FOLDER/NUMBER.json. The axis "t", which
kernels and so slots are split over, goes across both processes; each has half of it. Values are compared with models of
one device into which an adapter is merged.
"""

import dataclasses
import json
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jlora
from jlora.errors import (
    AdapterFormatError,
    AdapterInUseError,
    AdapterMismatchError,
    AdapterNotFoundError,
    LoRAError,
    LoRAUsageError,
    NoFreeSlotError,
)
from jlora.manager.multihost import Peers
from tests.layers import expert_models
from tests.layers.expert_models import HIDDEN, INNER, Gathering, Model, reference
from tests.layers.merging import assert_close, expected_rows, make_adapter, make_dora, merge
from tests.layers.mesh_models import LENGTH, ONE, SMALL, SMALL_TARGETS, TWO, Small, tokens_of
from tests.manager.test_experts import each
from tests.manager.tiny import DeviceError, failing_write
from tests.records import evict, slot_names

THREE, FOUR = make_adapter("three", SMALL_TARGETS[:2], 1), make_adapter("four", SMALL_TARGETS, 2)
ADAPTERS = [ONE, TWO, THREE, FOUR]
TOKENS = tokens_of(4, LENGTH)


class World:
    """A model over both processes, its manager, and folders of adapters."""

    def __init__(self, me: int, folder: Path):
        self.me, self.folder = me, folder
        self.rounds = 0  # of messages, of all managers of this process
        exchange = Peers._exchange

        def counted(*args):
            self.rounds += 1
            return exchange(*args)

        Peers._exchange = counted
        self.devices = np.array(jax.devices()).reshape(4, 2)
        self.mesh = Mesh(self.devices, ("t", "data"))
        with jax.default_device(jax.local_devices()[0]):
            self.twins: dict[str | None, nnx.Module] = {None: Small()}
            self.twins |= {a.name: merge(Small(), SMALL_TARGETS, a) for a in ADAPTERS}
        self.adapters = {adapter.name: adapter for adapter in ADAPTERS}
        self.paths: dict[str, Path] = {}  # where this process finds an adapter, if not in the folder of its name
        self.resolving: Callable[[jlora.LoRARequest], str] = self.path_of  # a scenario may replace it

    def request(self, name: str, **options: bool) -> jlora.LoRARequest:
        return jlora.LoRARequest(name, path=str(self.folder / name), **options)

    def path_of(self, request: jlora.LoRARequest) -> str:
        return str(self.paths.get(request.name, request.path))

    def resolve(self, request: jlora.LoRARequest) -> str:
        return self.resolving(request)

    def place(self, make: Callable[[], nnx.Module], spec_of: Callable[[tuple], P]) -> None:
        """Make the model, split its variables over both processes, and make its step."""
        with jax.default_device(jax.local_devices()[0]):
            self.model = make()
        for path, variable in nnx.to_flat_state(nnx.state(self.model)):
            value, sharding = np.asarray(variable.get_value()), NamedSharding(self.mesh, spec_of(path))
            variable.set_value(
                jax.make_array_from_callback(value.shape, sharding, value.__getitem__, dtype=value.dtype)
            )
        whole = NamedSharding(self.mesh, P())

        def forward(model, x, batch):
            with jlora.use(batch):
                return jax.lax.with_sharding_constraint(model(x), whole)

        self.step = jax.jit(forward)

    def start(self, *names: str, **config) -> jlora.LoRAManager:
        """Make a model over both processes and its manager, and add the adapters of these names from files."""
        self.place(Small, lambda path: SMALL[path[0]] if path[-1] in ("kernel", "embedding") else P())
        options = {"max_loras": 2, "max_lora_rank": 3, "max_cpu_loras": 4, "data_axes": ["data"], **config}
        self.manager = jlora.LoRAManager(self.model, jlora.LoRAConfig(**options), resolve=self.resolve)
        self.paths.clear()
        self.resolving = self.path_of
        for name in names:
            assert self.manager.add_adapter(self.request(name))
        return self.manager

    def answers(self, batch) -> np.ndarray:
        return np.asarray(self.step(self.model, TOKENS, batch))

    def check(self, names) -> None:
        """Compare a mixed batch with merged weights."""
        with self.manager.prepare(names) as batch:
            found = self.answers(batch)
        with jax.default_device(jax.local_devices()[0]):
            assert_close(found, expected_rows(self.twins, names, TOKENS))

    def state(self):
        """All that must not change where a call fails."""
        stats = self.manager.stats()
        slots = [np.asarray(s.data) for a in jax.tree.leaves(self.manager.slots) for s in a.addressable_shards]
        books = self.manager.list_adapters(), slot_names(self.manager), stats.host_loads, stats.slot_loads
        return books, slots

    def unchanged(self, before) -> None:
        books, slots = self.state()
        assert books == before[0]
        for found, was in zip(slots, before[1], strict=True):
            np.testing.assert_array_equal(found, was)

    def alike(self) -> None:
        """Both processes have the same books."""
        adapters = {name: (i.version, i.slot, i.pinned) for name, i in self.manager.list_adapters().items()}
        own = np.frombuffer(
            json.dumps([list(adapters.items()), slot_names(self.manager)]).encode().ljust(4000), np.uint8
        )
        multihost_utils.assert_equal(own, "the books of the processes differ")

    def start_again(self) -> None:
        """All processes refuse to go on; with new managers they do."""
        with pytest.raises(LoRAError, match="cut short in one of the processes"):
            self.manager.add_adapter(self.request("four"))
        self.manager.unwrap()
        self.resolving = self.path_of
        self.manager = jlora.LoRAManager(self.model, self.manager.config, resolve=self.resolve)
        self.manager.add_adapter(self.request("one"))
        self.check(["one", None, None, "one"])
        self.alike()


Scenario = Callable[[World], None]
SCENARIOS: dict[str, Scenario] = {}


def scenario(run: Scenario) -> Scenario:
    SCENARIOS[run.__name__] = run
    return run


@scenario
def mixed_batches_through_swaps(world: World) -> None:
    world.start(fully_sharded=True)
    for adapter in ADAPTERS:
        world.manager.add_adapter(adapter)  # from memory
    world.check(["one", None, "two", "one"])
    world.check(["three", "four", None, "four"])
    manager = world.start("one", "two", "three", "four")
    for names in (["one", None, "two", "one"], ["three", "four", None, "four"], ["two", "four", "two", None]):
        world.check(names)
        world.alike()
    assert world.step._cache_size() == 1
    assert manager.stats().compilations == 1
    for variable in nnx.to_flat_state(manager.slots).leaves:
        array = variable.get_value()
        sizes = {shard.data.size for shard in array.addressable_shards}
        assert sizes == {array.size // (1 if array.sharding.is_fully_replicated else 4)}
    assert not world.model.up.jlora_b[...].is_fully_replicated
    assert not world.model.down.jlora_a[...].is_fully_replicated


@scenario
def a_request_is_set_in_all_processes_or_in_none(world: World) -> None:
    manager = world.start(max_cpu_loras=2)
    manager.add_adapter(ONE)
    before = world.state()
    with pytest.raises(LoRAUsageError, match=r"is not the given adapter.*\(process 1\)"):
        manager.set_request(dataclasses.replace(ONE) if world.me else ONE, world.request("one"))
    world.unchanged(before)
    manager.set_request(ONE, world.request("one"))
    for name in ("two", "three"):
        manager.add_adapter(world.request(name))
    assert manager.list_adapters(level="evicted").keys() == {"one"}
    world.check(["one", None, None, "one"])
    world.alike()


@scenario
def dora(world: World) -> None:
    adapter = make_dora("dora", SMALL_TARGETS[1:], 3)
    factors = {"a": ONE.modules["up"].a, "b": ONE.modules["up"].b}
    updated = {**adapter.modules, "up": dataclasses.replace(adapter.modules["up"], **factors)}
    with jax.default_device(jax.local_devices()[0]):
        before = merge(Small(), SMALL_TARGETS, adapter)
        after = merge(Small(), SMALL_TARGETS, dataclasses.replace(adapter, modules=updated))
    for fully_sharded in (False, True):
        world.twins["dora"] = before
        manager = world.start("one", variants=["dora"], fully_sharded=fully_sharded)
        manager.add_adapter(adapter)
        world.check(["dora", None, "one", "dora"])
        manager.update_adapter("dora", {f"up.lora_{half.upper()}.weight": array for half, array in factors.items()})
        world.alike()
        world.twins["dora"] = after
        world.check(["dora", None, None, "dora"])


@scenario
def what_commits_nothing_sends_no_message(world: World) -> None:
    manager = world.start("one", "two", "three")
    world.check(["one", "two", None, None])
    before = world.rounds
    for names in (["one", "two", None, None], ["two", None, "one", "one"], [None] * 4):
        world.check(names)
    assert not manager.add_adapter(world.request("one"))
    assert world.rounds == before
    world.check(["three", None, None, None])
    assert world.rounds == before + 1


@scenario
def one_process_cannot_read_it(world: World) -> None:
    manager = world.start("one")
    world.check(["one", None, None, "one"])
    before = world.state()
    cases = {"missing": AdapterNotFoundError, "cut": AdapterFormatError, "nan": AdapterFormatError}
    for process, (case, error) in enumerate(cases.items()):
        if world.me == process % 2:
            world.paths["two"] = world.folder / case
        for attempt in (
            lambda: manager.add_adapter(world.request("two")),
            lambda: manager.prepare(["one", world.request("two")]),
        ):
            with pytest.raises(error) as caught:
                attempt()
            assert str(caught.value).endswith(f"(process {process % 2})"), caught.value
            said = np.frombuffer(str(caught.value).encode().ljust(2000)[:2000], np.uint8)
            multihost_utils.assert_equal(said, "the processes raise different errors")
            world.unchanged(before)
        world.paths.clear()
    manager.add_adapter(world.request("two"))  # and the next time it is there
    world.check(["one", "two", None, "one"])
    world.alike()


@scenario
def a_process_answers_while_it_waits_for_another(world: World) -> None:
    manager = world.start("one")
    waiting = threading.Thread(target=lambda: manager.add_adapter(world.request("two")))
    if world.me == 1:
        time.sleep(0.7)
    waiting.start()
    slowest = 0.0
    while waiting.is_alive():
        started = time.perf_counter()
        assert manager.stats().registered in (1, 2)
        assert "one" in manager.list_adapters()
        slowest = max(slowest, time.perf_counter() - started)
        time.sleep(0.01)
    assert slowest < 0.35  # a call that waits takes the 0.7 s for which the other process begins later
    world.check(["one", "two", None, "two"])
    with manager.prepare(["one"]) as batch:  # an error in a call without an agreement is of one process
        if world.me == 0:
            batch.close()
            with pytest.raises(LoRAUsageError, match="open batch"):
                manager.handles(batch)
    world.alike()


@scenario
def refused_calls(world: World) -> None:
    manager = world.start("one")
    before, rounds = world.state(), world.rounds
    folder = world.folder / "saved"
    for attempt in (
        lambda: manager.prefetch(world.request("two")),
        lambda: manager.prepare(["one"], timeout=0),
        lambda: manager.add_adapter(world.request("two"), timeout=1),
        lambda: manager.remove_adapter("one", timeout=0),
        lambda: manager.export_adapter("one"),
        lambda: manager.save(folder),
        lambda: manager.restore(folder),
    ):
        with pytest.raises(LoRAUsageError, match=r"devices of processes \[0, 1\]"):
            attempt()
        world.unchanged(before)
    assert world.rounds == rounds
    world.check(["one", None, None, "one"])


@scenario
def updates_and_held_versions(world: World) -> None:
    manager = world.start("one")
    with manager.prepare(["one"] * 4) as batch:
        assert batch.versions == (0,) * 4
        with pytest.raises(AdapterInUseError):
            manager.add_adapter(world.request("one", load_inplace=True))
    held, up = manager.hold("one"), ONE.modules["up"]
    arrays = {"up.lora_A.weight": np.full_like(up.a, 0.5), "up.lora_B.weight": np.full_like(up.b, 0.5)}
    assert manager.update_adapter("one", arrays) == 1
    with manager.prepare([held, "one", None, None]) as batch:
        assert batch.versions == (0, 1, None, None)
        found = world.answers(batch)
    held.close()
    new = dict(zip("ab", arrays.values(), strict=True))
    changed = jlora.Adapter(name="one", modules={**ONE.modules, "up": dataclasses.replace(up, **new)})
    with jax.default_device(jax.local_devices()[0]):
        twins = {**world.twins, "new": merge(Small(), SMALL_TARGETS, changed)}
        assert_close(found, expected_rows(twins, ["one", "new", None, None], TOKENS))
    with pytest.raises(LoRAUsageError, match="NumPy arrays"):
        manager.update_adapter("one", {name: jax.numpy.asarray(array) for name, array in arrays.items()})
    with pytest.raises(LoRAError, match="Files must be the same"):
        manager.update_adapter("one", {name: array + world.me for name, array in arrays.items()})
    world.alike()


@scenario
def versions_of_files(world: World) -> None:
    """Explicit loads are new versions; so is a recall of files that one process alone finds changed."""
    manager = world.start()
    folder = world.folder / f"own{world.me}"
    ONE.save_pretrained(folder)
    world.paths["one"] = folder

    def version() -> int:
        with manager.hold("one") as handle:
            world.alike()
            return handle.version

    seen = []
    for again in ({}, {"load_inplace": True}, {}):
        manager.add_adapter(world.request("one", **again))
        seen.append(version())
        if len(seen) == 2:
            assert manager.remove_adapter("one")
    assert evict(manager)
    assert version() == seen[-1]
    assert evict(manager)
    if world.me == 1:
        config = folder / "adapter_config.json"
        config.write_text(config.read_text() + "\n")
    seen.append(version())
    assert seen == sorted(set(seen))
    world.check(["one", None, "one", None])


@scenario
def other_weights_or_another_order_in_one_process(world: World) -> None:
    manager = world.start()
    before = world.state()
    if world.me == 1:
        world.paths["two"] = world.folder / "four"
    with pytest.raises(LoRAError, match=r"'two'\): process 0 has .* and process 1 .* Files must be"):
        manager.add_adapter(world.request("two"))
    world.paths.clear()
    for name in ["one", "two"] if world.me == 0 else ["two", "one"]:
        with pytest.raises(LoRAError, match="must make the same calls in the same order"):
            manager.add_adapter(world.request(name))
        world.unchanged(before)
    manager.add_adapter(world.request("three"))
    world.check(["three", None, None, None])


@scenario
def a_process_that_does_not_come(world: World) -> None:
    manager = world.start("one", process_timeout=2)
    before = world.state()
    if world.me == 0:
        with pytest.raises(LoRAError, match=r"add_adapter\('two'\): not all of processes \[0, 1\] came within 2 s"):
            manager.add_adapter(world.request("two"))
    multihost_utils.sync_global_devices("late")
    for name in ("two", "three"):  # it comes too late
        with pytest.raises(LoRAError, match=r"add_adapter\('two'\) was cut short"):
            manager.add_adapter(world.request(name))
    world.unchanged(before)
    world.start_again()


@scenario
def unequal_calls_of_which_one_sends_no_message(world: World) -> None:
    manager = world.start("one", "two", process_timeout=2)
    world.check(["one", "two", None, None])
    before = world.state()
    for calls in (("remove_adapter", "pin_adapter"), ("unpin_adapter", "remove_adapter")):  # both send one
        with pytest.raises(LoRAError, match="must make the same calls in the same order"):
            getattr(manager, calls[world.me])("one")
        world.unchanged(before)
    batch = manager.prepare(["one", None, None, None])
    if world.me == 0:
        with pytest.raises(LoRAError, match=r"remove_adapter\('two'\): not all of processes"):
            manager.remove_adapter("two")
    else:
        manager.prepare(["two", None, None, None]).close()  # it is in a slot
    multihost_utils.sync_global_devices("given up")
    before = world.state()
    for attempt in (
        lambda: manager.prepare(["one", "two", None, None]),
        lambda: manager.prepare([None] * 4),
        lambda: manager.add_adapter(world.request("one")),
        lambda: manager.pin_adapter("one"),
        lambda: manager.unpin_adapter("one"),
        lambda: manager.hold("one"),
        lambda: manager.handles(batch),
        lambda: manager.remove_adapter("two"),
        lambda: manager.remove_all_adapters(),
    ):
        with pytest.raises(LoRAError, match=r"remove_adapter\('two'\) was cut short in one of the processes"):
            attempt()
        world.unchanged(before)
    batch.close()
    world.start_again()


@scenario
def a_batch_that_one_process_has_not_closed(world: World) -> None:
    manager = world.start(*world.adapters)
    first, second = manager.prepare(["one"]), manager.prepare(["two"])
    second.close()
    if world.me == 0:
        first.close()
    before = world.state()
    with pytest.raises(LoRAError, match="closed between the same calls"):
        manager.prepare(["three"])
    world.unchanged(before)
    second = manager.prepare(["two"])
    with pytest.raises(NoFreeSlotError, match="process 1"):
        manager.prepare(["two", "three"])
    assert manager.remove_adapter("four")
    with pytest.raises(NoFreeSlotError, match="process 1"):  # before it is loaded
        manager.prepare(["two", world.request("four")])
    first.close()
    second.close()
    manager.add_adapter(world.request("four"))
    world.check(["three", "four", None, None])
    world.alike()


@scenario
def a_write_that_fails_in_one_process(world: World) -> None:
    manager = world.start("one", "two", process_timeout=20)
    world.check(["one", None, None, None])
    if world.me == 1:
        with failing_write(manager, 1), pytest.raises(DeviceError):
            manager.prepare(["two"])
        with pytest.raises(LoRAError, match="prepare was cut short"):
            manager.prepare(["one", None, None, None])  # though no exchange is needed
    else:
        manager.prepare(["two"]).close()
    for _ in range(2):
        with pytest.raises(LoRAError, match="prepare was cut short in one of the processes"):
            manager.add_adapter(world.request("three"))


@scenario
def whole_models(world: World) -> None:
    manager = world.start()
    report = manager.verify(world.step, TOKENS)
    assert report.checked == ("embed", "up", "down", "head")
    manager.warmup(lambda batch: world.step(world.model, TOKENS, batch), jlora.BatchShape(4))
    compiled = world.step._cache_size()
    manager.add_adapter(ONE)
    world.check(["one", None, "one", None])
    assert world.step._cache_size() == compiled
    table = np.asarray(world.twins[None].embed.embedding[...])
    same, other = (
        jlora.Adapter(name="base", modules=ONE.modules, base_weights={"embed": t}) for t in (table, table + 1)
    )
    with pytest.raises(LoRAError, match="differ from the model's own weight"):
        manager.add_adapter(other)
    manager.add_adapter(same)
    manager.unwrap()


class Experts(World):
    """A model whose eight experts are split over both processes: four of each."""

    def __init__(self, world: World):
        vars(self).update(vars(world))
        expert_models.EXPERTS = 8
        self.place(lambda: Model(Gathering, nnx.Rngs(0)), lambda path: P("t") if "experts" in path else P())
        with jax.default_device(jax.local_devices()[0]):
            self.twin = Model(Gathering, nnx.Rngs(0))
            self.x = np.asarray(jax.random.normal(jax.random.key(1), (4, 2, HIDDEN)))
        config = jlora.LoRAConfig(max_loras=2, max_lora_rank=3, max_cpu_loras=8)
        self.manager = jlora.LoRAManager(self.model, config)
        self.adapters = {"each": each("each", range(8)), "few": each("few", (1, 6))}

    def written(self, name: str) -> jlora.LoRARequest:
        folder = self.folder / f"experts_{name}"
        if self.me == 0:
            self.adapters[name].save_pretrained(folder)
        multihost_utils.sync_global_devices(str(folder))
        return jlora.LoRARequest(name, str(folder))

    def check(self, names) -> None:
        with self.manager.prepare(names) as batch:
            found = np.asarray(self.step(self.model, self.x, batch))
        owners = [self.adapters.get(name) for name in names for _ in range(2)]
        expected = reference(self.twin, self.x.reshape(-1, HIDDEN), owners).reshape(found.shape)
        np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())


@scenario
def experts(world: World) -> None:
    """Each process reads the slots of its own devices, and the answers equal those of one process."""
    world = Experts(world)
    for name in world.adapters:
        world.manager.add_adapter(world.written(name))
    for names in (["each", None, "few", "each"], ["few", "few", None, "few"]):
        world.check(names)
        world.alike()
    assert world.step._cache_size() == 1
    assert world.manager.stats().compilations == 1

    rng = np.random.default_rng(5)
    for name, expert in (("each", 2), ("each", 7), ("few", 1)):  # experts of either process
        module = f"layers.1.experts.{expert}.down_proj"
        new = [rng.normal(size=size).astype(np.float32) for size in ((2, INNER), (HIDDEN, 2))]
        halves = zip("AB", new, strict=True)
        world.manager.update_adapter(name, {f"{module}.lora_{half}.weight": array for half, array in halves})
        arrays = {key: (m.a, m.b) for key, m in world.adapters[name].modules.items()} | {module: tuple(new)}
        world.adapters[name] = jlora.Adapter.from_arrays(name, arrays, alpha=3)
    world.check(["each", None, "few", "each"])

    world.adapters["each"].modules["layers.0.experts.6.up_proj"].b[0, 0] = np.nan
    before = world.state()
    with pytest.raises(AdapterFormatError, match=r"experts\.6\.up_proj.*NaN.*process 1"):
        world.manager.add_adapter(dataclasses.replace(world.written("each"), load_inplace=True))
    world.unchanged(before)
    world.check(["few", None, None, "few"])


class Interrupted:
    """The service of messages, with a KeyboardInterrupt in place of the next message; as it was from then on."""

    def __init__(self, manager: jlora.LoRAManager):
        self._peers = manager._state.peers
        self._service, self._peers._service = self._peers._service, self

    def key_value_set(self, *_: str) -> None:
        self._peers._service = self._service
        raise KeyboardInterrupt

    def __getattr__(self, name: str):
        return getattr(self._service, name)


@scenario
def an_interrupt_before_others_are_told(world: World) -> None:
    """They wait, and hear why in vain."""
    manager = world.start("one")
    before = world.state()
    if world.me == 1:
        Interrupted(manager)
    with pytest.raises(KeyboardInterrupt if world.me == 1 else LoRAError, match="cut short" if not world.me else None):
        manager.add_adapter(world.request("two"))
    for name in ("one", "three"):  # the first is there
        if world.me == 1 or name == "three":
            with pytest.raises(LoRAError, match=r"add_adapter\('two'\) was cut short"):
                manager.add_adapter(world.request(name))
    world.unchanged(before)
    world.start_again()


@scenario
def a_manager_that_one_process_cannot_make(world: World) -> None:
    with pytest.raises(LoRAError, match="LoRAManager: process 0 has"):
        world.start(max_loras=2 + world.me)
    for process in (0, 1):
        targets = ["nowhere"] if world.me == process else ["up", "down"]
        with pytest.raises(LoRAUsageError, match=rf"nowhere.*\(process {process}\)"):
            world.start(target_modules=targets)
    targets = ["up", "down"] if world.me == 0 else ["down", "up"]  # as of a set
    world.start(target_modules=targets, max_cpu_bytes=10_000 + world.me)
    assert world.manager._state.cache._max_bytes == 10_000


@scenario
def a_process_without_devices_of_the_model(world: World) -> None:
    mesh, world.mesh = world.mesh, Mesh(world.devices[:2], ("t", "data"))
    try:
        if world.me == 0:
            world.start("one")
            world.check(["one", None, None, "one"])
        else:
            with pytest.raises(LoRAError, match=r"devices of processes \[0\], and this is process 1"):
                world.start()
    finally:
        world.mesh = mesh


@scenario
def other_orders_of_use(world: World) -> None:
    """A call that would evict different adapters in each process evicts none."""
    manager = world.start("one", "two", "three", max_cpu_loras=3)
    world.check(["one", "two", None, None])
    manager.add_adapter(world.request("three"))
    before = world.state()
    if world.me == 1:
        manager._state.cache.loaded.move_to_end("one")
        manager._state.policy.touch(manager._state.slot_arrays.occupants[0])
    for attempt in (lambda: manager.add_adapter(world.request("four")), lambda: manager.pin_adapter("three")):
        with pytest.raises(LoRAError, match=r"process 0 has .*, and process 1 "):
            attempt()
        assert slot_names(manager) == before[0][1]
    world.check(["one", "two", None, None])
    manager.add_adapter(world.request("three"))
    manager.add_adapter(world.request("four"))
    world.check(["four", None, "three", None])
    world.alike()


@scenario
def batches_of_other_threads(world: World) -> None:
    """Are not waited for."""
    manager = world.start("one", "two")
    world.check(["one", None, None, "two"])
    batch: list[jlora.LoRABatch] = []
    thread = threading.Thread(target=lambda: batch.append(manager.prepare(["one"])))
    thread.start()
    thread.join()
    again = world.request("one", load_inplace=True)
    zeros = {"up.lora_B.weight": np.zeros_like(ONE.modules["up"].b)}
    for attempt in (
        lambda: manager.prepare([again, "two"]),
        lambda: manager.add_adapter(again),
        lambda: manager.remove_adapter("one"),
        lambda: manager.update_adapter("one", zeros),
    ):
        with pytest.raises(AdapterInUseError):
            attempt()
    batch[0].close()
    manager.prepare([again, "two"]).close()
    world.check(["one", None, None, "two"])
    world.alike()


@scenario
def names_and_messages(world: World) -> None:
    manager = world.start()
    names = ["a/b", "../x", "ключ ☃", "\ud800 alone", "new\nline \x00", "n" * 100_000, "{'a': 1}"]
    for name in names:
        assert manager.add_adapter(jlora.LoRARequest(name, path=str(world.folder / "one")))
        manager.prepare([name, None]).close()
        assert name in manager.list_adapters()
    world.alike()

    error = AdapterMismatchError("ошибка ☃ \ud800 " + "x" * 5_000_000)
    error.problems = ("ошибка", "\ud800")
    for raised, kind, said in (
        (error, AdapterMismatchError, r"^ошибка ☃ \ud800 x+ \(process 1\)$"),
        (ValueError("not of jlora"), LoRAError, r"^ValueError: not of jlora \(process 1\)$"),
    ):

        def fail(request, raised=raised):
            raise raised

        world.resolving = fail if world.me == 1 else world.path_of
        with pytest.raises(kind, match=said) as caught:
            manager.add_adapter(world.request("one"))
        assert getattr(caught.value, "problems", ()) == getattr(raised, "problems", ())
    world.resolving = world.path_of
    manager.add_adapter(world.request("one"))
    world.check(["one", None, None, "one"])


CALLS: dict[str, Callable[[World, str, str], object]] = {
    "add": lambda w, name, other: w.manager.add_adapter(w.request(name)),
    "in place": lambda w, name, other: w.manager.add_adapter(w.request(name, load_inplace=True)),
    "memory": lambda w, name, other: w.manager.add_adapter(w.adapters[name]),
    "prepare": lambda w, name, other: w.check([name, None, other, name]),
    "request": lambda w, name, other: w.manager.prepare([w.request(name, load_inplace=True), other]).close(),
    "hold": lambda w, name, other: w.manager.hold(name).close(),
    "remove": lambda w, name, other: w.manager.remove_adapter(name),
    "pin": lambda w, name, other: w.manager.pin_adapter(name),
    "unpin": lambda w, name, other: w.manager.unpin_adapter(name),
}


@scenario
def random_traffic(world: World) -> None:
    """The same calls in both, of a seed; a load takes another time in each."""
    world.start(max_cpu_loras=3)
    rng, own = np.random.default_rng(11), np.random.default_rng(world.me)

    def slow(request):
        time.sleep(own.choice([0, 0.005, 0.03]))
        return world.path_of(request)

    world.resolving = slow
    called = set()
    for step in range(200):
        name, other = rng.choice(list(world.adapters), 2, replace=False).tolist()
        call, said = str(rng.choice(list(CALLS))), ""
        try:
            CALLS[call](world, name, other)
            called.add(call)
        except LoRAError as error:
            said = str(error)
        infos = [(n, i.version, i.slot, i.pinned, i.leases) for n, i in world.manager.list_adapters().items()]
        seen = f"{step} {call} {name} {other}: {said} {infos} {slot_names(world.manager)}"
        multihost_utils.assert_equal(np.frombuffer(seen.encode().ljust(2000)[:2000], np.uint8), f"not as here: {seen}")
    assert called == CALLS.keys(), CALLS.keys() - called


def main(number: str, port: str, folder: str) -> None:
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    # Most scenarios compile the same programs.
    jax.config.update("jax_compilation_cache_dir", f"{folder}/compiled{number}")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    me = int(number)
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=me)
    world = World(me, Path(folder))
    if me == 0:
        make_folders(Path(folder))
    multihost_utils.sync_global_devices("folders")
    found = {}
    for name, run in SCENARIOS.items():
        if sys.argv[4:] and name not in sys.argv[4:]:
            continue
        started = time.monotonic()
        try:
            run(world)
            found[name] = ""
        except BaseException:
            found[name] = traceback.format_exc()
        print(me, name, f"{time.monotonic() - started:.1f} s", found[name], flush=True)
        try:
            multihost_utils.sync_global_devices(name)
        except Exception:
            found[name] += traceback.format_exc()
            break
        (Path(folder) / f"{me}.json").write_text(json.dumps(found))


def make_folders(folder: Path) -> None:
    for adapter in ADAPTERS:
        adapter.save_pretrained(folder / adapter.name)
    TWO.save_pretrained(folder / "cut")
    weights = folder / "cut" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    broken = make_adapter("two", SMALL_TARGETS, 3)
    next(iter(broken.modules.values())).a[0, 0] = np.nan
    broken.save_pretrained(folder / "nan")


if __name__ == "__main__":
    main(*sys.argv[1:4])
