"""Parameters that repeat values of a wrapped kernel, such as the absorbed matrices of latent attention.

Adapters change the output of the kernel's layer, so code that multiplies a copy of the kernel serves the base model.

A line of a kernel has its values along all inputs, or along all outputs. Slices, transposes and reshapes of one side
leave the lines of the other side whole. A parameter is therefore compared by the lines of its adjacent axes that are as
long as the lines of a kernel. Up to 16 values of a line, rounded to bfloat16, give a hash of 64 bits. The hashes of a
few lines of the parameter are looked up among those of all lines of the kernels. So each kernel is read at 16 values of
a line, and not at all for a model without such a parameter. Sums, products and scaled copies of kernels are not found.
"""

import bisect
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, UInt32, UInt64

from jlora._compat import explicit_transfers
from jlora.layers.base_kernel import held_by
from jlora.layers.site import Site, SlotParam
from jlora.layers.specs import EmbedSpec
from jlora.layers.wrap.wrapped import WrappedModel, spec_of
from jlora.slots.placement import auto_axes, with_auto_axes

_SHORTEST = 8  # values of a line; shorter ones could be equal by chance
_VALUES, _LINES = 16, 8  # that are compared of a line, and of a parameter
_FACTORS = np.random.default_rng(0).integers(0, 2**32, (2, _VALUES, 1), np.uint32) | np.uint32(1)


def find_repeats(wrapped: WrappedModel) -> dict[str, Site]:
    """Return path of a parameter -> the site whose kernel holds the same values.

    With several processes, all must call it together.
    """
    kernels: list[tuple[Site, jax.Array, tuple[int, ...]]] = []  # with the axes of a line
    held: set[int] = set()
    for site, layer in wrapped.modules.items():
        if not site.spec.whole:  # the factors that experts share, beside a site of the same kernel
            continue
        spec = spec_of(layer, site)
        variable = held_by(layer, spec)
        if not isinstance(variable, nnx.Variable) or id(cast("object", variable)) in held:
            continue
        held.add(id(cast("object", variable)))
        linear = spec.table if isinstance(spec, EmbedSpec) else spec
        array: jax.Array = cast("Any", variable).get_value()
        for axes in (linear.in_axes, linear.out_axes) if _is_readable(array) else ():
            own = linear.own_axes(array.ndim)
            kernels.append((site, array, tuple(own[axis] for axis in axes)))
    lengths = {_length(array, axes) for _, array, axes in kernels}
    parameters = [
        (path, _length(array, axes), _hashes(array, axes, _LINES))
        for path, array in _others(wrapped.model, held)
        for axes in _adjacent(array.ndim)
        if _SHORTEST <= _length(array, axes) < array.size and _length(array, axes) in lengths
    ]
    lines = [(path, length, _joined(hashes, varied=True)) for path, length, hashes in jax.device_get(parameters)]
    found: dict[str, Site] = {}
    for length in sorted({length for _, length, own in lines if len(own)}):
        sites = [site for site, array, axes in kernels if _length(array, axes) == length]
        hashes = [_hashes(array, axes, None) for _, array, axes in kernels if _length(array, axes) == length]
        of_kernels = [_joined(each) for each in jax.device_get(hashes)]
        joined, ends = np.concatenate(of_kernels), list(itertools.accumulate(each.size for each in of_kernels))
        order = np.argsort(joined)
        for path, _, own in (each for each in lines if each[1] == length):
            places = order[np.searchsorted(joined, own, sorter=order).clip(max=len(joined) - 1)]
            matches = places[joined[places] == own]
            if len(matches):
                found.setdefault(path, sites[bisect.bisect(ends, int(matches[0]))])
    return found


