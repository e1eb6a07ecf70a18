"""`adapter_model.safetensors` read to NumPy, without PyTorch: its tensors sorted into LoRA pairs and base weights."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes  # teaches NumPy bfloat16, which the safetensors reader then hands out
import numpy as np
from safetensors import SafetensorError, safe_open

from jlora.adapters.peft_config import CONFIG_FILE, Kind, PeftConfig
from jlora.errors import AdapterFormatError, AdapterMismatchError

# safetensors' name of each served dtype
_DTYPES = {"F16": np.float16, "BF16": ml_dtypes.bfloat16, "F32": np.float32, "F64": np.float64}

_PREFIX = "base_model.model."
_MAX_NAME = 512
# A raw state dict still has PEFT's own name of the adapter, "default", which save_pretrained leaves out.
_LORA = re.compile(
    r"(?P<linear>.+)\.lora_(?P<half>[AB])(\.default)?\.weight|"
    r"(?P<embedding>.+)\.lora_(?P<table>embedding_[AB])(\.default)?"
)
# PEFT stores the whole table beside LoRA on an embedding or lm_head, and tables of these two names if resized.
_BASE = re.compile(r"(?P<module>.+)\.base_layer\.weight|(?P<resized>(.+\.)?(embed_tokens|lm_head))\.weight")

# What a part of a tensor's name says about the feature that wrote it.
_FEATURES = {
    "lora_magnitude_vector": "DoRA",
    "bias": "a trained bias",
    "lora_diag": "KaSA",
    "lora_velora_embed": "VeLoRA",
    "modules_to_save": "a fully trained module",
    "original_module": "a fully trained module",
    "token_adapter": "trained token embeddings",
    "trainable_tokens_delta": "trained token embeddings",
    "lora_E": "AdaLoRA",
    "prompt_embeddings": "prompt tuning",
}


@dataclass(frozen=True)
class Checkpoint:
    """Tensors of one adapter, by dotted module name without PEFT's prefix.

    Attributes:
      pairs: module -> (kind, A [r, K], B [N, r]); for an embedding A is [r, V] and B [D, r].
      base_weights: module -> the whole base weight that PEFT stored beside its LoRA.
    """

    pairs: Mapping[str, tuple[Kind, np.ndarray, np.ndarray]]
    base_weights: Mapping[str, np.ndarray]


def read_checkpoint(
    file: Path, adapter: str, config: PeftConfig, *, dtype: np.dtype | None = None, check_finite: bool = False
) -> Checkpoint:
    """Reads an adapter's weights through a memory map, and copies them out of it.

    The copy is the adapter's own: a file that is rewritten or cut short later, as a training run does with its last
    checkpoint, cannot change or crash an adapter that is being served.

    Args:
      file: the safetensors file.
      adapter: the adapter's name, for messages.
      config: its configuration; every tensor must agree with its ranks and targets.
      dtype: convert A and B to this dtype; None keeps the file's. Base weights are never converted.
      check_finite: also look for NaN and infinity.

    Raises:
      AdapterFormatError: not a whole safetensors file; a tensor of the wrong dtype or shape; an A without its B; NaN
        or infinity if asked; a value too large for `dtype`.
      AdapterMismatchError: a tensor of a PEFT feature that is not served, or of a module that `config` does not target.
    """
    where = f"adapter {adapter!r}: {file}"
    try:
        with safe_open(file, framework="numpy") as opened:
            keys = _sorted_keys(opened.keys(), where)
            reader = _Reader(opened, where, check_finite)
            pairs = {
                module: _pair(module, parts, reader, config, dtype)
                for module, parts in keys.items()
                if parts.keys() != {"base"}
            }
            base = {
                module: _base_weight(parts["base"], reader, pairs.get(module))
                for module, parts in keys.items()
                if "base" in parts
            }
    except (SafetensorError, OSError, ValueError) as error:
        raise AdapterFormatError(f"{where}: is not a whole safetensors file: {error}") from error
    if not pairs:
        raise AdapterFormatError(f"{where}: holds no LoRA tensor (expected names such as 'q_proj.lora_A.weight')")
    return Checkpoint(pairs, base)


def _sorted_keys(keys: Iterable[str], where: str) -> dict[str, dict[str, str]]:
    """module -> part ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B" or "base") -> the tensor's key."""
    found: dict[str, dict[str, str]] = {}
    for key in sorted(keys):
        name = key.removeprefix(_PREFIX)
        if lora := _LORA.fullmatch(name):
            module, part = lora["linear"] or lora["embedding"], "lora_" + (lora["half"] or lora["table"])
        elif base := _BASE.fullmatch(name):
            module, part = base["module"] or base["resized"], "base"
        else:
            feature = next((f for mark, f in _FEATURES.items() if mark in name.split(".")), None)
            raise AdapterMismatchError(
                f"{where}: tensor {_shown(key)} is {f'of {feature}' if feature else 'of a kind'} that jlora does not "
                "serve; expected lora_A, lora_B, lora_embedding_A or lora_embedding_B of a module"
            )
        if len(module) > _MAX_NAME or not module.isprintable() or not all(module.split(".")):
            raise AdapterFormatError(f"{where}: tensor {_shown(key)}: {_shown(module)} is not a dotted module name")
        parts = found.setdefault(module, {})
        if part in parts:
            raise AdapterFormatError(f"{where}: tensors {_shown(parts[part])} and {_shown(key)} mean the same matrix")
        parts[part] = key
    return found


