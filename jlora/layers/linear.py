"""LoRA on anything linear: the layer's own output, plus the delta of every row."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Float, Integer

from jlora._typing import is_list_or_tuple
from jlora.errors import LoRAError
from jlora.layers.mesh import across_mesh, parts_of
from jlora.layers.products import joint
from jlora.layers.rows import RowMap
from jlora.layers.scope import Scope, check_slots_fresh, enter_site
from jlora.layers.sharded import Half, Held, add_rows
from jlora.layers.site import Site
from jlora.layers.specs import LinearSpec, Restore
from jlora.pallas.api import add_lora, expand, shrink
from jlora.pallas.plan import Plan


def linear_methods(cls: type, name: str) -> Callable[..., Any]:
    """The method with which a subclass of the linear layer class `cls` serves LoRA: the layer's own, plus the delta."""
    own = getattr(cls, name)
    parameters = parameters_of(own)

    @functools.wraps(own)
    def call(self: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        site: Site = vars(self)["jlora_site"]
        scope = enter_site(site, vars(self)["jlora_sites"])
        make = None if scope is None else joint(cls, self, site, args, kwargs)
        if scope is not None and make is not None:
            y = make(cls, self, site, scope, lambda: slot_arrays(self, site), *args, **kwargs)
            return scope.checked(self, site, y)
        y = own(self, *args, **kwargs)
        if scope is None:
            return y
        try:
            x, base, restore = _rows(self, site, vars(self)["jlora_spec"], parameters, y, args, kwargs)
        except Exception as error:
            if site.doubt is not None and scope.recorded:  # a guess that does not hold is no reason to fail
                scope.refuse(site, f"{site.doubt.why}, and {error}")
                return y
            if isinstance(error, LoRAError):
                raise LoRAError(f"{site.path}: {error}") from error
            raise
        return restore(add_delta(self, site, scope, base, x, vars(self)["jlora_spec"]))

    return call


def add_delta(
    layer: nnx.Module,
    site: Site,
    scope: Scope,
    base: Float[Array, "*lead N"],
    x: Float[Array, "*rows K"],
    spec: LinearSpec,
    row_map: RowMap | None = None,
    x_rows: Integer[Array, "M"] | None = None,
) -> Float[Array, "*lead N"]:
    """`base` plus the LoRA of every row in an open scope; features that are padding stay the base's bits.

    `row_map` is what the layer itself says of its rows, where they are not the batch's: those of experts. With `x_rows`
    row m of it has x[x_rows[m]] for input.

    Raises:
      LoRAError: slots that would be baked into a compiled function, or a stack of layers that is not mapped.
    """
    if not base.size:
        return base
    plan = scope.plan(site, base, row_map)
    if plan is None:
        return base
    if site.spec.sharding is not None:
        with jax.named_scope("lora"):
            base, lead = scope.checked(layer, site, base), scope.lead(site, base, row_map)
            held = Held(plan, *slot_arrays(layer, site))
            halves = _halves(layer, site, scope, base, row_map)
            expert = None if row_map is None or row_map.expert is None else jnp.asarray(row_map.expert)
            return add_rows(site, spec, lead, base, x, held, expert, x_rows, halves)
    shared = _halves(layer, site, scope, base, row_map)

    def compute(
        base: Array, x: Array, plan: Plan, a: Array, b: Array, ranks: Array, x_rows: Array | None, *shared: Half
    ) -> Array:
        rows = base.reshape(-1, spec.out_features)
        # PEFT casts the input to the adapter's dtype too (peft.tuners.lora.layer, _cast_input_dtype).
        x = x.reshape(-1, spec.in_features).astype(a.dtype)
        x = x if spec.columns_in is None else spec.columns_in.take(x)
        real = rows if spec.columns_out is None else spec.columns_out.take(rows)
        sizes, backend = site.spec.out_sizes, site.backend
        out = add_lora(real, x, a, b, plan, slice_sizes=sizes, ranks=ranks, x_rows=x_rows, backend=backend)
        if shared:  # a row has its adapter in slots of one kind, and those of the other leave it as it is
            (plan, a, ranks), (b_plan, b, b_ranks) = shared
            h = shrink(x, a, plan, ranks=ranks, x_rows=x_rows, backend=backend)
            out = expand(h, b, b_plan, slice_sizes=sizes, base=out, ranks=b_ranks, backend=backend)
        out = out if spec.columns_out is None else spec.columns_out.put(rows, out)
        return out.reshape(base.shape)

    with jax.named_scope("lora"):
        base = scope.checked(layer, site, base)
        return across_mesh(compute, base, x, plan, *slot_arrays(layer, site), x_rows, *shared)


def slot_arrays(layer: nnx.Module, site: Site) -> tuple[Array, Array, Array]:
    """A [G, n, R, K], B [G, R, N] and ranks [G, n] of a layer inside the forward; G = S, or S * E of experts (on a mesh
    two axes)."""
    a, b, ranks = _held(layer, site)
    return a, b, ranks


def _halves(layer: nnx.Module, site: Site, scope: Scope, base: Array, row_map: RowMap | None) -> list[Half]:
    """Of `site.shared`, and where the rows of the layer are in their slots."""
    halves: list[Half] = []
    for half in site.shared:
        plan = scope.plan(site, base, row_map, half)
        assert plan is not None  # their rows are those of the site
        halves.append(Half(plan, *_held(layer, half)))
    return halves


def _held(layer: nnx.Module, site: Site) -> tuple[Array, ...]:
    """The factors that a site holds, and their ranks."""
    arrays: tuple[Array, ...] = tuple(vars(layer)[name][...] for name in site.attributes)
    ranks = arrays[-1]
    check_slots_fresh(site.path, arrays[0])
    if ranks.ndim != (2 if site.spec.experts is None else 3):
        raise LoRAError(
            f"{site.path}: this layer is one of a stack of {site.spec.layers}, but its slot arrays still have the "
            "stack axis; map jlora.SlotParam over axis 0 in the StateAxes of your nnx.scan, as the kernel is"
        )
    if site.spec.experts is not None and site.spec.sharding is None:
        return tuple(array.reshape(-1, *array.shape[2:]) for array in arrays)
    return arrays


def _rows(
    layer: nnx.Module,
    site: Site,
    spec: LinearSpec,
    parameters: Sequence[str],
    y: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> tuple[Array, Array, Callable[[Array], Any]]:
    """x as [*lead, K], y as [*lead, N], and the way back to what the layer returned. Raises where that is not so."""
    x, args, kwargs = first_input(parameters, args, kwargs)
    of_in, of_out = parts_of(site)
    sizes = spec.in_features // of_in, spec.out_features // of_out
    pack: Callable[[Array], Any] = _unchanged
    pair: tuple[Any, ...] = y if is_list_or_tuple(y) and type(y) is tuple else ()
    if len(pair) == 2 and _is_array(pair[0]) and (pair[1] is None or _is_bias(pair[1], sizes[1], pair[0])):
        # (projection, bias that the caller adds): the delta belongs to the projection.
        y, pack = pair[0], lambda out: (out, pair[1])
    if not _is_array(x) or not _is_array(y) or not jnp.issubdtype(y.dtype, jnp.floating):
        raise LoRAError(
            "a linear layer takes an array and returns the projection of it, a floating array or (array, bias); this "
            f"one took {_describe(x)} and returned {_describe(y)}. Say what it computes with jlora.register_layer, or "
            "leave it out with LoRAConfig.exclude_modules"
        )
    restore: Restore
    if spec.rows is None:
        flat, base, restore = x, y, _unchanged
    else:
        flat, base, restore = spec.rows(layer, x, y, *args, **kwargs)
    if flat.shape[:-1] != base.shape[:-1] or (*flat.shape[-1:], *base.shape[-1:]) != sizes:
        raise LoRAError(
            f"its spec says rows of {sizes[0]} features in and {sizes[1]} out, and a call took "
            f"{_describe(x)} and returned {_describe(y)}; give the spec of its class `rows`, or leave it out with "
            "LoRAConfig.exclude_modules"
        )
    return flat, base, lambda rows: pack(restore(rows))


def _unchanged(rows: Array) -> Array:
    return rows


def first_input(
    parameters: Sequence[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, tuple[Any, ...], Mapping[str, Any]]:
    """The first argument that is no string (an equation), in the order of the method's own parameters; the others."""
    for i, value in enumerate(args):
        if not isinstance(value, str):
            return value, args[:i] + args[i + 1 :], kwargs
    for name in (*(p for p in parameters if p in kwargs), *kwargs):
        if _is_array(kwargs[name]):
            return kwargs[name], args, {key: value for key, value in kwargs.items() if key != name}
    return None, args, kwargs


def parameters_of(method: Callable[..., Any]) -> list[str]:
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
