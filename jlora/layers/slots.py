"""What a wrapped layer carries: slot arrays, and a `Site` that says what they mean."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import jax.numpy as jnp
from flax import nnx

from jlora._typing import Backend


class SlotParam(nnx.Variable):
    """Every slot array: the filter for `nnx.split`, donation and sharding. Never an `nnx.Param` of the base model."""


class SlotRanks(SlotParam):
    """The int32 true ranks beside the slots, apart so that training can differentiate the other slot arrays."""


@dataclass(frozen=True, eq=False)
class Site:
    """One place where LoRA is added. Compared by identity, so a layer can hold it as a static attribute.

    Attributes:
      path: canonical dotted path of the layer in the model; ".attend" is appended for the logits use of an embedding.
      aliases: every dotted path that reaches the same layer, `path` first.
      kind: "linear" (delta of a projection) or "embedding" (delta of a table lookup).
      in_features: K, for an embedding the number of table rows.
      out_sizes: sizes of the n output slices; their sum is N.
      parts: checkpoint name -> (first slice, number of slices) it fills, for each alias.
      layers: length of the leading axis when the layer is a stack (`nnx.vmap` + `nnx.scan`), else None.
      slots, max_rank, dtype, backend: as configured.
      prefix: attribute prefix of this site's arrays on the layer.
    """

    path: str
    aliases: tuple[str, ...]
    kind: Literal["linear", "embedding"]
    in_features: int
    out_sizes: tuple[int, ...]
    parts: Mapping[str, tuple[int, int]] = field(repr=False)
    layers: int | None
    slots: int
    max_rank: int
    dtype: jnp.dtype
    backend: Backend
    prefix: str = "jlora"

    @property
    def out_features(self) -> int:
        return sum(self.out_sizes)

    @property
    def a_shape(self) -> tuple[int, ...]:
        """One slot of A, without the stack axis: [n, R, K]."""
        return (len(self.out_sizes), self.max_rank, self.in_features)

    @property
    def b_shape(self) -> tuple[int, ...]:
        """One slot of B, without the stack axis: [R, N]."""
        return (self.max_rank, self.out_features)

    @property
    def stack(self) -> tuple[int, ...]:
        return () if self.layers is None else (self.layers,)

    @property
    def attributes(self) -> tuple[str, str, str]:
        """Names of the layer attributes that hold A, B and the ranks."""
        return f"{self.prefix}_a", f"{self.prefix}_b", f"{self.prefix}_ranks"


def attach(layer: nnx.Module, site: Site) -> None:
    """Add the zero slot arrays of `site` to `layer`: A [(layers,) S, n, R, K], B [(layers,) S, R, N], ranks."""
    lead = (*site.stack, site.slots)
    a, b, ranks = site.attributes
    setattr(layer, a, SlotParam(jnp.zeros((*lead, *site.a_shape), site.dtype)))
    setattr(layer, b, SlotParam(jnp.zeros((*lead, *site.b_shape), site.dtype)))
    setattr(layer, ranks, SlotRanks(jnp.zeros((*lead, len(site.out_sizes)), jnp.int32)))
    setattr(layer, f"{site.prefix}_site", site)


def detach(layer: nnx.Module, site: Site) -> None:
    for name in (*site.attributes, f"{site.prefix}_site"):
        delattr(layer, name)
