"""User options: `LoRAConfig` for the manager and `LoRARequest` for one adapter."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast, get_args

import numpy as np

from jlora._typing import Backend, DType, is_list_or_tuple, is_mapping
from jlora.errors import LoRAUsageError

_SLOT_DTYPES = ("bfloat16", "float16", "float32")


def slot_dtype(dtype: object) -> str | None:
    """Return the name of `dtype` if slot arrays can have it, else None."""
    try:
        name = None if dtype is None else np.dtype(cast("Any", dtype)).name
    except TypeError:
        return None
    return name if name in _SLOT_DTYPES else None


def check_slot_dtype(name: str, dtype: DType | None) -> None:
    """Raise `LoRAUsageError` if the value of option `name` is neither None nor a dtype of slot arrays."""
    if dtype is not None and slot_dtype(dtype) is None:
        raise LoRAUsageError(f"{name} must be None or one of {_SLOT_DTYPES}, got {dtype!r}")


def _positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """Sizes and placement of the slots.

    Attributes:
      max_loras: Number of device slots, which is the number of different adapters that one batch can use.
      max_lora_rank: Largest rank that a slot holds. An adapter of a larger rank is refused, never truncated. A mapping
        from names of layers or their parent modules to ranks sets it by layer ({"*": 64, "experts": 8}). The longest
        matching name decides; "*" is required and matches all other layers.
      max_expert_loras: Number of slots, the first ones, that hold weights of experts. None uses all slots that
        `max_shared_expert_loras` leaves. An adapter with such weights takes one of these slots. Any other adapter
        takes another slot if one is available.
      max_shared_expert_loras: Number of slots, after those of `max_expert_loras`, that store factors shared by all
        experts once: A of gate and up, B of down. An adapter with only such factors (`ExpertsLoRA` with a single A of
        gate and up, a single B of down) takes one of these slots and no other. With 0, its shared factors are expanded
        during staging and it takes one of `max_expert_loras`.
      max_cpu_loras: Number of adapters in the host cache, at least `max_loras` (the default). Adapters from memory, or
        changed by `update_adapter`, are never evicted from it.
      dtype: Dtype of the slot arrays, bfloat16, float16 or float32. None uses, for each layer, the dtype of its spec,
        else its `dtype` attribute, else the dtype of its parameter if that is a float of at least 16 bits. A layer
        without any of these takes no adapter.
      target_modules: Layers to wrap, as dotted suffixes ("q_proj", "self_attn.q_proj") or full paths. A packed
        layer is matched by its own name and by those of its parts. None wraps every eligible layer. The manager raises
        `LoRAUsageError` for a name without a match and for a layer that cannot be wrapped.
      exclude_modules: Layers not to wrap, named as in `target_modules`, or modules whose layers are not wrapped. It
        takes precedence over `target_modules`. A name without a match raises `LoRAUsageError`.
      max_cpu_bytes: Bytes of the host cache. None uses half of the machine's memory.
      max_pinned_bytes: Bytes of the host cache in page-locked memory, on devices that support it (GPUs, TPUs). With 0
        none is used. Adapters beyond it are in pageable memory, from which transfers are several times as slow.
      max_staging_bytes: Largest number of bytes of adapters in transfer to slots, on the device beside the slots.
      sequence_scales: Serve `Scaled` adapters: each sequence has a factor of its adapter's delta.
      max_adapters_per_sequence: Number of adapters that one sequence can sum (`Mix`). Each above 1 adds two kernel
        launches to every layer. With more than 1, `Scaled` is served too.
      allow_nonfinite: Accept adapters with NaN or infinity, which are refused otherwise.
      dora: Serve DoRA adapters (arXiv:2402.09353). It takes one more float32 array [slots, N] for each linear layer.
      activated: Serve activated LoRA adapters (aLoRA, arXiv:2504.12397). `prepare` takes `active_from`, the first row
        on which the adapter of each sequence acts.
      saved_heads: Linear layers that an adapter can replace by a fully trained one (a saved head, PEFT's
        `modules_to_save`), named as in `target_modules` -> most outputs R of such a head ({"score": 8}). The longest
        matching name decides. Each layer has room for a weight [slots, R, K] and a bias, and returns max(N, R) columns
        inside `jlora.use(batch)`. Columns past the outputs of a row's own head are -inf. The manager raises
        `LoRAUsageError` for a name that matches no wrapped layer of this kind. With None, adapters with saved heads are
        refused.
      trace_leases: Record the stack at which each open batch was prepared, for `LoRAManager.leases` (about 50 us a
        batch).
      fully_sharded: Split both factors of a layer with a split kernel, instead of one (S-LoRA, arXiv:2311.03285). It
        saves memory and adds collectives. Refused for a model that is not on a mesh.
      data_axes: Mesh axes that sequences or packed rows are split over. Batches are split over them if the sizes
        divide. If a kernel is split over them too, the model gathers it and its slot arrays are not split. Refused for
        a model that is not on a mesh.
      process_timeout: Seconds that a call waits for the other processes of the model's mesh to make the same call. It
        must be longer than the slowest load in any process. After that time, all managers of
        the model refuse further calls.
      bitwise_base: Never compute a layer's own product in a kernel of jlora. By default one does in `nnx.Linear` for 33
        to 64 rows on some GPUs, where it is faster than XLA's. If True, rows without an adapter are bitwise equal to
        the unwrapped model's; otherwise they may differ by rounding in such layers.
      batch_invariant: Compute the delta of a row with the same bits for any number of rows, mix of adapters and slots.
        It is slower: tiles are small, all products of layers are XLA's, and the kernels wait for them.
      backend: "auto" chooses by platform. A named backend is used, or raises.
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
    sequence_scales: bool = False
    max_adapters_per_sequence: int = 1
    allow_nonfinite: bool = False
    dora: bool = False
    activated: bool = False
    saved_heads: Mapping[str, int] | None = None
    trace_leases: bool = False
    fully_sharded: bool = False
    data_axes: Sequence[str] = ()
    process_timeout: float = 600.0
    bitwise_base: bool = False
    batch_invariant: bool = False
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
        sizes = ("max_loras", "max_lora_rank", "max_cpu_loras", "max_cpu_bytes", "max_staging_bytes")
        for field in (*sizes, "max_adapters_per_sequence"):
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
        if self.saved_heads is not None:
            heads: object = self.saved_heads
            if (
                not is_mapping(heads)
                or not all(isinstance(name, str) and name for name in heads)
                or not all(map(_positive, heads.values()))
            ):
                raise LoRAUsageError(
                    'LoRAConfig.saved_heads must map names of layers to their most outputs, {"score": 8}, got '
                    f"{heads!r}"
                )
            object.__setattr__(self, "saved_heads", dict(heads) or None)
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
        for field in ("sequence_scales", "dora", "activated", "bitwise_base", "batch_invariant"):
            if not isinstance(value := getattr(self, field), bool):
                raise LoRAUsageError(f"LoRAConfig.{field} must be a bool, got {value!r}")
        if self.max_adapters_per_sequence > self.max_loras:
            raise LoRAUsageError(
                f"LoRAConfig.max_adapters_per_sequence ({self.max_adapters_per_sequence}) must be at most max_loras "
                f"({self.max_loras})"
            )
        check_slot_dtype("LoRAConfig.dtype", self.dtype)
        if self.backend not in get_args(Backend):
            raise LoRAUsageError(f"LoRAConfig.backend must be one of {get_args(Backend)}, got {self.backend!r}")


@dataclass(frozen=True)
class LoRARequest:
    """One adapter to load.

    Attributes:
      name: Name of the adapter in batches and in the manager.
      path: Local PEFT folder (`~` is expanded) or a Hugging Face repo id.
      base_model_name: Required value of the adapter's `base_model_name_or_path`. The load is refused if it differs.
        None accepts any.
      load_inplace: Replace a loaded adapter of the same name, also in its slot.
      revision: Branch, tag or commit of the Hugging Face repo.
      local_only: Use no network. Repos in Hugging Face's local cache are still found.
      is_3d_lora_weight: True requires a file with one tensor for all experts of a layer, False a file without such
        tensors. The load is refused otherwise. None accepts both.
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
