"""Which experts of an adapter a process reads: those that its devices hold."""

from collections.abc import Mapping

from jlora.manager.fit import Shapes
from jlora.manager.names import Place


def own_experts(modules: Mapping[str, Shapes], placed: Mapping[str, Place]) -> dict[str, tuple[range, ...]]:
    """Module name -> the experts of it that are read, where those are not all: they lie on other processes' devices.

    Slots of float16 are filled from all experts: their largest values say how.
    """
    found: dict[str, tuple[range, ...]] = {}
    for name, (site, row, _, _) in placed.items():
        spec = site.spec
        if len(spec.own_shards) == spec.expert_shards or spec.dtype == "float16" or spec.experts is None:
            continue
        if modules[name].kind == "experts":
            found[name] = spec.own_experts
        elif not any(row % spec.experts in own for own in spec.own_experts):
            found[name] = ()
    return found
