"""Embeddings of texts: pooling of hidden states, as the files of sentence-transformers beside a checkpoint specify."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jlora.models.json_file import Fields, ModelError, read_json, read_json_list

PoolingMode = Literal["cls", "lasttoken", "mean", "mean_sqrt_len_tokens", "weightedmean"]
MODULES, SETTINGS, PROMPTS = "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"
_FLAGS = {  # of files written before sentence-transformers 5.4 -> mode
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


@dataclass(frozen=True, kw_only=True)
class Pooling:
    """Pooling of the hidden states of a text into its embedding.

    Attributes:
      mode: The first token, the last one, the mean over tokens, their sum divided by the square root of their number,
        or their mean weighted by position, counted from 1.
      normalize: True if embeddings have length 1.
      prompt: Text before every text, "" for none.
      max_length: Most tokens of a text; None for the model's context.
    """

    mode: PoolingMode
    normalize: bool = False
    prompt: str = ""
    max_length: int | None = None


def pool(hidden: Float[Array, "B L E"], lengths: Int[Array, "B"], pooling: Pooling) -> Float[Array, "B E"]:
    """Return the float32 embedding of each text, whose first `lengths` positions are its tokens."""
    weights: Any = token_weights(pooling.mode, lengths, hidden.shape[1])
    found = weighted_sum(hidden, weights)
    if not pooling.normalize:
        return found
    return found / jnp.maximum(jnp.linalg.norm(found, axis=1, keepdims=True), 1e-12)


def token_weights(
    mode: PoolingMode, lengths: Int[Array | np.ndarray, "B"], size: int, xp: Any = jnp
) -> Float[Array | np.ndarray, "B L"]:
    """Return the float32 weight of each of `size` positions in an embedding, 0 beyond `lengths`; arrays of `xp`."""
    places, count = xp.arange(size)[None], lengths[:, None]
    if mode in ("cls", "lasttoken"):
        return (places == (0 if mode == "cls" else count - 1)).astype(xp.float32)
    weights = xp.where(places < count, places + 1 if mode == "weightedmean" else 1, 0).astype(xp.float32)
    total = weights.sum(axis=1, keepdims=True)
    return weights / (xp.sqrt(total) if mode == "mean_sqrt_len_tokens" else total)


def weighted_sum(hidden: Float[Array, "B L E"], weights: Float[Array, "B L"]) -> Float[Array, "B E"]:
    """Return the float32 sum of hidden states by their weights. Those with weight 0 may be NaN."""
    weights = weights[..., None]
    return (weights * jnp.where(weights != 0, hidden.astype(jnp.float32), 0)).sum(axis=1)


def read_pooling(folder: Path) -> Pooling | None:
    """Read the files of sentence-transformers in a checkpoint's folder.

    Returns:
      The pooling; None without `modules.json`, or if it has no Pooling module.

    Raises:
      ModelError: A file is malformed, or has a module, mode or field that would change the embeddings and is not
        served. The message names the file and the field.
    """
    if not (folder / MODULES).is_file():
        return None
    kinds: list[str] = []
    where = folder
    for module in read_json_list(folder / MODULES):
        kind, path = str(module.get("type")).rpartition(".")[2], module.get("path")
        kinds.append(kind)
        if kind == "Pooling":
            where = folder / str(path)
    if "Pooling" not in kinds:
        return None
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise ModelError(
            f"{folder / MODULES}: the modules must be Transformer, Pooling and at most Normalize, got "
            f"{', '.join(kinds):.200}; without this file the checkpoint is read as a model without embeddings"
        )
    if not (where / "config.json").is_file():
        raise ModelError(f"{where / 'config.json'} does not exist, and {MODULES} has its folder as that of Pooling")
    pooling, prompts, settings = (
        Fields(read_json(file) if file.is_file() else {}, str(file))
        for file in (where / "config.json", folder / PROMPTS, folder / SETTINGS)
    )
    prompt = _prompt(prompts)
    if prompt and not pooling.flag("include_prompt", True):
        raise pooling.fail("include_prompt", "must be true where a default prompt is added to every text")
    if settings.flag("do_lower_case", False):
        raise settings.fail("do_lower_case", "must be false")
    length = settings.values.get("max_seq_length")
    return Pooling(
        mode=_mode(pooling),
        normalize="Normalize" in kinds,
        prompt=prompt,
        max_length=None if length is None else settings.integer("max_seq_length"),
    )


def _mode(fields: Fields) -> PoolingMode:
    value: Any = fields.values.get("pooling_mode")
    if value is None:
        value = [mode for flag, mode in _FLAGS.items() if fields.flag(flag, False)] or ["mean"]
    value = value[0] if isinstance(value, list) and len(value) == 1 else value
    if value not in get_args(PoolingMode):
        raise fields.fail("pooling_mode", f"must be one of {get_args(PoolingMode)}, got {value!r:.80}")
    return value


def _prompt(fields: Fields) -> str:
    name: Any = fields.values.get("default_prompt_name")
    found = "" if name is None else fields.nested("prompts").values.get(name)
    if not isinstance(found, str):
        raise fields.fail("default_prompt_name", f"must name one of the prompts, got {name!r:.80}")
    return found
