"""`LoRAManager`: adapters on the host, adapters in slots, and batches that hold their slots."""

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from jlora.adapters import Adapter
from jlora.config import LoRAConfig, LoRARequest
from jlora.errors import (
    AdapterInUseError,
    AdapterMismatchError,
    AdapterNotFoundError,
    LoRAError,
    NoFreeSlotError,
)
from jlora.layers.scope import LoRABatch, host_batch
from jlora.layers.select import PackedModules
from jlora.layers.site import Site, SlotParam
from jlora.layers.wrap import LayerInfo, wrap_model
from jlora.manager.batches import Asked, read_arguments, slot_arrays
from jlora.manager.export import export
from jlora.manager.leases import Leases
from jlora.manager.lru import LRU
from jlora.manager.match import HostAdapter, fit
from jlora.manager.names import NameMap, SiteIndex, name_rules
from jlora.manager.report import AdapterInfo, Stats
from jlora.manager.swap import make_layout, make_write, pack
from jlora.manager.verify import Forward, VerifyReport, verify

# Steady traffic alternates between few batches (prefill, decode): their device arrays are kept.
_KEPT_BATCHES = 8


class LoRAManager:
    """Serves many adapters on one model.

    Wraps the eligible layers of `model` in place. Adapters live in a host cache (`max_cpu_loras`) and are written into
    device slots (`max_loras`) when a batch needs them; both evict the least recently used one that is neither pinned
    nor held by an open batch.

    All methods may be called from several threads. A write replaces (and donates) the slot arrays of the model, so a
    step that another thread is just dispatching may find them deleted, which JAX reports: prepare and dispatch in one
    thread, or under one lock of yours.

    Args:
      model: any `nnx.Module`.
      config: sizes, dtype, targets.
      packed_modules: checkpoint names that make up merged projections, {"qkv_proj": ("q_proj", "k_proj", "v_proj")}
        or, with the sizes of the slices that each name covers, {"in_proj": {"qkv": (64, 64, 128), "z": 128}}. A tuple
        takes its sizes from the layer's `output_sizes`, else it splits evenly. None reads `model.packed_modules`.
      name_map: regex -> replacement from checkpoint module names to the model's own dotted paths, for models whose
        paths differ; the first pattern found in a name is substituted.
      skip: regular expressions, searched in the names of checkpoint modules that this process lacks on purpose (MTP
        heads, other pipeline stages, a vision tower); what an adapter brings for those is passed over and shown by
        `layers()`.

    Raises:
      LoRAError: nothing can be wrapped, a target matches nothing, the model is wrapped already, or `name_map` is not
        what it should be. The model is as it was then.
    """

    def __init__(
        self,
        model: nnx.Module,
        config: LoRAConfig,
        *,
        packed_modules: PackedModules | None = None,
        name_map: NameMap | None = None,
        skip: Sequence[str] = (),
    ):
        self.model = model
        self.config = config
        rules = name_rules(name_map)  # first, so that a bad one leaves the model alone
        self._wrapped = wrap_model(model, config, packed_modules, skip)
        self._wrapped.tracking.claims = self._claims
        self._index = SiteIndex(self._wrapped, rules)
        self._layout = make_layout(tuple(self._wrapped.modules))
        self._counts: Counter[str] = Counter()
        self._write = make_write(self._layout, lambda: self._counts.update(["compilations"]))
        self._host: LRU[HostAdapter] = LRU()
        self._active: LRU[int] = LRU()
        self._leases = Leases()
        self._kept: OrderedDict[Asked, LoRABatch] = OrderedDict()
        self._slots: nnx.State | None = None
        self._lock = threading.RLock()

    # --- adapters -----------------------------------------------------------------------------------------------

    def add_adapter(self, adapter: LoRARequest | Adapter, *, load_inplace: bool = False) -> bool:
        """Load an adapter into the host cache. True if it was loaded, False if the name was there (then it is touched).

        With `load_inplace` (here or in the request) an adapter of the same name is replaced, also in its slot.

        Raises:
          AdapterNotFoundError, AdapterFormatError, AdapterMismatchError: see `jlora.errors`; nothing changes then.
          AdapterInUseError: the adapter to replace is held by an open batch.
          NoFreeSlotError: the host cache is full of pinned and leased adapters.
        """
        request = adapter if isinstance(adapter, LoRARequest) else None
        if request is None and not isinstance(adapter, Adapter):
            raise LoRAError(f"add_adapter takes a LoRARequest or an Adapter, got {type(adapter).__name__}")
        replace = load_inplace or (request is not None and request.load_inplace)
        name = adapter.name
        if not isinstance(name, str) or not name:
            raise LoRAError(f"an adapter's name must be a non-empty string, got {name!r}")
        with self._lock:
            self._check_wrapped()
            if name in self._host and not replace:
                self._host.touch(name)
                return False
            self._refuse_leased(name, "replacing")
            loaded = adapter if isinstance(adapter, Adapter) else self._load(adapter)
            host = fit(loaded, self._wrapped, self._index, request.path if request else None)
            if name in self._active:
                self._fill(self._active[name], host)  # before the books, so that a failed write changes nothing
            elif name not in self._host:
                self._make_host_room()
            self._host.put(name, host)
            self._counts["host_loads"] += 1
            return True

    @staticmethod
    def _load(request: LoRARequest) -> Adapter:
        adapter = Adapter.from_pretrained(request.path, name=request.name, revision=request.revision)
        if request.base_model_name is not None and adapter.base_model_name != request.base_model_name:
            raise AdapterMismatchError(
                f"adapter {request.name!r} ({request.path}): base_model_name_or_path is {adapter.base_model_name!r}, "
                f"and the request asks for {request.base_model_name!r}"
            )
        return adapter

    def _make_host_room(self) -> None:
        if len(self._host) < (self.config.max_cpu_loras or 0):
            return
        if not self._evict_host():
            raise NoFreeSlotError(
                f"the host cache of {self.config.max_cpu_loras} adapters is full, and each is pinned or held by an "
                "open batch; unpin or remove one, or raise max_cpu_loras"
            )

    def _evict_host(self) -> bool:
        victims = self._host.evictable(self._leases.held)
        if not victims:
            return False
        self._drop(victims[0])
        self._counts["host_evictions"] += 1
        return True

    def remove_adapter(self, name: str) -> bool:
        """Remove an adapter from its slot and from the host, pinned or not. False if the name is unknown.

        Raises:
          AdapterInUseError: it is held by an open batch.
        """
        with self._lock:
            if name not in self._host:
                return False
            self._refuse_leased(name, "removing")
            self._drop(name)
            return True

    def remove_oldest_adapter(self) -> bool:
        """Remove the least recently used adapter that is neither pinned nor leased. False if there is none."""
        with self._lock:
            return self._evict_host()

    def remove_all_adapters(self) -> None:
        """Remove every adapter, pinned ones too.

        Raises:
          AdapterInUseError: one is held by an open batch; then nothing is removed.
        """
        with self._lock:
            for name in self._host:
                self._refuse_leased(name, "removing")
            for name in self._host:
                self._drop(name)

    def list_adapters(self) -> dict[str, AdapterInfo]:
        """The adapters of the host cache, least recently used first."""
        with self._lock:
            return {name: self._info(name) for name in self._host}

    def _info(self, name: str) -> AdapterInfo:
        host = self._host[name]
        return AdapterInfo(
            name=name,
            rank=host.rank,
            modules=len(host.placements),
            nbytes=host.nbytes,
            slot=self._active.get(name),
            pinned=self._host.pinned(name),
            leased=self._leases.held(name),
            path=host.path,
            base_model_name=host.base_model_name,
        )

    def _drop(self, name: str) -> None:
        self._vacate(name)
        self._host.remove(name)

    def export_adapter(self, name: str) -> Adapter:
        """Read an adapter back from its slot, after training the slot arrays there.

        Returns:
          An `Adapter` with the loaded one's module names, ranks and alphas, and the slot's values in slot dtype.

        Raises:
          AdapterNotFoundError: the name was not added.
          LoRAError: it is in no slot.
        """
        with self._lock:
            self._require([name])
            if name not in self._active:
                raise LoRAError(f"adapter {name!r} is in no slot; activate_adapter it before training")
            return export(self._host[name], self._active[name], self._wrapped.modules)

    # --- slots --------------------------------------------------------------------------------------------------

    def activate_adapter(self, name: str) -> bool:
        """Write an adapter into a slot. True if it was written, False if it was in one (then it is touched).

        Raises:
          AdapterNotFoundError: the name was not added.
          NoFreeSlotError: every slot is pinned or held by an open batch.
        """
        with self._lock:
            return bool(self._activate([name]))

    def deactivate_adapter(self, name: str) -> bool:
        """Take an adapter out of its slot (it stays on the host, unpinned). False if it is in none.

        Raises:
          AdapterInUseError: it is held by an open batch.
        """
        with self._lock:
            if name not in self._active:
                return False
            self._refuse_leased(name, "deactivating")
            self._vacate(name)
            return True

    def pin_adapter(self, name: str) -> bool:
        """Keep an adapter in a slot and on the host, written into one first if need be. Always True.

        Raises:
          AdapterNotFoundError, NoFreeSlotError: as `activate_adapter`.
        """
        with self._lock:
            self._activate([name])
            self._host.pin(name)
            self._active.pin(name)
            return True

    def unpin_adapter(self, name: str) -> bool:
        """Let an adapter be evicted again. False if it was not pinned.

        Raises:
          AdapterNotFoundError: the name was not added.
        """
        with self._lock:
            self._require([name])
            self._active.unpin(name)
            return self._host.unpin(name)

    @property
    def slot_names(self) -> tuple[str | None, ...]:
        """What each slot holds; None for a free one."""
        with self._lock:
            names: list[str | None] = [None] * self.config.max_loras
            for name in self._active:
                names[self._active[name]] = name
            return tuple(names)

    @property
    def slots(self) -> nnx.State:
        """The current slot arrays, the same pytree as `nnx.state(model, jlora.SlotParam)`.

        The next write of a slot donates them: read this property anew for each step.
        """
        with self._lock:
            if self._slots is None:
                self._slots = nnx.state(self.model, SlotParam)
            return self._slots

    def _require(self, names: Sequence[str]) -> None:
        for name in names:
            if name not in self._host:
                known = ", ".join(map(repr, self._host)) or "none"
                raise AdapterNotFoundError(f"adapter {name!r} is not loaded; add_adapter it first (loaded: {known})")

    def _activate(self, names: Sequence[str]) -> list[str]:
        """Bring all of `names` into slots. Returns those that were written.

        Raises before anything changes where there is no room. Where the device fails, the adapters written before stay.
        """
        self._require(names)
        missing = [name for name in names if name not in self._active]
        if missing:
            held = set(self._active[name] for name in self._active)
            free = [slot for slot in range(self.config.max_loras) if slot not in held]
            victims = self._active.evictable(lambda name: self._leases.held(name) or name in names)
            if len(missing) > len(free) + len(victims):
                raise NoFreeSlotError(
                    f"{len(missing)} adapters need a slot ({', '.join(map(repr, missing))}), but of "
                    f"{self.config.max_loras} slots {len(free)} are free and {len(victims)} can be evicted; the others "
                    "are pinned, held by an open batch or part of this one. Raise max_loras, or close batches"
                )
            for name in missing:
                victim = None if free else victims.pop(0)
                slot = free.pop(0) if victim is None else self._active[victim]
                self._fill(slot, self._host[name])
                if victim is not None:
                    self._vacate(victim)
                    self._counts["slot_evictions"] += 1
                self._active.put(name, slot)
        self._counts["slot_hits"] += len(names) - len(missing)
        for name in names:
            self._host.touch(name)
            self._active.touch(name)
        return missing

    def _fill(self, slot: int, host: HostAdapter | None) -> None:
        """Write an adapter (None: zeros) into one slot of every layer."""
        buffers = pack(self._layout, host.placements if host is not None else ())
        modules = self._wrapped.modules
        variables = [[getattr(modules[site], attr) for attr in site.attributes] for site in self._layout.sites]
        arrays = [tuple(variable.get_value() for variable in triple) for triple in variables]
        # A write still under way holds its adapter's buffers: without this, several would pile up on the device.
        jax.block_until_ready(arrays[0])
        written = self._write(arrays, jax.device_put(buffers), np.int32(slot))
        for triple, new in zip(variables, written, strict=True):
            for variable, array in zip(triple, new, strict=True):
                variable.set_value(array)
        self._slots = None
        self._counts["slot_loads"] += host is not None

    def _vacate(self, name: str) -> None:
        if name in self._active:
            self._active.remove(name)
            self._host.unpin(name)
            self._kept.clear()  # a kept batch is right as long as each of its adapters stays in its slot

    # --- batches ------------------------------------------------------------------------------------------------

    def prepare(
        self,
        names: Sequence[str | None],
        token_counts: Sequence[int] | None = None,
        pad_to: int | None = None,
    ) -> LoRABatch:
        """Bring the adapters of one batch into slots and hold them there until the batch closes.

        Args:
          names: the adapter of each sequence; None takes the base model.
          token_counts: for packed rows [tokens, features]: how many rows each sequence has, in order.
          pad_to: number of packed rows, at least their sum (the default); the rows behind take no adapter.

        Returns:
          A `LoRABatch`. Use it in `with`, or close() it.

        Raises:
          AdapterNotFoundError: a name was not added.
          NoFreeSlotError: more different adapters than slots can be freed. Nothing changes then.
          LoRAError: the arguments disagree.
        """
        asked = read_arguments(names, token_counts, pad_to)
        with self._lock:
            self._check_wrapped()
            batch = self._kept.get(asked)
            if batch is not None and not _deleted(batch):
                self._counts["slot_hits"] += len(asked.adapters)
                for name in asked.adapters:
                    self._host.touch(name)
                    self._active.touch(name)
                self._kept.move_to_end(asked)
            else:
                self._activate(asked.adapters)
                slots, token_slots = slot_arrays(
                    asked, {name: self._active[name] for name in asked.adapters}, self.config.max_loras
                )
                batch = self._kept[asked] = host_batch(slots, token_slots, self._wrapped.tracking)
                if len(self._kept) > _KEPT_BATCHES:
                    self._kept.popitem(last=False)
            return LoRABatch(
                batch.slots,
                batch.token_slots,
                self._wrapped.tracking,
                self._leases.open(asked.adapters),
                has_adapters=bool(asked.adapters),
            )

    def _refuse_leased(self, name: str, doing: str) -> None:
        if self._leases.held(name):
            raise AdapterInUseError(f"adapter {name!r} is held by an open batch; close it before {doing} the adapter")

    def _claims(self, site: Site) -> list[str]:
        # Called while the user's step is traced, so without the lock: two threads that trace one function wait for each
        # other, and one of them may be in `warmup`, which holds the lock.
        return [name for name in self._host if (host := self._host.get(name)) is not None and host.serves(site)]

    # --- life ---------------------------------------------------------------------------------------------------

    def warmup(
        self,
        step: Callable[[LoRABatch], Any] | None = None,
        *,
        num_sequences: int = 1,
        token_counts: Sequence[int] | None = None,
        pad_to: int | None = None,
    ) -> None:
        """Compile the slot write, and `step(batch)` for one batch shape, before traffic.

        `step` runs twice: with a zero adapter in a free slot (no adapter where none is free), and with a batch whose
        `has_adapters` is False, for steps that have a base-only variant. No adapter that is loaded changes. Call it
        once for each batch shape that you will serve.

        Args:
          step: runs your jitted function: `lambda batch: forward(model, tokens, batch)`.
          num_sequences: B of the batch.
          token_counts, pad_to: as in `prepare`, for packed rows.
        """
        with self._lock:
            self._check_wrapped()
            free = [slot for slot, name in enumerate(self.slot_names) if name is None]
            if free:
                self._fill(free[0], None)
            else:
                # Every slot is taken: write one adapter over itself.
                name = next(iter(self._active))
                self._fill(self._active[name], self._host[name])
                self._counts["slot_loads"] -= 1
            if step is None:
                return
            with self.prepare([None] * num_sequences, token_counts, pad_to) as base_only:
                slot = free[0] if free else self.config.max_loras
                slots = np.full(num_sequences, slot, np.int32)
                token_slots = (
                    None if base_only.token_slots is None else np.full(base_only.token_slots.shape, slot, np.int32)
                )
                jax.block_until_ready(step(host_batch(slots, token_slots, self._wrapped.tracking)))
                jax.block_until_ready(step(base_only))

    def layers(self) -> tuple[LayerInfo, ...]:
        """Every layer: its path and sizes, and whether it is wrapped or why not."""
        return self._wrapped.layers()

    def verify(self, forward: Forward, inputs: Any, **options: Any) -> VerifyReport:
        """Check once that this model serves what merged weights compute; see `jlora.manager.verify.verify`."""
        self._check_wrapped()
        return verify(self._wrapped, forward, inputs, **options)

    def stats(self) -> Stats:
        """Counts so far and what is held now."""
        with self._lock:
            names = ("host_loads", "host_evictions", "slot_loads", "slot_evictions", "slot_hits", "compilations")
            return Stats(
                **{name: self._counts[name] for name in names},
                registered=len(self._host),
                active=len(self._active),
                leased=sum(map(self._leases.held, self._host)),
                slot_bytes=self._layout.nbytes,
            )

    def _check_wrapped(self) -> None:
        if not self._wrapped.modules:
            raise LoRAError("this manager gave its model back (unwrap); make a new LoRAManager")

    def unwrap(self) -> nnx.Module:
        """Give the model back as it was before it was wrapped. The manager is of no use afterwards.

        Raises:
          AdapterInUseError: a batch is open.
        """
        with self._lock:
            self.remove_all_adapters()
            self._wrapped.unwrap()
            self._slots = None
            return self.model


def _deleted(batch: LoRABatch) -> bool:
    """True if a step donated the arrays of a batch."""
    return batch.slots.is_deleted() or (batch.token_slots is not None and batch.token_slots.is_deleted())
