"""The presets of vision-language models against the module names of transformers."""

import pytest
import torch
import transformers

import jlora
from jlora.fit.names import name_rules
from jlora.layers.site import is_named

pytestmark = pytest.mark.parity

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = SIZES | {"num_key_value_heads": 2, "vocab_size": 64, "head_dim": 8, "bos_token_id": 1, "eos_token_id": 2}
QWEN_TOWER = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "out_hidden_size": 32}
TOWER = SIZES | {"image_size": 28, "patch_size": 14}


CONFIGS = {
    "qwen2_5_vl": lambda: transformers.Qwen2_5_VLConfig(text_config=TEXT, vision_config=QWEN_TOWER),
    "qwen3_vl": lambda: transformers.Qwen3VLConfig(
        text_config=TEXT, vision_config=QWEN_TOWER | {"deepstack_visual_indexes": [0]}
    ),
    "llava": lambda: transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**TEXT), vision_config=transformers.CLIPVisionConfig(**TOWER)
    ),
    "gemma3": lambda: transformers.Gemma3Config(
        text_config=TEXT, vision_config=TOWER | {"vision_use_head": False}, mm_tokens_per_image=4
    ),
}


def names_of(config) -> list[str]:
    """Return the names of the layers that PEFT's LoRA can target, without the layers that share a number."""
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(config)
    kinds = torch.nn.Linear, torch.nn.Embedding
    return [name for name, module in model.named_modules() if isinstance(module, kinds)]


def old_name(family: str, name: str) -> str:
    """Return the name of transformers before 4.52."""
    if family.startswith("qwen"):
        return name.replace("model.visual.", "visual.").replace("model.language_model.", "model.")
    name = name.removeprefix("model.").replace("vision_tower.", "vision_tower.vision_model.")
    return f"language_model.{name}" if name == "lm_head" else name.replace("language_model.", "language_model.model.")


def mapped(rules, name: str) -> str:
    return next((rule.sub(to, name) for rule, to in rules if rule.search(name)), name)


@pytest.mark.parametrize("family", CONFIGS)
def test_presets_map_and_group_the_modules_of_transformers(family):
    preset = jlora.preset(family)
    rules = name_rules(preset.name_map)
    names = names_of(CONFIGS[family]())
    assert len(names) > 10
    used = set()
    for name in names:
        path = mapped(rules, name)
        # The paths are the current names; those of llava and gemma3 have no "model." in front.
        assert path == (name if family.startswith("qwen") else name.removeprefix("model."))
        assert mapped(rules, old_name(family, name)) == path
        assert mapped(rules, path) == path
        hits = [module for module in preset.row_groups if is_named(module, [path])]
        of_text = "language_model" in name or name == "lm_head"
        assert bool(hits) == (not of_text), path
        if hits:
            longest = max(hits, key=len)
            used.add(longest)
            pooled = family.startswith("qwen") and "merger" in name
            assert preset.row_groups[longest] == ("merged" if pooled else "images")
        if name != "lm_head":
            assert any(rule.search(name) for rule, _ in rules), name
    # bonsai's projector is a module; that of transformers' Gemma 3 holds one matrix of its own.
    assert used == set(preset.row_groups) - ({"multi_modal_projector"} if family == "gemma3" else set())


def test_an_unknown_family_is_refused():
    with pytest.raises(jlora.LoRAUsageError, match=r"'paligemma' is not one of 'qwen2_5_vl', .*row_groups of your own"):
        jlora.preset("paligemma")
