"""Read `adapter_model.safetensors` into NumPy arrays, as LoRA pairs and base weights."""

import functools
import itertools
import re
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from jlora.adapters.config_file import CONFIG_FILE
from jlora.adapters.expert_formats import Stacked, is_stacked, stacked_pairs
from jlora.adapters.files import MemoryFile, ReadFile, open_file
from jlora.adapters.lora import ExpertsLoRA, HostArray, LoRA, ModuleLoRA, SavedHead, UnreadArray, check_variants
from jlora.adapters.peft_config import Kind, PeftConfig, scaling_of
from jlora.adapters.tensor_data import DTYPES, Share, read_tensors
from jlora.adapters.tensor_file import TensorInfo, read_header
from jlora.adapters.variants import VARIANTS, Variant, described
from jlora.adapters.wrapped_names import WRAPPER
from jlora.errors import AdapterFormatError, AdapterMismatchError, Problems, shown, shown_path, shown_value

_PREFIX = "base_model.model."
_MAX_NAME = 512
# A raw state dict keeps PEFT's adapter name, "default", and the names of wrappers; save_pretrained removes the first.
_RAW = rf"(?:\.default|\.(?:{WRAPPER}))*"
_LORA = re.compile(
    rf"(?P<linear>.+)\.lora_(?P<half>[AB]){_RAW}\.weight|(?P<embedding>.+)\.lora_(?P<table>embedding_[AB]){_RAW}"
)
# PEFT stores the base weight beside LoRA on an embedding or lm_head, and also resized weights of these two names.
_BASE = re.compile(r"(?P<module>.+)\.base_layer\.weight|(?P<resized>(.+\.)?(embed_tokens|lm_head))\.weight")
# A layer of a fully trained module. PEFT's save_pretrained removes ".modules_to_save".
_SAVED = re.compile(r"(?P<module>.+)\.(?P<part>weight|bias)")
_TO_SAVE = re.compile(rf"\.modules_to_save{_RAW}(?=\.)")

# Name in `Adapter.modules` -> ranges of the experts to read. A module of one unwanted expert maps to ().
OwnExperts: TypeAlias = Mapping[str, tuple[range, ...]]


@dataclass(frozen=True)
class Checkpoint:
    """The weights of one adapter with the header read and checked, and the tensors not yet read.

    Attributes:
      modules, base_weights, heads: As in `Adapter`, with each array an `UnreadArray`.
      file: The open weights file.
    """

    modules: Mapping[str, LoRA]
    base_weights: Mapping[str, HostArray]
    heads: Mapping[str, SavedHead]
    file: ReadFile
    _stacked: Mapping[str, Stacked]
    _tensors: Mapping[str, TensorInfo]
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
          `modules`, `base_weights` and `heads` with their arrays.

        Raises:
          AdapterFormatError: The file holds NaN or infinity, holds a value too large for the dtype, or has changed.
        """
        arrays = read_tensors(
            self.file,
            {key: info for key, info in self._tensors.items() if info.end > info.start},
            {_key(weight) for weight in self.base_weights.values()},
            where=self._where,
            dtype=self._dtype,
            allow_nonfinite=allow_nonfinite,
            shares=self._shares(own),
        )
        modules: dict[str, LoRA] = {}
        for name, module in self.modules.items():
            a, b = arrays[_key(module.a)], arrays[_key(module.b)]
            if isinstance(module, ExpertsLoRA):
                a, b = self._stacked[name].arrays(a, b)
                modules[name] = replace(module, a=a, b=b)
            else:
                vectors = {name: arrays[_key(array)] for name, array in module.vectors.items()}
                kind, alpha, scaling = module.kind, module.alpha, module.scaling  # `replace` takes twice as long
                modules[name] = ModuleLoRA(a=a, b=b, kind=kind, alpha=alpha, scaling=scaling, vectors=vectors)
        heads = {
            name: SavedHead(arrays[_key(head.weight)], None if head.bias is None else arrays[_key(head.bias)])
            for name, head in self.heads.items()
        }
        return modules, {name: arrays[_key(weight)] for name, weight in self.base_weights.items()}, heads

    def _shares(self, own: OwnExperts) -> dict[str, Share]:
        """Return tensor key -> the share of the tensor to read."""
        found: dict[str, Share] = {}
        for name, experts in own.items():
            module = self.modules[name]
            if isinstance(module, ModuleLoRA):
                arrays = (module.a, module.b, *module.vectors.values())
                found |= {_key(array): Share(1, 1, experts) for array in arrays}
                continue
            _, out, rank = module.b.shape
            turns = 1 if not module.flat else out if self._stacked[name].grouped else out * rank
            for array, leading in ((module.a, 1), (module.b, turns)):
                if array.shape[0] > 1:  # a factor shared by all experts is read whole
                    found[_key(array)] = Share(leading, array.shape[0], experts)
        return found


def _key(array: Any) -> str:
    """Return the name of an `UnreadArray`'s tensor."""
    return array.key


