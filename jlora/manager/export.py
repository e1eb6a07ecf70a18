"""Read an adapter back from its slot, after training it there."""

from collections.abc import Mapping

import numpy as np
from flax import nnx

from jlora.adapters import Adapter, ModuleLoRA
from jlora.errors import LoRAError
from jlora.layers.site import Site
from jlora.manager.match import HostAdapter, Placement


def export(host: HostAdapter, slot: int, modules: Mapping[Site, nnx.Module]) -> Adapter:
    """The adapter that `slot` holds now, under the module names, ranks and alphas of `host`, in slot dtype."""
    return Adapter(
        name=host.name,
        modules={p.module: _read(host.name, p, slot, modules[p.site]) for p in host.placements},
        base_model_name=host.base_model_name,
        use_rslora=host.use_rslora,
    )


def _read(name: str, p: Placement, slot: int, layer: nnx.Module) -> ModuleLoRA:
    site, rank = p.site, p.a.shape[0]
    # A [(layers,) S, n, R, K] -> [n, R, K], B [(layers,) S, R, N] -> [R, N]
    where = (slot,) if site.spec.layers is None else (p.layer, slot)
    a, b = (np.asarray(getattr(layer, attribute)[...][where]) for attribute in site.attributes[:2])
    covered = a[p.first : p.first + p.count, :rank]
    if not all(np.array_equal(covered[0], other) for other in covered[1:]):
        raise LoRAError(
            f"adapter {name!r}: {p.module} is one factor A for {p.count} slices of {site.path!r}, and training made "
            "them differ; train with one module for each slice"
        )
    if p.scaling == 0:
        raise LoRAError(f"adapter {name!r}: {p.module} has scaling 0, so B cannot be read back from its slot")
    start = sum(site.spec.out_sizes[: p.first])
    stop = start + sum(site.spec.out_sizes[p.first : p.first + p.count])
    scaled = b[:rank, start:stop].astype(np.float32) / np.float32(p.scaling)
    return ModuleLoRA(
        a=np.array(covered[0]), b=scaled.T.astype(b.dtype), kind=site.kind, alpha=p.alpha, scaling=p.scaling
    )
