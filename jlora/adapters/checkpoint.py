"""Read `adapter_model.safetensors` into NumPy arrays, as LoRA pairs and base weights."""

import itertools
import math
import re
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from jlora.adapters.config_file import CONFIG_FILE
from jlora.adapters.escaping import shown, shown_path, shown_value
from jlora.adapters.expert_formats import Stacked, StackedPair, is_stacked, stacked_pairs
from jlora.adapters.extras import EXTRAS
from jlora.adapters.files import StableFile
from jlora.adapters.lora import ExpertsLoRA, LoRA, ModuleLoRA, SavedHead, check_variants
from jlora.adapters.peft_config import Kind, PeftConfig, scaling_of
from jlora.adapters.problems import Problems
from jlora.adapters.shapes import AdapterShapes, BaseShape, ExpertsShapes, HeadShapes, ModuleShapes
from jlora.adapters.tensor_data import DTYPES, Share, read_tensors
from jlora.adapters.tensor_data import all_finite as all_finite
from jlora.adapters.tensor_file import TensorInfo, read_header
from jlora.adapters.wrapped_names import WRAPPER
from jlora.errors import AdapterFormatError, AdapterMismatchError

_PREFIX = "base_model.model."
_MAX_NAME = 512
# A raw state dict keeps PEFT's adapter name, "default", and the names of wrappers; save_pretrained removes the first.
_RAW = rf"(?:\.default|\.(?:{WRAPPER}))*"
_LORA = re.compile(
    rf"(?P<linear>.+)\.lora_(?P<half>[AB]){_RAW}\.weight|(?P<embedding>.+)\.lora_(?P<table>embedding_[AB]){_RAW}"
)
_EXTRA_KEYS = tuple(extra.key for extra in EXTRAS)
# PEFT's save_pretrained removes ".weight".
_EXTRA = re.compile(rf"(?P<module>.+)\.(?P<key>{'|'.join(map(re.escape, _EXTRA_KEYS))}){_RAW}(\.weight)?")
# PEFT stores the base weight beside LoRA on an embedding or lm_head, and also resized weights of these two names.
_BASE = re.compile(r"(?P<module>.+)\.base_layer\.weight|(?P<resized>(.+\.)?(embed_tokens|lm_head))\.weight")
# A layer of a fully trained module. PEFT's save_pretrained removes ".modules_to_save".
_SAVED = re.compile(r"(?P<module>.+)\.(?P<part>weight|bias)")
_TO_SAVE = re.compile(rf"\.modules_to_save{_RAW}(?=\.)")

