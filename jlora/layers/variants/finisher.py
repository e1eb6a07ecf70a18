"""A finisher: a function of the output of a linear layer with its LoRA, and of values that adapters bring for it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from jax import Array
from jaxtyping import Float, Int

from jlora.adapters.variants import Variant
from jlora.layers.specs import LinearSpec


class Apply(Protocol):
    """The function of a finisher."""

    def __call__(
        self,
        y: Float[Array, "M N"],
        x: Float[Array, "M K"],
        base: Float[Array, "M N"],
        bias: Float[Array, "N"] | None,
        vectors: Float[Array, "S N"],
        slots: Int[Array, "M"],
    ) -> Float[Array, "M N"]:
        """Return the finished rows in float32. Rows without an adapter must have the bits of `y`.

        On a mesh, the function runs on the columns and features of one shard.

        Args:
          y: base + delta in float32, rounded once after all finishers. Where there is no delta, it is equal to `base`.
          x: the input in the dtype of A, or, for A in int8, in its own.
          base: the output without LoRA.
          bias: the part of `base` that is no product; None for zeros.
          vectors: the values of all slots, those of the adapters or of `Finisher.values`.
          slots: the slot of each row, S for none.
        """
        ...


class Reference(Protocol):
    """The effect of a finisher on a merged weight, in float64 NumPy. `manager.verify` compares the layers with it."""

    def __call__(
        self,
        weight: Float[np.ndarray, "K N"],
        bias: Float[np.ndarray, "N"],
        vector: Float[np.ndarray, "N"],
    ) -> tuple[Float[np.ndarray, "K N"], Float[np.ndarray, "N"]]:
        """Return the weight and the bias of a layer without LoRA that has the finished output.

        Column n of the results depends on column n of the arguments alone, and is linear in the weight. Quantized
        layers are compared by the results for one row of ones.

        Args:
          weight: the base weight with its delta.
          bias: the bias of the layer; zeros without one.
          vector: the values of one slot.
        """
        ...


@dataclass(frozen=True, eq=False)
class AdaptedWeight:
    """The base weight of one layer, with the modules of one adapter for it.

    Attributes:
      kernel: the weight as floats on its devices, with the axes of `spec` after that of a stack. The axes of a mesh are
        Auto axes.
      spec: the spec of the layer.
      layer: index of the layer in its stack; None for a single layer.
      a: A of each output slice, in float32.
      b: B times the scalings, in float32.
      slices: the output slice of each column.
      modules: adapter and module, for messages -> the columns of the module, and its vector.
    """

    kernel: Array
    spec: LinearSpec
    layer: int | None
    a: Float[np.ndarray, "n R K"]
    b: Float[np.ndarray, "R N"]
    slices: Int[np.ndarray, "N"]
    modules: Mapping[str, tuple[slice, Float[np.ndarray, "columns"]]]


@dataclass(frozen=True)
class Finisher:
    """A function that follows the sum of base output and delta in linear layers without experts.

    Attributes:
      variant: the variant. The function reads its slots.
      commutes: the operations that may follow the function instead of preceding it. "sum": the sum of its results for
        partial sums is its result for their sum. "bias": its result for a product, plus the bias, is its result for
        their sum. The shards of a row-parallel layer apply it only if it commutes with the sum, and with the bias if
        there is one.
      apply: the function.
      reference: the same function of a weight, which shares no code with `apply`.
      values: computes the values of a slot once for each version of an adapter, with `Variant.fill` in columns without
        a module, or raises `AdapterMismatchError`. With None, they are the vectors of the adapter.
    """

    variant: Variant
    commutes: frozenset[Literal["sum", "bias"]]
    apply: Apply
    reference: Reference
    values: Callable[[AdaptedWeight], Float[np.ndarray, "N"]] | None = None
