"""Specs of layer classes: `LinearSpec`, `EmbedSpec`, `ProductsSpec`, `ExpertsSpec`, and those of Flax's own classes."""

import copy
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax

from jlora._typing import DType, is_list_or_tuple
from jlora.config import SLOT_DTYPE, check_fields
from jlora.errors import LoRAUsageError

Blocks: TypeAlias = Sequence[tuple[int, int]]  # runs of features: (first feature of the checkpoint or -1, count)
Restore: TypeAlias = Callable[[Array], Array]


@dataclass(frozen=True, eq=False)
class LinearSpec:
    """Describe a linear layer class to jlora.

    Sizes are those of the layer, padding included. If only some of its features belong to a checkpoint (padded heads, a
    padded vocabulary, interleaved shards of a merged kernel), list them in the checkpoint's order in `in_index` and
    `out_index`. All other features keep the base output, bit by bit.

    Attributes:
      in_features, out_features: K and N, each the product over all of its axes.
      param: name of the attribute that holds the kernel. A layer without a `kernel` stores its weight in a form of its
        own (packed, with scales of blocks); None says so of a layer that has one. On a mesh such a layer is taken to be
        replicated. An attribute whose axes are split as those of the kernel can be named instead.
      in_axes, out_axes: the kernel's axes, in the order in which they flatten to K and to N.
      rows: `rows(layer, x, y, *args, **kwargs)` returns x as [*lead, K], y as [*lead, N], and a function from [*lead,
        N] back to y's own shape. None: K and N are the last axes of input and output.
      in_index, out_index: int [k] and int [n], the layer's feature for each feature of the checkpoint; None for all.
      real_vocab: instead of `out_index`, for a head with a padded vocabulary: the first `real_vocab` outputs are real.
      out_blocks: instead of `out_index`, if the layer's outputs are runs of the checkpoint's features, which may be
        repeated: pairs (first feature of the checkpoint, count) from left to right, with first feature -1 for padding.
      dtype: dtype of the slots unless `LoRAConfig.dtype` is set; None for the layer's own.
      bias: name of the attribute whose values, N in the order of `out_axes`, the layer adds to its output. An
        attribute that the layer lacks or that is None adds nothing, as does the name None. DoRA leaves the bias as it
        is. A bias that the layer returns beside its output is not added.
      dequantize: `dequantize(layer)` returns the base weight, float32 [K, N] in the order of `rows`, if `param` does
        not hold it, or holds its columns in another order. It is called where the layer is (in a stack for one layer of
        it), and `manager.verify` compares the layer's product with it. None: not known.
      product: `product(x, kernel)` returns the layer's output without its bias, and works on shards of both too. It is
        for a class that computes exactly `product(x, kernel) + bias` with the arrays of `param` and `bias`. If the
        kernel is split by input features, LoRA then joins the layer's reduction and needs none of its own. `rows` must
        be None, with one axis in and one out, or those of `einsum_spec`. None: the layer is always called.
      stack_axis: axis of `param` that runs over the layers of a stack (`nnx.scan`, `nnx.vmap`), if `param` has one axis
        besides those of the spec and of experts. The layer is called without that axis. Slots have their layers on axis
        0. None: the axis that fits the sizes of all stacks with as many layers, or axis 0.
      scale: factor of the kernel over that of a checkpoint, if the model folds one into it (the query scale of
        attention). Adapters are scaled by it when they are loaded.
    """

    in_features: int
    out_features: int
    param: str | None = "kernel"
    in_axes: tuple[int, ...] = (0,)
    out_axes: tuple[int, ...] = (1,)
    rows: Callable[..., tuple[Array, Array, Restore]] | None = None
    in_index: "Index | Sequence[int] | np.ndarray | None" = None
    out_index: "Index | Sequence[int] | np.ndarray | None" = None
    real_vocab: int | None = None
    out_blocks: "Blocks | None" = None
    dtype: DType | None = None
    bias: str | None = "bias"
    dequantize: Callable[[Any], Array] | None = None
    product: Callable[[Array, Array], Array] | None = None
    stack_axis: int | None = None
    scale: float = 1.0

    def __post_init__(self):
        _check_sizes(self, "in_features", "out_features")
        axis = self.stack_axis
        if axis is not None and (isinstance(axis, bool) or not isinstance(axis, int) or axis < 0):
            raise LoRAUsageError(f"LinearSpec.stack_axis must be an int from 0, the axis of the layers, got {axis!r}")
        for name in ("param", "bias"):
            if not isinstance(given := getattr(self, name), str | None):
                raise LoRAUsageError(f"LinearSpec.{name} must be the name of an attribute or None, got {given!r}")
        if not (self.dequantize is None or callable(self.dequantize)):
            raise LoRAUsageError(f"LinearSpec.dequantize must be a function of the layer, got {self.dequantize!r}")
        if not (self.product is None or callable(self.product)):
            raise LoRAUsageError(f"LinearSpec.product must be a function of x and the kernel, got {self.product!r}")
        if self.product is not None and self.param is None:
            raise LoRAUsageError("LinearSpec.product multiplies the kernel that param names, and param is None")
        check_fields("LinearSpec.", self, {"dtype": SLOT_DTYPE})
        if sum(given is not None for given in (self.real_vocab, self.out_index, self.out_blocks)) > 1:
            raise LoRAUsageError(
                "LinearSpec: real_vocab, out_index and out_blocks all say which outputs are real; give one"
            )
        if self.real_vocab is not None:
            _check_real(self, self.real_vocab, self.out_features)
            object.__setattr__(self, "out_index", range(self.real_vocab))
        if self.out_blocks is not None:
            object.__setattr__(self, "out_index", _index_of_blocks(self.out_blocks, self.out_features))
        for name, total in (("in_index", self.in_features), ("out_index", self.out_features)):
            object.__setattr__(self, name, as_index(f"LinearSpec.{name}", getattr(self, name), total))

    @property
    def columns_in(self) -> "Index | None":
        """`in_index` as an `Index`; None for all features."""
        return self.in_index  # type: ignore[return-value]  # `__post_init__` converts it to an Index

    @property
    def columns_out(self) -> "Index | None":
        """`out_index` as an `Index`; None for all features."""
        return self.out_index  # type: ignore[return-value]

    @property
    def real_in(self) -> int:
        """The checkpoint's K."""
        return self.in_features if self.columns_in is None else self.columns_in.size

    @property
    def real_out(self) -> int:
        """The checkpoint's N."""
        return self.out_features if self.columns_out is None else self.columns_out.size

    def own_axes(self, ndim: int) -> tuple[int, ...]:
        """Return the positions of the spec's axes among the `ndim` axes of a parameter with a stack or experts."""
        count = len(self.in_axes + self.out_axes)
        stack = (self.stack_axis or 0) if ndim > count else None
        return tuple(axis for axis in range(ndim) if axis != stack)[-count:]

    def with_stack_axis(self, axis: int | None) -> "LinearSpec":
        """Return the spec with another `stack_axis`."""
        return _changed(self, "stack_axis", axis)


