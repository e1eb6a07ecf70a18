"""Load a Hugging Face checkpoint into a `Decoder`, without PyTorch.

A checkpoint is a folder with `config.json` and one or several safetensors files, or a repository of the hub.
"""

import contextlib
import functools
import json
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open

from jlora._contents import is_lfs_pointer
from jlora._typing import DType
from jlora.models.config import DecoderConfig, Quantize, quantized_config, read_config
from jlora.models.decoder import Decoder
from jlora.models.files import CONFIG, INDEX, SINGLE, config_folder, model_folder, weight_map
from jlora.models.json_file import ModelError
from jlora.models.layouts import FLOAT8, FLOATS, Index, Source, sources
from jlora.models.partition import Dispatch
from jlora.models.quantized import Tops, float_of, read_quantized
from jlora.models.rope import frequencies

_OTHER_PARTS = {"vision_tower", "multi_modal_projector"}  # of a multimodal checkpoint, beside `language_model`


@dataclass(frozen=True)
class LoadProgress:
    """Progress of `from_pretrained`.

    Attributes:
      parameters, num_parameters: Number of parameters read, and in total.
      files, num_files: Number of safetensors files read to the end, and in total.
    """

    parameters: int
    num_parameters: int
    files: int
    num_files: int


def from_pretrained(
    path: str | Path,
    dtype: DType = jnp.float32,
    mesh: jax.sharding.Mesh | None = None,
    *,
    revision: str | None = None,
    dispatch: Dispatch = "all_gather",
    quantize: Quantize | None = None,
    progress: Callable[[LoadProgress], None] | None = None,
) -> Decoder:
    """Load a Llama, Mistral, Mixtral, Qwen2, Qwen2-MoE, Qwen3, Qwen3-MoE, Gemma 3 or gpt-oss checkpoint.

    Of a multimodal Gemma 3, the text model is loaded.
    `architectures` of its configuration says whether it is a language model, a sequence classifier or the trunk alone.
    With a Pooling module in `modules.json`, it is an embedding model (`DecoderConfig.pooling`).
    Experts may be stored one by one or all in one tensor. Experts in mxfp4 are converted to `dtype`. The files are
    memory-mapped, and one parameter at a time is moved to the device. On a mesh, one shard at a time is moved to the
    devices that hold it, and a process reads only the shards of its own devices.

    Args:
      path: Checkpoint folder (`~` is expanded) with `config.json` and `model.safetensors`, or the shards listed in
        `model.safetensors.index.json`; or a repo id of the Hugging Face hub, such as "Qwen/Qwen3-0.6B". See
        `model_folder`.
      dtype: Dtype of weights and activations.
      mesh: Devices, with axes as for `Decoder`. None means JAX's default device.
      revision: Branch, tag or commit of the repo; None for a local folder.
      dispatch: How tokens reach experts on other devices; see `Decoder`.
      quantize: Dtype of the kernels of projections, experts and the lm_head, each output column with a scale. Each is
        quantized when it has been read. None keeps `dtype`. Checkpoints in fp8 stay as they are, and take None or
        "fp8".
      progress: Called after each parameter.

    Raises:
      ModelError: The repo cannot be downloaded (see `model_folder`); a file is missing or damaged; the configuration
        has a feature that the decoder lacks; a tensor is missing, unexpected or of another shape or type; or the mesh
        does not fit. The message names the file and the field or tensors, or the axis.
    """
    folder = model_folder(path, revision)
    config = _config(folder)
    try:
        config = quantized_config(config, quantize)
    except ModelError as error:
        raise ModelError(f"{folder / 'config.json'}: {error}") from error
    with contextlib.ExitStack() as stack:
        tensors = _open(folder, config, stack)
        skeleton = _skeleton(config, dtype, mesh, dispatch)
        graph, abstract = nnx.split(skeleton)
        params: Any = nnx.to_flat_state(abstract)
        scales = {path_: param for path_, param in params if _is_computed(config, path_[-1])}
        stored = [(path_, param) for path_, param in params if path_ not in scales]
        loaded = []
        found = _sources(skeleton, stored, tensors, folder)
        last = _last_uses(found, tensors)
        for done, ((path_, param), source) in enumerate(zip(stored, found, strict=True), start=1):
            of_scale = (*path_[:-1], f"{path_[-1]}_scale")
            read = {path_: param} | ({of_scale: scales[of_scale]} if of_scale in scales else {})
            values = _load(source, [one.get_value() for one in read.values()], config, tensors, folder)
            loaded += [(name, read[name].replace(value)) for name, value in zip(read, values, strict=True)]
            if progress is not None:
                progress(LoadProgress(done, len(stored), sum(use < done for use in last), len(last)))
    return nnx.merge(graph, nnx.from_flat_state(loaded))


