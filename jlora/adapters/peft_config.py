"""What an `adapter_config.json` says of a module: its rank and alpha, and whether PEFT would put LoRA on it.

The rules follow the source of PEFT 0.21 (`peft/tuners/lora/config.py`, `layer.py`, `tuners_utils.py`).
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from jlora.adapters.expert_fields import ExpertFields
from jlora.adapters.pattern_table import PatternTable
from jlora.adapters.patterns import Pattern

Kind = Literal["linear", "embedding"]
T = TypeVar("T")

# What PEFT's "all-linear" leaves out is the model's output layer; its usual names stand in for the model here.
_OUTPUT_LAYERS = ("lm_head", "embed_out", "output_layer")
_CLASSIFIER_HEADS = ("score", "classifier")


@dataclass(frozen=True)
class PeftConfig:
    """The served part of an `adapter_config.json`.

    Attributes:
      r, lora_alpha: rank and alpha of modules that no pattern names.
      use_rslora: scaling is alpha / sqrt(rank) instead of alpha / rank.
      rank_patterns, alpha_patterns: in file order; the first key that matches a module counts.
      target_modules: names, or one regular expression; None stands for "all-linear". A regular expression that RE2
        cannot take is in `unchecked`, and every module counts as targeted: the file's tensors say which are.
      exclude_modules: the same, for modules left out; one that RE2 cannot take leaves out none.
      layers_to_transform: layer indices that names in `target_modules` are limited to; None means all.
      layers_pattern: names of the list that holds the layers; empty means any.
      fan_in_fan_out: the base layer stores its weight transposed. A and B do not, so it has no effect on them.
      base_model_name: `base_model_name_or_path`.
      task_type: such as "CAUSAL_LM".
      ensure_weight_tying: PEFT gave a tied output layer the embedding's LoRA, transposed, and took its name out of
        `target_modules`; its tensors are in the file like any other module's.
      experts: which parameters of experts it targets, and how their factors are packed.
      unchecked: the fields whose regular expressions no module was checked against, each with it and the reason.
      peft_fields: fields that are of no effect here and that PEFT reads back, as the file has them.
      digest: SHA-256 of the file.
    """

    r: int
    lora_alpha: float
    use_rslora: bool
    rank_patterns: PatternTable[int]
    alpha_patterns: PatternTable[float]
    target_modules: frozenset[str] | Pattern | None
    exclude_modules: frozenset[str] | Pattern
    layers_to_transform: frozenset[int] | None
    layers_pattern: tuple[str, ...]
    fan_in_fan_out: bool
    base_model_name: str | None
    task_type: str | None
    ensure_weight_tying: bool
    experts: ExpertFields
    unchecked: tuple[str, ...]
    peft_fields: Mapping[str, Any] = field(compare=False)
    digest: bytes = field(default=b"", compare=False)

    @property
    def peft_version(self) -> str | None:
        """The version of PEFT that wrote it, if it says."""
        found = self.peft_fields.get("peft_version")
        return found if isinstance(found, str) else None

    def ranks(self, modules: Iterable[str]) -> dict[str, int]:
        """Rank of each module, by PEFT's rule: the first pattern that matches the name or its end after a dot, or `r`.

        Raises:
          AdapterMismatchError: `PatternTable.lookup` cannot tell.
        """
        return self._looked_up(self.rank_patterns, modules, self.r)

    def alphas(self, modules: Iterable[str]) -> dict[str, float]:
        """Alpha of each module, by the same rule."""
        return self._looked_up(self.alpha_patterns, modules, self.lora_alpha)

    def _looked_up(self, patterns: PatternTable[T], modules: Iterable[str], default: T) -> dict[str, T]:
        if not self.experts.target_parameters:
            return patterns.lookup(modules, default)
        # PEFT asks for a parameter by its own name.
        names = {m: f"{m}.weight" if self.experts.targets_weight(m) else m for m in modules}
        found = patterns.lookup(names.values(), default)
        return {module: found[name] for module, name in names.items()}

    def targets(self, module: str, kind: Kind) -> bool:
        """Whether PEFT, given this configuration, would put LoRA on the module (`check_target_module_exists`).

        Raises:
          AdapterMismatchError: a name that `Pattern.fullmatch` cannot tell.
        """
        if self.experts.targets_weight(module):  # PEFT excludes no parameters
            return True
        if isinstance(self.exclude_modules, Pattern):
            if self.exclude_modules.fullmatch(module):
                return False
        elif _named(self.exclude_modules, module):
            return False
        last = module.rpartition(".")[2]
        if self.ensure_weight_tying and kind == "linear" and last in _OUTPUT_LAYERS:
            return True
        if isinstance(self.target_modules, Pattern):
            return self.target_modules.fullmatch(module)
        if self.target_modules is None:
            heads = _CLASSIFIER_HEADS if self.task_type == "SEQ_CLS" else ()
            return kind == "linear" and last not in _OUTPUT_LAYERS + heads
        if module in self.target_modules:  # PEFT looks at the layer index of suffix matches only
            return True
        if not _named(self.target_modules, module):
            return False
        return self.layers_to_transform is None or self._layer_index(module) in self.layers_to_transform

    def _layer_index(self, module: str) -> int | None:
        """The first number in the dotted name that follows the name of a list of layers and is followed by more."""
        parts = module.split(".")
        for pattern in self.layers_pattern or (None,):
            # Without a pattern PEFT asks for a dot before the list's name, so the very first part cannot be the list.
            for i in range(2 if pattern is None else 1, len(parts) - 1):
                if pattern in (None, parts[i - 1]) and parts[i].isdecimal():
                    # PEFT takes 01, and the digits of other scripts, for numbers; no model has such a layer.
                    canonical = parts[i].isascii() and (parts[i] == "0" or not parts[i].startswith("0"))
                    return int(parts[i]) if canonical and len(parts[i]) < 11 else None
        return None


def scaling_of(alpha: float, rank: int, use_rslora: bool) -> float:
    """alpha / rank, or alpha / sqrt(rank) for rank-stabilised LoRA (Kalajdzievski 2023, arXiv:2312.03732)."""
    return alpha / math.sqrt(rank) if use_rslora else alpha / rank


def _named(names: frozenset[str], module: str) -> bool:
    """Whether one of the names is the module's, or its end after a dot."""
    at = module.rfind(".")  # from the last part on: that is what most names are
    while at >= 0:
        if module[at + 1 :] in names:
            return True
        at = module.rfind(".", 0, at)
    return module in names
