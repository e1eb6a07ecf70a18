"""LoRA of products inside a method: the jaxpr of the method, evaluated with a delta after each product.

The parameters of the products are inputs of the jaxpr. They are followed through casts and moves of their axes to a
`dot_general` or `ragged_dot`, whose result gets the delta. Any other equation that takes one raises.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun

from jlora.errors import LoRAError
from jlora.layers.forward.delta import add_delta
from jlora.layers.forward.experts import prefix_of
from jlora.layers.forward.rows import RowMap
from jlora.layers.forward.scope import Scope, enter_site, open_scope
from jlora.layers.site import Site
from jlora.layers.specs import ExpertsSpec, ProductsSpec

_CASTS = ("convert_element_type", "copy", "name", "stop_gradient", "sharding_constraint", "reshard")
_REMATS, _OPTIONS = ("checkpoint", "remat", "remat2"), ("prevent_cse", "policy")
_PRODUCTS = ("dot_general", "ragged_dot_general")
_CALLS = ("jit", "pjit", "closed_call", "core_call", "custom_jvp_call")
_EXPERTS, _ROWS = -1, -2  # the axis of experts, before those that a `LinearSpec` numbers; an axis of the input's rows


class _Piece(NamedTuple):
    """An axis, or every `stride`-th index of it."""

    axis: int
    size: int
    stride: int = 1


@functools.partial(jax.tree_util.register_dataclass, data_fields=["value", "first"], meta_fields=["product", "axes"])
@dataclass(frozen=True, eq=False)
class _Followed:
    """A value computed from a parameter.

    Attributes:
      value: the array.
      first: its first expert, after a slice of the axis of experts.
      product: name of the parameter's product.
      axes: the pieces of the parameter's axes in each of its own, slowest first; none in an axis of size 1.
    """

    value: Array
    first: Any
    product: str
    axes: tuple[tuple[_Piece, ...], ...]


@dataclass(frozen=True, eq=False)
class _Call:
    """One call of a method, with the sites of the products that serve adapters."""

    layer: nnx.Module
    spec: ProductsSpec | ExpertsSpec
    sites: Mapping[str, Site]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    method: str = field(init=False)

    def __post_init__(self):
        name = type(self.layer).__name__.removesuffix("WithLoRA")
        object.__setattr__(self, "method", f"{name}.{self.spec.method}")

    def refuse(self, product: str, found: str) -> NoReturn:
        """Raise `LoRAError` about a use of a parameter that serves no LoRA."""
        raise LoRAError(
            f"{self.sites[product].path}: {found} in {self.method}. LoRA is added at products (dot_general, "
            "ragged_dot) of an input and the parameter with the axes of its spec, after nothing but casts, reshapes "
            "and transposes of the parameter. Write it as such a product, with a scale on its input or output, or "
            "leave it out with LoRAConfig.exclude_modules"
        )


def products_methods(cls: type, name: str) -> Callable[..., Any]:
    """Return the method of a wrapped class that multiplies several parameters: that of `cls`, plus their deltas."""
    own = getattr(cls, name)

    @functools.wraps(own)
    def call(self: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        spec: ProductsSpec | ExpertsSpec = vars(self)["jlora_spec"]
        held = {product: vars(self).get(f"{prefix_of(product)}_site") for product in spec.products}
        sites: dict[str, Site] = {product: site for product, site in held.items() if site is not None}
        scope = open_scope(next(iter(sites.values())), self)
        unserved = sites.values() if scope is None else scope.batch.layout.unserved
        served = {product: site for product, site in sites.items() if site not in unserved}
        if not served:
            return own(self, *args, **kwargs)
        return _with_deltas(own, _Call(self, spec, served, args, kwargs))

    return call


def _with_deltas(own: Callable[..., Any], call: _Call) -> Any:
    """Return what the method returns, computed with the deltas of its products. Raises `LoRAError`."""
    params = {product: str(call.spec.products[product].param) for product in call.sites}
    values: list[Array] = [vars(call.layer)[param].get_value() for param in params.values()]
    returned: list[Any] = []  # leaves of its result
    written: list[tuple[str, Any]] = []  # path and old value of Variables with another value
    tree: Any = None

    def traced(values: list[Array]) -> list[Array]:
        nonlocal tree
        twin = nnx.clone(call.layer)  # its Variables are of this trace
        for param, value in zip(params.values(), values, strict=True):
            vars(twin)[param].set_value(value)
        graph, before = nnx.graphdef(twin), _variables(twin)
        returned[:], tree = jax.tree.flatten(own(twin, *call.args, **call.kwargs))
        if nnx.graphdef(twin) != graph:
            raise LoRAError(f"{call.method} sets attributes of its module, and {_TRACED}")
        after = _variables(twin)
        written[:] = [(path, value) for path, value in before.items() if after[path] is not value]
        return [leaf for leaf in returned if isinstance(leaf, jax.Array)] + [after[path] for path, _ in written]

    closed = jax.make_jaxpr(traced)(values)
    first = _EXPERTS if isinstance(call.spec, ExpertsSpec) else 0
    inputs = [
        _Followed(value, 0, product, tuple((_Piece(i, n),) if n != 1 else () for i, n in enumerate(value.shape, first)))
        for product, value in zip(params, values, strict=True)
    ]
    outs = iter(_evaluate(call, closed.jaxpr, closed.consts, inputs))
    result = [next(outs) if isinstance(leaf, jax.Array) else leaf for leaf in returned]
    own_inputs = dict(zip(params.values(), inputs, strict=True))
    for (path, before), after in zip(written, outs, strict=True):
        if after is not own_inputs.get(path, before):  # in nnx.remat and nnx.jit, other tracers have the same value
            raise LoRAError(f"{call.method} writes the Variable {path!r}, and {_TRACED}")
    for leaf in result:
        if isinstance(leaf, _Followed):
            call.refuse(leaf.product, "this parameter is returned")
    return jax.tree.unflatten(tree, result)


_TRACED = "jlora traces it on a copy of the module. Return the value instead, or leave its products out"


def _variables(layer: nnx.Module) -> dict[str, Any]:
    """Return path -> array of the Variables of a layer."""
    leaves = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(nnx.state(layer)))
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _evaluate(call: _Call, jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Return the outputs of a jaxpr. Its inputs and outputs may be `_Followed`."""
    known: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def read(var: Any) -> Any:
        return var.val if isinstance(var, Literal) else known[var]

    for equation in jaxpr.eqns:
        outs = _outputs(call, jaxpr, equation, [read(var) for var in equation.invars])
        known.update(zip(equation.outvars, outs, strict=True))
    return [read(var) for var in jaxpr.outvars]


