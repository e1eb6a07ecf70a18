"""What a layer class computes: `LinearSpec`, `EmbedSpec`, `ExpertsSpec`, and those of Flax's own classes."""

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
from jlora.config import check_slot_dtype
from jlora.errors import LoRAUsageError

Blocks: TypeAlias = Sequence[tuple[int, int]]
Restore: TypeAlias = Callable[[Array], Array]
Rows: TypeAlias = Callable[..., tuple[Array, Array, Restore]]


@dataclass(frozen=True, eq=False)
class LinearSpec:
    """What jlora must know of a linear layer class.

    Sizes are those of the layer itself, padding included. Where only some of its features are a checkpoint's (padded
    heads, a padded vocabulary, shards interleaved in a merged kernel), `in_index` and `out_index` say which, in the
    checkpoint's order; all others keep the base output, bit by bit.

    Attributes:
      in_features, out_features: K and N (all axes multiplied).
      param: name of the kernel attribute.
      in_axes, out_axes: the kernel's axes, in the order in which they flatten to K and to N.
      rows: `rows(layer, x, y, *args, **kwargs)` -> x as [*lead, K], y as [*lead, N], and the way back from
        [*lead, N] to y's own shape. None: K and N are the last axes of input and output.
      in_index, out_index: the layer's feature for each feature of the checkpoint, int [k] and int [n]; None for all.
      real_vocab: the same for the first `real_vocab` outputs, of a head whose vocabulary the model padded.
      out_blocks: the same where the layer's outputs are runs of the checkpoint's, copies of some included: from left to
        right (first feature of the checkpoint, how many), with -1 for padding.
      dtype: of the slots, where `LoRAConfig.dtype` does not say it; None for the layer's own.
    """

    in_features: int
    out_features: int
    param: str = "kernel"
    in_axes: tuple[int, ...] = (0,)
    out_axes: tuple[int, ...] = (1,)
    rows: Rows | None = None
    in_index: "Index | Sequence[int] | np.ndarray | None" = None
    out_index: "Index | Sequence[int] | np.ndarray | None" = None
    real_vocab: int | None = None
    out_blocks: "Blocks | None" = None
    dtype: DType | None = None

    def __post_init__(self):
        _check_sizes(self, "in_features", "out_features")
        check_slot_dtype("LinearSpec.dtype", self.dtype)
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
        return self.in_index  # type: ignore[return-value]  # made an Index when the spec was made

    @property
    def columns_out(self) -> "Index | None":
        return self.out_index  # type: ignore[return-value]

    @property
    def real_in(self) -> int:
        """The checkpoint's K."""
        return self.in_features if self.columns_in is None else self.columns_in.size

    @property
    def real_out(self) -> int:
        """The checkpoint's N."""
        return self.out_features if self.columns_out is None else self.columns_out.size


@dataclass(frozen=True, eq=False)
class EmbedSpec:
    """What jlora must know of an embedding class.

    Attributes:
      vocab, features: rows and columns of the table, padding included.
      param: name of the table attribute, [vocab, features].
      lookup: method that takes token ids [*lead] first and returns rows of the table [*lead, features]; None if it
        cannot serve LoRA.
      attend: method that takes [*lead, features] first and returns the logits [*lead, vocab] of a tied head; None if
        there is none, or if it cannot serve LoRA.
      scale: what the lookup multiplies a row by (the square root of the width, in Gemma's).
      real_vocab: rows that are a checkpoint's where the model padded its vocabulary; the others keep the base output.
      attend_scale: what `attend` multiplies the logits by (muP's output multiplier).
      dtype: of the slots, as in `LinearSpec`.
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
    head: LinearSpec = field(init=False, repr=False)  # the attend as a linear layer
    table: LinearSpec = field(init=False, repr=False)  # the lookup as one of one-hot rows

    def __post_init__(self):
        _check_sizes(self, "vocab", "features")
        _check_real(self, self.real_vocab, self.vocab)
        check_slot_dtype("EmbedSpec.dtype", self.dtype)
        if self.lookup is None and self.attend is None:
            raise LoRAUsageError("EmbedSpec: lookup and attend are both None, so nothing could serve LoRA")
        head = LinearSpec(
            self.features, self.vocab, self.param, in_axes=(1,), out_axes=(0,), real_vocab=self.real_vocab
        )
        object.__setattr__(self, "head", head)
        real = None if self.real_vocab is None else range(self.real_vocab)
        object.__setattr__(self, "table", LinearSpec(self.vocab, self.features, self.param, in_index=real))

    @property
    def rows(self) -> int:
        """The checkpoint's vocabulary."""
        return self.vocab if self.real_vocab is None else self.real_vocab


