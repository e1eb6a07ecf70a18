"""Read an adapter back from its slot, after training it there."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from flax import nnx

from jlora.adapters import Adapter, ModuleLoRA
from jlora.errors import LoRAError
from jlora.layers.site import Site
from jlora.manager.content import Content, Placement


def export(content: Content, slot: int, modules: Mapping[Site, nnx.Module]) -> Adapter:
    """The adapter that `slot` holds now, under the module names, ranks and alphas of `content`, in slot dtype."""
    about = content.about or Adapter(name=content.name, modules={})
    read = {p.module: _read(content.name, p, slot, modules[p.site]) for p in content.placements}
    return replace(about, modules=read, content=None)


def _read(name: str, p: Placement, slot: int, layer: nnx.Module) -> ModuleLoRA:
    spec = p.site.spec
    # A [(layers,) S, (E,) n, R, K] -> [n, R, K], B [(layers,) S, (E,) R, N] -> [R, N]
    index = tuple(map(int, np.unravel_index(p.row, spec.rows))) if spec.rows else ()
    where = (*index[: len(spec.stack)], slot, *index[len(spec.stack) :])
    a, b = (np.asarray(getattr(layer, attribute)[...][where]) for attribute in p.site.attributes[:2])
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
