"""`Adapter`: one LoRA adapter on the host, read from and written to PEFT's folder format."""

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from jlora._typing import DType
from jlora.adapters.activation import check_invocation_tokens
from jlora.adapters.checkpoint import Checkpoint, OwnExperts, open_checkpoint
from jlora.adapters.config_file import CONFIG_FILE, PEFT_FIELDS, read_config
from jlora.adapters.expert_formats import flat_orientation, flattened, stored_names
from jlora.adapters.files import MemoryFile, content_key
from jlora.adapters.int8 import error_of
from jlora.adapters.lora import FLOATS, ExpertsLoRA, HostArray, LoRA, ModuleLoRA, SavedHead, check_variants, tensors_of
from jlora.adapters.peft_config import Kind, PeftConfig, scaling_of
from jlora.adapters.resolve import WEIGHTS_FILE, AdapterFolder, adapter_files, resolve
from jlora.adapters.state_dict import config_file, weights_file
from jlora.adapters.variants import described
from jlora.errors import (
    AdapterFormatError,
    LoRAError,
    LoRAUsageError,
    Problems,
    listed,
    printable,
    shown,
    shown_path,
    shown_value,
)

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, eq=False)
class Adapter:
    """One LoRA adapter on the host.

    Attributes:
      name: Name of the adapter in batches and in the manager.
      modules: Dotted module name -> LoRA factors. Names are those of the checkpoint without `base_model.model.`.
        Factors of all experts stored together are one `ExpertsLoRA`, named for example `mlp.experts.gate_up_proj`.
      base_weights: Dotted module name -> base weight, [V, D] or [N, K], that PEFT stored beside the LoRA of an
        embedding or lm_head. It must equal the weight of the base model.
      heads: Dotted module name -> fully trained layer (PEFT's `modules_to_save`), which replaces the base layer.
      base_model_name: `base_model_name_or_path` of the configuration; None if absent.
      use_rslora: True if scalings are alpha / sqrt(rank).
      invocation_tokens: Token ids that activate an activated LoRA (aLoRA, PEFT's `alora_invocation_tokens`), which acts
        from the first of them on (`active_from`). Empty for a plain adapter.
      fan_in_fan_out: PEFT's field of that name (base weights stored transposed). It has no effect on A and B.
      task_type: PEFT's field of that name.
      peft_fields: Other fields of `adapter_config.json`, as JSON values, kept so that PEFT can read them back
        (`auto_mapping`, `revision`, `lora_dropout`, ...). They have no effect in jlora.
      unchecked: One line for each field that was not checked against the modules, because its regular expression
        (`target_modules` or `exclude_modules`) has no safe matcher. The tensors of the file decide in that case.
      fingerprint: SHA-256 of the bytes read from the files, on disk or in memory. None for an adapter of other origin,
        or that `dataclasses.replace` made.
      config: The rules of `adapter_config.json`, such as `target_modules`, of which `LoRAManager` compares the layers
        with those that have weights; None if the adapter was made from arrays.

    Raises:
      AdapterFormatError: Some modules have the vector of a variant and others have none, `invocation_tokens` are not
        token ids, or a module has both LoRA and a saved head.
      AdapterMismatchError: PEFT has no DoRA or aLoRA for these modules, or an aLoRA adapter has a saved head
        (`check_variants`).
    """

    name: str
    modules: Mapping[str, LoRA]
    base_weights: Mapping[str, HostArray] = field(default_factory=dict[str, np.ndarray])
    heads: Mapping[str, SavedHead] = field(default_factory=dict[str, SavedHead])
    base_model_name: str | None = None
    use_rslora: bool = False
    invocation_tokens: tuple[int, ...] = ()
    fan_in_fan_out: bool = False
    task_type: str | None = None
    peft_fields: Mapping[str, Any] = field(default_factory=dict[str, Any])
    unchecked: tuple[str, ...] = ()
    fingerprint: str | None = field(default=None, init=False)
    config: PeftConfig | None = field(default=None, repr=False)

    def __post_init__(self):
        where = f"adapter {shown(str(self.name))}"  # the manager refuses a name that is no string
        check_invocation_tokens(self.invocation_tokens, f"{where}: invocation_tokens")
        check_variants(where, self.modules, self.heads, self)
        for variant in described(self.variants):
            if plain := [name for name, module in self.modules.items() if variant.name not in module.vectors]:
                raise AdapterFormatError(
                    f"{where}: module {shown(min(plain))} has no vector {variant.name!r}; expected one for each module "
                    f"of a {variant.title} adapter"
                )
        if both := self.heads.keys() & self.modules.keys():
            raise AdapterFormatError(
                f"{where}: {shown(min(both))} has both LoRA and a saved head; expected one of them"
            )

    @property
    def variants(self) -> tuple[str, ...]:
        """Names of the variants of LoRA that the adapter is of, ("dora",) for DoRA. All modules have their vectors."""
        return tuple(v.name for v in described(name for module in self.modules.values() for name in module.vectors))

    @property
    def layers(self) -> dict[str, LoRA | SavedHead]:
        """All modules, and then all saved heads, by name."""
        return {**self.modules, **self.heads}

    def with_layers(self, layers: Mapping[str, LoRA | SavedHead]) -> "Adapter":
        """Return the adapter with these modules and saved heads."""
        heads = {name: layer for name, layer in layers.items() if isinstance(layer, SavedHead)}
        modules = {name: layer for name, layer in layers.items() if not isinstance(layer, SavedHead)}
        return replace(self, modules=modules, heads=heads)

    def with_fingerprint(self, fingerprint: str | None) -> "Adapter":
        """Return the adapter with this fingerprint."""
        new = replace(self)
        object.__setattr__(new, "fingerprint", fingerprint)
        return new

    @property
    def saved_outputs(self) -> dict[str, int]:
        """Module name -> number of outputs (labels) of its saved head. Other columns of the layer's output are -inf."""
        return {name: head.outputs for name, head in self.heads.items()}

    def warnings(self, unread: Collection[str] = ()) -> list[str]:
        """Return one sentence about modules that change nothing, and one for each field with keys that match no module.

        Args:
          unread: Modules of which not all values were read, to leave out.
        """
        judged = {name: module for name, module in self.modules.items() if name not in unread and not module.vectors}
        idle = [name for name, lora in judged.items() if lora.scaling == 0 or _is_zero(lora.b) or _is_zero(lora.a)]
        if len(idle) < len(judged):  # an expert that training never routed to keeps a B of zeros
            idle = [name for name in idle if "experts" not in name.split(".")]
        found: list[str] = []
        fresh = [name for name in idle if judged[name].scaling and _is_zero(judged[name].b)]
        if fresh and len(fresh) == len(self.modules):
            found.append(f"B is zero in all {len(idle)} modules, which change nothing: they are not trained yet")
        elif idle:
            found.append(
                f"{len(idle)} of {len(self.modules)} modules change nothing (lora_alpha is 0, or A or B all zeros): "
                + listed(idle)
            )
        patterns = {} if self.config is None else self.config.unused_patterns(self.modules)
        found += [
            f"{field}: {len(keys)} keys match no module: {listed(keys)}" for field, keys in patterns.items() if keys
        ]
        return found

    @property
    def rank(self) -> int:
        """Largest rank of any module."""
        return max((module.rank for module in self.modules.values()), default=0)

    @property
    def nbytes(self) -> int:
        """Bytes of all modules, of the base weights and of the saved heads."""
        arrays = [array for layer in self.layers.values() for array in tensors_of(layer).values()]
        return sum(array.nbytes for array in (*arrays, *self.base_weights.values()))

    @classmethod
    def from_pretrained(
        cls,
        path: str | os.PathLike[str],
        *,
        name: str | None = None,
        revision: str | None = None,
        dtype: DType | None = None,
        allow_nonfinite: bool = False,
        local_only: bool = False,
        check: Callable[["Adapter"], None] | None = None,
    ) -> "Adapter":
        """Load a PEFT LoRA adapter.

        The configuration and the header of the weights are checked before any tensor is read. A file that changes
        during the load is refused.

        Args:
          path: Local folder (`~` is expanded) or a Hugging Face repo id.
          name: Name of the adapter; by default the last part of `path`.
          revision: Branch, tag or commit of the Hugging Face repo.
          dtype: Convert all but base weights to this dtype (float16, bfloat16, float32 or float64). None keeps the
            file's dtype.
          allow_nonfinite: Accept NaN and infinity, which are refused otherwise. The check takes about as long as
            copying the weights once.
          local_only: Use no network. Repos in Hugging Face's local cache are still found.
          check: Called with the adapter before any tensor is read, so that its arrays are `UnreadArray`. Its exceptions
            are passed on. If some of the files' tensors have problems, it is called with the others.

        Raises:
          AdapterNotFoundError: The path does not exist, and no such repo can be reached.
          AdapterFormatError: Files are missing, malformed or changing, or hold NaN or infinity. The message is about
            the first problem, and `LoRAError.problems` has all that were found.
          AdapterMismatchError: The adapter uses an unserved PEFT feature, named in the message.
          LoRAUsageError: An argument is of the wrong type.
        """
        target = _float_dtype(dtype)
        found = resolve(path, name, revision, local_only=local_only)
        problems = Problems()
        with open_adapter(found, dtype=target, problems=problems) as opened:
            if check is not None:
                problems.attempt(None, check, opened.adapter)
            problems.raise_first()
            return opened.read(allow_nonfinite=allow_nonfinite)

    @classmethod
    def from_state_dict(
        cls,
        tensors: Mapping[str, Any],
        config: Any,
        *,
        name: str,
        dtype: DType | None = None,
        allow_nonfinite: bool = False,
    ) -> "Adapter":
        """Load a PEFT LoRA adapter from memory: a state dict and its configuration, checked as the files of a folder.

        Args:
          tensors: Tensor name -> array, with the names of PEFT's files (`get_peft_model_state_dict`) or of a raw state
            dict. NumPy or JAX arrays, or others that NumPy reads (`__array__`), of float16, bfloat16, float32 or
            float64. Values are copied.
          config: The fields of `adapter_config.json`, or PEFT's `LoraConfig`.
          name: Name of the adapter.
          dtype: Convert all but base weights to this dtype, as in `from_pretrained`.
          allow_nonfinite: Accept NaN and infinity.

        Raises:
          AdapterFormatError: A field or a tensor is malformed, or a tensor holds NaN or infinity. The message is about
            the first problem, and `LoRAError.problems` has all that were found.
          AdapterMismatchError: The adapter uses an unserved PEFT feature, named in the message.
          LoRAUsageError: An argument is of the wrong type.
        """
        name, target = _name(name), _float_dtype(dtype)
        return _read_files(name, config_file(name, config), weights_file(name, tensors), target, allow_nonfinite)

    @classmethod
    def from_bytes(
        cls,
        weights: bytes | bytearray | memoryview,
        config: bytes | bytearray | memoryview,
        *,
        name: str,
        dtype: DType | None = None,
        allow_nonfinite: bool = False,
    ) -> "Adapter":
        """Load a PEFT LoRA adapter from the bytes of its two files, as `to_bytes` returns them.

        Args:
          weights: Bytes of `adapter_model.safetensors`.
          config: Bytes of `adapter_config.json`.
          name: Name of the adapter.
          dtype: Convert all but base weights to this dtype, as in `from_pretrained`.
          allow_nonfinite: Accept NaN and infinity.

        Raises:
          AdapterFormatError, AdapterMismatchError, LoRAUsageError: As in `from_state_dict`.
        """
        name, target = _name(name), _float_dtype(dtype)
        files = MemoryFile(CONFIG_FILE, _bytes("config", config)), MemoryFile(WEIGHTS_FILE, _bytes("weights", weights))
        return _read_files(name, *files, target, allow_nonfinite)

    @classmethod
    def from_arrays(
        cls,
        name: str,
        arrays: Mapping[str, tuple[ArrayLike, ArrayLike]],
        *,
        alpha: float | Mapping[str, float],
        use_rslora: bool = False,
        embeddings: Collection[str] = (),
        vectors: Mapping[str, Mapping[str, ArrayLike]] | None = None,
        heads: Mapping[str, SavedHead] | None = None,
        invocation_tokens: Sequence[int] = (),
        base_model_name: str | None = None,
        task_type: str | None = "CAUSAL_LM",
    ) -> "Adapter":
        """Make an adapter from arrays in memory, for example after training.

        Args:
          name: Name of the adapter.
          arrays: Module name -> (a [r, K], b [N, r]), as NumPy arrays or any `ArrayLike`. Scaling is not folded in.
          alpha: One alpha for all modules, or module name -> alpha.
          use_rslora: Scale by alpha / sqrt(rank) instead of alpha / rank.
          embeddings: Names of the modules that are embeddings, with a [r, V] and b [D, r].
          vectors: Module name -> `ModuleLoRA.vectors`, for all modules of a variant such as DoRA. None for plain LoRA.
          heads: Module name -> fully trained layer, for example a classifier's `score`. None for none.
          invocation_tokens: Token ids that activate an activated LoRA (aLoRA). Empty for a plain adapter.
          base_model_name: Model that the adapter was trained on.
          task_type: PEFT's task type, written by `save_pretrained`.

        Raises:
          AdapterFormatError: A factor is not a float matrix, a and b have different ranks, a vector is of no variant,
            is missing in a module, or is no float vector of the rows of b, or `invocation_tokens` are not token ids.
          AdapterMismatchError: PEFT has no DoRA or aLoRA for these modules.
          LoRAUsageError: `alpha`, `embeddings` or `vectors` names a module that `arrays` lacks, `alpha` omits one,
            or an alpha is not a number.
        """
        alphas = alpha if isinstance(alpha, Mapping) else dict.fromkeys(arrays, alpha)
        vectors = vectors or {}
        named = {*embeddings, *vectors}
        if isinstance(embeddings, str) or alphas.keys() != arrays.keys() or not named <= arrays.keys():
            raise LoRAUsageError(
                f"adapter {shown(name)}: alpha, embeddings and vectors must name the modules of arrays, "
                f"{shown_value(sorted(arrays), 500)}"
            )
        for module, value in alphas.items():
            if isinstance(value, bool) or not isinstance(value, int | float | np.number):
                raise LoRAUsageError(f"adapter {shown(name)}: alpha of {shown(module)} must be a number, got {value!r}")
        modules: dict[str, LoRA] = {}
        for module, (a, b) in arrays.items():
            a, b = np.asarray(a), np.asarray(b)
            scaling = scaling_of(float(alphas[module]), max(1, a.shape[0] if a.ndim else 0), use_rslora)
            kind: Kind = "embedding" if module in embeddings else "linear"
            own = {variant: np.asarray(array) for variant, array in vectors.get(module, {}).items()}
            modules[module] = ModuleLoRA(a=a, b=b, kind=kind, alpha=float(alphas[module]), scaling=scaling, vectors=own)
        return cls(
            name=name,
            modules=modules,
            heads=dict(heads or {}),
            base_model_name=base_model_name,
            use_rslora=use_rslora,
            invocation_tokens=tuple(invocation_tokens),
            task_type=task_type,
        )

    def save_pretrained(self, path: str | os.PathLike[str]) -> None:
        """Write a folder that PEFT and `from_pretrained` can load.

        Arrays keep their dtypes and load back bitwise. Targets are written as full module names, as are ranks and
        alphas that differ from the most common value. An `ExpertsLoRA` with `flat` is written as PEFT's
        `target_parameters`. Any other is written with three axes, which `from_pretrained` reads and PEFT does not.
        A missing folder is created. Each file is written under a temporary name and then renamed, so a reader never
        sees a partial file.

        Raises:
          LoRAError: `path` is a file, the adapter has no module, a scaling differs from PEFT's value for its alpha and
            rank, or no file format can represent an `ExpertsLoRA`.
          LoRAUsageError: `peft_fields` has a field that no loaded adapter can have.
        """
        folder = Path(os.path.expanduser(os.fspath(path)))
        if folder.exists() and not folder.is_dir():
            raise LoRAError(
                f"adapter {shown(self.name)}: {shown_path(folder)} is a file; expected a folder to write to"
            )
        weights, config = self._files()
        folder.mkdir(parents=True, exist_ok=True)
        weights_part, config_part = folder / (WEIGHTS_FILE + ".part"), folder / (CONFIG_FILE + ".part")
        with open(weights_part, "wb") as file:
            file.writelines(weights.parts)
        config_part.write_bytes(config)
        os.replace(weights_part, folder / WEIGHTS_FILE)
        os.replace(config_part, folder / CONFIG_FILE)

    def int8_errors(self) -> dict[str, float]:
        """Return module name -> relative error of its delta in slots of int8, the largest first.

        It is the Frobenius norm of the change by int8, divided by the norm of the delta. Modules of experts have one
        value. Embeddings, which are served in floats, are left out.
        """
        errors = {name: error_of(module) for name, module in self.modules.items() if module.kind != "embedding"}
        return dict(sorted(errors.items(), key=lambda error: -error[1]))

    def to_bytes(self) -> tuple[bytes, bytes]:
        """Return the bytes of the two files that `save_pretrained` writes: weights (safetensors), configuration (JSON).

        Raises:
          LoRAError, LoRAUsageError: As in `save_pretrained`.
        """
        weights, config = self._files()
        return b"".join(weights.parts), config

    def _files(self) -> tuple[MemoryFile, bytes]:
        config = json.dumps(self._peft_config(), indent=2) + "\n"
        return weights_file(self.name, self._tensors()), config.encode()

    def _tensors(self) -> dict[str, np.ndarray]:
        tensors: dict[str, np.ndarray] = {}
        stored = self._experts()
        for name, layer in self.layers.items():
            arrays = tensors_of(layer)
            if isinstance(layer, ExpertsLoRA) and layer.flat:
                arrays = dict(zip(arrays, flattened(layer.a, layer.b), strict=True))
            tensors |= {f"base_model.model.{stored.get(name, name)}.{part}": array for part, array in arrays.items()}
        for name, array in self.base_weights.items():
            part = "base_layer.weight" if name in self.modules else "weight"
            tensors[f"base_model.model.{name}.{part}"] = array
        return {key: np.asarray(array) for key, array in tensors.items()}

    def _experts(self) -> dict[str, str]:
        """Map each `ExpertsLoRA` to the module name of its tensors. Raise if a load would give another LoRA."""
        where = f"adapter {shown(self.name)}"
        experts = {name: module for name, module in self.modules.items() if isinstance(module, ExpertsLoRA)}
        flat = {name: module for name, module in experts.items() if module.flat}
        stored = stored_names(experts, self.modules.keys() - experts.keys(), flat, where)
        for name, module in experts.items():
            if name in flat and (len(module.a) != len(module.b) or len(module.a) < 2):
                raise LoRAError(f"{where}: {shown(name)} is flat, and must have both factors of each expert")
            exchanged = flat_orientation(name.rpartition(".")[0], flat) if name in flat else False
            if module.exchanged != exchanged:
                raise LoRAError(
                    f"{where}: {shown(name)} has exchanged={module.exchanged}, and would be read as {exchanged}"
                )
        return stored

    def _peft_config(self) -> dict[str, Any]:
        if not self.layers:
            raise LoRAError(f"adapter {shown(self.name)} has no module to save")
        if not self.peft_fields.keys() <= PEFT_FIELDS:
            raise LoRAUsageError(
                f"adapter {shown(self.name)}: peft_fields may hold {', '.join(sorted(PEFT_FIELDS))}; found "
                f"{shown_value(sorted(self.peft_fields.keys() - PEFT_FIELDS), 500)}"
            )
        for name, module in self.modules.items():
            expected = scaling_of(module.alpha, module.rank, self.use_rslora)
            if module.scaling != expected:
                raise LoRAError(
                    f"adapter {shown(self.name)}: module {shown(name)} has scaling {module.scaling}, but PEFT would "
                    f"compute {expected} from alpha {module.alpha}, rank {module.rank} and "
                    f"use_rslora={self.use_rslora}; change alpha, or fold the difference into b"
                )
        parameters = [name for name, module in self._experts().items() if name != module]
        rank = _commonest((module.rank for module in self.modules.values()), 8)
        alpha = _commonest((module.alpha for module in self.modules.values()), 8.0)
        return {
            "bias": "none",
            "lora_dropout": 0.0,
            "inference_mode": True,
            **self.peft_fields,
            "peft_type": "LORA",
            "task_type": self.task_type,
            "base_model_name_or_path": self.base_model_name,
            "r": rank,
            "lora_alpha": _as_int(alpha),
            "use_rslora": self.use_rslora,
            **{variant.field: True for variant in described(self.variants)},
            **({"alora_invocation_tokens": list(self.invocation_tokens)} if self.invocation_tokens else {}),
            "rank_pattern": {_exactly(n): m.rank for n, m in self.modules.items() if m.rank != rank},
            "alpha_pattern": {_exactly(n): _as_int(m.alpha) for n, m in self.modules.items() if m.alpha != alpha},
            "target_modules": [name for name in self.modules if name not in parameters],
            **({"target_parameters": parameters} if parameters else {}),
            "fan_in_fan_out": self.fan_in_fan_out,
            **({"modules_to_save": list(self.heads)} if self.heads else {}),
        }


