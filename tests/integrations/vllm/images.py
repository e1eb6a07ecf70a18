"""A tiny Qwen2.5-VL of random weights, adapters for its language part, and its answers by `transformers`.

An adapter is added to the outputs of the reference's layers in NumPy's order of operations, from a first token on: so
one oracle has merged weights (first token 0), aLoRA, text and images.
"""

import base64
import io
import json
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.numpy import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLImageProcessor,
)

from tests.integrations.vllm.checkpoints import HIDDEN, KEY_HEADS, LAYERS, PROJECTIONS, SIZES, VOCAB, write_adapter

HEAD = 16
SPECIAL = {"<|vision_start|>": 250, "<|vision_end|>": 251, "<|image_pad|>": 252, "<|video_pad|>": 253}
PIXELS = 56  # edge of an image of four tokens
CONFIG = Qwen2_5_VLConfig(
    text_config={
        **SIZES,
        "rms_norm_eps": 1e-6,  # that of the tower
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
    },
    vision_config={
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": HIDDEN,
        "fullatt_block_indexes": [0],
        "window_size": 56,
    },
    vision_start_token_id=250,
    vision_end_token_id=251,
    image_token_id=252,
    video_token_id=253,
    tie_word_embeddings=False,
)
TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% else %} <|vision_start|> <|image_pad|> <|vision_end|> {% endif %}{% endfor %}{% endfor %}"
)


def save_model(folder: Path) -> Path:
    """Write a model of random weights.

    The JAX model rounds the angles of the tower's positions to bfloat16, so the tower's attention returns zeros.
    """
    torch.manual_seed(0)
    model = Qwen2_5_VLForConditionalGeneration(CONFIG)
    for name, weight in model.named_parameters():
        if weight.ndim > 1:
            weight.data.normal_(0, 0 if "visual" in name and "attn.proj" in name else 0.15)
    model.save_pretrained(folder)
    words = {f"t{i}": i for i in range(VOCAB - 6)} | SPECIAL | {"u0": 254, "u1": 255}
    tokens = Tokenizer(models.WordLevel(words, unk_token="t3"))
    tokens.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokens, bos_token="t1", eos_token="t0", pad_token="t0")
    fast.add_special_tokens({"additional_special_tokens": [*SPECIAL]})
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    Qwen2VLImageProcessor(min_pixels=PIXELS**2, max_pixels=PIXELS**2).save_pretrained(folder)
    processor = folder / "preprocessor_config.json"
    processor.write_text(json.dumps(json.loads(processor.read_text()) | {"processor_class": "Qwen2_5_VLProcessor"}))
    return folder


def save_adapter(folder: Path, seed: int, rank: int = 4, names: Sequence[str] = (), **fields: Any) -> Path:
    """Write a PEFT adapter on all projections of the language part, or on the modules `names` [HIDDEN, HIDDEN]."""
    sizes = PROJECTIONS | {"self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.o_proj": (HIDDEN, HIDDEN)}
    sizes |= {f"self_attn.{name}": (HIDDEN, KEY_HEADS * HEAD) for name in ("k_proj", "v_proj")}
    layers = {f"model.language_model.layers.{i}.{name}": size for i in range(LAYERS) for name, size in sizes.items()}
    return write_adapter(folder, {name: (HIDDEN, HIDDEN) for name in names} or layers, seed, rank, **fields)


def image(seed: int) -> tuple[np.ndarray, str]:
    """Return an image and its URL."""
    pixels = np.random.default_rng(seed).integers(0, 256, (PIXELS, PIXELS, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return pixels, "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


_ONE = threading.Lock()


@cache
def _reference(model: Path) -> Qwen2_5_VLForConditionalGeneration:
    found = Qwen2_5_VLForConditionalGeneration.from_pretrained(model, dtype=torch.float64).eval()
    found.model.visual.merger.mlp[1] = torch.nn.GELU("tanh")  # the JAX model's
    return found


def logprobs(
    model: Path, adapter: Path | None, tokens: Sequence[int], pixels: np.ndarray | None = None, first: int = 0
) -> np.ndarray:
    """Return the log-probabilities [tokens, vocabulary] after each token, with the adapter from token `first` on."""
    with _ONE:  # thread at a time: hooks belong to the model
        reference = _reference(model)
        hooks = []
        if adapter is not None:
            tensors = load_file(adapter / "adapter_model.safetensors")
            config = json.loads((adapter / "adapter_config.json").read_text())
            for name, a in tensors.items():
                if not name.endswith(".lora_A.weight"):
                    continue
                b = tensors[name.replace("lora_A", "lora_B")].astype(np.float64)
                delta = torch.tensor(config["lora_alpha"] / config["r"] * (b @ a))
                layer = reference.get_submodule(name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"))

                def add(layer: Any, args: Any, out: torch.Tensor, delta: torch.Tensor = delta) -> torch.Tensor:
                    return torch.cat([out[:, :first], out[:, first:] + args[0][:, first:] @ delta.T], 1)

                hooks.append(layer.register_forward_hook(add))
        inputs = {"input_ids": torch.tensor([tokens])}
        if pixels is not None:
            found = Qwen2VLImageProcessor.from_pretrained(model)(Image.fromarray(pixels), return_tensors="pt")
            inputs |= {"pixel_values": found["pixel_values"].double(), "image_grid_thw": found["image_grid_thw"]}
            inputs["mm_token_type_ids"] = (inputs["input_ids"] == SPECIAL["<|image_pad|>"]).int()
        try:
            with torch.no_grad():
                return torch.log_softmax(reference(**inputs).logits[0], -1).numpy()
        finally:
            for hook in hooks:
                hook.remove()
