"""User options: `LoRAConfig` for the manager and `LoRARequest` for one adapter."""

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast, get_args

import numpy as np

from jlora._typing import Backend, DType, is_list_or_tuple, is_mapping
from jlora.errors import LoRAUsageError

_SLOT_DTYPES = ("bfloat16", "float16", "float32")
CONFIG_DTYPES = (*_SLOT_DTYPES, "int8")


def slot_dtype(dtype: object, known: Sequence[str] = _SLOT_DTYPES) -> str | None:
    """Return the name of `dtype` if it is one of `known`, the floats of slot arrays by default, else None."""
    try:
        name = None if dtype is None else np.dtype(cast("Any", dtype)).name
    except TypeError:
        return None
    return name if name in known else None


def _is_count(value: object, _: object = None) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_text(value: object, _: object = None) -> bool:
    return isinstance(value, str) and value != ""


def _are_counts(value: object, _: object = None) -> bool:
    return is_mapping(value) and all(map(_is_text, value)) and all(map(_is_count, value.values()))


def _are_names(value: object, _: object = None) -> bool:
    return is_list_or_tuple(value) and all(map(_is_text, value))


def checked_targets(where: str, given: Any) -> tuple[str, ...] | None:
    """Return `target_modules` of a call. Raises LoRAUsageError unless they are None or names, at least one."""
    if given is None:
        return None
    is_one = isinstance(given, Collection) and not isinstance(given, str | bytes)
    found: tuple[Any, ...] = tuple(cast("Any", given)) if is_one else ()
    if not found or not _are_names(found):
        raise LoRAUsageError(
            f"{where}: target_modules must be None or a list of names, at least one, got {given!r:.200}"
        )
    return found


# A predicate of the value of a field and of all options, and a description of the values that it accepts.
Rule: TypeAlias = tuple[Callable[[Any, Any], bool], str]
SLOT_DTYPE: Rule = (lambda value, _: slot_dtype(value) is not None, f"one of {_SLOT_DTYPES}")
_COUNT: Rule = (_is_count, "a positive int")
_BOOL: Rule = (lambda value, _: isinstance(value, bool), "a bool")
_TEXT: Rule = (_is_text, "a non-empty string")
_NAMES: Rule = (lambda value, _: value != () and _are_names(value), 'a list of at least one name, such as ["q_proj"]')

# Field -> rule.
_CONFIG: Mapping[str, Rule] = {
    "max_loras": _COUNT,
    "max_lora_rank": (
        lambda value, _: _is_count(value) or (_are_counts(value) and "*" in value),
        'a positive int, or a mapping of names of layers to positive ints, with "*" for all others',
    ),
    "expert_slots": (
        lambda value, config: (
            _are_counts(value)
            and value.keys() <= {"per_expert", "shared"}
            and sum(({"per_expert": 1} | dict(value)).values()) <= config.max_loras
        ),
        'a mapping of "per_expert", "shared" or both to positive ints, at most max_loras in all, and 1 left for '
        '"per_expert"',
    ),
    "max_cpu_loras": (
        lambda value, config: _is_count(value) and value >= config.max_loras,
        "an int of at least max_loras, because every adapter in a slot is also in the host cache",
    ),
    "dtype": (lambda value, _: slot_dtype(value, CONFIG_DTYPES) is not None, f"one of {CONFIG_DTYPES}"),
    "target_modules": _NAMES,
    "exclude_modules": _NAMES,
    "max_cpu_bytes": _COUNT,
    "max_adapters_per_sequence": (
        lambda value, config: _is_count(value) and value <= config.max_loras,
        "a positive int of at most max_loras",
    ),
    "allow_nonfinite": _BOOL,
    "variants": (_are_names, 'a list of names, such as ["dora"]'),
    "activated": _BOOL,
    "saved_heads": (_are_counts, 'a mapping of names of layers to their most outputs, such as {"score": 8}'),
    "fully_sharded": _BOOL,
    "data_axes": (_are_names, "a list of names of axes of a mesh"),
    "process_timeout": (
        lambda value, _: isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf"),
        "seconds above 0",
    ),
    "bitwise_base": _BOOL,
    "batch_invariant": _BOOL,
    "backend": (lambda value, _: value in get_args(Backend), f"one of {get_args(Backend)}"),
}
_REQUEST: Mapping[str, Rule] = {
    "name": _TEXT,
    "path": (lambda value, _: _is_text(value) or isinstance(value, os.PathLike), "a folder or a repo id"),
    "base_model_name": _TEXT,
    "load_inplace": _BOOL,
    "revision": _TEXT,
    "local_only": _BOOL,
    "is_3d_lora_weight": _BOOL,
}