@contextmanager
def open_checkpoint(
    file: Path | MemoryFile,
    adapter: str,
    config: PeftConfig,
    *,
    dtype: np.dtype | None = None,
    problems: Problems | None = None,
) -> Generator[Checkpoint, None, None]:
    """Open an adapter's weights and check the header. No tensor is read.

    Args:
      file: Path of the safetensors file, or the file in memory.
      adapter: Name of the adapter, for messages.
      config: The adapter's configuration. Every tensor must agree with its ranks and targets.
      dtype: Convert all but base weights to this dtype. None keeps the file's dtype.
      problems: Takes the errors of tensors, which are then left out of the checkpoint. None raises them.

    Raises:
      AdapterFormatError: The file is not a complete safetensors file or changes while open, a tensor has the wrong
        dtype or shape, or an A has no B.
      AdapterMismatchError: A tensor belongs to an unserved PEFT feature or to a module that `config` does not target.
    """
    where = f"adapter {shown(adapter)}: {shown_path(str(file))}"
    found = Problems() if problems is None else problems
    with open_file(file, where) as opened:
        tensors = read_header(opened, where)
        keys = sorted_keys(tensors, where, config.modules_to_save, found)
        header = _Header(tensors, where, dtype, found)
        head_keys = found.attempt(dict[str, tuple[str, str | None]](), _heads, keys, header, config)
        modules, stacked = _modules(keys, head_keys, header, config)
        base = {
            module: array
            for module, parts in keys.items()
            if "base" in parts
            and (array := found.attempt(None, _base, parts["base"], modules.get(module), header)) is not None
        }
        heads = {
            module: head
            for module, (weight, bias) in head_keys.items()
            if (head := found.attempt(None, _head, weight, bias, header)) is not None
        }
        try:
            check_variants(where, modules, heads, config)
        except AdapterMismatchError as error:  # no `Adapter` has these modules
            found.found.append(error)
            found.raise_first()
        if problems is None:
            found.raise_first()
        yield Checkpoint(modules, base, heads, opened, stacked, tensors, where, dtype)