@dataclass(frozen=True, eq=False)
class ExpertsSpec:
    """What jlora must know of the experts of a mixture-of-experts layer: the grouped products that they make.

    A grouped product multiplies each of its rows by the kernel of that row's expert. It is served where it is a method
    of the class, which takes rows [*lead, K] first and returns [*lead, N]; or where the class hands over rows and
    result itself, with `jlora.expert_delta`. The router and shared experts are layers of their own.

    Attributes:
      experts: E, how many there are.
      products: name of each product -> what one expert computes; `param` is [E, ...], the axes after the first those
        of a `LinearSpec`. A product whose name is that of a method is served there.
      rows: `rows(layer, name, x, *args, **kwargs)` -> the `RowMap` of the rows that the method got, with `expert`.
        None where no product is a method.
      names: product -> for each of its output slices, side by side, the names that checkpoints give the module of one
        expert. Left out: the usual ones of "gate_up" (two slices), "up" and "down". What they call as they do "down"
        leads out of the experts, who can share its B; of all others they can share A
        (`LoRAConfig.max_shared_expert_loras`).
      gathers: products that are given not their rows but what their map's `source` counts, all tokens [T, K], and take
        the rows out of it themselves: then LoRA reads a token once, and not once for each of its experts.
      alternating: products whose slices alternate, column by column, in a checkpoint's tensor of all experts, and not
        in the layer (gpt-oss): adapters trained on that tensor have its order. Of other products they have the layer's.
      dtype: of the slots of all products whose own spec names none; see `LinearSpec`.
    """

    experts: int
    products: Mapping[str, LinearSpec]
    rows: Callable[..., Any] | None = None
    names: Mapping[str, Sequence[Sequence[str]]] = field(default_factory=dict[str, Sequence[Sequence[str]]])
    gathers: Sequence[str] = ()
    alternating: Sequence[str] = ()
    dtype: DType | None = None

    def __post_init__(self):
        _check_sizes(self, "experts")
        check_slot_dtype("ExpertsSpec.dtype", self.dtype)
        if not self.products or not all(isinstance(spec, LinearSpec) for spec in self.products.values()):
            raise LoRAUsageError("ExpertsSpec.products must map the name of each product to its LinearSpec")
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
        """Return the column of a checkpoint's tensor of all experts for each output of a product, slice after slice.

        None where the tensor has them in that order.
        """
        linear = self.products[product]
        if product in self.alternating:
            return np.arange(linear.real_out).reshape(-1, len(self.names[product])).T.reshape(-1)
        index = linear.columns_out
        # `out_blocks` is an order that a mesh needs, and not a checkpoint's.
        if index is None or linear.out_blocks is not None or index.size < index.total:
            return None
        return index.positions


# What transformers and Mixtral's own checkpoints call the projections of one expert.
EXPERT_NAMES: Mapping[str, Sequence[Sequence[str]]] = {
    "gate_up": (("gate_proj", "w1"), ("up_proj", "w3")),
    "up": (("up_proj", "w1"),),
    "down": (("down_proj", "w2"),),
}


Spec: TypeAlias = LinearSpec | EmbedSpec | ExpertsSpec
Describe: TypeAlias = Callable[[Any], Spec | str]


@dataclass(frozen=True)
class Doubt:
    """What no shape tells of a layer. It takes no adapter until `manager.verify` has seen it serve one.

    Attributes:
      why: what is not known.
      instead: what settles it without `verify`.
    """

    why: str
    instead: str

    @property
    def reason(self) -> str:
        """Why no adapter is taken now."""
        return f"{self.why}; run manager.verify(forward, inputs) once, which checks that, or {self.instead}"


