"""Routers: which experts a token goes to, and with which weights, from the router's logits. All in float32.

Ties go to the expert of the lower number, and nothing depends on other tokens of the batch.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class Routing(NamedTuple):
    """The k experts of each token, largest score first, and the weights of their outputs (float32)."""

    experts: Int[Array, "T k"]
    weights: Float[Array, "T k"]


class Groups(NamedTuple):
    """Experts in `number` groups of equal size, of which only `kept` may be chosen from: those whose `best` largest
    scores have the largest sum (DeepSeek-V2, arXiv:2405.04434, has best = 1; V3, arXiv:2412.19437, has 2)."""

    number: int
    kept: int
    best: int


def softmax_top_k(
    logits: Float[Array, "T E"], k: int, *, renormalize: bool, groups: Groups | None = None, scale: float = 1.0
) -> Routing:
    """Softmax over all experts, then the k largest; with `renormalize` their weights sum to 1 before `scale`.

    Mixtral (arXiv:2401.04088) renormalises, Qwen3-MoE if `norm_topk_prob` says so; DeepSeek-V2 has groups.
    """
    scores = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
    return _chosen(scores, _top_k(scores, k, groups), renormalize, scale)


def sigmoid_top_k(
    logits: Float[Array, "T E"],
    k: int,
    *,
    renormalize: bool,
    groups: Groups | None = None,
    scale: float = 1.0,
    correction: Float[Array, "E"] | None = None,
) -> Routing:
    """Sigmoid of each expert's logit, then the k largest (DeepSeek-V3, arXiv:2412.19437).

    `correction` is added to the scores for the choice, of groups as well, but not to the weights.
    """
    scores = jax.nn.sigmoid(logits.astype(jnp.float32))
    ranked = scores if correction is None else scores + correction.astype(jnp.float32)[None, :]
    return _chosen(scores, _top_k(ranked, k, groups), renormalize, scale)


def top_k_softmax(logits: Float[Array, "T E"], k: int) -> Routing:
    """The k largest logits, then softmax over them (gpt-oss)."""
    chosen, experts = jax.lax.top_k(logits.astype(jnp.float32), k)
    return Routing(experts, jax.nn.softmax(chosen, axis=-1))


def _top_k(scores: Float[Array, "T E"], k: int, groups: Groups | None) -> Int[Array, "T k"]:
    if groups is not None:
        tokens = scores.shape[0]
        grouped = scores.reshape(tokens, groups.number, -1)
        worth = jnp.sum(jax.lax.top_k(grouped, groups.best)[0], axis=-1)
        kept = jax.lax.top_k(worth, groups.kept)[1]
        allowed = jnp.zeros((tokens, groups.number), bool).at[jnp.arange(tokens)[:, None], kept].set(True)
        scores = jnp.where(allowed[:, :, None], grouped, -jnp.inf).reshape(scores.shape)
    return jax.lax.top_k(scores, k)[1]


def _chosen(scores: Float[Array, "T E"], experts: Int[Array, "T k"], renormalize: bool, scale: float) -> Routing:
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if renormalize:
        # Sigmoids may all be 0.
        weights = weights / jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), 1e-20)
    return Routing(experts, weights * scale)
