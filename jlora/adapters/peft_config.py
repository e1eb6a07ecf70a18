"""Derive a module's rank, alpha and whether PEFT targets it from an `adapter_config.json`.

The rules follow the source of PEFT 0.21 (`peft/tuners/lora/config.py`, `layer.py`, `tuners_utils.py`).
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from jlora.adapters.expert_fields import ExpertFields
from jlora.adapters.pattern_table import PatternTable
from jlora.adapters.patterns import Pattern
from jlora.adapters.wrapped_names import readings

Kind = Literal["linear", "embedding"]
T = TypeVar("T")

# PEFT's "all-linear" excludes the model's output layer. Without a model, its usual names are used.
_OUTPUT_LAYERS = ("lm_head", "embed_out", "output_layer")
_CLASSIFIER_HEADS = ("score", "classifier")


@dataclass(frozen=True)
class PeftConfig:
    """The served part of an `adapter_config.json`.

    Attributes:
      r, lora_alpha: Rank and alpha of modules that match no pattern.
      use_rslora: True if scaling is alpha / sqrt(rank) instead of alpha / rank.
      variants: Names of the variants of LoRA that the adapter is of.
      invocation_tokens: `alora_invocation_tokens`; empty unless the adapter is an activated LoRA (aLoRA).
      rank_patterns, alpha_patterns: Patterns in file order. The first key that matches a module decides.
      target_modules: Names or one regular expression; None stands for "all-linear". If RE2 refuses the expression, it
        is listed in `unchecked` and every module counts as targeted, so the file's tensors decide.
      exclude_modules: Names or one regular expression of modules to leave out. If RE2 refuses the expression, it is
        listed in `unchecked` and excludes none.
      layers_to_transform: Layer indices that names in `target_modules` are limited to; None means all.
      layers_pattern: Names of the list that holds the layers; empty means any.
      fan_in_fan_out: True if the base layer stores its weight transposed. It has no effect on A and B.
      base_model_name: `base_model_name_or_path`.
      task_type: Task type such as "CAUSAL_LM".
      ensure_weight_tying: True if PEFT gave a tied output layer the embedding's LoRA, transposed, and removed its name
        from `target_modules`. Its tensors are in the file like those of any other module.
      modules_to_save: Names of fully trained modules, matched with the ends of module names, as PEFT does.
      experts: Targeted parameters of experts and the layout of their factors.
      unchecked: One line for each field with a regular expression that RE2 refused, with the reason.
      peft_fields: Fields without effect in jlora, kept unchanged for PEFT.
      digest: SHA-256 of the file.
    """

    r: int
    lora_alpha: float
    use_rslora: bool
    variants: tuple[str, ...]
    invocation_tokens: tuple[int, ...]
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
    modules_to_save: tuple[str, ...]
    experts: ExpertFields
    unchecked: tuple[str, ...]
    peft_fields: Mapping[str, Any] = field(compare=False)
    digest: bytes = field(default=b"", compare=False)

    def ranks(self, modules: Iterable[str]) -> dict[str, int]:
        """Return module name -> rank. The first pattern that matches the name or a dotted suffix decides, else `r`.

        Raises:
          AdapterMismatchError: See `PatternTable.lookup`.
        """
        return self._looked_up(self.rank_patterns, modules, self.r)

    def alphas(self, modules: Iterable[str]) -> dict[str, float]:
        """Return module name -> alpha, by the same rule as `ranks`."""
        return self._looked_up(self.alpha_patterns, modules, self.lora_alpha)

    def unused_patterns(self, modules: Iterable[str]) -> dict[str, list[str]]:
        """Return field -> the keys of `rank_pattern` and `alpha_pattern` that decide the value of no module."""
        names = list(map(self._pattern_name, modules))
        fields = {"rank_pattern": self.rank_patterns, "alpha_pattern": self.alpha_patterns}
        return {field: patterns.unused(names) for field, patterns in fields.items()}

    def _looked_up(self, patterns: PatternTable[T], modules: Iterable[str], default: T) -> dict[str, T]:
        names = {module: self._pattern_name(module) for module in modules}
        found = patterns.lookup(names.values(), default)
        return {module: found[name] for module, name in names.items()}

    def _pattern_name(self, module: str) -> str:
        """Return the name under which PEFT looks up a module, or the parameter of a router."""
        return f"{module}.weight" if self.experts.targets_weight(module) else module

    def layers_without(self, modules: Iterable[str]) -> list[int]:
        """Return the layers in `layers_to_transform` that none of the modules is of."""
        return sorted((self.layers_to_transform or frozenset()) - {self._layer_index(module) for module in modules})

    def targets(self, module: str, kind: Kind) -> bool:
        """Return True if PEFT would put LoRA on the module (`check_target_module_exists`).

        A name with prefixes of wrappers counts with them and without: PEFT saw one of the two.

        Raises:
          AdapterMismatchError: See `Pattern.fullmatch`.
        """
        return any(self._targets(reading, kind) for reading in readings(module))

    def _targets(self, module: str, kind: Kind) -> bool:
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
        if module in self.target_modules:  # PEFT checks the layer index of suffix matches only
            return True
        if not _named(self.target_modules, module):
            return False
        return self.layers_to_transform is None or self._layer_index(module) in self.layers_to_transform

    def _layer_index(self, module: str) -> int | None:
        """Return the first number in the dotted name that follows a layer list's name and is not the last part."""
        parts = module.split(".")
        for pattern in self.layers_pattern or (None,):
            # Without a pattern, PEFT requires a dot before the list's name, so the first part cannot be the list.
            for i in range(2 if pattern is None else 1, len(parts) - 1):
                if pattern in (None, parts[i - 1]) and parts[i].isdecimal():
                    # PEFT also accepts 01 and digits of other scripts, but no model has such a layer.
                    canonical = parts[i].isascii() and (parts[i] == "0" or not parts[i].startswith("0"))
                    return int(parts[i]) if canonical and len(parts[i]) < 11 else None
        return None


def scaling_of(alpha: float, rank: int, use_rslora: bool) -> float:
    """Return alpha / rank, or alpha / sqrt(rank) for rank-stabilised LoRA (Kalajdzievski 2023, arXiv:2312.03732)."""
    return alpha / math.sqrt(rank) if use_rslora else alpha / rank


def _named(names: frozenset[str], module: str) -> bool:
    """Return True if one of the names is the module's name or a dotted suffix of it."""
    at = module.rfind(".")  # shortest suffix first, since most names have one part
    while at >= 0:
        if module[at + 1 :] in names:
            return True
        at = module.rfind(".", 0, at)
    return module in names
