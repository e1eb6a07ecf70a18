"""LoRA of products inside a method: the jaxpr of the method, evaluated with a delta after each product.

The parameters of the products are inputs of the jaxpr. They are followed through casts and moves of their axes to a
`dot_general` or `ragged_dot`, whose result gets the delta. Any other equation that takes one raises.
"""

# Jaxprs have no types.
# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NoReturn, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun

from jlora.errors import LoRAError, LoRAUsageError
from jlora.layers.forward.delta import add_delta
from jlora.layers.forward.experts import prefix_of
from jlora.layers.forward.rows import RowMap
from jlora.layers.forward.scope import enter_site, open_scope
from jlora.layers.site import Site
from jlora.layers.specs import ExpertsSpec, ProductsSpec

_CASTS = ("convert_element_type", "copy", "name", "stop_gradient", "sharding_constraint", "reshard", "pvary", "pcast")
_CALLS = ("jit", "pjit", "closed_call", "core_call", "custom_jvp_call")
_REMATS = ("checkpoint", "remat", "remat2")
_PRODUCTS = ("dot_general", "ragged_dot_general")
_EXPERTS, _ROWS = -1, -2  # the axis of experts, before those that a `LinearSpec` numbers; an axis of the input's rows
_TRACED = "jlora traces it on a copy of the module: return the value instead, or leave its products out"


class _Piece(NamedTuple):
    """An axis, or every `stride`-th index of it."""

    axis: int
    size: int
    stride: int = 1


_Axes: TypeAlias = tuple[tuple[_Piece, ...], ...]


@functools.partial(jax.tree_util.register_dataclass, data_fields=["value"], meta_fields=["product", "axes", "first"])
@dataclass(frozen=True, eq=False)
class _Followed:
    """A value computed from a parameter.

    Attributes:
      value: the array.
      product: name of the parameter's product.
      axes: the pieces of the parameter's axes in each of its own, slowest first; none in an axis of size 1.
      first: its first expert, after a slice of the axis of experts.
    """

    value: Array
    product: str
    axes: _Axes
    first: int = 0


@dataclass(frozen=True, eq=False)
class _Call:
    """One call of a method, with the sites of the products that serve adapters."""

    layer: nnx.Module
    spec: ProductsSpec | ExpertsSpec
    sites: Mapping[str, Site]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def method(self) -> str:
        """Name of the class and of the method."""
        return f"{type(self.layer).__name__.removesuffix('WithLoRA')}.{self.spec.method}"

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
    """Return the result of the method `own`, computed with the deltas of its products. Raises `LoRAError`."""
    params = {str(call.spec.products[product].param): product for product in call.sites}
    first = _EXPERTS if isinstance(call.spec, ExpertsSpec) else 0
    inputs: dict[str, _Followed] = {}
    for param, product in params.items():
        value: Array = vars(call.layer)[param].get_value()
        axes = tuple([(_Piece(i, size),) if size != 1 else () for i, size in enumerate(value.shape, first)])
        inputs[param] = _Followed(value, product, axes)
    returned: list[Any] = []  # leaves of the result
    written: list[tuple[str, Any]] = []  # path and old value of each variable with another value
    tree: Any = None

    def traced(values: dict[str, Array]) -> list[Any]:
        nonlocal tree
        twin = nnx.clone(call.layer)  # its variables are of this trace
        for param, value in values.items():
            vars(twin)[param].set_value(value)
        graph, before = nnx.graphdef(twin), _variables(twin)
        returned[:], tree = jax.tree.flatten(own(twin, *call.args, **call.kwargs))
        if nnx.graphdef(twin) != graph:
            raise LoRAError(f"{call.method} sets attributes of its module, and {_TRACED}")
        after = _variables(twin)
        written[:] = [(path, value) for path, value in before.items() if after[path] is not value]
        return [leaf for leaf in returned if isinstance(leaf, jax.Array)] + [after[path] for path, _ in written]

    closed = jax.make_jaxpr(traced)({param: followed.value for param, followed in inputs.items()})
    outs = iter(_evaluate(call, closed.jaxpr, closed.consts, [inputs[param] for param in sorted(inputs)]))
    result = [next(outs) if isinstance(leaf, jax.Array) else leaf for leaf in returned]
    for (path, before), after in zip(written, outs, strict=True):
        if after is not inputs.get(path, before):  # `nnx.remat` and `nnx.jit` return all variables
            raise LoRAError(f"{call.method} writes the Variable {path!r}, and {_TRACED}")
    for leaf in result:
        if isinstance(leaf, _Followed):
            call.refuse(leaf.product, "this parameter is returned")
    return jax.tree.unflatten(tree, result)


