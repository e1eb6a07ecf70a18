"""Losses of token log-probabilities and their gradients, against torch in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jlora.training import losses

pytestmark = pytest.mark.parity

RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(5, 6, 7)).astype(np.float32)
TARGETS = RNG.integers(0, 7, (5, 6))
MASK = (RNG.random((5, 6)) < 0.7).astype(np.float32)
ADVANTAGES = RNG.normal(size=(5, 6)).astype(np.float32)
SAMPLED, REFERENCE = (RNG.normal(-2, 0.5, (5, 6)).astype(np.float32) for _ in range(2))
LOW, HIGH, BETA = np.float32(0.7), RNG.uniform(1.1, 1.4, (5, 6)).astype(np.float32), np.float32(0.3)


def by_torch(kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the losses [B] of all rows in one kind, and the gradient of their sum for the logits."""
    logits = torch.tensor(LOGITS, dtype=torch.float64, requires_grad=True)
    sampled, reference, advantages, mask, high = (
        torch.tensor(array, dtype=torch.float64) for array in (SAMPLED, REFERENCE, ADVANTAGES, MASK, HIGH)
    )
    logp = torch.log_softmax(logits, -1).gather(-1, torch.tensor(TARGETS)[..., None])[..., 0]
    ratio = (logp - sampled).exp()
    clipped = torch.minimum(ratio.clamp(min=float(LOW)), high)
    surrogate = -torch.minimum(ratio * advantages, clipped * advantages)
    if kind == "cross_entropy":
        tokens = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), torch.tensor(TARGETS).flatten(), reduction="none"
        ).reshape(5, 6)
    elif kind == "importance_sampling":
        tokens = -ratio * advantages
    elif kind == "ppo":
        tokens = surrogate
    elif kind == "cispo":
        tokens = -clipped.detach() * advantages * logp
    else:
        tokens = surrogate + float(BETA) * ((reference - logp).exp() - (reference - logp) - 1)
    rows = (tokens * mask).sum(1)
    rows = rows / mask.sum(1) if kind == "grpo" else rows
    rows.sum().backward()
    assert logits.grad is not None
    return rows.detach().numpy(), logits.grad.numpy()


def summed(logits, kinds, sampled=SAMPLED, mask=MASK):
    found, weights, aux = losses.by_row(
        kinds,
        losses.token_logprobs(logits, TARGETS),
        mask,
        sampled=sampled,
        advantages=ADVANTAGES,
        low=LOW,
        high=HIGH,
        reference=REFERENCE,
        beta=BETA,
    )
    return found.sum(), (found, weights, aux)


def test_each_row_has_the_loss_and_gradient_of_its_kind():
    kinds = jnp.array([3, 1, 0, 4, 2])
    (_, (found, weights, aux)), gradient = jax.value_and_grad(summed, has_aux=True)(jnp.array(LOGITS), kinds)
    for i, kind in enumerate(kinds):
        want, of_want = by_torch(losses.LOSSES[kind])
        np.testing.assert_allclose(found[i], want[i], rtol=1e-5)
        np.testing.assert_allclose(gradient[i], of_want[i], atol=1e-5)
        assert weights[i] == (1 if kind == 4 else MASK[i].sum())
    logp = torch.log_softmax(torch.tensor(LOGITS), -1).gather(-1, torch.tensor(TARGETS)[..., None])[..., 0].numpy()
    np.testing.assert_allclose(aux["logprobs"], logp * MASK, atol=1e-5)
    np.testing.assert_allclose(aux["ratio"][1], (np.exp(logp - SAMPLED) * MASK)[1], rtol=1e-5)


def test_values_without_weight_change_nothing():
    """An overflow of a masked token, or of a sequence of another kind, has no gradient and is no NaN."""
    kinds = jnp.array([0, 2, 2, 0, 3])
    sampled, logits = SAMPLED.copy(), LOGITS.copy()
    sampled[MASK == 0] = -1e4
    sampled[kinds == 0] = -np.inf
    logits[MASK == 0] = np.nan
    want, found = (
        jax.grad(lambda x, s: summed(x, kinds, s)[0])(*given) for given in ((LOGITS, SAMPLED), (logits, sampled))
    )
    kept = MASK != 0
    np.testing.assert_array_equal(found[kept], want[kept])


def test_samples_of_the_adapter_itself_have_the_ratio_one():
    kinds = jnp.full(5, 2)
    _, (found, _, aux) = summed(jnp.array(LOGITS), kinds, sampled=None)
    np.testing.assert_allclose(found, -(ADVANTAGES * MASK).sum(1), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(aux["ratio"], MASK)


@pytest.mark.parametrize("rewards", [[[1.0, 2, 6], [5, 5, 5]]])
def test_group_advantages(rewards):
    found = losses.group_advantages(jnp.array(rewards))
    values = torch.tensor(rewards[0], dtype=torch.float64)
    np.testing.assert_allclose(found[0], (values - values.mean()) / values.std(correction=0), rtol=1e-5)
    np.testing.assert_array_equal(found[1], 0)
