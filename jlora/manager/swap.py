"""Write one adapter into one slot of every layer: packed on the host, moved once, written by one donated jit."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax import lax

from jlora.layers.site import Site
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
        a = sizes.setdefault(site.spec.dtype, 0)
        b = a + _size(site, _a_shape(site))
        starts[site] = (a, b, sizes["int32"])
        sizes[site.spec.dtype] = b + _size(site, _b_shape(site))
        sizes["int32"] += _size(site, (len(site.spec.out_sizes),))
    return Layout(tuple(sites), starts, sizes)


def _a_shape(site: Site) -> tuple[int, ...]:
    return (site.spec.slices, site.spec.max_rank, site.spec.in_features)


def _b_shape(site: Site) -> tuple[int, ...]:
    return (site.spec.max_rank, site.spec.out_features)


def _size(site: Site, shape: tuple[int, ...]) -> int:
    return int(np.prod((*site.spec.stack, *shape)))


def pack(layout: Layout, placements: Sequence[Placement]) -> dict[str, np.ndarray]:
    """One slot's content over all layers. Ranks are zero-padded; what the adapter does not bring stays zero."""
    buffers = {dtype: np.zeros(size, dtype) for dtype, size in layout.sizes.items()}
    for p in placements:
        site = p.site
        start_a, start_b, start_ranks = layout.starts[site]
        flat = buffers[site.spec.dtype]
        a = flat[start_a : start_a + _size(site, _a_shape(site))].reshape(-1, *_a_shape(site))
        b = flat[start_b : start_b + _size(site, _b_shape(site))].reshape(-1, *_b_shape(site))
        n = len(site.spec.out_sizes)
        ranks = buffers["int32"][start_ranks : start_ranks + _size(site, (n,))].reshape(-1, n)
        rank, covered = p.a.shape[0], slice(p.first, p.first + p.count)
        first = sum(site.spec.out_sizes[: p.first])
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
            shapes = (_a_shape(site), _b_shape(site), (len(site.spec.out_sizes),))
            dtypes = (site.spec.dtype, site.spec.dtype, "int32")
            new = []
            for array, start, shape, dtype in zip(arrays, layout.starts[site], shapes, dtypes, strict=True):
                block = lax.slice(buffers[dtype], (start,), (start + _size(site, shape),))
                block = block.reshape(*site.spec.stack, *shape)
                new.append(lax.dynamic_update_index_in_dim(array, block, slot, axis=len(site.spec.stack)))
            written.append(tuple(new))
        return written

    return jax.jit(write, donate_argnums=0)
