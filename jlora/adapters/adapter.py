"""`Adapter`: one LoRA on the host, from and to PEFT's folder format."""

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import safetensors.numpy
from numpy.typing import ArrayLike

from jlora._typing import DType
from jlora.adapters.checkpoint import Checkpoint, OwnExperts, open_checkpoint
from jlora.adapters.config_file import CONFIG_FILE, PEFT_FIELDS, read_config
from jlora.adapters.escaping import printable, shown, shown_path, shown_value
from jlora.adapters.expert_formats import flat_orientation, flattened, stored_names
from jlora.adapters.files import content_key
from jlora.adapters.lora import FLOATS, ExpertsLoRA, LoRA, ModuleLoRA
from jlora.adapters.peft_config import Kind, PeftConfig, scaling_of
from jlora.adapters.resolve import WEIGHTS_FILE, AdapterFolder, adapter_files, resolve
from jlora.adapters.shapes import AdapterShapes
from jlora.errors import AdapterFormatError, LoRAError, LoRAUsageError

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, eq=False)
class Adapter:
    """One LoRA adapter on the host.

    Attributes:
      name: how batches and the manager refer to it.
      modules: dotted module name, as the checkpoint has it without `base_model.model.` -> its LoRA. Where a file has
        the factors of all experts in one, that is an `ExpertsLoRA` under a name such as `mlp.experts.gate_up_proj`.
      base_weights: dotted module name -> whole base weight that PEFT stored beside the LoRA of an embedding or lm_head
        ([V, D] or [N, K]). They ought to equal the base model's own.
      base_model_name: the model it was trained on (`base_model_name_or_path`), if it says.
      use_rslora: whether scalings are alpha / sqrt(rank).
      fan_in_fan_out: PEFT's field of that name (base weights stored transposed); without effect on A and B.
      task_type: PEFT's field of that name.
      peft_fields: further fields of its `adapter_config.json` that are of no effect here and that PEFT reads back
        (`auto_mapping`, `revision`, `lora_dropout`, ...), as JSON values.
      unchecked: lines on what of its configuration no module could be checked against: a regular expression of
        `target_modules` or `exclude_modules` that has no safe matcher. The tensors say what is targeted.
      fingerprint: SHA-256 of the bytes that were read from its files; None if made of arrays.
    """

    name: str
    modules: Mapping[str, LoRA]
    base_weights: Mapping[str, np.ndarray] = field(default_factory=dict[str, np.ndarray])
    base_model_name: str | None = None
    use_rslora: bool = False
    fan_in_fan_out: bool = False
    task_type: str | None = None
    peft_fields: Mapping[str, Any] = field(default_factory=dict[str, Any])
    unchecked: tuple[str, ...] = ()
    fingerprint: str | None = None

    @property
    def rank(self) -> int:
        """The largest rank of any module."""
        return max((module.rank for module in self.modules.values()), default=0)

    @property
    def nbytes(self) -> int:
        """Bytes of all A and B, and of the base weights that came with them."""
        arrays = [array for module in self.modules.values() for array in (module.a, module.b)]
        return sum(array.nbytes for array in [*arrays, *self.base_weights.values()])

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
        check: Callable[[AdapterShapes], None] | None = None,
        max_bytes: int | None = None,
    ) -> "Adapter":
        """Loads a PEFT LoRA.

        Everything that the header of the weights says is checked before a tensor is read, and files that change while
        they are read are refused.

        Args:
          path: local folder (`~` is expanded), or a Hugging Face repo id.
          name: the adapter's name; by default the last part of `path`.
          revision: branch, tag or commit of a Hugging Face repo.
          dtype: convert A and B to this float dtype (float16, bfloat16, float32, float64); None keeps the file's.
          allow_nonfinite: let NaN and infinity through, which are refused otherwise (looking for them takes about as
            long as copying the weights once).
          local_only: never ask the network; what Hugging Face's cache holds is still found.
          check: called with the adapter's shapes before a tensor is read; what it raises is raised.
          max_bytes: refuse weights of more bytes than this, in the file or as kept.

        Raises:
          AdapterNotAdapterFolderError: nothing at that path, and no such repo within reach.
          AdapterFormatError: files missing, malformed or changing; NaN or infinity.
          AdapterMismatchError: a PEFT feature that is not served; the message names it. More than `max_bytes`.
          LoRAUsageError: an argument of the wrong kind.
        """

        if max_bytes is not None and (isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 1):
            raise LoRAUsageError(f"max_bytes must be None or a positive int, got {max_bytes!r}")
        target = None if dtype is None else _float_dtype(dtype)
        found = resolve(path, name, revision, local_only=local_only)
        with open_adapter(found, dtype=target, max_bytes=max_bytes) as opened:
            if check is not None:
                check(opened.shapes)
            return opened.read(allow_nonfinite=allow_nonfinite)

    @classmethod
    def from_arrays(
        cls,
        name: str,
        arrays: Mapping[str, tuple[ArrayLike, ArrayLike]],
        *,
        alpha: float | Mapping[str, float],
        use_rslora: bool = False,
        embeddings: Collection[str] = (),
        base_model_name: str | None = None,
        task_type: str | None = "CAUSAL_LM",
    ) -> "Adapter":
        """Makes an adapter of arrays in memory, after training for example.

        Args:
          name: the adapter's name.
          arrays: module name -> (a [r, K], b [N, r]), NumPy or anything `np.asarray` takes. Scaling is not folded in.
          alpha: one alpha for all modules, or one for each.
          use_rslora: scale by alpha / sqrt(rank) instead of alpha / rank.
          embeddings: the module names that are embeddings: a is [r, V], b is [D, r].
          base_model_name: what it was trained on.
          task_type: PEFT's task type, written when it is saved.

        Raises:
          AdapterFormatError: not float matrices of one rank a pair.
          LoRAUsageError: `alpha` or `embeddings` name other modules than `arrays` does, or an alpha is no number.
        """
        alphas = alpha if isinstance(alpha, Mapping) else dict.fromkeys(arrays, alpha)
        if isinstance(embeddings, str) or alphas.keys() != arrays.keys() or not set(embeddings) <= arrays.keys():
            raise LoRAUsageError(
                f"adapter {shown(name)}: alpha and embeddings must name the modules of arrays, "
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
            modules[module] = ModuleLoRA(a=a, b=b, kind=kind, alpha=float(alphas[module]), scaling=scaling)
        return cls(
            name=name,
            modules=modules,
            base_model_name=base_model_name,
            use_rslora=use_rslora,
            task_type=task_type,
        )

    def save_pretrained(self, path: str | os.PathLike[str]) -> None:
        """Writes a folder that PEFT and `from_pretrained` load; arrays come back bitwise, in their own dtypes.

        What says where LoRA goes (`target_modules` and its kin) is written as the modules' full names, and ranks and
        alphas that differ under full names too. Experts' LoRA in the base layer's own order is written flat, as PEFT's
        `target_parameters`; any other with three axes, which `from_pretrained` reads and PEFT does not. The folder is
        made if need be. Each file is written beside its place and then moved there, so a reader never meets half a
        file.

        Raises:
          LoRAError: `path` is a file, the adapter has no module, a module's scaling is not what PEFT would
            compute from its alpha and rank, or experts' LoRA is not as any file could say.
          LoRAUsageError: `peft_fields` has other fields than a loaded adapter's can.
        """
        folder = Path(os.path.expanduser(os.fspath(path)))
        if folder.exists() and not folder.is_dir():
            raise LoRAError(
                f"adapter {shown(self.name)}: {shown_path(folder)} is a file; expected a folder to write to"
            )
        config = self._peft_config()
        folder.mkdir(parents=True, exist_ok=True)
        weights_part, config_part = folder / (WEIGHTS_FILE + ".part"), folder / (CONFIG_FILE + ".part")
        safetensors.numpy.save_file(self._tensors(), weights_part, metadata={"format": "pt"})
        config_part.write_text(json.dumps(config, indent=2) + "\n", "utf-8")
        os.replace(weights_part, folder / WEIGHTS_FILE)
        os.replace(config_part, folder / CONFIG_FILE)

    def _tensors(self) -> dict[str, np.ndarray]:
        tensors: dict[str, np.ndarray] = {}
        stored = self._experts()
        for name, module in self.modules.items():
            flat = isinstance(module, ExpertsLoRA) and module.own_order
            a, b = flattened(module.a, module.b) if flat else (module.a, module.b)
            for half, array in (("A", a), ("B", b)):
                part = f"lora_embedding_{half}" if module.kind == "embedding" else f"lora_{half}.weight"
                tensors[f"base_model.model.{stored.get(name, name)}.{part}"] = np.ascontiguousarray(array)
        for name, array in self.base_weights.items():
            part = "base_layer.weight" if name in self.modules else "weight"
            tensors[f"base_model.model.{name}.{part}"] = np.ascontiguousarray(array)
        return tensors

    def _experts(self) -> dict[str, str]:
        """Name of experts' LoRA -> the module that its tensors are written under; what cannot be read back raises."""
        where = f"adapter {shown(self.name)}"
        experts = {name: module for name, module in self.modules.items() if isinstance(module, ExpertsLoRA)}
        flat = {name: module for name, module in experts.items() if module.own_order}
        stored = stored_names(experts, self.modules.keys() - experts.keys(), flat, where)
        version = self.peft_fields.get("peft_version")
        for name, module in experts.items():
            if name in flat and (len(module.a) != len(module.b) or len(module.a) < 2):
                raise LoRAError(
                    f"{where}: {shown(name)} is in its own order, and must have both factors of each expert"
                )
            exchanged = flat_orientation(name.rpartition(".")[0], flat) if name in flat else False
            written = version if name in flat and isinstance(version, str) else None
            for fact, ours, read in (
                ("exchanged", module.exchanged, exchanged),
                ("peft_version", module.peft_version, written),
            ):
                if ours != read:
                    raise LoRAError(f"{where}: {shown(name)} has {fact}={ours}, and would be read as {read}")
        return stored

    def _peft_config(self) -> dict[str, Any]:
        if not self.modules:
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
        rank = _commonest(module.rank for module in self.modules.values())
        alpha = _commonest(module.alpha for module in self.modules.values())
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
            "rank_pattern": {_exactly(n): m.rank for n, m in self.modules.items() if m.rank != rank},
            "alpha_pattern": {_exactly(n): _as_int(m.alpha) for n, m in self.modules.items() if m.alpha != alpha},
            "target_modules": [name for name in self.modules if name not in parameters],
            **({"target_parameters": parameters} if parameters else {}),
            "fan_in_fan_out": self.fan_in_fan_out,
        }


