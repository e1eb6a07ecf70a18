"""Layers that do not hold their weight in floats: the check of their own product, and a float product in its place.

Such a layer may round its input to few bits. Its own product y is compared with z = x W, where W is its dequantized
weight, column by column. The other checks then use z in place of y, so that no rounding loosens them.

With both centred, <y, z> - <z, z> is a sum of rounding errors times z in each column, and zero on average. A value of x
that is rounded to n bits has an error of variance d^2: d = max|x| / 254 / sqrt(3) for int8, and |x| / 16 / sqrt(3) for
float8_e4m3fn. Those of one row give an error of variance d^2 W^2 in y, and outputs that are rounded to bfloat16 add one
of at most (2^-9 y)^2. A right column exceeds six standard deviations of the sum about once in 10^9. Exchanged and
negated columns exceed them by far. Weights and scales that a layer rounds to bfloat16 have the same errors in all rows,
for which the bound has a second term.
"""

import functools
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jaxtyping import Array, Float

from jlora import _qwix
from jlora.errors import LoRAError
from jlora.layers.base_kernel import arrays_of, can_dequantize, dequantized
from jlora.layers.forward.linear import parameters_of, rows_of_call
from jlora.layers.forward.mesh import across_mesh, shards_of
from jlora.layers.site import Site, SlotRanks, set_attribute
from jlora.layers.specs import LinearSpec

_DEVIATIONS = 6  # of the sum of rounding errors
_HALF_ULP = 2.0**-9  # of bfloat16, relative to the value
_FACTORS = "jlora_product_a", "jlora_product_b"
_COLUMNS = "jlora_product_scale", "jlora_product_offset"


class Products:
    """The comparison of layers' own products with those of their dequantized weights, over all calls of a forward.

    Rows that differ by less than their rounding have errors in common, so one of them counts.
    """

    def __init__(self) -> None:
        self._columns: dict[tuple[Site, int], _Columns] = {}
        self.dtypes: set[Any] = set()  # of the layers' outputs
        self._lock = threading.Lock()  # the runtime's threads call `add`

    def add(self, site: Site, layer: Any, y: Any, z: Any, variance: Any, size: Any) -> None:
        """Add the rows of one call, all [R, N].

        Args:
          site: The site of the layer.
          layer: Index of the layer in a stack, else 0.
          y: The layer's own product.
          z: The product of its input and its dequantized weight.
          variance: Of the error in y that the rounding of its input gives.
          size: The norm of the products of each input and its weight.
        """
        arrays = [np.asarray(rows, np.float64) for rows in (y, z, variance, size)]
        with self._lock:
            self._columns.setdefault((site, int(layer)), _Columns()).add(*arrays)

    def judge(self, sites: Sequence[Site]) -> list[tuple[int, int, int]]:
        """Return for each site: fewest rows of a layer, wrong columns, and the first of these.

        One process gets the calls of a computation of several, so the results of all are combined.
        """
        found = np.array([self._judge(site) for site in sites], np.int64).reshape(-1, 3)
        if jax.process_count() > 1:
            found = np.asarray(multihost_utils.process_allgather(found)).max(0)
        return [(int(rows), int(wrong), int(first)) for rows, wrong, first in found]

    def _judge(self, site: Site) -> tuple[int, int, int]:
        own = [columns.finish() for (each, _), columns in self._columns.items() if each is site]
        if len(own) < (site.spec.layers or 1):
            return 0, 0, 0
        wrong = np.flatnonzero(np.any([columns.wrong() for columns in own if columns.rows > 1], axis=0))
        return min(columns.rows for columns in own), len(wrong), int(wrong[0]) if len(wrong) else 0


@dataclass
class _Columns:
    """Sums over the rows of one layer, for each column."""

    rows: int = 0
    off: Any = 0.0  # <y, z> - <z, z>
    variance: Any = 0.0
    systematic: Any = 0.0
    seen: set[bytes] = field(default_factory=set[bytes])  # the cells of all rows
    single: list[tuple[np.ndarray, ...]] = field(
        default_factory=list[tuple[np.ndarray, ...]]
    )  # rows of calls with one new row

    def add(self, y: np.ndarray, z: np.ndarray, variance: np.ndarray, size: np.ndarray) -> None:
        finite = np.flatnonzero(np.isfinite(y).all(1) & np.isfinite(z).all(1))
        cells = {cell: row for row, cell in zip(finite, _cells(z[finite], variance[finite]), strict=True)}
        new = [row for cell, row in cells.items() if cell not in self.seen]
        self.seen |= cells.keys()
        rows = tuple(array[new] for array in (y, z, variance, size))
        if len(new) == 1:
            self.single.append(rows)
        elif new:
            self._sum(*rows)

    def finish(self) -> "_Columns":
        """Add the rows that came alone."""
        if self.single:
            self._sum(*map(np.concatenate, zip(*self.single, strict=True)))
            self.single = []
        return self

    def _sum(self, y: np.ndarray, z: np.ndarray, variance: np.ndarray, size: np.ndarray) -> None:
        # A bias adds the same to all rows, so centred rows do not contain it.
        centred = z - z.mean(0)
        self.rows += len(y)
        self.off += (centred * (y - y.mean(0) - centred)).sum(0)
        # A layer rounds its product and, after the bias, its output.
        self.variance += (centred**2 * (variance + _HALF_ULP**2 * (y**2 + z**2))).sum(0)
        self.systematic += (2 * _HALF_ULP * np.abs(centred) * (np.abs(centred) + size)).sum(0)

    def wrong(self) -> np.ndarray:
        return ~(np.abs(self.off) <= _DEVIATIONS * np.sqrt(self.variance) + self.systematic)


