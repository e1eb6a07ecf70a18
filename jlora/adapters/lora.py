"""LoRA of one module on the host: of a linear layer, an embedding, or all experts of one projection."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn, TypeAlias

import ml_dtypes
import numpy as np
from jaxtyping import Float

from jlora.adapters.peft_config import Kind
from jlora.adapters.variants import ACTIVATED, COMBINATIONS, VARIANTS, described
from jlora.errors import AdapterFormatError, AdapterMismatchError, LoRAUsageError, shown

FLOATS = tuple(np.dtype(t) for t in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64))


@dataclass(eq=False, slots=True)
class UnreadArray:
    """An array in the file of an adapter, before its bytes are read. It takes the place of a NumPy array.

    Attributes:
      key: Name of the tensor in the file.
      shape: Shape of the array, which differs from the tensor's for experts in a flat layout.
      dtype: Dtype of the array after conversion.
    """

    key: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __array__(self, *_: object, **__: object) -> NoReturn:
        raise LoRAUsageError(f"tensor {shown(self.key)} has not been read; only its shape and dtype are known")

    __getitem__ = reshape = __array__


if TYPE_CHECKING:
    HostArray: TypeAlias = np.ndarray  # only `from_pretrained(check=...)` sees others
else:
    HostArray = np.ndarray | UnreadArray


@dataclass(frozen=True, kw_only=True, eq=False)
class ModuleLoRA:
    """LoRA factors of one module in PEFT's orientation. The delta of the output is `scaling * (x @ a.T) @ b.T`.

    Attributes:
      a: [r, K] float array. For an embedding [r, V], where column t belongs to token t.
      b: [N, r] float array. For an embedding [D, r].
      kind: "linear" or "embedding".
      alpha: PEFT's `lora_alpha` of this module.
      scaling: alpha / r, or alpha / sqrt(r) for rank-stabilised LoRA. It is not folded into `a` or `b`.
      vectors: Name of a variant -> its float array [N]; empty for plain LoRA. "dora" (arXiv:2402.09353) is PEFT's
        `lora_magnitude_vector`: row n of the sum of base weight and delta is scaled to the norm `vectors["dora"][n]`.
        For an embedding [D].

    Raises:
      AdapterFormatError: `a` or `b` is not a float matrix, their ranks differ, or one of `vectors` is of no known
        variant or is not a float vector of the rows of `b`.
    """

    a: Float[HostArray, "r K"]
    b: Float[HostArray, "N r"]
    kind: Kind = "linear"
    alpha: float
    scaling: float
    vectors: Mapping[str, Float[HostArray, "N"]] = field(default_factory=dict[str, Any])

    def __post_init__(self):
        _check("ModuleLoRA.a", self.a, 2, "a non-empty float NumPy matrix")
        _check("ModuleLoRA.b", self.b, 2, "a non-empty float NumPy matrix")
        if self.a.shape[0] != self.b.shape[1]:
            raise AdapterFormatError(
                f"ModuleLoRA: a {self.a.shape} and b {self.b.shape} must share the rank: a is [r, K], b is [N, r]"
            )
        if self.kind not in ("linear", "embedding"):
            raise AdapterFormatError(f'ModuleLoRA.kind must be "linear" or "embedding", found {self.kind!r}')
        for name, array in self.vectors.items():
            if name not in VARIANTS:
                raise AdapterFormatError(
                    f"ModuleLoRA.vectors: {name!r} is no variant; expected one of {', '.join(VARIANTS)}"
                )
            _check(f"ModuleLoRA.vectors[{name!r}]", array, 1, "a float NumPy vector")
            if array.shape != self.b.shape[:1]:
                raise AdapterFormatError(
                    f"ModuleLoRA.vectors: {name!r} {array.shape} must have a value for each row of b {self.b.shape}"
                )

    @property
    def rank(self) -> int:
        """Rank r of the factors."""
        return self.a.shape[0]


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertsLoRA:
    """LoRA factors of all experts of one projection. The delta of expert e is `scaling * (x @ a[e].T) @ b[e].T`.

    The outputs of a merged gate_up_proj have the order of the model's checkpoints, in which gate and up may alternate.

    Attributes:
      a: [E, r, K] float array, or [1, r, K] if all experts share it.
      b: [E, N, r] float array, or [1, N, r] if all experts share it.
      alpha, scaling: As in `ModuleLoRA`.
      exchanged: True if the file has in and out exchanged, as some versions of PEFT write `target_parameters`. Then `a`
        is [E, r, N], `b` is [E, K, r], and the delta of expert e is `scaling * (x @ b[e]) @ a[e]`. None if the file
        does not determine it; the model's sizes then decide.
      flat: True if files hold the factors flat, as PEFT's `target_parameters`; False for three axes.

    Raises:
      AdapterFormatError: `a` or `b` is not a float array of three axes, or their ranks or experts differ.
    """

    a: Float[HostArray, "#E r K"]
    b: Float[HostArray, "#E N r"]
    alpha: float
    scaling: float
    exchanged: bool | None = False
    flat: bool = False
    kind: Literal["experts"] = "experts"
    vectors: ClassVar[Mapping[str, HostArray]] = MappingProxyType({})

    def __post_init__(self):
        _check("ExpertsLoRA.a", self.a, 3, "a non-empty float NumPy array of three axes")
        _check("ExpertsLoRA.b", self.b, 3, "a non-empty float NumPy array of three axes")
        if self.a.shape[1] != self.b.shape[2] or not {self.a.shape[0], self.b.shape[0]} <= {1, self.experts}:
            raise AdapterFormatError(
                f"ExpertsLoRA: a {self.a.shape} and b {self.b.shape} must share the rank and the experts: a is "
                "[experts or 1, r, K], b is [experts or 1, N, r]"
            )

    @property
    def rank(self) -> int:
        """Rank r of the factors."""
        return self.a.shape[1]

    @property
    def experts(self) -> int:
        """Number of experts; 1 if they share both factors."""
        return max(self.a.shape[0], self.b.shape[0])


LoRA: TypeAlias = ModuleLoRA | ExpertsLoRA


@dataclass(frozen=True, eq=False)
class SavedHead:
    """A fully trained linear layer of an adapter (PEFT's `modules_to_save`), such as a classifier.

    It replaces the base layer: the output is `x @ weight.T + bias`.

    Attributes:
      weight: [outputs, K] float array.
      bias: [outputs] float array; None for a layer without a bias.

    Raises:
      AdapterFormatError: `weight` is not a float matrix, or `bias` is not a float vector of its rows.
    """

    weight: Float[HostArray, "outputs K"]
    bias: Float[HostArray, "outputs"] | None = None
    kind: Literal["head"] = field(default="head", init=False, repr=False)
    # As factors, it is A and B of a module whose rank is the number of outputs.
    alpha: ClassVar[float] = 1.0
    scaling: ClassVar[float] = 1.0
    vectors: ClassVar[Mapping[str, HostArray]] = MappingProxyType({})

    def __post_init__(self):
        _check("SavedHead.weight", self.weight, 2, "a non-empty float NumPy matrix")
        if self.bias is not None:
            _check("SavedHead.bias", self.bias, 1, "a float NumPy vector")
            if self.bias.shape[0] != self.weight.shape[0]:
                raise AdapterFormatError(
                    f"SavedHead: bias {self.bias.shape} must have a value for each row of weight {self.weight.shape}"
                )

    @property
    def outputs(self) -> int:
        """Number of outputs, which are the labels of a classifier."""
        return self.weight.shape[0]

    rank = outputs

    @property
    def a(self) -> Float[HostArray, "outputs K"]:
        """The weight."""
        return self.weight

    @property
    def b(self) -> Float[np.ndarray, "1 outputs"]:
        """The bias, or zeros."""
        return np.zeros((1, self.outputs), np.float32) if self.bias is None else self.bias[None]

    @property
    def in_features(self) -> int:
        """Number of input features K."""
        return self.weight.shape[1]

    @property
    def biased(self) -> bool:
        """True if the head has a bias."""
        return self.bias is not None


Layer: TypeAlias = LoRA | SavedHead


def tensors_of(module: Layer) -> dict[str, HostArray]:
    """Return the arrays of a module, keyed by the names of their tensors in PEFT's files, after that of the module."""
    if isinstance(module, SavedHead):
        return {"weight": module.weight, **({} if module.bias is None else {"bias": module.bias})}
    part = "lora_embedding_{}" if module.kind == "embedding" else "lora_{}.weight"
    beside = {variant.tensor: module.vectors[variant.name] for variant in described(module.vectors)}
    return {part.format("A"): module.a, part.format("B"): module.b, **beside}


def check_variants(
    where: str,
    modules: Mapping[str, LoRA],
    heads: Mapping[str, SavedHead],
    about: Any,
) -> None:
    """Refuse modules and combinations of variants that PEFT does not have (`COMBINATIONS`).

    Raises:
      AdapterMismatchError: PEFT has no variant for what `about`, an `Adapter` or its `PeftConfig`, combines, or none
        for the kind of a module; or an activated LoRA (aLoRA) has a saved head.
    """
    titles = {variant.field: variant.title for variant in described(about.variants)}
    if about.invocation_tokens:
        titles[ACTIVATED] = "activated LoRA (aLoRA)"
    if heads and about.invocation_tokens:
        raise AdapterMismatchError(
            f"{where}: {shown(min(heads))} is a saved head (modules_to_save) of an activated LoRA (aLoRA), and a saved "
            "head is active on all rows; train the adapter with one of them"
        )
    kinds = COMBINATIONS.get(tuple(sorted(titles)))
    if kinds is None:
        raise AdapterMismatchError(
            f"{where}: {' and '.join(titles)} are set together; PEFT has no variant for "
            f"{' with '.join(titles.values())}. Train the adapter with one of them"
        )
    other = next((name for name, module in modules.items() if module.kind not in kinds), None)
    if other is not None:
        feature = " with ".join(titles.values())
        raise AdapterMismatchError(
            f"{where}: {shown(other)} is of kind {modules[other].kind!r}, and PEFT has {feature} for "
            f"{' and '.join(kinds)} layers only. Train the adapter without the module, or without {feature}"
        )


def _check(name: str, array: object, axes: int, expected: str) -> None:
    shaped = isinstance(array, (np.ndarray, UnreadArray))
    if not shaped or array.ndim != axes or 0 in array.shape or array.dtype not in FLOATS:
        found = f"{array.dtype} {array.shape}" if shaped else type(array).__name__
        raise AdapterFormatError(f"{name} must be {expected}, found {found}")
