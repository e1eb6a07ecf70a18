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
from jlora.layers.forward.mesh import explicit_axes, here, manual_axes
from jlora.layers.forward.row_groups import LAST, OF_SEQUENCES, PACKED, SEQUENCES
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
      positions: for a `RowMap`, the rows of each sequence among those that it indexes, 0 for packed tokens. For
        sequences with first active rows, the number of their positions among the rows: all of them, or 1 for the last.
        Else 1.
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
      sequences: int32 [B], the slot of each sequence. In packed rows with first active rows, that of its last row.
      tokens: int32 [T], the slot of each packed row; None if rows are not packed.
      scales: float32 [B], the factor of each sequence; None if all are 1.
      token_scales: float32 [T], the factor of each packed row.
      active_from: int32 [B], the first active row of each sequence; None if all rows are active, or packed.
      length: the number of rows of each sequence that `active_from` counts; 1 without it.
    """

    sequences: Int[Array, "B"]
    tokens: Int[Array, "T"] | None
    scales: Float[Array, "B"] | None = None
    token_scales: Float[Array, "T"] | None = None
    active_from: Int[Array, "B"] | None = None
    length: int = 1


_FITS_BOTH = (
    "{path}: its rows of shape {shape} may be the {count} packed rows of this batch or rows of its {count} sequences. "
    "Declare the layers that get one row of each sequence, such as a head on the last tokens; all others get packed "
    "rows:\n"
    "    LoRAManager(..., row_groups={{{path!r}: 'last'}})\n"
    "    LoRAManager(..., row_groups={{'*': 'packed'}})  # if all layers get packed rows"
)


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
      LoRAUsageError: the row map has another number of rows, or as in `map_positions`; it has `expert` but the layer is
        no product of experts, or it lacks `expert` for one; rows under `jax.vmap` could be those of one sequence or of
        all; undeclared rows could be packed rows or rows of sequences.
    """
    if row_map is None:
        row_map = current_rows(site.path)
    if (site.spec.experts is not None) != (row_map is not None and row_map.expert is not None):
        raise LoRAUsageError(
            f"{site.path}: a RowMap with `expert` is for the products of experts, and needed there"
            + ("" if site.spec.experts is None else "; none was given")
        )
    declared, sequences, group = batch.layout.length, batch.slots.size, site.row_group
    packed = None if batch.token_slots is None else batch.token_slots.size
    alike = packed is None or batch.layout.one_each  # rows that fit two layouts have the same adapters in both
    if batch.slots.ndim == 0 and not alike and group in (None, PACKED):
        raise LoRAUsageError(
            f"{site.path}: under jax.vmap over a packed batch, a row may be a packed row or that of a sequence: call "
            "the layer outside of vmap"
        )
    if row_map is not None:
        if (total := math.prod(shape)) != row_map.source.shape[0]:
            raise LoRAUsageError(
                f"{site.path}: {total} rows of shape {shape}, and a RowMap of {row_map.source.shape[0]} rows"
            )
        return RowLayout(row_map, shape, positions=map_positions(batch, site, row_map, lengths))
    if batch.slots.ndim == 0:  # the batch is mapped over its sequences, so every row belongs to this one
        return _of_sequences(batch, shape, shape)
    if mapped and len(shape) == 1 and not lengths and (declared is None or 1 < declared == sequences == shape[0]):
        raise LoRAUsageError(
            f"{site.path}: under jax.vmap, {shape[0]} rows may be those of one sequence or of the whole batch. If "
            "each call is one sequence, map the batch too: jax.vmap(f, in_axes=(None, 0, 0))(model, tokens, "
            "batch), with `with jlora.use(batch):` inside f"
        )
    as_packed = shape in ((packed,), (1, packed)) and group not in (LAST, SEQUENCES)
    as_sequences = shape[:1] == (sequences,) and (packed is None or group != PACKED)
    if as_sequences and packed == sequences and group is None and not alike and shape != (1, packed):
        raise LoRAUsageError(_FITS_BOTH.format(path=site.path, shape=shape, count=packed))
    if as_packed:
        return RowLayout("packed", shape)
    if as_sequences:
        if mapped and batch.layout.activated and declared != 1 and shape[1:] in ((), (1,)):
            raise LoRAUsageError(
                f"{site.path}: under jax.vmap, a row of each sequence may be any of those that `active_from` counts: "
                "give the tokens with jlora.rows(jlora.RowMap(..., of='tokens')), or call the layer outside of vmap"
            )
        return _of_sequences(batch, shape, shape[1:])
    known = lengths if declared is None else lengths | {declared}
    if packed is None and shape in {(sequences * length,) for length in known}:
        length = shape[0] // sequences
        return RowLayout("sequences", shape, length, positions=length if batch.layout.activated else 1)
    if group is not None and group not in OF_SEQUENCES:
        rows = (
            f"[{sequences}, ..., features], one entry an item" if packed is None else f"[{packed}, features], flattened"
        )
        return (
            f"its rows of shape {shape} are not those of its row group {group!r} in this batch: expected "
            f"{rows}. Layers before and after a pooling are groups of their own, each with its Items"
        )
    expected = {
        PACKED: f"{packed} packed tokens",
        LAST: f"one row a sequence [{sequences}, features]",
        SEQUENCES: f"[{sequences}, ..., features]",
    }
    if packed is not None and group is not None:
        return f"its rows of shape {shape} are not {group!r}, as row_groups declares: expected {expected[group]}"
    tokens = expected[PACKED] if packed is not None else "a declared or seen length"
    return (
        f"its rows of shape {shape} fit no layout of this batch of {sequences} sequences: expected "
        f"[{sequences}, ..., features], one row a sequence [{sequences}, features], or {tokens} (declare flattened "
        "rows with prepare(..., length=), or say what they are with jlora.rows)"
    )


