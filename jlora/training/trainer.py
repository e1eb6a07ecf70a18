"""Training of several adapters in one step, on copies of their factors that no slot write changes."""

import json
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeAlias, cast, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, Sharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, Real

from jlora._compat import raw_value, to_device
from jlora._interrupts import sigint_deferred
from jlora.adapters import Adapter
from jlora.adapters.variants import described
from jlora.errors import LoRAUsageError
from jlora.layers.forward.batch import LoRABatch
from jlora.layers.forward.mesh import off_explicit
from jlora.layers.site import Site, SlotParam, SlotSpec
from jlora.sharding.rules import names_of
from jlora.slots.arrays import SlotArrays
from jlora.slots.blocks import Entry
from jlora.slots.codec import is_reordered, place, taken, to_stored, with_rank
from jlora.slots.export import export_factors
from jlora.slots.packed import PackedAdapter, Placement
from jlora.slots.placement import ArrayPlacement, auto_axes, everywhere, placement_of, with_auto_axes

# (model, batch, *inputs) -> the sum of the losses of each sequence, and the number of tokens that it sums (or weights).
Loss: TypeAlias = Callable[..., tuple[Float[Array, "B"], Real[Array, "B"]]]
Optimizer: TypeAlias = Any  # optax.GradientTransformation
Tree: TypeAlias = Any