def _variables(layer: nnx.Module) -> dict[str, Any]:
    """Return path -> array of the variables of a layer."""
    leaves: Any = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(nnx.state(layer)))
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


def _outputs(call: _Call, jaxpr: Jaxpr, equation: JaxprEqn, ins: Sequence[Any]) -> Sequence[Any]:
    """Return the outputs of one equation, of which some inputs may be `_Followed`."""
    name, params = equation.primitive.name, equation.params
    followed = [value for value in ins if isinstance(value, _Followed)]
    body: Any = params.get("jaxpr", params.get("call_jaxpr"))
    if followed and name in _CALLS:
        return _evaluate(call, getattr(body, "jaxpr", body), getattr(body, "consts", ()), ins)
    if followed and name in _REMATS:
        inner = functools.partial(_evaluate, call, body, ())
        again: Any = jax.checkpoint(inner, prevent_cse=params["prevent_cse"], policy=params["policy"])(ins)
        # What passes through unchanged stays the same object.
        same = {var: value for var, value in zip(body.invars, ins, strict=True) if var in body.outvars}
        return [out if isinstance(v, Literal) else same.get(v, out) for v, out in zip(body.outvars, again, strict=True)]
    moved = _moved(equation, followed[0]) if followed and name not in _PRODUCTS else None
    if len(followed) > 1 or (followed and moved is None and name not in _PRODUCTS):
        call.refuse(followed[0].product, f"{name!r} takes this parameter")
    values = [value.value if isinstance(value, _Followed) else value for value in ins]
    args = {var: value for var, value in zip(equation.invars, values, strict=True) if not isinstance(var, Literal)}
    one = jaxpr.replace(constvars=[], invars=[*args], outvars=equation.outvars, eqns=[equation])
    outs: list[Any] = jaxpr_as_fun(ClosedJaxpr(one, ()))(*args.values())
    if moved is not None:
        return [replace(moved, value=outs[0])]
    return [_add_delta(call, equation, ins, outs[0])] if followed else outs


# --- moves of axes ----------------------------------------------------------------------------------------------------


def _moved(equation: JaxprEqn, followed: _Followed) -> _Followed | None:
    """Return the output of a cast or a move of axes, but for its value; None for another equation."""
    name, params, axes = equation.primitive.name, equation.params, followed.axes
    aval: Any = equation.outvars[0].aval
    shape: tuple[int, ...] = getattr(aval, "shape", ())
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
        grouped = _grouped([piece for own in axes for piece in own], shape)
        return None if grouped is None else replace(followed, axes=grouped)
    if name == "slice" and params["strides"] is None:  # of experts
        cut = [i for i, size in enumerate(shape) if size != followed.value.shape[i]]
        if [(piece.axis, piece.stride) for i in cut for piece in axes[i]] == [(_EXPERTS, 1)]:
            (i,) = cut
            kept = (_Piece(_EXPERTS, shape[i]),) if shape[i] != 1 else ()
            axes = (*axes[:i], kept, *axes[i + 1 :])
            return replace(followed, axes=axes, first=followed.first + params["start_indices"][i])
    return None


def _grouped(pieces: list[_Piece], shape: Sequence[int]) -> _Axes | None:
    """Return the pieces of each axis of a reshaped value, or None if a piece is cut at no divisor."""
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


