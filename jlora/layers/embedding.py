"""LoRA on `nnx.Embed`: the table lookup, and `attend`, the logits of a model with tied embeddings."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jlora.layers.linear import add_delta, slot_arrays
from jlora.layers.scope import enter_site
from jlora.layers.site import Site
from jlora.pallas.api import expand


def embed_methods(cls: type[nnx.Embed]) -> dict[str, Callable]:
    """The methods with which a subclass of the embedding class `cls` serves LoRA: its own, plus the delta."""

    @functools.wraps(cls.__call__)
    def call(self, *args, **kwargs):
        y = cls.__call__(self, *args, **kwargs)
        # An adapter may target the logits use alone: then there is no site for the lookup.
        site = getattr(self, "jlora_site", None)
        return y if site is None else _add_lookup(self, site, y, args[0] if args else kwargs["inputs"])

    @functools.wraps(cls.attend)
    def attend(self, *args, **kwargs):
        y = cls.attend(self, *args, **kwargs)
        site = getattr(self, "jlora_attend_site", None)
        return y if site is None else add_delta(self, site, y, args[0] if args else kwargs["query"])

    return {"__call__": call, "attend": attend}


def _add_lookup(
    layer: Any, site: Site, base: Float[Array, "*lead N"], tokens: Int[Array, "*lead"]
) -> Float[Array, "*lead N"]:
    """base + A[slot, :, token] @ B[slot]: PEFT's `lora_embedding_B @ lora_embedding_A[:, token]`."""
    scope = enter_site(site, layer.jlora_tracking)
    if scope is None or not base.size:
        return base
    plan = scope.plan(site, base)
    if plan is None:  # its rows fit no layout: the scope refuses adapters that bring weights for it
        return base
    ids = scope.row_slots(site, base)
    a, b, ranks = slot_arrays(layer, site)
    with jax.named_scope("lora"):
        # Rows without an adapter read some slot's column here, and `expand` gives them no tile.
        h = a.at[ids.clip(0, site.spec.num_slots - 1), 0, :, tokens.reshape(-1)].get(mode="clip")  # [M, R]
        out = expand(
            h[None].astype(jnp.float32),
            b,
            plan,
            slice_sizes=site.spec.out_sizes,
            base=base.reshape(-1, site.spec.out_features),
            ranks=ranks,
            backend=site.backend,
        )
    return out.reshape(base.shape)
