"""One module's LoRA on the host: of a linear layer or an embedding, or of all experts of a grouped product."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

import ml_dtypes
import numpy as np
from jaxtyping import Float

from jlora.adapters.peft_config import Kind
from jlora.errors import AdapterFormatError

FLOATS = tuple(np.dtype(t) for t in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64))


@dataclass(frozen=True, kw_only=True, eq=False)
class ModuleLoRA:
    """One module's LoRA, in PEFT's own orientation: the module's output gains `scaling * (x @ a.T) @ b.T`.

    Attributes:
      a: [r, K]; for an embedding [r, V], whose column t is what token t is looked up to.
      b: [N, r]; for an embedding [D, r].
      kind: "linear" or "embedding".
      alpha: PEFT's `lora_alpha` of this module.
      scaling: alpha / r, or alpha / sqrt(r) with rank-stabilised LoRA. Not folded into `a` or `b`.

    Raises:
      AdapterFormatError: `a` or `b` is not a float matrix, or their ranks differ.
    """

    a: Float[np.ndarray, "r K"]
    b: Float[np.ndarray, "N r"]
    kind: Kind = "linear"
    alpha: float
    scaling: float

    def __post_init__(self):
        for which, array in (("a", self.a), ("b", self.b)):
            _check(f"ModuleLoRA.{which}", array, 2, "a non-empty float NumPy matrix")
        if self.a.shape[0] != self.b.shape[1]:
            raise AdapterFormatError(
                f"ModuleLoRA: a {self.a.shape} and b {self.b.shape} must share the rank: a is [r, K], b is [N, r]"
            )
        if self.kind not in ("linear", "embedding"):
            raise AdapterFormatError(f'ModuleLoRA.kind must be "linear" or "embedding", found {self.kind!r}')

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    @property
    def a_shape(self) -> tuple[int, ...]:
        return self.a.shape

    @property
    def b_shape(self) -> tuple[int, ...]:
        return self.b.shape


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertsLoRA:
    """The LoRA of all experts of one grouped product: expert e's output gains `scaling * (x @ a[e].T) @ b[e].T`.

    Attributes:
      a: [E, r, K], or [1, r, K] where all experts share it.
      b: [E, N, r], or [1, N, r] where all experts share it.
      alpha, scaling: as of `ModuleLoRA`.
      exchanged: whether the file has in and out exchanged, as some that PEFT wrote of `target_parameters`: then `a` is
        [E, r, N] and `b` [E, K, r], and e's output gains `scaling * (x @ b[e]) @ a[e]`. None if the file cannot
        tell: the model's sizes do, or `peft_version` (`decide_exchanged`).
      own_order: whether the outputs of gate and up in one lie as in the base layer (PEFT's `target_parameters`), which
        may have them alternate; else all of gate come before all of up.
      peft_version: what the file says of the version of PEFT that wrote it.

    Raises:
      AdapterFormatError: `a` or `b` is no float array of three axes, or their ranks or experts differ.
    """

    a: Float[np.ndarray, "#E r K"]
    b: Float[np.ndarray, "#E N r"]
    alpha: float
    scaling: float
    exchanged: bool | None = False
    own_order: bool = False
    peft_version: str | None = None
    kind: Literal["experts"] = "experts"

    def __post_init__(self):
        for which, array in (("a", self.a), ("b", self.b)):
            _check(f"ExpertsLoRA.{which}", array, 3, "a non-empty float NumPy array of three axes")
        if self.a.shape[1] != self.b.shape[2] or not {len(self.a), len(self.b)} <= {1, self.experts}:
            raise AdapterFormatError(
                f"ExpertsLoRA: a {self.a.shape} and b {self.b.shape} must share the rank and the experts: a is "
                "[experts or 1, r, K], b is [experts or 1, N, r]"
            )

    @property
    def rank(self) -> int:
        return self.a.shape[1]

    @property
    def experts(self) -> int:
        """How many experts it is of; 1 if they share both factors."""
        return max(len(self.a), len(self.b))

    @property
    def a_shape(self) -> tuple[int, ...]:
        return self.a.shape

    @property
    def b_shape(self) -> tuple[int, ...]:
        return self.b.shape


LoRA: TypeAlias = ModuleLoRA | ExpertsLoRA


def _check(name: str, array: object, axes: int, expected: str) -> None:
    if not isinstance(array, np.ndarray) or array.ndim != axes or 0 in array.shape or array.dtype not in FLOATS:
        found = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
        raise AdapterFormatError(f"{name} must be {expected}, found {found}")