@dataclass(frozen=True, eq=False)
class _Factor:
    """One factor of a site, as trained: float32 [adapters, (layers,) (E,) n, R, K] or [adapters, (layers,) (E,) R, N].

    Features are in the adapter's order, without the padding and the copies that slots on a mesh have.
    """

    site: Site
    half: int  # 0: A, 1: B

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape without the axis of adapters."""
        spec = self.site.spec
        a, b = (spec.slices, spec.max_rank, spec.in_features), (spec.max_rank, spec.out_features)
        return *spec.entries, *(b if self.half else a)

    def placement(self, whole: ArrayPlacement) -> ArrayPlacement:
        """Return the sharding of the slots, without that of features in another order and of sizes that do not divide.

        Off meshes it is `whole`, the placement of arrays that every device holds.
        """
        spec, array = self.site.spec, self.site.spec.arrays["ab"[self.half]]
        sharding = array.sharding
        if sharding is None:
            return whole
        axes = [*sharding.spec, *(None,) * (len(array.shape) - len(sharding.spec))]
        del axes[len(spec.stack)]
        if is_reordered(spec, self.half):
            axes[-1] = None
        counts = [math.prod(sharding.mesh.shape[name] for name in names_of(entry)) for entry in axes]
        even = [None if size % n else entry for entry, n, size in zip(axes, counts, self.shape, strict=True)]
        return NamedSharding(sharding.mesh, P(None, *even))

    def put(self, slots: jax.Array, factor: jax.Array, slots_of: jax.Array) -> jax.Array:
        """Return the slot array with the factors of each adapter in its slot. A slot beyond the last drops them."""
        spec, axis = self.site.spec, len(self.site.spec.stack)

        def write(slots: jax.Array, factor: jax.Array, slots_of: jax.Array) -> jax.Array:
            factor = factor.astype(slots.dtype)
            factor = to_stored(factor if self.half else with_rank(factor, spec.stored_rank, jnp), spec, self.half, jnp)
            index = slots_of - spec.first_slot
            index = jnp.where((index >= 0) & (index < spec.num_slots), index, spec.num_slots)
            where = (*(slice(None),) * axis, index)
            return slots.at[where].set(jnp.moveaxis(factor, 0, axis), mode="drop")

        return off_explicit(write, jax.typeof(slots).sharding)(slots, factor, slots_of)


@runtime_checkable
class Loaded(Protocol):
    """A version of an adapter that the manager serves."""

    @property
    def packed(self) -> PackedAdapter: ...


@dataclass(frozen=True)
class TrainedModel:
    """The model and the manager whose adapters are trained.

    Attributes:
      model: the wrapped model.
      slot_arrays: its slots.
      prepare: `LoRAManager.prepare`.
      update: `LoRAManager.update_adapter`, with a `check` of the version that it replaces.
      jit: `LoRAManager.jit`.
      exact_factors: returns entry -> (A [n, r, K], B [r, N]) of a loaded adapter, as its files have them.
      is_open: returns True for the lease of an open batch of this manager.
    """

    model: nnx.Module
    slot_arrays: SlotArrays[Any]
    prepare: Callable[..., LoRABatch]
    update: Callable[..., int]
    jit: Callable[..., Callable[..., Any]]
    exact_factors: Callable[[Any], Mapping[Entry, tuple[np.ndarray, np.ndarray]]]
    is_open: Callable[[Any], bool]


class Trainer:
    """The trained factors of several adapters and the state of their optimizers, made by `LoRAManager.trainer`.

    The factors are float32 and the trainer's own: steps read the slots of other adapters only, and no load, eviction
    or repair of slots changes what is trained. The other way, slots and host cache keep the last published weights.

    Attributes:
      names: the adapters.
    """

    def __init__(
        self,
        host: TrainedModel,
        loss: Loss,
        optimizers: Mapping[str, Optimizer],
    ):
        self._host, self._loss = host, loss
        modules = host.slot_arrays.modules
        if any(site.spec.dtype == "int8" for site in modules):
            raise LoRAUsageError(
                "trainer: slots of int8 are constants of the gradients; train with a manager of another "
                "LoRAConfig.dtype, and give Trainer.tensors to update_adapter of this one"
            )
        if not isinstance(optimizers, Mapping) or not optimizers:
            raise LoRAUsageError(
                f"trainer takes adapter names -> optimizers, and at least one; got {optimizers!r:.200}"
            )
        if not callable(loss):
            raise LoRAUsageError(f"trainer: the loss must be a function (model, batch, *inputs), got {loss!r:.200}")
        names_of: dict[Any, list[str]] = {}
        for name, optimizer in optimizers.items():
            if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
                raise LoRAUsageError(
                    f"trainer: the optimizer of adapter {name!r} must have `init` and `update`, as optax.adamw(1e-3) "
                    f"has, got {optimizer!r:.200}"
                )
            names_of.setdefault(optimizer, []).append(name)
        # The label of an optimizer is the names, so that a state of other adapters, or in another order, does not fit.
        self._optimizers = {json.dumps(names): optimizer for optimizer, names in names_of.items()}
        self._members = {json.dumps(names): tuple(names) for names in names_of.values()}
        self.names = tuple(name for names in names_of.values() for name in names)
        loaded = {name: _trainable(name, host.prepare) for name in self.names}
        self._packed = {name: each.packed.with_blocks(()) for name, each in loaded.items()}
        self._factors = _factors_of(modules, host.model)
        self._keys = {(factor.site, factor.half): key for key, factor in self._factors.items()}
        self._whole = _whole(modules)
        self._placements = {key: factor.placement(self._whole) for key, factor in self._factors.items()}
        started = {label: self._begin([loaded[name] for name in names]) for label, names in self._members.items()}
        self._masks = {label: masks for label, (_, masks) in started.items()}
        self._state = {label: self._initial(label, factors) for label, (factors, _) in started.items()}
        # A step is two programs: gradients, and an update that donates the state. The first runs the loss, and is
        # compiled for each shape of a batch. SIGINT is deferred during the second, which is compiled here.
        of_labels = dict.fromkeys(self._members, self._placements)
        options = {"out_shardings": (of_labels, self._whole, self._whole)} if self._on_mesh else {}
        self._gradients = host.jit(self._differentiated, **options)
        self._advance = self._compiled()
        self._slices = jax.jit(self._sliced, static_argnums=0)

    @property
    def _on_mesh(self) -> bool:
        return isinstance(self._whole, Sharding)

    @property
    def state(self) -> dict[str, Any]:
        """Pytree of the factors and of the state of each optimizer, with the adapters on the first axis.

        Save it, for example with Orbax, and set it to continue, also on another mesh. A step donates its arrays. After
        an interrupt or an error of the loss it is the state before the step or the one after it.

        Raises:
          LoRAUsageError: a state that is set is of other adapters or optimizers, was trained with other modules, ranks
            or scalings, or has other shapes or dtypes. The message names the first difference.
        """
        return self._state

    @state.setter
    def state(self, new: Any) -> None:
        leaves, new_leaves = _by_path(self._state), _by_path(new)
        if missing := [path for path in leaves if path not in new_leaves]:
            others = [path for path in new_leaves if path not in leaves]
            raise LoRAUsageError(
                f"Trainer.state lacks {missing[0]}{f' and has {others[0]}' if others else ''}: it is of other adapters "
                "or optimizers, or was restored without the structure of this trainer's state "
                "(orbax: StandardRestore(trainer.state))"
            )
        if others := [path for path in new_leaves if path not in leaves]:
            raise LoRAUsageError(f"Trainer.state has {others[0]}: it is of other adapters or optimizers")
        for path, leaf in leaves.items():
            if (found := _described(new_leaves[path])) != (expected := _described(leaf)):
                raise LoRAUsageError(f"Trainer.state{path} is {found}; expected {expected}")
            if isinstance(new_leaves[path], jax.Array) and new_leaves[path].is_deleted():
                raise LoRAUsageError(
                    f"Trainer.state{path} was donated by a step; keep jax.device_get(trainer.state) to set it again"
                )
        for label, names in self._members.items():
            for name, ranks in zip(names, jax.device_get(new[label]["ranks"]), strict=True):
                if difference := _difference(self._host.slot_arrays.sites, ranks, self._packed[name].ranks):
                    raise LoRAUsageError(
                        f"Trainer.state: adapter {name!r} was trained with other modules, ranks or scalings: "
                        f"{difference}"
                    )
        moved = [_moved(new_leaves[path], leaf) for path, leaf in leaves.items()]
        self._state = jax.tree.unflatten(cast("Any", jax.tree.structure(self._state)), moved)

    def step(self, batch: LoRABatch, *inputs: Any) -> dict[str, jax.Array]:
        """Update the adapters of a batch by one step of their optimizers. Others do not change.

        The loss of an adapter is the sum over its sequences, divided by their weights. Sequences of the base model and
        of adapters that are not trained count for none. One shape of batch and inputs is compiled once.

        Args:
          batch: an open batch of the manager, with at most one adapter for each sequence.
          *inputs: arrays, passed to the loss.

        Returns:
          Name -> loss before the step, a float32 scalar on the device, for each trained adapter of the batch.

        Raises:
          LoRAUsageError: the batch is closed or of another manager, a sequence has several adapters, the batch has two
            versions of a trained adapter, an adapter was replaced by one of other modules, ranks or scalings, or the
            loss does not return one floating value and one weight for each sequence.
        """
        lease = batch.lease if isinstance(batch, LoRABatch) else None
        if lease is None or lease.closed:
            raise LoRAUsageError("Trainer.step takes an open batch of its manager, outside jax.jit")
        if not self._host.is_open(lease):
            raise LoRAUsageError("Trainer.step: the batch is of another manager; prepare it with the trainer's own")
        if any(len(terms) > 1 for terms in lease.terms):
            raise LoRAUsageError("Trainer.step: a sequence has several adapters; train each on sequences of its own")
        slots: dict[str, int] = {}
        for adapter in cast("tuple[Loaded, ...]", lease.adapters):
            packed = adapter.packed
            if packed.name not in self._packed:
                continue
            self._check_same(packed)
            slot = self._host.slot_arrays.slot_of(adapter)
            if slot is None or packed.name in slots:
                raise LoRAUsageError(f"adapter {packed.name!r}: the batch has two versions of it")
            slots[packed.name] = slot
        slots_of = {
            label: np.array([slots.get(name, np.iinfo(np.int32).max) for name in names], np.int32)
            for label, names in self._members.items()
        }
        order = {name: i for i, name in enumerate(self.names)}
        owners = np.array(
            [order.get(terms[0][0], len(order)) if terms else len(order) for terms in lease.terms], np.int32
        )
        factors = {label: own["factors"] for label, own in self._state.items()}
        gradients, losses, active = self._gradients(self._host.model, factors, batch, slots_of, owners, *inputs)
        if not self._on_mesh and next(iter(active.values())).devices() != {self._whole}:  # inputs on a mesh
            gradients, active = jax.device_put((gradients, active), self._whole)
        with sigint_deferred():
            self._state = self._advance(self._state, gradients, self._masks, active)
        return {name: losses[name] for name in self.names if name in slots}

    def _check_same(self, packed: PackedAdapter) -> None:
        """Raise LoRAUsageError if a version of an adapter differs from that of the trainer in more than its values."""
        if _kind(packed) != _kind(self._packed[packed.name]):
            raise LoRAUsageError(
                f"adapter {packed.name!r} was replaced by one of other modules, ranks, scalings or of another kind; "
                "make a new trainer"
            )

    def tensors(self, name: str) -> dict[str, jax.Array]:
        """Return PEFT's state dict of a trained adapter: tensor name -> float32 A [r, K] or B [N, r], on the device."""
        label = self._label(name)
        index = self._members[label].index(name)
        factors = jax.tree.map(with_auto_axes, self._state[label]["factors"])
        with auto_axes():
            return cast("Tree", self._slices(self._packed[name].placements, factors, index))

    def publish(self, *names: str) -> dict[str, int]:
        """Make the trained weights of adapters (none named: all) those that the manager serves, without a file.

        This is `LoRAManager.update_adapter` with `tensors`, one adapter at a time: its slot and the host cache get all
        weights of this step or, after an exception, keep those of the last one.

        Returns:
          Name -> new version.

        Raises:
          LoRAUsageError: an adapter is not trained here, or was replaced by one of other modules, ranks or scalings.
          LoRAError: see `LoRAManager.update_adapter`.
        """
        for name in names:
            self._label(name)
        return {
            name: self._host.update(name, self.tensors(name), check=self._check_same) for name in names or self.names
        }

    def adapter(self, name: str) -> Adapter:
        """Return a trained adapter on the host in float32, for example to save it as a PEFT folder."""
        label = self._label(name)
        index, factors = self._members[label].index(name), self._state[label]["factors"]

        def factors_of(site: Site) -> Callable[[int], list[np.ndarray]]:
            arrays = [with_auto_axes(factors[self._keys[site, j]]) for j in site.spec.factors]
            with auto_axes():
                halves = [jax.device_get(array[index]) for array in arrays]
            return lambda entry: [half[_entry(site.spec, entry)] for half in halves]

        return export_factors(self._packed[name], {factor.site: None for factor in self._factors.values()}, factors_of)

    def _label(self, name: str) -> str:
        for label, names in self._members.items():
            if name in names:
                return label
        raise LoRAUsageError(f"adapter {name!r} is not trained here; the trainer has {', '.join(self.names)}")

    def _begin(self, adapters: Sequence[Loaded]) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        """Return the factors of the adapters of one label, and masks of the values that they have."""
        values = {key: np.zeros((len(adapters), *each.shape), np.float32) for key, each in self._factors.items()}
        masks = {key: np.zeros(array.shape, bool) for key, array in values.items()}
        for i, adapter in enumerate(adapters):
            unpacked = self._host.exact_factors(adapter)
            for p in adapter.packed.placements:
                for j in p.site.spec.factors:
                    key, own = self._keys[p.site, j], place(p.site.spec, j, p.first, p.count, p.rank)
                    where = (i, *_entry(p.site.spec, p.entry), *own)
                    values[key][where] = unpacked[p.site, p.entry][j][own].astype(np.float32)
                    masks[key][where] = True

        def put(arrays: dict[str, np.ndarray]) -> dict[str, jax.Array]:
            return {key: _put(array, self._placements[key]) for key, array in arrays.items()}

        return put(values), put(masks)

    def _initial(self, label: str, factors: dict[str, jax.Array]) -> dict[str, Any]:
        """Return the state of a label, with the adapters on the first axis, and the optimizer's sharded as the factors.

        The ranks and scalings are those of `PackedAdapter.ranks`. They are constants, for comparison with other states.
        """
        init = jax.vmap(self._optimizers[label].init)

        def where(path: Any, leaf: jax.ShapeDtypeStruct) -> Any:
            key = getattr(path[-1], "key", "") if path else ""
            same = key in factors and factors[key].shape == leaf.shape
            return self._placements[key] if same else self._whole

        shardings: Tree = jax.tree_util.tree_map_with_path(where, jax.eval_shape(init, factors))
        made = jax.jit(off_explicit(init, shardings), **({"out_shardings": shardings} if self._on_mesh else {}))
        ranks = np.stack([self._packed[name].ranks for name in self._members[label]])
        return {"factors": factors, "optimizer": made(factors), "ranks": _put(ranks, self._whole)}

    def _compiled(self) -> Callable[..., Any]:
        """Return the compiled update: (state, gradients, masks, active) -> state."""

        def struct(array: jax.Array) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding if self._on_mesh else None)

        def updated(state: Tree, gradients: Tree, masks: Tree, active: Tree) -> Tree:
            return {
                label: jax.vmap(partial(_updated, optimizer))(
                    state[label], gradients[label], masks[label], active[label]
                )
                for label, optimizer in self._optimizers.items()
            }

        state, masks = jax.tree.map(struct, (self._state, self._masks))
        gradients = {label: own["factors"] for label, own in state.items()}
        active = {label: np.zeros(len(names), bool) for label, names in self._members.items()}
        active = jax.tree.map(struct, jax.tree.map(partial(_put, where=self._whole), active))
        shardings = jax.tree.map(operator.attrgetter("sharding"), state)
        jitted = jax.jit(
            off_explicit(updated, shardings),
            donate_argnums=0,
            **({"out_shardings": shardings} if self._on_mesh else {}),
        )
        where = jax.default_device(None if self._on_mesh else cast("Any", self._whole))
        dtypes, axes = jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow")  # Optax needs both
        with where, jax.disable_jit(False), dtypes, axes:
            return jitted.lower(state, gradients, masks, active).compile()

    def _differentiated(
        self, model: Any, factors: Any, batch: LoRABatch, slots_of: Any, owners: Int[Array, "B"], *inputs: Any
    ) -> Any:
        """Return the gradients of all factors, the loss of each adapter, and whether it has a loss, by label."""
        graphdef, slots, rest = cast("Any", nnx.split(model, lambda path, _: _key(path) in self._factors, ...))

        def means(
            losses: Float[Array, "B"], weights: Real[Array, "B"], owners: Int[Array, "B"]
        ) -> tuple[Float[Array, "adapters"], Bool[Array, "adapters"]]:
            zeros = jnp.zeros(len(self.names), jnp.float32)
            weight = zeros.at[owners].add(jax.lax.stop_gradient(weights).astype(jnp.float32), mode="drop")
            summed = zeros.at[owners].add(losses.astype(jnp.float32), mode="drop")
            return jnp.where(weight > 0, summed / jnp.where(weight > 0, weight, 1), 0), weight > 0

        def total(factors: Any) -> Any:
            written: list[Any] = []
            for path, variable in cast("Any", nnx.to_flat_state(slots)):
                key, array = _key(path), raw_value(variable)
                for label in factors:
                    array = self._factors[key].put(array, factors[label][key], slots_of[label])
                written.append((path, variable.replace(array)))
            # Flax refuses variables of the outer trace inside `nnx.scan`. The copies are of this one.
            arrays, tree = cast("Any", jax.tree.flatten((nnx.from_flat_state(written), rest)))
            own = jax.tree.unflatten(tree, arrays)
            found = _checked(self._loss(nnx.merge(graphdef, *own), batch, *inputs), len(owners))
            mean, active = off_explicit(means, (self._whole, self._whole))(*found, owners)
            return mean.sum(), (mean, active)

        (_, (losses, active)), gradients = jax.value_and_grad(total, has_aux=True)(factors)
        of_labels: dict[str, Any] = {}
        start = 0
        for label, names in self._members.items():  # JAX sorts the keys of `factors`
            of_labels[label] = active[start : start + len(names)]
            start += len(names)
        return gradients, dict(zip(self.names, losses, strict=True)), of_labels

    def _sliced(self, placements: tuple[Placement, ...], factors: dict[str, jax.Array], index: jax.Array) -> Any:
        found: dict[str, jax.Array] = {}
        for p in placements:
            name = "lora_embedding_{}" if p.site.kind == "embedding" else "lora_{}.weight"
            for j in p.site.spec.factors:
                own = factors[self._keys[p.site, j]][index][_entry(p.site.spec, p.entry)]
                array = taken(p.site.spec, j, own, p.first, p.count, p.rank)
                found[f"base_model.model.{p.module}.{name.format('AB'[j])}"] = array
        return found


