"""Shapes of an adapter, read from the header before any tensor."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from jlora.adapters.extras import MAGNITUDE, Extra
from jlora.adapters.peft_config import Kind


@dataclass(frozen=True, kw_only=True)
class ModuleShapes:
    """Shapes of one module's LoRA factors in PEFT's orientation.

    Attributes:
      kind: "linear" or "embedding".
      a_shape: (r, K). For an embedding (r, V).
      b_shape: (N, r). For an embedding (D, r).
      a_dtype, b_dtype: Dtypes of the arrays in the `Adapter`.
      scaling: Factor of the delta.
    """

    kind: Kind
    a_shape: tuple[int, int]
    b_shape: tuple[int, int]
    a_dtype: np.dtype
    b_dtype: np.dtype
    scaling: float

    @property
    def rank(self) -> int:
        """Rank r of the factors."""
        return self.a_shape[0]


@dataclass(frozen=True, kw_only=True)
class ExpertsShapes:
    """Shapes of the LoRA factors of all experts of one projection, as in `ExpertsLoRA`.

    Attributes:
      a_shape: (E or 1, r, in).
      b_shape: (E or 1, out, r).
      a_dtype, b_dtype: Dtypes of the arrays in the `Adapter`.
      scaling: Factor of the delta.
      exchanged, own_order, peft_version: As in `ExpertsLoRA`.
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
        """Rank r of the factors."""
        return self.a_shape[1]

    @property
    def experts(self) -> int:
        """Number of experts; 1 if they share both factors."""
        return max(self.a_shape[0], self.b_shape[0])


@dataclass(frozen=True, kw_only=True)
class HeadShapes:
    """Shapes of a `SavedHead`.

    Attributes:
      outputs: Number of outputs.
      in_features: Number of input features K.
      biased: True if the head has a bias.
      dtype: Dtype of the weight in the `Adapter`.
    """

    outputs: int
    in_features: int
    biased: bool
    dtype: np.dtype
    kind: Literal["head"] = "head"


@dataclass(frozen=True, kw_only=True)
class BaseShape:
    """Shape and dtype of a base weight, [V, D] or [N, K], stored with the adapter."""

    shape: tuple[int, int]
    dtype: np.dtype


@dataclass(frozen=True, kw_only=True)
class AdapterShapes:
    """Shapes of an adapter, known before its tensors are read. The argument of `Adapter.from_pretrained(check=...)`.

    Attributes:
      name: Name of the adapter.
      modules: Dotted module name -> shapes, with the keys of `Adapter.modules`.
      base_weights: Dotted module name -> shape and dtype, with the keys of `Adapter.base_weights`.
      base_model_name: Value of `Adapter.base_model_name`.
      nbytes: Value of `Adapter.nbytes`.
      extras: Value of `Adapter.extras`.
      invocation_tokens: Value of `Adapter.invocation_tokens`.
      heads: Dotted module name -> shapes, with the keys of `Adapter.heads`.
      task_type: Value of `Adapter.task_type`.
    """

    name: str
    modules: Mapping[str, ModuleShapes | ExpertsShapes]
    base_weights: Mapping[str, BaseShape]
    base_model_name: str | None
    nbytes: int
    extras: tuple[Extra, ...] = ()
    invocation_tokens: tuple[int, ...] = ()
    heads: Mapping[str, HeadShapes] = field(default_factory=dict[str, HeadShapes])
    task_type: str | None = None

    @property
    def use_dora(self) -> bool:
        """Value of `Adapter.use_dora`."""
        return MAGNITUDE in self.extras

    @property
    def layers(self) -> dict[str, ModuleShapes | ExpertsShapes | HeadShapes]:
        """Shapes of all modules, and then of all saved heads, by name."""
        return {**self.modules, **self.heads}

    @property
    def saved_outputs(self) -> dict[str, int]:
        """Value of `Adapter.saved_outputs`."""
        return {name: head.outputs for name, head in self.heads.items()}
