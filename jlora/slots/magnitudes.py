"""Magnitudes of DoRA adapters (arXiv:2402.09353): the factor of each output column of the layers.

A layer of base weight W and delta s B A serves column n of W + s B A with the norm `ModuleLoRA.magnitude[n]`. The slots
hold the quotient m[n] = magnitude[n] / ||W[n] + s (B A)[n]||, where norms are over the input features. As in PEFT, it
is computed once for each version of the adapter.

The norms are computed on the device of W, without a float32 array of the size of W:

    ||W + s B A||^2 = ||W||^2 + 2 s (W A^T) . B + s^2 (B A A^T) . B

The terms can cancel only if W + s B A is small beside W. A column where they cancel to less than `_CANCELLED` of their
sum is an error, because float32 does not hold its norm.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from jlora._compat import explicit_transfers
from jlora.adapters.variants import MAGNITUDE
from jlora.errors import AdapterMismatchError, LoRAError
from jlora.layers.base_kernel import kernel_of
from jlora.layers.site import Site
from jlora.layers.specs import EmbedSpec, LinearSpec
from jlora.layers.wrap.wrapped import WrappedModel, spec_of
from jlora.sharding.put import put
from jlora.slots.blocks import Block, Row, unpack
from jlora.slots.packed import PackedAdapter, Placement
from jlora.slots.placement import auto_axes, with_auto_axes

_CANCELLED = 2.0**-10
_FLOATS = ("bfloat16", "float16", "float32", "float64")


def check_base(packed: PackedAdapter, wrapped: WrappedModel) -> None:
    """Check the layers of a DoRA adapter before any norm is computed.

    Raises:
      AdapterMismatchError: the bias of a layer is not known, or its base weight is not of floats.
      LoRAError: a base weight was donated.
    """
    for p in packed.placements:
        if MAGNITUDE.name not in p.extras:
            continue
        layer, spec = wrapped.modules[p.site], _linear(wrapped, p.site)
        if (reason := _unknown_bias(layer, p.site, spec)) is not None:
            raise AdapterMismatchError(f"adapter {packed.name!r}: {p.module}: DoRA is not served here: {reason}")
        kernel = kernel_of(layer, spec)
        if kernel is None or not kernel.exact or jnp.dtype(kernel.dtype).name not in _FLOATS:
            found = "is not held by the layer" if kernel is None else f"is {kernel.array.dtype}"
            raise AdapterMismatchError(
                f"adapter {packed.name!r}: {p.module}: DoRA needs the base weight in floating point, and "
                f"{p.site.path}.{spec.param} {found}"
            )
        kernel = _kernel(layer, spec)
        if kernel.is_deleted():
            raise LoRAError(_DONATED.format(path=p.site.path, param=spec.param))


def refused_sites(wrapped: WrappedModel) -> frozenset[Site]:
    """Return the sites with magnitudes that `check_base` refuses, since the bias in their output is not known."""
    with_magnitudes = ((site, layer) for site, layer in wrapped.modules.items() if MAGNITUDE in site.spec.extras)
    return frozenset(
        site for site, layer in with_magnitudes if _unknown_bias(layer, site, _linear(wrapped, site)) is not None
    )


_DONATED = "{path}.{param}: the parameter was donated; give it back to the model before a DoRA adapter is loaded"


def _unknown_bias(layer: nnx.Module, site: Site, spec: LinearSpec) -> str | None:
    """Return why the bias in the output of a layer is not known, or None if it is."""
    if site.doubt is not None and site.prefix == "jlora":
        return f"{site.doubt.why}, so the bias in its output is not known; {site.doubt.instead}"
    if spec.bias is None:
        return None
    depth = math.prod(site.spec.stack)
    own: dict[str, Any] = vars(layer)
    sizes = {
        name: cast("Any", value).get_value().size for name, value in own.items() if isinstance(value, nnx.Variable)
    }
    if own.get(spec.bias) is not None:
        if sizes.get(spec.bias) == depth * spec.out_features:
            return None
        return f"{site.path}.{spec.bias} is no nnx.Variable of {spec.out_features} values"
    known = {spec.param, *site.attributes, site.stamps}
    other = [name for name, size in sizes.items() if name not in known and size == depth * spec.out_features]
    if not other:
        return None
    return (
        f"{site.path} has no attribute {spec.bias!r}, and {other[0]!r} may be its bias; name the bias in "
        "LinearSpec(bias=...), or None if its output has none"
    )


def _linear(wrapped: WrappedModel, site: Site) -> LinearSpec:
    spec = spec_of(wrapped.modules[site], site)
    return spec.head if isinstance(spec, EmbedSpec) else spec


def _kernel(layer: nnx.Module, spec: LinearSpec) -> jax.Array:
    return vars(layer)[cast("str", spec.param)].get_value()


def values_of_rows(packed: PackedAdapter, wrapped: WrappedModel) -> Iterator[tuple[Row, Float[np.ndarray, "N"]]]:
    """Yield (row, values in the order of the adapter's features) of each row that an adapter has magnitudes for.

    Columns without a module of the adapter have 1.

    Raises:
      AdapterMismatchError: a norm is 0 or not finite, or the terms of its square cancel.
      LoRAError: a base weight was donated.
    """
    by_row: dict[Row, list[Placement]] = {}
    for p in packed.placements:
        if MAGNITUDE.name in p.extras:
            by_row.setdefault((p.site, p.row), []).append(p)
    blocks: dict[int, list[Block]] = {}
    for block in packed.blocks:
        blocks.setdefault(id(block.chunk), []).append(block)
    for of_chunk in blocks.values():
        rows = [row for row in of_chunk[0].chunk.rows if row in by_row]
        for row, factors in unpack(of_chunk, rows).items():
            yield row, _of_row(packed.name, wrapped, *row, by_row[row], *factors)


def _of_row(
    name: str,
    wrapped: WrappedModel,
    site: Site,
    row: int,
    placements: Sequence[Placement],
    a: Float[np.ndarray, "n R K"],
    b: Float[np.ndarray, "R N"],
) -> Float[np.ndarray, "N"]:
    """Return the magnitudes of one layer in the order of the adapter's features."""
    layer, spec, slots = wrapped.modules[site], _linear(wrapped, site), site.spec
    scaled = np.zeros(b.shape, np.float32)
    for p in placements:
        columns = slots.columns(p.first, p.count)
        scaled[:, columns] = b[:, columns].astype(np.float32) * np.float32(p.scaling)
    of_slice = np.repeat(np.arange(slots.slices, dtype=np.int32), slots.out_sizes)
    squares, terms = _squares(layer, site, spec, row, a.astype(np.float32), scaled, of_slice)
    values = np.ones(slots.out_features, np.float32)
    for p in placements:
        columns = slots.columns(p.first, p.count)
        own, total = squares[columns], terms[columns]
        bad = ~(np.isfinite(total) & (own > _CANCELLED * total))
        if bad.any():
            at = int(bad.argmax())
            reason = "is not finite" if not np.isfinite(total[at]) else "is 0" if not total[at] else "cancels to 0"
            raise AdapterMismatchError(
                f"adapter {name!r}: {p.module}: the norm of column {at} of base weight plus delta {reason}; DoRA "
                "divides its magnitude by it"
            )
        values[columns] = p.extras[MAGNITUDE.name] / np.sqrt(own)
    return values


def _squares(
    layer: nnx.Module,
    site: Site,
    spec: LinearSpec,
    row: int,
    a: Float[np.ndarray, "n R K"],
    b: Float[np.ndarray, "R N"],
    of_slice: Int[np.ndarray, "N"],
) -> Float[np.ndarray, "2 N"]:
    """Return the squared norms of the columns of W + B A, and the sums of the terms that do not cancel."""
    kernel = _kernel(layer, spec)
    axes = kernel.shape[len(site.spec.stack) :]
    real = np.ones(spec.in_features, bool)
    if spec.columns_in is not None:  # padding features may hold any value
        real[:] = False
        real[spec.columns_in.positions] = True
        a = _spread(a, spec.columns_in.positions, spec.in_features)
    if spec.columns_out is not None:
        places = spec.columns_out.positions
        b, of_slice = _spread(b, places, spec.out_features), _spread(of_slice, places, spec.out_features)
    ins = [axes[i] for i in spec.in_axes]
    operands = [np.int32(row), a.reshape(*a.shape[:2], *ins), b, of_slice, real.reshape(ins)]
    mesh = kernel.sharding.mesh if isinstance(kernel.sharding, NamedSharding) else None
    try:
        with auto_axes(), explicit_transfers():
            kernel = with_auto_axes(kernel)
            if isinstance(kernel.sharding, NamedSharding):
                mesh = kernel.sharding.mesh
                operands = put(operands, [NamedSharding(mesh, PartitionSpec())] * len(operands))
            compute = _compiled(spec.in_axes, spec.out_axes, bool(site.spec.stack), mesh)
            found = np.asarray(compute(kernel, *operands))  # waited for, so that a step waits for one layer at most
    except RuntimeError as error:
        if kernel.is_deleted():
            raise LoRAError(_DONATED.format(path=site.path, param=spec.param)) from error
        raise
    return found if spec.columns_out is None else found[:, spec.columns_out.positions]


def _spread(values: np.ndarray, positions: np.ndarray, total: int) -> np.ndarray:
    """Return values [..., size] at their positions in [..., total], with zeros elsewhere."""
    found = np.zeros((*values.shape[:-1], total), values.dtype)
    found[..., positions] = values
    return found


@functools.lru_cache(maxsize=256)
def _compiled(
    in_axes: tuple[int, ...], out_axes: tuple[int, ...], stacked: bool, mesh: Mesh | None
) -> Callable[..., Array]:
    """Return `_column_squares` under `jax.jit`, with a result that every process holds."""
    where = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    return jax.jit(functools.partial(_column_squares, in_axes, out_axes, stacked), out_shardings=where)


def _column_squares(
    in_axes: tuple[int, ...],
    out_axes: tuple[int, ...],
    stacked: bool,
    kernel: Float[Array, "*axes"],
    row: Int[Array, ""],
    a: Float[Array, "n R *ins"],
    b: Float[Array, "R N"],
    of_slice: Int[Array, "N"],
    real: Bool[Array, "*ins"],
) -> Float[Array, "2 N"]:
    """Compute `_squares` on the device. Column n takes the factor a[of_slice[n]]."""
    w = cast("Array", jax.lax.dynamic_index_in_dim(kernel, row, keepdims=False)) if stacked else kernel
    slices, ranks, *ins = a.shape
    a = a.reshape(slices * ranks, *ins)
    chosen = jnp.arange(slices, dtype=jnp.int32)[:, None, None] == of_slice[None, None]
    own = jnp.where(chosen, b[None], 0).reshape(slices * ranks, -1)
    letters = "abcdefghijklmnop"[: w.ndim]
    inner, outer = ("".join(letters[i] for i in axes) for axes in (in_axes, out_axes))
    exact: Mapping[str, Any] = {"precision": "highest", "preferred_element_type": jnp.float32}
    squares = jnp.square(w.astype(jnp.float32)).transpose(*out_axes, *in_axes)
    real = real.reshape((1,) * len(out_axes) + real.shape)
    squares = jnp.where(real, squares, 0).sum(range(len(out_axes), w.ndim)).reshape(-1)
    if w.dtype.itemsize == 2:
        # Two values of w's dtype hold a value of A to 16 bits or more, so that w is multiplied as it is stored.
        size = jnp.abs(a).max(range(1, a.ndim), keepdims=True)
        size = jnp.where(size > 0, size, 1)
        high = (a / size).astype(w.dtype)
        low = (a / size - high.astype(jnp.float32)).astype(w.dtype)
        parts = jnp.einsum(f"{letters},yz{inner}->yz{outer}", w, jnp.stack([high, low]), **exact)
        cross = parts.sum(0).reshape(len(a), -1) * size.reshape(-1, 1)
    else:
        cross = jnp.einsum(f"{letters},z{inner}->z{outer}", w, a.astype(w.dtype), **exact).reshape(len(a), -1)
    gram = jnp.einsum(f"y{inner},z{inner}->yz", a, a, **exact)
    delta = (jnp.einsum("yz,zn->yn", gram, own, **exact) * own).sum(0)
    return jnp.stack([squares + 2 * (cross * own).sum(0) + delta, squares + delta])
