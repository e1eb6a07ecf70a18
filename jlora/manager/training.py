"""Training of several adapters in one step, on copies of their factors that no slot write changes."""

import json
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jlora._compat import raw_value
from jlora.adapters import Adapter
from jlora.adapters.extras import EXTRAS
from jlora.errors import LoRAUsageError
from jlora.layers.forward.batch import LoRABatch
from jlora.layers.site import Site, SlotParam, SlotSpec
from jlora.manager.blocks import unpack
from jlora.manager.export import export_factors
from jlora.manager.new_weights import stored
from jlora.manager.packed_adapter import LifeCycle, PackedAdapter, Placement

# (model, batch, *inputs) -> the sum of the losses of each sequence, and the number of tokens that it sums (or weights).
Loss: TypeAlias = Callable[..., tuple[Float[Array, "B"], Float[Array, "B"]]]
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
        return *spec.rows, *(b if self.half else a)

    @property
    def sharding(self) -> NamedSharding | None:
        """The sharding of the slots, without that of features in another order; None off meshes."""
        spec, found = self.site.spec, self.site.spec.shardings[self.half]
        if found is None:
            return None
        axes = [*found.spec, *(None,) * (len(spec.shapes[self.half]) - len(found.spec))]
        del axes[len(spec.stack)]
        if any((spec.in_blocks, spec.out_blocks)[self.half]):
            axes[-1] = None
        return NamedSharding(found.mesh, P(None, *axes))

    def put(self, slots: jax.Array, factor: jax.Array, slots_of: jax.Array) -> jax.Array:
        """Return the slot array with the factors of each adapter in its slot. A slot beyond the last drops them."""
        spec, axis = self.site.spec, len(self.site.spec.stack)
        if not self.half:
            more = [(0, 0)] * (factor.ndim - 2) + [(0, spec.stored_rank - spec.max_rank), (0, 0)]
            factor = jnp.pad(factor, more)
        factor = stored(factor.astype(slots.dtype), (spec.in_blocks, spec.out_blocks)[self.half])
        own = slots_of - spec.first_slot
        own = jnp.where((own >= 0) & (own < spec.num_slots), own, spec.num_slots)
        where = (*(slice(None),) * axis, own)
        return slots.at[where].set(jnp.moveaxis(factor, 0, axis), mode="drop")


