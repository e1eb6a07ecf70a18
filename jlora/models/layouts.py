"""Layouts of a `Decoder`'s parameters in the files of a checkpoint, and the assembly of stored tensors into parameters.

projections       [out, in], with a merged projection's parts in separate tensors
experts           one tensor for each expert and projection (transformers 4, and 5 for most families), or one tensor
                  for all experts of a product: [E, out, in], or [E, in, out] with gate and up alternating (gpt-oss)
fp8_blocks        float8_e4m3fn weights, and scales `weight_scale_inv` [out / 128, in / 128] of float32
experts, mxfp4    [E, out, in / 32, 16] bytes of two 4-bit floats, and [E, out, in / 32] exponents
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8

from jlora._typing import DType
from jlora.models.decoder import Decoder
from jlora.models.json_file import ModelError
from jlora.models.moe import Experts
from jlora.models.partition import Blocks, runs
from jlora.models.quantized import BLOCK, QuantizedLinear

FLOATS = ("F32", "F16", "BF16")
FLOAT8 = "F8_E4M3"
_LEAF = {"kernel": "weight", "kernel_scale": "weight_scale_inv", "scale": "weight", "embedding": "weight"}
_MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
# The values of a 4-bit float: a sign, two bits of exponent, one of mantissa (OCP Microscaling Formats, v1.0, 5.3.3).
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_BLOCK = 32  # values that share a scale

Shape = tuple[int, ...]
Index = tuple[slice, ...]  # each slice has a start and a stop
Read = Callable[[str, Index], np.ndarray]  # (tensor name, part) -> stored values
Assemble = Callable[[Sequence[np.ndarray], Index, DType, Any], jax.Array]


class Source(NamedTuple):
    """The stored tensors of one parameter, by name, and the functions that bring a part of it to a device.

    `read(read_tensor, index)` returns the stored values of a part of the parameter. `assemble(stored, index, dtype,
    device)` returns that part as an array; a device of None is JAX's default.
    """

    tensors: dict[str, Shape]
    read: Callable[[Read, Index], Sequence[np.ndarray]]
    assemble: Assemble
    types: tuple[str, ...] = FLOATS


def sources(model: Decoder, params: Sequence[tuple[tuple[Any, ...], Any]], names: Collection[str]) -> list[Source]:
    """Return the source of every parameter in files that hold tensors of these names.

    Raises:
      ModelError: The files and the model have different numbers of experts.
    """
    stored_experts = Counter(name.rpartition(".experts.")[0] for name in names if ".experts." in name)
    return [_source(model, path, param.shape, names, stored_experts) for path, param in params]


def _source(
    model: Decoder, path: tuple[Any, ...], shape: Shape, names: Collection[str], stored_experts: Counter[str]
) -> Source:
    *parents, module, leaf = path
    layer: Any = model
    for key in path[:-1]:
        layer = layer[key] if isinstance(key, int) else getattr(layer, key)
    block = ".".join(map(str, parents))
    for older, newer in model.module_aliases.items():
        before = block.removesuffix(f".{newer}")
        if before != block and f"{before}.{older}.gate.weight" in names:
            block = f"{before}.{older}"
    if isinstance(layer, Experts):
        return _experts(model, layer, f"{block}.{module}", leaf, shape, names, stored_experts[block])
    stored = shape[::-1] if leaf in ("kernel", "kernel_scale") else shape
    blocks = _blocks(layer, stored[0])
    sizes = getattr(layer, "output_sizes", (max(sum(run) for run in blocks if run[0] >= 0),))
    tensors = {
        ".".join(filter(None, (block, name, _LEAF.get(leaf, leaf)))): (size, *stored[1:])
        for name, size in zip(model.packed_modules.get(module, (module,)), sizes, strict=True)
    }
    turned = leaf in ("kernel", "kernel_scale")
    read = partial(_read_rows, tensors, blocks, turned)
    if leaf == "kernel_scale":
        return _repeated(tensors, read)
    types = _types(model) if leaf == "kernel" and isinstance(layer, QuantizedLinear) else FLOATS
    return Source(tensors, read, _transposed if turned else _as_stored, types)


def _types(model: Decoder) -> tuple[str, ...]:
    """Return the stored types of the kernels that the model has quantized."""
    return (FLOAT8,) if model.config.quantization == "fp8_blocks" else FLOATS


def _blocks(layer: Any, rows: int) -> Blocks:
    """Return the rows of a layer's concatenated stored tensors that become its columns; see `partition.Blocks`."""
    real = getattr(layer, "real_vocab", rows)
    return getattr(layer, "output_blocks", ((0, real), (-1, rows - real)))


