"""Name maps and row groups of common vision-language models, and the layers of MaxText."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from flax import nnx

from jlora.errors import LoRAUsageError
from jlora.layers.specs import EmbedSpec, LinearSpec, general_rows
from jlora.layers.wrap.discover import register_layer, walk


@dataclass(frozen=True)
class Preset:
    """Arguments of `LoRAManager` for one family of models.

    Attributes:
      name_map: Regex -> replacement, from module names in PEFT checkpoints to the paths of a Flax model.
      row_groups: Module of the Flax model -> row group.
    """

    name_map: Mapping[str, str]
    row_groups: Mapping[str, str] = field(default_factory=dict[str, str])


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


_OF_LAYER = {
    "self_attention.query": "self_attn.q_proj",
    "self_attention.key": "self_attn.k_proj",
    "self_attention.value": "self_attn.v_proj",
    "self_attention.out": "self_attn.o_proj",
    "mlp.wi_0": "mlp.gate_proj",
    "mlp.wi_1": "mlp.up_proj",
    "mlp.wo": "mlp.down_proj",
}
_OF_MODEL = {"token_embedder": "embed_tokens", "logits_dense": "lm_head"}
# A scanned stack `layers` of layers or of blocks, the rest `layers_remainder`, and single layers `layers_3`.
_PATH = re.compile(rf"((?:.*\.)?decoder\.)(layers\.|layers_remainder\.)?(?:layers_(\d+)\.)?({'|'.join(_OF_LAYER)})")
_queries_and_keys: WeakKeyDictionary[nnx.Module, tuple[bool, float]] = WeakKeyDictionary()  # -> in pairs, scale


def maxtext(model: nnx.Module) -> Preset:
    """Register the layer classes of a MaxText model, and return the name map of its adapters.

    The model is a Llama, Gemma 3 or Qwen3 without experts, scanned, as is MaxText's default, or not. Adapters have the
    names of transformers. They are converted as MaxText converts checkpoints: the features of Llama's heads are in
    pairs, and kernels of queries hold the scale of attention.

    Args:
      model: the model, before it is wrapped.

    Raises:
      LoRAUsageError: the model has no decoder layer of MaxText.

    Example:
      >>> from jlora.presets import maxtext
      >>> manager = jlora.LoRAManager(model, config, name_map=maxtext(model).name_map)
    """
    prefix, names = r"^(?:(?:language_)?model\.)*", dict[str, str]()
    layers: list[tuple[re.Match[str], Any]] = []
    for path, module in walk(model):
        kind, own = type(module).__name__, vars(module)
        if kind == "Attention":
            in_pairs = type(own["rotary_embedding"]).__name__ == "LLaMARotaryEmbedding"
            scaled = own["config"].use_qk_norm or own["query_pre_attn_scalar"] not in (None, 1)
            for name in ("query", "key"):
                if isinstance(layer := own.get(name), nnx.Module):
                    _queries_and_keys[layer] = in_pairs, 1 if scaled or name == "key" else own["head_dim"] ** -0.5
        elif kind in ("DenseGeneral", "Embed"):
            register_layer(type(module), _describe_dense if kind == "DenseGeneral" else _describe_table)
            if match := _PATH.fullmatch(path):
                layers.append((match, module))
            elif (name := _OF_MODEL.get(path.split(".")[-1])) is not None:
                names[f"{prefix}{name}$"] = path
    if not layers:
        raise LoRAUsageError(f"maxtext: {type(model).__name__} has no layer of Llama, Gemma 3 or Qwen3 as in MaxText")
    kernels = [(int(match[3] or 0) + 1, layer.kernel) for match, layer in layers if match[2] == "layers."]
    depth = kernels[0][1].shape[kernels[0][1].get_metadata()["param_scan_axis"]] if kernels else 0
    block = max((count for count, _ in kernels), default=1)
    for match, _ in layers:
        above, stack, at, name = match.groups(default="")
        for i in range(depth) if stack == "layers." else [depth if stack else 0]:
            path = f"{above}{stack}{f'{i}.' if stack == 'layers.' else ''}{f'layers_{at}.' if at else ''}{name}"
            names[rf"{prefix}layers\.{i * block + int(at or 0)}\.{re.escape(_OF_LAYER[name])}$"] = path
    return Preset(MappingProxyType(names))


def _describe_dense(layer: Any) -> LinearSpec:
    ins, outs = layer.in_features_shape, layer.out_features_shape
    in_pairs, scale = _queries_and_keys.get(layer, (False, 1))
    features = np.arange(math.prod(outs))
    return LinearSpec(
        math.prod(ins),
        math.prod(outs),
        in_axes=tuple(range(len(ins))),
        out_axes=tuple(range(len(ins), len(ins + outs))),
        rows=general_rows,
        # Of each head, the checkpoint has the first feature of all pairs, and then the second.
        out_index=features.reshape(len(features) // outs[-1], -1, 2).swapaxes(1, 2).reshape(-1) if in_pairs else None,
        stack_axis=layer.kernel.get_metadata().get("param_scan_axis"),
        scale=scale,
    )


def _describe_table(layer: Any) -> EmbedSpec | str:
    if "gemma" in str(layer.config.decoder_block).lower():
        return "MaxText holds this table times the square root of its width, unlike checkpoints"
    return EmbedSpec(layer.num_embeddings, layer.num_features)