def _checked(found: Any, count: int) -> tuple[jax.Array, jax.Array]:
    """Return the losses and weights that a loss returned, one of each for each of `count` sequences."""
    if not isinstance(found, tuple | list) or len(pair := cast("tuple[Any, ...]", found)) != 2:
        name = type(cast("Any", found)).__name__
        raise LoRAUsageError(f"Trainer: the loss returned one {name}; expected the pair (losses [B], weights [B])")
    losses, weights = (cast("Any", jnp.asarray)(each) for each in pair)
    kinds = jnp.issubdtype(losses.dtype, jnp.floating), jnp.issubdtype(weights.dtype, jnp.number)
    if (losses.shape, weights.shape) != ((count,), (count,)) or not all(kinds):
        raise LoRAUsageError(
            f"Trainer: the loss returned losses {_described(losses)} and weights {_described(weights)}; expected "
            f"floating losses [{count}] and weights [{count}]: the sum of each sequence, and the number of its tokens"
        )
    return losses, weights


def _updated(optimizer: Optimizer, own: Tree, gradients: Tree, masks: Tree, active: Tree) -> Tree:
    """Return the state of one adapter after a step, unchanged if it is not active."""
    updates, state = optimizer.update(gradients, own["optimizer"], own["factors"])

    def added(factor: jax.Array, update: jax.Array, mask: jax.Array) -> jax.Array:
        return jnp.where(mask, factor + update.astype(factor.dtype), factor)

    def chosen(after: jax.Array, before: jax.Array) -> jax.Array:
        return jnp.where(active, after, before)

    factors = jax.tree.map(added, own["factors"], updates, masks)
    return jax.tree.map(chosen, {**own, "factors": factors, "optimizer": state}, own)


