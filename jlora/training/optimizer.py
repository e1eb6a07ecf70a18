"""Optimizers of one adapter, whose numbers are arguments of each step."""

import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jlora.errors import LoRAUsageError, nearest
from jlora.training.report import is_array

Tree: TypeAlias = Any
Number: TypeAlias = float | Mapping[str, float]  # of all adapters, or adapter -> number
Optimizer: TypeAlias = Any  # optax.GradientTransformation, or a function that returns one

_RESERVED = ("self", "name", "batch", "divide")  # arguments of `Trainer.apply` and `step`


class Transformation(NamedTuple):
    """An optimizer of one adapter, as an `optax.GradientTransformation`."""

    init: Callable[[Tree], Tree]
    update: Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]


def adam(
    learning_rate: Any = 1e-4,
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 1e-8,
    weight_decay: Any = 0.0,
    max_norm: Any = math.inf,
) -> Transformation:
    """Return AdamW (arXiv:1711.05101, algorithm 2) after a clip of the gradient to the global norm `max_norm`."""

    def init(factors: Tree) -> Tree:
        return {"count": jnp.zeros((), jnp.float32), "mu": zeros(factors), "nu": zeros(factors)}

    def update(gradients: Tree, state: Tree, factors: Tree) -> tuple[Tree, Tree]:
        scale, count = jnp.minimum(1, max_norm / (global_norm(gradients) + 1e-6)), state["count"] + 1
        mu, nu, updates = dict[str, Any](), dict[str, Any](), dict[str, Any]()
        for key, gradient in gradients.items():
            mu[key] = b1 * state["mu"][key] + (1 - b1) * scale * gradient
            nu[key] = b2 * state["nu"][key] + (1 - b2) * jnp.square(scale * gradient)
            step = mu[key] / (1 - b1**count) / (jnp.sqrt(nu[key] / (1 - b2**count)) + eps)
            updates[key] = -learning_rate * (step + weight_decay * factors[key])
        return updates, {"count": count, "mu": mu, "nu": nu}

    return Transformation(init, update)


def zeros(factors: Mapping[str, Array]) -> dict[str, Array]:
    """Return zeros of these shapes and dtypes."""
    return {key: jnp.zeros_like(factor) for key, factor in factors.items()}


def global_norm(tree: Tree) -> Float[Array, ""]:
    """Return the square root of the sum of all squares."""
    return jnp.sqrt(sum((jnp.square(leaf).sum() for leaf in jax.tree.leaves(tree)), jnp.zeros((), jnp.float32)))


def with_numbers(optimizer: Optimizer) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return a function of numbers that returns an optimizer, and the default of each, or `inspect.Parameter.empty`."""

    def is_one(made: Any) -> bool:
        return callable(getattr(made, "init", None)) and callable(getattr(made, "update", None))

    def refused(found: str) -> LoRAUsageError:
        return LoRAUsageError(
            "trainer: the optimizer must have `init` and `update`, as optax.adamw(1e-3) has, or be a function of "
            f"numbers that returns such a one, got {found}"
        )

    function: Callable[..., Any] = (lambda: optimizer) if is_one(optimizer) else optimizer
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise refused(f"{optimizer!r:.200}") from error
    for each in parameters:
        is_named = each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY) and each.name not in _RESERVED
        if not is_named or not (each.default is each.empty or is_array(each.default)):
            raise refused(f"one with {str(each)!r:.80}, which is not a number that `step` takes by its name")
    defaults = {each.name: each.default for each in parameters}
    if not is_one(made := function(**dict.fromkeys(defaults, 0.0))):
        raise refused(f"one that returns {made!r:.200}")
    return function, defaults


def number_arrays(
    defaults: Mapping[str, Any], given: Mapping[str, Any], names: Sequence[str], count: int, members: Collection[str]
) -> dict[str, Float[np.ndarray, "m"]]:
    """Return each number of an optimizer for `count` adapters, of which the first have these names.

    Raises:
      LoRAUsageError: A number is unknown, is not given and has no default, is no number, or is of an adapter that is
        not one of `members`.
    """
    if unknown := sorted(given.keys() - defaults.keys()):
        expected = ", ".join(defaults) or "none"
        raise LoRAUsageError(f"Trainer: the optimizer has no number {unknown[0]!r}; expected {expected}")
    found: dict[str, np.ndarray] = {}
    for number, default in defaults.items():
        value = given.get(number, default)
        by_name = cast("Mapping[str, Any]", value if isinstance(value, Mapping) else dict.fromkeys(names, value))
        if strange := sorted(map(str, by_name.keys() - members)):
            known = nearest(strange[0], dict.fromkeys(members, ""))
            raise LoRAUsageError(f"Trainer: {number} is given for {strange[0]!r}, which is not trained here{known}")
        found[number] = np.zeros(count, np.float32)
        for i, name in enumerate(names):
            own = by_name.get(name, default)
            if own is inspect.Parameter.empty:
                raise LoRAUsageError(f"Trainer: the optimizer's number {number!r} has no default; give it")
            try:
                found[number][i] = np.nan if isinstance(own, str | bytes) else own
            except (TypeError, ValueError):
                found[number][i] = np.nan
            if np.isnan(found[number][i]):
                raise LoRAUsageError(f"Trainer: {number} of adapter {name!r} must be a number, got {own!r:.200}")
    return found
