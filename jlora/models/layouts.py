"""Where the parameters of a `Decoder` lie in the files of a checkpoint, and how stored tensors become one.

projections       [out, in], those of a merged projection one by one
experts           one tensor an expert and projection (transformers 4, and what 5 writes for most families), or
                  all experts of a product in one, [E, out, in] or, gpt-oss, [E, in, out]
experts, mxfp4    [E, out, in / 32, 16] bytes of two 4-bit floats, and [E, out, in / 32] exponents
"""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
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

FLOATS = ("F32", "F16", "BF16")
_LEAF = {"kernel": "weight", "scale": "weight", "embedding": "weight"}
_MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
# Of one value in 4 bits: sign, two bits of exponent, one of mantissa (OCP Microscaling Formats, v1.0, 5.3.3).
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_BLOCK = 32  # values that share a scale

Shape = tuple[int, ...]


class Source(NamedTuple):
    """The stored tensors behind one parameter, by name, and what makes it of them, in that order."""

    tensors: dict[str, Shape]
    assemble: Callable[[Sequence[np.ndarray], DType], jax.Array]
    types: tuple[str, ...] = FLOATS


def sources(model: Decoder, params: Sequence[tuple[tuple[Any, ...], Any]], names: Collection[str]) -> list[Source]:
    """The source of every parameter in files that hold tensors of these names.

    Raises:
      ModelError: the files hold another number of experts than the model.
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
        return _experts(model, f"{block}.{module}", leaf, shape, names, stored_experts[block])
    stored = shape[::-1] if leaf == "kernel" else shape
    sizes = getattr(layer, "output_sizes", stored[:1])
    tensors = {
        ".".join(filter(None, (block, name, _LEAF.get(leaf, leaf)))): (size, *stored[1:])
        for name, size in zip(model.packed_modules.get(module, (module,)), sizes, strict=True)
    }
    return Source(tensors, _transposed if leaf == "kernel" else _side_by_side)


def _experts(
    model: Decoder, experts: str, leaf: str, shape: Shape, names: Collection[str], stored_tensors: int
) -> Source:
    """Of one parameter of an `Experts` module; the files' names say which of the layouts it has."""
    config = model.config.moe
    assert config is not None
    name = f"{experts}.{leaf}"
    if leaf.endswith("_bias"):
        return Source({name: shape}, _side_by_side)
    num_experts, inputs, outputs = shape
    if f"{name}_blocks" in names:
        if inputs % _BLOCK:
            raise ModelError(f"{name}_blocks cannot hold {inputs} values in blocks of {_BLOCK}")
        blocks = (num_experts, outputs, inputs // _BLOCK)
        return Source({f"{name}_blocks": (*blocks, _BLOCK // 2), f"{name}_scales": blocks}, _from_mxfp4, ("U8",))
    if name in names:
        if config.stored_in_first:
            return Source({name: shape}, _side_by_side)
        return Source({name: (num_experts, outputs, inputs)}, _transposed)
    if stored_tensors < num_experts:  # before a name is made for each
        raise ModelError(
            f"config.json asks for {num_experts} experts, and the files hold {stored_tensors} tensors of {experts}"
        )
    parts = model.packed_modules.get(leaf, (leaf,))
    if f"{experts}.0.w1.weight" in names:
        parts = tuple(_MIXTRAL[part] for part in parts)
    tensors = {
        f"{experts}.{expert}.{part}.weight": (outputs // len(parts), inputs)
        for expert in range(num_experts)
        for part in parts
    }
    return Source(tensors, partial(_stacked, num_experts))


def _side_by_side(stored: Sequence[np.ndarray], dtype: DType) -> jax.Array:
    arrays = [jnp.array(array).astype(dtype) for array in stored]
    return arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays)


def _transposed(stored: Sequence[np.ndarray], dtype: DType) -> jax.Array:
    return _side_by_side(stored, dtype).mT


def _stacked(num_experts: int, stored: Sequence[np.ndarray], dtype: DType) -> jax.Array:
    """[out, in] of each part of each expert -> [E, in, all parts' out]."""
    columns = stored[0].shape[-1]
    return jnp.array(np.concatenate(stored).reshape(num_experts, -1, columns)).astype(dtype).mT


def _from_mxfp4(stored: Sequence[np.ndarray], dtype: DType) -> jax.Array:
    blocks, scales = stored
    if np.any(scales == 255):
        raise ModelError("a scale of its mxfp4 blocks is 255, which is no number")
    return _dequantize(jnp.array(blocks), jnp.array(scales), jnp.dtype(dtype))


@partial(jax.jit, static_argnums=2)
def _dequantize(
    blocks: UInt8[Array, "E N b 16"], scales: UInt8[Array, "E N b"], dtype: np.dtype[Any]
) -> Float[Array, "E K N"]:
    """mxfp4 (OCP Microscaling Formats, v1.0): K = 32 * b values, exact in float32 and bfloat16.

    Each byte holds two 4-bit floats, the first in its low half; each 32 values share a scale of 2**(s - 127).
    """
    codes = jnp.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*scales.shape, _BLOCK)
    values = jnp.array(_E2M1, jnp.float32)[codes]
    # The exponent of a float32 has the same bias; but 2**-127 is below its normal numbers, which may count as 0.
    bits = jnp.maximum(scales, 1).astype(jnp.int32) << 23
    scaled = values * jnp.where(scales == 0, 0.5, 1.0)[..., None]
    scaled = scaled * jax.lax.bitcast_convert_type(bits, jnp.float32)[..., None]
    return scaled.reshape(*scales.shape[:-1], -1).astype(dtype).mT
