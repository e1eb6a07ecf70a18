"""`adapter_model.safetensors` read to NumPy, without PyTorch: its tensors sorted into LoRA pairs and base weights."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from jlora.adapters.files import StableFile
from jlora.adapters.messages import shown, shown_path, shown_value
from jlora.adapters.peft_config import CONFIG_FILE, Kind, PeftConfig, scaling_of
from jlora.adapters.shapes import AdapterShapes, BaseShape, ModuleShapes
from jlora.adapters.tensor_file import TensorInfo, read_header
from jlora.errors import AdapterFormatError, AdapterMismatchError

# safetensors' name of each served dtype
_DTYPES = {
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
}
# Exponent bits; where all are set, the number is NaN or infinite.
_EXPONENT = {_DTYPES["F16"]: 0x7C00, _DTYPES["BF16"]: 0x7F80}
_CHUNK = 1 << 17  # elements that are looked at together: they stay in the cache

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
      shapes: what the header said.
      pairs: module -> (A [r, K], B [N, r]); for an embedding A is [r, V] and B [D, r].
      base_weights: module -> the whole base weight that PEFT stored beside its LoRA.
    """

    shapes: AdapterShapes
    pairs: Mapping[str, tuple[np.ndarray, np.ndarray]]
    base_weights: Mapping[str, np.ndarray]


def read_checkpoint(
    file: Path,
    adapter: str,
    config: PeftConfig,
    *,
    dtype: np.dtype | None = None,
    allow_nonfinite: bool = False,
    check: Callable[[AdapterShapes], None] | None = None,
    max_bytes: int | None = None,
) -> Checkpoint:
    """Reads an adapter's weights.

    The header is read and checked first, so that a file that does not fit costs no more than its header. Then each
    tensor is read into the array that is kept.

    Args:
      file: the safetensors file.
      adapter: the adapter's name, for messages.
      config: its configuration; every tensor must agree with its ranks and targets.
      dtype: convert A and B to this dtype; None keeps the file's. Base weights are never converted.
      allow_nonfinite: let NaN and infinity through.
      check: called with what the header says, before any tensor is read; what it raises is raised.
      max_bytes: the most bytes that the tensors may have, in the file or converted.

    Raises:
      AdapterFormatError: not a whole safetensors file, or one that changed while it was read; a tensor of the wrong
        dtype or shape; an A without its B; NaN or infinity; a value too large for `dtype`.
      AdapterMismatchError: a tensor of a PEFT feature that is not served, or of a module that `config` does not target;
        more than `max_bytes`.
    """
    where = f"adapter {shown(adapter)}: {shown_path(file)}"
    with StableFile(file, where) as opened:
        tensors = read_header(opened, where)
        keys = sorted_keys(tensors, where)
        shapes = _shapes(keys, _Header(tensors, where), adapter, config, dtype)
        if max_bytes is not None and (largest := max(opened.size, shapes.nbytes)) > max_bytes:
            raise AdapterMismatchError(f"{where}: its tensors take {largest} bytes; at most {max_bytes} are allowed")
        if check is not None:
            check(shapes)
        arrays = {
            key: _read(opened, f"{where}: tensor {shown(key)}", info, None if is_base else dtype, allow_nonfinite)
            for key, info, is_base in _in_file_order(keys, tensors)
        }
    pairs: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for module, found in shapes.modules.items():
        part = "lora_embedding_" if found.kind == "embedding" else "lora_"
        pairs[module] = arrays[keys[module][part + "A"]], arrays[keys[module][part + "B"]]
    return Checkpoint(shapes, pairs, {module: arrays[keys[module]["base"]] for module in shapes.base_weights})


def sorted_keys(keys: Iterable[str], where: str) -> dict[str, dict[str, str]]:
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
                f"{where}: tensor {shown(key)} is {f'of {feature}' if feature else 'of a kind'} that jlora does not "
                "serve; expected lora_A, lora_B, lora_embedding_A or lora_embedding_B of a module"
            )
        if len(module) > _MAX_NAME or not module.isprintable() or not all(module.split(".")):
            raise AdapterFormatError(f"{where}: tensor {shown(key)}: {shown(module)} is not a dotted module name")
        parts = found.setdefault(module, {})
        if part in parts:
            raise AdapterFormatError(f"{where}: tensors {shown(parts[part])} and {shown(key)} mean the same matrix")
        parts[part] = key
    return found


@dataclass(frozen=True)
class _Header:
    """Shapes and dtypes of the file's tensors, checked as they are asked for."""

    tensors: Mapping[str, TensorInfo]
    where: str

    def at(self, key: str) -> str:
        return f"{self.where}: tensor {shown(key)}"

    def matrix(self, key: str, expected: str) -> tuple[tuple[int, int], np.dtype]:
        """Shape and dtype of a matrix of a served dtype."""
        dtype, shape = self.tensors[key].dtype, self.tensors[key].shape
        if dtype not in _DTYPES:
            raise AdapterFormatError(f"{self.at(key)} has dtype {dtype}; expected one of {', '.join(_DTYPES)}")
        if len(shape) > 2:
            raise AdapterMismatchError(
                f"{self.at(key)} has shape {shown_value(shape)}; LoRA on convolutions is not served"
            )
        if len(shape) != 2 or 0 in shape:
            raise AdapterFormatError(f"{self.at(key)} has shape {shape}; expected {expected}")
        return (shape[0], shape[1]), _DTYPES[dtype]


