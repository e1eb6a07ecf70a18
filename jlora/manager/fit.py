"""Does an adapter fit the model? Which site takes which of its modules, and what is refused, by shapes alone."""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from jlora.adapters import Adapter, BaseShape
from jlora.adapters.checkpoint import all_finite
from jlora.adapters.expert_formats import decide_exchanged
from jlora.adapters.lora import ExpertsLoRA
from jlora.adapters.shapes import ExpertsShapes
from jlora.errors import AdapterFormatError, AdapterMismatchError, LoRAError
from jlora.layers.site import Site
from jlora.manager.base_weights import misfits
from jlora.manager.names import Place, SiteIndex


@runtime_checkable
class Shapes(Protocol):
    """What is known of a module before its tensors are read."""

    @property
    def kind(self) -> str: ...
    @property
    def rank(self) -> int: ...
    @property
    def a_shape(self) -> tuple[int, ...]: ...
    @property
    def b_shape(self) -> tuple[int, ...]: ...


def describe(name: str, path: str | None) -> str:
    return f"adapter {name!r}" + (f" ({path})" if path else "")


def place(where: str, modules: Mapping[str, Shapes], index: SiteIndex) -> dict[str, Place]:
    """Module name -> its place; the first expert's row where it is of all experts.

    Raises:
      AdapterMismatchError: there is no module, a tensor that no module of the model takes, a rank above max_lora_rank,
        shapes that disagree with the model's, two modules for the same slice.
    """
    if not modules:
        raise AdapterMismatchError(f"{where} brings no LoRA weights: expected at least one module, found none")
    problems: list[str] = []
    too_large: dict[int, dict[str, int]] = {}  # max_lora_rank -> the modules of larger ranks
    placed: dict[str, Place] = {}
    taken: dict[tuple[Site, int, int], str] = {}
    for name, module in modules.items():
        if index.skips(name):
            continue
        found = index.find(module.kind, name)
        if isinstance(found, str):
            problems.append(f"{name}: {found}")
            continue
        site, row, first, count = found
        if module.rank > site.spec.max_rank:
            too_large.setdefault(site.spec.max_rank, {})[name] = module.rank
            continue
        if problem := _misfit(site, module, first, count):
            problems.append(f"{name}: {problem}")
            continue
        filled = ((site, r, i) for r in rows_of(module, site, row) for i in range(first, first + count))
        clash = next((place for place in filled if taken.setdefault(place, name) != name), None)
        if clash is not None:
            which = f"slice {clash[2]} of {site.path!r}"
            which += f" for expert {clash[1] % site.spec.experts}" if site.spec.experts else ""
            problems.append(f"{name}: fills {which}, which {taken[clash]} fills too")
            continue
        placed[name] = found
    refuse(where, [*map(too_large_rank, too_large.values(), too_large), *problems])
    if not placed:
        raise AdapterMismatchError(f"{where} brings weights for skipped modules only: nothing of it would be served")
    return placed


def rows_of(module: Shapes, site: Site, row: int) -> range:
    """The rows that a module fills, which has its place at `row`."""
    return range(row, row + (site.spec.experts or 1)) if module.kind == "experts" else range(row, row + 1)


def is_exchanged(where: str, module: ExpertsLoRA | ExpertsShapes, site: Site, first: int, count: int) -> bool:
    """Whether a module of all experts has in and out exchanged. Raises where that cannot be told, or sizes differ."""
    sizes = module.a_shape[2], module.b_shape[1]
    expected = site.spec.in_features, sum(site.spec.out_sizes[first : first + count])
    if module.exchanged is None:
        return decide_exchanged(sizes, expected, module.peft_version, where)
    if sizes != (expected[::-1] if module.exchanged else expected):
        raise AdapterMismatchError(f"A takes {sizes[0]} and B gives {sizes[1]}; {site.path!r} has {expected}")
    return module.exchanged


def too_large_rank(modules: Mapping[str, int], limit: int) -> str:
    """Return the message for modules (name -> rank) whose ranks are above a `max_lora_rank`."""
    largest = max(modules, key=modules.__getitem__)
    rank, which = (
        modules[largest],
        f"{largest!r}" if len(modules) == 1 else f"{len(modules)} modules, first {largest!r}",
    )
    return (
        f"rank {rank} is above max_lora_rank={limit} ({which}); raise it: LoRAConfig(max_lora_rank={rank}), or "
        f"jlora serve --max-lora-rank {rank}"
    )


def refuse(where: str, problems: list[str]) -> None:
    if problems:
        shown = problems[:8] + ([f"... and {len(problems) - 8} more"] if len(problems) > 8 else [])
        raise AdapterMismatchError(f"{where} does not fit this model:\n  " + "\n  ".join(shown))


def _misfit(site: Site, module: Shapes, first: int, count: int) -> str | None:
    if isinstance(module, ExpertsLoRA | ExpertsShapes):
        return _experts_misfit(site, module, first, count)
    rank, spec = module.rank, site.spec
    outputs = sum(spec.out_sizes[first : first + count])
    expected = ((rank, spec.in_features), (outputs, rank))
    found = (tuple(module.a_shape), tuple(module.b_shape))
    if found != expected:
        return f"A and B have shapes {found[0]} and {found[1]}, and {site.path!r} takes {expected[0]} and {expected[1]}"
    return None


def _experts_misfit(site: Site, module: ExpertsLoRA | ExpertsShapes, first: int, count: int) -> str | None:
    spec = site.spec
    for label, shape in (("A", module.a_shape), ("B", module.b_shape)):
        if shape[0] not in (1, spec.experts):
            return f"{label} is of {shape[0]} experts, and {site.path!r} has {spec.experts}"
    try:
        is_exchanged("", module, site, first, count)
    except LoRAError as error:
        return str(error).removeprefix(": ")
    return None


def check_finite(where: str, adapter: Adapter) -> None:
    """Raises AdapterFormatError for NaN and infinity."""
    for name, module in adapter.modules.items():
        for label, factor in (("A", module.a), ("B", module.b)):
            if not all_finite(factor):
                raise AdapterFormatError(
                    f"{where}: {name}: {label} holds NaN or infinity; expected finite numbers "
                    "(LoRAConfig.allow_nonfinite lets them through)"
                )


def check_base_shapes(where: str, weights: Mapping[str, BaseShape], index: SiteIndex) -> None:
    """Raises AdapterMismatchError where base weights of these shapes cannot be the model's own."""
    refuse(where, misfits(weights, index))


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