def describe(repeats: Mapping[str, Site]) -> str:
    """Return the result of `find_repeats`, which is not empty, as a sentence with the remedies."""
    path, site = next(iter(repeats.items()))
    more = f" (and {len(repeats) - 1} more)" if len(repeats) > 1 else ""
    return (
        f"{path}{more} repeats weights of {site.path}. Adapters change the output of {site.path}, so code that "
        f"multiplies {path} in its place serves the base model. Compute it from the layer, call jlora.absorbed_delta "
        f"after each product of a head with it, or leave {site.path} out "
        "with LoRAConfig.exclude_modules. manager.verify(..., rederive=) compares code that reads both"
    )


def _others(model: nnx.Module, held: set[int]) -> Iterator[tuple[str, jax.Array]]:
    """Yield (path, array) of each variable of floats that is neither a slot nor a wrapped kernel."""
    for path, node in nnx.iter_graph(model):
        if isinstance(node, nnx.Variable) and not isinstance(node, SlotParam) and id(cast("object", node)) not in held:
            array = cast("Any", node).get_value()
            if _is_readable(array):
                yield ".".join(map(str, path)), array


def _is_readable(array: Any) -> bool:
    """Return True for an array of floats that is not offloaded to the host."""
    if not isinstance(array, jax.Array) or isinstance(array, jax.core.Tracer) or array.is_deleted():
        return False
    return array.sharding.memory_kind != "pinned_host" and jnp.issubdtype(array.dtype, jnp.floating)


def _adjacent(axes: int) -> Iterator[tuple[int, ...]]:
    return (tuple(range(start, stop)) for start, stop in itertools.combinations(range(axes + 1), 2))


def _length(array: jax.Array, axes: tuple[int, ...]) -> int:
    return math.prod(array.shape[axis] for axis in axes)


def _hashes(array: jax.Array, axes: tuple[int, ...], most: int | None) -> UInt32[Array, "3 lines"]:
    """Return two hashes of each line along `axes`, and 1 if its values vary. `most` limits the lines."""
    with auto_axes(), explicit_transfers():
        array = with_auto_axes(array)
        mesh = array.sharding.mesh if isinstance(array.sharding, NamedSharding) else None
        return _compiled(axes, most, mesh)(array)


@functools.lru_cache(maxsize=256)
def _compiled(axes: tuple[int, ...], most: int | None, mesh: Mesh | None) -> Callable[..., Array]:
    """Return `_hash_lines` under `jax.jit`, with a result that every process holds."""
    where = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    return jax.jit(functools.partial(_hash_lines, axes, most), out_shardings=where)


def _hash_lines(axes: tuple[int, ...], most: int | None, array: Float[Array, "*axes"]) -> UInt32[Array, "3 lines"]:
    sizes = [array.shape[axis] for axis in axes]
    at = np.unique(np.linspace(0, math.prod(sizes) - 1, _VALUES).astype(int))
    index: list[Any] = [slice(None)] * array.ndim
    for axis, places in zip(axes, np.unravel_index(at, sizes), strict=True):
        index[axis] = places
    adjacent = max(axes) - min(axes) < len(axes)  # NumPy puts the axis of the values there, else first
    values = jnp.moveaxis(array[tuple(index)], min(axes) if adjacent else 0, 0).reshape(len(at), -1)
    if most is not None:
        values = values[:, np.unique(np.linspace(0, values.shape[1] - 1, most).astype(int))]
    bits = jax.lax.bitcast_convert_type(values.astype(jnp.bfloat16), jnp.uint16).astype(jnp.uint32)
    hashes = (bits[None] * _FACTORS[:, : len(at)]).sum(1, dtype=jnp.uint32)
    varied = (bits[1:] != bits[:-1]).sum(0, dtype=jnp.uint32) >= len(at) // 2
    return jnp.concatenate([hashes, varied[None].astype(jnp.uint32)])


def _joined(hashes: UInt32[np.ndarray, "3 lines"], varied: bool = False) -> UInt64[np.ndarray, "chosen"]:
    """Return the two hashes of each line as one, only of lines whose values vary if `varied`."""
    joined = hashes[0].astype(np.uint64) << np.uint64(32) | hashes[1]
    return joined[hashes[2] > 0] if varied else joined
