"""Map the rows of one call of a layer to a row space, and describe their sharding.

Rows are declared by the space or by a `RowMap`. They are never guessed from divisibility. All functions here are pure
functions of shapes, declarations and the arrays of the space.
"""

import math
from collections.abc import Hashable
from dataclasses import dataclass

import jax
import jax.core
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Integer

from jlora.errors import LoRAUsageError
from jlora.layers.forward.mesh import explicit_axes, here, manual_axes
from jlora.layers.forward.row_groups import LAST, OF_SEQUENCES, PACKED, SEQUENCES
from jlora.layers.forward.row_space import RowSpace
from jlora.layers.forward.rows import RowMap, current_rows
from jlora.layers.site import Site
from jlora.sharding.rules import Names, names_of


@dataclass(frozen=True)
class RowLayout:
    """How the rows of a call map to a row space.

    Attributes:
      shape: shape of the axes before the features.
      positions: 0 if the rows are packed rows, or if a map indexes those. Else the rows of each entry among the rows,
        or among those that a map indexes, that are told apart: 1 if all of them take the same adapters, or if there is
        only the last row of each entry.
      repeats: consecutive rows of each entry; 1 for packed rows and with a map.
      row_map: the map of the rows; None if they are in the order of the space.
      length: L if the rows are [B, L, features]; else None.
    """

    shape: tuple[int, ...]
    positions: int
    repeats: int = 1
    row_map: RowMap | None = None
    length: int | None = None

    @property
    def key(self) -> Hashable:
        """The part of a cache key that tells how flattened rows map to the space.

        The arrays of a row map are compared by identity. Keep the layout alive as long as the key.
        """
        arrays = None if self.row_map is None else (id(self.row_map.source), id(self.row_map.expert))
        return arrays, self.repeats, self.positions


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


_FITS_BOTH = (
    "{path}: its rows of shape {shape} may be the {count} packed rows of this batch or rows of its {count} sequences. "
    "Declare the layers that get one row of each sequence, such as a head on the last tokens; all others get packed "
    "rows:\n"
    "    LoRAManager(..., row_groups={{{path!r}: 'last'}})\n"
    "    LoRAManager(..., row_groups={{'*': 'packed'}})  # if all layers get packed rows"
)


