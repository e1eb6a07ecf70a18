"""Training of adapters that come and go, on factors of their own that no slot write changes."""

import contextlib
import shutil
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, cast, overload

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, Sharding
from jaxtyping import Array, Int

from jlora._compat import without_graphs
from jlora._interrupts import sigint_deferred
from jlora.adapters import Adapter
from jlora.adapters.variants import described
from jlora.config import LoRARequest, checked_targets
from jlora.errors import AdapterNotFoundError, LoRAError, LoRAUsageError
from jlora.layers.forward.batch import LoRABatch
from jlora.layers.forward.batch_shape import BatchShape, FirstRows
from jlora.layers.forward.lease import Lease, ServedTerms
from jlora.layers.forward.make_batch import make_batch
from jlora.layers.forward.mesh import off_explicit
from jlora.layers.forward.row_groups import Items
from jlora.layers.site import ModelSites, Site, attach, detach, is_named, set_attribute
from jlora.layers.wrap.discover import walk
from jlora.layers.wrap.wrapped import WrappedModel
from jlora.slots.blocks import Entry
from jlora.slots.codec import A, place, taken
from jlora.slots.export import export_factors
from jlora.slots.packed import PackedAdapter, Placement
from jlora.slots.placement import ArrayPlacement, a_device
from jlora.training.factors import Factor, entry_of, key_of, placed, put, stacked, whole_placement
from jlora.training.optimizer import Number, Optimizer, Tree, adam, global_norm, number_arrays, with_numbers, zeros
from jlora.training.report import Loss, Report, checked, dtype_and_shape, is_array, report

_NO_MESH = Mesh(np.empty((), object), ())
# A program that replaces the state: its key, function, arguments after the state, and placement of its second result.
_Change: TypeAlias = tuple[Any, Callable[..., Any], tuple[Any, ...], Any]


@dataclass(frozen=True)
class TrainedModel:
    """The model and the manager whose adapters are trained.

    Attributes:
      wrapped: the wrapped model.
      jit: `LoRAManager.jit`.
      begin: returns the packed adapter, and a function that returns entry -> (A [n, r, K], B [r, N]) as its files have
        them, of the manager's adapter of a name, or of a new one with these options of `new_adapter`.
      update: `LoRAManager.update_adapter`, with a `check` of the version that it replaces.
      add: `LoRAManager.add_adapter`.
      set_request: `LoRAManager.set_request`.
    """

    wrapped: WrappedModel
    jit: Callable[..., Callable[..., Any]]
    begin: Callable[..., tuple[PackedAdapter, Callable[[], Mapping[Entry, tuple[np.ndarray, np.ndarray]]]]]
    update: Callable[..., int]
    add: Callable[[Adapter], bool]
    set_request: Callable[[Adapter, LoRARequest], None]


@dataclass(frozen=True, eq=False)
class _Member:
    """An adapter of a trainer, and its index in the arrays. Compared by identity."""

    name: str
    index: int
    packed: PackedAdapter
    version: int = 0

    @property
    def invocation_tokens(self) -> tuple[int, ...]:
        return self.packed.about.invocation_tokens