def _cells(z: np.ndarray, variance: np.ndarray) -> list[bytes]:
    """Return the cell of each row. Rows whose inputs differ by more than their rounding have different cells."""
    places = z @ np.random.default_rng(0).normal(size=(z.shape[1], 8))
    exponent = np.rint(np.log2(4 * np.sqrt(variance.sum(1, keepdims=True)) + 1e-300))
    return [cell.tobytes() for cell in np.hstack([exponent, np.rint(places / 2**exponent) + 0.0])]  # no -0.0


@dataclass(frozen=True)
class _ProductTask:
    """The task of a copied layer: compare its product if `products` is given, else compute a reference of it."""

    site: Site
    spec: LinearSpec
    products: Products | None = None
    dtype: Any = None


def compare_product(layer: nnx.Module, site: Site, spec: LinearSpec, products: Products) -> None:
    """Make the class of a copied layer add each of its products to `products`."""
    set_attribute(layer, "jlora_product", _ProductTask(site, spec, products))
    where = site.spec.stack
    set_attribute(layer, "jlora_product_index", SlotRanks(jnp.arange(where[0] if where else 1).reshape(*where)))


def float_product(layer: nnx.Module, site: Site, spec: LinearSpec, dtype: Any = None) -> None:
    """Make the class of a copied layer return x W without a bias, or its own product if it cannot be dequantized.

    The result has `dtype`, or that of the layer's own product.
    """
    set_attribute(layer, "jlora_product", _ProductTask(site, spec, dtype=dtype))


def add_factors(layer: nnx.Module, factors: Sequence[jax.Array]) -> None:
    """Add x aᵀ b to the product of a layer, for float32 a [(layers,) r, K] and b [(layers,) r, N] of its features."""
    for name, value in zip(_FACTORS, factors, strict=True):
        set_attribute(layer, name, SlotRanks(value))


def map_columns(layer: nnx.Module, scale_and_offset: Sequence[jax.Array]) -> None:
    """Multiply the output of a layer, with its factors, by a scale and add an offset, each [(layers,) N] in float32."""
    for name, value in zip(_COLUMNS, scale_and_offset, strict=True):
        set_attribute(layer, name, SlotRanks(value))


@functools.cache
def with_product(cls: type) -> type:
    """Return the subclass whose call does the task that `compare_product` or `float_product` set."""
    own = cls.__call__
    parameters = parameters_of(own)

    @functools.wraps(own)
    def call(self: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        y = own(self, *args, **kwargs)
        task: _ProductTask = vars(self)["jlora_product"]
        site, spec = task.site, task.spec
        if shards_of(site) != (1, 1):
            raise LoRAError(
                f"verify: {site.path} is called inside a jax.shard_map over its features, and has no kernel of floats "
                "to compare with; give `forward` a step that calls it outside"
            )
        try:
            x, base, restore, _ = rows_of_call(self, site, spec, parameters, y, args, kwargs)
        except Exception:
            if task.products is None:
                raise
            return y  # the wrapped class finds the same error
        weight = dequantized(self, spec) if can_dequantize(self, spec) else None
        if task.products is not None:
            assert weight is not None
            task.products.dtypes.add(base.dtype)
            int8 = any(array.dtype == jnp.int8 and array.size == weight.size for _, array in arrays_of(self))
            index = vars(self)["jlora_product_index"][...]
            across_mesh(functools.partial(_compare, task, int8), base, x, weight, index)
            return y
        factors, columns = ([vars(self)[n][...] for n in names if n in vars(self)] for names in (_FACTORS, _COLUMNS))
        return restore(across_mesh(_reference, base.astype(task.dtype or base.dtype), x, weight, factors, columns))

    body = {"__module__": cls.__module__, "__call__": call}
    return type(cls)(f"{cls.__name__}WithProduct", (cls,), body, pytree=getattr(cls, "_pytree__is_pytree", True))


@_qwix.unintercepted
def _compare(task: _ProductTask, int8: bool, base: Array, x: Array, weight: Array, index: Array) -> Array:
    assert task.products is not None
    rows, y = (array.astype(jnp.float32).reshape(-1, array.shape[-1]) for array in (x, base))
    weights, squares = jnp.square(weight), jnp.square(rows)
    # Without int8 values the layer may round to float8, and some layers round all rows alike.
    noise = jnp.full_like(rows, jnp.where(jnp.isfinite(rows), jnp.abs(rows), 0).max() / 254)
    noise = jnp.square(noise if int8 else jnp.maximum(noise, jnp.abs(rows) / 16)) / 3
    compared = y, _matmul(rows, weight), _matmul(noise, weights), jnp.sqrt(_matmul(squares, weights))
    jax.debug.callback(functools.partial(task.products.add, task.site), index.reshape(()), *compared)
    return base


@_qwix.unintercepted
def _reference(
    base: Array, x: Array, weight: Array | None, factors: Sequence[Array], columns: Sequence[Array]
) -> Array:
    rows = x.astype(jnp.float32).reshape(-1, x.shape[-1])
    total = base.astype(jnp.float32).reshape(-1, base.shape[-1]) if weight is None else _matmul(rows, weight)
    if factors:
        total = total + _matmul(_matmul(rows, factors[0].T), factors[1])
    if columns:
        scale, offset = columns
        total = total * scale[None] + offset[None]
    return total.astype(base.dtype).reshape(base.shape)


def _matmul(x: Float[Array, "M K"], y: Float[Array, "K N"]) -> Float[Array, "M N"]:
    return jax.lax.dot_general(x, y, (((1,), (0,)), ((), ())), precision="highest")
