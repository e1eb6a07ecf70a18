"""Map the rows of one call of a layer to a batch, and describe their sharding.

Rows are declared by the batch or by a `RowMap`. They are never guessed from divisibility. All functions here are pure
functions of shapes, declarations and the batch's arrays.
"""

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import jax
import jax.core
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Integer

from jlora.errors import LoRAUsageError
from jlora.layers.forward.batch import LoRABatch
from jlora.layers.forward.group_shape import SEQUENCES
from jlora.layers.forward.mesh import explicit_axes, here, manual_axes
from jlora.layers.forward.rows import RowMap, current_rows
from jlora.layers.site import Site
from jlora.sharding.rules import Names, names_of

RowKind: TypeAlias = RowMap | Literal["packed", "sequences"]


@dataclass(frozen=True)
class RowLayout:
    """How the rows of a call map to the entries of the batch.

    Attributes:
      kind: packed tokens in order, sequences in order, or a `RowMap`.
      shape: shape of the axes before the features.
      repeats: consecutive rows of each sequence; 1 for the other kinds.
      length: L if the rows are [B, L, features]; else None.
      positions: number of consecutive positions of a sequence among its rows; 1 for the other kinds.
    """

    kind: RowKind
    shape: tuple[int, ...]
    repeats: int = 1
    length: int | None = None
    positions: int = 1


@dataclass(frozen=True)
class RowSharding:
    """How the rows of a call are split over the mesh.

    Attributes:
      axes: the mesh axes that split each axis before the features; () off meshes.
    """

    axes: tuple[Names, ...] = ()

    @property
    def split(self) -> bool:
        """True if any axis of the rows is split."""
        return any(self.axes)

    @property
    def names(self) -> Names:
        """All mesh axes that split rows, in order."""
        return tuple(name for names in self.axes for name in names)


@dataclass(frozen=True)
class BatchSlots:
    """One adapter of each sequence of a batch.

    Attributes:
      sequences: int32 [B], the slot of each sequence.
      tokens: int32 [T], the slot of each packed row; None if rows are not packed.
      lengths: the possible numbers of tokens of a sequence, if rows are not packed: the declared one, else those seen
        so far.
      scales: float32 [B], the factor of each sequence; None if all are 1.
      token_scales: float32 [T], the factor of each packed row.
      active_from: int32 [B], the first active row of each sequence; None if all rows are active, or packed.
    """

    sequences: Int[Array, "B"]
    tokens: Int[Array, "T"] | None
    lengths: frozenset[int]
    scales: Float[Array, "B"] | None = None
    token_scales: Float[Array, "T"] | None = None
    active_from: Int[Array, "B"] | None = None