def _outputs(call: _Call, jaxpr: Jaxpr, equation: JaxprEqn, ins: list[Any]) -> list[Any]:
    """Return the outputs of one equation, of which some inputs may be `_Followed`."""
    name, params = equation.primitive.name, equation.params
    followed = [value for value in ins if isinstance(value, _Followed)]
    moved: _Followed | None = None
    if followed and name in _CALLS:
        body: Any = params.get("jaxpr", params.get("call_jaxpr"))
        return _evaluate(call, getattr(body, "jaxpr", body), getattr(body, "consts", ()), ins)
    if followed and name in _REMATS:
        body = params["jaxpr"]
        again = jax.checkpoint(functools.partial(_evaluate, call, body, ()), **{key: params[key] for key in _OPTIONS})
        # What passes through unchanged stays the same object.
        outs = zip(body.outvars, again(ins), strict=True)
        return [ins[body.invars.index(var)] if var in body.invars else out for var, out in outs]
    if followed and name not in _PRODUCTS:
        moved = _moved(equation, ins, followed[0])
    if len(followed) > 1 or (followed and moved is None and name not in _PRODUCTS):
        call.refuse(followed[0].product, f"{name!r} takes this parameter")
    values = [value.value if isinstance(value, _Followed) else value for value in ins]
    args = {var: value for var, value in zip(equation.invars, values, strict=True) if not isinstance(var, Literal)}
    one = jaxpr.replace(constvars=[], invars=[*args], outvars=equation.outvars, eqns=[equation])
    outs = jaxpr_as_fun(ClosedJaxpr(one, ()))(*args.values())
    if moved is not None:
        return [replace(moved, value=outs[0])]
    return [_with_delta(call, equation, ins, outs[0])] if followed else outs


# --- moves of axes ----------------------------------------------------------------------------------------------------