@dataclass(frozen=True, eq=False)
class EmbedSpec:
    """Describe an embedding class to jlora.

    Attributes:
      vocab, features: rows and columns of the table, padding included.
      param: name of the table attribute, [vocab, features].
      lookup: method that takes token ids [*lead] first and returns rows of the table [*lead, features]; None if it
        cannot serve LoRA.
      attend: method that takes [*lead, features] first and returns the logits [*lead, vocab] of a tied head; None if
        there is none, or if it cannot serve LoRA.
      scale: factor of the rows that the lookup returns (in Gemma the square root of the width).
      real_vocab: number of rows that belong to a checkpoint, if the model pads its vocabulary. The other rows keep the
        base output.
      attend_scale: factor of the logits that `attend` returns (muP's output multiplier).
      dtype: dtype of the slots, as in `LinearSpec`.
    """

    vocab: int
    features: int
    param: str = "embedding"
    lookup: str | None = "__call__"
    attend: str | None = None
    scale: float = 1.0
    real_vocab: int | None = None
    attend_scale: float = 1.0
    dtype: DType | None = None
    head: LinearSpec = field(init=False, repr=False)  # `attend` as a linear layer
    table: LinearSpec = field(init=False, repr=False)  # `lookup` as a linear layer of one-hot rows

    def __post_init__(self):
        _check_sizes(self, "vocab", "features")
        _check_real(self, self.real_vocab, self.vocab)
        check_fields("EmbedSpec.", self, {"dtype": SLOT_DTYPE})
        if self.lookup is None and self.attend is None:
            raise LoRAUsageError("EmbedSpec: lookup and attend are both None, so nothing could serve LoRA")
        head = LinearSpec(self.features, self.vocab, self.param, (1,), (0,), real_vocab=self.real_vocab, stack_axis=0)
        object.__setattr__(self, "head", head)
        real = None if self.real_vocab is None else range(self.real_vocab)
        table = LinearSpec(self.vocab, self.features, self.param, in_index=real, stack_axis=0)
        object.__setattr__(self, "table", table)