def layout_of(
    batch: LoRABatch,
    site: Site,
    shape: tuple[int, ...],
    lengths: frozenset[int],
    *,
    mapped: bool = False,
    row_map: RowMap | None = None,
) -> RowLayout | str:
    """Return the layout of the rows of a call, or the reason why they fit none.

    Args:
      batch: the batch of the scope.
      site: the site of the layer.
      shape: shape of the rows, the axes before the features.
      lengths: L of all rows [B, L, features] seen so far, under the same `vmap`.
      mapped: True if a `jax.vmap` maps the rows and not the batch.
      row_map: a map provided by the layer itself; None for the open one, if any.

    Raises:
      LoRAError: the open row map is a constant inside a traced function.
      LoRAUsageError: the row map has another number of rows; it has `expert` but the layer is no product of experts, or
        it lacks `expert` for one; or rows under `jax.vmap` could be those of one sequence or of all.
    """
    if row_map is None:
        row_map = current_rows(site.path)
    if (site.spec.experts is not None) != (row_map is not None and row_map.expert is not None):
        raise LoRAUsageError(
            f"{site.path}: a RowMap with `expert` is for the products of experts, and needed there"
            + ("" if site.spec.experts is None else "; none was given")
        )
    total = math.prod(shape)
    if row_map is not None:
        if total != row_map.source.shape[0]:
            raise LoRAUsageError(
                f"{site.path}: {total} rows of shape {shape}, and a RowMap of {row_map.source.shape[0]} rows"
            )
        return RowLayout(row_map, shape)
    if batch.slots.ndim == 0:  # the batch is mapped over its sequences, so every row belongs to this one
        if reason := _unclear_positions(batch, shape, lengths):
            return reason
        return RowLayout("sequences", shape, total, shape[0] if len(shape) == 1 else None, shape[0] if shape else 1)
    if batch.layout.length is not None:
        lengths |= {batch.layout.length}
    sequences = batch.slots.size
    packed = None if batch.token_slots is None else batch.token_slots.shape[0]
    match shape:
        case (rows,) if mapped and not lengths:
            raise LoRAUsageError(
                f"{site.path}: under jax.vmap, {rows} rows may be those of one sequence or of the whole batch. If "
                "each call is one sequence, map the batch too: jax.vmap(f, in_axes=(None, 0, 0))(model, tokens, "
                "batch), with `with jlora.use(batch):` inside f"
            )
        case (rows,) | (1, rows) if rows == packed:
            return RowLayout("packed", shape)
        case (first, *between) if between and first == sequences:
            if reason := _unclear_positions(batch, tuple(between), lengths):
                return reason
            length = between[0] if len(between) == 1 else None
            return RowLayout("sequences", shape, math.prod(between), length, between[0])
        case (rows,) if rows == sequences:
            return RowLayout("sequences", shape)
        case (rows,) if packed is None and rows in {sequences * length for length in lengths}:
            return RowLayout("sequences", shape, rows // sequences, positions=rows // sequences)
        case _:
            pass
    if site.row_group not in (None, SEQUENCES):
        rows = (
            f"[{sequences}, ..., features], one entry an item" if packed is None else f"[{packed}, features], flattened"
        )
        return (
            f"its rows of shape {shape} are not those of its row group {site.row_group!r} in this batch: expected "
            f"{rows}. Layers before and after a pooling are groups of their own, each with its group_counts"
        )
    tokens = f"{packed} packed tokens" if packed is not None else "a declared or seen length"
    return (
        f"its rows of shape {shape} fit no layout of this batch of {sequences} sequences: expected "
        f"[{sequences}, ..., features], one row a sequence [{sequences}, features], or {tokens} (declare flattened "
        "rows with prepare(..., length=), or say what they are with jlora.rows)"
    )


def _unclear_positions(batch: LoRABatch, between: tuple[int, ...], lengths: frozenset[int]) -> str | None:
    """Return the reason why the first axis after that of the sequences may not be their positions, else None.

    Without `active_from` all rows of a sequence are alike.
    """
    declared = batch.layout.length
    if batch.active_from is None or not between or (declared is None and len(between) == 1):
        return None
    known = lengths if declared is None else {declared}
    if between[0] in known:
        return None
    return (
        f"a sequence has rows of shape {between}, and `active_from` counts along the first of these axes, which should "
        f"have one of the sizes {sorted(known)} (declare it with prepare(..., length=), or say what the rows are with "
        "jlora.rows)"
    )


def only_rows_mapped(batch: LoRABatch, rows: Array) -> bool:
    """Return True if an enclosing `jax.vmap` maps `rows` and not the batch."""
    return _is_mapped(rows) and not _is_mapped(batch.slots)


def _is_mapped(value: object) -> bool:
    """Return True if an enclosing `vmap` maps `value`. A `vmap` around an enclosing jit is not detected."""
    while _is_tracer(value):
        if type(value).__name__ == "BatchTracer":  # JAX does not export the class
            return True
        value = getattr(value, "primal", None)  # differentiated inside the vmap
    return False


def _is_tracer(value: object) -> bool:
    return isinstance(value, jax.core.Tracer)


def row_sharding(batch: LoRABatch, site: Site, layout: RowLayout, rows: Float[Array, "*lead N"]) -> RowSharding:
    """Return how `rows` are split over the mesh of the layer.

    On Explicit mesh axes the type of `rows` determines it. Otherwise the axis of sequences (or of packed rows) is split
    over the data axes if its size is divisible by theirs.
    """
    sharding = site.spec.sharding
    if sharding is None:
        return RowSharding()
    count = len(layout.shape)
    mesh = jax.sharding.get_abstract_mesh()
    if explicit_axes(mesh):
        spec = (*jax.typeof(rows).sharding.spec, *[None] * rows.ndim)
        return RowSharding(tuple(names_of(entry) for entry in spec[:count]))
    if layout.kind == "packed":
        axis, size = count - 1, layout.shape[-1]
    elif layout.kind == "sequences" and batch.slots.ndim:
        axis, size = 0, batch.slots.size
    else:
        axis, size = None, 0
    data = tuple(name for name in sharding.data if name not in manual_axes(mesh))
    divided = axis is not None and size % sharding.size(data) == 0
    return RowSharding(tuple(data if divided and i == axis else () for i in range(count)))


def row_key(layout: RowLayout) -> Hashable:
    """Return the part of a cache key that tells how flattened rows map to the batch.

    The arrays of a row map are compared by identity. Keep the layout alive as long as the key.
    """
    kind: Hashable = layout.kind
    if isinstance(layout.kind, RowMap):
        kind = id(layout.kind.source), id(layout.kind.expert), layout.kind.of, layout.kind.length
    return kind, layout.repeats


def batch_slots(batch: LoRABatch, lengths: frozenset[int], adapter: int = 0) -> BatchSlots:
    """Return one adapter of each sequence of a batch, also inside of a shard.

    Args:
      batch: the batch.
      lengths: those seen so far, as in `BatchSlots`.
      adapter: index of the adapter among those of a sequence.
    """
    own, declared = batch.assigned[adapter], batch.layout.length
    arrays = own.slots, own.token_slots, own.scales, own.token_scales, batch.active_from
    slots, tokens, scales, token_scales, active_from = (
        None if array is None else here(array.reshape(-1)) for array in arrays
    )
    assert slots is not None
    known = lengths if declared is None else frozenset({declared})
    return BatchSlots(slots, tokens, known, scales, token_scales, active_from)


def slots_of(layout: RowLayout, slots: BatchSlots, none: int) -> Int[Array, "runs"]:
    """Return the slot of each run of rows, `none` for inactive rows and for rows of a map outside of the batch.

    A run is `layout.repeats` rows, and a single row if `slots.active_from` is set.
    """
    if layout.kind == "packed":
        assert slots.tokens is not None  # checked by `layout_of`
        return slots.tokens
    if layout.kind == "sequences":
        if slots.active_from is None:
            return slots.sequences
        if layout.repeats == 1 and layout.length is None:
            return _last_rows(slots, none)
        return jnp.repeat(_token_table(slots, layout.positions, none), layout.repeats // max(1, layout.positions))
    table, index = entries_of(layout.kind, slots, none)
    return _taken(table, index, none).astype(jnp.int32)


def slots_by_axes(layout: RowLayout, slots: BatchSlots, none: int) -> Int[Array, "..."]:
    """Return `slots_of` in the shape of the first axes of the rows. The slot is constant along the other axes."""
    found = slots_of(layout, slots, none)
    runs = layout.kind == "sequences" and layout.repeats > 1 and slots.active_from is None
    return found if runs else found.reshape(layout.shape)


def scales_of(layout: RowLayout, slots: BatchSlots) -> Float[Array, "..."] | None:
    """Return the factor of each row, in the shape of the rows; None if all are 1."""
    if slots.scales is None:
        return None
    if layout.kind == "packed":
        assert slots.token_scales is not None
        found = slots.token_scales
    elif layout.kind == "sequences":
        found = jnp.repeat(slots.scales, layout.repeats)
    elif layout.kind.of == "tokens" and slots.token_scales is not None:
        found = _taken(slots.token_scales, jnp.asarray(layout.kind.source), 1)
    else:
        index = jnp.asarray(layout.kind.source)
        index = index if layout.kind.of == "sequences" else index // _length(layout.kind, slots.lengths)
        found = _taken(slots.scales, index, 1)
    return found.reshape(layout.shape)


def entries_of(row_map: RowMap, slots: BatchSlots, none: int) -> tuple[Int[Array, "entries"], Integer[Array, "M"]]:
    """Return the slots of the sequences or tokens that a map indexes, and the index of each row among them."""
    index = jnp.asarray(row_map.source)
    if row_map.of == "sequences":
        return slots.sequences if slots.active_from is None else _last_rows(slots, none), index
    if slots.tokens is not None:
        return slots.tokens, index
    length = _length(row_map, slots.lengths)
    if slots.active_from is not None:
        return _token_table(slots, length, none), index
    return slots.sequences, index // length  # a negative index stays negative


def _token_table(slots: BatchSlots, length: int, none: int) -> Int[Array, "tokens"]:
    """Return the slot of each of the `length` tokens of every sequence, `none` before the first active one."""
    assert slots.active_from is not None
    active = jnp.arange(length, dtype=jnp.int32)[None] >= slots.active_from[:, None]
    return jnp.where(active, slots.sequences[:, None], none).astype(jnp.int32).reshape(-1)


def _last_rows(slots: BatchSlots, none: int) -> Int[Array, "B"]:
    """Return the slot of the last row of each sequence, `none` if it is not active."""
    assert slots.active_from is not None
    if len(slots.lengths) > 1:
        raise LoRAUsageError(
            "with `active_from`, one row a sequence is the last of its rows, and this forward has rows of several "
            f"lengths {sorted(slots.lengths)}: declare it with prepare(..., length=)"
        )
    (length,) = slots.lengths or {1}
    return jnp.where(slots.active_from < length, slots.sequences, none).astype(jnp.int32)


def _taken(table: Array, index: Array, other: int) -> Array:
    """Return `table[index]`, and `other` where the index is outside of the table."""
    inside = (index >= 0) & (index < table.shape[0])
    found = table.at[jnp.clip(index, 0, table.shape[0] - 1)].get(mode="promise_in_bounds")
    return jnp.where(inside, found, other)


def counted_rows(row_map: RowMap, slots: BatchSlots) -> int:
    """Return the size of the range that `source` indexes: the number of sequences or of tokens."""
    if row_map.of == "sequences":
        return slots.sequences.shape[0]
    if slots.tokens is not None:
        return slots.tokens.shape[0]
    return slots.sequences.shape[0] * _length(row_map, slots.lengths)


def _length(row_map: RowMap, lengths: frozenset[int]) -> int:
    known = lengths if row_map.length is None else {row_map.length}
    if len(known) != 1:
        raise LoRAUsageError(
            "RowMap(of='tokens') needs to know how many rows a sequence has: give RowMap(..., length=) or "
            f"prepare(..., length=) (seen in this forward: {sorted(lengths) or 'none'})"
        )
    (length,) = known
    return length
