"""From the files of a request, or an adapter in memory, to a `Content`: checked, cast and packed. On any thread, with
no lock: the cache is not looked at here."""

from dataclasses import replace
from typing import TypeAlias

from jlora.adapters import Adapter, AdapterShapes
from jlora.adapters.adapter import open_adapter
from jlora.adapters.lora import LoRA
from jlora.adapters.resolve import AdapterFolder
from jlora.config import LoRARequest
from jlora.errors import AdapterMismatchError
from jlora.layers.wrapped import WrappedModel
from jlora.manager.content import Content
from jlora.manager.fit import check_base_shapes, check_finite, describe, fit, place, rank_vector
from jlora.manager.names import Place, SiteIndex
from jlora.manager.own import own_experts
from jlora.manager.pool import Pool

# An adapter that fits the model, its modules, and the place of each.
Checked: TypeAlias = tuple[Adapter, dict[str, LoRA], dict[str, Place]]


def read_files(request: LoRARequest, found: AdapterFolder, index: SiteIndex, *, allow_nonfinite: bool) -> Checked:
    """Read an adapter's files: of experts that are split over processes, those of this one's devices alone.

    What its shapes tell against it is found before a tensor is read.

    Returns:
      The adapter without its modules, these, and their places.
    """
    where = describe(request.name, request.path)
    with open_adapter(found) as opened:
        shapes = opened.shapes
        _check_request(where, request, shapes)
        placed = place(where, shapes.modules, index)
        check_base_shapes(where, shapes.base_weights, index)
        adapter = opened.read(own_experts(shapes.modules, placed), allow_nonfinite=allow_nonfinite)
    return replace(adapter, modules={}), dict(adapter.modules), placed


def _check_request(where: str, request: LoRARequest, shapes: AdapterShapes) -> None:
    """Raises AdapterMismatchError where an adapter is not what the request says of it."""
    if request.base_model_name is not None and shapes.base_model_name != request.base_model_name:
        raise AdapterMismatchError(
            f"{where}: base_model_name_or_path is {shapes.base_model_name!r}, and the request asks for "
            f"{request.base_model_name!r}"
        )
    stacked = [name for name, module in shapes.modules.items() if module.kind == "experts"]
    if request.is_3d_lora_weight is not None and request.is_3d_lora_weight != bool(stacked):
        found = f"all experts of {stacked[0]} in one tensor" if stacked else "no tensor of all experts"
        raise AdapterMismatchError(
            f"{where}: the request says is_3d_lora_weight={request.is_3d_lora_weight}, and the file has {found}"
        )


def check_in_memory(adapter: Adapter, index: SiteIndex, *, allow_nonfinite: bool) -> Checked:
    """Check an adapter that is in memory, and find the places of its modules."""
    where = describe(adapter.name, None)
    if not allow_nonfinite:  # files are looked at while they are read
        check_finite(where, adapter)
    placed = place(where, adapter.modules, index)
    return adapter, dict(adapter.modules), placed


def content_of(
    checked: Checked, request: LoRARequest | None, wrapped: WrappedModel, index: SiteIndex, pool: Pool
) -> Content:
    """Cast and pack the modules of an adapter, which are taken out of `checked`."""
    adapter, modules, placed = checked
    where = describe(adapter.name, None if request is None else request.path)
    rank = max(module.rank for module in modules.values())
    fitted = fit(where, modules, placed, adapter.base_weights, wrapped, index, pool.chunks)
    return Content(
        name=adapter.name,
        generation=0,
        placements=fitted.placements,
        blocks=fitted.blocks,
        ranks=rank_vector(pool.sites, fitted.placements),
        rank=rank,
        about=replace(adapter, modules={}, base_weights={}),
        request=None if request is None else replace(request, load_inplace=False),
        key=None if request is None else adapter.content,  # arrays in memory may differ from the files' by now
        in_place=request is not None and request.load_inplace,
    )