def _moved(equation: JaxprEqn, ins: Sequence[Any], followed: _Followed) -> _Followed | None:
    """Return the output of a cast or a move of axes, but for its value; None for another equation."""
    name, params, axes = equation.primitive.name, equation.params, followed.axes
    aval: Any = equation.outvars[0].aval
    if name in _CASTS:
        return followed if jnp.issubdtype(aval.dtype, jnp.floating) else None
    if name == "transpose":
        return replace(followed, axes=tuple(axes[i] for i in params["permutation"]))
    if name == "squeeze":
        return replace(followed, axes=tuple(own for i, own in enumerate(axes) if i not in params["dimensions"]))
    if name == "broadcast_in_dim" and aval.size == followed.value.size:
        placed = dict(zip(params["broadcast_dimensions"], axes, strict=True))
        return replace(followed, axes=tuple(placed.get(i, ()) for i in range(aval.ndim)))
    if name == "reshape" and params["dimensions"] is None:
        grouped = _grouped([piece for own in axes for piece in own], aval.shape)
        return None if grouped is None else replace(followed, axes=grouped)
    if name in ("slice", "dynamic_slice") and params.get("strides") is None:
        cut = [i for i, size in enumerate(aval.shape) if size != followed.value.shape[i]]
        if [(p.axis, p.stride) for i in cut for p in axes[i]] == [(_EXPERTS, 1)]:
            most = followed.value.shape[cut[0]] - aval.shape[cut[0]]
            start = jnp.clip(params.get("start_indices", ins[1:])[cut[0]], 0, most)  # as `lax.dynamic_slice` does
            kept = (_Piece(_EXPERTS, aval.shape[cut[0]]),) if aval.shape[cut[0]] != 1 else ()
            axes = (*axes[: cut[0]], kept, *axes[cut[0] + 1 :])
            return replace(followed, axes=axes, first=followed.first + start)
    return None


