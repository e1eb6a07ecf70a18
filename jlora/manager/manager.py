"""`LoRAManager`: adapters on the host, adapters in slots, and batches that hold their slots."""

import logging
import operator
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast, overload

import jax
from flax import nnx

from jlora._compat import trace_state_clean
from jlora._memory import machine_bytes
from jlora.adapters import Adapter
from jlora.config import LoRAConfig, LoRARequest
from jlora.errors import AdapterInUseError, LoRAError, LoRAUsageError
from jlora.layers.forward.batch import LoRABatch
from jlora.layers.forward.batch_shape import batch_shape
from jlora.layers.forward.context import staged
from jlora.layers.site import SlotParam
from jlora.layers.wrap.apply import wrap_model
from jlora.layers.wrap.select import PackedModules
from jlora.layers.wrap.wrapped import LayerInfo, WrappedModel
from jlora.manager.batch_arguments import Name, read_arguments
from jlora.manager.export import export
from jlora.manager.host import Host
from jlora.manager.host_cache import HostCache
from jlora.manager.leases import AdapterHandle, LeaseInfo, Leases
from jlora.manager.loader import Load, Patience
from jlora.manager.locks import Bell, StateLock
from jlora.manager.multihost import coordinator_of
from jlora.manager.names import NameMap, NameRules, SiteIndex, name_rules
from jlora.manager.packed_adapter import PackedAdapter
from jlora.manager.prepare import Batches
from jlora.manager.report import AdapterInfo, Level, Stats, records
from jlora.manager.slot_arrays import SlotArrays
from jlora.manager.slot_table import SlotTable
from jlora.manager.snapshot import base_digest, restore, save
from jlora.manager.warmup import warm_up
from jlora.verify.verify import Forward, VerifyReport, verify

_log = logging.getLogger("jlora")


