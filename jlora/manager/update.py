"""Update of the weights of a served adapter, from host arrays, or from device arrays without a copy to the host."""

import collections
import copy
import difflib
import functools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jlora.adapters.checkpoint import sorted_keys
from jlora.adapters.peft_config import scaling_of
from jlora.adapters.tensor_data import all_finite
from jlora.errors import AdapterFormatError, AdapterMismatchError, LoRAUsageError
from jlora.manager.blocks import Block, Row, pack, unpack
from jlora.manager.casting import check_scaling, in_slot_dtype
from jlora.manager.packed_adapter import PackedAdapter, Placement, largest_rank
from jlora.manager.packing import rank_table
from jlora.manager.slot_arrays import SlotArrays
from jlora.manager.update_on_device import NewFactors, UpdatePlan, blocks_on_device, plan_update

_SHOWN = 4  # modules in a message
_shape_and_dtype = operator.attrgetter("shape", "dtype")


def updated(
    packed: PackedAdapter, arrays: Mapping[str, Any], pool: SlotArrays, *, allow_nonfinite: bool
) -> tuple[PackedAdapter, tuple[Block, ...]]:
    """Return (packed adapter with new weights, its blocks that changed). `packed` is not changed.

    Args:
      packed: The current packed adapter.
      arrays: PEFT tensor name -> A [r, K] or B [N, r]. A factor without a new array keeps its weights. The
        rank of a module can change if both of its factors are given. Its scaling is then computed from its alpha.
      pool: The slot arrays, whose chunks and sites are used.
      allow_nonfinite: True to accept NaN and infinity.

    Raises:
      LoRAUsageError: `arrays` is empty or not a mapping of names to arrays.
      AdapterMismatchError: The adapter lacks a named module, a shape or rank does not fit, the scaling of a new rank is
        not a finite float32, or slot dtype cannot hold a value of a host array.
      AdapterFormatError: An array is not a matrix of floats, or holds NaN or infinity. Device arrays with a value that
        slot dtype cannot hold raise it too.
    """
    where = f"adapter {packed.name!r}"
    if not isinstance(arrays, Mapping) or not arrays or not all(isinstance(name, str) for name in arrays):
        raise LoRAUsageError(f"{where}: expected a mapping of names to arrays, and at least one. {_taken(packed)}")
    names = tuple(arrays)
    on_device = any(isinstance(array, jax.Array) for array in arrays.values())
    try:
        shapes = list(map(_shape_and_dtype, arrays.values()))
    except AttributeError:  # `_check` raises the error with details
        shapes = []
    plan: UpdatePlan | None = packed.update_plan
    if on_device and plan is not None and plan.names == names and plan.shapes == shapes:
        written = blocks_on_device(where, plan, arrays, {}, allow_nonfinite)
        same = copy.copy(packed)  # modules and slots are the same
        same.blocks = (*_untouched(packed.blocks, plan.rows), *written)
        same.request = same.key = same.ahead = None
        same.on_host = same.copying = False
        same.warnings = ()
        return same, written
    had = {placement.module: placement for placement in packed.placements}
    try:
        parts = _parts(names, where, tuple(packed.saved_outputs))
    except AdapterMismatchError as error:
        raise AdapterMismatchError(f"{error}. {_taken(packed)}") from error
    news = [_check(where, had.get(module), packed, module, keys, arrays) for module, keys in parts.items()]
    changed = {new.placement.module: new for new in news}
    placements = tuple(changed[p.module].placement if p.module in changed else p for p in packed.placements)
    rows = {(new.placement.site, new.placement.row) for new in news}
    ranks: dict[Row, int] = {}
    for p in placements:
        ranks[p.site, p.row] = max(ranks.get((p.site, p.row), 0), p.rank)
    covered = collections.Counter[Row]()
    for new in news:
        p, spec = new.placement, new.placement.site.spec
        if (new.a is not None or not spec.in_features) and (new.b is not None or not spec.out_features):
            covered[p.site, p.row] += p.count
    old = unpack(packed.blocks, {row for row in rows if covered[row] < row[0].spec.slices})
    plan = None
    if on_device:
        plan = plan_update(names, shapes, news, old, ranks, pool)
        written = blocks_on_device(where, plan, arrays, old, allow_nonfinite)
        if old:  # the plan is not reusable, because the next update has other old factors
            plan = None
    else:
        written = _assemble_on_host(where, news, old, ranks, pool, allow_nonfinite)
    on_host = packed.on_host  # read before `blocks`, because a finished copy replaces `blocks` first
    kept: Sequence[Block] = _untouched(packed.blocks, rows)
    if not (on_device or on_host):
        kept = to_host(kept)
    new = replace(
        packed,
        placements=placements,
        blocks=(*kept, *written),
        ranks=rank_table(pool.sites, placements),
        rank=largest_rank(placements),
        request=None,
        key=None,
        on_host=not on_device,
        copying=False,
        ahead=None,
        update_plan=plan,
        warnings=(),
    )
    return new, written


def to_host(blocks: Sequence[Block]) -> tuple[Block, ...]:
    """Return the blocks with all arrays in host memory."""
    return tuple(replace(block, a=jax.device_get(block.a), b=jax.device_get(block.b)) for block in blocks)


@functools.lru_cache(maxsize=8)  # a training loop updates the same names every time
def _parts(names: tuple[str, ...], where: str, heads: tuple[str, ...]) -> Mapping[str, Mapping[str, str]]:
    return sorted_keys(names, where, heads)