@dataclass(frozen=True, eq=False)
class ProductsSpec:
    """Describe a class to jlora of which one method multiplies several parameters.

    The method is traced in each call, and its parameters are followed through casts, reshapes and transposes. LoRA is
    added at each product (`dot_general`) of an input and one of these parameters, which must be `nnx.Variable`s of
    floats. Everything else that takes such a parameter raises: a scale, a sum, a slice, `jax.shard_map`,
    `jax.custom_vjp`, `lax.scan`, a Pallas kernel. The method may call other layers, also wrapped ones, but cannot write
    Variables.

    Attributes:
      products: name of a product in checkpoints, such as "q_proj" -> the spec of its parameter, by `einsum_spec` or
        `LinearSpec`. The path of the product is that of the parameter; adapters and configurations can use both names.
        Its rows are the axes of the input that are not contracted, in the order of the input. `rows` and `bias` are
        not read; `product` and `dequantize` cannot be given.
      method: name of the method.
      dtype: dtype of the slots of all products whose own spec sets none, as in `LinearSpec`.

    Example:
      >>> def describe(layer):
      ...     q = jlora.einsum_spec("TD,DNH->TNH", layer.kernel_q.shape, "kernel_q")
      ...     o = jlora.einsum_spec("TNH,NHD->TD", layer.kernel_o.shape, "kernel_o")
      ...     return jlora.ProductsSpec({"q_proj": q, "o_proj": o})
      >>> jlora.register_layer(Attention, describe)
    """

    products: Mapping[str, LinearSpec]
    method: str = "__call__"
    dtype: DType | None = None

    def __post_init__(self):
        _check_products(self)
        check_fields("ProductsSpec.", self, {"dtype": SLOT_DTYPE})
        # A method adds its biases later.
        products = {name: _changed(spec, "bias", None) for name, spec in self.products.items()}
        object.__setattr__(self, "products", products)


def _changed(spec: LinearSpec, name: str, value: object) -> LinearSpec:
    """Return the spec with another value of one field."""
    changed = copy.copy(spec)  # `replace` would convert `out_blocks` and `real_vocab` again
    object.__setattr__(changed, name, value)
    return changed


def _check_products(spec: "ProductsSpec | ExpertsSpec") -> None:
    """Raise `LoRAUsageError` unless `products` are specs, of a parameter each if they are found in a method."""
    label, products = type(spec).__name__, spec.products
    if not products or not all(isinstance(each, LinearSpec) for each in products.values()):
        raise LoRAUsageError(f"{label}.products must map the name of each product to its LinearSpec")
    if spec.method is None:
        return
    for name, each in products.items():
        alike = sum(other.param == each.param for other in products.values())
        if each.param is None or each.product is not None or each.dequantize is not None or alike > 1:
            raise LoRAUsageError(
                f"{label}.products[{name!r}]: a product inside a method is found by its parameter, so its spec must "
                f"name one of its own in `param`, without `product` and `dequantize`, got {each}"
            )


