"""LoRA of linear layers: the layer's own output plus the delta of every row."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from jlora._typing import is_list_or_tuple
from jlora.errors import LoRAError
from jlora.layers.einsum import EinsumRows
from jlora.layers.forward.delta import add_delta
from jlora.layers.forward.few_rows import few_rows_output
from jlora.layers.forward.heads import replace_rows
from jlora.layers.forward.mesh import shards_of
from jlora.layers.forward.row_parallel import row_parallel_output
from jlora.layers.forward.scope import enter_site
from jlora.layers.site import HEAD, Site
from jlora.layers.specs import LinearSpec, Restore


def linear_methods(cls: type, name: str) -> Callable[..., Any]:
    """Return the method of a wrapped linear layer: that of `cls`, plus the LoRA delta."""
    method = getattr(cls, name)
    parameters = parameters_of(method)

    @functools.wraps(method)
    def call(self: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        site: Site = vars(self)["jlora_site"]
        scope = enter_site(site, self)
        if scope is None:
            return method(self, *args, **kwargs)
        head: Site | None = vars(self).get(f"{HEAD}_site")
        if head is None and (out := row_parallel_output(method, self, site, scope, args, kwargs)) is not None:
            return out
        y = few_rows_output(method, self, site, args, kwargs)
        y = method(self, *args, **kwargs) if y is None else y
        spec: LinearSpec = vars(self)["jlora_spec"]
        try:
            x, base, restore, bias = rows_of_call(self, site, spec, parameters, y, args, kwargs)
        except Exception as error:
            if site.doubt is not None and scope.recorded:  # a wrong guess is recorded instead of raised
                scope.refuse(site, f"{site.doubt.why}, and {error}")
                return y
            if isinstance(error, LoRAError):
                raise LoRAError(f"{site.path}: {error}") from error
            raise
        if head is not None and is_list_or_tuple(y):
            raise LoRAError(
                f"{site.path}: a saved head replaces the whole output of a layer, and this one returns its bias beside "
                "it; leave it out of LoRAConfig.saved_heads"
            )
        out = add_delta(self, site, scope, base, x, spec, bias=bias)
        return restore(out if head is None else replace_rows(self, head, scope, out, x))

    return call


def rows_of_call(
    layer: nnx.Module,
    site: Site,
    spec: LinearSpec,
    parameters: Sequence[str],
    y: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> tuple[Array, Array, Callable[[Array], Any], Array | None]:
    """Return x as [*lead, K], y as [*lead, N], the function back to the layer's own output, and the bias [N] in y.

    Raises:
      LoRAError: the call does not fit the spec.
    """
    x, args, kwargs = first_input(parameters, args, kwargs)
    of_in, of_out = shards_of(site)
    sizes = spec.in_features // of_in, spec.out_features // of_out
    pack: Callable[[Any], Any] = _unchanged
    bias = added_bias(layer, site, spec)
    pair: tuple[Any, ...] = y if is_list_or_tuple(y) and type(y) is tuple else ()
    if len(pair) == 2 and _is_array(pair[0]) and (pair[1] is None or _is_bias(pair[1], sizes[1], pair[0])):
        # (projection, bias that the caller adds): the delta belongs to the projection.
        y, pack = pair[0], lambda out: (out, pair[1])
        bias = None
        unfit = [finisher for finisher in site.spec.finishers if "bias" not in finisher.commutes]
        if pair[1] is not None and unfit:
            raise LoRAError(
                f"{unfit[0].variant.title} changes the bias, and the layer returns it beside its "
                "output. Add it in the layer, or leave the layer out with LoRAConfig.exclude_modules"
            )
    # An output of several parts is for `rows`.
    parts: Sequence[Any] = pair if spec.rows is not None and y is pair else (y,)
    if not _is_array(x) or not all(_is_array(each) and jnp.issubdtype(each.dtype, jnp.floating) for each in parts):
        raise LoRAError(
            "a linear layer takes an array and returns the projection of it, a floating array or (array, bias); this "
            f"one took {_describe(x)} and returned {_describe(y)}. Say what it computes with jlora.register_layer, or "
            "leave it out with LoRAConfig.exclude_modules"
        )
    output: Any = y
    restore: Restore
    if spec.rows is None:
        flat, base, restore = x, output, _unchanged
    else:
        flat, base, restore = spec.rows(layer, x, output, *args, **kwargs)
    if flat.shape[:-1] != base.shape[:-1] or (*flat.shape[-1:], *base.shape[-1:]) != sizes:
        raise LoRAError(
            f"its spec says rows of {sizes[0]} features in and {sizes[1]} out, and a call took "
            f"{_describe(x)} and returned {_describe(y)}; give the spec of its class `rows`, or leave it out with "
            "LoRAConfig.exclude_modules"
        )
    if bias is not None and isinstance(spec.rows, EinsumRows):
        bias = spec.rows.flat_bias(bias, x, output, *args, **kwargs)
    return flat, base, lambda rows: pack(restore(rows)), bias


def added_bias(layer: nnx.Module, site: Site, spec: LinearSpec) -> Array | None:
    """Return the bias [N] of a layer with finishers, in the order of `out_axes`; None without either."""
    held: Any = vars(layer).get(spec.bias) if site.spec.finishers and spec.bias is not None else None
    return None if held is None else jnp.reshape(held[...], -1)


def _unchanged(rows: Any) -> Any:
    return rows


def first_input(
    parameters: Sequence[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, tuple[Any, ...], Mapping[str, Any]]:
    """Return the first argument that is not a string (an equation), by the method's parameters, and the others."""
    for i, value in enumerate(args):
        if not isinstance(value, str):
            return value, args[:i] + args[i + 1 :], kwargs
    for name in (*(p for p in parameters if p in kwargs), *kwargs):
        if _is_array(kwargs[name]):
            return kwargs[name], args, {key: value for key, value in kwargs.items() if key != name}
    return None, args, kwargs


def parameters_of(method: Callable[..., Any]) -> list[str]:
    """Return the names of a method's parameters after `self`; [] if it has no signature."""
    try:
        return list(inspect.signature(method).parameters)[1:]
    except (TypeError, ValueError):  # some callables have no signature
        return []


def _is_array(value: Any) -> TypeGuard[Array]:
    return isinstance(value, jax.Array | np.ndarray)


def _is_bias(value: Any, size: int, y: Array) -> bool:
    return _is_array(value) and value.size == size and value.ndim < y.ndim


def _describe(value: Any) -> str:
    if _is_array(value):
        return f"{value.dtype}{list(value.shape)}"
    kind = f"a {type(value).__name__}"
    return f"{kind} of {len(value)}" if is_list_or_tuple(value) else kind
