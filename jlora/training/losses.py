"""Losses of log-probabilities of tokens, for `LoRAManager.trainer`, and the choice of one for each sequence.

In the formulas p is the probability of a token under the trained adapter, q under the policy that sampled it,
r = p / q, and A its advantage. Each function returns the loss of every token. Masks, sums and means are those of
`by_row`. Arrays are of JAX or NumPy. Another shape or dtype raises LoRAUsageError.
"""

from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from jlora.errors import LoRAUsageError
from jlora.training.report import dtype_and_shape, is_array

_Array: TypeAlias = Array | np.ndarray
Tokens: TypeAlias = Float[_Array, "B L"]

LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo", "grpo")


def token_logprobs(logits: Float[_Array, "B L V"], targets: Int[_Array, "B L"]) -> Tokens:
    """Return the log-probability of each target, in float32."""
    if not is_array(logits, jnp.floating) or np.ndim(logits) != 3:
        raise LoRAUsageError(f"losses: logits must be floats [B, L, V], got {dtype_and_shape(logits)}")
    if not is_array(targets, jnp.integer) or np.shape(targets) != logits.shape[:2]:
        raise LoRAUsageError(
            f"losses: targets must be integers {list(logits.shape[:2])}, as the logits, got {dtype_and_shape(targets)}"
        )
    logits = logits.astype(jnp.float32)
    own = jnp.take_along_axis(logits, jnp.asarray(targets)[..., None], axis=-1)[..., 0]
    return own - jax.nn.logsumexp(logits, axis=-1)


def cross_entropy(logprobs: Tokens) -> Tokens:
    """Return -log p."""
    _check(logprobs)
    return -logprobs


def importance_sampling(logprobs: Tokens, sampled: Tokens, advantages: Any) -> Tokens:
    """Return -r A, the policy gradient corrected for samples of another policy (arXiv:1606.02647, equation 1)."""
    _check(logprobs, {"sampled": sampled}, advantages=advantages)
    return -jnp.exp(logprobs - sampled) * advantages


def ppo(logprobs: Tokens, sampled: Tokens, advantages: Any, low: Any = 0.8, high: Any = 1.2) -> Tokens:
    """Return -min(r A, clip(r, low, high) A) (arXiv:1707.06347, equation 7). Thresholds may be arrays, also [B, L]."""
    _check(logprobs, {"sampled": sampled}, advantages=advantages, low=low, high=high)
    ratio = jnp.exp(logprobs - sampled)
    return -jnp.minimum(ratio * advantages, ratio.clip(low, high) * advantages)


def cispo(logprobs: Tokens, sampled: Tokens, advantages: Any, low: Any = 0.8, high: Any = 1.2) -> Tokens:
    """Return -c A log p, where c = clip(r, low, high) has no gradient (arXiv:2506.13585, equations 4 and 5)."""
    _check(logprobs, {"sampled": sampled}, advantages=advantages, low=low, high=high)
    ratio = jnp.exp(jax.lax.stop_gradient(logprobs) - sampled).clip(low, high)
    return -ratio * advantages * logprobs


def grpo(
    logprobs: Tokens,
    sampled: Tokens,
    advantages: Any,
    low: Any = 0.8,
    high: Any = 1.2,
    *,
    reference: Tokens,
    beta: Any,
) -> Tokens:
    """Return the loss of `ppo` + beta (s - log s - 1), s = p_reference / p (arXiv:2402.03300, equations 3 and 4)."""
    _check(logprobs, {"reference": reference}, beta=beta)
    return ppo(logprobs, sampled, advantages, low, high) + beta * _divergence(logprobs, reference)


def group_advantages(rewards: Float[_Array, "groups n"]) -> Float[_Array, "groups n"]:
    """Return (reward - mean) / std of each group, the advantages of GRPO (arXiv:2402.03300). Equal rewards give 0."""
    if not is_array(rewards, jnp.floating, jnp.integer) or np.ndim(rewards) != 2:
        raise LoRAUsageError(f"losses: rewards must be numbers [groups, n], got {dtype_and_shape(rewards)}")
    std = rewards.std(axis=1, keepdims=True)
    return (rewards - rewards.mean(axis=1, keepdims=True)) / jnp.where(std > 0, std, 1)