def sorted_keys(
    keys: Iterable[str], where: str, saved: Sequence[str] = (), problems: Problems | None = None
) -> dict[str, dict[str, str]]:
    """Return module name -> part -> tensor key. With `problems`, keys with a problem are left out.

    Parts are "lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", `Variant.tensor`, "base", and, in the modules
    named by `saved` (PEFT's `modules_to_save`), "head_weight" and "head_bias".

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
        elif (vector := _vector_of(name)) is not None:
            module, part = vector
        elif (head := _saved_part(name, saved)) is not None:
            module, part = head
        elif base := _BASE.fullmatch(name):
            module, part = base["module"] or base["resized"], "base"
        else:
            kind = "of a kind that jlora does not serve"
            if _SAVED.fullmatch(name) and "lora_" not in name:
                kind = f"a weight or bias of a module itself, which modules_to_save in {CONFIG_FILE} does not name"
            unserved.setdefault(kind, []).append(key)
            continue
        collected.attempt(None, _add_key, found, module, part, key, where)
    for kind, (first, *others) in unserved.items():
        error = AdapterMismatchError(
            f"{where}: tensor {shown(first)}{_and_more(others)} is {kind}; expected lora_A, lora_B, lora_embedding_A "
            "or lora_embedding_B of a module"
        )
        collected.found.append(error)
    if problems is None:
        collected.raise_first()
    return found


def _vector_of(name: str) -> tuple[str, str] | None:
    """Return (module, `Variant.tensor`) of the vector of a variant, else None."""
    for variant in VARIANTS.values():
        if (found := _vector_pattern(variant.tensor).fullmatch(name)) is not None:
            return found["module"], variant.tensor
    return None


@functools.cache
def _vector_pattern(tensor: str) -> re.Pattern[str]:
    holder, _, attribute = map(re.escape, tensor.partition("."))
    end = rf"\.{attribute}" if attribute else r"(\.weight)?"  # PEFT's save_pretrained removes ".weight"
    return re.compile(rf"(?P<module>.+)\.{holder}{_RAW}{end}")


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
    """The file's tensors as arrays that are not read yet, with shapes and dtypes checked on access.

    Attributes:
      tensors: Tensor key -> its place in the file.
      where: Adapter and file, for messages.
      dtype: Dtype to convert to; None keeps the file's dtype.
      problems: Takes the errors of single modules.
    """

    tensors: Mapping[str, TensorInfo]
    where: str
    dtype: np.dtype | None
    problems: Problems

    def at(self, key: str) -> str:
        return f"{self.where}: tensor {shown(key)}"

    def array(self, key: str, *, converted: bool = True) -> UnreadArray:
        """Return a tensor of any shape. Raise if its dtype is not served."""
        info = self.tensors[key]
        if (stored := DTYPES.get(info.dtype)) is None:
            raise AdapterFormatError(f"{self.at(key)} has dtype {info.dtype}; expected one of {', '.join(DTYPES)}")
        return UnreadArray(key, info.shape, self.dtype if converted and self.dtype is not None else stored)

    def matrix(self, key: str, rank: int | None = None, axis: int = 0, *, converted: bool = True) -> Any:
        """Return a matrix. If `rank` is given, the size of `axis` (0 for A, 1 for B) must equal it."""
        shape = self.tensors[key].shape
        if len(shape) == 2 and 0 not in shape and rank in (None, shape[axis]):
            return self.array(key, converted=converted)
        if len(shape) > 2:
            raise AdapterMismatchError(
                f"{self.at(key)} has shape {shown_value(shape)}; LoRA on convolutions is not served"
            )
        if len(shape) != 2 or 0 in shape:
            expected = "a matrix" if rank is None else (f"({rank}, in)", f"(out, {rank})")[axis]
            raise AdapterFormatError(f"{self.at(key)} has shape {shape}; expected {expected}")
        if rank == shape[1 - axis]:
            raise AdapterFormatError(
                f"{self.at(key)} has shape {shape}: A and B are transposed or exchanged. PEFT stores A as [r, in] and "
                f"B as [out, r], with r {rank} (r and rank_pattern)"
            )
        raise AdapterFormatError(f"{self.at(key)} has rank {shape[axis]}; expected {rank} (r and rank_pattern)")

    def shaped(self, key: str, expected: tuple[int, ...]) -> Any:
        """Return a tensor, which must have this shape."""
        if (shape := self.tensors[key].shape) != expected:
            raise AdapterFormatError(
                f"{self.at(key)} has shape {shown_value(shape)}; expected {expected}, as its matrix implies"
            )
        return self.array(key)


def _modules(
    keys: Mapping[str, Mapping[str, str]], heads: Collection[str], header: _Header, config: PeftConfig
) -> tuple[dict[str, LoRA], dict[str, Stacked]]:
    """Return the modules with LoRA by name in `Adapter.modules`, and those of them that hold all experts.

    Their arrays are checked against the configuration and between A and B, and not read.
    """
    attempt = header.problems.attempt
    adapted = [m for m, parts in keys.items() if m not in heads and (len(parts) > 1 or "base" not in parts)]
    if not adapted and not heads and not header.problems.found:
        raise AdapterFormatError(
            f"{header.where}: holds no LoRA tensor (expected names such as 'q_proj.lora_A.weight')"
        )
    halves = {m: found for m in adapted if (found := attempt(None, _halves, m, keys[m], header)) is not None}
    of_experts = {
        module: attempt(None, _pair, key_a, key_b, header)
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
    pairs = {module: pair for module, pair in of_experts.items() if pair is not None}
    stacked = attempt(dict[str, Stacked](), stacked_pairs, pairs, linear, config, header.where) if pairs else {}
    variants = attempt((), _variants, keys, linear, header, config)
    ranks, alphas = config.ranks(linear), config.alphas(linear)
    modules: dict[str, LoRA] = {}
    for name, (kind, key_a, key_b) in halves.items():
        if (pair := stacked.get(name)) is not None:
            modules[pair.name] = pair.lora
        elif name not in of_experts:
            vectors = {variant.name: keys[name][variant.tensor] for variant in variants}
            given = key_a, key_b, vectors, kind, ranks[name], alphas[name], config.use_rslora
            if (lora := attempt(None, _module, header, *given)) is not None:
                modules[name] = lora
    return modules, {pair.name: pair for pair in stacked.values()}


def _pair(key_a: str, key_b: str, header: _Header) -> tuple[UnreadArray, UnreadArray]:
    return header.array(key_a), header.array(key_b)


def _module(
    header: _Header,
    key_a: str,
    key_b: str,
    vectors: Mapping[str, str],
    kind: Kind,
    rank: int,
    alpha: float,
    use_rslora: bool,
) -> ModuleLoRA:
    a, b = header.matrix(key_a, rank, 0), header.matrix(key_b, rank, 1)
    own = {name: header.shaped(key, b.shape[:1]) for name, key in vectors.items()}
    return ModuleLoRA(a=a, b=b, kind=kind, alpha=alpha, scaling=scaling_of(alpha, rank, use_rslora), vectors=own)


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


def _variants(
    keys: Mapping[str, Mapping[str, str]], modules: Iterable[str], header: _Header, config: PeftConfig
) -> tuple[Variant, ...]:
    """Return the variants of the configuration. Raise if one of `modules` lacks a vector, or brings that of another."""
    for variant in VARIANTS.values():
        found = {module: parts[variant.tensor] for module, parts in keys.items() if variant.tensor in parts}
        chosen = variant.name in config.variants
        if found and not chosen:
            raise AdapterFormatError(
                f"{header.at(next(iter(found.values())))} is of {variant.title}, and '{variant.field}' is not set in "
                f"{CONFIG_FILE}; expected both or neither"
            )
        without = [shown(module) for module in modules if module not in found] if chosen else []
        if without:
            raise AdapterFormatError(
                f"{header.where}: module {without[0]}{_and_more(without[1:])} has no tensor {variant.tensor}; "
                f"expected one, since '{variant.field}' is set in {CONFIG_FILE}"
            )
    return described(config.variants)


def _head(weight: str, bias: str | None, header: _Header) -> SavedHead:
    """Return one saved head, with its arrays not read."""
    shape = header.tensors[weight].shape
    if len(shape) not in (0, 2):
        raise AdapterMismatchError(
            f"{header.at(weight)} has shape {shape}: it is of a fully trained module (modules_to_save) that is no "
            "linear layer, such as a norm or a convolution; jlora serves fully trained linear layers only. Train the "
            "adapter without it"
        )
    matrix = header.matrix(weight)
    return SavedHead(matrix, None if bias is None else header.shaped(bias, matrix.shape[:1]))


def _halves(module: str, parts: Mapping[str, str], header: _Header) -> tuple[Kind, str, str]:
    """Return the kind of a module and the keys of its A and B."""
    key_a, key_b, kind = parts.get("lora_A"), parts.get("lora_B"), "linear"
    if key_a is None and key_b is None:
        key_a, key_b, kind = parts.get("lora_embedding_A"), parts.get("lora_embedding_B"), "embedding"
    beside = {"base", *(variant.tensor for variant in VARIANTS.values())}
    if key_a is None or key_b is None or len(parts.keys() - beside) > 2:
        raise AdapterFormatError(
            f"{header.where}: module {shown(module)} has tensor {', '.join(map(shown, parts.values()))}; "
            "expected one A and one B of the same kind"
        )
    return kind, key_a, key_b


def _base(key: str, module: LoRA | None, header: _Header) -> HostArray:
    """Return a base weight, not read."""
    found = header.matrix(key, converted=False)
    if isinstance(module, ModuleLoRA):
        expected = module.b.shape[0], module.a.shape[1]
        expected = expected[::-1] if module.kind == "embedding" else expected
        if found.shape != expected:
            raise AdapterFormatError(f"{header.at(key)} has shape {found.shape}; expected {expected}, as A and B imply")
    return found
