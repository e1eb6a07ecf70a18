"""A Hugging Face checkpoint folder -> `Decoder`: `config.json` and one or several safetensors files, no PyTorch."""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open

from jlora._typing import DType
from jlora.models.config import ModelError, read_config
from jlora.models.decoder import Decoder

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_LEAF = {"kernel": "weight", "scale": "weight", "embedding": "weight", "bias": "bias"}
_FLOATS = ("F32", "F16", "BF16")


def from_pretrained(
    path: str | Path,
    dtype: DType = jnp.float32,
    mesh: jax.sharding.Mesh | None = None,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> Decoder:
    """Reads a Llama, Mistral, Qwen2 or Qwen3 checkpoint.

    The files are memory-mapped and brought to the device one parameter at a time.

    Args:
      path: the checkpoint's folder (`~` is expanded) with `config.json` and `model.safetensors`, or the shards that
        `model.safetensors.index.json` lists.
      dtype: of weights and activations.
      mesh: must be None; sharding the weights is not supported yet.
      progress: called with (parameters read, parameters in all) after each one.

    Raises:
      ModelError: a file is missing or damaged; the configuration asks for what the decoder does not do; a tensor is
        missing, unexpected or of another shape or type. The message names the file and the field or tensors.
    """
    if mesh is not None:
        raise ModelError("from_pretrained: mesh is not supported yet, the model lives on one device; pass mesh=None")
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise ModelError(f"{folder} is not a folder; expected a Hugging Face checkpoint with config.json in it")
    config = read_config(folder / "config.json")
    graph, abstract = nnx.split(nnx.eval_shape(lambda: Decoder(config, dtype=dtype, rngs=nnx.Rngs(0))))
    params = nnx.to_flat_state(abstract)
    with contextlib.ExitStack() as stack:
        tensors = _open(folder, stack)
        if config.tie_word_embeddings:
            _drop_tied_copy(tensors, folder)
        parts = {path: _parts(path) for path, _ in params}
        _check_names(tensors, [name for names in parts.values() for name in names], folder)
        loaded = []
        for done, (path_, param) in enumerate(params, start=1):
            loaded.append((path_, param.replace(_read(tensors, parts[path_], param.shape, dtype, folder))))
            if progress is not None:
                progress(done, len(parts))
    return nnx.merge(graph, nnx.from_flat_state(loaded))


def _open(folder: Path, stack: contextlib.ExitStack) -> dict[str, Any]:
    """Opens every file; tensor name (as of the whole causal model) -> (open file, name in it)."""
    if (folder / _SINGLE).is_file():
        where = None
        files = [_SINGLE]
    elif (folder / _INDEX).is_file():
        where = _weight_map(folder / _INDEX)
        files = sorted(set(where.values()))
    else:
        raise ModelError(
            f"{folder} holds neither {_SINGLE} nor {_INDEX}. Pickle files (.bin, .pt) are never opened; save the model "
            "again with `model.save_pretrained(folder, safe_serialization=True)`"
        )
    tensors: dict[str, Any] = {}
    for file in files:
        if not (folder / file).is_file():
            raise ModelError(f"{folder / _INDEX}: the shard {file} that it lists does not exist")
        with _naming(folder / file):
            opened = stack.enter_context(safe_open(folder / file, framework="np"))
            names = set(opened.keys())
        listed = names if where is None else {name for name, shard in where.items() if shard == file}
        if names != listed:
            raise ModelError(
                f"{folder / file}: its tensors disagree with {_INDEX}: only in the file {sorted(names - listed)[:5]}, "
                f"only in the index {sorted(listed - names)[:5]}"
            )
        tensors |= {name: (opened, name) for name in names}
    # Files saved from the bare trunk lack the prefix; old ones hold rotary tables, which the configuration implies.
    if not any(name.startswith("model.") for name in tensors):
        tensors = {name if name == "lm_head.weight" else f"model.{name}": value for name, value in tensors.items()}
    return {name: value for name, value in tensors.items() if not name.endswith(".rotary_emb.inv_freq")}


def _weight_map(index: Path) -> Mapping[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        plain = all(isinstance(file, str) and Path(file).name == file for file in weight_map.values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} must be a JSON object with an object weight_map in it: {error!r}") from error
    if not plain:
        raise ModelError(f"{index}: weight_map must name files of the same folder, got {sorted(weight_map.values())}")
    return weight_map


def _parts(path: tuple[Any, ...]) -> tuple[str, ...]:
    """Checkpoint names behind one parameter: one, or several side by side for a merged projection."""
    *parents, module, leaf = (str(key) for key in path)
    modules = Decoder.packed_modules.get(module, (module,))
    return tuple(".".join((*parents, name, _LEAF[leaf])) for name in modules)


def _check_names(tensors: Mapping[str, Any], expected: list[str], folder: Path) -> None:
    missing = [name for name in expected if name not in tensors]
    unexpected = sorted(set(tensors) - set(expected))
    if missing or unexpected:
        raise ModelError(
            f"{folder}: the tensors do not fit config.json: {len(missing)} missing {missing[:5]}, "
            f"{len(unexpected)} unexpected {unexpected[:5]}"
        )


def _drop_tied_copy(tensors: dict[str, Any], folder: Path) -> None:
    """A tied checkpoint may store lm_head once more; it must be the same matrix."""
    if "lm_head.weight" in tensors and "model.embed_tokens.weight" in tensors:
        head, embedding = (_tensor(tensors, name, folder) for name in ("lm_head.weight", "model.embed_tokens.weight"))
        if head.shape != embedding.shape or not np.array_equal(head, embedding):
            raise ModelError(
                f"{folder}: tie_word_embeddings is true, but lm_head.weight differs from model.embed_tokens.weight; "
                "set tie_word_embeddings to false in config.json if the two are meant to differ"
            )
        del tensors["lm_head.weight"]


def _read(
    tensors: Mapping[str, Any], names: tuple[str, ...], shape: tuple[int, ...], dtype: DType, folder: Path
) -> jax.Array:
    """One parameter. Kernels are stored [out, in] and used [in, out]; merged parts lie side by side in the outputs."""
    parts = [_tensor(tensors, name, folder) for name in names]
    kernel = len(shape) == 2 and "embed_tokens" not in names[0]
    rows = sum(part.shape[0] for part in parts if part.ndim)
    stored = (rows, *parts[0].shape[1:])
    expected = shape[::-1] if kernel else shape
    if stored != expected or any(part.shape[1:] != stored[1:] or not part.ndim for part in parts):
        found = ", ".join(f"{name} {list(part.shape)}" for name, part in zip(names, parts, strict=True))
        together = "together " if len(names) > 1 else ""
        raise ModelError(f"{folder}: config.json asks for {together}{list(expected)}, found {found}")
    arrays = [jnp.array(part).astype(dtype) for part in parts]
    whole = arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays)
    return whole.T if kernel else whole


def _tensor(tensors: Mapping[str, Any], name: str, folder: Path) -> np.ndarray:
    file, stored_name = tensors[name]
    with _naming(folder):
        kind = file.get_slice(stored_name).get_dtype()
        if kind not in _FLOATS:
            raise ModelError(f"{folder}: {name} is {kind}; expected one of {_FLOATS}")
        return cast(np.ndarray, file.get_tensor(stored_name))


@contextlib.contextmanager
def _naming(file: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} cannot be read as safetensors: {error}") from error