def _add_delta(call: _Call, equation: JaxprEqn, ins: Sequence[Any], y: Array) -> Array:
    """Return the output y of a product with its delta."""
    side = 0 if isinstance(ins[0], _Followed) else 1
    followed: _Followed = ins[side]
    x = jnp.asarray(ins[1 - side])  # constants are NumPy arrays
    product, site, spec = followed.product, call.sites[followed.product], call.spec.products[followed.product]
    ragged: Any = equation.params.get("ragged_dot_dimension_numbers")
    numbers = equation.params["dimension_numbers"] if ragged is None else ragged.dot_dimension_numbers
    (contracted, of_x), (batch, batch_of_x) = ((own[side], own[1 - side]) for own in numbers)
    group = () if ragged is None else tuple(ragged.rhs_group_dimensions)
    free = [i for i in range(len(followed.axes)) if i not in (*contracted, *batch, *group)]
    lead = [i for i in range(x.ndim) if i not in (*of_x, *batch_of_x)]
    inner, outer, shared, groups = (
        [piece for i in axes for piece in followed.axes[i]] for axes in (contracted, free, batch, group)
    )
    experts = {_EXPERTS} if isinstance(call.spec, ExpertsSpec) else set[int]()
    good = {p.axis for p in inner} <= {*spec.in_axes} and {p.axis for p in outer} <= {*spec.out_axes, *experts}
    good = good and {p.axis for p in [*shared, *groups]} <= experts and jnp.issubdtype(x.dtype, jnp.floating)
    if ragged is not None:  # rows [M, K], kernels [E, K, N]
        good = good and side == 1 and len(lead) == len(groups) == 1
        good = good and not {p.axis for p in [*outer, *shared]} & experts
    if not good:
        call.refuse(
            product,
            f"{equation.primitive.name!r} contracts its axes {sorted({p.axis for p in inner})} with "
            f"{x.dtype}{list(x.shape)}, but its spec has in_axes={spec.in_axes} and out_axes={spec.out_axes},",
        )
    scope = enter_site(site, call.layer)
    if scope is None:
        return y
    rows = [_Piece(_ROWS, x.shape[i]) for i in lead]
    base, of_rows, restore = _flat(y, [*shared, *(rows + outer if side else outer + rows)], spec.out_axes)
    flat, _, _ = _flat(x.transpose(*batch_of_x, *lead, *of_x), [*shared, *rows, *inner], spec.in_axes)
    if not isinstance(call.spec, ExpertsSpec):
        return restore(add_delta(call.layer, site, scope, base, flat, spec))
    if call.spec.rows is not None:
        found: Any = call.spec.rows(call.layer, product, flat, *call.args, **call.kwargs)
        if not isinstance(found, RowMap) or found.source.size != math.prod(piece.size for piece in rows):
            raise LoRAUsageError(
                f"{site.path}: `rows` of its ExpertsSpec must return a jlora.RowMap of {[p.size for p in rows]} rows, "
                f"got {found!r:.200}"
            )
    elif ragged is None:
        found = scope.map_of(site, flat[(0,) * len(shared)])
    else:
        raise LoRAError(
            f"{site.path}: ragged_dot in {call.method} does not show which tokens its rows are; give the ExpertsSpec "
            "`rows`, which returns their jlora.RowMap"
        )
    if found is None:
        return y

    def spread(index: Array, own: Sequence[bool]) -> Array:
        """Return the index of each row of y, given that along some of its axes of rows."""
        along = [piece.size if is_own else 1 for piece, is_own in zip(of_rows, own, strict=True)]
        return jnp.broadcast_to(index.reshape(along), base.shape[:-1]).reshape(-1)

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


def _flat(
    array: Array, pieces: Sequence[_Piece], axes: Sequence[int]
) -> tuple[Array, list[_Piece], Callable[[Array], Array]]:
    """Return an array as [*rows, features], the pieces of its rows, and the way back.

    `pieces` are those of the array, in order. The features are those of `axes`, in the order of a spec.
    """
    rows = [i for i, piece in enumerate(pieces) if piece.axis not in axes]
    features = [i for i in range(len(pieces)) if i not in rows]
    order = rows + sorted(features, key=lambda i: (axes.index(pieces[i].axis), -pieces[i].stride))
    sizes = [pieces[i].size for i in order]
    flat = array.reshape([piece.size for piece in pieces]).transpose(order)
    flat = flat.reshape(*sizes[: len(rows)], math.prod(sizes[len(rows) :]))
    back = [order.index(i) for i in range(len(order))]
    return flat, [pieces[i] for i in rows], lambda out: out.reshape(sizes).transpose(back).reshape(array.shape)