@dataclass(frozen=True)
class OpenAdapter:
    """An adapter whose configuration and shapes are read and checked, and whose tensors are not read yet.

    Attributes:
      shapes: what the files say of it.
    """

    config: PeftConfig
    checkpoint: Checkpoint

    @property
    def shapes(self) -> AdapterShapes:
        return self.checkpoint.shapes

    def read(self, own: OwnExperts = MappingProxyType({}), *, allow_nonfinite: bool = False) -> Adapter:
        """Read the tensors.

        Args:
          own: of which modules some experts alone are read, and which. Others are zeros that take no memory, in modules
            of the file's names, shapes, ranks and scalings; such an adapter is no good for `save_pretrained`.
          allow_nonfinite: let NaN and infinity through.

        Raises:
          AdapterFormatError: NaN or infinity; a value too large for the dtype; a file that changed.
        """
        modules, base_weights = self.checkpoint.read(own, allow_nonfinite=allow_nonfinite)
        config = self.config
        return Adapter(
            name=self.shapes.name,
            modules=modules,
            base_weights=base_weights,
            base_model_name=config.base_model_name,
            use_rslora=config.use_rslora,
            fan_in_fan_out=config.fan_in_fan_out,
            task_type=config.task_type,
            peft_fields=config.peft_fields,
            unchecked=config.unchecked,
            fingerprint=hashlib.sha256(config.digest + self.checkpoint.file.digest()).hexdigest(),
        )


