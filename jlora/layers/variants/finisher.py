"""A finisher: a function of the output of a linear layer with its LoRA, and of values that adapters bring for it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from jax import Array
from jaxtyping import Float, Int

from jlora.adapters.variants import Extra


class Apply(Protocol):
    """The function of a finisher."""

    def __call__(
        self,
        y: Float[Array, "M N"],
        x: Float[Array, "M K"],
        base: Float[Array, "M N"],
        bias: Float[Array, "N"] | None,
        extras: Sequence[Float[Array, "S N"]],
        slots: Int[Array, "M"],
    ) -> Float[Array, "M N"]:
        """Return the finished rows in float32. Rows without an adapter must have the bits of `y`.

        On a mesh, the function runs on the columns and features of one shard.

        Args:
          y: base + delta in float32, rounded once after all finishers. Where there is no delta, it is equal to `base`.
          x: the input in the dtype of A, or, for A in int8, in its own.
          base: the output without LoRA.
          bias: the part of `base` that is no product; None for zeros.
          extras: the arrays of all slots, in the order of `Finisher.extras`.
          slots: the slot of each row, S for none.
        """
        ...


class Reference(Protocol):
    """The effect of a finisher on a merged weight, in float64 NumPy. `manager.verify` compares the layers with it."""

    def __call__(
        self,
        weight: Float[np.ndarray, "K N"],
        bias: Float[np.ndarray, "N"],
        extras: Sequence[Float[np.ndarray, "N"]],
    ) -> tuple[Float[np.ndarray, "K N"], Float[np.ndarray, "N"]]:
        """Return the weight and the bias of a layer without LoRA that has the finished output.

        Column n of the results depends on column n of the arguments alone, and is linear in the weight. Quantized
        layers are compared by the results for one row of ones.

        Args:
          weight: the base weight with its delta.
          bias: the bias of the layer; zeros without one.
          extras: the values of one slot, in the order of `Finisher.extras`.
        """
        ...


@dataclass(frozen=True)
class Finisher:
    """A function that follows the sum of base output and delta in linear layers without experts.

    Attributes:
      extras: the arrays that it reads, at least one. The `LoRAConfig` that serves them switches it on.
      commutes: the operations that may follow the function instead of preceding it. "sum": the sum of its results for
        partial sums is its result for their sum. "bias": its result for a product, plus the bias, is its result for
        their sum. The shards of a row-parallel layer apply it only if it commutes with the sum, and with the bias if
        there is one.
      apply: the function.
      reference: the same function of a weight, which shares no code with `apply`.
    """

    extras: tuple[Extra, ...]
    commutes: frozenset[Literal["sum", "bias"]]
    apply: Apply
    reference: Reference