class Index:
    """Which of a layer's `total` features are real, in the checkpoint's order.

    Attributes:
      positions: int [size], the layer's feature (the first, if there are copies) for each of the checkpoint's.
      source: int [total], the checkpoint's feature for each of the layer's; -1 for padding.
    """

    def __init__(self, positions: np.ndarray, total: int, source: np.ndarray | None = None):
        self.positions, self.total = positions, total
        self.size = len(positions)
        if source is None:
            source = np.full(total, -1, np.int32)
            source[positions] = np.arange(self.size)
        self.source = source
        first = int(positions[0])
        # A run of features is cut out and put back without gathers.
        self.run = (first, first + self.size) if np.array_equal(positions, first + np.arange(self.size)) else None
        if self.run is not None and np.count_nonzero(source >= 0) > self.size:
            self.run = None  # there are copies beside it

    @property
    def blocks(self) -> "Blocks":
        """`source` as runs: (first feature of the checkpoint or -1, how many)."""
        found: list[tuple[int, int]] = []
        for value in self.source.tolist():
            first, count = found[-1] if found else (0, 0)
            if count and value == (first + count if first >= 0 else -1):
                found[-1] = first, count + 1
            else:
                found.append((value, 1))
        return tuple(found)

    def take(self, values: Array) -> Array:
        """[..., total] -> [..., size]."""
        if self.run is not None:
            return lax.slice_in_dim(values, *self.run, axis=-1)
        return values[..., self.positions]

    def put(self, values: Array, real: Array) -> Array:
        """[..., total] with the real features replaced by [..., size]; the others are the same bits."""
        if self.run is not None:
            start, stop = self.run
            before = lax.slice_in_dim(values, 0, start, axis=-1)
            return jnp.concatenate([before, real, lax.slice_in_dim(values, stop, self.total, axis=-1)], axis=-1)
        is_real = (self.source >= 0).reshape((1,) * (values.ndim - 1) + (self.total,))
        return jnp.where(is_real, real[..., np.maximum(self.source, 0)], values)


def own_attribute(obj: Any, name: str, default: Any = None) -> Any:
    """An attribute that an object or its class really has: a `__getattr__` that answers to everything is not asked."""
    missing = object()
    if inspect.getattr_static(obj, name, missing) is missing:
        return default
    return getattr(obj, name)


def as_index(name: str, positions: Index | Sequence[int] | np.ndarray | None, total: int) -> Index | None:
    """None for all features in order. Raises `LoRAUsageError` for what is no index of different features."""
    if positions is None or isinstance(positions, Index):
        return positions
    array = np.asarray(positions)
    if array.ndim != 1 or not array.size or array.dtype.kind not in "iu":
        raise LoRAUsageError(f"{name} must be a vector of at least one integer, got {array.dtype}{list(array.shape)}")
    if array.min() < 0 or array.max() >= total or len(np.unique(array)) < array.size:
        raise LoRAUsageError(f"{name} must name different features below {total}, got {array.min()} to {array.max()}")
    return None if np.array_equal(array, np.arange(total)) else Index(array.astype(np.int32), total)


def _index_of_blocks(blocks: "Blocks", total: int) -> Index | None:
    """What `out_blocks` says. Raises `LoRAUsageError` where they are no blocks of `total` features."""
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
    """`nnx.Linear`; one whose merged outputs lie otherwise than a checkpoint's says so by `output_blocks`."""
    return LinearSpec(layer.in_features, layer.out_features, out_blocks=own_attribute(layer, "output_blocks"))


def describe_general(layer: nnx.LinearGeneral) -> LinearSpec | str:
    """`nnx.LinearGeneral`, or the reason why it cannot be wrapped."""
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


def general_rows(layer: nnx.LinearGeneral, x: Array, y: Array, *_: Any, **__: Any) -> tuple[Array, Array, Restore]:
    # Flax sorts the axes before it contracts them with the kernel's leading ones.
    axes = sorted(axis % x.ndim for axis in layer.axis)
    lead = [axis for axis in range(x.ndim) if axis not in axes]
    x = x.transpose(*lead, *axes)
    shape = x.shape[: len(lead)]
    return x.reshape(*shape, -1), y.reshape(*shape, -1), lambda rows: rows.reshape(y.shape)


def describe_embed(layer: nnx.Embed) -> EmbedSpec:
    real = own_attribute(layer, "real_vocab")
    return EmbedSpec(layer.num_embeddings, layer.features, attend="attend", real_vocab=real)
