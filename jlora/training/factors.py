"""Factors of the adapters of a trainer: their arrays, placements, and the slot arrays made of them."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, Sharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from jlora._compat import raw_value, to_device
from jlora.layers.site import Site, SlotSpec
from jlora.layers.wrap.wrapped import WrappedModel
from jlora.sharding.rules import names_of
from jlora.slots.codec import A, is_reordered, to_stored, with_rank
from jlora.slots.placement import ArrayPlacement, everywhere, placement_of


@dataclass(frozen=True, eq=False)
class Factor:
    """A factor of a site: float32 [(layers,) (E,) n, R, K] or [(layers,) (E,) R, N] for each member.

    Features are in the adapter's order, without the padding and the copies that slots on a mesh have.
    """

    ranks: str  # key of the ranks of its site
    spec: SlotSpec
    half: int

    @property
    def shape(self) -> tuple[int, ...]:
        spec = self.spec
        a, b = (spec.slices, spec.max_rank, spec.in_features), (spec.max_rank, spec.out_features)
        return *spec.entries, *(b if self.half else a)

    def placement(self, whole: ArrayPlacement) -> ArrayPlacement:
        """Return the sharding of the slots, without that of features in another order and of sizes that do not divide.

        Off meshes it is `whole`, the placement of arrays that every device holds.
        """
        spec = self.spec
        sharding = spec.arrays["ab"[self.half]].sharding
        if sharding is None:
            return whole
        axes = [*sharding.spec, *(None,) * (len(self.shape) + 1 - len(sharding.spec))]
        del axes[len(spec.stack)]
        if is_reordered(spec, self.half):
            axes[-1] = None
        counts = [math.prod(sharding.mesh.shape[name] for name in names_of(entry)) for entry in axes]
        return NamedSharding(
            sharding.mesh,
            P(*[None if size % n else entry for entry, n, size in zip(axes, counts, self.shape, strict=True)]),
        )

    def own(self, ranks: Float[Array, "*rows n 3"]) -> Array:
        """Return True for the values that a member has, in a shape that broadcasts to that of the factor."""
        count = jnp.arange(self.spec.max_rank)
        if self.half == A:  # a module of several slices has its A in the first of them
            own = (count < ranks[..., :1]) & (ranks[..., 2:] == jnp.arange(self.spec.slices)[:, None])
            return own[..., None]
        # Not `jnp.repeat`: XLA would sum its constant lengths while it compiles, for a minute where N is a vocabulary.
        sizes, rows = self.spec.out_sizes, ranks.shape[:-2]
        slices = [jnp.broadcast_to(ranks[..., i, :1], (*rows, size)) for i, size in enumerate(sizes)]
        columns = jnp.concatenate(slices, axis=-1)
        return count[:, None] < columns[..., None, :]

    def stored(self, factor: Array, ranks: Float[Array, "m *rows n 3"]) -> Array:
        """Return the slot array of these members."""
        spec = self.spec
        if self.half == A and spec.slices > 1:  # the slices of one module read the A of the first
            first = jnp.arange(spec.slices, dtype=ranks.dtype).reshape((1,) * (ranks.ndim - 1) + (-1,))
            taken_from = (ranks[..., 2:] == first)[..., None, None]
            factor = jnp.where(taken_from, factor[..., None, :, :, :], 0).sum(-3)
        factor = factor.astype(spec.dtype)
        factor = to_stored(factor if self.half else with_rank(factor, spec.stored_rank, jnp), spec, self.half, jnp)
        return jnp.moveaxis(factor, 0, len(spec.stack))


def key_of(site: Site, array: str) -> str:
    """Return the name of the factor or the ranks of a site in the state of a trainer."""
    return f"{site.path}.{site.prefix}_{array}"


def entry_of(spec: SlotSpec, entry: int) -> tuple[int, ...]:
    return tuple(map(int, np.unravel_index(entry, spec.entries))) if spec.entries else ()


def put(array: Any, where: ArrayPlacement) -> jax.Array:
    return jax.device_put(array, where) if isinstance(where, Sharding) else to_device(np.asarray(array), where)


def placed(array: Any, like: jax.ShapeDtypeStruct, where: ArrayPlacement) -> jax.Array:
    """Return an array in the dtype of another and at a placement, so that no program is compiled again."""
    if isinstance(array, jax.Array) and (isinstance(where, Sharding) or placement_of(array) == where):
        return put(array, where) if isinstance(where, Sharding) else array
    return put(np.asarray(jax.device_get(array), like.dtype), where)


def stacked(where: ArrayPlacement) -> ArrayPlacement:
    """Return the placement of the arrays of all members."""
    return NamedSharding(where.mesh, P(None, *where.spec)) if isinstance(where, NamedSharding) else where


def whole_placement(wrapped: WrappedModel) -> ArrayPlacement:
    """Return the placement of arrays that every device of the model holds."""
    arrays = [(site, raw_value(vars(layer)[site.attributes[0]])) for site, layer in wrapped.modules.items()]
    found = next((array for site, array in arrays if site.spec.sharding is not None), arrays[0][1])
    where, mesh = everywhere(placement_of(found)), jax.sharding.get_mesh()
    # JAX moves arrays that are not committed to the mesh of the context.
    return where if isinstance(where, Sharding) or mesh.empty else NamedSharding(mesh, P())