def check_fields(label: str, options: object, rules: Mapping[str, Rule]) -> None:
    """Check fields. None is accepted where it is the default.

    Raises:
      LoRAUsageError: a field does not accept its value. The message begins with `label`.
    """
    for field, (accepts, expected) in rules.items():
        value, optional = getattr(options, field), getattr(type(options), field, ...) is None
        if not (accepts(value, options) or (optional and value is None)):
            raise LoRAUsageError(f"{label}{field} must be {'None or ' * optional}{expected}, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """Sizes and placement of the slots.

    Attributes:
      max_loras: Number of device slots, which is the number of different adapters that one batch can use.
      max_lora_rank: Largest rank that a slot holds. An adapter of a larger rank is refused, never truncated. A mapping
        from names of layers or their parent modules to ranks sets it by layer ({"*": 64, "experts": 8}). The longest
        matching name decides; "*" is required and matches all other layers.
      expert_slots: Numbers of slots for experts, {"per_expert": P, "shared": S}. The first P slots hold weights of each
        expert; by default all slots that "shared" leaves. An adapter with such weights takes one of these slots. Any
        other adapter takes another slot if one is available. The S slots after them store factors shared by all
        experts once: A of gate and up, B of down. An adapter with only such factors (`ExpertsLoRA` with a single A of
        gate and up, a single B of down) takes one of these slots and no other. Without "shared", its shared factors are
        expanded when it is packed, and it takes one of the first P slots.
      max_cpu_loras: Number of adapters in the host cache, at least `max_loras` (the default). Adapters from memory, or
        changed by `update_adapter`, are never evicted from it (`LoRAManager.set_request`).
      dtype: Dtype of the slot arrays, bfloat16, float16, float32 or int8. None uses, for each layer, the dtype of its
        spec, else its `dtype` attribute, else the dtype of its parameter if that is a float of at least 16 bits. A
        layer without any of these takes no adapter. With int8, half the size of bfloat16, a load rounds each row of A
        and of B to 255 values and keeps a float32 scale beside it. The delta of a layer changes by 1 to 1.3% of its
        norm for factors of normal distribution (`jlora inspect` computes it). Embedding tables and saved heads have the
        dtype of None.
      target_modules: Layers to wrap, as dotted suffixes ("q_proj", "self_attn.q_proj") or full paths. A packed
        layer is matched by its own name and by those of its parts. None wraps every eligible layer. The manager raises
        `LoRAUsageError` for a name without a match and for a layer that cannot be wrapped.
      exclude_modules: Layers not to wrap, named as in `target_modules`, or modules whose layers are not wrapped. It
        takes precedence over `target_modules`. A name without a match raises `LoRAUsageError`.
      max_cpu_bytes: Bytes of the host cache. None uses half of the machine's memory. On GPUs and TPUs, 4 GiB of it, at
        most an eighth of the machine's memory, are page-locked. Transfers from the rest are several times as slow.
      max_adapters_per_sequence: Number of adapters that one sequence can sum (`Mix`). Each above 1 adds two kernel
        launches to every layer. With None, batches have no factors: a `Mix` of one adapter needs 1.
      allow_nonfinite: Accept adapters with NaN or infinity, which are refused otherwise. Without it, slot arrays set by
        hand must be finite too: on a TPU one that is not may change the rows of other adapters.
      variants: Variants of LoRA to serve beside plain adapters: "dora" for DoRA (arXiv:2402.09353). Each takes one more
        float32 array [slots, N] for each linear layer. The manager raises `LoRAUsageError` for an unknown name.
      activated: Serve activated LoRA adapters (aLoRA, arXiv:2504.12397). `prepare` takes `active_from`, the first row
        on which the adapter of each sequence acts.
      saved_heads: Linear layers that an adapter can replace by a fully trained one (a saved head, PEFT's
        `modules_to_save`), named as in `target_modules` -> most outputs R of such a head ({"score": 8}). The longest
        matching name decides. Each layer has room for a weight [slots, R, K] and a bias, and returns max(N, R) columns
        inside `jlora.use(batch)`. Columns past the outputs of a row's own head are -inf. The manager raises
        `LoRAUsageError` for a name that matches no wrapped layer of this kind. With None, adapters with saved heads are
        refused.
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
    expert_slots: Mapping[str, int] | None = None
    max_cpu_loras: int | None = None
    dtype: DType | None = None
    target_modules: Sequence[str] | None = None
    exclude_modules: Sequence[str] | None = None
    max_cpu_bytes: int | None = None
    max_adapters_per_sequence: int | None = None
    allow_nonfinite: bool = False
    variants: Sequence[str] = ()
    activated: bool = False
    saved_heads: Mapping[str, int] | None = None
    fully_sharded: bool = False
    data_axes: Sequence[str] = ()
    process_timeout: float = 600.0
    bitwise_base: bool = False
    batch_invariant: bool = False
    backend: Backend = "auto"

    def __post_init__(self):
        for field in ("target_modules", "exclude_modules"):
            names: object = getattr(self, field)
            if isinstance(names, Iterable) and not isinstance(names, str):
                object.__setattr__(self, field, tuple(cast("Iterable[Any]", names)))
        if self.max_cpu_loras is None:
            object.__setattr__(self, "max_cpu_loras", self.max_loras)
        check_fields(f"LoRAConfig(max_loras={self.max_loras!r}): ", self, _CONFIG)
        for field in ("max_lora_rank", "expert_slots", "saved_heads"):
            if is_mapping(value := getattr(self, field)):
                object.__setattr__(self, field, dict(value) or None)
        for field in ("variants", "data_axes"):
            object.__setattr__(self, field, tuple(getattr(self, field)))


def count_expert_slots(config: LoRAConfig) -> tuple[int, int]:
    """Return the numbers of slots with weights of each expert, and of slots with factors shared by all experts."""
    slots = config.expert_slots or {}
    shared = slots.get("shared", 0)
    return slots.get("per_expert", config.max_loras - shared), shared


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
        check_fields(f"LoRARequest({self.name!r}): ", self, _REQUEST)
        object.__setattr__(self, "path", str(self.path))