@dataclass(frozen=True, eq=False)
class ExpertsSpec:
    """Describe the grouped products of a mixture-of-experts layer class to jlora.

    A grouped product multiplies each of its rows by the kernel of that row's expert. It is served in one of three ways.
    It can be a method of the class, which takes rows [*lead, K] first and returns [*lead, N]. It can be found inside a
    longer method (`method`). Otherwise the class calls `jlora.expert_delta` with the rows and the result. The router
    and shared experts are separate layers.

    Attributes:
      experts: E, the number of experts.
      products: product name -> spec of one expert. `param` has the shape [E, ...]. The axes after the first are those
        of a `LinearSpec`. If a method has the product's name, that method is wrapped.
      rows: `rows(layer, name, x, *args, **kwargs)` returns the `RowMap` of the rows passed to the method, with `expert`
        set. None if no product is a method. With `method`, x [*lead, K] is the input of a product that was found, and
        the arguments are those of the method. `expert` is not read, since the product shows it. None then says that
        the axes of x other than the experts are those of a layer's rows. `ragged_dot` needs `rows`.
      names: product -> for each of its output slices, side by side, the checkpoint names of one expert's module. The
        usual names of "gate_up" (two slices), "up" and "down" are the default. Products named like "down" lead out of
        the experts, which can share their B. The experts can share A of all other products
        (`LoRAConfig.expert_slots`).
      gathers: products whose input is all tokens [T, K], which `source` of the `RowMap` indexes, and that gather their
        rows themselves. LoRA then reads a token once instead of once for each of its experts.
      alternating: products whose slices alternate, column by column, in a checkpoint's merged tensor but not in the
        layer (gpt-oss). Adapters of merged slices have that order, of one expert or of all. For other products the
        merged tensor has the order of the layer.
      dtype: dtype of the slots of all products whose own spec sets none, as in `LinearSpec`.
      method: name of a method that multiplies the parameters of all products, by einsums over all experts, one expert
        after another, or by `ragged_dot`; they are found as in `ProductsSpec`. `gathers` is not read. None: no such
        method.
    """

    experts: int
    products: Mapping[str, LinearSpec]
    rows: Callable[..., Any] | None = None
    names: Mapping[str, Sequence[Sequence[str]]] = field(default_factory=dict[str, Sequence[Sequence[str]]])
    gathers: Sequence[str] = ()
    alternating: Sequence[str] = ()
    dtype: DType | None = None
    method: str | None = None

    def __post_init__(self):
        _check_sizes(self, "experts")
        check_fields("ExpertsSpec.", self, {"dtype": SLOT_DTYPE})
        _check_products(self)
        names = {**{name: EXPERT_NAMES[name] for name in self.products if name in EXPERT_NAMES}, **self.names}
        if names.keys() != self.products.keys() or not all(names.values()):
            raise LoRAUsageError(
                f"ExpertsSpec.names must say what checkpoints call the slices of {sorted(self.products)}, and names "
                f"{sorted(names)}"
            )
        object.__setattr__(self, "names", names)
        for label in ("gathers", "alternating"):
            given: object = getattr(self, label)
            if isinstance(given, str) or not is_list_or_tuple(given) or not set(given) <= self.products.keys():
                raise LoRAUsageError(f"ExpertsSpec.{label} must list names of products, got {given!r}")

    def own_order(self, product: str) -> np.ndarray | None:
        """Return the column of a checkpoint's merged tensor for each output of a product, slice after slice.

        Returns:
          int [N], or None if the tensor has the outputs in that order.
        """
        linear = self.products[product]
        if product in self.alternating:
            return np.arange(linear.real_out).reshape(-1, len(self.names[product])).T.reshape(-1)
        index = linear.columns_out
        # `out_blocks` is the order that a mesh needs. It does not describe a checkpoint.
        if index is None or linear.out_blocks is not None or index.size < index.total:
            return None
        return index.positions


# Names of the projections of one expert in transformers and in Mixtral's own checkpoints.
EXPERT_NAMES: Mapping[str, Sequence[Sequence[str]]] = {
    "gate_up": (("gate_proj", "w1"), ("up_proj", "w3")),
    "up": (("up_proj", "w1"),),
    "down": (("down_proj", "w2"),),
}


Spec: TypeAlias = LinearSpec | EmbedSpec | ProductsSpec | ExpertsSpec
Describe: TypeAlias = Callable[[Any], Spec | str]