def _experts(
    model: Decoder,
    layer: Experts,
    experts: str,
    leaf: str,
    shape: Shape,
    names: Collection[str],
    stored_tensors: int,
) -> Source:
    """Return the source of one parameter of an `Experts` module, in the layout that the files' names imply."""
    name = f"{experts}.{leaf}"
    product = next(product for product, param in layer.grouped_products.items() if leaf.startswith(param))
    blocks = _blocks(layer, shape[-1]) if leaf in ("gate_up_proj", "gate_up_proj_scale") else ((0, shape[-1]),)
    together = name in names or f"{name}_blocks" in names
    if together and _types(model) != FLOATS and not leaf.endswith("_bias"):
        raise ModelError(f"{name} holds all experts; fp8 experts must be stored one by one, {experts}.0.*_proj.weight")
    if not (leaf.endswith("_bias") or together):
        return _each_expert(model, experts, leaf, shape, blocks, names, stored_tensors)
    if product not in layer.alternating:
        return _all_experts(model, name, shape, blocks, names)
    # A shard's columns are the same range of the file's columns, in which gate and up alternate.
    source = _all_experts(model, name, shape, ((0, shape[-1]),), names)
    return source._replace(assemble=partial(_apart, source.assemble))


def _all_experts(model: Decoder, name: str, shape: Shape, blocks: Blocks, names: Collection[str]) -> Source:
    """Return the source of a parameter that is one tensor for all experts."""
    config = model.config.moe
    assert config is not None
    if name.endswith("_bias"):
        return Source({name: shape}, partial(_read_whole, name), _as_stored)
    num_experts, inputs, outputs = shape
    if f"{name}_blocks" in names:
        if inputs % _BLOCK:
            raise ModelError(f"{name}_blocks cannot hold {inputs} values in blocks of {_BLOCK}")
        packed = (num_experts, outputs, inputs // _BLOCK)
        tensors = {f"{name}_blocks": (*packed, _BLOCK // 2), f"{name}_scales": packed}
        return Source(tensors, partial(_read_mxfp4, name), _from_mxfp4, ("U8",))
    if config.stored_in_first:
        return Source({name: shape}, partial(_read_whole, name), _as_stored)
    return Source({name: (num_experts, outputs, inputs)}, partial(_read_turned, name, blocks), _transposed)


def _each_expert(
    model: Decoder, experts: str, leaf: str, shape: Shape, blocks: Blocks, names: Collection[str], stored_tensors: int
) -> Source:
    """Return the source of a parameter that is one tensor for each expert and projection."""
    num_experts, inputs, outputs = shape
    if stored_tensors < num_experts:  # checked before a name is made for each expert
        raise ModelError(
            f"config.json asks for {num_experts} experts, and the files hold {stored_tensors} tensors of {experts}"
        )
    param = leaf.removesuffix("_scale")
    parts = model.packed_modules.get(param, (param,))
    if f"{experts}.0.w1.weight" in names:
        parts = tuple(_MIXTRAL[part] for part in parts)
    kind = "weight" if param == leaf else "weight_scale_inv"
    each = [
        {f"{experts}.{expert}.{part}.{kind}": (outputs // len(parts), inputs) for part in parts}
        for expert in range(num_experts)
    ]
    stored = {name: size for tensors in each for name, size in tensors.items()}
    read = partial(_read_each, each, blocks)
    return Source(stored, read, _transposed, _types(model)) if param == leaf else _repeated(stored, read)


def _repeated(weights: Mapping[str, Shape], read: Callable[[Read, Index], Sequence[np.ndarray]]) -> Source:
    """Return the source of the scales of fp8 weights, read like weights [rows, G] of these names.

    A stored tensor has one row for each `BLOCK` of them.
    """
    stored = {name: (-(-rows // BLOCK), groups) for name, (rows, groups) in weights.items()}

    def repeated(read_tensor: Read, index: Index) -> Sequence[np.ndarray]:
        return read(partial(_read_scales, read_tensor), index)

    return Source(stored, repeated, _transposed)


def _read_scales(read: Read, name: str, part: Index) -> np.ndarray:
    """Read the scales of rows of a weight, repeated for the rows of a block."""
    rows, groups = part
    first = rows.start // BLOCK
    scales = read(name, (slice(first, -(-rows.stop // BLOCK)), groups))
    return np.repeat(scales, BLOCK, axis=0)[rows.start - first * BLOCK : rows.stop - first * BLOCK]


def _read_rows(
    tensors: Mapping[str, Shape], blocks: Blocks, transposed: bool, read: Read, index: Index
) -> list[np.ndarray]:
    """Read the rows `blocks` of several tensors that are concatenated along their rows."""
    rows, *rest = index[::-1] if transposed else index
    pieces = _pieces(tensors, runs(blocks, rows.start, rows.stop), tuple(rest), read)
    return [_joined(pieces, tuple(part.stop - part.start for part in (rows, *rest)))]


def _read_each(each: Sequence[Mapping[str, Shape]], blocks: Blocks, read: Read, index: Index) -> list[np.ndarray]:
    """Read one tensor per expert and part, as [E, out of all parts, in]."""
    experts, inputs, rows = index
    count, width = rows.stop - rows.start, inputs.stop - inputs.start
    pieces = (
        piece
        for tensors in each[experts]
        for piece in _pieces(tensors, runs(blocks, rows.start, rows.stop), (inputs,), read)
    )
    return [_joined(pieces, ((experts.stop - experts.start) * count, width)).reshape(-1, count, width)]


def _read_whole(name: str, read: Read, index: Index) -> list[np.ndarray]:
    """Read one tensor that is stored in the layout of the parameter."""
    return [read(name, index)]


def _read_turned(name: str, blocks: Blocks, read: Read, index: Index) -> list[np.ndarray]:
    """Read one tensor of all experts, [E, out, in]."""
    experts, inputs, rows = index
    sizes = (part.stop - part.start for part in (experts, rows, inputs))
    pieces = (
        read(name, (experts, slice(first, first + count), inputs))
        for first, count in runs(blocks, rows.start, rows.stop)
    )
    return [_joined(pieces, tuple(sizes), axis=1)]


def _read_mxfp4(name: str, read: Read, index: Index) -> list[np.ndarray]:
    """Read the blocks and scales of all experts, for every block that the part touches."""
    experts, inputs, rows = index
    touched = (experts, rows, slice(inputs.start // _BLOCK, -(-inputs.stop // _BLOCK)))
    blocks, scales = read(f"{name}_blocks", (*touched, slice(0, _BLOCK // 2))), read(f"{name}_scales", touched)
    if np.any(scales == 255):
        raise ModelError("a scale of its mxfp4 blocks is 255, which is no number")
    return [blocks, scales]


def _pieces(tensors: Mapping[str, Shape], rows: Blocks, rest: Index, read: Read) -> Iterator[np.ndarray | int]:
    """Yield the given rows of concatenated tensors, piece by piece; for padding, its number of rows."""
    for first, count in rows:
        if first < 0:
            yield count
            continue
        at = 0
        for name, (size, *_) in tensors.items():
            low, high = max(first, at), min(first + count, at + size)
            if low < high:
                yield read(name, (slice(low - at, high - at), *rest))
            at += size


def _joined(pieces: Iterator[np.ndarray | int], shape: Shape, axis: int = 0) -> np.ndarray:
    """Concatenate pieces along an axis.

    At most one piece is in memory beside the result. A single piece is returned without a copy.
    """
    out, at = np.zeros(0), 0
    for piece in pieces:
        if isinstance(piece, int):
            at += piece
            continue
        if piece.shape == shape:
            return piece
        if not out.size:
            out = np.zeros(shape, piece.dtype)
        elif out.dtype != piece.dtype:
            out = out.astype(np.float32)  # float32 represents the values of the other dtypes
        np.moveaxis(out, axis, 0)[at : at + piece.shape[axis]] = np.moveaxis(piece, axis, 0)
        at += piece.shape[axis]
        del piece  # free it before the next one is read
    return out if out.size else np.zeros(shape, np.float32)


def _as_stored(stored: Sequence[np.ndarray], index: Index, dtype: DType, device: Any) -> jax.Array:
    return _on(stored[0], device).astype(dtype)


def _transposed(stored: Sequence[np.ndarray], index: Index, dtype: DType, device: Any) -> jax.Array:
    return _as_stored(stored, index, dtype, device).mT


def _apart(assemble: Assemble, stored: Sequence[np.ndarray], index: Index, dtype: DType, device: Any) -> jax.Array:
    """Assemble gate and up, whose columns alternate in the file, with those of the gate first."""
    return _gates_first(assemble(stored, index, dtype, device))


@jax.jit
def _gates_first(values: Float[Array, "*lead N"]) -> Float[Array, "*lead N"]:
    return jnp.concatenate([values[..., 0::2], values[..., 1::2]], axis=-1)


def _from_mxfp4(stored: Sequence[np.ndarray], index: Index, dtype: DType, device: Any) -> jax.Array:
    blocks, scales = (_on(array, device) for array in stored)
    start, count = index[1].start % _BLOCK, index[1].stop - index[1].start
    return _dequantize(blocks, scales, jnp.dtype(dtype))[:, start : start + count]


def _on(array: np.ndarray, device: Any) -> jax.Array:
    return jnp.array(array) if device is None else jax.device_put(array, device)


@partial(jax.jit, static_argnums=2)
def _dequantize(
    blocks: UInt8[Array, "E N b 16"], scales: UInt8[Array, "E N b"], dtype: np.dtype[Any]
) -> Float[Array, "E K N"]:
    """Convert mxfp4 (OCP Microscaling Formats, v1.0) to K = 32 * b values, exact in float32 and bfloat16.

    Each byte holds two 4-bit floats, the first in its low half. Each 32 values share a scale of 2**(s - 127).
    """
    codes = jnp.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*scales.shape, _BLOCK)
    values = jnp.array(_E2M1, jnp.float32)[codes]
    # The exponent of a float32 has the same bias. But 2**-127 is subnormal in float32 and may be flushed to 0.
    bits = jnp.maximum(scales, 1).astype(jnp.int32) << 23
    scaled = values * jnp.where(scales == 0, 0.5, 1.0)[..., None]
    scaled = scaled * jax.lax.bitcast_convert_type(bits, jnp.float32)[..., None]
    return scaled.reshape(*scales.shape[:-1], -1).astype(dtype).mT