def _kind(packed: PackedAdapter) -> Any:
    """Return all that training needs to know of an adapter beside its values."""
    return packed.placements, packed.extras.keys(), packed.about.invocation_tokens


def _by_path(tree: Tree) -> dict[str, Any]:
    """Return the leaves of a tree by their paths, such as "['a'][0].mu", in the order of the tree."""
    flat = cast("list[tuple[Any, Any]]", jax.tree_util.tree_flatten_with_path(tree)[0])
    return {jax.tree_util.keystr(path): leaf for path, leaf in flat}


def _described(leaf: Any) -> str:
    """Return the dtype and shape of an array, as JAX holds it."""
    return f"{jnp.result_type(leaf)}{list(np.shape(leaf))}"


def _difference(sites: Sequence[Site], found: np.ndarray, expected: np.ndarray) -> str | None:
    """Return the first difference between two vectors of ranks and scalings (`rank_values`), or None."""
    start = 0
    for site in sites:
        shape = site.spec.arrays["ranks"].slot_shape
        stop = start + math.prod(shape)
        pairs = [values[start:stop].reshape(-1, 2) for values in (found, expected)]
        for i in np.flatnonzero((pairs[0] != pairs[1]).any(axis=1)):
            *entry, part = map(int, np.unravel_index(i, shape[:-1]))
            has, wanted = (f"rank {rank:.0f} and scaling {scaling:g}" for rank, scaling in (pair[i] for pair in pairs))
            return f"{site.path}{entry or ''}, output slice {part}, has {has}; expected {wanted}"
        start = stop
    return None


