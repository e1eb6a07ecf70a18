"""The names of qwix in use, without an import of it: what it has quantized, and where it intercepts JAX.

Verified with qwix 0.1.5 to 0.1.8. `qwix.quantize_model` replaces a kernel by a `WithAux`, a pytree with a `QArray`
whose `qvalue` and `scale` are variables. While the quantized model is called, `lax.dot_general`, `jnp.einsum` and other
functions of JAX are replaced in all modules by ones that quantize.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
from flax import nnx

P = ParamSpec("P")
T = TypeVar("T")


def unintercepted(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function whose products are never quantized, neither when it is called nor when it is traced."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        interception = sys.modules.get("qwix._src.interception")
        if interception is None:
            return function(*args, **kwargs)
        return interception.disable_interceptions(function)(*args, **kwargs)

    return call


def is_intercepted(module: nnx.Module) -> bool:
    """Return True for a module of a model that `qwix.quantize_model` returned, which sets a path on each."""
    return "qwix_path" in vars(module)


def is_quantized(value: object) -> bool:
    """Return True if `value` is a parameter that qwix has quantized."""
    cls = type(value)
    return cls.__module__.partition(".")[0] == "qwix" and hasattr(value, "array") and hasattr(value, "how")


def unboxed(value: Any) -> Any:
    """Return the `QArray` of a quantized parameter, with arrays (or their shapes) in place of variables."""

    def raw(leaf: Any) -> Any:
        return leaf.get_value() if _is_variable(leaf) else leaf

    return jax.tree.map(raw, value.array, is_leaf=_is_variable)


def variables_of(value: Any) -> list[nnx.Variable[Any]]:
    """Return the variables inside a quantized parameter."""
    return [leaf for leaf in jax.tree.leaves(value, is_leaf=_is_variable) if _is_variable(leaf)]


def _is_variable(value: object) -> bool:
    return isinstance(value, nnx.Variable)


def dequantized(value: Any) -> jax.Array:
    """Return the values of a quantized parameter in float32, with its own axes."""
    quantized = unboxed(value)
    return sys.modules["qwix"].dequantize(quantized.astype("float32"))
