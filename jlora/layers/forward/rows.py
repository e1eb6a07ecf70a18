"""`RowMap` and `rows`: declare the sequence or token of each row of a layer if its shape cannot show them."""

import contextlib
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Integer

from jlora._compat import trace_state_clean
from jlora.errors import LoRAError, LoRAUsageError
from jlora.layers.forward.context import Opened, around, opening, tracing

_STALE = (
    "{path}: this RowMap was opened outside `jax.jit` and is read inside it: it would be baked into the compiled "
    "function as a constant and go stale. Open `with jlora.rows(jlora.RowMap(source)):` inside your jitted function, "
    "with `source` an argument of it"
)


@dataclass(frozen=True, eq=False)
class RowMap:
    """Map the rows of a layer to rows of the batch if no shape can, such as beams, image patches or sorted tokens.

    Attributes:
      source: integers [M], the index of the sequence (or token) of each row of the layer. Rows with an index outside
        the batch take no adapter.
      of: "sequences" if `source` indexes the batch's sequences, "tokens" for its tokens: packed rows, or [B, L]
        flattened. With `prepare(..., active_from=)` rows need tokens, unless `length` is 1 there.
      length: L, required for `of="tokens"` if rows are not packed and neither `prepare(..., length=)` nor [B, L] rows
        of an earlier layer define it. With 1, `source` indexes one row of each sequence, the last, also if rows are
        packed.
      expert: integers [M], the expert of each row of a product of experts; None elsewhere. Rows with an index of no
        expert (such as one on another shard) take no adapter.
      taken: integers [M], for a product that gathers (`ExpertsSpec.gathers`): the index of each row's input among the
        rows passed in. None if that is `source`. On a mesh the rows passed in may be a shard's own tokens.

    Raises:
      LoRAUsageError: `source`, `expert` or `taken` is no vector of integers, they differ in length, or `length` is not
        positive.
    """

    source: Integer[Array | np.ndarray, "M"]
    of: Literal["sequences", "tokens"] = "sequences"
    length: int | None = None
    expert: Integer[Array | np.ndarray, "M"] | None = None
    taken: Integer[Array | np.ndarray, "M"] | None = None
    # Represents this map in JAX's trace key, which would otherwise keep the map alive.
    trace_key: object = field(default_factory=object, init=False, repr=False)

    def __post_init__(self) -> None:
        source = jnp.asarray(self.source)
        if source.ndim != 1 or not jnp.issubdtype(source.dtype, jnp.integer):
            raise LoRAUsageError(
                f"RowMap.source must be a vector of integers, one for each row, got {source.dtype}{list(source.shape)}"
            )
        if self.of not in ("sequences", "tokens"):
            raise LoRAUsageError(f'RowMap.of must be "sequences" or "tokens", got {self.of!r}')
        length: object = self.length
        if length is not None and (isinstance(length, bool) or not isinstance(length, int) or length < 1):
            raise LoRAUsageError(f"RowMap.length must be a positive int, got {length!r}")
        # A narrow dtype would overflow in the comparison with the size of the batch.
        object.__setattr__(self, "source", source.astype(jnp.int32) if source.dtype.itemsize < 4 else source)
        for name in ("expert", "taken"):
            if getattr(self, name) is None:
                continue
            values = jnp.asarray(getattr(self, name))
            if values.shape != source.shape or not jnp.issubdtype(values.dtype, jnp.integer):
                raise LoRAUsageError(
                    f"RowMap.{name} must be integers {list(source.shape)}, one for each row of source, got "
                    f"{values.dtype}{list(values.shape)}"
                )
            object.__setattr__(self, name, values.astype(jnp.int32) if values.dtype.itemsize < 4 else values)


class _OpenRows(Opened):
    """An open row map.

    Attributes:
      row_map: the map; None for the rows of the batch.
      traced: True if it was opened inside of a JAX trace.
    """

    def __init__(self, row_map: RowMap | None):
        self.row_map = row_map
        self.traced = not trace_state_clean()
        # Eager calls may share compiled functions, as in `jlora.use`.
        super().__init__("jlora.rows", "batch" if row_map is None else row_map.trace_key if self.traced else "eager")


@contextlib.contextmanager
def rows(row_map: RowMap | None) -> Generator[None, None, None]:
    """Describe the rows of the wrapped layers called inside by `row_map`; None restores the rows of the batch.

    Open it inside the jitted function. A layer called inside with another number of rows than the map raises.

    Example:
      >>> with jlora.rows(jlora.RowMap(beam_parents)):  # row m continues sequence beam_parents[m]
      ...     y = self.mlp(x)

    Raises:
      LoRAUsageError: `row_map` is neither a `RowMap` nor None.
    """
    if row_map is not None and not isinstance(row_map, RowMap):
        raise LoRAUsageError(f"jlora.rows takes a RowMap or None, got {type(row_map).__name__}")
    with opening(_OpenRows(row_map)):
        yield


def current_rows(path: str) -> RowMap | None:
    """Return the open map, or None. Raises `LoRAError` inside a traced function if it was opened outside of it."""
    opened = next((each for each in around() if isinstance(each, _OpenRows)), None)
    if opened is None or opened.row_map is None:
        return None
    if not opened.traced and tracing():
        raise LoRAError(_STALE.format(path=path))
    return opened.row_map
