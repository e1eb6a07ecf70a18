"""Name maps and row groups of common vision-language models."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from jlora.errors import LoRAUsageError


@dataclass(frozen=True)
class Preset:
    """Arguments of `LoRAManager` for one family of models.

    Attributes:
      name_map: Regex -> replacement, from module names in PEFT checkpoints to the paths of a Flax model.
      row_groups: Module of the Flax model -> row group.
    """

    name_map: Mapping[str, str]
    row_groups: Mapping[str, str]


# Names of transformers before 4.52, since then, and since 5. The paths are those of transformers 5 and bonsai.
_QWEN = Preset(
    MappingProxyType(
        {
            r"^(?:model\.)?visual\.": "model.visual.",
            r"^model\.(?:language_model\.)?(?=layers\.|embed_tokens$)": "model.language_model.",
        }
    ),
    # The mergers join four patches, so their rows are counted apart.
    MappingProxyType({"visual": "images", "visual.merger": "merged", "visual.deepstack_merger_list": "merged"}),
)
_QWEN2_5 = Preset(_QWEN.name_map, MappingProxyType({"visual": "images", "visual.merger": "merged"}))
_TOWER = Preset(
    MappingProxyType(
        {
            r"^(?:model\.)?vision_tower\.(?:vision_model\.)?": "vision_tower.",
            r"^(?:model\.)?multi_modal_projector\.": "multi_modal_projector.",
            r"^(?:model\.)?language_model\.(?:model\.)?(?=layers\.|embed_tokens$)": "language_model.",
            r"^language_model\.lm_head$": "lm_head",
        }
    ),
    # [images, patches, features] in the tower, and [images, tokens, features] in the projector.
    MappingProxyType({"vision_tower": "images", "multi_modal_projector": "images"}),
)
_PRESETS = {"qwen2_5_vl": _QWEN2_5, "qwen3_vl": _QWEN, "llava": _TOWER, "gemma3": _TOWER}


def preset(family: str) -> Preset:
    """Return the name map and the row groups of a family of vision-language models.

    Extend or replace them for a model with other paths: `name_map={**preset.name_map, ...}`.

    Args:
      family: "qwen2_5_vl", "qwen3_vl", "llava" or "gemma3", the `model_type` in `config.json`.

    Raises:
      LoRAUsageError: there is no preset of that name.

    Example:
      >>> qwen = jlora.preset("qwen3_vl")
      >>> manager = jlora.LoRAManager(model, config, name_map=qwen.name_map, row_groups=qwen.row_groups)
    """
    if family not in _PRESETS:
        raise LoRAUsageError(
            f"preset: {family!r:.100} is not one of {', '.join(map(repr, _PRESETS))}; give LoRAManager name_map and "
            "row_groups of your own"
        )
    return _PRESETS[family]