@dataclass(frozen=True)
class _Reader:
    """One open safetensors file, and what to check of each tensor taken from it."""

    opened: Any
    where: str
    check_finite: bool

    def at(self, key: str) -> str:
        return f"{self.where}: tensor {_shown(key)}"

    def shape(self, key: str, expected: str) -> tuple[int, int]:
        """Shape of a matrix of a served dtype, without reading it."""
        view = self.opened.get_slice(key)
        shape, dtype = tuple(view.get_shape()), view.get_dtype()
        if dtype not in _DTYPES:
            raise AdapterFormatError(f"{self.at(key)} has dtype {dtype}; expected one of {', '.join(_DTYPES)}")
        if len(shape) > 2:
            raise AdapterMismatchError(f"{self.at(key)} has shape {shape}; LoRA on convolutions is not served")
        if len(shape) != 2 or 0 in shape:
            raise AdapterFormatError(f"{self.at(key)} has shape {shape}; expected {expected}")
        return shape

    def array(self, key: str, dtype: np.dtype | None = None) -> np.ndarray:
        read = self.opened.get_tensor(key)
        if self.check_finite and not np.isfinite(read).all():
            raise AdapterFormatError(f"{self.at(key)} holds NaN or infinity; expected finite numbers")
        array = read
        if dtype is not None and dtype != read.dtype:
            with np.errstate(over="ignore", invalid="ignore"):
                array = read.astype(dtype)
            if (np.isinf(array) & np.isfinite(read)).any():
                raise AdapterFormatError(f"{self.at(key)} ({read.dtype}) holds values too large for {dtype}")
        array.flags.writeable = False
        return array


def _pair(module: str, parts: Mapping[str, str], reader: _Reader, config: PeftConfig, dtype: np.dtype | None):
    """(kind, A, B) of one module, checked against the configuration."""
    kind: Kind = "embedding" if any("embedding" in part for part in parts) else "linear"
    key_a, key_b = (parts.get(f"lora_embedding_{half}" if kind == "embedding" else f"lora_{half}") for half in "AB")
    if key_a is None or key_b is None or len(parts.keys() - {"base"}) > 2:
        raise AdapterFormatError(
            f"{reader.where}: module {_shown(module)} has tensor {', '.join(map(_shown, parts.values()))}; "
            "expected one A and one B of the same kind"
        )
    if "base_layer" in module.split(".") or not config.targets(module, kind):
        raise AdapterMismatchError(
            f"{reader.at(key_a)}: the adapter's {CONFIG_FILE} does not target module {_shown(module)} "
            "(target_modules, exclude_modules, layers_to_transform), so PEFT would leave the tensor out"
        )
    rank = config.rank(module)
    (rank_a, _), (_, rank_b) = reader.shape(key_a, f"({rank}, in)"), reader.shape(key_b, f"(out, {rank})")
    for key, found in ((key_a, rank_a), (key_b, rank_b)):
        if found != rank:
            raise AdapterFormatError(f"{reader.at(key)} has rank {found}; expected {rank} (r and rank_pattern)")
    return kind, reader.array(key_a, dtype), reader.array(key_b, dtype)


def _base_weight(key: str, reader: _Reader, pair: tuple[Kind, np.ndarray, np.ndarray] | None) -> np.ndarray:
    shape = reader.shape(key, "a matrix")
    if pair is not None:
        kind, a, b = pair
        expected = (a.shape[1], b.shape[0]) if kind == "embedding" else (b.shape[0], a.shape[1])
        if shape != expected:
            raise AdapterFormatError(f"{reader.at(key)} has shape {shape}; expected {expected}, as A and B imply")
    return reader.array(key)


def _shown(name: str) -> str:
    return repr(name if len(name) <= 200 else name[:197] + "...")