class Trainer:
    """The trained factors of several adapters and the state of their optimizers, made by `LoRAManager.trainer`.

    The factors are float32 and the trainer's own: steps read the slots of other adapters only, and no load, eviction
    or repair of slots changes what is trained. The other way, slots and host cache keep the last published weights.

    Attributes:
      names: the adapters.
      state: pytree of the factors and of the state of each optimizer, with the adapters on the first axis. Save it, for
        example with Orbax, and set it to continue. A step donates its arrays.
    """

    def __init__(
        self,
        modules: Mapping[Site, nnx.Module],
        model: nnx.Module,
        slot_of: Callable[[PackedAdapter], int | None],
        prepare: Callable[..., LoRABatch],
        update: Callable[[str, Mapping[str, Any]], int],
        jit: Callable[..., Callable[..., Any]],
        loss: Loss,
        optimizers: Mapping[str, Optimizer],
    ):
        self._slot_of, self._update, self._loss = slot_of, update, loss
        if any(site.spec.dtype == "int8" for site in modules):
            raise LoRAUsageError(
                "trainer: slots of int8 are constants of the gradients; train with a manager of another "
                "LoRAConfig.dtype, and give Trainer.tensors to update_adapter of this one"
            )
        names_of: dict[Any, list[str]] = {}
        for name, optimizer in optimizers.items():
            names_of.setdefault(optimizer, []).append(name)
        if not names_of:
            raise LoRAUsageError("trainer takes adapter names -> optimizers, and at least one")
        # The label of an optimizer is the names, so that a state of other adapters, or in another order, does not fit.
        self._optimizers = {json.dumps(names): optimizer for optimizer, names in names_of.items()}
        self._members = {json.dumps(names): tuple(names) for names in names_of.values()}
        self.names = tuple(name for names in names_of.values() for name in names)
        self._packed = {name: _trainable(name, prepare) for name in self.names}
        self._factors = _factors_of(modules, model)
        self._keys = {(factor.site, factor.half): key for key, factor in self._factors.items()}
        started = {label: self._begin(names) for label, names in self._members.items()}
        self._masks = {label: masks for label, (_, masks) in started.items()}
        self.state: dict[str, Any] = {
            label: {"factors": factors, "optimizer": self._initial(label, factors)}
            for label, (factors, _) in started.items()
        }
        self._packed = {name: replace(packed, life=LifeCycle(())) for name, packed in self._packed.items()}
        options: dict[str, Any] = {"donate_argnames": "state"}
        if any(factor.sharding for factor in self._factors.values()):  # so that a step returns what it takes
            options["out_shardings"] = (jax.tree.map(operator.attrgetter("sharding"), self.state), None)
        self._jitted = jit(self._advance, **options)
        self._model = model
        self._slices = jax.jit(self._sliced, static_argnums=0)

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
          LoRAUsageError: the batch is closed, a sequence has several adapters, the batch has two versions of a trained
            adapter, or an adapter was replaced by one of other modules or ranks.
        """
        lease = batch.lease
        if lease is None or lease.closed:
            raise LoRAUsageError("Trainer.step takes an open batch of its manager, outside jax.jit")
        if any(len(terms) > 1 for terms in lease.terms):
            raise LoRAUsageError("Trainer.step: a sequence has several adapters; train each on sequences of its own")
        slots: dict[str, int] = {}
        for packed in cast("tuple[PackedAdapter, ...]", lease.adapters):
            if (known := self._packed.get(packed.name)) is None:
                continue
            if packed.placements != known.placements:
                raise LoRAUsageError(
                    f"adapter {packed.name!r} was replaced by one of other modules or ranks; make a new trainer"
                )
            slot = self._slot_of(packed)
            if slot is None or packed.name in slots:
                raise LoRAUsageError(
                    f"adapter {packed.name!r}: the batch has two versions of it, or is of another manager"
                )
            slots[packed.name] = slot
        slots_of = {
            label: np.array([slots.get(name, np.iinfo(np.int32).max) for name in names], np.int32)
            for label, names in self._members.items()
        }
        order = {name: i for i, name in enumerate(self.names)}
        owners = np.array(
            [order.get(terms[0][0], len(order)) if terms else len(order) for terms in lease.terms], np.int32
        )
        self.state, losses = self._jitted(self._model, self.state, batch, slots_of, owners, self._masks, *inputs)
        return {name: losses[name] for name in self.names if name in slots}

    def tensors(self, name: str) -> dict[str, jax.Array]:
        """Return PEFT's state dict of a trained adapter: tensor name -> float32 A [r, K] or B [N, r], on the device."""
        label = self._label(name)
        index = self._members[label].index(name)
        return cast("Tree", self._slices(self._packed[name].placements, self.state[label]["factors"], index))

    def publish(self, *names: str) -> dict[str, int]:
        """Make the trained weights of adapters (none named: all) those that the manager serves, without a file.

        This is `LoRAManager.update_adapter` with `tensors`, one adapter at a time: its slot and the host cache get all
        weights of this step or, after an exception, keep those of the last one.

        Returns:
          Name -> new version.

        Raises:
          LoRAError: see `LoRAManager.update_adapter`.
        """
        return {name: self._update(name, self.tensors(name)) for name in names or self.names}

    def adapter(self, name: str) -> Adapter:
        """Return a trained adapter on the host in float32, for example to save it as a PEFT folder."""
        label = self._label(name)
        index, factors = self._members[label].index(name), self.state[label]["factors"]

        def factors_of(site: Site) -> Callable[[int], list[np.ndarray]]:
            halves = [jax.device_get(factors[self._keys[site, j]][index]) for j in site.spec.factors]
            return lambda row: [half[_row(site.spec, row)] for half in halves]

        return export_factors(self._packed[name], {factor.site: None for factor in self._factors.values()}, factors_of)

    def _label(self, name: str) -> str:
        for label, names in self._members.items():
            if name in names:
                return label
        raise LoRAUsageError(f"adapter {name!r} is not trained here; the trainer has {', '.join(self.names)}")

    def _begin(self, names: tuple[str, ...]) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        """Return the factors of adapters on the host as arrays of one label, and masks of the values that they have."""
        values = {key: np.zeros((len(names), *each.shape), np.float32) for key, each in self._factors.items()}
        masks = {key: np.zeros(array.shape, bool) for key, array in values.items()}
        for i, name in enumerate(names):
            packed = self._packed[name]
            unpacked = unpack(packed.blocks, {(p.site, p.row) for p in packed.placements})
            for p in packed.placements:
                for j in p.site.spec.factors:
                    key, own = self._keys[p.site, j], _where(p, j)
                    where = (i, *_row(p.site.spec, p.row), *own)
                    values[key][where] = unpacked[p.site, p.row][j][own].astype(np.float32)
                    masks[key][where] = True
        put = {key: jax.device_put(array, self._factors[key].sharding) for key, array in values.items()}
        return put, {key: jnp.asarray(mask) for key, mask in masks.items()}

    def _initial(self, label: str, factors: dict[str, jax.Array]) -> Tree:
        """Return the state of the optimizer of a label, with the adapters on the first axis, sharded as the factors."""
        init = jax.vmap(self._optimizers[label].init)
        mesh = next((each.sharding.mesh for each in self._factors.values() if each.sharding is not None), None)
        if mesh is None:
            return cast("Tree", jax.jit(init)(factors))

        def where(path: Any, leaf: jax.ShapeDtypeStruct) -> Any:
            like = factors.get(getattr(path[-1], "key", "")) if path else None
            return NamedSharding(mesh, P()) if like is None or like.shape != leaf.shape else like.sharding

        shardings: Tree = jax.tree_util.tree_map_with_path(where, jax.eval_shape(init, factors))
        return cast("Tree", jax.jit(init, out_shardings=shardings)(factors))

    def _advance(
        self, model: Any, state: Any, batch: LoRABatch, slots_of: Any, owners: Int[Array, "B"], masks: Any, *inputs: Any
    ) -> Any:
        """Return the state after a step, and the loss of each adapter."""
        graphdef, slots, rest = cast("Any", nnx.split(model, lambda path, _: _key(path) in self._factors, ...))
        count = len(self.names)

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
            losses, weights = self._loss(nnx.merge(graphdef, *own), batch, *inputs)
            zeros = jnp.zeros(count, jnp.float32)
            weight = zeros.at[owners].add(jax.lax.stop_gradient(weights).astype(jnp.float32), mode="drop")
            summed = zeros.at[owners].add(losses.astype(jnp.float32), mode="drop")
            mean = jnp.where(weight > 0, summed / jnp.where(weight > 0, weight, 1), 0)
            return mean.sum(), (mean, weight > 0)

        trained = {label: own["factors"] for label, own in state.items()}
        (_, (losses, active)), gradients = jax.value_and_grad(total, has_aux=True)(trained)
        new: dict[str, Any] = {}
        start = 0
        for label, names in self._members.items():  # JAX sorts the keys of `state`
            move = jax.vmap(partial(_moved, self._optimizers[label]))
            new[label] = move(state[label], gradients[label], masks[label], active[start : start + len(names)])
            start += len(names)
        return new, dict(zip(self.names, losses, strict=True))

    def _sliced(self, placements: tuple[Placement, ...], factors: dict[str, jax.Array], index: jax.Array) -> Any:
        found: dict[str, jax.Array] = {}
        for p in placements:
            name = "lora_embedding_{}" if p.site.kind == "embedding" else "lora_{}.weight"
            for j in p.site.spec.factors:
                array = factors[self._keys[p.site, j]][index][(*_row(p.site.spec, p.row), *_where(p, j))]
                found[f"base_model.model.{p.module}.{name.format('AB'[j])}"] = array.T if j else array[0]
        return found