def _grouped(pieces: list[_Piece], shape: Sequence[int]) -> tuple[tuple[_Piece, ...], ...] | None:
    """Return the pieces of each axis of a reshaped value, or None if they would be cut otherwise than in two."""
    rest, axes = pieces[::-1], list[tuple[_Piece, ...]]()
    for size in shape:
        own: list[_Piece] = []
        while size > 1:
            axis, count, stride = rest.pop()
            part = math.gcd(size, count)
            if part not in (size, count):
                return None
            if part < count:
                rest.append(_Piece(axis, count // part, stride))
            own.append(_Piece(axis, part, stride * (count // part)))
            size //= part
        axes.append(tuple(own))
    return tuple(axes)


# --- products ---------------------------------------------------------------------------------------------------------


def _with_delta(call: _Call, equation: JaxprEqn, ins: list[Any], y: Array) -> Array:
    """Return the output y of a product with its delta."""
    side = 0 if isinstance(ins[0], _Followed) else 1
    followed: _Followed = ins[side]
    x = jnp.asarray(ins[1 - side])  # constants are NumPy arrays
    product, site, spec = followed.product, call.sites[followed.product], call.spec.products[followed.product]
    ragged: Any = equation.params.get("ragged_dot_dimension_numbers")
    numbers = equation.params["dimension_numbers"] if ragged is None else ragged.dot_dimension_numbers
    (contracted, of_x), (batch, batch_of_x) = ((own[side], own[1 - side]) for own in numbers)
    group = () if ragged is None else tuple(ragged.rhs_group_dimensions)
    kept = [i for i in range(len(followed.axes)) if i not in (*contracted, *batch, *group)]
    lead = [i for i in range(x.ndim) if i not in (*of_x, *batch_of_x)]
    inner, outer, shared, groups = (
        [p for i in axes for p in followed.axes[i]] for axes in (contracted, kept, batch, group)
    )
    of_experts = {_EXPERTS} if isinstance(call.spec, ExpertsSpec) else set[int]()
    good = _axes_of(inner) <= {*spec.in_axes} and _axes_of(outer) <= {*spec.out_axes, *of_experts}
    good = good and _axes_of([*shared, *groups]) <= of_experts and jnp.issubdtype(x.dtype, jnp.floating)
    if ragged is not None:  # rows [M, K], kernels [E, K, N]
        good = good and side == 1 and len(lead) == len(groups) == 1 and not _axes_of([*outer, *shared]) & of_experts
    if not good:
        call.refuse(
            product,
            f"{equation.primitive.name!r} contracts its axes {sorted(_axes_of(inner))} with {x.dtype}{list(x.shape)}, "
            f"and keeps {sorted(_axes_of([*shared, *outer]))}, but its spec has in_axes={spec.in_axes} and out_axes="
            f"{spec.out_axes},",
        )
    scope = enter_site(site, call.layer)
    if scope is None:
        return y
    rows = [_Piece(_ROWS, x.shape[i]) for i in lead]
    base, of_rows, restore = _flat(y, [*shared, *(rows + outer if side else outer + rows)], spec.out_axes)
    flat, _, _ = _flat(x.transpose(*batch_of_x, *lead, *of_x), [*shared, *rows, *inner], spec.in_axes)
    if not isinstance(call.spec, ExpertsSpec):
        return restore(add_delta(call.layer, site, scope, base, flat, spec))

    def spread(index: Array, own: Sequence[bool]) -> Array:
        """Return the index of each row of y, given that along some of its axes of rows."""
        along = [piece.size if is_own else 1 for piece, is_own in zip(of_rows, own, strict=True)]
        return jnp.broadcast_to(index.reshape(along), base.shape[:-1]).reshape(-1)

    found = _rows_of_input(call, call.spec, scope, product, flat, flat[(0,) * len(shared)], ragged is not None)
    if found is None:
        return y
    if ragged is None:
        iotas = [lax.broadcasted_iota(jnp.int32, base.shape[:-1], i) for i in range(len(of_rows))]
        places = [iota * piece.stride for iota, piece in zip(iotas, of_rows, strict=True) if piece.axis == _EXPERTS]
        expert = sum(places, jnp.zeros(base.shape[:-1], jnp.int32)).reshape(-1)
    else:  # rows after the last group have no expert
        expert = jnp.searchsorted(jnp.cumsum(ins[2]), jnp.arange(len(base)), side="right").astype(jnp.int32)
    source = spread(jnp.asarray(found.source), [piece.axis == _ROWS for piece in of_rows])
    in_x = [piece.axis == _ROWS or i < len(shared) for i, piece in enumerate(of_rows)]
    x_rows = None if all(in_x) else spread(jnp.arange(math.prod(flat.shape[:-1])), in_x)
    row_map = RowMap(source, found.of, found.length, expert + followed.first)
    return restore(add_delta(call.layer, site, scope, base, flat, spec, row_map, x_rows))


def _axes_of(pieces: Sequence[_Piece]) -> set[int]:
    return {piece.axis for piece in pieces}


def _flat(
    array: Array, pieces: Sequence[_Piece], axes: Sequence[int]
) -> tuple[Array, list[_Piece], Callable[[Array], Array]]:
    """Return an array as [*rows, features], the pieces of its rows, and the way back.

    Args:
      array: an array with these pieces, each of one or several of its axes.
      pieces: its pieces, in order.
      axes: the axes of features, in the order of a spec.
    """
    rows = [i for i, piece in enumerate(pieces) if piece.axis not in axes]
    features = [i for i in range(len(pieces)) if i not in rows]
    order = rows + sorted(features, key=lambda i: (axes.index(pieces[i].axis), -pieces[i].stride))
    sizes = [pieces[i].size for i in order]
    flat = array.reshape([piece.size for piece in pieces]).transpose(order)
    flat = flat.reshape(*sizes[: len(rows)], math.prod(sizes[len(rows) :]))
    back = [order.index(i) for i in range(len(order))]
    return flat, [pieces[i] for i in rows], lambda out: out.reshape(sizes).transpose(back).reshape(array.shape)


def _rows_of_input(
    call: _Call, spec: ExpertsSpec, scope: Scope, product: str, x: Array, one: Array, is_ragged: bool
) -> RowMap | None:
    """Return the map of the rows of an input of experts, of which `one` is that of one expert, or None if none fit."""
    if spec.rows is not None:
        return spec.rows(call.layer, product, x, *call.args, **call.kwargs)
    if is_ragged:
        raise LoRAError(
            f"{call.sites[product].path}: ragged_dot does not show which tokens its rows are; give the ExpertsSpec of "
            f"{type(call.layer).__name__.removesuffix('WithLoRA')} `rows`, which returns their jlora.RowMap"
        )
    return scope.map_of(call.sites[product], one)
