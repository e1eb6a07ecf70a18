"""From the files of a request, or an adapter in memory, to a `PackedAdapter`: opened, placed, read and packed. On any
thread, with no lock: the cache is not looked at here."""

from collections.abc import Mapping
from dataclasses import replace

from jlora.adapters import Adapter, AdapterShapes
from jlora.adapters.adapter import open_adapter
from jlora.adapters.lora import LoRA
from jlora.adapters.resolve import AdapterFolder
from jlora.config import LoRARequest
from jlora.errors import AdapterMismatchError
from jlora.layers.wrap.wrapped import WrappedModel
from jlora.manager.fit import check_base_shapes, check_finite, describe, own_experts, place
from jlora.manager.names import Place, SiteIndex
from jlora.manager.packed_adapter import PackedAdapter
from jlora.manager.packing import pack_modules, rank_vector
from jlora.manager.slot_arrays import SlotArrays


def pack_files(
    request: LoRARequest,
    found: AdapterFolder,
    wrapped: WrappedModel,
    index: SiteIndex,
    pool: SlotArrays,
    *,
    allow_nonfinite: bool,
) -> PackedAdapter:
    """Read an adapter's files, and pack it: of experts that are split over processes, those of this one's devices
    alone. What its shapes tell against it is found before a tensor is read.
    """
    where = describe(request.name, request.path)
    with open_adapter(found) as opened:
        shapes = opened.shapes
        _check_request(where, request, shapes)
        placed = place(where, shapes.modules, index)
        check_base_shapes(where, shapes.base_weights, index)
        adapter = opened.read(own_experts(shapes.modules, placed), allow_nonfinite=allow_nonfinite)
    modules, adapter = dict(adapter.modules), replace(adapter, modules={})
    return _pack(where, adapter, modules, placed, request, wrapped, index, pool)


def pack_in_memory(
    adapter: Adapter, wrapped: WrappedModel, index: SiteIndex, pool: SlotArrays, *, allow_nonfinite: bool
) -> PackedAdapter:
    """Check and pack an adapter that is in memory."""
    where = describe(adapter.name, None)
    if not allow_nonfinite:  # files are looked at while they are read
        check_finite(where, adapter)
    placed = place(where, adapter.modules, index)
    return _pack(where, adapter, dict(adapter.modules), placed, None, wrapped, index, pool)


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


def _pack(
    where: str,
    adapter: Adapter,
    modules: dict[str, LoRA],
    placed: Mapping[str, Place],
    request: LoRARequest | None,
    wrapped: WrappedModel,
    index: SiteIndex,
    pool: SlotArrays,
) -> PackedAdapter:
    """Cast and pack the modules of an adapter, which are taken out of `modules`: memory goes back meanwhile."""
    rank = max(module.rank for module in modules.values())
    placements, blocks = pack_modules(where, modules, placed, adapter.base_weights, wrapped, index, pool.chunks)
    return PackedAdapter(
        name=adapter.name,
        version=0,
        placements=placements,
        blocks=blocks,
        ranks=rank_vector(pool.sites, placements),
        rank=rank,
        about=replace(adapter, modules={}, base_weights={}),
        request=None if request is None else replace(request, load_inplace=False),
        key=None if request is None else adapter.fingerprint,  # arrays in memory may differ from the files' by now
        in_place=request is not None and request.load_inplace,
    )