@dataclass(frozen=True)
class OpenAdapter:
    """An adapter whose files are open, with its configuration and the header of its weights read and checked.

    Attributes:
      adapter: The adapter. Its arrays are `UnreadArray`.
      checkpoint: The open weights file.
      config: The served part of the adapter's configuration.
    """

    adapter: Adapter
    checkpoint: Checkpoint
    config: PeftConfig

    def read(self, own: OwnExperts = MappingProxyType({}), *, allow_nonfinite: bool = False) -> Adapter:
        """Read the tensors.

        Args:
          own: Module name -> the experts to read. Modules that are not listed are read whole. Experts that are not
            read are zeros that take no memory, while shapes, ranks and scalings stay those of the file. An adapter
            read this way must not be saved.
          allow_nonfinite: Accept NaN and infinity.

        Raises:
          AdapterFormatError: The file holds NaN or infinity, holds a value too large for the dtype, or has changed.
        """
        modules, base_weights, heads = self.checkpoint.read(own, allow_nonfinite=allow_nonfinite)
        digest = hashlib.sha256(self.config.digest + self.checkpoint.file.digest()).hexdigest()
        read = replace(self.adapter, modules=modules, base_weights=base_weights, heads=heads)
        return read.with_fingerprint(digest)


@contextmanager
def open_adapter(
    found: AdapterFolder,
    *,
    dtype: np.dtype | None = None,
    problems: Problems | None = None,
) -> Generator[OpenAdapter, None, None]:
    """Open an adapter's files. Leaving the `with` block raises if one of them has changed.

    Args:
      found: The adapter's folder.
      dtype: Convert all but base weights to this dtype. None keeps the file's dtype.
      problems: Takes the errors of single fields and tensors. None raises them.

    Raises:
      AdapterFormatError: Files are missing, malformed or changing.
      AdapterMismatchError: The adapter uses an unserved PEFT feature.
    """
    files = adapter_files(found)
    content = _content(found, files)
    with _open_files(found.name, *files, dtype=dtype, problems=problems) as opened:
        yield opened
    if _content(found, files) != content:  # `StableFile` checks each file only while it is open
        raise AdapterFormatError(f"adapter {shown(found.name)}: {shown_path(found.folder)}: changed while it was read")


