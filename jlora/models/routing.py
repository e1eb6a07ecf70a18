"""Routers: compute each token's experts and their weights from the router's logits, in float32.

Ties are resolved to the expert of the lower index. The result does not depend on other tokens of the batch.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class Routing(NamedTuple):
    """The k experts of each token, largest score first, and the float32 weights of their outputs."""

    experts: Int[Array, "T k"]
    weights: Float[Array, "T k"]


def softmax_top_k(logits: Float[Array, "T E"], k: int, *, renormalize: bool) -> Routing:
    """Apply a softmax over all experts and choose the k largest; with `renormalize` their weights sum to 1.

    Mixtral (arXiv:2401.04088) renormalizes; Qwen3-MoE does so if `norm_topk_prob` is set.
    """
    weights, experts = jax.lax.top_k(jax.nn.softmax(logits.astype(jnp.float32), axis=-1), k)
    return Routing(experts, weights / jnp.sum(weights, axis=-1, keepdims=True) if renormalize else weights)


def top_k_softmax(logits: Float[Array, "T E"], k: int) -> Routing:
    """Choose the k largest logits and apply a softmax over them (gpt-oss)."""
    chosen, experts = jax.lax.top_k(logits.astype(jnp.float32), k)
    return Routing(experts, jax.nn.softmax(chosen, axis=-1))