# Part of a tensor's name -> the unserved PEFT feature that writes it.
_FEATURES = {
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


# Name in `Adapter.modules` -> ranges of the experts to read. A module of one unwanted expert maps to ().
OwnExperts: TypeAlias = Mapping[str, tuple[range, ...]]


@dataclass(frozen=True)
class Checkpoint:
    """The weights of one adapter with the header read and checked, and the tensors not yet read.

    Attributes:
      shapes: Shapes and dtypes from the header, by dotted module name without PEFT's prefix.
      file: The open weights file.
    """

    shapes: AdapterShapes
    file: StableFile
    _layout: "_Modules"
    _tensors: Mapping[str, TensorInfo]
    _base: Mapping[str, str]  # key -> module
    _where: str
    _dtype: np.dtype | None

    def read(
        self, own: OwnExperts, *, allow_nonfinite: bool
    ) -> tuple[dict[str, LoRA], dict[str, np.ndarray], dict[str, SavedHead]]:
        """Read the tensors.

        Args:
          own: Module name -> the experts to read. Modules that are not listed are read whole. Experts that are not
            read are zeros.
          allow_nonfinite: Accept NaN and infinity.

        Returns:
          Module name -> LoRA, module name -> base weight stored beside the LoRA, and module name -> saved head.

        Raises:
          AdapterFormatError: The file holds NaN or infinity, holds a value too large for the dtype, or has changed.
        """
        arrays = read_tensors(
            self.file,
            {key: info for key, info in self._tensors.items() if info.end > info.start},
            self._base,
            where=self._where,
            dtype=self._dtype,
            allow_nonfinite=allow_nonfinite,
            shares=_shares(self._layout, own),
        )
        modules: dict[str, LoRA] = {}
        for name, (_, key_a, key_b) in self._layout.halves.items():
            a, b = arrays[key_a], arrays[key_b]
            alpha, shapes = self._layout.alphas[name], self.shapes.modules[name]
            if isinstance(shapes, ModuleShapes):
                extras: Any = {extra: arrays[keys[name]] for extra, keys in self._layout.extras.items()}
                modules[name] = ModuleLoRA(a=a, b=b, kind=shapes.kind, alpha=alpha, scaling=shapes.scaling, **extras)
                continue
            a, b = self._layout.stacked[name].arrays(a, b)
            modules[name] = ExpertsLoRA(
                a=a,
                b=b,
                alpha=alpha,
                scaling=shapes.scaling,
                exchanged=shapes.exchanged,
                own_order=shapes.own_order,
                peft_version=shapes.peft_version,
            )
        heads = {
            name: SavedHead(arrays[weight], None if bias is None else arrays[bias])
            for name, (weight, bias) in self._layout.heads.items()
        }
        return modules, {module: arrays[key] for key, module in self._base.items()}, heads


@contextmanager
def open_checkpoint(
    file: Path,
    adapter: str,
    config: PeftConfig,
    *,
    dtype: np.dtype | None = None,
    max_bytes: int | None = None,
    problems: Problems | None = None,
) -> Generator[Checkpoint, None, None]:
    """Open an adapter's weights and check the header. No tensor is read.

    Args:
      file: The safetensors file.
      adapter: Name of the adapter, for messages.
      config: The adapter's configuration. Every tensor must agree with its ranks and targets.
      dtype: Convert all but base weights to this dtype. None keeps the file's dtype.
      max_bytes: Largest allowed size of the file, and of the tensors after conversion.
      problems: Takes the errors of tensors, which are then left out of the checkpoint. None raises them.

    Raises:
      AdapterFormatError: The file is not a complete safetensors file or changes while open, a tensor has the wrong
        dtype or shape, or an A has no B.
      AdapterMismatchError: A tensor belongs to an unserved PEFT feature or to a module that `config` does not target,
        or the weights are larger than `max_bytes`.
    """
    where = f"adapter {shown(adapter)}: {shown_path(file)}"
    found = Problems() if problems is None else problems
    with StableFile(file, where) as opened:
        tensors = read_header(opened, where)
        keys = sorted_keys(tensors, where, config.modules_to_save, found)
        header = _Header(tensors, where, found)
        layout = _layout(keys, header, config)
        shapes = _shapes(layout, keys, header, adapter, config, dtype)
        if problems is None:
            found.raise_first()
        if max_bytes is not None and (largest := max(opened.size, shapes.nbytes)) > max_bytes:
            raise AdapterMismatchError(f"{where}: its tensors take {largest} bytes; at most {max_bytes} are allowed")
        base = {key: module for module, parts in keys.items() if (key := parts.get("base")) is not None}
        yield Checkpoint(shapes, opened, layout, tensors, base, where, dtype)


def _shares(layout: "_Modules", own: OwnExperts) -> dict[str, Share]:
    """Return tensor key -> the share of the tensor to read."""
    found: dict[str, Share] = {}
    for name, experts in own.items():
        _, key_a, key_b = layout.halves[name]
        if (read := layout.stacked.get(name)) is None:
            extras = (keys[name] for keys in layout.extras.values())
            found |= dict.fromkeys((key_a, key_b, *extras), Share(1, 1, experts))
            continue
        _, out, rank = read.b_shape
        turns = 1 if not read.flat else out if read.grouped else out * rank
        for key, (count, *_), leading in ((key_a, read.a_shape, 1), (key_b, read.b_shape, turns)):
            if count > 1:  # a factor shared by all experts is read whole
                found[key] = Share(leading, count, experts)
    return found


def sorted_keys(
    keys: Iterable[str], where: str, saved: Sequence[str] = (), problems: Problems | None = None
) -> dict[str, dict[str, str]]:
    """Return module name -> part -> tensor key. With `problems`, keys with a problem are left out.

    Parts are "lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", `Extra.key`, "base", and, in the modules named
    by `saved` (PEFT's `modules_to_save`), "head_weight" and "head_bias".

    Raises:
      AdapterMismatchError: A tensor of a kind that is not served.
      AdapterFormatError: A malformed module name, or two tensors for one part.
    """
    found: dict[str, dict[str, str]] = {}
    unserved: dict[str, list[str]] = {}  # kind -> its keys
    collected = Problems() if problems is None else problems
    for key in sorted(keys):
        name = key.removeprefix(_PREFIX)
        if lora := _LORA.fullmatch(name):
            module, part = lora["linear"] or lora["embedding"], "lora_" + (lora["half"] or lora["table"])
        elif extra := _EXTRA.fullmatch(name):
            module, part = extra["module"], extra["key"]
        elif (head := _saved_part(name, saved)) is not None:
            module, part = head
        elif base := _BASE.fullmatch(name):
            module, part = base["module"] or base["resized"], "base"
        else:
            feature = next((f for mark, f in _FEATURES.items() if mark in name.split(".")), None)
            unserved.setdefault(f"of {feature}" if feature else "of a kind", []).append(key)
            continue
        collected.attempt(None, _add_key, found, module, part, key, where)
    for kind, (first, *others) in unserved.items():
        error = AdapterMismatchError(
            f"{where}: tensor {shown(first)}{_and_more(others)} is {kind} that jlora does not serve; expected lora_A, "
            "lora_B, lora_embedding_A or lora_embedding_B of a module"
        )
        collected.found.append(error)
    if problems is None:
        collected.raise_first()
    return found


def _add_key(found: dict[str, dict[str, str]], module: str, part: str, key: str, where: str) -> None:
    if len(module) > _MAX_NAME or not module.isprintable() or ".." in f".{module}.":
        raise AdapterFormatError(f"{where}: tensor {shown(key)}: {shown(module)} is not a dotted module name")
    parts = found.setdefault(module, {})
    if part in parts:
        raise AdapterFormatError(f"{where}: tensors {shown(parts[part])} and {shown(key)} mean the same array")
    parts[part] = key


def _and_more(others: Sequence[str]) -> str:
    return f" (and {len(others)} more)" if others else ""


def _saved_part(name: str, saved: Iterable[str]) -> tuple[str, str] | None:
    """Return (module, part) of a tensor of a fully trained module, else None.

    PEFT trains each module whose name ends in one of `saved` (`_set_trainable`), and the layers below it.
    """
    found = _SAVED.fullmatch(_TO_SAVE.sub("", name, count=1))
    ends = tuple(saved)
    if not ends or found is None or "original_module" in name.split("."):
        return None
    module = found["module"]
    above = itertools.accumulate(module.split("."), "{}.{}".format)  # the module and those around it
    return (module, f"head_{found['part']}") if any(each.endswith(ends) for each in above) else None


@dataclass(frozen=True)
class _Header:
    """Shapes and dtypes of the file's tensors, checked on access. `problems` takes the errors of single modules."""

    tensors: Mapping[str, TensorInfo]
    where: str
    problems: Problems

    def at(self, key: str) -> str:
        return f"{self.where}: tensor {shown(key)}"

    def dtype(self, key: str) -> np.dtype:
        """Return a tensor's dtype. Raise if the dtype is not served."""
        if (found := DTYPES.get(self.tensors[key].dtype)) is None:
            raise AdapterFormatError(
                f"{self.at(key)} has dtype {self.tensors[key].dtype}; expected one of {', '.join(DTYPES)}"
            )
        return found

    def shape(self, key: str) -> tuple[int, ...]:
        return self.tensors[key].shape

    def matrix(self, key: str, rank: int | None, axis: int) -> tuple[int, int]:
        """Return the shape of a matrix. If `rank` is given, the size of `axis` (0 for A, 1 for B) must equal it."""
        shape = self.tensors[key].shape
        if len(shape) == 2 and 0 not in shape and rank in (None, shape[axis]):
            return shape[0], shape[1]
        if len(shape) > 2:
            raise AdapterMismatchError(
                f"{self.at(key)} has shape {shown_value(shape)}; LoRA on convolutions is not served"
            )
        if len(shape) != 2 or 0 in shape:
            expected = "a matrix" if rank is None else (f"({rank}, in)", f"(out, {rank})")[axis]
            raise AdapterFormatError(f"{self.at(key)} has shape {shape}; expected {expected}")
        raise AdapterFormatError(f"{self.at(key)} has rank {shape[axis]}; expected {rank} (r and rank_pattern)")

    def check_shape(self, key: str, expected: tuple[int, ...]) -> None:
        """Raise if the tensor has another shape."""
        if self.tensors[key].shape != expected:
            raise AdapterFormatError(
                f"{self.at(key)} has shape {shown_value(self.tensors[key].shape)}; expected {expected}, as its matrix "
                "implies"
            )

    def nbytes(self, key: str, dtype: np.dtype | None) -> int:
        """Return the bytes of the tensor in `dtype`; None for its own dtype."""
        return math.prod(self.shape(key)) * (self.dtype(key) if dtype is None else dtype).itemsize


@dataclass(frozen=True)
class _Modules:
    """The adapter's modules by name in `Adapter.modules`, from tensor names and the configuration.

    Attributes:
      halves: Module name -> kind, key of A, key of B.
      extras: `Extra.name` -> module name -> key, for the extras that the adapter brings, for all linear modules.
      stacked: Module name -> how to read the tensors, for modules that hold all experts.
      ranks, alphas: Module name -> rank, and module name -> alpha.
      heads: Module name -> keys of the weight and of the bias (None without one) of a saved head.
    """

    halves: Mapping[str, tuple[Kind, str, str]]
    extras: Mapping[str, Mapping[str, str]]
    stacked: Mapping[str, Stacked]
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    heads: Mapping[str, tuple[str, str | None]]


def _layout(keys: Mapping[str, Mapping[str, str]], header: _Header, config: PeftConfig) -> _Modules:
    attempt = header.problems.attempt
    heads = attempt(dict[str, tuple[str, str | None]](), _heads, keys, header, config)
    adapted = [m for m, parts in keys.items() if m not in heads and (len(parts) > 1 or "base" not in parts)]
    if not adapted and not heads and not header.problems.found:
        raise AdapterFormatError(
            f"{header.where}: holds no LoRA tensor (expected names such as 'q_proj.lora_A.weight')"
        )
    halves = {m: found for m in adapted if (found := attempt(None, _halves, m, keys[m], header)) is not None}
    of_experts = {
        module: StackedPair(header.shape(key_a), header.shape(key_b))
        for module, (kind, key_a, key_b) in halves.items()
        if kind == "linear" and is_stacked(module)
    }
    linear = [module for module in halves if module not in of_experts]
    if beside := [m for m in linear if not attempt(True, _targets, m, halves[m][0], config)]:
        error = AdapterMismatchError(
            f"{header.at(halves[beside[0]][1])}: the adapter's {CONFIG_FILE} does not target module "
            f"{shown(beside[0])}{_and_more(beside[1:])} (target_modules, exclude_modules, layers_to_transform), so "
            "PEFT would leave the tensor out"
        )
        header.problems.found.append(error)
    stacked = dict[str, Stacked]()
    if of_experts:
        found = attempt(dict[str, Stacked](), stacked_pairs, of_experts, linear, config, header.where)
        # Leave out placeholders of projections that the model lacks.
        names = {m: found[m].name if m in found else m for m in halves if m in found or m not in of_experts}
        halves = {name: halves[module] for module, name in names.items()}
        stacked = {read.name: read for read in found.values()}
    extras = attempt(dict[str, dict[str, str]](), _extras, keys, linear, header, config)
    return _Modules(halves, extras, stacked, config.ranks(halves), config.alphas(halves), heads)


def _targets(module: str, kind: Kind, config: PeftConfig) -> bool:
    return "base_layer" not in module.split(".") and config.targets(module, kind)


def _heads(
    keys: Mapping[str, Mapping[str, str]], header: _Header, config: PeftConfig
) -> dict[str, tuple[str, str | None]]:
    """Return module name -> keys of the weight and the bias of each saved head."""
    found: dict[str, tuple[str, str | None]] = {}
    for module, parts in keys.items():
        weight, bias = parts.get("head_weight"), parts.get("head_bias")
        if weight is None and bias is None:
            continue
        if weight is None:
            raise AdapterFormatError(
                f"{header.where}: {shown(module)} is of modules_to_save and has a bias without a weight"
            )
        if others := parts.keys() - {"head_weight", "head_bias"}:
            raise AdapterMismatchError(
                f"{header.where}: {shown(module)} is fully trained (modules_to_save) and has "
                f"{', '.join(sorted(others))} too; expected one of them"
            )
        found[module] = weight, bias
    if config.modules_to_save and not found:
        raise AdapterFormatError(
            f"{header.where}: holds no tensor of modules_to_save in {CONFIG_FILE}, "
            f"{shown_value(list(config.modules_to_save), 500)}"
        )
    return found


def _extras(
    keys: Mapping[str, Mapping[str, str]], modules: Iterable[str], header: _Header, config: PeftConfig
) -> dict[str, dict[str, str]]:
    """Return `_Modules.extras`. Raise if one of `modules` lacks one."""
    brought: dict[str, dict[str, str]] = {}
    for extra in EXTRAS:
        found = {module: parts[extra.key] for module, parts in keys.items() if extra.key in parts}
        if extra not in config.extras and found:
            raise AdapterFormatError(
                f"{header.at(next(iter(found.values())))} is of {extra.title}, and '{extra.field}' is not set in "
                f"{CONFIG_FILE}; expected both or neither"
            )
        without = [shown(module) for module in modules if module not in found] if extra in config.extras else []
        if without:
            raise AdapterFormatError(
                f"{header.where}: module {without[0]}{_and_more(without[1:])} has no tensor {extra.key}; "
                f"expected one, since '{extra.field}' is set in {CONFIG_FILE}"
            )
        if found:
            brought[extra.name] = found
    return brought


def _shapes(
    layout: _Modules,
    keys: Mapping[str, Mapping[str, str]],
    header: _Header,
    adapter: str,
    config: PeftConfig,
    dtype: np.dtype | None,
) -> AdapterShapes:
    """Return the adapter's shapes, checked against the configuration and between A, B and base weight."""
    attempt = header.problems.attempt
    of_modules = {name: attempt(None, _module_shapes, name, layout, header, config, dtype) for name in layout.halves}
    modules = {name: found[0] for name, found in of_modules.items() if found is not None}
    nbytes = sum(found[1] for found in of_modules.values() if found is not None)
    stored = {module: parts["base"] for module, parts in keys.items() if "base" in parts}
    bases = {module: attempt(None, _base, key, modules.get(module), header) for module, key in stored.items()}
    base = {module: found for module, found in bases.items() if found is not None}
    nbytes += sum(math.prod(weight.shape) * weight.dtype.itemsize for weight in base.values())
    of_heads = {name: attempt(None, _head_shapes, *keys_, header, dtype) for name, keys_ in layout.heads.items()}
    heads = {name: found[0] for name, found in of_heads.items() if found is not None}
    nbytes += sum(found[1] for found in of_heads.values() if found is not None)
    attempt(
        None,
        check_variants,
        header.where,
        modules,
        extras=config.extras,
        invocation_tokens=config.invocation_tokens,
    )
    return AdapterShapes(
        name=adapter,
        modules=modules,
        base_weights=base,
        base_model_name=config.base_model_name,
        nbytes=nbytes,
        extras=config.extras,
        invocation_tokens=config.invocation_tokens,
        heads=heads,
        task_type=config.task_type,
    )


def _module_shapes(
    name: str, layout: _Modules, header: _Header, config: PeftConfig, dtype: np.dtype | None
) -> tuple[ModuleShapes | ExpertsShapes, int]:
    """Return the shapes of one module, and the bytes of its arrays."""
    kind, key_a, key_b = layout.halves[name]
    rank, nbytes = layout.ranks[name], 0
    scaling = scaling_of(layout.alphas[name], rank, config.use_rslora)
    a_dtype, b_dtype = (header.dtype(key) if dtype is None else dtype for key in (key_a, key_b))
    if (read := layout.stacked.get(name)) is not None:
        a, b = read.a_shape, read.b_shape
        shapes = ExpertsShapes(
            a_shape=a,
            b_shape=b,
            a_dtype=a_dtype,
            b_dtype=b_dtype,
            scaling=scaling,
            exchanged=read.exchanged,
            own_order=read.flat,
            peft_version=config.peft_version if read.flat else None,
        )
    else:
        a, b = header.matrix(key_a, rank, 0), header.matrix(key_b, rank, 1)
        for extra in config.extras:
            if (key := layout.extras.get(extra.name, {}).get(name)) is not None:
                header.check_shape(key, extra.sizes(a, b))
                nbytes += header.nbytes(key, dtype)
        shapes = ModuleShapes(kind=kind, a_shape=a, b_shape=b, a_dtype=a_dtype, b_dtype=b_dtype, scaling=scaling)
    return shapes, nbytes + math.prod(a) * a_dtype.itemsize + math.prod(b) * b_dtype.itemsize


def _head_shapes(weight: str, bias: str | None, header: _Header, dtype: np.dtype | None) -> tuple[HeadShapes, int]:
    """Return the shapes of one saved head, and the bytes of its arrays."""
    if len(header.shape(weight)) not in (0, 2):
        raise AdapterMismatchError(
            f"{header.at(weight)} has shape {header.shape(weight)}: it is of a fully trained module (modules_to_save) "
            "that is no linear layer, such as a norm or a convolution; jlora serves fully trained linear layers only. "
            "Train the adapter without it"
        )
    outputs, inputs = header.matrix(weight, None, 0)
    own = header.dtype(weight) if dtype is None else dtype
    nbytes = header.nbytes(weight, dtype)
    if bias is not None:
        header.check_shape(bias, (outputs,))
        nbytes += header.nbytes(bias, dtype)
    return HeadShapes(outputs=outputs, in_features=inputs, biased=bias is not None, dtype=own), nbytes


def _halves(module: str, parts: Mapping[str, str], header: _Header) -> tuple[Kind, str, str]:
    """Return the kind of a module and the keys of its A and B."""
    key_a, key_b, kind = parts.get("lora_A"), parts.get("lora_B"), "linear"
    if key_a is None and key_b is None:
        key_a, key_b, kind = parts.get("lora_embedding_A"), parts.get("lora_embedding_B"), "embedding"
    if key_a is None or key_b is None or len(parts.keys() - {"base", *_EXTRA_KEYS}) > 2:
        raise AdapterFormatError(
            f"{header.where}: module {shown(module)} has tensor {', '.join(map(shown, parts.values()))}; "
            "expected one A and one B of the same kind"
        )
    return kind, key_a, key_b


def _base(key: str, module: ModuleShapes | ExpertsShapes | None, header: _Header) -> BaseShape:
    shape, dtype = header.matrix(key, None, 0), header.dtype(key)
    if isinstance(module, ModuleShapes):
        expected = module.b_shape[0], module.a_shape[1]
        expected = expected[::-1] if module.kind == "embedding" else expected
        if shape != expected:
            raise AdapterFormatError(f"{header.at(key)} has shape {shape}; expected {expected}, as A and B imply")
    return BaseShape(shape=shape, dtype=dtype)