class Trainer:
    """Adapters that are trained, with their gradients and the states of their optimizers.

    It is made by `LoRAManager.trainer`. Factors are float32 and the trainer's own. No load, eviction or repair of slots
    changes them, and no step changes slots. Calls of several threads come one after the other.

    Attributes:
      capacity: most adapters at a time.
    """

    def __init__(
        self,
        host: TrainedModel,
        loss: Loss,
        *,
        capacity: int,
        max_rank: int | None = None,
        target_modules: Collection[str] | None = None,
        optimizer: Optimizer = adam,
    ):
        if not callable(loss):
            raise LoRAUsageError(f"trainer: the loss must be a function (model, batch, *inputs), got {loss!r:.200}")
        for option, value in (("capacity", capacity), ("max_rank", 1 if max_rank is None else max_rank)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise LoRAUsageError(f"trainer: {option} must be a positive integer, got {value!r}")
        target_modules = checked_targets("trainer", target_modules)
        self._host, self._loss, self.capacity = host, loss, capacity
        self._optimizer, self._defaults = with_numbers(optimizer)
        self._max_rank, self._targets = max_rank, target_modules
        self._lock = threading.RLock()  # programs donate the state
        self._sites: dict[int, tuple[ModelSites, dict[Site, Site]]] = {}  # by number of members in a batch
        self._members: dict[str, _Member] = {}
        self._whole = whole_placement(host.wrapped)
        served = [site for site in host.wrapped.sites.sites if site not in host.wrapped.unserved.sites]
        if target_modules is not None:
            strange = [each for each in target_modules if not any(is_named(each, site.parts) for site in served)]
            if strange:
                raise LoRAUsageError(f"trainer: target_modules {strange!r} match no layer that serves adapters")
            served = [site for site in served if any(is_named(each, site.parts) for each in target_modules)]
        most = max((each.spec.max_rank for site in served for each in site.with_shared), default=0)
        if max_rank is not None and max_rank > most:
            raise LoRAUsageError(f"trainer: max_rank={max_rank} is more than {most}, the largest rank of its layers")
        specs = {each: self._sites_of(1)[1][each].spec for site in served for each in site.with_shared}
        self._ranks = {key_of(site, "ranks"): site for site in specs}
        self._factors = {
            key_of(site, "ab"[half]): Factor(key_of(site, "ranks"), spec, half)
            for site, spec in specs.items()
            for half in spec.factors
        }
        self._struct = jax.eval_shape(self._begun, self._zeros(), self._ranks_of(()))  # of a member
        self._where = self._shardings()
        self._stacked = jax.tree.map(stacked, self._where)  # of the arrays of all members

        def empty(each: jax.ShapeDtypeStruct, where: ArrayPlacement) -> jax.Array:
            return put(np.zeros((capacity, *each.shape), each.dtype), where)

        self._state: Tree = jax.tree.map(empty, self._struct, self._stacked)
        outs = self._whole, (self._stacked["factors"], self._whole)  # of the results alone, and after the gradients
        # A CUDA graph would update the addresses of the results at every call, which takes longer than its launches.
        self._compiler_options = without_graphs(a_device(self._whole).platform)
        jit = partial(host.jit, compiler_options=self._compiler_options)
        self._forward, self._gradients = (
            jit(partial(self._losses_of, bool(i)), **({"out_shardings": out} if self._on_mesh else {}))
            for i, out in enumerate(outs)
        )
        self._programs: dict[Any, Callable[..., Any]] = {}

    # --- Members ------------------------------------------------------------------------------------------------------

    @property
    def names(self) -> tuple[str, ...]:
        """The adapters that are trained, in the order of their `add`."""
        return tuple(self._members)

    @property
    def nbytes(self) -> int:
        """Bytes of factors, gradients and optimizer states of `capacity` adapters, without those of a step."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self._state))

    def add(
        self,
        name: str,
        *,
        rank: int | None = None,
        alpha: float | None = None,
        target_modules: Collection[str] | None = None,
        seed: int = 0,
        state: Tree = None,
    ) -> None:
        """Begin to train an adapter. The others do not change, and nothing is compiled after the first `add`.

        It begins with the float32 of the manager's adapter of that name: of its files, or of the arrays given. Without
        such an adapter it is drawn as `LoRAManager.new_adapter` draws it, and the manager gets it with `publish`.

        Args:
          name: name of the adapter.
          rank: rank of a new adapter.
          alpha: PEFT's `lora_alpha` of a new adapter.
          target_modules: modules of a new adapter, as in `LoRAManager.new_adapter`.
          seed: seed of a new adapter.
          state: `state_of` of an adapter with the same modules, ranks and scalings, to continue from.

        Raises:
          AdapterNotFoundError: the manager has no adapter of the name, and `rank` and `alpha` are not given.
          AdapterMismatchError: as in `LoRAManager.new_adapter`.
          LoRAUsageError: the trainer is full or has the name, the manager's adapter has other options than those given,
            the rank exceeds `max_rank`, or the adapter has DoRA, a saved head, or a layer that is not trained here; or
            `state` does not fit.
        """
        if not isinstance(name, str) or not name:
            raise LoRAUsageError(f"Trainer.add: an adapter's name must be a non-empty string, got {name!r:.200}")
        with self._lock:
            if name in self._members:
                raise LoRAUsageError(f"Trainer.add: adapter {name!r} is trained already; remove it first")
            if len(self._members) == self.capacity:
                raise LoRAUsageError(f"Trainer.add: all {self.capacity} places are taken; remove an adapter")
            options = {"rank": rank, "alpha": alpha, "target_modules": target_modules, "seed": seed}
            packed, values = self._host.begin(name, options)
            self._check_trainable(packed)
            if state is None:
                unpacked, factors, ranks = values(), self._zeros(), self._ranks_of(packed.placements)
                for p in packed.placements:
                    for half in p.site.spec.factors:
                        own = place(p.site.spec, half, p.first, p.count if half else 1, p.rank)
                        where = (*entry_of(p.site.spec, p.entry), *own)
                        factors[key_of(p.site, "ab"[half])][where] = unpacked[p.site, p.entry][half][own]
                where = self._where["factors"], {key: self._whole for key in ranks}
                args = jax.tree.map(put, (factors, ranks), where)
                member = self._compiled("begin", self._begun, self._where, *args)(*args)
            else:
                member = self._checked_state(name, packed, state)
            taken_indices = {each.index for each in self._members.values()}
            index = next(i for i in range(self.capacity) if i not in taken_indices)
            self._write(index, member)
            self._members[name] = _Member(name, index, packed.with_blocks(()))

    def remove(self, name: str) -> None:
        """Forget an adapter of the trainer. The manager keeps its own. Batches with it can no longer be trained.

        Raises:
          LoRAUsageError: the adapter is not trained here.
        """
        with self._lock:
            del self._members[self._member(name).name]

    def state_of(self, name: str) -> dict[str, Any]:
        """Return a pytree of one adapter: its factors, gradients and optimizer state, copied on the device."""
        return self._read(name)

    @property
    def state(self) -> dict[str, Any]:
        """`state_of` of each adapter, by name, on the host.

        Save it, for example with Orbax. To continue, set it on a trainer of the same adapters, also on another mesh, or
        give the state of each to `add`.

        Raises:
          LoRAUsageError: a state that is set is of other adapters, was trained with other modules, ranks or scalings,
            or has other shapes or dtypes. The message names the first difference. No adapter changes.
        """
        return {name: jax.device_get(self.state_of(name)) for name in self._members}

    @state.setter
    def state(self, new: Any) -> None:
        if not isinstance(new, Mapping) or new.keys() != self._members.keys():
            found = sorted(map(str, cast("Any", new))) if isinstance(new, Mapping) else type(new).__name__
            raise LoRAUsageError(f"Trainer.state: it is of the adapters {found}; expected {sorted(self._members)}")
        with self._lock:
            checked = {name: self._checked_state(name, own.packed, new[name]) for name, own in self._members.items()}
            for name, member in checked.items():
                self._write(self._members[name].index, member)

    # --- Steps --------------------------------------------------------------------------------------------------------

    def prepare(
        self,
        names: Sequence[str | None],
        token_counts: Sequence[int] | None = None,
        pad_to: int | None = None,
        *,
        length: int | None = None,
        active_from: FirstRows | None = None,
        items: Mapping[str, Items] | None = None,
    ) -> LoRABatch:
        """Return the batch of a step, with at most one adapter for each sequence.

        It takes no slot, and the manager loads nothing. `names` has the adapter of each sequence, or None for the base
        model. The other arguments are those of `LoRAManager.prepare`.

        Raises:
          LoRAUsageError: an adapter is not trained here, or the arguments disagree.
        """
        known = isinstance(names, Sequence) and all(isinstance(each, str | None) for each in names)
        if isinstance(names, str) or not known:
            raise LoRAUsageError(f"Trainer.prepare takes a list of one name, or None, a sequence; got {names!r:.100}")
        distinct = dict.fromkeys(names)
        members = [self._member(name) for name in distinct if name is not None]
        slots = {member.name: i for i, member in enumerate(members)}
        groups = dict[str, Items]() if items is None else items
        shape = BatchShape(len(names), token_counts, pad_to, length, active_from, groups)
        count = min(len(names), self.capacity)
        sites, own = self._sites_of(count)
        shape.check(sites)
        terms: list[ServedTerms] = [() if name is None else ((name, 0, 1.0),) for name in names]
        lease = Lease(members, terms, threading.get_ident(), shape)
        entries = [[] if name is None else [(slots[name], 0, 1.0)] for name in distinct]
        order = {name: i for i, name in enumerate(distinct)}
        served = set(self._ranks.values()) - self._host.wrapped.unserved.sites
        unserved = frozenset(each for site, each in own.items() if site not in served)
        index = [order[name] for name in names]
        return make_batch(entries, index, shape, sites, lease, none=count, unserved=unserved)

    def evaluate(self, batch: LoRABatch, *inputs: Any) -> Report:
        """Return the losses of a batch, without gradients. Arguments and errors are those of `step`."""
        with self._lock:
            names, _, args = self._of_batch("evaluate", batch, inputs)
            return report(names, self._forward(*args, *inputs))

    def gradients(self, batch: LoRABatch, *inputs: Any) -> Report:
        """Add the losses, weights and gradients of a batch to those that await `apply`.

        Several calls before an `apply` equal one of all their sequences. Arguments and errors are those of `step`.
        """
        with self._lock:
            names, members, args = self._of_batch("gradients", batch, inputs)
            gradients, found = self._gradients(*args, *inputs)
            self._change(self._accumulation(members, gradients, found["sums"]))
            return report(names, found)

    @overload
    def apply(self, name: str, divide: bool = True, **numbers: Number) -> jax.Array: ...
    @overload
    def apply(
        self, name: list[str] | list[str | None], divide: bool = True, **numbers: Number
    ) -> tuple[jax.Array, ...]: ...
    def apply(self, name: str | list[str] | list[str | None], divide: bool = True, **numbers: Number) -> Any:
        """Move one adapter, or several, by the gradients since the last `apply` of each, which are then forgotten.

        Args:
          name: the adapter, or a list of adapters, which move in one program. One length of a list is compiled once.
            It may have None, for no adapter, to be as long as another.
          divide: divide the gradients by the sum of the weights. They are sums otherwise.
          **numbers: the numbers of the optimizer: `learning_rate`, `b1`, `b2`, `eps`, `weight_decay` and `max_norm` of
            the default one, for all adapters, or adapter -> number. Those left out have their defaults.

        Returns:
          Global norm of the gradient before clipping, a float32 scalar on the device; of several adapters, one of each,
          in their order without None. If it is not finite, since the gradient is not or the sum of the weights is 0,
          the adapter and its optimizer stay as they are.

        Raises:
          LoRAUsageError: an adapter is not trained here or is twice in the list, or the optimizer has no such number.
        """
        with self._lock:
            several = isinstance(name, list)
            names = [each for each in name if each is not None] if several else [name]
            indices = [self._member(each).index for each in names]
            if twice := [each for each in names if names.count(each) > 1]:
                raise LoRAUsageError(f"Trainer.apply: adapter {twice[0]!r} is twice in the list; expected once")
            padding = len(name) - len(names) if several else 0
            members = np.array(indices + [self.capacity] * padding, np.int32)
            found: Any = self._change(self._update(members, names, divide, numbers)) if names else ()
            norms = found[: len(names)]
            return norms if several else norms[0]

    def step(self, batch: LoRABatch, *inputs: Any, divide: bool = True, **numbers: Number) -> Report:
        """Move the adapters of a batch: `gradients`, and `apply` of each. Others do not change.

        The loss of an adapter is the sum over its sequences, divided by their weights unless `divide` is False.
        Sequences of the base model count for none. One shape of batch and inputs is compiled once.

        Args:
          batch: a batch of `Trainer.prepare`.
          *inputs: arrays, passed to the loss.
          divide: as in `apply`.
          **numbers: as in `apply`, for all adapters, or adapter -> number.

        Raises:
          LoRAUsageError: the batch is closed or of another trainer or manager, one of its adapters was removed, the
            loss does not return one floating value and one weight for each sequence, or a number is unknown.
        """
        with self._lock:
            names, members, args = self._of_batch("step", batch, inputs)
            update = self._update(members, names, divide, numbers)  # an unknown number is refused before the gradients
            gradients, found = self._gradients(*args, *inputs)
            norms = self._change(self._accumulation(members, gradients, found["sums"]), update)
            return report(names, found, norms)

    # --- Results ------------------------------------------------------------------------------------------------------

    def adapter(self, name: str, *, in_slot_dtype: bool = False) -> Adapter:
        """Return a trained adapter on the host in float32, for example to save it as a PEFT folder.

        If `in_slot_dtype` is True, it is in the dtype of the slots, float32 for int8, as the manager serves it. Values
        that the dtype cannot hold are infinite then, and `LoRAManager.add_adapter` refuses them by default.
        """
        return self.snapshot(name, in_slot_dtype=in_slot_dtype)()

    def snapshot(self, name: str, *, in_slot_dtype: bool = False) -> Callable[[], Adapter]:
        """Copy a trained adapter on the device, and return a function that returns it as `adapter` does.

        No later step changes the copy. The function may be called from any thread, while others train.
        """
        packed, copies = self._member(name).packed, self._read(name, "factors", in_slot_dtype)

        def fetched() -> Adapter:
            factors = _fetched(packed, copies)

            def factors_of(site: Site) -> Callable[[int], list[np.ndarray]]:
                return lambda entry: [factors[site, half][entry_of(site.spec, entry)] for half in site.spec.factors]

            return export_factors(packed, self._ranks.values(), factors_of)

        return fetched

    def tensors(self, name: str) -> dict[str, np.ndarray]:
        """Return PEFT's state dict of a trained adapter: tensor name -> float32 A [r, K] or B [N, r], on the host."""
        packed = self._member(name).packed
        factors = _fetched(packed, self._read(name, "factors"))
        found: dict[str, np.ndarray] = {}
        for p in packed.placements:
            key = "lora_embedding_{}" if p.site.kind == "embedding" else "lora_{}.weight"
            for half in p.site.spec.factors:
                own = factors[p.site, half][entry_of(p.site.spec, p.entry)]
                array = taken(p.site.spec, half, own, p.first, p.count, p.rank)
                found[f"base_model.model.{p.module}.{key.format('AB'[half])}"] = array.copy()
        return found

    def publish(self, name: str, to: str | None = None, *, save_to: str | Path | None = None) -> int:
        """Make the trained weights of an adapter those that the manager serves.

        Args:
          name: the adapter.
          to: a new name, such as "sql@7", for weights that do not change again. None: the adapter's own, as
            `LoRAManager.update_adapter` with `tensors`. Slot and host cache get all weights of this step or, after an
            exception, keep those of the last one.
          save_to: a new folder for the adapter of that new name, from which the manager loads it again. So it may evict
            it from the host cache, which it never does with an adapter without files.

        Returns:
          The new version, 0 for a new name.

        Raises:
          LoRAUsageError: the adapter is not trained here, the manager's was replaced by one of other modules, ranks or
            scalings, the new name or `save_to` exists, or `save_to` is without `to`.
          LoRAError: `save_to` cannot be written; see also `LoRAManager.update_adapter` and `add_adapter`.
        """
        member = self._member(name)
        if to is None:
            if save_to is not None:
                raise LoRAUsageError("Trainer.publish: save_to is for a new name; give it with to=")
            try:
                return self._host.update(name, self.tensors(name), check=partial(_check_same, member.packed))
            except AdapterNotFoundError:  # it began here
                self._host.add(self.adapter(name))
                return 0
        adapter = replace(self.adapter(name), name=to)
        with contextlib.ExitStack() as undo:
            if save_to is not None:
                if not isinstance(save_to, str | Path):
                    raise LoRAUsageError(f"Trainer.publish: save_to must be a new folder, got {save_to!r:.200}")
                folder = Path(save_to).expanduser()
                try:
                    folder.mkdir(parents=True)
                    undo.callback(shutil.rmtree, folder, ignore_errors=True)
                    adapter.save_pretrained(folder)
                except FileExistsError:  # another adapter may be loaded from it again
                    raise LoRAUsageError(
                        f"Trainer.publish: save_to={str(save_to)!r} exists; expected a new folder"
                    ) from None
                except OSError as error:
                    raise LoRAError(f"Trainer.publish: save_to={str(save_to)!r}: {error}") from error
            if not self._host.add(adapter):
                raise LoRAUsageError(f"Trainer.publish: adapter {to!r} exists; expected a new name")
            undo.pop_all()
        if save_to is not None:
            self._host.set_request(adapter, LoRARequest(to, str(save_to)))
        return 0

    # --- Arrays -------------------------------------------------------------------------------------------------------

    @property
    def _on_mesh(self) -> bool:
        return isinstance(self._whole, Sharding)

    def _member(self, name: str) -> _Member:
        found = self._members.get(name) if isinstance(name, str) else None
        if found is None:
            trained = ", ".join(self._members) or "none"
            raise LoRAUsageError(f"adapter {name!r:.200} is not trained here; the trainer has {trained}")
        return found

    def _sites_of(self, count: int) -> tuple[ModelSites, dict[Site, Site]]:
        """Return the sites of a model whose slots are the members of a batch, and those by the manager's sites."""
        with self._lock:
            if count not in self._sites:
                wrapped, own = self._host.wrapped, dict[Site, Site]()

                def copied(site: Site) -> Site:
                    rank = site.spec.max_rank if self._max_rank is None else min(self._max_rank, site.spec.max_rank)
                    spec = replace(site.spec, num_slots=count, first_slot=0, max_rank=rank, finishers=())
                    spec = replace(spec, dtype=spec.float_dtype)
                    shared = tuple(copied(each) for each in site.shared)
                    own[site] = replace(site, spec=spec, stamped=False, head=None, shared=shared)
                    return own[site]

                sites = tuple(copied(site) for site in wrapped.sites.sites)
                config = replace(wrapped.sites.config, max_adapters_per_sequence=None)
                self._sites[count] = replace(wrapped.sites, config=config, sites=sites), own
            return self._sites[count]

    def _begun(self, factors: Tree, ranks: Tree) -> Tree:
        """Return the state of a member before its first step."""
        optimizer = self._optimizer(**{name: 0.0 for name in self._defaults}).init(factors)
        sums = jnp.zeros(2, jnp.float32)  # of losses and weights
        gradients = zeros(factors)
        return {"factors": factors, "gradients": gradients, "optimizer": optimizer, "sums": sums, "ranks": ranks}

    def _shardings(self) -> Tree:
        """Return the placement of each array of a member's state, that of a factor for all arrays of its shape."""
        places = {key: each.placement(self._whole) for key, each in self._factors.items()}

        def where(path: Any, leaf: jax.ShapeDtypeStruct) -> Any:
            key = getattr(path[-1], "key", "") if path else ""
            return places[key] if key in places and leaf.shape == self._factors[key].shape else self._whole

        return jax.tree_util.tree_map_with_path(where, self._struct)

    def _zeros(self) -> dict[str, np.ndarray]:
        return {key: np.zeros(each.shape, np.float32) for key, each in self._factors.items()}

    def _ranks_of(self, placements: Sequence[Placement]) -> dict[str, np.ndarray]:
        """Return for each output slice its true rank, its scale, and the slice that has its A; by sites."""
        found: dict[str, np.ndarray] = {}
        for key, site in self._ranks.items():
            found[key] = np.zeros((*site.spec.entries, site.spec.slices, 3), np.float32)
            found[key][..., 2] = np.arange(site.spec.slices)
        for p in placements:
            own = found[key_of(p.site, "ranks")][entry_of(p.site.spec, p.entry)]
            own[p.first : p.first + p.count] = p.rank if np.float32(p.scale) else 0, p.scale, p.first
        return found

    def _check_trainable(self, packed: PackedAdapter) -> None:
        tables = [p.module for p in packed.placements if p.site.kind == "embedding"]
        if tables and packed.about.peft_fields.get("ensure_weight_tying"):
            raise LoRAUsageError(
                f"adapter {packed.name!r}: ensure_weight_tying is True, for which PEFT trains one LoRA of {tables[0]} "
                "and of the output layer; here each is trained for itself. Set it to False in adapter_config.json"
            )
        for p in packed.placements:
            where = f"adapter {packed.name!r}: {p.module}"
            if p.site.kind == "head" or p.extras:
                title = ", ".join(variant.title for variant in described(p.extras)) or "a saved head"
                raise LoRAUsageError(f"{where} has {title}, and only A and B are trained")
            if key_of(p.site, "ranks") not in self._ranks:
                raise LoRAUsageError(f"{where} is not trained here; expected target_modules {self._targets!r}")
            if p.rank > (most := self._sites_of(1)[1][p.site].spec.max_rank):
                raise LoRAUsageError(f"{where} has rank {p.rank}; expected at most the trainer's max_rank {most}")

    def _checked_state(self, name: str, packed: PackedAdapter, state: Tree) -> Tree:
        """Return the state of a member at its place, so that no program is compiled again."""
        of = f"Trainer.state of adapter {name!r}"
        try:
            own, given = _by_path(self._struct), _by_path(state)
        except ValueError as error:  # keys of several types
            raise LoRAUsageError(f"{of} is no state of a trainer: {error}") from error
        for path in [*own, *given]:
            if path not in given or path not in own:
                have = "lacks" if path not in given else "has"
                raise LoRAUsageError(
                    f"{of} {have} {path}: it is of another optimizer or other layers, or was restored without the "
                    "structure of this trainer's state (orbax: StandardRestore(trainer.state))"
                )
            if (found := dtype_and_shape(given[path])) != (expected := dtype_and_shape(own[path])):
                raise LoRAUsageError(f"{of}{path} is {found}; expected {expected}")
        for key, expected in self._ranks_of(packed.placements).items():
            found = np.asarray(jax.device_get(state["ranks"][key]))
            for i in np.argwhere((found != expected).any(-1))[:1]:
                *entry, part = map(int, i)
                pairs = ["rank {:.0f} and scaling {:g}".format(*each[tuple(i)]) for each in (found, expected)]
                raise LoRAUsageError(
                    f"{of}: it was trained with other modules, ranks or scalings: {self._ranks[key].path}"
                    f"{entry or ''}, output slice {part}, has {pairs[0]}; expected {pairs[1]}"
                )
        where = jax.tree.leaves(self._where)
        leaves = [placed(given[path], leaf, to) for (path, leaf), to in zip(own.items(), where, strict=True)]
        return jax.tree.unflatten(cast("Any", jax.tree.structure(self._struct)), leaves)

    # --- Programs -----------------------------------------------------------------------------------------------------

    def _compiled(self, key: Any, function: Callable[..., Any], out: Any, *args: Any, donate: bool = False) -> Any:
        """Return the program of a function for arguments of these shapes, compiled at the first call of its key."""
        if key not in self._programs:
            options = {"out_shardings": out} if self._on_mesh else {}
            jitted = jax.jit(off_explicit(function, out), donate_argnums=0 if donate else (), **options)
            where = jax.default_device(None if self._on_mesh else cast("Any", self._whole))
            mesh = contextlib.nullcontext() if self._on_mesh else jax.set_mesh(_NO_MESH)
            dtypes, axes = jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow")  # Optax needs both
            structs = args if self._on_mesh else jax.tree.map(_struct, args)  # arrays of a context may have its mesh
            with where, mesh, jax.disable_jit(False), dtypes, axes:
                self._programs[key] = jitted.lower(*structs).compile(self._compiler_options)
        return self._programs[key]

    def _change(self, *changes: _Change) -> Any:
        """Replace the state by the first result of each program. Return the second one of the last.

        Errors of compilation and interrupts come before or after all of them.
        """
        programs = [
            (self._compiled(key, function, (self._stacked, out), self._state, *args, donate=True), args)
            for key, function, args, out in changes
        ]
        found: Any = None
        with sigint_deferred():
            for program, args in programs:
                self._state, found = program(self._state, *args)
        return found

    def _read(self, name: str, part: str | None = None, in_slot_dtype: bool = False) -> Any:
        """Return the state of a member, or a part of it, copied on the device."""
        with self._lock:
            index = put(np.int32(self._member(name).index), self._whole)
            state, where = (self._state, self._where) if part is None else (self._state[part], self._where[part])
            gather = self._gather_in_slot_dtype if in_slot_dtype else _gather
            return self._compiled(("read", part, in_slot_dtype), gather, where, state, index)(state, index)

    def _gather_in_slot_dtype(self, factors: Tree, members: Int[Array, "*m"]) -> Tree:
        found = _gather(factors, members)
        return {key: array.astype(self._factors[key].spec.dtype) for key, array in found.items()}

    def _write(self, index: int, member: Tree) -> None:
        self._change(("write", _written, (put(np.int32(index), self._whole), member), ()))

    def _accumulation(self, members: np.ndarray, gradients: Tree, sums: Tree) -> _Change:
        own = {"gradients": gradients, "sums": sums}
        if not self._on_mesh and sums.devices() != {self._whole}:  # inputs on a mesh
            own = jax.device_put(own, self._whole)
        return ("accumulate", len(members)), _accumulated, (put(members, self._whole), own), ()

    def _update(self, members: np.ndarray, names: Sequence[str], divide: bool, numbers: Mapping[str, Any]) -> _Change:
        if not isinstance(divide, bool):
            raise LoRAUsageError(
                f"Trainer: divide must be True or False, got {divide!r:.200}; give numbers of the optimizer by name"
            )
        if len(members) == 1:  # XLA copies the arrays of all members where it writes a single one
            members = np.append(members, np.int32(self.capacity))
        own = number_arrays(self._defaults, numbers, names, len(members), self._members.keys())
        args = jax.tree.map(partial(put, where=self._whole), (members, np.bool_(divide), own))
        return ("update", len(members)), self._updated, args, self._whole

    def _of_batch(
        self, call: str, batch: LoRABatch, inputs: tuple[Any, ...]
    ) -> tuple[list[str], np.ndarray, tuple[Any, ...]]:
        """Return the names and indices of a batch's members, and the arguments of its programs before the inputs."""
        lease = batch.lease if isinstance(batch, LoRABatch) else None
        if lease is None or lease.closed:
            raise LoRAUsageError(f"Trainer.{call} takes an open batch of Trainer.prepare, outside jax.jit")
        if all(sites is not batch.layout.sites for sites, _ in self._sites.values()):
            raise LoRAUsageError(f"Trainer.{call}: the batch is of a manager or of another trainer; use its prepare")
        for each in lease.adapters:
            if self._members.get(each.name) is not each:
                raise LoRAUsageError(f"Trainer.{call}: adapter {each.name!r} of the batch was removed from the trainer")
        if strange := [type(each).__name__ for each in jax.tree.leaves(inputs) if not is_array(each)]:
            raise LoRAUsageError(f"Trainer.{call}: the inputs must be arrays, got one {strange[0]}")
        names, count = [each.name for each in lease.adapters], min(len(lease.terms), self.capacity)
        indices = [cast("_Member", each).index for each in lease.adapters]
        members = np.array(indices + [self.capacity] * (count - len(indices)), np.int32)
        owners = np.array([names.index(terms[0][0]) if terms else count for terms in lease.terms], np.int32)
        factors, ranks = self._state["factors"], self._state["ranks"]
        return names, members, (self._host.wrapped.model, factors, ranks, batch, members, owners)

    def _losses_of(
        self,
        differentiates: bool,
        model: Any,
        factors: Tree,
        ranks: Tree,
        batch: LoRABatch,
        members: Any,
        owners: Any,
        *inputs: Any,
    ) -> Any:
        """Return the results of a batch, after the gradients of its members if they are wanted."""
        where = self._stacked["factors"], dict.fromkeys(ranks, self._whole)
        own, of_ranks = off_explicit(_gather, where)((factors, ranks), members)
        split = cast("tuple[Any, Any]", nnx.split(model))
        loss = partial(self._losses, split, ranks=of_ranks, batch=batch, owners=owners, inputs=inputs)
        return cast("Any", jax.grad(loss, has_aux=True)(own)) if differentiates else loss(own)[1]

    def _losses(
        self, split: tuple[Any, Any], factors: Tree, *, ranks: Tree, batch: LoRABatch, owners: Any, inputs: Any
    ) -> Any:
        """Return the sum of all losses, and the results of the step."""
        # Flax refuses variables of the outer trace inside `nnx.scan`. The copies are of this one.
        arrays, tree = cast("tuple[Any, Any]", jax.tree.flatten(split[1]))
        model = nnx.merge(split[0], jax.tree.unflatten(tree, arrays))
        count = min(len(owners), self.capacity)
        self._shadow(model, factors, ranks, count)
        losses, weights, aux = checked(self._loss(model, batch, *inputs), len(owners))

        def summed(values: Tree, owners: Array) -> Tree:
            def of_members(array: Array) -> Array:
                each = array.astype(jnp.float32).reshape(len(owners), -1).sum(axis=1)
                return jnp.zeros(count, jnp.float32).at[owners].add(each, mode="drop")

            return jax.tree.map(of_members, values)

        values = losses, jax.lax.stop_gradient(weights), jax.lax.stop_gradient(aux)
        total, weight, of_aux = off_explicit(summed, self._whole)(values, owners)
        mean = total / jnp.where(weight != 0, weight, 1)
        found = {"sums": jnp.stack([total, weight], axis=1), "rows": aux, "losses": tuple(mean)}
        found |= {"weights": tuple(weight), "aux": {key: tuple(array) for key, array in of_aux.items()}}
        return total.sum(), found

    def _shadow(self, model: nnx.Module, factors: Tree, ranks: Tree, count: int) -> None:
        """Replace the slots of a traced model by the factors of the members of a batch."""
        wrapped, (sites, own) = self._host.wrapped, self._sites_of(count)
        layers, paths = dict(walk(model)), wrapped.paths
        for site in wrapped.modules:
            layer = layers[paths[site]]
            set_attribute(layer, "jlora_sites", sites)
            if site not in own:
                detach(layer, site)  # a saved head
                continue
            spec, variables = own[site].spec, dict[str, Any]()
            if (of_ranks := ranks.get(key_of(site, "ranks"))) is not None:
                for name, array in spec.arrays.items():
                    if (factor := self._factors.get(key := key_of(site, name))) is not None:
                        made = off_explicit(factor.stored, array.sharding)(factors[key], of_ranks)
                    else:
                        moved = partial(jnp.moveaxis, source=0, destination=len(spec.stack))
                        made = off_explicit(moved, array.sharding)(of_ranks[..., :2])
                    attribute = f"{site.prefix}_{name}"
                    variables[attribute] = vars(layer)[attribute].replace(made)
            attach(layer, own[site], variables)

    def _updated(self, state: Tree, members: Any, divide: Any, numbers: Tree) -> Any:
        """Return the state after a step of some members, and the norm of the gradient of each."""

        def of_one(own: Tree, numbers: Tree) -> Any:
            masks = {key: each.own(own["ranks"][each.ranks]) for key, each in self._factors.items()}
            by = jnp.where(divide, own["sums"][1], 1)
            gradients = {key: jnp.where(masks[key], array / by, 0) for key, array in own["gradients"].items()}
            norm = global_norm(gradients)
            updates, optimizer = self._optimizer(**numbers).update(gradients, own["optimizer"], own["factors"])
            moves = jnp.isfinite(norm) & (by != 0)

            def moved(factor: Array, update: Array, mask: Array) -> Array:
                return jnp.where(moves & mask, factor + update.astype(factor.dtype), factor)

            factors = jax.tree.map(moved, own["factors"], updates, masks)
            optimizer = jax.tree.map(partial(jnp.where, moves), optimizer, own["optimizer"])
            zero = jnp.where(norm < 0, 1.0, 0.0)  # after the gradients, else XLA copies those of all members
            gradients = {key: jnp.full_like(each, zero) for key, each in gradients.items()}
            new = {"factors": factors, "gradients": gradients, "optimizer": optimizer, "sums": jnp.full(2, zero)}
            return new, jnp.where(by != 0, norm, jnp.nan)

        own = jax.lax.optimization_barrier(_gather(state, members))  # read once, before the first write
        new, norms = jax.vmap(of_one)(own, numbers)
        return _written(state, members, new, tuple(norms))


def _struct(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _fetched(packed: PackedAdapter, copies: Mapping[str, Array]) -> dict[tuple[Site, int], np.ndarray]:
    """Return the factors of a member on the host, read-only, with the A of each module in all of its slices."""
    arrays = cast("Mapping[str, np.ndarray]", jax.device_get(copies))
    found = {(p.site, half): arrays[key_of(p.site, "ab"[half])]
             for p in packed.placements for half in p.site.spec.factors}  # fmt: skip
    for p in packed.placements:
        if p.count > 1 and p.site.spec.in_features:
            if not found[p.site, A].flags.writeable:  # JAX's own
                found[p.site, A] = found[p.site, A].copy()
            own = found[p.site, A][entry_of(p.site.spec, p.entry)]
            own[p.first : p.first + p.count] = own[p.first]
    return found


def _gather(tree: Tree, members: Int[Array, "*m"]) -> Tree:
    def of_members(array: Array) -> Array:
        return array.at[members].get(mode="clip")

    return jax.tree.map(of_members, tree)


def _written(state: Tree, members: Int[Array, "*m"], new: Tree, found: Any = ()) -> Any:
    """Return the state with parts of that of some members replaced, and the results that follow it."""

    def written(array: Array, own: Array) -> Array:
        return array.at[members].set(own, mode="drop")

    return state | jax.tree.map(written, {key: state[key] for key in new}, new), found


def _accumulated(state: Tree, members: Int[Array, "m"], own: Tree) -> Any:
    def added(total: Array, each: Array) -> Array:
        return total.at[members].add(each, mode="drop")

    return state | jax.tree.map(added, {key: state[key] for key in own}, own), ()


def _check_same(own: PackedAdapter, packed: PackedAdapter) -> None:
    """Raise LoRAUsageError if a version of an adapter differs from the trained one in more than its values."""
    kinds = [(each.placements, each.extras.keys(), each.about.invocation_tokens) for each in (own, packed)]
    if kinds[0] != kinds[1]:
        raise LoRAUsageError(
            f"adapter {packed.name!r} was replaced by one of other modules, ranks, scalings or of another kind; remove "
            "it from the trainer and add it again, or publish under another name"
        )


def _by_path(tree: Tree) -> dict[str, Any]:
    """Return the leaves of a tree by their paths, such as "['a'][0].mu", in the order of the tree."""
    flat = cast("list[tuple[Any, Any]]", jax.tree_util.tree_flatten_with_path(tree)[0])
    return {jax.tree_util.keystr(path): leaf for path, leaf in flat}
