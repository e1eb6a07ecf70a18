"""DoRA (arXiv:2402.09353): the columns of a weight with its LoRA have norms of their own.

A layer of base weight W and delta s B A serves column n of W + s B A with the norm `vector[n]`, the magnitude. The
slots hold the quotient m[n] = vector[n] / ||W[n] + s (B A)[n]||, where norms are over the input features. As in PEFT,
it is computed once for each version of the adapter.

The norms are computed on the device of W, without a float32 array of the size of W:

    ||W + s B A||^2 = ||W||^2 + 2 s (W A^T) . B + s^2 (B A A^T) . B

The terms can cancel only if W + s B A is small beside W. A column where they cancel to less than `_CANCELLED` of their
sum is an error, because float32 does not hold its norm.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from jlora.adapters.variants import DORA
from jlora.errors import AdapterMismatchError
from jlora.layers.variants.finisher import AdaptedWeight, Finisher
from jlora.sharding.put import put

_CANCELLED = 2.0**-10


def _scale_columns(
    y: Float[Array, "M N"],
    x: Float[Array, "M K"],
    base: Float[Array, "M N"],
    bias: Float[Array, "N"] | None,
    vectors: Float[Array, "S N"],
    slots: Int[Array, "M"],
) -> Float[Array, "M N"]:
    """Return bias + magnitude * (y - bias), which is bitwise y where a magnitude is 1. Magnitudes have no gradient."""
    del x, base
    scales = lax.stop_gradient(vectors).at[slots].get(mode="fill", fill_value=1)
    if bias is None:
        return scales * y
    bias = bias.astype(jnp.float32)[None]
    return jnp.where(scales == 1, y, bias + scales * (y - bias))


def _scaled(
    weight: Float[np.ndarray, "K N"], bias: Float[np.ndarray, "N"], vector: Float[np.ndarray, "N"]
) -> tuple[Float[np.ndarray, "K N"], Float[np.ndarray, "N"]]:
    return weight * vector, bias


def _values(weight: AdaptedWeight) -> Float[np.ndarray, "N"]:
    """Return the quotient of magnitude and norm of each column, 1 for columns without a module."""
    squares, terms = _squares(weight)
    values = np.full(len(squares), DORA.fill, np.float32)
    for module, (columns, magnitudes) in weight.modules.items():
        own, total = squares[columns], terms[columns]
        bad = ~(np.isfinite(total) & (own > _CANCELLED * total))
        if bad.any():
            at = int(bad.argmax())
            reason = "is not finite" if not np.isfinite(total[at]) else "is 0" if not total[at] else "cancels to 0"
            raise AdapterMismatchError(
                f"{module}: the norm of column {at} of base weight plus delta {reason}; DoRA divides its magnitude "
                "by it"
            )
        values[columns] = magnitudes / np.sqrt(own)
    return values


def _squares(weight: AdaptedWeight) -> Float[np.ndarray, "2 N"]:
    """Return the squared norms of the columns of W + B A, and the sums of the terms that do not cancel."""
    kernel, spec, a, b, of_slice = weight.kernel, weight.spec, weight.a, weight.b, weight.slices
    axes = kernel.shape[weight.layer is not None :]
    real = np.ones(spec.in_features, bool)
    if spec.columns_in is not None:  # padding features may hold any value
        real[:] = False
        real[spec.columns_in.positions] = True
        a = _spread(a, spec.columns_in.positions, spec.in_features)
    if spec.columns_out is not None:
        places = spec.columns_out.positions
        b, of_slice = _spread(b, places, spec.out_features), _spread(of_slice, places, spec.out_features)
    ins = [axes[i] for i in spec.in_axes]
    operands = [np.int32(weight.layer or 0), a.reshape(*a.shape[:2], *ins), b, of_slice, real.reshape(ins)]
    mesh = None
    if isinstance(kernel.sharding, NamedSharding):
        mesh = cast("Mesh", kernel.sharding.mesh)
        operands = put(operands, [NamedSharding(mesh, PartitionSpec())] * len(operands))
    compute = _compiled(spec.in_axes, spec.out_axes, weight.layer is not None, mesh)
    found = np.asarray(compute(kernel, *operands))  # waited for, so that a step waits for one layer at most
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
    layer: Int[Array, ""],
    a: Float[Array, "n R *ins"],
    b: Float[Array, "R N"],
    of_slice: Int[Array, "N"],
    real: Bool[Array, "*ins"],
) -> Float[Array, "2 N"]:
    """Compute `_squares` on the device. Column n takes the factor a[of_slice[n]]."""
    w = cast("Array", jax.lax.dynamic_index_in_dim(kernel, layer, keepdims=False)) if stacked else kernel
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


SCALE_COLUMNS = Finisher(DORA, frozenset({"sum", "bias"}), _scale_columns, _scaled, _values)