def _put(array: np.ndarray, where: ArrayPlacement) -> jax.Array:
    return jax.device_put(array, where) if isinstance(where, Sharding) else to_device(array, where)


def _moved(array: Any, like: jax.Array) -> jax.Array:
    """Return an array in the dtype and at the placement of another, so that no program is compiled again."""
    where = placement_of(like)
    if isinstance(array, jax.Array):
        if placement_of(array) == where:
            return array
        if isinstance(where, Sharding):
            return jax.device_put(array, where)
    return _put(np.asarray(jax.device_get(array), like.dtype), where)


def _trainable(name: str, prepare: Callable[..., LoRABatch]) -> Loaded:
    """Return the newest version of an adapter, loaded if necessary.

    Raises:
      LoRAUsageError: it has arrays beside A and B, or one A for several output slices of a layer.
    """
    with prepare([name]) as batch:
        assert batch.lease is not None
        adapter = cast("Loaded", batch.lease.adapters[0])
    for p in adapter.packed.placements:
        if p.site.kind == "head" or p.extras:
            title = ", ".join(variant.title for variant in described(p.extras)) or "a saved head"
            raise LoRAUsageError(f"adapter {name!r}: {p.module} has {title}, and only A and B are trained")
        if p.count > 1 and p.site.spec.in_features:
            raise LoRAUsageError(
                f"adapter {name!r}: {p.module} is one factor A for {p.count} slices of {p.site.path!r}, which would "
                "become different; train with one module for each slice"
            )
    return adapter