def _read_files(
    name: str, config: MemoryFile, weights: MemoryFile, dtype: np.dtype | None, allow_nonfinite: bool
) -> Adapter:
    """Read an adapter in memory. Raise the first of its problems, as `Adapter.from_pretrained`."""
    problems = Problems()
    with _open_files(name, config, weights, dtype=dtype, problems=problems) as opened:
        problems.raise_first()
        return opened.read(allow_nonfinite=allow_nonfinite)


@contextmanager
def _open_files(
    name: str,
    config_file: Path | MemoryFile,
    weights_file: Path | MemoryFile,
    *,
    dtype: np.dtype | None,
    problems: Problems | None,
) -> Generator[OpenAdapter, None, None]:
    config = read_config(config_file, name, problems)
    with open_checkpoint(weights_file, name, config, dtype=dtype, problems=problems) as checkpoint:
        adapter = Adapter(
            name=name,
            modules=checkpoint.modules,
            base_weights=checkpoint.base_weights,
            heads=checkpoint.heads,
            base_model_name=config.base_model_name,
            use_rslora=config.use_rslora,
            invocation_tokens=config.invocation_tokens,
            fan_in_fan_out=config.fan_in_fan_out,
            task_type=config.task_type,
            peft_fields=config.peft_fields,
            unchecked=config.unchecked,
            config=config,
        )
        yield OpenAdapter(adapter, checkpoint, config)


