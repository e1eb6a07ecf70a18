"""Checks of an adapter against the model by names, kinds, ranks and shapes, before its tensors are read."""

from collections.abc import Mapping

from jlora.adapters import Adapter, SavedHead
from jlora.adapters.lora import ExpertsLoRA, Layer, LoRA, tensors_of
from jlora.adapters.tensor_data import all_finite
from jlora.adapters.variants import described
from jlora.errors import AdapterFormatError, AdapterMismatchError, LoRAError
from jlora.fit.names import SiteIndex
from jlora.layers.site import Site
from jlora.slots.packed import SiteSlices
from jlora.slots.packing import entries_of, is_exchanged

_SHOWN = 8  # problems in one message


def describe(name: str, path: str | None) -> str:
    """Return the prefix of error messages about an adapter."""
    return f"adapter {name!r}" + (f" ({path})" if path else "")


def read_as(where: str, adapter: Adapter, index: SiteIndex) -> SiteIndex:
    """Return the index that finds the names of an adapter (`SiteIndex.read_as`)."""
    return index.read_as(where, [(layer.kind, name) for name, layer in adapter.layers.items()], adapter.task_type)


def find_slices(where: str, adapter: Adapter, index: SiteIndex) -> dict[str, SiteSlices]:
    """Return module name -> the slices that it fills, without modules that the model skips. No array is read.

    For a module of all experts, the entry is that of the first expert.

    Raises:
      AdapterMismatchError: The adapter has no module or only skipped ones, a module that the model lacks, a rank above
        max_lora_rank, shapes that differ from the model's, two modules for the same slice, or vectors of a module whose
        layer has no slots for them; or a saved head that saved_heads has no room for, of other features, or that has a
        bias where the layer has none, or none where it has one.
    """
    if not adapter.layers:
        raise AdapterMismatchError(f"{where} brings no LoRA weights: expected at least one module, found none")
    problems: list[str] = []
    too_large: dict[int, dict[str, int]] = {}  # max_lora_rank -> the modules of larger ranks
    too_small: dict[str, int] = {}  # path of a layer -> outputs of the saved head that it has no room for
    slices_of: dict[str, SiteSlices] = {}
    taken: dict[tuple[Site, int, int], str] = {}
    for name, layer in adapter.layers.items():
        if index.skips(name):
            continue
        found = index.find(layer.kind, name, hint=len(problems) < _SHOWN)
        if isinstance(found, str):
            problems.append(f"{name}: {found}")
            continue
        site, entry, first, count = found
        if unserved := [v.title for v in described(layer.vectors) if v not in site.spec.extras]:
            problems.append(f"{name}: {unserved[0]} is served for linear layers, and this is {_kind(site)}")
            continue
        if problem := _misfit(site, layer, first, count):
            problems.append(f"{name}: {problem}")
            continue
        if isinstance(layer, SavedHead) and (site.kind != "head" or layer.rank > site.spec.max_rank):
            too_small[site.path] = layer.rank
            continue
        if layer.rank > site.spec.max_rank:
            too_large.setdefault(site.spec.max_rank, {})[name] = layer.rank
            continue
        filled = ((site, r, i) for r in entries_of(layer, site, entry) for i in range(first, first + count))
        clash = next((own for own in filled if taken.setdefault(own, name) != name), None)
        if clash is not None:
            which = f"slice {clash[2]} of {site.path!r}"
            which += f" for expert {clash[1] % site.spec.experts}" if site.spec.experts else ""
            problems.append(f"{name}: fills {which}, which {taken[clash]} fills too")
            continue
        slices_of[name] = found
    no_room = [too_many_outputs(too_small, index.config.saved_heads or {})] if too_small else []
    refuse(where, [*no_room, *map(too_large_rank, too_large.values(), too_large), *problems])
    if not slices_of:
        raise AdapterMismatchError(f"{where} brings weights for skipped modules only: nothing of it would be served")
    return slices_of


def _head_misfit(site: Site, head: SavedHead) -> str | None:
    """Return why a saved head cannot replace the layer of its site, or None if it can."""
    if head.in_features != site.spec.in_features:
        return f"the saved head has {head.in_features} input features, and {site.path!r} has {site.spec.in_features}"
    if site.kind == "head" and head.biased != site.biased:
        return (
            f"the saved head has {'a' if head.biased else 'no'} bias, and {site.path!r} has "
            f"{'one' if site.biased else 'none'}"
        )
    return None


