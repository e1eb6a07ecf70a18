"""`LoRAManager`: manage adapters in host memory and in device slots, and the batches that use them."""

import logging
import operator
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast, overload

import jax
from flax import nnx

from jlora._compat import trace_state_clean
from jlora._memory import machine_bytes, staging_bytes
from jlora._threads import elapsed
from jlora.adapters import Adapter
from jlora.config import LoRAConfig, LoRARequest
from jlora.errors import AdapterInUseError, LoRAError, LoRAUsageError
from jlora.fit.fresh import fresh_adapter
from jlora.fit.names import SiteIndex, name_rules
from jlora.layers.forward.batch import LoRABatch
from jlora.layers.forward.batch_shape import BatchShape, FirstRows
from jlora.layers.forward.context import tracing
from jlora.layers.forward.row_groups import Items
from jlora.layers.site import SlotParam
from jlora.layers.wrap.apply import wrap_model
from jlora.layers.wrap.select import PackedModules
from jlora.layers.wrap.wrapped import LayerInfo, WrappedModel
from jlora.manager.batch_arguments import BatchArguments, Given, checked_names, given
from jlora.manager.leases import AdapterHandle, LeaseInfo
from jlora.manager.loaded_adapter import LoadedAdapter
from jlora.manager.loading import add, begin_training, load, prefetch, read_again, recall
from jlora.manager.loads import Deadline, notify
from jlora.manager.locks import StateLock
from jlora.manager.multihost import peers_of
from jlora.manager.prepare import fits, pin, prepare
from jlora.manager.report import AdapterInfo, Level, Stats, records
from jlora.manager.snapshot import base_digest, restore, save
from jlora.manager.state import State
from jlora.manager.step import FlatModel, Step
from jlora.manager.update import update
from jlora.manager.warmup import warm_up
from jlora.slots.export import export, export_blocks
from jlora.slots.packed import PackedAdapter
from jlora.slots.values import refused_sites
from jlora.training.optimizer import Optimizer, adam
from jlora.training.report import Loss
from jlora.training.trainer import TrainedModel, Trainer
from jlora.verify.repeats import describe, find_repeats
from jlora.verify.verify import Forward, VerifyReport, verify

_log = logging.getLogger("jlora")


