"""Which sequence each row of a layer is. Declared by the batch, or by a `RowMap`; never guessed from divisibility."""

import contextlib
import contextvars
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Int

from jlora.errors import LoRAUsageError


@dataclass(frozen=True, eq=False)
class RowMap:
    """Says which rows of the batch the rows of a layer are, where no shape can: beams, image patches, sorted tokens.

    Attributes:
      source: integers [M], for row m of the layer the index of the sequence (or token) that it belongs to. Rows with an
        index outside the batch take no adapter.
      of: whether `source` counts the batch's sequences, or its tokens: the packed rows, or [B, L] flattened.
      length: L, needed where `of="tokens"`, rows are not packed and neither `prepare(..., length=)` nor an earlier
        layer's [B, L] rows have said it.

    Raises:
      LoRAUsageError: `source` is no vector of integers.
    """

    source: Int[Array, "M"]
    of: Literal["sequences", "tokens"] = "sequences"
    length: int | None = None

    def __post_init__(self) -> None:
        source = jnp.asarray(self.source)
        object.__setattr__(self, "source", source)
        if source.ndim != 1 or not jnp.issubdtype(source.dtype, jnp.integer):
            raise LoRAUsageError(
                f"RowMap.source must be a vector of integers, one for each row, got {source.dtype}{list(source.shape)}"
            )
        if self.of not in ("sequences", "tokens"):
            raise LoRAUsageError(f'RowMap.of must be "sequences" or "tokens", got {self.of!r}')

    def slots(
        self, sequences: Int[Array, "B"], tokens: Int[Array, "T"] | None, lengths: frozenset[int], none: int
    ) -> Int[Array, "M"]:
        """The slot of each row; `none` for a row that is outside the batch."""
        table = sequences
        index = self.source
        if self.of == "tokens" and tokens is not None:
            table = tokens
        elif self.of == "tokens":
            known = {self.length} if self.length is not None else lengths
            if len(known) != 1:
                raise LoRAUsageError(
                    "RowMap(of='tokens') needs to know how many rows a sequence has: give RowMap(..., length=) or "
                    f"prepare(..., length=) (seen in this forward: {sorted(lengths) or 'none'})"
                )
            (length,) = known
            index = jnp.where(index >= 0, index // length, -1)
        inside = (index >= 0) & (index < table.shape[0])
        found = table.at[jnp.clip(index, 0, table.shape[0] - 1)].get(mode="promise_in_bounds")
        return jnp.where(inside, found, none).astype(jnp.int32)


_current: contextvars.ContextVar[RowMap | None] = contextvars.ContextVar("jlora_rows", default=None)


@contextlib.contextmanager
def rows(row_map: RowMap | None) -> Iterator[None]:
    """The wrapped layers called inside see the rows that `row_map` describes; None: those of the batch, as outside.

    Example:
      >>> with jlora.rows(jlora.RowMap(beam_parents)):  # row m continues sequence beam_parents[m]
      ...     y = self.mlp(x)
    """
    if row_map is not None and not isinstance(row_map, RowMap):
        raise LoRAUsageError(f"jlora.rows takes a RowMap or None, got {type(row_map).__name__}")
    token = _current.set(row_map)
    try:
        yield
    finally:
        _current.reset(token)


def current_rows() -> RowMap | None:
    return _current.get()