@dataclass(frozen=True)
class Doubt:
    """An uncertainty about a layer that its shapes cannot resolve.

    Such a layer takes no adapter until `manager.verify` has confirmed that its results are right.

    Attributes:
      why: the reason for the uncertainty, as the beginning of a message.
      instead: how to resolve it without `verify`, as the end of a message.
    """

    why: str
    instead: str

    @property
    def reason(self) -> str:
        """Reason why the layer takes no adapter yet, with the ways to change that."""
        return f"{self.why}; run manager.verify(forward, inputs) once, which checks that, or {self.instead}"


class Index:
    """The real features among a layer's `total` features, in the checkpoint's order.

    Attributes:
      positions: int [size], the layer's feature for each feature of the checkpoint; the first of several copies.
      source: int [total], the checkpoint's feature for each feature of the layer; -1 for padding.
    """

    def __init__(self, positions: np.ndarray, total: int, source: np.ndarray | None = None):
        self.positions, self.total = positions, total
        self.size = len(positions)
        if source is None:
            source = np.full(total, -1, np.int32)
            source[positions] = np.arange(self.size)
        self.source = source
        first = int(positions[0])
        # A contiguous run of features is sliced and concatenated without a gather.
        self.run = (first, first + self.size) if np.array_equal(positions, first + np.arange(self.size)) else None
        if self.run is not None and np.count_nonzero(source >= 0) > self.size:
            self.run = None  # other features are copies of the run

    @property
    def blocks(self) -> "Blocks":
        """`source` as runs: (first feature of the checkpoint or -1, count)."""
        runs: list[tuple[int, int]] = []
        for value in self.source.tolist():
            first, count = runs[-1] if runs else (0, 0)
            if count and value == (first + count if first >= 0 else -1):
                runs[-1] = first, count + 1
            else:
                runs.append((value, 1))
        return tuple(runs)

    def take(self, values: Array) -> Array:
        """Return the real features [..., size] of `values` [..., total], in the checkpoint's order."""
        if self.run is not None:
            return lax.slice_in_dim(values, *self.run, axis=-1)
        return values[..., self.positions]

    def put(self, values: Array, real: Array) -> Array:
        """Replace the real features of `values` [..., total] by `real` [..., size]; the others keep their bits."""
        if self.run is not None:
            start, stop = self.run
            before = lax.slice_in_dim(values, 0, start, axis=-1)
            return jnp.concatenate([before, real, lax.slice_in_dim(values, stop, self.total, axis=-1)], axis=-1)
        is_real = (self.source >= 0).reshape((1,) * (values.ndim - 1) + (self.total,))
        return jnp.where(is_real, real[..., np.maximum(self.source, 0)], values)


def own_attribute(obj: Any, name: str, default: Any = None) -> Any:
    """Return an attribute that the object or its class defines, else `default`. A `__getattr__` is ignored."""
    missing = object()
    if inspect.getattr_static(obj, name, missing) is missing:
        return default
    return getattr(obj, name)


def as_index(name: str, positions: Index | Sequence[int] | np.ndarray | None, total: int) -> Index | None:
    """Return the index of these positions; None for all features in order.

    Raises:
      LoRAUsageError: `positions` is no vector of distinct features below `total`.
    """
    if positions is None or isinstance(positions, Index):
        return positions
    array = np.asarray(positions)
    if array.ndim != 1 or not array.size or array.dtype.kind not in "iu":
        raise LoRAUsageError(f"{name} must be a vector of at least one integer, got {array.dtype}{list(array.shape)}")
    if array.min() < 0 or array.max() >= total or len(np.unique(array)) < array.size:
        raise LoRAUsageError(f"{name} must name different features below {total}, got {array.min()} to {array.max()}")
    return None if np.array_equal(array, np.arange(total)) else Index(array.astype(np.int32), total)