def _of_sequences(batch: LoRABatch, shape: tuple[int, ...], between: tuple[int, ...]) -> RowLayout | str:
    """Return the layout of rows [B, *between], or the reason why their positions are not clear.

    With first active rows they are all rows of each sequence, with their number as the first axis, or the last row.
    """
    declared, activated = batch.layout.length, batch.layout.activated
    if activated and between not in ((), (1,)) and between[0] != declared:
        expected = "the last row of each sequence alone"
        if declared is not None:
            expected += f", or its declared length {declared} as the first of these axes"
        return (
            f"a sequence has rows of shape {between}, and `active_from` counts the rows of a sequence: expected "
            f"{expected}. Say which of the batch's tokens other rows are with jlora.rows(jlora.RowMap(..., "
            "of='tokens')). Rows that are no tokens, such as an encoder's, are items: LoRAManager(..., row_groups="
            "{module: 'audio'}), and prepare(..., items=)"
        )
    length, positions = (between[0] if len(between) == 1 else None), (between[0] if activated and between else 1)
    return RowLayout("sequences", shape, math.prod(between), length, positions)


def map_positions(batch: LoRABatch, site: Site, row_map: RowMap, lengths: frozenset[int]) -> int:
    """Return the number of rows of each sequence among those that a map indexes; 0 if it indexes packed rows.

    Args:
      batch: the batch of the scope.
      site: the site of the layer.
      row_map: the map.
      lengths: L of all rows [B, L, features] seen so far, under the same `vmap`.

    Raises:
      LoRAUsageError: the number is not known or contradicts the batch, or the map indexes sequences whose rows differ.
    """
    declared, activated, length = batch.layout.length, batch.layout.activated, row_map.length
    if row_map.of == "sequences":
        if activated and declared != 1:
            tokens = "the packed row of each" if declared is None else f"sequence * {declared} + its row"
            raise LoRAUsageError(
                f"{site.path}: a RowMap of sequences shows no positions, which `active_from` counts: give "
                f"RowMap(..., of='tokens'), with {tokens}"
            )
        return 1
    if batch.token_slots is not None:
        packed, sequences = batch.token_slots.size, batch.slots.size
        if length == 1 and (packed > 1 or site.row_group in (LAST, SEQUENCES)):
            return 1
        if length not in (None, packed) or (length == 1 < sequences and site.row_group is None):
            raise LoRAUsageError(
                f"{site.path}: RowMap(of='tokens', length={length}) in a batch of {packed} packed rows of {sequences} "
                "sequences: leave length out if the map indexes packed rows"
            )
        return 0
    known = {length} if length is not None else lengths if declared is None else {declared}
    if len(known) != 1:
        raise LoRAUsageError(
            "RowMap(of='tokens') needs to know how many rows a sequence has: give RowMap(..., length=) or "
            f"prepare(..., length=) (seen in this forward: {sorted(lengths) or 'none'})"
        )
    (found,) = known
    if activated and found not in (1, declared):
        raise LoRAUsageError(
            f"{site.path}: RowMap(of='tokens', length={found}), and `active_from` counts {declared} rows of each "
            "sequence: give that length, or 1 for the last row of each"
        )
    return found


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
        kind = id(layout.kind.source), id(layout.kind.expert)
    return kind, layout.repeats, layout.positions


