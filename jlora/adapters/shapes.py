"""What an adapter's header says, before a tensor is read."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from jlora.adapters.peft_config import Kind


@dataclass(frozen=True, kw_only=True)
class ModuleShapes:
    """Shapes of one module's LoRA, in PEFT's own orientation.

    Attributes:
      kind: "linear" or "embedding".
      a_shape: (r, K); for an embedding (r, V).
      b_shape: (N, r); for an embedding (D, r).
      a_dtype, b_dtype: of the arrays that the `Adapter` will hold.
      scaling: what the product is multiplied by.
    """

    kind: Kind
    a_shape: tuple[int, int]
    b_shape: tuple[int, int]
    a_dtype: np.dtype
    b_dtype: np.dtype
    scaling: float

    @property
    def rank(self) -> int:
        return self.a_shape[0]


@dataclass(frozen=True, kw_only=True)
class ExpertsShapes:
    """Shapes of the LoRA of all experts of one grouped product; the names are those of `ExpertsLoRA`.

    Attributes:
      a_shape: (E or 1, r, in).
      b_shape: (E or 1, out, r).
      a_dtype, b_dtype: of the arrays that the `Adapter` will hold.
      scaling: what the product is multiplied by.
      exchanged, own_order, peft_version: as of `ExpertsLoRA`.
    """

    a_shape: tuple[int, int, int]
    b_shape: tuple[int, int, int]
    a_dtype: np.dtype
    b_dtype: np.dtype
    scaling: float
    exchanged: bool | None
    own_order: bool
    peft_version: str | None
    kind: Literal["experts"] = "experts"

    @property
    def rank(self) -> int:
        return self.a_shape[1]

    @property
    def experts(self) -> int:
        return max(self.a_shape[0], self.b_shape[0])


@dataclass(frozen=True, kw_only=True)
class BaseShape:
    """A whole base weight that came with the adapter: [V, D] or [N, K]."""

    shape: tuple[int, int]
    dtype: np.dtype


@dataclass(frozen=True, kw_only=True)
class AdapterShapes:
    """An adapter before its tensors are read: what `Adapter.from_pretrained(check=...)` is asked about.

    Attributes:
      name: the adapter's name.
      modules: dotted module name -> its shapes; the keys are those of `Adapter.modules`.
      base_weights: dotted module name -> shape and dtype; the keys are those of `Adapter.base_weights`.
      base_model_name: what `Adapter.base_model_name` will be.
      nbytes: what `Adapter.nbytes` will be.
    """

    name: str
    modules: Mapping[str, ModuleShapes | ExpertsShapes]
    base_weights: Mapping[str, BaseShape]
    base_model_name: str | None
    nbytes: int