def _index_of_blocks(blocks: "Blocks", total: int) -> Index | None:
    """Return the index that `out_blocks` describes; None for all features in order.

    Raises:
      LoRAUsageError: the blocks do not cover `total` features, or lack a feature of the checkpoint.
    """
    given: object = blocks
    pairs = [tuple[Any, ...](pair) for pair in given] if is_list_or_tuple(given) else []
    good = pairs and all(
        len(pair) == 2 and all(isinstance(n, int | np.integer) for n in pair) and pair[0] >= -1 and pair[1] > 0
        for pair in pairs
    )
    if not good or sum(count for _, count in pairs) != total:
        raise LoRAUsageError(
            f"LinearSpec.out_blocks must be pairs (first feature or -1, how many) of {total} features in all, got "
            f"{blocks!r}"
        )
    source = np.array([first if first < 0 else first + i for first, count in pairs for i in range(count)], np.int32)
    real, positions = np.unique(source[source >= 0], return_index=True)
    if not real.size or not np.array_equal(real, np.arange(real.size)):
        raise LoRAUsageError(f"LinearSpec.out_blocks must hold every feature of the checkpoint, got {blocks!r}")
    places = np.flatnonzero(source >= 0)[positions].astype(np.int32)
    return None if np.array_equal(source, np.arange(total)) else Index(places, total, source)


def _check_sizes(spec: Any, *names: str) -> None:
    for name in names:
        value = getattr(spec, name)
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
            raise LoRAUsageError(f"{type(spec).__name__}.{name} must be a positive int, got {value!r}")


def _check_real(spec: Any, real: int | None, total: int) -> None:
    if real is not None and not 1 <= real <= total:
        raise LoRAUsageError(f"{type(spec).__name__}.real_vocab must be 1 to {total} (the padded size), got {real}")


def describe_linear(layer: nnx.Linear) -> LinearSpec:
    """Return the spec of an `nnx.Linear`.

    A layer whose merged outputs are ordered differently from a checkpoint's declares it in `output_blocks`.
    """
    return LinearSpec(layer.in_features, layer.out_features, out_blocks=own_attribute(layer, "output_blocks"))


def describe_quantized(layer: nnx.Module) -> LinearSpec:
    """Return the spec of a class that declares itself a linear layer with a quantized kernel, like the decoder's.

    The class has `in_features`, `out_features` and a method `dequantized()` that returns its `kernel` in float32
    [in_features, out_features], and optionally `bias` and `output_blocks`.
    """
    return LinearSpec(
        own_attribute(layer, "in_features"),
        own_attribute(layer, "out_features"),
        out_blocks=own_attribute(layer, "output_blocks"),
        dequantize=own_attribute(type(layer), "dequantized"),
    )


def describe_general(layer: nnx.LinearGeneral) -> LinearSpec | str:
    """Return the spec of an `nnx.LinearGeneral`, or the reason why it cannot be wrapped."""
    if layer.batch_axis:
        return "its batch_axis gives every batch entry a kernel of its own"
    n_in = len(layer.in_features)
    return LinearSpec(
        math.prod(layer.in_features),
        math.prod(layer.out_features),
        in_axes=tuple(range(n_in)),
        out_axes=tuple(range(n_in, n_in + len(layer.out_features))),
        rows=general_rows,
    )


def general_rows(layer: Any, x: Array, y: Array, *_: Any, **__: Any) -> tuple[Array, Array, Restore]:
    """Return x as [*lead, K], y as [*lead, N], and the way back: the `rows` of an `nnx.LinearGeneral`."""
    return rows_along(layer.axis, x, y)


def rows_along(axis: Sequence[int], x: Array, y: Array) -> tuple[Array, Array, Restore]:
    """Return x as [*lead, K], y as [*lead, N], and the way back, for a product along these axes of x."""
    # Flax sorts the axes before it contracts them with the kernel's leading ones.
    axes = sorted(each % x.ndim for each in axis)
    lead = [each for each in range(x.ndim) if each not in axes]
    x = x.transpose(*lead, *axes)
    shape = x.shape[: len(lead)]
    return x.reshape(*shape, -1), y.reshape(*shape, -1), lambda rows: rows.reshape(y.shape)


def describe_embed(layer: nnx.Embed) -> EmbedSpec:
    """Return the spec of an `nnx.Embed`. A padded table declares its real rows in `real_vocab`."""
    real = own_attribute(layer, "real_vocab")
    return EmbedSpec(layer.num_embeddings, layer.features, attend="attend", real_vocab=real)