class LoRAManager:
    """Serves many adapters on one model.

    Wraps the eligible layers of `model` in place. Adapters live in a host cache (`max_cpu_loras`) and are written into
    device slots (`max_loras`) when a batch needs them; both evict the least recently used one that is neither pinned
    nor held by an open batch. What was loaded from a request and evicted is loaded again when it is asked for.

    Threads: every method may be called from any thread. Loads run on threads of their own and touch no slot array;
    slots are written inside `prepare`, `activate_adapter`, `pin_adapter`, `update_adapter` and `warmup` alone. If one
    thread steps while another may write, run the steps through `run`, which takes turns with the writes. A thread that
    calls its step directly, with an open batch of its own, is safe too, but then a write in another thread copies the
    slot arrays instead of updating them in place.

    Interrupts: after a Ctrl-C the books and the slots agree. Under Python's own SIGINT handler, a KeyboardInterrupt in
    the main thread comes before or after a change of them. A slot that a device error left half written is written
    again by the next `prepare`, and so are slot arrays that a step donated or that were replaced from outside
    (`nnx.update` with an older state): what is in the slots is the host cache's.

    Copies: the manager writes the slots of `model` and of nothing else. A copy that was made before an adapter came
    into its slot (`nnx.clone(arrays=True)`, a state that was split and kept) raises, or computes NaN inside a compiled
    function, for batches with that adapter. The first layer that is wrapped tells, so a function that calls only others
    is not protected.

    Meshes: where the model's parameters lie on several devices, the slots of each layer are split as its kernel is
    (docs/mesh.md), and batches lie on the same mesh. Where these are of several processes, each has a manager, and all
    make the same calls in the same order; what one of them cannot do, none does, and all raise the same error. No call
    waits for open batches then, and `timeout=`, `wait=False` and `prefetch` are refused.

    Args:
      model: any `nnx.Module`; on a mesh, laid out before the manager is made.
      config: sizes, dtype, targets.
      packed_modules: checkpoint names that make up merged projections, {"qkv_proj": ("q_proj", "k_proj", "v_proj")}
        or, with the sizes of the slices that each name covers, {"in_proj": {"qkv": (64, 64, 128), "z": 128}}. A tuple
        takes its sizes from the layer's `output_sizes`, else it splits evenly. None reads `model.packed_modules`.
      name_map: regex -> replacement from checkpoint module names to the model's own dotted paths, for models whose
        paths differ; the first pattern found in a name is substituted.
      skip: regular expressions, searched in the names of checkpoint modules that this process lacks on purpose (MTP
        heads, other pipeline stages, a vision tower); what an adapter brings for those is passed over and shown by
        `layers()`.
      resolve: request -> local folder, for stores that are neither a folder nor the Hugging Face hub. Called on the
        loading thread, where calls of this manager that wait for loads raise LoRAUsageError.

    Raises:
      LoRAError: nothing can be wrapped, a target matches nothing, the model is wrapped already, a kernel is split over
        a mesh in a way that is not served, or `name_map` is not what it should be. The model is as it was then.
    """

    _wrapped: WrappedModel

    def __init__(
        self,
        model: nnx.Module,
        config: LoRAConfig,
        *,
        packed_modules: PackedModules | None = None,
        name_map: NameMap | None = None,
        skip: Sequence[str] = (),
        resolve: Callable[[LoRARequest], str] | None = None,
    ):
        self.model = model
        self.config = config
        # Taken in this order. `_step_lock` is held while slots are written and while `run` dispatches a step;
        # `_state_lock` for moments only, never while anything is read, cast or compiled.
        self._step_lock, self._state_lock = locks = threading.RLock(), StateLock()
        self._coordinator = coordinator_of(model, config.process_timeout, *locks)
        try:
            with self._coordinator.turn("LoRAManager"):
                rules, memory = self._wrap(packed_modules, name_map, skip)
            self._build(rules, memory, resolve)
        except BaseException:
            if "_wrapped" in vars(self):
                self._wrapped.unwrap()  # nobody else could
            raise

    def _wrap(
        self, packed_modules: PackedModules | None, name_map: NameMap | None, skip: Sequence[str]
    ) -> tuple[NameRules, int]:
        """Wrap the model, in all processes and with the same slots. Returns the bytes of their host caches, too."""
        config = self.config

        def wrap() -> NameRules:
            rules = name_rules(name_map)  # first, so that a bad one leaves the model alone
            self._wrapped = wrap_model(self.model, config, packed_modules, skip)
            return rules

        def same(_: NameRules) -> Any:
            slots = [(site.path, site.kind, site.slot_nbytes, site.spec.shapes) for site in self._wrapped.modules]
            sizes = replace(config, max_cpu_bytes=None, max_pinned_bytes=0, trace_leases=False)
            sizes = replace(sizes, target_modules=None, exclude_modules=None)  # the slots show which layers they name
            return [repr(sizes), repr(slots)]

        rules, memory = self._coordinator.agree(wrap, same, lambda _: config.max_cpu_bytes or machine_bytes() // 2)
        return rules, min(memory)

    def _build(self, rules: NameRules, memory: int, resolve: Callable[[LoRARequest], str] | None) -> None:
        config = self.config
        self._index = index = SiteIndex(self._wrapped, rules)
        self._changed = Bell()
        self._counts: Counter[str] = Counter()
        self._leases = Leases()
        self._cache = HostCache(config.max_cpu_loras or config.max_loras, memory)
        self._pool = SlotArrays(self._wrapped.modules, config.max_loras, config.max_staging_bytes)
        self._slots = SlotTable(self._pool, self._cache, self._leases, self._counts)
        of_host = (config, self._wrapped, index, self._cache, self._leases, self._slots, self._counts)
        of_host = (*of_host, self._state_lock, self._changed)
        self._host = Host(*of_host, resolve, self._coordinator)
        of_batches = (self._wrapped, config, self._cache, self._leases, self._slots, self._state_lock, self._changed)
        self._batches = Batches(*of_batches, self._host, self._coordinator)
        self._state: tuple[list[jax.Array], nnx.State[Any, Any]] | None = None
        self._shape: tuple[Any, list[int]] | None = None  # of that state, and which array each of its leaves is
        self._base_digest: str | None = None

    # --- adapters -----------------------------------------------------------------------------------------------

    def add_adapter(
        self, adapter: LoRARequest | Adapter, *, load_inplace: bool = False, timeout: float | None = None
    ) -> bool:
        """Load an adapter into the host cache. True if it was loaded, False if the name was there (then it is touched).

        With `load_inplace` (here or in the request) an adapter of the same name is replaced, by its files as they are
        now and always as a new version. That waits for open batches with the old one, unless handles hold it: then
        both versions are served.

        Args:
          adapter: what to load: a folder or repository, or arrays in memory.
          load_inplace: replace an adapter of the same name.
          timeout: seconds to wait for the load and for open batches. None: as long as it takes, but not for batches
            which this very thread has open.

        Raises:
          AdapterNotFoundError, AdapterFormatError, AdapterMismatchError: see `jlora.errors`; nothing changes then. The
            first also where another thread removes the name while it is loaded.
          AdapterInUseError: open batches held the adapter to replace for too long.
          LoadTimeoutError: the load took too long; it is given up.
          NoFreeSlotError: the host cache is full of pinned and leased adapters.
        """
        self._check_call("add_adapter", waits=True)
        patience = self._patience(timeout)
        if not isinstance(adapter, LoRARequest | Adapter):
            raise LoRAUsageError(f"add_adapter takes a LoRARequest or an Adapter, got {type(adapter).__name__}")
        if not isinstance(adapter.name, str) or not adapter.name:
            raise LoRAUsageError(f"an adapter's name must be a non-empty string, got {adapter.name!r}")
        with self._coordinator.turn(f"add_adapter({adapter.name!r})"):
            if isinstance(adapter, LoRARequest):
                request = replace(adapter, load_inplace=True) if load_inplace else adapter
                if not request.load_inplace and self._host.touch(request.name):
                    return False
                return self._host.load(request, patience)
            if not load_inplace and self._host.touch(adapter.name):
                return False
            return self._host.add(adapter, load_inplace, patience)

    def prefetch(self, request: LoRARequest | str) -> "Future[bool]":
        """Load an adapter in the background, and move it to the device, so that the next `prepare` only writes it.

        Nothing waits for it: not a step, not a `prepare` of other adapters. Cancelling the future gives the load up.

        Args:
          request: what to load, or the name of one that was evicted and is loaded again.

        Returns:
          A future of what `add_adapter(request)` would return; its exception is what that would raise:
          AdapterNotFoundError also where the name is removed before it is loaded.

        Raises:
          AdapterNotFoundError: no adapter of that name was added.
          LoRAUsageError: the model lies on devices of several processes.
        """
        self._check_call("prefetch")
        self._coordinator.refuse("prefetch", "load adapters with add_adapter or prepare, in all processes at once")
        if isinstance(request, str):
            with self._state_lock:
                name, known = request, self._cache.known.get(request)
                request = known or self._host.newest(name).request or LoRARequest(name, name)  # in memory: never read
        if not isinstance(request, LoRARequest):
            raise LoRAUsageError(f"prefetch takes a LoRARequest, got {type(request).__name__}")
        return self._host.prefetch(request)

    def update_adapter(self, name: str, arrays: Mapping[str, Any], *, timeout: float | None = None) -> int:
        """New weights for an adapter, as a new version, in the slot that it has: all of them or none.

        From device arrays nothing goes through the host: they are cast, scaled and written where they are, and copied
        to the host cache in the background; until then the adapter is not evicted, and who needs its slot waits. Open
        batches with the old weights are waited for, unless handles hold those. After that the adapter is no longer what
        its request would load.

        Args:
          name: which.
          arrays: PEFT tensor name -> A [r, K] or B [N, r] (an embedding's: [r, V] and [D, r]), unscaled: the adapter's
            own scaling is applied. Names left out keep their weights. The rank of a module may change where both
            halves are given, up to `max_lora_rank`; its scaling then follows its alpha.
          timeout: seconds to wait. None: as long as it takes, but not for batches which this very thread has open.

        Returns:
          The new version.

        Raises:
          AdapterNotFoundError: the name was not added.
          AdapterMismatchError: a name that the adapter does not have, a shape or a rank that does not fit.
          AdapterFormatError: not matrices of floats; NaN or infinity.
          AdapterInUseError: open batches held it for too long, or another thread replaced it meanwhile.
        """
        self._check_call("update_adapter", waits=True)
        self._wrapped.check()
        patience = self._patience(timeout)
        with self._coordinator.turn(f"update_adapter({name!r})"):
            return self._host.update(name, arrays, patience)

    def remove_adapter(self, name: str, *, timeout: float | None = None) -> bool:
        """Remove an adapter from its slot and from the host, pinned or not, and forget it. False if it is unknown.

        Waits for open batches with it. Loads of it that are under way are given up: who waits for one gets an
        AdapterNotFoundError.

        Args:
          name: which.
          timeout: seconds to wait. None: as long as it takes, but not for batches which this very thread has open.

        Raises:
          AdapterInUseError: open batches held it for too long.
        """
        patience = self._patience(timeout)

        def decide() -> int | None:
            if (content := self._cache.contents.get(name)) is None:
                return None
            self._host.check_free(content, "removing", patience)
            return content.version

        def remove(_: int | None) -> tuple[bool, list[Load]]:
            content = self._cache.contents.get(name)
            loads = self._host.give_up(name)
            found = self._cache.forget(name) or bool(loads)
            if content is not None:
                self._slots.release(content)
                _log.info("removed %r", name)
            return found, loads

        with self._coordinator.turn(f"remove_adapter({name!r})"):
            found, loads = self._host.commit(decide, remove, patience, same=lambda version: [version])
        for load in loads:
            load.tell()
        return found

    def remove_oldest_adapter(self) -> bool:
        """Remove the least recently used adapter that is neither pinned nor leased. False if there is none."""

        def evict(name: str | None) -> bool:
            if name is not None:
                self._host.evict(name)
            return name is not None

        with self._coordinator.turn("remove_oldest_adapter()"):
            return self._coordinator.commit(self._host.oldest, evict, lambda name: [name])

    def remove_all_adapters(self, *, timeout: float | None = None) -> None:
        """Remove every adapter, pinned ones too, and forget those that were evicted. Loads under way are given up, as
        in `remove_adapter`.

        Raises:
          AdapterInUseError: open batches held one for too long; then nothing is removed.
        """
        patience = self._patience(timeout)

        def decide() -> list[PackedAdapter]:
            contents = [self._cache.contents[name] for name in self._cache.contents]
            for content in contents:
                self._host.check_free(content, "removing", patience)
            return contents

        def remove(contents: list[PackedAdapter]) -> list[Load]:
            loads = self._host.give_up()
            for name in [*self._cache.known, *self._cache.contents]:
                self._cache.forget(name)
            for content in contents:
                self._slots.release(content)
            return loads

        with self._coordinator.turn("remove_all_adapters()"):
            loads = self._host.commit(decide, remove, patience, same=lambda contents: [c.version for c in contents])
        for load in loads:
            load.tell()

    def list_adapters(
        self, names: Collection[str] | None = None, *, level: Level | None = None
    ) -> dict[str, AdapterInfo]:
        """Return a record of each adapter that was added: name -> `AdapterInfo`.

        Evicted adapters come first, then those of the host cache, least recently used first.

        Args:
          names: return only these; unknown names are left out. Few names cost little, however many adapters there are.
          level: return only adapters at this level. With "slot" the cost depends on the slots alone.

        Raises:
          LoRAUsageError: `names` is a single string, or there is no such level.
        """
        if level not in (None, "slot", "host", "evicted"):
            raise LoRAUsageError(f'level must be "slot", "host", "evicted" or None, got {level!r}')
        if isinstance(names, str):
            raise LoRAUsageError(f"list_adapters takes names in a list, got {names!r}; write [{names!r}]")
        with self._state_lock:
            return records(names, level, self._cache, self._pool, self._leases)

    def export_adapter(self, name: str) -> Adapter:
        """Read an adapter back from its slot, after training the slot arrays there.

        Export before the next `prepare`: that may write the slots again from the host cache.

        Returns:
          An `Adapter` with the loaded one's module names, ranks and alphas, and the slot's values in slot dtype.

        Raises:
          AdapterNotFoundError: the name was not added.
          LoRAError: it is in no slot.
          LoRAUsageError: the model lies on devices of several processes.
        """
        self._coordinator.refuse(
            f"export_adapter({name!r})",
            "a part of each slot is in each; train on the devices of one, or read the slot arrays "
            "(jax.experimental.multihost_utils)",
        )
        with self._step_lock, self._state_lock:
            content = self._host.newest(name)
            slot = self._pool.slot_of(content)
            if slot is None:
                raise LoRAError(f"adapter {name!r} is in no slot; activate_adapter it before training")
            return export(content, slot, self._wrapped.modules)

    # --- a restart ----------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str], *, without: Collection[str] = ()) -> None:
        """Save what a restart needs to go on: `restore`, of a new manager, takes it.

        One file has the names, requests (of evicted adapters too), pins, what is in slots, orders of use, versions and
        fingerprints. The weights of an adapter that was added from memory, or changed by `update_adapter`, are saved
        beside it; those of any other stay where its request loads them. What was saved there before is replaced in one
        step: a process that is killed leaves the old state or the new one. On return all of it is on the disk.

        The state is that of one moment during the call. Steps, loads and evictions of other threads go on while it is
        written. Of several saves to one folder at a time, also from other processes, each waits for the one before.

        Args:
          path: a folder, made if need be.
          without: names to save as if they had been removed.

        Raises:
          LoRAUsageError: the model lies on devices of several processes.
          LoRAError: it could not be written; what was saved before is as it was.
        """
        self._check_call("save")
        save(self._saved_at("save", path), self._slots, self._cache, self._state_lock, self._base(), without)

    def restore(self, path: str | os.PathLike[str]) -> frozenset[str]:
        """Go on as another manager was saved: all of it, or nothing where this raises.

        Adapters of the host cache are loaded from their requests again, and are in slots, pinned and in order of use as
        they were. An adapter whose files hold other bytes than they did is a new version. One that cannot be loaded is
        evicted: the error is raised when it is used, and it is pinned again once it loads. The next version of a name
        is larger than any before, saved or not. Sizes and the mesh may be others: if the host cache or the slots are
        smaller, pinned adapters get the room first, then those used last; the others are loaded when they are used.

        Args:
          path: the path that was given to `save`.

        Returns:
          Every name that the saved manager knew, removed ones too.

        Raises:
          AdapterNotFoundError: nothing is saved there.
          AdapterFormatError: it was damaged; the message names the file.
          AdapterMismatchError: it was saved beside another base model, or with another `name_map` or `skip`; or an
            adapter from memory was packed for other layers, slot dtypes or a larger rank.
          NoFreeSlotError: no room for a pinned adapter, or for one from memory.
          LoRAUsageError: this manager has had adapters; the model lies on devices of several processes.
        """
        self._check_call("restore")
        folder, locks = self._saved_at("restore", path), (self._step_lock, self._state_lock)
        self._wrapped.check()
        return restore(folder, self._host, self._slots, self._cache, locks, self._base())

    def _saved_at(self, what: str, path: str | os.PathLike[str]) -> Path:
        self._coordinator.refuse(what, "such a model is neither saved nor restored")
        if not isinstance(path, str | os.PathLike) or not os.fspath(path):
            raise LoRAUsageError(f"{what} takes the path of a folder, got {path!r}")
        return Path(path).expanduser()

    def _base(self) -> str:
        if self._base_digest is None:
            self._base_digest = base_digest(self.model, self._index.said)
        return self._base_digest

    # --- slots --------------------------------------------------------------------------------------------------

    def activate_adapter(self, name: str) -> bool:
        """Write an adapter into a slot. True if it was written, False if it was in one (then it is touched).

        Raises:
          AdapterNotFoundError: the name was not added.
          NoFreeSlotError: every slot is pinned or held by an open batch.
        """
        self._check_call("activate_adapter", waits=True)
        with self._coordinator.turn(f"activate_adapter({name!r})"):
            return self._batches.activate(name, pin=False)

    def deactivate_adapter(self, name: str, *, timeout: float | None = None) -> bool:
        """Take an adapter out of its slot (it stays on the host, unpinned). False if it is in none.

        Raises:
          AdapterInUseError: open batches held it for too long; see `remove_adapter`.
        """
        patience = self._patience(timeout)

        def decide() -> int | None:
            content = self._cache.contents.get(name)
            if content is None or content not in self._pool.table:
                return None
            self._host.check_free(content, "deactivating", patience, handled=True)
            return content.version

        def release(version: int | None) -> bool:
            if version is not None:
                self._cache.contents.unpin(name)
                self._slots.release(self._cache.contents[name])
            return version is not None

        with self._coordinator.turn(f"deactivate_adapter({name!r})"):
            return self._host.commit(decide, release, patience, same=lambda version: [version])

    def pin_adapter(self, name: str) -> bool:
        """Keep an adapter in a slot and on the host, written into one first if need be. Always True.

        Raises:
          AdapterNotFoundError, NoFreeSlotError: as `activate_adapter`.
        """
        self._check_call("pin_adapter", waits=True)
        with self._coordinator.turn(f"pin_adapter({name!r})"):
            self._batches.activate(name, pin=True)
        return True

    def unpin_adapter(self, name: str) -> bool:
        """Let an adapter be evicted again. False if it was not pinned.

        Raises:
          AdapterNotFoundError: the name was not added.
        """
        with self._coordinator.turn(f"unpin_adapter({name!r})"), self._state_lock:
            if name in self._cache.pin_when_loaded:  # restored, and not loaded since
                self._cache.pin_when_loaded.discard(name)
                return True
            self._host.newest(name)
            return self._cache.contents.unpin(name)

    @property
    def slots(self) -> nnx.State[Any, Any]:
        """The current slot arrays, the same pytree as `nnx.state(model, jlora.SlotParam)`.

        The next write of a slot donates them: read this property anew for each step.

        Raises:
          LoRAError: the model was given back (`unwrap`).
        """
        with self._state_lock:
            arrays = self._pool.arrays()
            if self._state is None or not all(map(operator.is_, arrays, self._state[0])):
                self._state = (arrays, self._state_of(arrays))
            return self._state[1]

    def _state_of(self, arrays: list[jax.Array]) -> nnx.State[Any, Any]:
        """The slot arrays as a state. To walk the model for it takes milliseconds, so that is done once."""
        self._wrapped.check()
        if self._shape is None:
            state = cast("nnx.State[Any, Any]", nnx.state(self.model, SlotParam))
            places = {id(array): i for i, array in enumerate(arrays)}
            self._shape = (jax.tree.structure(state), [places[id(leaf)] for leaf in jax.tree.leaves(state)])
        return jax.tree.unflatten(self._shape[0], [arrays[i] for i in self._shape[1]])

    # --- batches ------------------------------------------------------------------------------------------------

    @overload
    def prepare(
        self,
        names: Sequence[Name | None],
        token_counts: Sequence[int] | None = None,
        pad_to: int | None = None,
        *,
        length: int | None = None,
        wait: Literal[True] = True,
        timeout: float | None = None,
    ) -> LoRABatch: ...

    @overload
    def prepare(
        self,
        names: Sequence[Name | None],
        token_counts: Sequence[int] | None = None,
        pad_to: int | None = None,
        *,
        length: int | None = None,
        wait: Literal[False],
        timeout: float | None = None,
    ) -> tuple[LoRABatch, tuple[bool, ...]]: ...

    def prepare(
        self,
        names: Sequence[Name | None],
        token_counts: Sequence[int] | None = None,
        pad_to: int | None = None,
        *,
        length: int | None = None,
        wait: bool = True,
        timeout: float | None = None,
    ) -> LoRABatch | tuple[LoRABatch, tuple[bool, ...]]:
        """Bring the adapters of one batch into slots and hold them there until the batch closes.

        Args:
          names: the adapter of each sequence, as a name (its newest version), a `LoRARequest` (loaded if it is not)
            or a handle from `hold`; None takes the base model.
          token_counts: for packed rows [tokens, features]: how many rows each sequence has, in order.
          pad_to: number of packed rows, at least their sum (the default); the rows behind take no adapter.
          length: for layers that see rows [batch * length, features] before any [batch, length, features].
          wait: whether to wait for adapters that are being loaded. If not, those that are not ready yet are absent, and
            `jlora.use` raises until the caller drops their rows (`LoRABatch.drop_absent`).
          timeout: seconds to wait for loads, and for slots that open batches hold, in order of arrival. None: as long
            as loads take, and not at all for slots.

        Returns:
          A `LoRABatch`. Use it in `with`, or close() it. With wait=False, the batch and whether each sequence is ready.

        Raises:
          AdapterNotFoundError: a name was not added.
          NoFreeSlotError: more different adapters than slots can be freed (in time). Nothing changes then.
          LoadTimeoutError: a load took longer than `timeout`.
          LoRAUsageError: the arguments disagree, or it is called inside a traced function.
          AdapterNotFoundError, AdapterFormatError, AdapterMismatchError: an adapter could not be loaded.
        """
        self._check_call("prepare", waits=True)
        args = read_arguments(names, token_counts, pad_to, length)
        if not wait:
            self._coordinator.refuse("prepare(..., wait=False)", "wait for loads, in all processes")
        deadline = self._patience(timeout).deadline
        with self._coordinator.turn("prepare"):
            batch, ready = self._batches.prepare(args, wait, deadline)
        return batch if wait else (batch, ready)

    def hold(self, name: str) -> AdapterHandle:
        """A handle on the newest version of an adapter, for sequences that must go on with what they began with.

        `prepare` takes it in the place of the name. While it is open, that version stays on the host, through
        `load_inplace`, `update_adapter` and `remove_adapter` of the name.

        Raises:
          AdapterNotFoundError: the name was not added.
        """
        self._check_call("hold", waits=True)
        self._wrapped.check()
        with self._coordinator.turn(f"hold({name!r})"):
            while True:
                self._host.recall(name)
                with self._state_lock:
                    if name in self._cache.contents:  # not evicted since
                        handle = AdapterHandle(self._cache.contents[name], self._changed.ring)
                        self._leases.add_handle(handle)
                        return handle

    def leases(self) -> tuple[LeaseInfo, ...]:
        """The open leases, with their adapters, ages and threads, and where they were opened if that is recorded."""
        return self._leases.infos()

    def run(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`step(*args, **kwargs)`, taking turns with writes of slots in other threads.

        For programs that step in one thread while another prepares batches. Once it is used, use it for every step that
        may run beside a `prepare` in another thread. Read `manager.slots` inside, where no write can come in between:
        `manager.run(lambda: step(manager.slots, rest, tokens, batch))`.
        """
        with self._step_lock:
            self._slots.takes_turns = True
            return step(*args, **kwargs)

    # --- life ---------------------------------------------------------------------------------------------------

    def warmup(
        self,
        step: Callable[[LoRABatch], Any] | None = None,
        *,
        num_sequences: int = 1,
        token_counts: Sequence[int] | None = None,
        pad_to: int | None = None,
        length: int | None = None,
    ) -> None:
        """Compile the slot write, and `step(batch)` for one batch shape, before traffic.

        `step` runs twice: with a zero adapter in a free slot (no adapter where none is free), and with a batch whose
        `has_adapters` is False, for steps that have a base-only variant. No adapter that is loaded changes, and no lock
        is held while the step compiles. Call it once for each batch shape that you will serve.

        Args:
          step: runs your jitted function: `lambda batch: forward(model, tokens, batch)`.
          num_sequences: B of the batch.
          token_counts, pad_to, length: as in `prepare`.
        """
        self._check_call("warmup")
        shape = batch_shape(num_sequences, token_counts, pad_to, length)
        base_only = partial(self.prepare, [None] * num_sequences, token_counts, pad_to, length=length)
        locks = (self._step_lock, self._state_lock)
        warm_up(step, shape, base_only, self._wrapped, self._slots, self._leases, locks)

    def layers(self) -> tuple[LayerInfo, ...]:
        """Every layer: its path and sizes, and whether it is wrapped or why not."""
        return self._wrapped.layers()

    @property
    def unserved(self) -> Mapping[str, str]:
        """Path -> why that layer serves no adapter; adapters that bring weights for it are refused.

        It starts with the layers that are not wrapped, guessed ones, tables of positions, and logits of an embedding
        that is not known to be the head. Only `verify` changes it; each step is traced once more then.
        """
        return self._wrapped.unserved.reasons

    def verify(self, forward: Forward, inputs: Any, **options: Any) -> VerifyReport:
        """Check once that this model serves what merged weights compute, row by row.

        What no shape can tell is found here: sequences on another axis, rows that sequences share, a layer that scales
        its input, a wrong spec. Slots and adapters are not touched. `unserved` becomes what this has found, in place of
        what earlier calls found: layers that `forward` does not call, or calls with rows that are not the batch's,
        serve no adapter afterwards, and guessed ones that were right do.

        Args:
          forward: `forward(model, inputs, batch)`, your own steps; they open `jlora.use(batch)`, once or in each step.
          inputs: what it takes: several sequences of different content.
          **options: `num_sequences`, `token_counts`, `pad_to`, `length`, `batch_axis`, `seed`; see
            `jlora.verify.verify.verify`.

        Raises:
          LoRAError: some row differs from merged weights; the message names the first layer that is off.
          LoRAUsageError: `forward` returns no rows of the batch.
        """
        self._check_call("verify")
        self._wrapped.check()
        report, reasons = verify(self._wrapped, forward, inputs, **options)
        with self._state_lock:
            self._wrapped.set_unserved(reasons)
        return report

    def stats(self) -> Stats:
        """Counts so far and what is held now."""
        with self._state_lock:
            names = ("host_loads", "host_evictions", "slot_loads", "slot_evictions", "slot_hits")
            return Stats(
                **{name: self._counts[name] for name in names},
                compilations=self._pool.compilations,
                registered=len(self._cache.contents),
                active=self._slots.active,
                leased=len({adapter.name for adapter in self._leases.leased()}),
                slot_bytes=self._pool.slot_nbytes[0],
                host_bytes=self._cache.nbytes,
                open_leases=sum(1 for _ in self._leases.open()),
                load_seconds=self._host.load_seconds.read(),
                swap_seconds=self._slots.seconds.read(),
            )

    def _check_call(self, what: str, *, waits: bool = False) -> None:
        """Raises LoRAUsageError inside a traced function, and inside `resolve` for a call that may wait for a load."""
        if waits and (load := self._host.loader.own) is not None:
            raise LoRAUsageError(
                f"LoRAManager.{what} was called inside resolve=, by the load of {load.request.name!r}: it could wait "
                "for that load, which waits for resolve. Return the folder there; load other adapters outside of it, "
                "or with prefetch"
            )
        if not trace_state_clean() and staged():
            raise LoRAUsageError(
                f"LoRAManager.{what} was called inside jax.jit: it would run once, while the function is traced, and "
                "its arrays would go stale. Call it outside and pass the batch as an argument"
            )

    def _patience(self, timeout: float | None) -> Patience:
        if timeout is None:
            return Patience(None, threading.get_ident())
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout >= 0:
            raise LoRAUsageError(f"timeout must be None or seconds, got {timeout!r}")
        self._coordinator.refuse("timeout=", "no call waits for open batches; close them first, and leave timeout out")
        return Patience(time.monotonic() + timeout)

    def unwrap(self) -> nnx.Module:
        """Give the model back as it was before it was wrapped. The manager is of no use afterwards.

        Raises:
          AdapterInUseError: a batch is open.
        """
        with self._step_lock, self._state_lock:
            for lease in self._leases.open():
                names = ", ".join(repr(adapter.name) for adapter in lease.adapters) or "the base model alone"
                if lease.adapters:
                    raise AdapterInUseError(f"a batch with {names} is open; close it before the model is unwrapped")
            for name in self._cache.contents:
                self._cache.contents.remove(name)
            self._cache.known.clear()
            self._batches.clear()
            self._state = None
            self._wrapped.unwrap()
            return self.model
