"""Read an adapter back from its slot, after training it there."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from flax import nnx
from jaxtyping import Float

from jlora.adapters import Adapter, ModuleLoRA
from jlora.errors import LoRAError
from jlora.layers.site import Site
from jlora.manager.content import Content, Placement


def export(content: Content, slot: int, modules: Mapping[Site, nnx.Module]) -> Adapter:
    """The adapter that `slot` holds now, under the module names, ranks and alphas of `content`, in slot dtype."""
    about = content.about or Adapter(name=content.name, modules={})
    by_site: dict[Site, list[Placement]] = {}
    for p in content.placements:
        by_site.setdefault(p.site, []).append(p)
    read: dict[str, ModuleLoRA] = {}
    for site, placements in by_site.items():
        a, b = _slot(site, slot, modules[site])
        read |= {p.module: _module(content.name, p, a[p.row], b[p.row]) for p in placements}
    return replace(about, modules={p.module: read[p.module] for p in content.placements}, content=None)


def _slot(site: Site, slot: int, layer: nnx.Module) -> tuple[np.ndarray, np.ndarray]:
    """A [rows, n, R, K] and B [rows, R, N] of one slot, in one piece: to read many small ones takes long."""
    spec = site.spec
    where = (*(slice(None) for _ in spec.stack), slot)
    a, b = (np.asarray(getattr(layer, attribute)[...][where]) for attribute in site.attributes[:2])
    return a.reshape(-1, *a.shape[-3:]), b.reshape(-1, *b.shape[-2:])


def _module(name: str, p: Placement, a: Float[np.ndarray, "n R K"], b: Float[np.ndarray, "R N"]) -> ModuleLoRA:
    spec = p.site.spec
    covered = a[p.first : p.first + p.count, : p.rank]
    if not all(np.array_equal(covered[0], other) for other in covered[1:]):
        raise LoRAError(
            f"adapter {name!r}: {p.module} is one factor A for {p.count} slices of {p.site.path!r}, and training made "
            "them differ; train with one module for each slice"
        )
    if p.scaling == 0:
        raise LoRAError(f"adapter {name!r}: {p.module} has scaling 0, so B cannot be read back from its slot")
    start = sum(spec.out_sizes[: p.first])
    stop = start + sum(spec.out_sizes[p.first : p.first + p.count])
    unscaled = np.ldexp(b[: p.rank, start:stop].astype(np.float32), p.shift) / np.float32(p.scaling)
    return ModuleLoRA(
        a=np.ldexp(covered[0].astype(np.float32), -p.shift).astype(a.dtype) if p.shift else np.array(covered[0]),
        b=unscaled.T.astype(b.dtype),
        kind=p.site.kind,
        alpha=p.alpha,
        scaling=p.scaling,
    )