def _content(found: AdapterFolder, files: Sequence[Path]) -> str:
    try:
        return content_key(files)
    except OSError as error:
        raise AdapterFormatError(
            f"adapter {shown(found.name)}: {shown_path(found.folder)}: changed while it was read: "
            f"{printable(str(error))}"
        ) from error


def _name(name: str) -> str:
    if not isinstance(name, str) or not name:
        raise LoRAUsageError(f"an adapter's name must be a non-empty string, got {shown_value(name)}")
    return name


def _bytes(argument: str, value: Any) -> memoryview:
    try:
        found = memoryview(value)
        return found.cast("B") if found.nbytes else memoryview(b"")
    except (TypeError, ValueError) as error:
        raise LoRAUsageError(
            f"{argument} must be the contiguous bytes of a file, got {type(value).__name__}: {error}"
        ) from error


def _float_dtype(dtype: DType | None) -> np.dtype | None:
    if dtype is None:
        return None
    try:
        found = np.dtype(dtype)
    except (TypeError, ValueError) as error:
        raise LoRAUsageError(f"dtype {dtype!r} is not a dtype") from error
    if found not in FLOATS:
        raise LoRAUsageError(f"dtype must be one of {', '.join(map(str, FLOATS))}; found {found}")
    return found


def _is_zero(array: np.ndarray) -> bool:
    return not array[:1].any() and not array.any()


def _commonest(values: Iterable[T], default: T) -> T:
    return next((value for value, _ in Counter(values).most_common(1)), default)


def _as_int(alpha: float) -> int | float:
    """Return an int for a whole alpha, as PEFT writes it."""
    return int(alpha) if float(alpha).is_integer() else alpha


def _exactly(module: str) -> str:
    """Return a pattern that PEFT matches to this module only, and not to longer names that end in it."""
    return "^" + re.escape(module)
