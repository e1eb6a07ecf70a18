"""Values of slots for the vectors of variants (`jlora.adapters.variants`)."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float

from jlora._compat import explicit_transfers
from jlora.adapters.variants import VARIANTS, Variant
from jlora.errors import AdapterMismatchError, LoRAError
from jlora.layers.base_kernel import kernel_of
from jlora.layers.site import Site
from jlora.layers.specs import EmbedSpec, LinearSpec
from jlora.layers.variants.finisher import AdaptedWeight, Finisher
from jlora.layers.wrap.wrapped import WrappedModel, spec_of
from jlora.slots.blocks import Block, Entry, unpack
from jlora.slots.codec import B, outputs, to_stored
from jlora.slots.packed import PackedAdapter, Placement
from jlora.slots.placement import auto_axes, with_auto_axes

_FLOATS = ("bfloat16", "float16", "float32", "float64")


def check_layers(packed: PackedAdapter, wrapped: WrappedModel) -> None:
    """Check the layers of an adapter of variants before any value is computed.

    Raises:
      AdapterMismatchError: the bias of a layer is not known, or values follow from a base weight that is not of floats.
      LoRAError: a base weight was donated.
    """
    for p in packed.placements:
        for finisher in (each for each in p.site.spec.finishers if each.variant.name in p.extras):
            layer, spec = wrapped.modules[p.site], _linear(wrapped, p.site)
            where = f"adapter {packed.name!r}: {p.module}: {finisher.variant.title}"
            if (reason := _unknown_bias(layer, p.site, spec)) is not None:
                raise AdapterMismatchError(f"{where} is not served here: {reason}")
            if finisher.values is None:
                continue
            kernel = kernel_of(layer, spec)
            if kernel is None or not kernel.exact or jnp.dtype(kernel.dtype).name not in _FLOATS:
                found = "is not held by the layer" if kernel is None else f"is {kernel.array.dtype}"
                raise AdapterMismatchError(
                    f"{where} needs the base weight in floating point, and {p.site.path}.{spec.param} {found}"
                )
            if _kernel(layer, spec).is_deleted():
                raise _donated(p.site, spec, finisher.variant)


def refused_sites(wrapped: WrappedModel) -> frozenset[Site]:
    """Return the sites that `check_layers` refuses for any adapter of a variant, since their bias is not known."""
    found = ((site, layer) for site, layer in wrapped.modules.items() if site.spec.finishers)
    return frozenset(site for site, layer in found if _unknown_bias(layer, site, _linear(wrapped, site)) is not None)


def _donated(site: Site, spec: LinearSpec, variant: Variant) -> LoRAError:
    return LoRAError(
        f"{site.path}.{spec.param}: the parameter was donated; give it back to the model before a {variant.title} "
        "adapter is loaded"
    )


def _unknown_bias(layer: nnx.Module, site: Site, spec: LinearSpec) -> str | None:
    """Return why the bias in the output of a layer is not known, or None if it is."""
    if site.doubt is not None and site.prefix == "jlora":
        return f"{site.doubt.why}, so the bias in its output is not known; {site.doubt.instead}"
    if spec.bias is None:
        return None
    depth = math.prod(site.spec.stack)
    own: dict[str, Any] = vars(layer)
    sizes = {
        name: cast("Any", value).get_value().size for name, value in own.items() if isinstance(value, nnx.Variable)
    }
    if own.get(spec.bias) is not None:
        if sizes.get(spec.bias) == depth * spec.out_features:
            return None
        return f"{site.path}.{spec.bias} is no nnx.Variable of {spec.out_features} values"
    known = {spec.param, *site.attributes, site.stamps}
    other = [name for name, size in sizes.items() if name not in known and size == depth * spec.out_features]
    if not other:
        return None
    return (
        f"{site.path} has no attribute {spec.bias!r}, and {other[0]!r} may be its bias; name the bias in "
        "LinearSpec(bias=...), or None if its output has none"
    )


def _linear(wrapped: WrappedModel, site: Site) -> LinearSpec:
    spec = spec_of(wrapped.modules[site], site)
    return spec.head if isinstance(spec, EmbedSpec) else spec


def _kernel(layer: nnx.Module, spec: LinearSpec) -> jax.Array:
    return vars(layer)[cast("str", spec.param)].get_value()


def empty_values(sites: Sequence[Site]) -> dict[str, Float[np.ndarray, "values"]]:
    """Return name of a variant -> values of an empty slot, of all sites that hold it, one site after the other."""
    found: dict[str, np.ndarray] = {}
    for variant in VARIANTS.values():
        if sizes := [_size(site) for site in sites if variant in site.spec.extras]:
            found[variant.name] = np.full(sum(sizes), variant.fill, np.float32)
    return found


def slot_values(
    packed: PackedAdapter, wrapped: WrappedModel, sites: Sequence[Site]
) -> dict[str, Float[np.ndarray, "values"]]:
    """Return the values of a slot as `empty_values` does, for the variants of an adapter.

    On meshes of several processes, all compute the same values together.

    Raises:
      AdapterMismatchError: a value cannot be computed.
      LoRAError: a base weight was donated.
    """
    found: dict[str, np.ndarray] = {}
    for finisher in dict.fromkeys(f for p in packed.placements for f in p.site.spec.finishers):
        variant = finisher.variant
        by_entry: dict[Entry, list[Placement]] = {}
        for p in packed.placements:
            if variant.name in p.extras:
                by_entry.setdefault((p.site, p.entry), []).append(p)
        if not by_entry:
            continue
        holding = [site for site in sites if variant in site.spec.extras]
        found[variant.name] = empty_values(holding)[variant.name]
        views = np.split(found[variant.name], np.cumsum([_size(site) for site in holding])[:-1])
        of_site = {site: view.reshape(-1, site.spec.stored_out) for site, view in zip(holding, views, strict=True)}
        if finisher.values is None:
            entries = ((entry, _brought(variant, placements)) for entry, placements in by_entry.items())
        else:
            entries = _computed(packed, wrapped, finisher, by_entry)
        for (site, entry), own in entries:
            of_site[site][entry] = to_stored(own, site.spec, B, np, variant.fill)
    return found


def _size(site: Site) -> int:
    """Return the number of values of a variant in one slot of all layers of a site."""
    return math.prod((*site.spec.stack, site.spec.stored_out))


def _brought(variant: Variant, placements: Sequence[Placement]) -> Float[np.ndarray, "N"]:
    """Return the vectors of the modules of one entry, in the order of the adapter's features."""
    spec = placements[0].site.spec
    values = np.full(spec.out_features, variant.fill, np.float32)
    for p in placements:
        vector = p.extras[variant.name]
        values[outputs(spec, p.first, p.count)] = vector * np.float32(p.scaling) if variant.scaled else vector
    return values