def _taken(packed: PackedAdapter, module: str = "") -> str:
    """Return a sentence with the tensor names that an update takes, for the modules whose names are most like one."""
    modules = [placement.module for placement in packed.placements if placement.site.kind != "head"]
    near = difflib.get_close_matches(module, modules, n=_SHOWN) or modules[:_SHOWN]
    more = f" and {len(modules) - len(near)} more" if len(modules) > len(near) else ""
    return (
        "update_adapter takes the tensor names of PEFT's files, MODULE.lora_A.weight and MODULE.lora_B.weight "
        "(MODULE.lora_embedding_A and _B for an embedding), with or without the prefix base_model.model., where MODULE "
        f"is one of {', '.join(near)}{more}"
    )


def _check(
    where: str,
    placement: Placement | None,
    packed: PackedAdapter,
    module: str,
    parts: Mapping[str, str],
    arrays: Mapping[str, Any],
) -> NewFactors:
    """Check the new factors of one module against its placement.

    The result has the new rank and scaling. See `updated` for the errors.
    """
    at = f"{where}: {module}"
    if placement is None:
        raise AdapterMismatchError(f"{at}: the adapter has no such module. {_taken(packed, module)}")
    site = placement.site
    if site.kind == "head":
        raise AdapterMismatchError(
            f"{at}: a saved head is not changed by update_adapter; load the adapter anew with load_inplace=True"
        )
    names = ("lora_embedding_A", "lora_embedding_B") if site.kind == "embedding" else ("lora_A", "lora_B")
    halves = (site.spec.in_features, site.spec.out_features)
    held = [name for name, size in zip(names, halves, strict=True) if size]
    if unknown := parts.keys() - set(held):
        hint = "" if site.spec.whole else " (what all experts share has the name without the number of one)"
        raise AdapterMismatchError(f"{at}: expected {' and '.join(held)}, found {', '.join(sorted(unknown))}{hint}")
    a, b = (arrays[parts[name]] if name in parts else None for name in names)
    for label, array in (("A", a), ("B", b)):
        shaped = hasattr(array, "shape") and hasattr(array, "dtype")
        if array is not None and not (shaped and array.ndim == 2 and jnp.issubdtype(array.dtype, jnp.floating)):
            found = f"{array.dtype}{list(array.shape)}" if shaped else type(array).__name__
            raise AdapterFormatError(f"{at}: {label} must be a matrix of floats, found {found}")
    rank = placement.rank if a is None or b is None else a.shape[0]
    outputs = sum(site.spec.out_sizes[placement.first : placement.first + placement.count])
    for label, array, expected in (("A", a, (rank, site.spec.in_features)), ("B", b, (outputs, rank))):
        if array is not None and tuple(array.shape) != expected:
            raise AdapterMismatchError(f"{at}: {label} has shape {tuple(array.shape)}; expected {expected}")
    if not 1 <= rank <= site.spec.max_rank:
        raise AdapterMismatchError(f"{at}: rank {rank} is not from 1 to max_lora_rank={site.spec.max_rank}")
    if rank != placement.rank:
        scaling = scaling_of(placement.alpha, rank, packed.about is not None and packed.about.use_rslora)
        check_scaling(at, scaling)
        placement = replace(placement, rank=rank, scaling=scaling)
    return NewFactors(placement, a, b, tuple(parts[name] for name in names if name in parts))


def _untouched(blocks: Sequence[Block], rows: set[Row]) -> list[Block]:
    """Return the blocks of all other rows. Blocks that also hold some of `rows` are divided into blocks of one row."""
    kept: list[Block] = []
    for block in blocks:
        own = block.chunk.rows if block.row is None else (block.chunk.rows[block.row],)
        if not rows.intersection(own):
            kept.append(block)
        elif block.row is None:
            for i, row in enumerate(own):
                if row not in rows:
                    kept.append(Block(block.chunk, i, block.start, block.a[i : i + 1], block.b[i : i + 1]))
    return kept


def _assemble_on_host(
    where: str,
    news: Sequence[NewFactors],
    old: Mapping[Row, Any],
    ranks: Mapping[Row, int],
    pool: SlotArrays,
    allow_nonfinite: bool,
) -> tuple[Block, ...]:
    """Return the blocks of the rows that an update writes, assembled from new and old factors."""
    factors: dict[Row, tuple[np.ndarray, np.ndarray]] = {}
    for new in news:
        p, spec = new.placement, new.placement.site.spec
        row = (p.site, p.row)
        if row not in factors:
            a = np.zeros((spec.slices, ranks[row], spec.in_features), spec.dtype)
            b = np.zeros((ranks[row], spec.out_features), spec.dtype)
            if row in old:
                shared = min(ranks[row], old[row][1].shape[0])
                a[:, :shared], b[:shared] = old[row][0][:, :shared], old[row][1][:shared]
            factors[row] = (a, b)
        start = sum(spec.out_sizes[: p.first])
        stop = start + sum(spec.out_sizes[p.first : p.first + p.count])
        into = factors[row]
        own_a, own_b = into[0][p.first, : p.rank].copy(), into[1][: p.rank, start:stop].copy()
        for label, array in (("A", new.a), ("B", new.b)):
            if array is not None and not allow_nonfinite and not all_finite(np.asarray(array)):
                raise AdapterFormatError(f"{where}: {p.module}: {label} holds NaN or infinity; expected finite numbers")
        at, dtype = f"{where}: {p.module}", np.dtype(spec.dtype)
        if new.a is not None:
            own_a = in_slot_dtype(at, "A", np.asarray(new.a), dtype)
        if new.b is not None:
            own_b = in_slot_dtype(at, "B", np.asarray(new.b).T, dtype)
        covered = slice(p.first, p.first + p.count)
        into[0][covered], into[1][:, start:stop] = 0, 0
        into[0][covered, : p.rank], into[1][: p.rank, start:stop] = own_a, own_b
    return pack(pool.chunks, factors)
