"""Match the rows of one call of a layer to the row space of the layer.

Rows are declared by the space or by a `RowMap`. They are never guessed from divisibility.
"""

import math

import jax
import jax.core
from jaxtyping import Array

from jlora.errors import LoRAUsageError
from jlora.layers.forward.row_layout import RowLayout
from jlora.layers.forward.row_space import RowSpace
from jlora.layers.forward.rows import RowMap, current_rows
from jlora.layers.site import LAST, PACKED, SEQUENCES, Site

_FITS_BOTH = (
    "{path}: its rows of shape {shape} may be the {count} packed rows of this batch or rows of its {count} sequences. "
    "Declare the layers that get one row of each sequence, such as a head on the last tokens; all others get packed "
    "rows:\n"
    "    LoRAManager(..., row_groups={{{path!r}: 'last'}})\n"
    "    LoRAManager(..., row_groups={{'*': 'packed'}})  # if all layers get packed rows"
)
_MAP_IN_GROUP = (
    "{path}: this layer is of the row group {group!r}, and a jlora.rows map is open around it; use one of them: leave "
    "the module out of row_groups, or open jlora.rows(None) around it"
)
_POSITIONS_UNCLEAR = (
    "a sequence has rows of shape {between}, and `active_from` counts the rows of a sequence: expected {expected}. "
    "Say which of the batch's tokens other rows are with jlora.rows(jlora.RowMap(..., of='tokens')). Rows that are no "
    "tokens, such as an encoder's, are items: LoRAManager(..., row_groups={{module: 'audio'}}), and prepare(..., "
    "items=)"
)
_ROW_UNDER_VMAP = (
    "{path}: under jax.vmap, a row of each sequence may be any of those that `active_from` counts: give the tokens "
    "with jlora.rows(jlora.RowMap(..., of='tokens')), or call the layer outside of vmap"
)
_MAP_OF_SEQUENCES = (
    "{path}: a RowMap of sequences shows no positions, which `active_from` counts: give RowMap(..., of='tokens'), "
    "with {tokens}"
)
_MAP_OF_OTHER_LENGTH = (
    "{path}: RowMap(of='tokens', length={length}), and `active_from` counts {declared} rows of each sequence: give "
    "that length, or 1 for the last row of each"
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
      LoRAUsageError: the row map has another number of rows, is open around a layer of a row group, or as in
        `_map_positions`; it has `expert` but the layer is no product of experts, or it lacks `expert` for one; rows
        under `jax.vmap` could be those of one sequence or of all; undeclared rows could be packed rows or rows of
        sequences.
    """
    row_map = _open_map(site) if row_map is None else row_map
    if (site.spec.experts is not None) != (row_map is not None and row_map.expert is not None):
        raise LoRAUsageError(
            f"{site.path}: a RowMap with `expert` is for the products of experts, and needed there"
            + ("" if site.spec.experts is None else "; none was given")
        )
    if space.is_mapped and not _alike(space) and site.row_group in (None, PACKED):
        raise LoRAUsageError(
            f"{site.path}: under jax.vmap over a packed batch, a row may be a packed row or that of a sequence: call "
            "the layer outside of vmap"
        )
    if row_map is not None:
        if (total := math.prod(shape)) != row_map.source.shape[0]:
            raise LoRAUsageError(
                f"{site.path}: {total} rows of shape {shape}, and a RowMap of {row_map.source.shape[0]} rows"
            )
        return RowLayout(space, shape, _map_positions(space, site, row_map, lengths), row_map=row_map)
    if space.is_mapped:  # every row belongs to the one entry
        return _of_entries(space, shape, shape)
    count = space.entries.size
    if mapped and len(shape) == 1 and not lengths and (space.length is None or 1 < space.length == count == shape[0]):
        raise LoRAUsageError(
            f"{site.path}: under jax.vmap, {shape[0]} rows may be those of one sequence or of the whole batch. If "
            "each call is one sequence, map the batch too: jax.vmap(f, in_axes=(None, 0, 0))(model, tokens, "
            "batch), with `with jlora.use(batch):` inside f"
        )
    if space.packed is not None:
        return _in_packed(space, site, shape, mapped=mapped)
    if shape[:1] == (count,):
        return _of_sequences(space, site, shape, mapped=mapped)
    known = lengths if space.length is None else lengths | {space.length}
    if shape in {(count * length,) for length in known}:
        length = shape[0] // count
        return RowLayout(space, shape, length if space.differ else 1, length)
    return _misfit(space, site, shape)


def _open_map(site: Site) -> RowMap | None:
    """Return the row map that is open around a layer. A layer of a row group may have none."""
    row_map = current_rows(site.path)
    if row_map is not None and site.space != SEQUENCES:
        raise LoRAUsageError(_MAP_IN_GROUP.format(path=site.path, group=site.space))
    return row_map


def _alike(space: RowSpace) -> bool:
    """Return True if rows that fit two layouts have the same adapters in both."""
    return space.packed is None or space.one_each


def _in_packed(space: RowSpace, site: Site, shape: tuple[int, ...], *, mapped: bool) -> RowLayout | str:
    """Return the layout of rows in a packed batch: the packed rows, or rows of the sequences."""
    assert space.packed is not None
    packed, sequences, group = space.packed.size, space.entries.size, site.row_group
    as_packed = shape in ((packed,), (1, packed)) and group not in (LAST, SEQUENCES)
    as_sequences = shape[:1] == (sequences,) and group != PACKED
    if as_sequences and packed == sequences and group is None and not _alike(space) and shape != (1, packed):
        raise LoRAUsageError(_FITS_BOTH.format(path=site.path, shape=shape, count=packed))
    if as_packed:
        return RowLayout(space, shape, 0)
    return _of_sequences(space, site, shape, mapped=mapped) if as_sequences else _misfit(space, site, shape)


def _of_sequences(space: RowSpace, site: Site, shape: tuple[int, ...], *, mapped: bool) -> RowLayout | str:
    """Return the layout of rows [B, ...]."""
    if mapped and space.differ and space.length != 1 and shape[1:] in ((), (1,)):
        raise LoRAUsageError(_ROW_UNDER_VMAP.format(path=site.path))
    return _of_entries(space, shape, shape[1:])


def _misfit(space: RowSpace, site: Site, shape: tuple[int, ...]) -> str:
    """Return the reason why rows fit no layout, with the shapes that would."""
    sequences, group = space.entries.size, site.row_group
    packed = None if space.packed is None else space.packed.size
    if site.space != SEQUENCES:
        rows = f"[{sequences}, ..., features], one entry an item"
        rows = rows if packed is None else f"[{packed}, features], flattened"
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
        return _POSITIONS_UNCLEAR.format(between=between, expected=expected)
    positions = between[0] if space.differ and between else 1
    return RowLayout(space, shape, positions, math.prod(between), length=between[0] if len(between) == 1 else None)


def _map_positions(space: RowSpace, site: Site, row_map: RowMap, lengths: frozenset[int]) -> int:
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
            raise LoRAUsageError(_MAP_OF_SEQUENCES.format(path=site.path, tokens=tokens))
        return 1
    if space.packed is not None:
        packed, sequences = space.packed.size, space.entries.size
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
        raise LoRAUsageError(_MAP_OF_OTHER_LENGTH.format(path=site.path, length=found, declared=declared))
    return found


def only_rows_mapped(space: RowSpace, rows: Array) -> bool:
    """Return True if an enclosing `jax.vmap` maps `rows` and not the space."""
    return _is_mapped(rows) and not _is_mapped(space.entries.slots[0])


def _is_mapped(value: object) -> bool:
    """Return True if an enclosing `vmap` maps `value`. A `vmap` around an enclosing jit is not detected."""
    while _is_tracer(value):
        if type(value).__name__ == "BatchTracer":  # JAX does not export the class
            return True
        value = getattr(value, "primal", None)  # differentiated inside the vmap
    return False


def _is_tracer(value: object) -> bool:
    return isinstance(value, jax.core.Tracer)