def _kind(site: Site) -> str:
    return "an embedding" if site.kind == "embedding" else "a product of experts"


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


def too_many_outputs(heads: Mapping[str, int], saved: Mapping[str, int]) -> str:
    """Return the message for saved heads (path of a layer -> outputs) that `saved_heads` has no room for."""
    option = {**saved, **heads}
    return (
        f"fully trained (modules_to_save): {', '.join(f'{path!r} with {n} outputs' for path, n in heads.items())}, and "
        f"LoRAConfig.saved_heads {f'is {dict(saved)}' if saved else 'has no room for it'}; "
        f"LoRAConfig(saved_heads={option}) serves it, or jlora serve --saved-heads "
        + " ".join(f"{name}={outputs}" for name, outputs in option.items())
    )


def refuse(where: str, problems: list[str]) -> None:
    """Raise AdapterMismatchError with the first `_SHOWN` problems, if there are any."""
    if problems:
        shown = problems[:_SHOWN] + ([f"... and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else [])
        error = AdapterMismatchError(f"{where} does not fit this model:\n  " + "\n  ".join(shown))
        error.problems = tuple(problems)
        raise error


def _misfit(site: Site, module: Layer, first: int, count: int) -> str | None:
    """Return how the shapes of a module differ from those of its slices, or None if they fit."""
    if isinstance(module, SavedHead):
        return _head_misfit(site, module)
    if isinstance(module, ExpertsLoRA):
        return _experts_misfit(site, module, first, count)
    rank, spec = module.rank, site.spec
    outputs = sum(spec.out_sizes[first : first + count])
    expected = ((rank, spec.in_features), (outputs, rank))
    shapes = (module.a.shape, module.b.shape)
    if shapes != expected:
        why = (
            f"A and B have shapes {shapes[0]} and {shapes[1]}, and {site.path!r} takes {expected[0]} and {expected[1]}"
        )
        own = module.b.shape[0]
        if shapes[0] == expected[0] and own < outputs and outputs % own == 0 and "attn" in site.path:
            why += f" (B has the rows of one head of {outputs // own}, as MaxText exports them: the others are lost)"
        if (shapes[0][0], shapes[1][1]) == (spec.in_features, outputs) and shapes[0][1] == shapes[1][0]:
            why += " (they are transposed: A is [rank, in] and B is [out, rank])"
        return why
    return None


def _experts_misfit(site: Site, module: ExpertsLoRA, first: int, count: int) -> str | None:
    spec = site.spec
    for label, shape in (("A", module.a.shape), ("B", module.b.shape)):
        if shape[0] not in (1, spec.experts):
            return f"{label} is of {shape[0]} experts, and {site.path!r} has {spec.experts}"
    try:
        is_exchanged("", module, site, first, count)
    except LoRAError as error:
        return str(error).removeprefix(": ")
    return None


def check_finite(where: str, adapter: Adapter) -> None:
    """Raise AdapterFormatError if an array holds NaN or infinity."""
    for name, layer in adapter.layers.items():
        for key, array in tensors_of(layer).items():
            if not all_finite(array):
                raise AdapterFormatError(
                    f"{where}: {name}.{key} holds NaN or infinity; expected finite numbers "
                    "(LoRAConfig.allow_nonfinite lets them through)"
                )


def own_experts(modules: Mapping[str, LoRA], slices_of: Mapping[str, SiteSlices]) -> dict[str, tuple[range, ...]]:
    """Return module name -> the experts to read, for modules with experts on devices of other processes.

    Modules that are read whole are left out: in int8, the scales of slots for shared factors depend on all experts.
    """
    found: dict[str, tuple[range, ...]] = {}
    for name, (site, entry, _, _) in slices_of.items():
        spec = site.spec
        if len(spec.own_shards) == spec.expert_shards or spec.experts is None:
            continue
        if modules[name].kind == "experts":
            if spec.dtype == "int8" and site.shared:
                continue
            found[name] = spec.own_experts
        elif not any(entry % spec.experts in own for own in spec.own_experts):
            found[name] = ()
    return found