def _computed(
    packed: PackedAdapter, wrapped: WrappedModel, finisher: Finisher, by_entry: Mapping[Entry, Sequence[Placement]]
) -> Iterator[tuple[Entry, Float[np.ndarray, "N"]]]:
    """Yield (entry, values in the order of the adapter's features) of `Finisher.values` for each of `by_entry`."""
    assert finisher.values is not None
    blocks: dict[int, list[Block]] = {}
    for block in packed.blocks:
        blocks.setdefault(id(block.chunk), []).append(block)
    for of_chunk in blocks.values():
        entries = [entry for entry in of_chunk[0].chunk.entries if entry in by_entry]
        for (site, entry), (a, b) in unpack(of_chunk, entries).items():
            spec, slot_spec = _linear(wrapped, site), site.spec
            scaled, modules = np.zeros(b.shape, np.float32), dict[str, tuple[slice, np.ndarray]]()
            for p in by_entry[site, entry]:
                columns = outputs(slot_spec, p.first, p.count)
                scaled[:, columns] = b[:, columns].astype(np.float32) * np.float32(p.scaling)
                modules[f"adapter {packed.name!r}: {p.module}"] = columns, p.extras[finisher.variant.name]
            slices = np.repeat(np.arange(slot_spec.slices, dtype=np.int32), slot_spec.out_sizes)
            own = a.astype(np.float32), scaled, slices, modules
            kernel = _kernel(wrapped.modules[site], spec)
            try:
                with auto_axes(), explicit_transfers():
                    kernel = with_auto_axes(kernel)
                    values = finisher.values(AdaptedWeight(kernel, spec, entry if slot_spec.stack else None, *own))
            except RuntimeError as error:
                if kernel.is_deleted():
                    raise _donated(site, spec, finisher.variant) from error
                raise
            yield (site, entry), values