def read_skeleton(path: str | Path, revision: str | None = None) -> Decoder:
    """Return the model of a checkpoint without its weights.

    Every parameter is a float32 `jax.ShapeDtypeStruct`, but for the kernels of a checkpoint in fp8. Names, shapes and
    types of the tensors in a local folder are checked as in `from_pretrained`, with the same errors. Of a repo id only
    the configuration is read, and no weights are downloaded.

    Args:
      path: Checkpoint folder or repo id.
      revision: Branch, tag or commit of the repo; None for a local folder.
    """
    folder, stored = config_folder(path, revision)
    config = _config(folder)
    with contextlib.ExitStack() as stack:
        tensors = _open(folder, config, stack) if stored else None
        skeleton = _skeleton(config, jnp.float32)
        if tensors is not None:
            _sources(skeleton, nnx.to_flat_state(nnx.state(skeleton)), tensors, folder)
    return skeleton


def read_weight(path: str | Path, module: str, revision: str | None = None) -> np.ndarray | None:
    """Return the stored weight of one module of a checkpoint, or None if it has none.

    The weight is [out, in], or [V, D] for an embedding. The `lm_head` of a tied model is its embedding.

    Args:
      path: Checkpoint folder or repo id.
      module: Name of the module in the checkpoint, such as "model.embed_tokens".
      revision: Branch, tag or commit of the repo; None for a local folder.
    """
    folder = model_folder(path, revision)
    config = _config(folder)
    if config.tie_word_embeddings and module == "lm_head":
        module = "model.embed_tokens"
    with contextlib.ExitStack() as stack:
        tensors = _open(folder, config, stack)
        return _tensor(tensors, f"{module}.weight", folder) if f"{module}.weight" in tensors else None


def _config(folder: Path) -> DecoderConfig:
    config = read_config(folder / CONFIG)
    try:
        for rope in filter(None, (config.rope, config.local_rope)):
            frequencies(rope, config.head_dim)
    except ModelError as error:
        raise ModelError(f"{folder / 'config.json'}: {error}") from error
    return config


def _skeleton(
    config: DecoderConfig, dtype: DType, mesh: jax.sharding.Mesh | None = None, dispatch: Dispatch = "all_gather"
) -> Decoder:
    return nnx.eval_shape(lambda: Decoder(config, dtype=dtype, rngs=nnx.Rngs(0), mesh=mesh, dispatch=dispatch))


def _open(folder: Path, config: DecoderConfig, stack: contextlib.ExitStack) -> dict[str, Any]:
    """Open every file and return tensor name -> (open file, name in the file, the file's tensors in float8).

    Tensor names are those of the whole causal model.

    The number of stored layers is checked against the configuration here, before any layer is built.
    """
    if (folder / SINGLE).is_file():
        where = None
        files = [SINGLE]
    elif (folder / INDEX).is_file():
        where = weight_map(folder / INDEX)
        files = sorted(set(where.values()))
    else:
        raise ModelError(
            f"{folder} holds neither {SINGLE} nor {INDEX}. Pickle files (.bin, .pt) are never opened; save the model "
            "again with `model.save_pretrained(folder, safe_serialization=True)`"
        )
    tensors: dict[str, Any] = {}
    for file in files:
        if not (folder / file).is_file():
            raise ModelError(f"{folder / INDEX}: the shard {file} that it lists does not exist")
        if is_lfs_pointer(folder / file):
            raise ModelError(f"{folder / file} is a pointer of Git LFS; fetch the file: git lfs pull, in the folder")
        with _naming(folder / file):
            opened = stack.enter_context(safe_open(folder / file, framework="np"))
            names = set(opened.keys())
        listed = names if where is None else {name for name, shard in where.items() if shard == file}
        if names != listed:
            raise ModelError(
                f"{folder / file}: its tensors disagree with {INDEX}: only in the file {sorted(names - listed)[:5]}, "
                f"only in the index {sorted(listed - names)[:5]}"
            )
        float8 = _Float8File(folder / file)
        tensors |= {name: (opened, name, float8) for name in names}
    tensors = _of_text_model(tensors, folder)
    # Files saved from the bare trunk lack the prefix. Old files hold rotary tables, which follow from the
    # configuration.
    if not any(name.startswith("model.") for name in tensors):
        tensors = {name if name == "lm_head.weight" else f"model.{name}": value for name, value in tensors.items()}
    tensors = {name: value for name, value in tensors.items() if not name.endswith(".rotary_emb.inv_freq")}
    layers = {name.split(".")[2] for name in tensors if name.startswith("model.layers.")}
    if len(layers) != config.num_hidden_layers:
        raise ModelError(
            f"{folder / 'config.json'}: num_hidden_layers is {config.num_hidden_layers}, and the files hold tensors of "
            f"{len(layers)} layers"
        )
    if config.tie_word_embeddings:
        _drop_tied_copy(tensors, folder)
    if config.pooling is not None:  # it may be stored as a language model
        tensors.pop("lm_head.weight", None)
    return tensors