def layout_of(
    space: RowSpace,
    site: Site,
    shape: tuple[int, ...],
    lengths: frozenset[int],
    *,
    mapped: bool = False,
    row_map: RowMap | None = None,
) -> RowLayout | str:
    """Return the layout of the rows of a call, or the reason why they fit none.

    Args:
      space: the row space of the layer.
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
    declared, sequences, group = space.length, space.size, site.row_group
    packed = None if space.by_row is None else space.by_row[0].size
    alike = packed is None or space.one_each  # rows that fit two layouts have the same adapters in both
    if space.is_mapped and not alike and group in (None, PACKED):
        raise LoRAUsageError(
            f"{site.path}: under jax.vmap over a packed batch, a row may be a packed row or that of a sequence: call "
            "the layer outside of vmap"
        )
    if row_map is not None:
        if (total := math.prod(shape)) != row_map.source.shape[0]:
            raise LoRAUsageError(
                f"{site.path}: {total} rows of shape {shape}, and a RowMap of {row_map.source.shape[0]} rows"
            )
        return RowLayout(shape, map_positions(space, site, row_map, lengths), row_map=row_map)
    if space.is_mapped:  # every row belongs to the one entry
        return _of_entries(space, shape, shape)
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
        return RowLayout(shape, 0)
    if as_sequences:
        if mapped and space.differ and declared != 1 and shape[1:] in ((), (1,)):
            raise LoRAUsageError(
                f"{site.path}: under jax.vmap, a row of each sequence may be any of those that `active_from` counts: "
                "give the tokens with jlora.rows(jlora.RowMap(..., of='tokens')), or call the layer outside of vmap"
            )
        return _of_entries(space, shape, shape[1:])
    known = lengths if declared is None else lengths | {declared}
    if packed is None and shape in {(sequences * length,) for length in known}:
        length = shape[0] // sequences
        return RowLayout(shape, length if space.differ else 1, length)
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


def _of_entries(space: RowSpace, shape: tuple[int, ...], between: tuple[int, ...]) -> RowLayout | str:
    """Return the layout of rows [B, *between], or the reason why their positions are not clear.

    If rows of an entry differ, they are all its rows, with their number as the first axis, or the last row.
    """
    declared = space.length
    if space.differ and between not in ((), (1,)) and between[0] != declared:
        expected = "the last row of each sequence alone"
        if declared is not None:
            expected += f", or its declared length {declared} as the first of these axes"
        return (
            f"a sequence has rows of shape {between}, and `active_from` counts the rows of a sequence: expected "
            f"{expected}. Say which of the batch's tokens other rows are with jlora.rows(jlora.RowMap(..., "
            "of='tokens')). Rows that are no tokens, such as an encoder's, are items: LoRAManager(..., row_groups="
            "{module: 'audio'}), and prepare(..., items=)"
        )
    positions = between[0] if space.differ and between else 1
    return RowLayout(shape, positions, math.prod(between), length=between[0] if len(between) == 1 else None)


def map_positions(space: RowSpace, site: Site, row_map: RowMap, lengths: frozenset[int]) -> int:
    """Return the number of rows of each entry among those that a map indexes; 0 if it indexes packed rows.

    Args:
      space: the row space of the layer.
      site: the site of the layer.
      row_map: the map.
      lengths: L of all rows [B, L, features] seen so far, under the same `vmap`.

    Raises:
      LoRAUsageError: the number is not known or contradicts the batch, or the map indexes sequences whose rows differ.
    """
    declared, length = space.length, row_map.length
    if row_map.of == "sequences":
        if space.differ and declared != 1:
            tokens = "the packed row of each" if declared is None else f"sequence * {declared} + its row"
            raise LoRAUsageError(
                f"{site.path}: a RowMap of sequences shows no positions, which `active_from` counts: give "
                f"RowMap(..., of='tokens'), with {tokens}"
            )
        return 1
    if space.by_row is not None:
        packed, sequences = space.by_row[0].size, space.size
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
    if space.differ and found not in (1, declared):
        raise LoRAUsageError(
            f"{site.path}: RowMap(of='tokens', length={found}), and `active_from` counts {declared} rows of each "
            "sequence: give that length, or 1 for the last row of each"
        )
    return found


def only_rows_mapped(space: RowSpace, rows: Array) -> bool:
    """Return True if an enclosing `jax.vmap` maps `rows` and not the space."""
    return _is_mapped(rows) and not _is_mapped(space.slots[0])


def _is_mapped(value: object) -> bool:
    """Return True if an enclosing `vmap` maps `value`. A `vmap` around an enclosing jit is not detected."""
    while _is_tracer(value):
        if type(value).__name__ == "BatchTracer":  # JAX does not export the class
            return True
        value = getattr(value, "primal", None)  # differentiated inside the vmap
    return False


def _is_tracer(value: object) -> bool:
    return isinstance(value, jax.core.Tracer)


def row_sharding(space: RowSpace, site: Site, layout: RowLayout, rows: Float[Array, "*lead N"]) -> RowSharding:
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
    if layout.row_map is not None or (layout.positions and space.is_mapped):
        axis, size = None, 0
    elif layout.positions:
        axis, size = 0, space.size
    else:
        axis, size = count - 1, layout.shape[-1]
    data = tuple(name for name in sharding.data if name not in manual_axes(mesh))
    divided = axis is not None and size % sharding.size(data) == 0
    return RowSharding(tuple(data if divided and i == axis else () for i in range(count)))


def entries_of(
    space: RowSpace, adapter: int, layout: RowLayout, none: int
) -> tuple[Int[Array, "entries"], Integer[Array, "M"] | None]:
    """Return the slots of one adapter that a layout reads, and the index of each row among them; None: in order."""
    index = None if layout.row_map is None else jnp.asarray(layout.row_map.source)
    if not layout.positions:
        assert space.by_row is not None  # checked by `layout_of`
        return _vector(space.by_row[adapter]), index
    slots = _vector(space.slots[adapter])
    if space.first is None:
        return slots, None if index is None else index // layout.positions  # a negative index stays negative
    length = space.length or 1
    positions = jnp.arange(length - layout.positions, length, dtype=jnp.int32)
    active = positions[None] >= _vector(space.first)[:, None]
    return jnp.where(active, slots[:, None], none).astype(jnp.int32).reshape(-1), index


def slots_of(space: RowSpace, adapter: int, layout: RowLayout, none: int) -> tuple[Int[Array, "runs"], int]:
    """Return the slot of each run of rows, and the number of rows of a run.

    The slot is `none` for inactive rows and for rows of a map outside of the space.
    """
    table, index = entries_of(space, adapter, layout, none)
    if index is not None:
        return _taken(table, index, none).astype(jnp.int32), 1
    if not layout.positions or space.first is None:
        return table, layout.repeats
    return jnp.repeat(table, layout.repeats // layout.positions), 1


def slots_by_axes(space: RowSpace, adapter: int, layout: RowLayout, none: int) -> Int[Array, "..."]:
    """Return `slots_of` in the shape of the first axes of the rows. The slot is constant along the other axes."""
    found, rows = slots_of(space, adapter, layout, none)
    return found if rows > 1 else found.reshape(layout.shape)


def scales_of(space: RowSpace, adapter: int, layout: RowLayout) -> Float[Array, "..."] | None:
    """Return the factor of each row, in the shape of the rows; None if all are 1."""
    if space.scales is None:
        return None
    of_rows = None if layout.positions else space.row_scales
    scales = _vector((of_rows or space.scales)[adapter])
    if layout.row_map is not None:
        scales = _taken(scales, jnp.asarray(layout.row_map.source) // max(1, layout.positions), 1)
    elif layout.positions:
        scales = jnp.repeat(scales, layout.repeats)
    return scales.reshape(layout.shape)


def _vector(array: Array) -> Array:
    """Return an array of a space as a vector, also under `vmap`, that can be used inside a `jax.shard_map`."""
    return here(array.reshape(-1))


def _taken(table: Array, index: Array, other: int) -> Array:
    """Return `table[index]`, and `other` where the index is outside of the table."""
    inside = (index >= 0) & (index < table.shape[0])
    found = table.at[jnp.clip(index, 0, table.shape[0] - 1)].get(mode="promise_in_bounds")
    return jnp.where(inside, found, other)