def _whole(modules: Mapping[Site, nnx.Module]) -> ArrayPlacement:
    """Return the placement of arrays that every device of the model holds."""
    arrays = [(site, raw_value(vars(layer)[site.attributes[0]])) for site, layer in modules.items()]
    found = next((array for site, array in arrays if site.spec.sharding is not None), arrays[0][1])
    where, mesh = everywhere(placement_of(found)), jax.sharding.get_mesh()
    # JAX moves arrays that are not committed to the mesh of the context.
    return where if isinstance(where, Sharding) or mesh.empty else NamedSharding(mesh, P())


def _factors_of(modules: Mapping[Site, nnx.Module], model: nnx.Module) -> dict[str, _Factor]:
    """Return the factors of all sites by the paths of their slot arrays in the model."""
    known = {
        id(raw_value(vars(layer)[name])): _Factor(site, half)
        for site, layer in modules.items()
        if site.kind != "head"
        for name, half in zip(site.attributes, site.spec.factors, strict=False)
    }
    flat: list[Any] = [*nnx.to_flat_state(nnx.state(model, SlotParam))]
    found = {_key(path): known.get(id(raw_value(variable))) for path, variable in flat}
    return {key: factor for key, factor in found.items() if factor is not None}


def _key(path: Any) -> str:
    return ".".join(map(str, path))


def _entry(spec: SlotSpec, entry: int) -> tuple[int, ...]:
    return tuple(map(int, np.unravel_index(entry, spec.entries))) if spec.entries else ()