def _of_text_model(tensors: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the tensors of a multimodal checkpoint's text model, by their names in a checkpoint of text alone.

    Names begin with `language_model.model.` or `model.language_model.`; releases of transformers differ.
    """
    names = {name: name.split(".") for name in tensors}
    if not any("language_model" in parts[:2] for parts in names.values()):
        return tensors
    found: dict[str, Any] = {}
    for name, parts in names.items():
        if not _OTHER_PARTS.isdisjoint(parts[:2]):
            continue
        of_text = ".".join(part for part in parts if part != "language_model")
        if of_text in found:
            raise ModelError(f"{folder}: {of_text} is stored twice, with and without language_model in its name")
        found[of_text] = tensors[name]
    return found


def _is_computed(config: DecoderConfig, leaf: str) -> bool:
    """Return True for scales that are computed while the kernel is read."""
    return config.quantization in ("int8", "fp8") and leaf.endswith("_scale")


def _sources(skeleton: Decoder, params: Any, tensors: Mapping[str, Any], folder: Path) -> list[Source]:
    """Return the source of each parameter, after checking names, types and shapes of all tensors."""
    try:
        found = sources(skeleton, params, tensors)
    except ModelError as error:
        raise ModelError(f"{folder}: {error}") from error
    expected = {name: (shape, source.types) for source in found for name, shape in source.tensors.items()}
    missing = [name for name in expected if name not in tensors]
    unexpected = sorted(set(tensors) - set(expected))
    if missing or unexpected:
        raise ModelError(
            f"{folder}: the tensors do not fit config.json: {len(missing)} missing {missing[:5]}, "
            f"{len(unexpected)} unexpected {unexpected[:5]}"
        )
    for name, (shape, types) in expected.items():
        stored = _shape(tensors, name, folder, types)
        if stored != shape:
            raise ModelError(f"{folder}: config.json asks for {name} {list(shape)}, found {list(stored)}")
    return found


def _last_uses(found: Sequence[Source], tensors: Mapping[str, Any]) -> list[int]:
    """Return, for each open file, the index of the last source that reads a tensor of it."""
    last: dict[int, int] = {}
    for i, source in enumerate(found):
        last |= {id(tensors[name][0]): i for name in source.tensors}
    return list(last.values())


def _load(
    source: Source,
    params: Sequence[jax.ShapeDtypeStruct],
    config: DecoderConfig,
    tensors: Mapping[str, Any],
    folder: Path,
) -> list[jax.Array]:
    """Load one parameter, shard by shard, or a kernel and the scales that are computed from it.

    A shard that several devices hold is read once.
    """
    param = params[0]

    def read(index: Index, dtype: DType | None, device: Any) -> jax.Array:
        stored = source.read(lambda name, part: _part(tensors, name, part, folder), index)
        return source.assemble(stored, index, float_of(stored[0].dtype) if dtype is None else dtype, device)

    def shard(index: Index, device: Any) -> tuple[jax.Array, ...]:
        try:
            if len(params) == 1:
                return (read(index, param.dtype, device),)
            return read_quantized(read, index, param.shape[-2], config.quantization, tops, device)
        except ModelError as error:
            raise ModelError(f"{folder}: {next(iter(source.tensors))}: {error}") from error

    tops: Tops = {}
    whole = tuple(slice(0, size) for size in param.shape)
    if param.sharding is None:
        return list(shard(whole, None))
    owners: dict[tuple[tuple[int, int], ...], list[Any]] = {}
    for device, index in param.sharding.addressable_devices_indices_map(param.shape).items():
        bounds = (part.indices(size)[:2] for part, size in zip(index or whole, param.shape, strict=True))
        owners.setdefault(tuple(bounds), []).append(device)
    placed: list[tuple[jax.Array, ...]] = []
    for bounds, (first, *others) in owners.items():
        arrays = shard(tuple(slice(*pair) for pair in bounds), first)
        placed += [arrays, *(jax.device_put(arrays, device) for device in others)]
        jax.block_until_ready(placed)  # free this shard's host memory before the next one is read
    return [
        jax.make_array_from_single_device_arrays(one.shape, one.sharding, list(arrays))
        for one, arrays in zip(params, zip(*placed, strict=True), strict=True)
    ]


def _drop_tied_copy(tensors: dict[str, Any], folder: Path) -> None:
    """Check that the lm_head which a tied checkpoint may store equals the embedding, and drop it."""
    if "lm_head.weight" in tensors and "model.embed_tokens.weight" in tensors:
        head, embedding = "lm_head.weight", "model.embed_tokens.weight"
        same = _shape(tensors, head, folder) == _shape(tensors, embedding, folder)
        if not same or not np.array_equal(_tensor(tensors, head, folder), _tensor(tensors, embedding, folder)):
            raise ModelError(
                f"{folder}: tie_word_embeddings is true, but lm_head.weight differs from model.embed_tokens.weight; "
                "set tie_word_embeddings to false in config.json if the two are meant to differ"
            )
        del tensors["lm_head.weight"]


def _shape(tensors: Mapping[str, Any], name: str, folder: Path, types: tuple[str, ...] = FLOATS) -> tuple[int, ...]:
    file, stored_name, _ = tensors[name]
    with _naming(folder):
        view = file.get_slice(stored_name)
    if view.get_dtype() not in types:
        raise ModelError(f"{folder}: {name} is {view.get_dtype()}; expected one of {types}")
    return tuple(view.get_shape())


def _tensor(tensors: Mapping[str, Any], name: str, folder: Path) -> np.ndarray:
    file, stored_name, _ = tensors[name]
    _shape(tensors, name, folder)
    with _naming(folder):
        return cast(np.ndarray, file.get_tensor(stored_name))


def _part(tensors: Mapping[str, Any], name: str, part: Index, folder: Path) -> np.ndarray:
    """Read a part of a stored tensor, and no other bytes of its file."""
    file, stored_name, float8 = tensors[name]
    with _naming(folder):
        view = file.get_slice(stored_name)
        if view.get_dtype() == FLOAT8:
            return float8.read(stored_name, part)
        return cast(np.ndarray, view[part])


@contextlib.contextmanager
def _naming(file: Path) -> Generator[None, None, None]:
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} cannot be read as safetensors: {error}") from error


class _Float8File:
    """The float8_e4m3fn tensors of a file that `safetensors.safe_open` has opened, so that its header is valid.

    NumPy itself has no such dtype, so safetensors does not read them.
    """

    def __init__(self, file: Path):
        self.file = file

    @functools.cached_property
    def _header(self) -> tuple[int, dict[str, Any]]:
        """The offset of the data, and the header's entry of each tensor."""
        with open(self.file, "rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            return 8 + size, json.loads(opened.read(size))

    def read(self, name: str, part: tuple[slice, ...]) -> np.ndarray:
        """Read a part of a tensor, and no other bytes of its data."""
        start, fields = self._header
        field = fields[name]
        stored = np.memmap(
            self.file, np.uint8, mode="r", offset=start + field["data_offsets"][0], shape=tuple(field["shape"])
        )
        return np.array(stored[part]).view(ml_dtypes.float8_e4m3fn)