def batch_slots(batch: LoRABatch, adapter: int = 0) -> BatchSlots:
    """Return one adapter of each sequence of a batch, also inside of a shard.

    Args:
      batch: the batch.
      adapter: index of the adapter among those of a sequence.
    """
    own = batch.assigned[adapter]
    arrays = own.slots, own.token_slots, own.scales, own.token_scales, batch.active_from
    slots, tokens, scales, token_scales, active_from = (
        None if array is None else here(array.reshape(-1)) for array in arrays
    )
    assert slots is not None
    return BatchSlots(slots, tokens, scales, token_scales, active_from, batch.layout.length or 1)


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
        return jnp.repeat(_last_rows(slots, layout.positions, none), layout.repeats // layout.positions)
    table, index = entries_of(layout, slots, none)
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
    elif layout.positions:
        found = _taken(slots.scales, jnp.asarray(layout.kind.source) // layout.positions, 1)
    else:
        assert slots.token_scales is not None
        found = _taken(slots.token_scales, jnp.asarray(layout.kind.source), 1)
    return found.reshape(layout.shape)


def entries_of(layout: RowLayout, slots: BatchSlots, none: int) -> tuple[Int[Array, "entries"], Integer[Array, "M"]]:
    """Return the slots of the sequences or tokens that a map indexes, and the index of each row among them."""
    assert isinstance(layout.kind, RowMap)
    index = jnp.asarray(layout.kind.source)
    if not layout.positions:
        assert slots.tokens is not None
        return slots.tokens, index
    if slots.active_from is not None:
        return _last_rows(slots, layout.positions, none), index
    return slots.sequences, index // layout.positions  # a negative index stays negative


def _last_rows(slots: BatchSlots, count: int, none: int) -> Int[Array, "rows"]:
    """Return the slot of each of the last `count` rows of every sequence, `none` before the first active one."""
    assert slots.active_from is not None
    positions = jnp.arange(slots.length - count, slots.length, dtype=jnp.int32)
    active = positions[None] >= slots.active_from[:, None]
    return jnp.where(active, slots.sequences[:, None], none).astype(jnp.int32).reshape(-1)


def _taken(table: Array, index: Array, other: int) -> Array:
    """Return `table[index]`, and `other` where the index is outside of the table."""
    inside = (index >= 0) & (index < table.shape[0])
    found = table.at[jnp.clip(index, 0, table.shape[0] - 1)].get(mode="promise_in_bounds")
    return jnp.where(inside, found, other)
