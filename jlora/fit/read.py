"""Preparation of a `PackedAdapter` from files or from an adapter in memory.

It runs on any thread without a lock and does not use the cache. The values of variants follow later
(`jlora.slots.values`).
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jlora.adapters import Adapter
from jlora.adapters.adapter import open_adapter
from jlora.adapters.lora import Layer
from jlora.adapters.resolve import AdapterFolder
from jlora.adapters.variants import described
from jlora.config import LoRAConfig, LoRARequest
from jlora.errors import AdapterMismatchError
from jlora.fit.base_weights import check_base_shapes, check_base_weights
from jlora.fit.effect import without_effect
from jlora.fit.names import SiteIndex
from jlora.fit.shapes import check_finite, describe, find_slices, own_experts, read_as
from jlora.layers.wrap.wrapped import WrappedModel
from jlora.slots.arrays import SlotArrays
from jlora.slots.blocks import Block
from jlora.slots.packed import PackedAdapter, SiteSlices, largest_rank
from jlora.slots.packing import pack_modules, rank_values

_log = logging.getLogger("jlora")


def pack_files(
    request: LoRARequest,
    found: AdapterFolder,
    wrapped: WrappedModel,
    index: SiteIndex,
    slot_arrays: SlotArrays[Any],
    *,
    config: LoRAConfig,
) -> tuple[PackedAdapter, tuple[str, ...]]:
    """Read the files of an adapter, pack it, and return it with the warnings about its modules.

    Names and shapes are checked before any tensor is read. If experts are divided over processes, only the experts on
    devices of this process are read (see `own_experts`).

    Raises:
      LoRAError: The adapter does not fit the model or the request, or its files are invalid.
    """
    where = describe(request.name, request.path)
    with open_adapter(found) as opened:
        adapter = opened.adapter  # not read yet
        check_variant(where, config, adapter)
        _check_request(where, request, adapter)
        index = read_as(where, adapter, index)
        slices_of = find_slices(where, adapter, index)
        check_base_shapes(where, adapter.base_weights, index)
        own = own_experts(adapter.modules, slices_of)
        adapter = opened.read(own, allow_nonfinite=config.allow_nonfinite)
    warnings = without_effect(adapter, slices_of, wrapped, own)
    layers, adapter = adapter.layers, adapter.with_layers({}).with_fingerprint(adapter.fingerprint)
    return _pack(where, adapter, layers, slices_of, warnings, wrapped, index, slot_arrays)


def pack_in_memory(
    adapter: Adapter,
    wrapped: WrappedModel,
    index: SiteIndex,
    slot_arrays: SlotArrays[Any],
    *,
    config: LoRAConfig,
    fresh: bool = False,
) -> tuple[PackedAdapter, tuple[str, ...]]:
    """Check and pack an adapter that is in memory, and return it with the warnings about its modules.

    A `fresh` adapter has no effect yet, and no warning says so.

    Raises:
      AdapterFormatError: A factor holds NaN or infinity, and `config.allow_nonfinite` is False.
      AdapterMismatchError: The adapter does not fit the model, or `config` does not serve its variants or aLoRA.
    """
    where = describe(adapter.name, None)
    check_variant(where, config, adapter)
    if not config.allow_nonfinite:  # files are checked while they are read
        check_finite(where, adapter)
    index = read_as(where, adapter, index)
    slices_of = find_slices(where, adapter, index)
    warnings = [] if fresh else without_effect(adapter, slices_of, wrapped)
    return _pack(where, adapter, adapter.layers, slices_of, warnings, wrapped, index, slot_arrays)


def pack_exactly(
    adapter: Adapter, wrapped: WrappedModel, index: SiteIndex, slot_arrays: SlotArrays[Any]
) -> tuple[Block, ...]:
    """Pack an adapter that fits the model into blocks of float32, whatever the dtype of the slots."""
    where = describe(adapter.name, None)
    slices_of = find_slices(where, adapter, read_as(where, adapter, index))
    chunks = [replace(chunk, spec=replace(chunk.spec, dtype="float32")) for chunk in slot_arrays.chunks]
    return pack_modules(where, adapter.layers, slices_of, wrapped, chunks)[1]


def check_variant(where: str, config: LoRAConfig, adapter: Adapter) -> None:
    """Raise AdapterMismatchError if `config` does not serve a variant of the adapter, or activated LoRA (aLoRA)."""
    needed = [
        (f"a {variant.title} adapter", f"variants=[{variant.name!r}]", f"--lora-variants {variant.name}")
        for variant in described(adapter.variants)
        if variant.name not in config.variants
    ]
    if adapter.invocation_tokens and not config.activated:
        needed.append(("an activated LoRA (aLoRA)", "activated=True", "--activated-loras"))
    for kind, option, flag in needed:
        raise AdapterMismatchError(f"{where} is {kind}; LoRAConfig({option}) serves it, or jlora serve {flag}")


def _check_request(where: str, request: LoRARequest, adapter: Adapter) -> None:
    """Raise AdapterMismatchError if the base model or the expert format differs from the request."""
    if request.base_model_name is not None and adapter.base_model_name != request.base_model_name:
        raise AdapterMismatchError(
            f"{where}: base_model_name_or_path is {adapter.base_model_name!r}, and the request asks for "
            f"{request.base_model_name!r}"
        )
    stacked = [name for name, module in adapter.modules.items() if module.kind == "experts"]
    if request.is_3d_lora_weight is not None and request.is_3d_lora_weight != bool(stacked):
        found = f"all experts of {stacked[0]} in one tensor" if stacked else "no tensor of all experts"
        raise AdapterMismatchError(
            f"{where}: the request says is_3d_lora_weight={request.is_3d_lora_weight}, and the file has {found}"
        )


def _pack(
    where: str,
    adapter: Adapter,
    layers: dict[str, Layer],
    slices_of: Mapping[str, SiteSlices],
    warnings: list[str],
    wrapped: WrappedModel,
    index: SiteIndex,
    slot_arrays: SlotArrays[Any],
) -> tuple[PackedAdapter, tuple[str, ...]]:
    """Cast and pack the layers of an adapter, and log and return its warnings.

    They are removed from `layers`, so that their memory is freed early.
    """
    warnings = [*check_base_weights(where, adapter.base_weights, wrapped, index), *warnings]
    placements, blocks = pack_modules(where, layers, slices_of, wrapped, slot_arrays.chunks)
    if warnings:
        _log.warning("%s: %s", where, "; ".join(warnings))
    about = replace(adapter.with_layers({}), base_weights={}, config=None).with_fingerprint(adapter.fingerprint)
    ranks = rank_values(slot_arrays.sites, placements)
    return PackedAdapter(about, placements, ranks, largest_rank(placements), blocks), tuple(warnings)