def _moved(optimizer: Optimizer, own: Tree, gradients: Tree, masks: Tree, active: jax.Array) -> Tree:
    """Return the factors and the optimizer state of one adapter after a step, unchanged if it is not active."""
    updates, state = optimizer.update(gradients, own["optimizer"], own["factors"])

    def added(factor: jax.Array, update: jax.Array, mask: jax.Array) -> jax.Array:
        return jnp.where(mask, factor + update.astype(factor.dtype), factor)

    def chosen(after: jax.Array, before: jax.Array) -> jax.Array:
        return jnp.where(active, after, before)

    factors = jax.tree.map(added, own["factors"], updates, masks)
    return jax.tree.map(chosen, {"factors": factors, "optimizer": state}, own)


def _trainable(name: str, prepare: Callable[..., LoRABatch]) -> PackedAdapter:
    """Return the newest version of an adapter, loaded if necessary.

    Raises:
      LoRAUsageError: it has arrays beside A and B, or one A for several output slices of a layer.
    """
    with prepare([name]) as batch:
        assert batch.lease is not None
        packed = cast("PackedAdapter", batch.lease.adapters[0])
    for p in packed.placements:
        if p.site.kind == "head" or p.extras:
            title = ", ".join(extra.title for extra in EXTRAS if extra.name in p.extras) or "a saved head"
            raise LoRAUsageError(f"adapter {name!r}: {p.module} has {title}, and only A and B are trained")
        if p.count > 1 and p.site.spec.in_features:
            raise LoRAUsageError(
                f"adapter {name!r}: {p.module} is one factor A for {p.count} slices of {p.site.path!r}, which would "
                "become different; train with one module for each slice"
            )
    return packed


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


def _row(spec: SlotSpec, row: int) -> tuple[int, ...]:
    return tuple(map(int, np.unravel_index(row, spec.rows))) if spec.rows else ()


def _where(p: Placement, half: int) -> tuple[slice, ...]:
    """Return the indices of a module in A [n, R, K] or B [R, N] of its row."""
    if half:
        return slice(p.rank), p.site.spec.columns(p.first, p.count)
    return slice(p.first, p.first + p.count), slice(p.rank)
