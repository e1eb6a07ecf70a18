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
    skeleton = nnx.eval_shape(lambda: Decoder(config, dtype=dtype, rngs=nnx.Rngs(0)))
    graph, abstract = nnx.split(skeleton)
    params = nnx.to_flat_state(abstract)
    with contextlib.ExitStack() as stack:
        tensors = _open(folder, stack)
        if config.tie_word_embeddings:
            _drop_tied_copy(tensors, folder)
        sources = [_sources(skeleton, path_, param.shape) for path_, param in params]
        _check_names(tensors, [name for parts in sources for name in parts], folder)
        loaded = []
        for done, ((path_, param), parts) in enumerate(zip(params, sources, strict=True), start=1):
            loaded.append((path_, param.replace(_read(tensors, parts, str(path_[-1]), dtype, folder))))
            if progress is not None:
                progress(done, len(params))
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


def _sources(model: Decoder, path: tuple[Any, ...], shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """The stored tensors behind one parameter, and their shapes: one, or those side by side in a merged projection.

    Kernels are stored [out, in] and used [in, out].
    """
    *parents, module, leaf = path
    layer: Any = model
    for key in path[:-1]:
        layer = layer[key] if isinstance(key, int) else getattr(layer, key)
    stored = shape[::-1] if leaf == "kernel" else shape
    sizes = getattr(layer, "output_sizes", stored[:1])
    names = model.packed_modules.get(module, (module,))
    return {
        ".".join(map(str, (*parents, name, _LEAF[leaf]))): (size, *stored[1:])
        for name, size in zip(names, sizes, strict=True)
    }


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
    tensors: Mapping[str, Any], parts: Mapping[str, tuple[int, ...]], leaf: str, dtype: DType, folder: Path
) -> jax.Array:
    arrays = []
    for name, shape in parts.items():
        stored = _tensor(tensors, name, folder)
        if stored.shape != shape:
            raise ModelError(f"{folder}: config.json asks for {name} {list(shape)}, found {list(stored.shape)}")
        arrays.append(jnp.array(stored).astype(dtype))
    whole = arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays)
    return whole.T if leaf == "kernel" else whole


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