@contextmanager
def open_adapter(
    found: AdapterFolder, *, dtype: np.dtype | None = None, max_bytes: int | None = None
) -> Generator[OpenAdapter, None, None]:
    """Open an adapter's files. Leaving the `with` block raises if one changed meanwhile.

    Args:
      found: its folder.
      dtype: convert A and B to this dtype; None keeps the file's.
      max_bytes: refuse weights of more bytes than this, in the file or as kept.

    Raises:
      AdapterFormatError: files missing, malformed or changing.
      AdapterMismatchError: a PEFT feature that is not served; more than `max_bytes`.
    """
    files = config_file, weights_file = adapter_files(found)
    content = _content(found, files)
    config = read_config(config_file, found.name)
    with open_checkpoint(weights_file, found.name, config, dtype=dtype, max_bytes=max_bytes) as checkpoint:
        yield OpenAdapter(config, checkpoint)
    if _content(found, files) != content:  # each file held still while it was read, but not both of them
        raise AdapterFormatError(f"adapter {shown(found.name)}: {shown_path(found.folder)}: changed while it was read")


def _content(found: AdapterFolder, files: Sequence[Path]) -> str:
    try:
        return content_key(files)
    except OSError as error:
        raise AdapterFormatError(
            f"adapter {shown(found.name)}: {shown_path(found.folder)}: changed while it was read: "
            f"{printable(str(error))}"
        ) from error


def _float_dtype(dtype: DType) -> np.dtype:
    try:
        found = np.dtype(dtype)
    except TypeError as error:
        raise LoRAUsageError(f"dtype {dtype!r} is not a dtype") from error
    if found not in FLOATS:
        raise LoRAUsageError(f"dtype must be one of {', '.join(map(str, FLOATS))}; found {found}")
    return found


def _commonest(values: Iterable[T]) -> T:
    return Counter(values).most_common(1)[0][0]


def _as_int(alpha: float) -> int | float:
    """PEFT writes whole alphas as integers."""
    return int(alpha) if float(alpha).is_integer() else alpha


def _exactly(module: str) -> str:
    """A pattern that PEFT matches to this module alone, not to others that end in the same names."""
    return "^" + re.escape(module)
