"""A finisher: a function of the output of a linear layer with its LoRA, and of values that adapters bring for it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from jax import Array
from jaxtyping import Float, Int

from jlora.adapters.extras import Extra


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


@dataclass(frozen=True)
class Finisher:
    """A function that follows the sum of base output and delta in linear layers without experts.

    Attributes:
      extras: the arrays that it reads, at least one. The `LoRAConfig` that serves them switches it on.
      linear: True if the sum of its results for partial sums is its result for their sum. Others are not applied to the
        shards of a row-parallel layer.
      apply: the function.
    """

    extras: tuple[Extra, ...]
    linear: bool
    apply: Apply
