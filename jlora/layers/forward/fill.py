"""Fill the row spaces of a batch on the host, from the slots of its sequences."""

import numpy as np
from jaxtyping import Float, Int

from jlora.layers.forward.batch_shape import BatchShape
from jlora.layers.forward.first_rows import packed_active
from jlora.layers.forward.row_space import RowSpace, Table
from jlora.layers.site import SEQUENCES


def fill_spaces(
    shape: BatchShape,
    slots: Int[np.ndarray, "k B"],
    stamps: Int[np.ndarray, "k B"],
    scales: Float[np.ndarray, "k B"] | None,
    *,
    none: int,
    one_each: bool,
) -> dict[str, RowSpace]:
    """Return the space of the sequences and of each row group of a batch, as NumPy arrays.

    Args:
      shape: the shape of the batch.
      slots: the slots of the k adapters of each sequence.
      stamps: their stamps.
      scales: their factors; None if the manager serves no factors.
      none: the slot of rows without an adapter.
      one_each: True if a packed batch of one row a sequence needs no table of rows.
    """

    def table_of(owners: Int[np.ndarray, "rows"]) -> Table:
        """Return the adapters of rows that belong to these sequences, or to none if -1."""
        of_scales = None if scales is None else tuple(np.where(owners < 0, np.float32(1), scales[:, owners]))
        return Table(tuple(np.where(owners < 0, np.int32(none), slots[:, owners])), of_scales)

    spaces: dict[str, RowSpace] = {}
    for group, items in shape.items:
        spaces[group] = RowSpace(table_of(items.row_owners()), one_each=items.counts is not None)
    counts, first, owners = shape.token_counts, shape.active_from, shape.row_owners()
    one_each, rows = one_each and shape.one_each, None
    if counts is not None and owners is not None:
        if first is not None:
            active, active_rows = packed_active(first, counts, owners)
            owners = np.where(active_rows, owners, -1)
            slots, stamps = np.where(active, slots, np.int32(none)), np.where(active, stamps, np.int32(0))
        rows = None if one_each else table_of(owners)
    spaces[SEQUENCES] = RowSpace(
        Table(tuple(slots), None if scales is None else tuple(scales)),
        rows,
        tuple(stamps),
        None if first is None or counts is not None else np.array(first, np.int32),
        shape.length,
        differ=first is not None,
        one_each=one_each,
    )
    return spaces
