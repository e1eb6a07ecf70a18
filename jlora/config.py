"""What a user chooses: `LoRAConfig` for the manager, `LoRARequest` for one adapter."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast, get_args

import numpy as np

from jlora._typing import Backend, DType, is_list_or_tuple
from jlora.errors import LoRAUsageError

_SLOT_DTYPES = ("bfloat16", "float16", "float32")


def slot_dtype(dtype: object) -> str | None:
    """The name of `dtype` where slot arrays may have it, else None."""
    try:
        name = None if dtype is None else np.dtype(cast("Any", dtype)).name
    except TypeError:
        return None
    return name if name in _SLOT_DTYPES else None


def check_slot_dtype(name: str, dtype: DType | None) -> None:
    """Raise `LoRAUsageError` where the option `name` is no dtype of slot arrays, and not None."""
    if dtype is not None and slot_dtype(dtype) is None:
        raise LoRAUsageError(f"{name} must be None or one of {_SLOT_DTYPES}, got {dtype!r}")


def _positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """Sizes and placement of the slots.

    Attributes:
      max_loras: device slots, that is the number of different adapters one batch can use.
      max_lora_rank: the largest rank a slot holds; an adapter of a larger rank is refused, never truncated. Or a
        mapping of names, of layers or of modules that they are in, to ranks: the longest name that matches a layer
        decides, and "*", which is needed, does for all others ({"*": 64, "experts": 8}).
      max_expert_loras: how many of the slots hold weights of experts, the first ones; None: all that the next option
        leaves. An adapter that brings such weights takes one of these, and every other takes one of the others while
        there is room.
      max_shared_expert_loras: how many of the slots, those that come next, hold once what all experts share: A of the
        products that go into the experts, B of those that lead out. An adapter all of whose weights of experts are so
        (`ExpertsLoRA` with one A of gate and up, one B of down) takes one of these, and no other. 0: its shared factors
        are expanded when it is staged, and it takes one of `max_expert_loras`.
      max_cpu_loras: adapters kept on the host, at least `max_loras` (the default).
      dtype: dtype of the slot arrays, bfloat16, float16 or float32. None: for each layer that of its spec, else of the
        layer (its `dtype` attribute), else of its parameter if that is a float of at least 16 bits; where none of these
        says it, the layer takes no adapter.
      target_modules: layers to wrap, as dotted suffixes ("q_proj", "self_attn.q_proj") or full paths. A packed
        layer is matched by its own name and by those of its parts. None wraps every eligible layer. A name that
        matches nothing, or a layer that cannot be wrapped, raises `LoRAUsageError` when the manager is made.
      exclude_modules: layers to leave alone, named as in `target_modules`, or modules to leave alone with all that is
        in them. It wins over `target_modules`; a name that matches nothing raises `LoRAUsageError`.
      max_cpu_bytes: bytes of the host cache; None: half of the machine's memory.
      max_pinned_bytes: how much of the host cache lies in page-locked memory where the device has it (GPUs, TPUs);
        0 for none. Adapters beyond that lie in ordinary memory, from where they move several times as slowly.
      max_staging_bytes: most bytes of adapters that are on their way to slots, on the device beside the slots.
      allow_nonfinite: let adapters with NaN or infinity through; they are refused otherwise.
      trace_leases: record where each open batch was prepared, for `LoRAManager.leases` (some 50 us a batch).
      fully_sharded: on a mesh, split both factors of a layer whose kernel is split, and not one of them (S-LoRA,
        arXiv:2311.03285): for memory, at the cost of more collectives. Refused for a model that lies on no mesh.
      data_axes: the axes of the mesh that sequences (or packed rows) are split over. Batches are laid out so, where
        they divide; kernels that are split over them too are gathered by the model, and split no slot array. Refused
        for a model that lies on no mesh.
      process_timeout: seconds that a call waits for the other processes of the model's mesh, if there are any, to make
        the same call: a load may take one of them longer. After that no process goes on.
      bitwise_base: never let LoRA's kernels make the product of a layer itself, which they do where a tuned table of
        the device found that faster (few rows, on GPUs). Then rows without an adapter have the unwrapped model's bits;
        else they are equal to rounding, there.
      backend: "auto" picks by platform; a named backend is used or raises.
    """

    max_loras: int
    max_lora_rank: int | Mapping[str, int]
    max_expert_loras: int | None = None
    max_shared_expert_loras: int = 0
    max_cpu_loras: int | None = None
    dtype: DType | None = None
    target_modules: Sequence[str] | None = None
    exclude_modules: Sequence[str] | None = None
    max_cpu_bytes: int | None = None
    max_pinned_bytes: int = 4 * 2**30
    max_staging_bytes: int = 256 * 2**20
    allow_nonfinite: bool = False
    trace_leases: bool = False
    fully_sharded: bool = False
    data_axes: Sequence[str] = ()
    process_timeout: float = 600.0
    bitwise_base: bool = False
    backend: Backend = "auto"

    def __post_init__(self):
        if self.max_cpu_loras is None:
            object.__setattr__(self, "max_cpu_loras", self.max_loras)
        if isinstance(self.max_lora_rank, Mapping):
            ranks = dict[Any, Any](self.max_lora_rank)
            named = all(isinstance(name, str) and name for name in ranks)
            if not named or "*" not in ranks or not all(map(_positive, ranks.values())):
                raise LoRAUsageError(
                    'LoRAConfig.max_lora_rank must map names of layers to positive ints, and "*" for all others, got '
                    f"{ranks!r}"
                )
            object.__setattr__(self, "max_lora_rank", ranks)
        for field in ("max_loras", "max_lora_rank", "max_cpu_loras", "max_cpu_bytes", "max_staging_bytes"):
            value = getattr(self, field)
            if isinstance(value, dict):
                continue
            if field == "max_cpu_bytes" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise LoRAUsageError(f"LoRAConfig.{field} must be a positive int, got {value!r}")
        experts = self.max_expert_loras
        if experts is not None and (not _positive(experts) or experts > self.max_loras):
            raise LoRAUsageError(
                f"LoRAConfig.max_expert_loras must be an int from 1 to max_loras ({self.max_loras}), got {experts!r}"
            )
        shared, room = self.max_shared_expert_loras, self.max_loras - (experts or 1)
        if isinstance(shared, bool) or not isinstance(shared, int) or not 0 <= shared <= room:
            raise LoRAUsageError(
                f"LoRAConfig.max_shared_expert_loras must be an int from 0 to {room}, the slots that max_loras="
                f"{self.max_loras} leaves beside those of max_expert_loras ({experts or 'at least 1'}), got {shared!r}"
            )
        pinned = self.max_pinned_bytes
        if isinstance(pinned, bool) or not isinstance(pinned, int) or pinned < 0:
            raise LoRAUsageError(f"LoRAConfig.max_pinned_bytes must be an int, and 0 for none, got {pinned!r}")
        if (self.max_cpu_loras or 0) < self.max_loras:
            raise LoRAUsageError(
                f"LoRAConfig.max_cpu_loras ({self.max_cpu_loras}) must be at least max_loras ({self.max_loras}): "
                "every adapter in a slot also lives in the host cache"
            )
        for field in ("target_modules", "exclude_modules"):
            names = getattr(self, field)
            if isinstance(names, str):
                raise LoRAUsageError(
                    f"LoRAConfig.{field} must be a list of names, got the string {names!r}; write [{names!r}]"
                )
            if names is not None:
                object.__setattr__(self, field, tuple(names))
                if not tuple(names) or not all(isinstance(name, str) and name for name in names):
                    raise LoRAUsageError(
                        f"LoRAConfig.{field} must be None or a list of at least one name, got {tuple(names)}"
                    )
        axes: object = self.data_axes
        if isinstance(axes, str) or not is_list_or_tuple(axes) or not all(isinstance(name, str) for name in axes):
            raise LoRAUsageError(f"LoRAConfig.data_axes must be a list of names of axes of a mesh, got {axes!r}")
        object.__setattr__(self, "data_axes", tuple(axes))
        timeout: object = self.process_timeout
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < float("inf"):
            raise LoRAUsageError(f"LoRAConfig.process_timeout must be seconds, got {timeout!r}")
        if not isinstance(self.bitwise_base, bool):
            raise LoRAUsageError(f"LoRAConfig.bitwise_base must be a bool, got {self.bitwise_base!r}")
        check_slot_dtype("LoRAConfig.dtype", self.dtype)
        if self.backend not in get_args(Backend):
            raise LoRAUsageError(f"LoRAConfig.backend must be one of {get_args(Backend)}, got {self.backend!r}")


@dataclass(frozen=True)
class LoRARequest:
    """One adapter to load.

    Attributes:
      name: how batches and the manager refer to it.
      path: a local PEFT folder (`~` is expanded) or a Hugging Face repo id.
      base_model_name: if given, must equal the adapter's `base_model_name_or_path`, or the load is refused.
      load_inplace: replace an adapter of the same name that is already loaded, also in its slot.
      revision: branch, tag or commit of a Hugging Face repo.
      local_only: never ask the network for it; what Hugging Face's cache holds is still found.
      is_3d_lora_weight: whether it has the weights of all experts of a layer in one tensor. The file shows that; where
        this is given and differs, the load is refused. None: whatever it is.
    """

    name: str
    path: str
    base_model_name: str | None = None
    load_inplace: bool = False
    revision: str | None = None
    local_only: bool = False
    is_3d_lora_weight: bool | None = None

    def __post_init__(self):
        if not isinstance(self.name, str) or not self.name:
            raise LoRAUsageError(f"LoRARequest.name must be a non-empty string, got {self.name!r}")
        if not isinstance(self.path, (str, os.PathLike)) or not str(self.path):
            raise LoRAUsageError(f"LoRARequest({self.name!r}): path must be a folder or a repo id, got {self.path!r}")
        for field in ("base_model_name", "revision"):
            value = getattr(self, field)
            if value is not None and (not isinstance(value, str) or not value):
                raise LoRAUsageError(
                    f"LoRARequest({self.name!r}): {field} must be a non-empty string or None, got {value!r}"
                )
        for field in ("load_inplace", "local_only"):
            value = getattr(self, field)
            if not isinstance(value, bool):
                raise LoRAUsageError(f"LoRARequest({self.name!r}): {field} must be a bool, got {value!r}")
        if self.is_3d_lora_weight is not None and not isinstance(self.is_3d_lora_weight, bool):
            raise LoRAUsageError(
                f"LoRARequest({self.name!r}): is_3d_lora_weight must be a bool or None, got {self.is_3d_lora_weight!r}"
            )
        object.__setattr__(self, "path", str(self.path))