def by_row(
    kinds: Int[_Array, "B"],
    logprobs: Tokens,
    mask: Shaped[_Array, "B L"],
    *,
    sampled: Tokens | None = None,
    advantages: Any = 0.0,
    low: Any = 0.8,
    high: Any = 1.2,
    reference: Tokens | None = None,
    beta: Any = 0.0,
) -> tuple[Float[Array, "B"], Float[Array, "B"], dict[str, Tokens]]:
    """Return what the loss of a trainer returns, with the loss of each sequence chosen by an index into `LOSSES`.

    Args:
      kinds: index into `LOSSES` of each sequence. Any other integer gives NaN.
      logprobs: log p of each token.
      mask: weight of each token, 0 or False to leave it out.
      sampled: log q of each token; None for log p without a gradient, for tokens that were sampled by the adapter as it
        is.
      advantages: A, an array that broadcasts to [B, L], such as [B, 1].
      low: smallest ratio that is not clipped.
      high: largest ratio that is not clipped.
      reference: log-probabilities of the reference model, for `grpo`; None for no divergence.
      beta: weight of the divergence from the reference.

    Returns:
      For each sequence, the sum of the losses of its tokens times their weights, and the sum of the weights; for `grpo`
      their mean, and 1. Then per-token arrays [B, L]: "logprobs", "ratio" and "kl", 0 where the mask is.
    """
    given = {"mask": mask, "sampled": sampled, "reference": reference}
    given = {name: array for name, array in given.items() if array is not None or name == "mask"}
    _check(logprobs, given, advantages=advantages, low=low, high=high, beta=beta)
    if not is_array(kinds, jnp.integer) or np.shape(kinds) != logprobs.shape[:1]:
        raise LoRAUsageError(
            f"losses: kinds must be integers [{len(logprobs)}], one of each sequence, got {dtype_and_shape(kinds)}"
        )
    kept, weights = mask != 0, mask.astype(jnp.float32)
    # Values that do not count are replaced before the formulas, because 0 times the gradient of an overflow is NaN.
    logprobs = jnp.where(kept, logprobs, 0)
    fixed, is_policy = jax.lax.stop_gradient(logprobs), kinds[:, None] != 0
    sampled = fixed if sampled is None else jnp.where(kept & is_policy, sampled, fixed)
    is_grpo = kinds[:, None] == LOSSES.index("grpo")
    reference = fixed if reference is None else jnp.where(kept & is_grpo, reference, fixed)
    advantages = jnp.where(kept & is_policy, advantages, 0)
    of_policy = sampled, advantages
    found = [
        cross_entropy(logprobs),
        importance_sampling(logprobs, *of_policy),
        ppo(logprobs, *of_policy, low, high),
        cispo(logprobs, *of_policy, low, high),
        grpo(logprobs, *of_policy, low, high, reference=reference, beta=beta),
    ]
    losses = jnp.select([kinds[:, None] == i for i in range(len(found))], found, jnp.nan)
    summed, total = (losses * weights).sum(axis=1), weights.sum(axis=1)
    is_mean = is_grpo[:, 0] & (total != 0)
    summed = jnp.where(is_mean, summed / jnp.where(is_mean, total, 1), summed)
    aux = {"logprobs": logprobs, "ratio": jnp.where(kept, jnp.exp(logprobs - sampled), 0)}
    aux["kl"] = jnp.where(kept, _divergence(logprobs, reference), 0)
    return summed, jnp.where(is_mean, 1, total), jax.tree.map(jax.lax.stop_gradient, aux)


def _check(logprobs: Any, same: Mapping[str, Any] | None = None, **others: Any) -> None:
    """Raise LoRAUsageError unless arrays are numbers: `same` of the shape of `logprobs`, `others` broadcast to it.

    No vector is broadcast: of [B] advantages, each would be of a token where B = L.
    """
    if not is_array(logprobs, jnp.floating) or np.ndim(logprobs) != 2:
        raise LoRAUsageError(f"losses: logprobs must be floats [B, L], got {dtype_and_shape(logprobs)}")
    expected = logprobs.shape
    for name, array in {**(same or {}), **others}.items():
        fits = is_array(array, jnp.floating, jnp.integer, jnp.bool_)
        if fits and name in others and np.ndim(array) in (0, 2):
            fits = all(n in (1, most) for n, most in zip(np.shape(array), expected, strict=False))
        elif fits:
            fits = np.shape(array) == expected
        if not fits:
            like = ", or an array of two axes or a number that broadcasts to it" if name in others else ""
            raise LoRAUsageError(f"losses: {name} is {dtype_and_shape(array)}; expected {list(expected)}{like}")


def _divergence(logprobs: Tokens, reference: Tokens) -> Tokens:
    """Return s - log s - 1 for s = p_reference / p, an estimate of the KL divergence that is never negative."""
    difference = reference - logprobs
    return jnp.exp(difference) - difference - 1