def _shapes(
    keys: Mapping[str, Mapping[str, str]], header: _Header, adapter: str, config: PeftConfig, dtype: np.dtype | None
) -> AdapterShapes:
    """The header's tensors, checked against each other and the configuration."""
    adapted = [module for module, parts in keys.items() if set(parts) != {"base"}]
    if not adapted:
        raise AdapterFormatError(
            f"{header.where}: holds no LoRA tensor (expected names such as 'q_proj.lora_A.weight')"
        )
    halves = {module: _halves(module, keys[module], header, config) for module in adapted}
    ranks, alphas = config.ranks(adapted), config.alphas(adapted)
    modules: dict[str, ModuleShapes] = {}
    for module, (kind, key_a, key_b) in halves.items():
        rank, ours = shown_value(ranks[module]), list[tuple[tuple[int, int], np.dtype]]()
        for key, axis, expected in ((key_a, 0, f"({rank}, in)"), (key_b, 1, f"(out, {rank})")):
            shape, stored = header.matrix(key, expected)
            if shape[axis] != ranks[module]:
                raise AdapterFormatError(
                    f"{header.at(key)} has rank {shape[axis]}; expected {rank} (r and rank_pattern)"
                )
            ours.append((shape, stored if dtype is None else dtype))
        (a_shape, a_dtype), (b_shape, b_dtype) = ours
        scaling = scaling_of(alphas[module], ranks[module], config.use_rslora)
        modules[module] = ModuleShapes(
            kind=kind, a_shape=a_shape, b_shape=b_shape, a_dtype=a_dtype, b_dtype=b_dtype, scaling=scaling
        )
    base = {m: _base(parts["base"], modules.get(m), header) for m, parts in keys.items() if "base" in parts}
    matrices = [(m.a_shape, m.a_dtype) for m in modules.values()] + [(m.b_shape, m.b_dtype) for m in modules.values()]
    matrices += [(weight.shape, weight.dtype) for weight in base.values()]
    return AdapterShapes(
        name=adapter,
        modules=modules,
        base_weights=base,
        base_model_name=config.base_model_name,
        nbytes=sum(rows * columns * dtype.itemsize for (rows, columns), dtype in matrices),
    )


def _halves(module: str, parts: Mapping[str, str], header: _Header, config: PeftConfig) -> tuple[Kind, str, str]:
    """Kind, and the names of A and B, of a module that the configuration targets."""
    kind: Kind = "embedding" if any("embedding" in part for part in parts) else "linear"
    key_a, key_b = (parts.get(f"lora_embedding_{half}" if kind == "embedding" else f"lora_{half}") for half in "AB")
    if key_a is None or key_b is None or len(parts.keys() - {"base"}) > 2:
        raise AdapterFormatError(
            f"{header.where}: module {shown(module)} has tensor {', '.join(map(shown, parts.values()))}; "
            "expected one A and one B of the same kind"
        )
    if "base_layer" in module.split(".") or not config.targets(module, kind):
        raise AdapterMismatchError(
            f"{header.at(key_a)}: the adapter's {CONFIG_FILE} does not target module {shown(module)} "
            "(target_modules, exclude_modules, layers_to_transform), so PEFT would leave the tensor out"
        )
    return kind, key_a, key_b


def _base(key: str, module: ModuleShapes | None, header: _Header) -> BaseShape:
    shape, dtype = header.matrix(key, "a matrix")
    if module is not None:
        expected = module.b_shape[0], module.a_shape[1]
        expected = expected[::-1] if module.kind == "embedding" else expected
        if shape != expected:
            raise AdapterFormatError(f"{header.at(key)} has shape {shape}; expected {expected}, as A and B imply")
    return BaseShape(shape=shape, dtype=dtype)


def _in_file_order(
    keys: Mapping[str, Mapping[str, str]], tensors: Mapping[str, TensorInfo]
) -> Iterator[tuple[str, TensorInfo, bool]]:
    base = {parts["base"] for parts in keys.values() if "base" in parts}
    return ((key, info, key in base) for key, info in tensors.items())


def _read(file: StableFile, at: str, info: TensorInfo, dtype: np.dtype | None, allow_nonfinite: bool) -> np.ndarray:
    """One tensor, converted to `dtype` if given; read-only."""
    array = np.empty(info.shape, _DTYPES[info.dtype])
    file.read_into(info.start, array.reshape(-1).view(np.uint8).data)
    if not (allow_nonfinite or all_finite(array)):
        raise AdapterFormatError(
            f"{at} holds NaN or infinity; expected finite numbers (allow_nonfinite=True lets them in)"
        )
    if dtype is not None and dtype != array.dtype:
        read = array
        with np.errstate(over="ignore", invalid="ignore"):
            array = read.astype(dtype)
        if not (np.can_cast(read.dtype, dtype) or all_finite(array)) and (np.isinf(array) & np.isfinite(read)).any():
            raise AdapterFormatError(f"{at} ({read.dtype}) holds values too large for {dtype}")
    array.flags.writeable = False
    return array


def all_finite(array: np.ndarray) -> bool:
    """Whether a C-contiguous float array holds neither NaN nor infinity."""
    flat = array.reshape(-1)
    if (mask := _EXPONENT.get(array.dtype)) is not None:
        bits = flat.view(np.uint16)
        return not any(((bits[at : at + _CHUNK] & np.uint16(mask)) == mask).any() for at in range(0, bits.size, _CHUNK))
    return all(bool(np.isfinite(flat[at : at + _CHUNK]).all()) for at in range(0, flat.size, _CHUNK))
