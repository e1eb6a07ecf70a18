"""Write one adapter into one slot of every layer: packed on the host, moved once, written by one donated jit."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax import lax

from jlora.layers.slots import Site
from jlora.manager.match import Placement

# A, B and ranks of every site, in site order.
SlotArrays = list[tuple[jax.Array, jax.Array, jax.Array]]


@dataclass(frozen=True)
class Layout:
    """Where every site's block of one slot lies in the packed buffers: one buffer a dtype, and one of int32 ranks."""

    sites: tuple[Site, ...]
    starts: Mapping[Site, tuple[int, int, int]]
    sizes: Mapping[str, int]

    @property
    def nbytes(self) -> int:
        """Bytes of one slot over all layers."""
        return sum(size * np.dtype(dtype).itemsize for dtype, size in self.sizes.items())


def make_layout(sites: Sequence[Site]) -> Layout:
    sizes: dict[str, int] = {"int32": 0}
    starts = {}
    for site in sites:
        a = sizes.setdefault(site.dtype.name, 0)
        b = a + _size(site, site.a_shape)
        starts[site] = (a, b, sizes["int32"])
        sizes[site.dtype.name] = b + _size(site, site.b_shape)
        sizes["int32"] += _size(site, (len(site.out_sizes),))
    return Layout(tuple(sites), starts, sizes)


def _size(site: Site, shape: tuple[int, ...]) -> int:
    return int(np.prod((*site.stack, *shape)))


def pack(layout: Layout, placements: Sequence[Placement]) -> dict[str, np.ndarray]:
    """One slot's content over all layers. Ranks are zero-padded; what the adapter does not bring stays zero."""
    buffers = {dtype: np.zeros(size, dtype) for dtype, size in layout.sizes.items()}
    for p in placements:
        site = p.site
        start_a, start_b, start_ranks = layout.starts[site]
        flat = buffers[site.dtype.name]
        a = flat[start_a : start_a + _size(site, site.a_shape)].reshape(-1, *site.a_shape)
        b = flat[start_b : start_b + _size(site, site.b_shape)].reshape(-1, *site.b_shape)
        n = len(site.out_sizes)
        ranks = buffers["int32"][start_ranks : start_ranks + _size(site, (n,))].reshape(-1, n)
        rank, covered = p.a.shape[0], slice(p.first, p.first + p.count)
        first = sum(site.out_sizes[: p.first])
        a[p.layer, covered, :rank] = p.a
        b[p.layer, :rank, first : first + p.b.shape[1]] = p.b
        ranks[p.layer, covered] = rank
    return buffers


def make_write(layout: Layout, on_trace: Callable[[], None]) -> Callable[..., SlotArrays]:
    """`write(slots, buffers, slot)`: the slot arrays with one slot replaced. `slots` is donated, `slot` is traced."""

    def write(slots: SlotArrays, buffers: Mapping[str, jax.Array], slot: jax.Array) -> SlotArrays:
        on_trace()
        written = []
        for site, arrays in zip(layout.sites, slots, strict=True):
            shapes = (site.a_shape, site.b_shape, (len(site.out_sizes),))
            dtypes = (site.dtype.name, site.dtype.name, "int32")
            new = []
            for array, start, shape, dtype in zip(arrays, layout.starts[site], shapes, dtypes, strict=True):
                block = lax.slice(buffers[dtype], (start,), (start + _size(site, shape),))
                block = block.reshape(*site.stack, *shape)
                new.append(lax.dynamic_update_index_in_dim(array, block, slot, axis=len(site.stack)))
            written.append(tuple(new))
        return written

    return jax.jit(write, donate_argnums=0)