class LoRAManager:
    """Serve many adapters on one model.

    The eligible layers of `model` are wrapped in place. Adapters are kept in a host cache (`max_cpu_loras`) and are
    written into device slots (`max_loras`) when a batch needs them. Both levels evict the least recently used adapter
    that is neither pinned nor held by an open batch. An evicted adapter is loaded again from its request when it is
    needed, a repository of the hub at the commit of its load. If its files have changed, it is a new version, with a
    warning. An adapter from memory, or changed by `update_adapter`, has no request. It may leave its slot, and stays in
    the host cache until it is removed or replaced, or `set_request` gives it one.

    Threads: every method may be called from any thread. Loads run on their own threads and never access the slot
    arrays. Slots are written only inside `prepare`, `pin_adapter`, `update_adapter` and `warmup`.
    If one thread runs steps while another may write slots, compile the steps with `jit`, which excludes writes while a
    step is dispatched. If no step of `jit` has run, a thread may also call a function of `jax.jit`, such as `generate`,
    while it has a batch open. A write in another thread then copies the slot arrays instead of updating them in place.

    Interrupts: the manager stays consistent after Ctrl-C. With Python's default SIGINT handler, KeyboardInterrupt is
    raised in the main thread before or after a change of the manager's state, never during one. The next `prepare`
    rewrites slots that a device error left half written, slot arrays that a step donated, and slot arrays that were
    replaced by other code (such as `nnx.update` with an older state). The host cache determines the contents of the
    slots.

    Copies: the manager writes only the slots of `model`. A copy of the model made before an adapter was written
    (`nnx.clone(arrays=True)`, or a state that was split and kept) raises for batches with that adapter, or computes
    NaN inside a compiled function. The check runs in the first wrapped layer, so a function that does not call that
    layer is not protected.

    Meshes: if the model's parameters are on several devices, the slots of each layer are split like its kernel
    (docs/mesh.md), and batches are placed on the same mesh. If the mesh spans several processes, each process has a
    manager, and all processes must make the same calls in the same order. If a call fails in one process, the
    state is unchanged in all of them, and all raise the same error. In this mode no call waits for open batches, and
    `timeout=` and `prefetch` raise.

    Args:
      model: any `nnx.Module`. To serve on a mesh, shard it before the manager is created.
      config: sizes, dtype and targets.
      packed_modules: packed module, named by the end of its path, -> checkpoint names of its parts, such as
        {"qkv_proj": ("q_proj", "k_proj", "v_proj")}, or with the sizes of the output slices that each name covers,
        {"in_proj": {"qkv": (64, 64, 128), "z": 128}}. The parts of a tuple take their sizes from the layer's
        `output_sizes`, or are of equal size without it. None reads `model.packed_modules`.
      name_map: regex -> replacement, from checkpoint module names to the dotted paths of the model, for models whose
        paths differ. The first pattern found in a name is substituted.
      row_groups: name of a module -> name of the group of items that its rows belong to, such as {"visual": "images"},
        for a vision tower or its connector (docs/vision.md). Modules are named as in `LoRAConfig.exclude_modules`, and
        the longest matching name wins; "*" matches all. `prepare(..., items=)` maps the items of a group to sequences.
        "sequences" declares rows [batch, ..., features] that are the batch's own, but of another length than those of
        other layers (an encoder beside a decoder). In batches with `token_counts`, "last" declares one row of each
        sequence (a head on the last tokens) and "packed" all packed rows. Once one of these two is used, layers that
        are not named are "packed". Without them, a batch with as many packed rows as sequences may raise.
      skip: regular expressions searched in checkpoint module names, for modules that this process does not have (MTP
        heads, other pipeline stages, a vision tower). Adapter weights for these modules are ignored and listed by
        `layers()`.
      resolve: request -> local folder, for stores other than a folder or the Hugging Face hub. It is called on the
        loading thread. Calls of this manager that wait for loads raise LoRAUsageError there.

    Raises:
      LoRAError: no layer can be wrapped, a target matches no layer, the model is already wrapped, a kernel has an
        unsupported sharding, or `name_map` or `row_groups` is invalid. The model is left unchanged.
    """

    def __repr__(self) -> str:
        if "_state" not in vars(self):
            return "LoRAManager(not initialized)"
        stats, config = self.stats(), self.config
        return (
            f"LoRAManager({type(self.model).__name__}, {len(self._state.wrapped.modules)} layers, {stats.active} of "
            f"{config.max_loras} slots in use, {stats.registered} of {config.max_cpu_loras} adapters on the host)"
        )

    def __init__(
        self,
        model: nnx.Module,
        config: LoRAConfig,
        *,
        packed_modules: PackedModules | None = None,
        name_map: Mapping[str, str] | None = None,
        row_groups: Mapping[str, str] | None = None,
        skip: Sequence[str] = (),
        resolve: Callable[[LoRARequest], str] | None = None,
    ):
        self.model = model
        self.config = config
        peers = peers_of(model, config.process_timeout, StateLock())
        wrapped = None
        try:
            with peers.turn("LoRAManager"):
                rules = name_rules(name_map)  # first, so that an invalid name_map leaves the model unchanged
                wrapped = wrap_model(model, config, packed_modules, skip, row_groups=row_groups)
                own = (config.max_cpu_bytes or machine_bytes() // 2, staging_bytes())
                limits = peers.agree(partial(_compared, wrapped, config), own)
            smallest = [min(limit) for limit in zip(*limits, strict=True)]
            self._state = State(config, wrapped, SiteIndex(wrapped, rules), resolve, peers, smallest)
            if repeats := find_repeats(wrapped):
                _log.warning("%s", describe(repeats))
        except BaseException:
            if wrapped is not None:
                wrapped.unwrap()  # the caller has no manager to do it
            raise
        self._flat = FlatModel(model)
        self._slots: tuple[list[jax.Array], nnx.State[Any, Any]] | None = None
        self._shape: tuple[Any, list[Any]] | None = (
            None  # tree structure, and the number of each array, or the index of a stack
        )
        self._base_digest: str | None = None

    # --- adapters -----------------------------------------------------------------------------------------------

    def add_adapter(
        self, adapter: LoRARequest | Adapter, *, load_inplace: bool = False, timeout: float | None = None
    ) -> bool:
        """Load an adapter into the host cache.

        With `load_inplace` (here or in the request), an existing adapter of the same name is replaced by the current
        contents of its files, always as a new version. The call first waits for open batches with the old version.
        If a handle holds the old version, the call does not wait, and both versions are served.

        Args:
          adapter: a request for a folder or repository, or an adapter in memory. The manager keeps no reference to the
            latter; while it lives, `trainer` begins with its arrays, not with those rounded for the slots.
          load_inplace: replace an adapter of the same name.
          timeout: seconds to wait for the load and for open batches. None waits without limit, but raises at once if
            the calling thread has a batch with the old version open.

        Returns:
          True if the adapter was loaded. False if the name was in the host cache. The call then marks a use.

        Raises:
          AdapterNotFoundError, AdapterFormatError, AdapterMismatchError: see `jlora.errors`. The cache is unchanged.
            The first is also raised if another thread removes the name during the load.
          AdapterInUseError: open batches held the adapter to replace for too long.
          LoadTimeoutError: the load took too long. It runs on, and a repeated call waits for it again. With
            `load_inplace` it is abandoned, since a repeated call must read the files anew.
          NoFreeSlotError: the host cache (`max_cpu_loras`, `max_cpu_bytes`) is full of adapters that cannot be evicted:
            pinned, held by an open batch, from memory or changed by `update_adapter`.
        """
        self._check_call("add_adapter", waits=True)
        deadline = self._deadline(timeout)
        if not isinstance(adapter, LoRARequest | Adapter):
            raise LoRAUsageError(f"add_adapter takes a LoRARequest or an Adapter, got {type(adapter).__name__}")
        if not isinstance(adapter.name, str) or not adapter.name:
            raise LoRAUsageError(f"an adapter's name must be a non-empty string, got {adapter.name!r}")
        state, replaces = self._state, load_inplace or getattr(adapter, "load_inplace", False)
        with state.peers.turn(f"add_adapter({adapter.name!r})"):
            if not replaces and state.touch(adapter.name):
                return False
            if isinstance(adapter, LoRARequest):
                return load(state, replace(adapter, load_inplace=replaces), deadline)
            return add(state, adapter, replaces, deadline)

    def new_adapter(
        self,
        name: str,
        *,
        rank: int,
        alpha: float,
        target_modules: Collection[str] | None = None,
        seed: int = 0,
    ) -> Adapter:
        """Add an adapter to train, which has no effect yet.

        Its values are drawn as PEFT draws them: A of a linear layer is uniform in +-1 / sqrt(K), and B is zero. A of an
        embedding is zero, and B is normal. `trainer` begins with them in float32, whatever the dtype of the slots.

        Args:
          name: name of the adapter.
          rank: rank of all its modules, up to `max_lora_rank`.
          alpha: PEFT's `lora_alpha`. Deltas are multiplied by alpha / rank.
          target_modules: names of modules, or their last parts, such as ["q_proj", "embed_tokens"]. None: every layer
            that serves adapters, without embeddings. Modules are named as in the model, and for a model with a
            `name_map` by their complete names in the checkpoint.
          seed: seed of the values. Those of a module depend on the seed and its name alone.

        Returns:
          The adapter, in float32.

        Raises:
          LoRAUsageError: the name exists, an argument is of the wrong type or value, or a target matches no layer.
          AdapterMismatchError: the rank is too large, or a layer serves no adapter.
          NoFreeSlotError: as in `add_adapter`.
        """
        self._check_call("new_adapter")
        state, deadline = self._state, self._deadline(None)
        state.wrapped.check()
        draw = partial(
            fresh_adapter,
            name,
            state.wrapped,
            state.index,
            rank=rank,
            alpha=alpha,
            target_modules=target_modules,
            seed=seed,
        )
        adapter = draw()
        with state.peers.turn(f"new_adapter({name!r})"):
            with state.lock:
                known = name in state.cache.known
            if known or not add(state, adapter, False, deadline, draw):
                raise LoRAUsageError(f"new_adapter: adapter {name!r} exists; expected a new name, or remove it first")
        return adapter

    def prefetch(self, request: LoRARequest | str) -> "Future[bool]":
        """Load an adapter in the background and move it to the device, so that the next `prepare` only writes it.

        Steps and calls of `prepare` for other adapters do not wait for this load. Cancelling the future abandons it.

        Args:
          request: a request, or the name of an adapter that was added before and may have been evicted.

        Returns:
          A future with the result or the exception of `add_adapter(request)`. The exception is AdapterNotFoundError if
          the name is removed before it is loaded, and AdapterUnavailableError as in `prepare`.

        Raises:
          AdapterNotFoundError: no adapter of that name was added.
          LoRAUsageError: the model is on devices of several processes.
        """
        self._check_call("prefetch")
        state = self._state
        state.peers.refuse("prefetch", "load adapters with add_adapter or prepare, in all processes at once")
        if isinstance(request, str):
            with state.lock:
                name, known = request, state.cache.known.get(request)
                request = known or state.newest(name).request or LoRARequest(name, name)  # placeholder: not read
        if not isinstance(request, LoRARequest):
            raise LoRAUsageError(f"prefetch takes a LoRARequest, got {type(request).__name__}")
        return prefetch(state, request)

    def set_request(self, adapter: Adapter, request: LoRARequest) -> None:
        """Let an adapter from memory be evicted from the host cache, and loaded again from a request.

        With it an adapter is served while its files are written. They are not read here, and must hold the same weights
        and be complete. When they are loaded, they are a new version.

        Args:
          adapter: the adapter that was given to `add_adapter`.
          request: a request of the same name, for the folder that `adapter` was saved to.

        Raises:
          AdapterNotFoundError: the name was not added, or was removed.
          LoRAUsageError: the request has another name, or the newest version of the name is not `adapter` as it was
            added: it has a request, or was replaced or changed by `update_adapter`. Nothing is changed.
        """
        self._check_call("set_request")
        if not isinstance(adapter, Adapter) or not isinstance(request, LoRARequest) or request.name != adapter.name:
            raise LoRAUsageError(
                f"set_request takes an Adapter and a LoRARequest of its name, got {adapter!r:.200} and {request!r:.200}"
            )
        state = self._state
        with state.peers.turn(f"set_request({adapter.name!r})"), state.lock:
            newest = state.newest(adapter.name)
            if newest.given != weakref.ref(adapter) or newest.request is not None:
                raise LoRAUsageError(
                    f"set_request: version {newest.version} of adapter {adapter.name!r} is not the given adapter, or "
                    "has a request already: it was loaded from one, drawn, replaced or updated"
                )
            state.peers.agree([newest.version])
            with state.peers.change():
                state.cache.set_request(newest, replace(request, load_inplace=False))
        state.changed.ring()

    def update_adapter(self, name: str, arrays: Mapping[str, Any], *, timeout: float | None = None) -> int:
        """Replace weights of an adapter with new arrays, as a new version.

        If the adapter is in a slot, the new weights are written into the same slot. Either all arrays are applied or
        none. Device arrays are cast and written on the device, and copied to the host cache in the background. The
        adapter keeps its slot until that copy is done. The call waits for open batches with the old weights, unless a
        handle holds the old version. The updated adapter has no request, so it is never evicted from the host cache:
        remove or replace it when it is no longer needed.

        Args:
          name: name of the adapter.
          arrays: tensor name -> A [r, K] or B [N, r], floating point; for an embedding [r, V] and [D, r]. The names are
            those of PEFT's files, with or without the prefix "base_model.model.": MODULE.lora_A.weight and
            MODULE.lora_B.weight, for an embedding MODULE.lora_embedding_A and MODULE.lora_embedding_B, where MODULE is
            the adapter's name of a module, such as "model.layers.0.self_attn.q_proj". The layers multiply by the
            scaling of the adapter. Tensors left out keep their weights. If both A and B of a module are given, its rank
            may change, up to `max_lora_rank`; its scaling then follows its alpha.
          timeout: seconds to wait. None waits without limit, but raises at once if the calling thread has such a batch
            open.

        Returns:
          The new version number.

        Raises:
          AdapterNotFoundError: the name was not added.
          AdapterMismatchError: the adapter has no such tensor, or a shape or rank does not fit.
          AdapterFormatError: an array is not a floating-point matrix, or has NaN or infinity.
          AdapterInUseError: open batches held the adapter for too long, or it was replaced, removed or evicted by
            another thread during the call.
          NoFreeSlotError: the new weights are larger, and the host cache has no room for them.
        """
        return self._update(name, arrays, timeout)

    def _update(
        self,
        name: str,
        arrays: Mapping[str, Any],
        timeout: float | None = None,
        check: Callable[[PackedAdapter], None] | None = None,
    ) -> int:
        self._check_call("update_adapter", waits=True)
        self._state.wrapped.check()
        deadline = self._deadline(timeout)
        with self._state.peers.turn(f"update_adapter({name!r})"):
            return update(self._state, name, arrays, deadline, check)

    def remove_adapter(self, name: str, *, timeout: float | None = None) -> bool:
        """Remove an adapter from its slot and from the host cache, pinned or not.

        The call waits for open batches with the adapter. Running loads of it are abandoned, and calls that wait for
        them raise AdapterNotFoundError.

        Args:
          name: name of the adapter.
          timeout: seconds to wait. None waits without limit, but raises at once if the calling thread has such a batch
            open.

        Returns:
          True if the name was on the host, evicted or being loaded; False if it is unknown.

        Raises:
          AdapterInUseError: open batches held the adapter for too long.
        """
        return self._remove(f"remove_adapter({name!r})", name, timeout)

    def remove_all_adapters(self, *, timeout: float | None = None) -> None:
        """Remove all adapters, including pinned and evicted ones.

        Running loads are abandoned, as in `remove_adapter`.

        Args:
          timeout: seconds to wait for open batches, as in `remove_adapter`.

        Raises:
          AdapterInUseError: open batches held an adapter for too long. No adapter is removed.
        """
        self._remove("remove_all_adapters()", None, timeout)

    def _remove(self, call: str, name: str | None, timeout: float | None) -> bool:
        """Remove a name, or all names if None. Return True if a name was known."""
        state, cache, deadline = self._state, self._state.cache, self._deadline(timeout)

        def ready() -> dict[str, int] | None:
            names = [n for n in (cache.loaded if name is None else [name]) if n in cache.loaded]
            free = all(state.is_free(cache.loaded[n], "removing", deadline) for n in names)
            return {n: cache.loaded[n].version for n in names} if free else None

        with state.peers.turn(call), state.lock:
            versions = state.wait(ready, deadline.at) or {}  # the lock is released meanwhile
            state.peers.agree([*versions.values()])
            with state.peers.change():
                loads = state.loads.remove(name)
                found = state.forget([*cache.known, *cache.loaded] if name is None else [name]) or bool(loads)
        for removed in versions:
            _log.info("removed %r", removed)
        notify(loads)
        return found

    def list_adapters(
        self, names: Collection[str] | None = None, *, level: Level | None = None
    ) -> dict[str, AdapterInfo]:
        """Return a record of each adapter that was added: name -> `AdapterInfo`.

        Evicted adapters come first, then the adapters of the host cache, least recently used first.

        Args:
          names: return only these; unknown names are left out. The cost then depends on the number of names, not on
            the number of adapters.
          level: return only adapters at this level. With "slot" the cost depends only on the number of slots.

        Raises:
          LoRAUsageError: `names` is a single string, or `level` is invalid.
        """
        if level not in (None, "slot", "host", "evicted"):
            raise LoRAUsageError(f'level must be "slot", "host", "evicted" or None, got {level!r}')
        if isinstance(names, str):
            raise LoRAUsageError(f"list_adapters takes names in a list, got {names!r}; write [{names!r}]")
        state = self._state
        with state.lock:
            return records(names, level, state.cache, state.slot_arrays, state.leases)

    def export_adapter(self, name: str) -> Adapter:
        """Read an adapter from its slot on the device. `Trainer.adapter` returns one that is being trained.

        If other code has changed the slot arrays, export before the next `prepare`, which may rewrite them from the
        host cache.

        Returns:
          An `Adapter` with the module names, ranks, alphas and scalings of the loaded adapter, and the values of the
          slot in the slot dtype. With slots of int8, which cannot be trained, it has the values of the adapter's files,
          or float32 values of the slot if it has none or they have changed.

        Raises:
          AdapterNotFoundError: the name was not added.
          LoRAError: the adapter is in no slot.
          LoRAUsageError: the model is on devices of several processes.
        """
        state = self._state
        state.peers.refuse(
            f"export_adapter({name!r})",
            "a part of each slot is in each; train on the devices of one, or read the slot arrays "
            "(jax.experimental.multihost_utils)",
        )
        with state.lock.writing:
            adapter = state.newest(name)
            slot = state.slot_arrays.slot_of(adapter)
            if slot is None:
                raise LoRAError(f"adapter {name!r} is in no slot; prepare a batch with it first")
            if all(site.spec.dtype != "int8" for site in adapter.packed.sites):
                return export(adapter.packed, slot, state.wrapped.modules)
        return read_again(state, adapter) or export_blocks(adapter.packed, state.slot_arrays.sites)

    # --- save and restore ---------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str], *, without: Collection[str] = ()) -> None:
        """Save the state of the manager to a folder, for `restore` in a new manager.

        One file holds the names, requests (also of evicted adapters), pins, slots, order of use, versions and
        fingerprints. Weights are saved only for adapters that were added from memory or changed by `update_adapter`;
        all others are loaded from their requests again. An earlier save in the same folder is replaced atomically, so
        a killed process leaves either the old state or the new one. The files are synced to disk on return.

        The saved state is consistent: it is taken at one moment during the call. Steps, loads and evictions in other
        threads continue while it is written. Concurrent saves to one folder, also from other processes, run one after
        the other.

        Args:
          path: a folder, created if it does not exist.
          without: names to save as if they had been removed.

        Raises:
          LoRAUsageError: the model is on devices of several processes.
          LoRAError: the state could not be written, or PEFT's files cannot hold an adapter from memory, for example one
            whose scaling is not that of its alpha and rank. The earlier save is unchanged.
        """
        self._check_call("save")
        save(self._state, self._saved_at("save", path), self._base(), without)

    def restore(self, path: str | os.PathLike[str]) -> frozenset[str]:
        """Restore the state that another manager saved.

        If this raises, the manager is unchanged. Adapters of the host cache are loaded from their requests again, with
        their slots, pins and order of use. An adapter whose files have changed becomes a new version. An adapter that
        cannot be loaded is restored as evicted: its error is raised when it is used, and its pin applies once it
        loads. The next version of a name is larger than every earlier one, including versions served after the save.
        Sizes and the mesh may differ from the saved manager. If the host cache or the slots are smaller, pinned
        adapters are restored first, then the most recently used; the others are loaded when they are used.

        Args:
          path: the folder that was passed to `save`.

        Returns:
          All names that the saved manager had, including removed ones.

        Raises:
          AdapterNotFoundError: the folder has no saved state.
          AdapterFormatError: a file is damaged. The message names the file.
          AdapterMismatchError: the state was saved with another base model, `name_map` or `skip`, or an adapter from
            memory was packed for other layers, other slot dtypes or a larger rank.
          NoFreeSlotError: there is no room for a pinned adapter or for an adapter from memory.
          LoRAUsageError: this manager has had adapters, or the model is on devices of several processes.
        """
        self._check_call("restore")
        folder = self._saved_at("restore", path)
        self._state.wrapped.check()
        return restore(self._state, folder, self._base())

    def _saved_at(self, what: str, path: str | os.PathLike[str]) -> Path:
        self._state.peers.refuse(what, "such a model is neither saved nor restored")
        if not isinstance(path, str | os.PathLike) or not os.fspath(path):
            raise LoRAUsageError(f"{what} takes the path of a folder, got {path!r}")
        return Path(path).expanduser()

    def _base(self) -> str:
        if self._base_digest is None:
            self._base_digest = base_digest(self.model, self._state.index.rules)
        return self._base_digest

    # --- slots --------------------------------------------------------------------------------------------------

    def pin_adapter(self, name: str) -> bool:
        """Pin an adapter, so that it is evicted neither from its slot nor from the host cache.

        It is loaded again if it was evicted, and written into a slot if it is in none.

        Returns:
          True if it was written into a slot. False if it was in one already. The call then marks a use.

        Raises:
          AdapterNotFoundError: the name was not added.
          AdapterUnavailableError: it was evicted and cannot be loaded again; its files are gone or damaged.
          NoFreeSlotError: every slot is pinned or held by an open batch.
        """
        self._check_call("pin_adapter", waits=True)
        with self._state.peers.turn(f"pin_adapter({name!r})"):
            return pin(self._state, name)

    def unpin_adapter(self, name: str) -> bool:
        """Unpin an adapter, so that it may be evicted again.

        Returns:
          True if it was pinned.

        Raises:
          AdapterNotFoundError: the name was not added.
        """
        state = self._state
        with state.peers.turn(f"unpin_adapter({name!r})"), state.lock:
            if not state.cache.pinned(name):
                state.newest(name)  # raises for an unknown name
            state.peers.agree([state.cache.pinned(name)])
            with state.peers.change():
                return state.cache.unpin(name)

    @property
    def slots(self) -> nnx.State[Any, Any]:
        """The current slot arrays, as the same pytree as `nnx.state(model, jlora.SlotParam)`.

        The next slot write donates these arrays, so read this property before each step.

        Raises:
          LoRAError: the model was unwrapped.
        """
        with self._state.lock:
            arrays = self._state.slot_arrays.arrays()
            if self._slots is None or not all(map(operator.is_, arrays, self._slots[0])):
                self._slots = (arrays, self._tree_of(arrays))
            return self._slots[1]

    def _tree_of(self, arrays: list[jax.Array]) -> nnx.State[Any, Any]:
        """Return the slot arrays as a state. Walking the model takes milliseconds, so its structure is cached."""
        self._state.wrapped.check()
        if self._shape is None:
            state = cast("nnx.State[Any, Any]", nnx.state(self.model, SlotParam))
            positions = {id(array): i for i, array in enumerate(arrays)}
            # No write changes the index of a stack's layers, which is no array of a slot.
            order = [positions.get(id(leaf), leaf) for leaf in jax.tree.leaves(state)]
            self._shape = (jax.tree.structure(state), order)
        leaves = [arrays[each] if isinstance(each, int) else each for each in self._shape[1]]
        return jax.tree.unflatten(self._shape[0], leaves)

    # --- batches ------------------------------------------------------------------------------------------------

    def prepare(
        self,
        names: Sequence[Given | None],
        token_counts: Sequence[int] | None = None,
        pad_to: int | None = None,
        *,
        length: int | None = None,
        active_from: FirstRows | None = None,
        items: Mapping[str, Items] | None = None,
        timeout: float | None = None,
    ) -> LoRABatch:
        """Write the adapters of one batch into slots and hold them there until the batch is closed.

        Args:
          names: the adapter of each sequence: a name (its newest version), a `LoRARequest` (loaded if necessary), a
            handle from `hold`, a `Mix` of these, or None for the base model.
          token_counts: number of rows of each sequence, in order, for packed rows [tokens, features].
          pad_to: total number of packed rows, at least the sum of `token_counts` (the default). Padding rows use no
            adapter.
          length: rows of each sequence in this forward, padding included. It is needed for `active_from` of rows that
            are not packed, and for models whose layers get rows [batch * length, features] before any [batch, length,
            features].
          active_from: with `LoRAConfig(activated=True)`, the first row of each sequence in this forward that takes its
            adapter: 0 for all rows, and `jlora.NOWHERE` for none. Rows [batch, length, ..., features] are those of the
            sequences, and [batch, features] or [batch, 1, features] the last of each. Other rows need a `RowMap`. None:
            all rows are active, which is refused for aLoRA adapters. Batches with and without it run two compiled
            steps.
          items: row group -> its `Items`, such as images. The groups are those of `LoRAManager(row_groups=)`. A group
            that is left out is not served, and its layers raise.
          timeout: seconds to wait for loads, and for slots that open batches hold, in order of arrival. None waits
            for loads without limit and does not wait for slots. With 0 the call starts the missing loads and does not
            wait, so that it can be repeated until they have finished.

        Returns:
          A `LoRABatch`, to be used as a context manager or closed with `close()`.

        Raises:
          AdapterNotFoundError: a name was not added.
          AdapterUnavailableError: an adapter was evicted and cannot be loaded again; its files are gone or damaged.
          NoFreeSlotError: the batch needs more slots than can be freed (in time), or more of the host cache
            (`max_cpu_loras`, `max_cpu_bytes`) than can be evicted. No adapter is loaded, and slots are unchanged.
          LoadTimeoutError: loads took longer than `timeout`. The message names their adapters. They run on, and a
            repeated call finds the loaded adapters, or raises the error of a load that failed. A load of a request with
            `load_inplace` is abandoned instead: replace the adapter with `prefetch` first.
          LoRAUsageError: the arguments disagree, `active_from` lacks `length`, a row group is not declared, an item
            belongs to no sequence of the batch or to one with an aLoRA adapter, or a traced function makes the call.
          AdapterNotFoundError, AdapterFormatError, AdapterMismatchError: a request could not be loaded.
        """
        self._check_call("prepare", waits=True)
        checked, sites = checked_names(names, self.config), self._state.wrapped.sites
        groups = dict[str, Items]() if items is None else items
        shape = BatchShape(len(checked), token_counts, pad_to, length, active_from, groups)
        shape.check(sites)
        args = BatchArguments(checked, shape)
        deadline = self._deadline(timeout).at
        with self._state.peers.turn("prepare"):
            return prepare(self._state, args, deadline)

    def fits(self, names: Sequence[Given | None]) -> bool:
        """Return True if `prepare(names)` would find a slot for each adapter beside the open batches.

        For the admission of sequences in continuous batching (docs/loop.md). No adapter is loaded, no slot is written
        and no use is marked.

        Args:
          names: the adapters, as in `prepare`, in any number. Repeated ones count once, and None needs no slot.

        Returns:
          False where `prepare` without `timeout` raises NoFreeSlotError, or waits until new weights of `update_adapter`
          are on the host. An adapter that must be loaded counts as one that any slot can hold: with `expert_slots`,
          `prepare` may still raise after its load.

        Raises:
          AdapterNotFoundError: a name was not added.
          AdapterMismatchError, LoRAUsageError: `prepare` refuses these adapters.
        """
        self._check_call("fits")
        checked = checked_names(names, self.config)
        with self._state.peers.turn("fits", alone=True):
            return fits(self._state, BatchArguments(checked, BatchShape(len(checked))))

    def hold(self, name: str) -> AdapterHandle:
        """Return a handle on the newest version of an adapter, to finish a sequence on the version it began with.

        Pass the handle to `prepare` instead of the name. While it is open, that version stays on the host, even after
        `load_inplace`, `update_adapter` or `remove_adapter` of the name.

        Raises:
          AdapterNotFoundError: the name was not added.
        """
        self._check_call("hold", waits=True)
        state = self._state
        state.wrapped.check()
        with state.peers.turn(f"hold({name!r})"), state.lock:
            return state.leases.hold(recall(state, name), state.changed.ring)

    def handles(self, batch: LoRABatch) -> tuple[Given | None, ...]:
        """Return handles on the versions of an open batch, to finish its sequences on them in later batches.

        They are separate for each sequence and outlive the batch. No file is read.

        Returns:
          One entry a sequence, for `prepare`: a handle, a `Mix` of handles if it has a factor or several adapters,
          or None for the base model.

        Raises:
          LoRAUsageError: the batch is closed, of another manager, or from a traced function.
        """
        self._check_call("handles")
        state = self._state
        with state.peers.turn("handles", alone=True), state.lock:
            lease = batch.lease
            if lease is None or lease not in state.leases.open():
                raise LoRAUsageError(f"handles takes an open batch of this manager, got {batch!r}")
            served = {(adapter.name, adapter.version): cast("LoadedAdapter", adapter) for adapter in lease.adapters}
            hold = partial(state.leases.hold, on_close=state.changed.ring)
            return tuple(
                given([(hold(served[name, version]), scale) for name, version, scale in terms or ()])
                for terms in lease.terms
            )

    def leases(self) -> tuple[LeaseInfo, ...]:
        """Return the open leases, oldest first, with their adapters, ages and threads.

        Those opened while the logger "jlora.leases" is enabled for DEBUG also have the stack of their `prepare`, which
        takes about 50 us a batch.
        """
        return self._state.leases.infos()

    @overload
    def jit(self, step: Callable[..., Any], **options: Any) -> Step: ...

    @overload
    def jit(self, step: None = None, **options: Any) -> Callable[[Callable[..., Any]], Step]: ...

    def jit(self, step: Callable[..., Any] | None = None, **options: Any) -> Any:
        """Compile a function of the model, as `jax.jit` does, for calls that cost the host less.

        Flattening an `nnx.Module` takes the host milliseconds at every call of a function of `jax.jit`. The returned
        step splits the model at its first call. Every call reads the current values of the variables, so it sees new
        weights, new `nnx.Variable` objects at old paths, and swaps of adapters. The structure of the model is fixed:
        a call raises if layers, static attributes or variables were added, removed or changed since the first.
        Metadata of a variable that was changed in place is not seen. As under `jax.jit`, changes that the function
        makes to the model are lost; return them.

        A call takes turns with writes of slots: no other thread writes slots while the step is dispatched (and, at the
        first call of a shape, compiled; see `warmup`). If one thread runs steps while another prepares batches, every
        step must be compiled here. On an NVIDIA GPU, `jlora.compiler_options()` apply.

        Args:
          step: `step(model, ...)`. The model is the first positional argument. `jlora.use(batch)` is opened inside.
            Without it, the call returns a decorator: `@manager.jit(donate_argnames="cache")`.
          **options: options of `jax.jit`. Positions and names are those of `step`; `compiler_options` are merged with
            `jlora.compiler_options()`, and the value None drops one. In a tuple of `in_shardings` the model has None.

        Returns:
          A `jax.stages.Wrapped`: a callable with the signature of `step`, with the methods `trace` and `lower`. A call
          with another model than the manager's raises LoRAUsageError, except inside `verify`.

        Raises:
          LoRAUsageError: `step` takes no positional argument, or an option donates the model or makes it static.
        """
        if step is None:
            return partial(self.jit, **options)
        return Step(step, options, self._flat, self._state)

    def trainer(
        self,
        loss: Loss,
        *,
        capacity: int = 8,
        max_rank: int | None = None,
        target_modules: Collection[str] | None = None,
        optimizer: Optimizer = adam,
    ) -> Trainer:
        """Return a trainer of several adapters, which join and leave while others train.

        It has room for the factors, gradients and optimizer states of `capacity` adapters in float32
        (`Trainer.nbytes`), of every layer that serves adapters.

        Args:
          loss: `loss(model, batch, *inputs)` -> (float [B], float or int [B]), the sum of the losses of each sequence
            and the number of its tokens, or other weights, and optionally a mapping of further arrays [B, ...]. It
            opens `jlora.use(batch)`.
          capacity: most adapters at a time.
          max_rank: largest rank of an adapter, at most that of the slots, the default.
          target_modules: modules that adapters may have, by their names or last parts, to save memory. None for all.
          optimizer: an `optax.GradientTransformation`, or a function of numbers with defaults that returns one. The
            numbers are those of `Trainer.apply`, traced, so that none is compiled anew. Each adapter has a state of its
            own. The default is AdamW with `learning_rate`, `b1`, `b2`, `eps`, `weight_decay` and `max_norm`.

        Raises:
          LoRAUsageError: an argument is of the wrong type, a target matches no layer, or the model is on devices of
            several processes.
        """
        state = self._state
        state.peers.refuse("trainer", "train on the devices of one")
        state.wrapped.check()
        host = TrainedModel(
            state.wrapped, self.jit, partial(begin_training, state), self._update, self.add_adapter, self.set_request
        )
        return Trainer(
            host, loss, capacity=capacity, max_rank=max_rank, target_modules=target_modules, optimizer=optimizer
        )

    # --- life cycle ---------------------------------------------------------------------------------------------

    def warmup(
        self,
        step: Callable[[LoRABatch], Any] | None = None,
        shape: BatchShape | None = None,
    ) -> None:
        """Compile the slot write, and `step(batch)` for one batch shape, before serving.

        The log has the seconds so far, every 10 seconds (logger "jlora", level INFO).

        `step` runs twice: with a zero adapter in a free slot (with no adapter if no slot is free), and with a batch
        whose `has_adapters` is False, for steps with a base-only variant. Loaded adapters do not change. While a step
        of `jit` compiles, writes of slots in other threads wait. Call this once for each batch shape.

        Args:
          step: calls the jitted function, such as `lambda batch: forward(model, tokens, batch)`.
          shape: shape of the batch, such as `jlora.BatchShape(64)`, of which only sizes with padding matter; None for
            one sequence.

        Raises:
          LoRAUsageError: the manager has no row group of `shape`, or a traced function makes the call.
        """
        self._check_call("warmup")
        shape = (shape or BatchShape(1)).all_active(self._state.wrapped.sites)
        with elapsed(partial(_log.info, "warm-up of %d sequences: %.0f s so far", shape.num_sequences)):
            warm_up(self._state, step, shape)

    def layers(self) -> tuple[LayerInfo, ...]:
        """Return a `LayerInfo` of each layer: path, sizes, and whether it is wrapped or the reason why not."""
        return self._state.wrapped.layers()

    @property
    def unserved(self) -> Mapping[str, str]:
        """Path -> reason, for each layer that serves no adapter. Adapters with weights for such a layer are refused.

        Initially it has the layers that are not wrapped, guessed layers, position tables, and the logits of an
        embedding that is not known to be the head. Only `verify` changes it; each step is then traced once more.
        """
        return self._state.wrapped.unserved.reasons

    def verify(
        self,
        forward: Forward,
        inputs: Any,
        shape: BatchShape | None = None,
        *,
        batch_axis: int = 0,
        seed: int = 0,
        rederive: Callable[[nnx.Module], object] | None = None,
    ) -> VerifyReport:
        """Compare the model with adapters in slots against merged weights, row by row.

        This finds errors that shapes cannot show: sequences on another axis, rows shared by sequences, a layer that
        scales its input, a wrong spec. Slots and adapters are not changed. `unserved` is replaced by the result of
        this call: layers that `forward` does not call, or calls with rows outside the batch, serve no adapter
        afterwards, and guessed layers that were correct do.

        Args:
          forward: `forward(model, inputs, batch)` -> array or tree of arrays with rows of sequences. It runs one or
            several of your steps, each inside `jlora.use(batch)`. It is called with copies of the model that share its
            arrays, so it must not donate them, and with `batch=None` on an unwrapped copy. It may donate its inputs.
          inputs: the inputs of `forward`. Sequences should differ in content and, if the model allows it, their number
            should differ from the length of all other axes.
          shape: shape of the batch in `inputs`; None reads the number of sequences from `batch_axis` of the first array
            that has it. Rows of items are compared by their effect on the rows of sequences in the outputs, so every
            item that a sequence reads needs that sequence as its owner.
          batch_axis: the axis of the outputs (and of `inputs`) for sequences, or for packed or flattened rows.
          seed: seed of the random values.
          rederive: `rederive(model)` computes again, in place, the parameters of a model that are derived from its
            kernels when it is loaded. It is called with unwrapped copies, whose kernels have merged weights. It
            declares that no other parameter is derived; a function that changes nothing declares that none is.

        Raises:
          LoRAError: a row differs from merged weights. The message names the first layer, in call order, that differs
            when only it has values. Or a parameter repeats weights of a wrapped kernel, and `rederive` is None; or
            `rederive` changes the outputs of the base model.
          LoRAUsageError: `forward` returns no rows of the batch, or the manager has no row group of `shape`.
        """
        self._check_call("verify")
        wrapped = self._state.wrapped
        wrapped.check()
        if rederive is None and (repeats := find_repeats(wrapped)):
            raise LoRAError(f"verify: {describe(repeats)}")
        report, reasons = verify(wrapped, forward, inputs, shape, batch_axis, seed, rederive, refused_sites(wrapped))
        # In a turn, so that a batch on another thread agrees and is made with the same layers.
        with self._state.peers.turn("verify", alone=True), self._state.lock:
            wrapped.set_unserved(reasons)
        return report

    def stats(self) -> Stats:
        """Return counts since the manager was created, and its current sizes."""
        state = self._state
        with state.lock:
            names = ("host_loads", "host_evictions", "slot_loads", "slot_evictions", "slot_hits")
            return Stats(
                **{name: state.counts[name] for name in names},
                compilations=state.slot_arrays.compilations,
                registered=len(state.cache.loaded),
                unevictable=len(state.cache.unevictable()),
                active=state.policy.num_in_slots,
                leased=len({adapter.name for adapter in state.leases.leased()}),
                slot_bytes=state.slot_arrays.slot_nbytes[0],
                host_bytes=state.cache.nbytes,
                open_leases=sum(1 for _ in state.leases.open()),
                load_seconds=state.load_seconds.read(),
                swap_seconds=state.policy.seconds.read(),
            )

    def _check_call(self, what: str, *, waits: bool = False) -> None:
        """Raise LoRAUsageError inside a traced function, and inside `resolve` for a call that may wait for a load."""
        if waits and (own := getattr(self._state.loads.own, "load", None)) is not None:
            raise LoRAUsageError(
                f"LoRAManager.{what} was called inside resolve=, by the load of {own.request.name!r}: it could wait "
                "for that load, which waits for resolve. Return the folder there; load other adapters outside of it, "
                "or with prefetch"
            )
        if not trace_state_clean() and tracing():
            raise LoRAUsageError(
                f"LoRAManager.{what} was called inside jax.jit: it would run once, while the function is traced, and "
                "its arrays would go stale. Call it outside and pass the batch as an argument"
            )

    def _deadline(self, timeout: float | None) -> Deadline:
        if timeout is None:
            return Deadline(None, threading.get_ident())
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout >= 0:
            raise LoRAUsageError(f"timeout must be None or seconds, got {timeout!r}")
        self._state.peers.refuse("timeout=", "no call waits for open batches; close them first, and leave timeout out")
        return Deadline(time.monotonic() + timeout)

    def unwrap(self) -> nnx.Module:
        """Restore the model as it was before it was wrapped. The manager cannot be used afterwards.

        Returns:
          The model.

        Raises:
          AdapterInUseError: a batch with adapters is open.
        """
        state = self._state
        with state.lock.writing:
            for lease in state.leases.open():
                names = ", ".join(repr(adapter.name) for adapter in lease.adapters) or "the base model alone"
                if lease.adapters:
                    raise AdapterInUseError(f"a batch with {names} is open; close it before the model is unwrapped")
            state.cache.clear()
            state.kept.clear()
            self._slots = None
            self._flat.clear()
            state.wrapped.unwrap()
            return self.model


def _compared(wrapped: WrappedModel, config: LoRAConfig) -> list[str]:
    """Return the description of a wrapped model that must be equal in all processes."""
    modules = wrapped.modules
    slots = [
        (site.path, site.kind, site.slot_nbytes, list(site.spec.arrays.values()), site.row_group) for site in modules
    ]
    # The modules are compared through the slots.
    sizes = replace(config, max_cpu_bytes=None, target_modules=None, exclude_modules=None)
    return [repr(sizes), repr(slots)]
