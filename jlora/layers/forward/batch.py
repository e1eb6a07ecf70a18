"""`LoRABatch`: which adapter each sequence of a batch takes, as arrays, and the lease that keeps them in slots."""

import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from jlora._compat import to_device
from jlora.errors import LoRAError, LoRAUsageError
from jlora.layers.forward.batch_shape import BatchShape
from jlora.layers.forward.mesh import across_mesh, here
from jlora.layers.site import ModelSites, Site
from jlora.sharding.put import put

_CLOSED = "this LoRABatch is closed: its slots may hold other adapters now; prepare a new one"
_TRACED = (
    "this LoRABatch came out of a traced function, and JAX hands back the lease of the function's first call: which "
    "adapters its slots hold is not known. Use the batch that went in"
)
_COPY = (
    "{path}: this copy of the model was made before an adapter of the batch was written into its slot, and would serve "
    "what was there. The manager writes the model that it was given, and nothing else: call that one, or make the copy "
    "anew after prepare"
)
_JOINED = (
    "a LoRABatch of {sequences} sequences holds {rows} slots: batches that were put together (jax.tree.map with "
    "concatenate, stack or repeat) hold the lease of one of them. Prepare one batch of all sequences"
)
_ABSENT = (
    "this LoRABatch lacks adapters that were not ready: prepare(..., wait=False) says which sequences are ready. Drop "
    "the rows of the others, then say so with batch.drop_absent(); they would be served by the base model"
)
_ARRAYS = (jax.Array, np.ndarray)


@runtime_checkable
class Served(Protocol):
    """What a lease must know of an adapter that it holds."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> int: ...


class Lease:
    """Host state of one `prepare`: while it is open, the adapters of the batch keep their slots.

    Every copy of the batch holds it. It ends when one of them is closed, or when the last of them is gone.

    Attributes:
      adapters: the different adapters of the batch.
      versions: which version each sequence is served from; None for the base model.
      opened: `time.monotonic()` at which it was opened.
      thread: identifier of the thread that opened it.
      where: the stack at which it was opened, if that is recorded.
      closed: whether it has ended.
    """

    __slots__ = ("__weakref__", "_on_close", "adapters", "closed", "opened", "thread", "versions", "where")

    def __init__(
        self,
        adapters: Sequence[Served],
        versions: tuple[int | None, ...],
        thread: int,
        where: str | None = None,
        on_close: Callable[[], object] | None = None,
    ):
        self.adapters = tuple(adapters)
        self.versions = versions
        self.thread = thread
        self.where = where
        self.opened = time.monotonic()
        self.closed = False
        self._on_close = on_close

    def close(self) -> None:
        """Let the slots be given to other adapters. Closing twice is harmless."""
        self.closed = True
        if self._on_close is not None:
            self._on_close()


@dataclass(frozen=True)
class Layout:
    """The static part of a batch: what a compiled function depends on. The lease travels with it, uncompared.

    Attributes:
      sites: of the model that the batch was prepared for.
      num_sequences: of the whole batch; one shard of it may have fewer `slots`.
      unserved: the sites that serve no adapter.
      length: rows a sequence, where declared.
      absent: whether sequences lack their adapter.
      orphan: whether the batch came out of a traced function. A step is traced for it, and raises.
      lease: of the batch that this describes. Weak, for compiled functions keep static parts for ever. None in what
        comes out of a traced function.
    """

    sites: ModelSites
    num_sequences: int
    unserved: frozenset[Site]
    length: int | None = None
    absent: bool = False
    orphan: bool = False
    lease: weakref.ref[Lease] | None = field(default=None, compare=False, repr=False)


@jax.tree_util.register_pytree_node_class
class LoRABatch:
    """The adapters of one batch, made by `LoRAManager.prepare`: a pytree of small int32 arrays.

    Also a context manager: the adapters that it names stay in their slots until it closes. Copies (`jax.device_put`,
    `jax.tree.map`, `copy.copy`) hold the same lease: closing one closes all. What comes out of a traced function raises
    when it is used, and so does a batch with more rows than were prepared. Not supported: a batch whose rows are taken
    from several, by `jnp.where` say; it holds the lease of one of them.

    Attributes:
      slots: int32 [B], the slot of each sequence; `max_loras` for a sequence that takes no adapter.
      token_slots: int32 [T] or None, the same for each row of packed tokens, when token counts were given.
      stamps: int32 [B], the number of the write that brought the adapter of each sequence into its slot; 0 without.

    Mapped by `jax.vmap` over its sequences, a batch inside is one sequence with a scalar `slots`. Sharded over its
    sequences by `jax.shard_map`, a batch inside holds the sequences and packed rows of its own shard.
    """

    slots: Int[jax.Array, "B"]
    token_slots: Int[jax.Array, "T"] | None
    stamps: Int[jax.Array, "B"]

    def __init__(self, slots: Any, token_slots: Any, stamps: Any, layout: Layout, lease: Lease | None):
        self.slots = slots
        self.token_slots = token_slots
        self.stamps = stamps
        self.layout = layout
        self.lease = lease

    @property
    def has_adapters(self) -> bool:
        """Whether any sequence takes an adapter; always True inside a traced function, which must serve both.

        A step may run its base-only variant where none does, at no cost over the unwrapped model:
        `forward(model, tokens, batch if batch.has_adapters else None)`.
        """
        return True if self.lease is None else bool(self.lease.adapters)

    @property
    def versions(self) -> tuple[int | None, ...]:
        """Which version of its adapter each sequence is served from, None for the base model.

        A version is one content of a name: what a cache of prefixes must key on beside the name.

        Raises:
          LoRAUsageError: inside a traced function, where it is not known.
        """
        if self.lease is None:
            raise LoRAUsageError("LoRABatch.versions is known outside traced functions only; read it before the step")
        return self.lease.versions

    def close(self) -> None:
        """Give the slots back. Closing twice is harmless."""
        if self.lease is not None:
            self.lease.close()

    def drop_absent(self) -> "LoRABatch":
        """The same batch, for callers that drop the rows of the sequences which are not ready, or their results.

        Those rows are computed by the base model and mean nothing. See `LoRAManager.prepare(..., wait=False)`.
        """
        layout = self.layout
        return LoRABatch(self.slots, self.token_slots, self.stamps, replace(layout, absent=False), self.lease)

    def check_usable(self) -> None:
        """Raises `LoRAError` where the slots may hold other adapters than the batch names."""
        traced = isinstance(self.slots, jax.core.Tracer)
        if self.layout.orphan or not (traced or self.layout.lease):
            raise LoRAError(_TRACED)
        if not traced and (self.lease is None or self.lease.closed):
            raise LoRAError(_CLOSED)
        if self.slots.size > self.layout.num_sequences:
            raise LoRAError(_JOINED.format(sequences=self.layout.num_sequences, rows=self.slots.size))

    def __enter__(self) -> "LoRABatch":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __copy__(self) -> "LoRABatch":
        return LoRABatch(self.slots, self.token_slots, self.stamps, self.layout, self.lease)

    def __deepcopy__(self, memo: object) -> "LoRABatch":
        return self.__copy__()

    def __reduce__(self) -> Any:
        raise LoRAUsageError("a LoRABatch cannot be pickled: its slots mean something to its manager alone")

    def tree_flatten(self) -> tuple[tuple[Any, Any, Any], Layout]:
        slots, layout = self.slots, self.layout
        if isinstance(slots, jax.core.Tracer):
            # JAX keeps this for what a traced function returns, in every call of it.
            layout = replace(layout, lease=None)
        elif isinstance(slots, _ARRAYS) and not layout.orphan:
            # JAX and Flax pass an orphan around; only its use is wrong. Shapes serve no rows.
            self.check_usable()
        return (self.slots, self.token_slots, self.stamps), layout

    @classmethod
    def tree_unflatten(cls, layout: Layout, children: tuple[Any, Any, Any]) -> "LoRABatch":
        # Traced arrays hold no lease, nor do shapes and other stand-ins of JAX: they may outlive the call, in a cache
        # of compiled functions.
        if isinstance(children[0], jax.core.Tracer) or not isinstance(children[0], _ARRAYS):
            return cls(*children, layout, None)
        if layout.lease is None:
            return cls(*children, replace(layout, orphan=True), None)
        return cls(*children, layout, layout.lease())


def check_batch(batch: LoRABatch) -> None:
    """Raises `LoRAError` where `jlora.use` must not serve `batch`."""
    batch.check_usable()
    if batch.layout.absent:
        raise LoRAError(_ABSENT)


def check_copy(
    batch: LoRABatch, path: str, out: Float[Array, "*lead N"], stamps: Int[Array, "S"]
) -> Float[Array, "*lead N"]:
    """`out` of the stamped layer; NaN where that belongs to a copy of the model which missed a write of a slot.

    Inside a traced function nothing can raise when it runs. Called without one, this does.
    """

    def compare(out: Array, stamps: Array, slots: Array, needed: Array) -> Array:
        return jnp.where(_missed(stamps, slots, needed), jnp.nan, out)

    operands = stamps, here(batch.slots), here(batch.stamps)
    if any(isinstance(operand, jax.core.Tracer) for operand in (out, *operands)):
        return across_mesh(compare, out, *operands)
    if _missed(*operands):
        raise LoRAError(_COPY.format(path=path))
    return out


def _missed(stamps: Array, slots: Array, needed: Array) -> Array:
    return ((needed > 0) & (stamps.at[slots].get(mode="clip") != needed)).any()


def make_batch(
    slots: Sequence[int],
    shape: BatchShape,
    sites: ModelSites,
    lease: Lease,
    *,
    none: int,
    unserved: frozenset[Site],
    stamps: Sequence[int] | None = None,
    absent: bool = False,
) -> LoRABatch:
    """Make a batch, and move its int32 arrays to the device, or onto the mesh.

    Args:
      slots: of each sequence.
      shape: of the batch.
      sites: of the model.
      lease: on the adapters in these slots.
      none: the slot of rows that take no adapter.
      unserved: the sites that serve no adapter.
      stamps: of each sequence. None: the batch takes any copy of the model.
      absent: whether sequences lack their adapter.
    """
    of_sequences = np.array(slots, np.int32)
    of_tokens = shape.token_slots(of_sequences, none)
    of_writes = np.zeros_like(of_sequences) if stamps is None else np.array(stamps, np.int32)
    layout = Layout(sites, shape.num_sequences, unserved, shape.length, absent, lease=weakref.ref(lease))
    arrays = [of_sequences, of_writes] if of_tokens is None else [of_sequences, of_writes, of_tokens]
    if sites.sharding is None:
        placed = [to_device(array, sites.device) for array in arrays]
    else:  # whole on all of the mesh, for a shard of rows then takes its own without being sent them
        placed = put(arrays, [sites.sharding.whole] * len(arrays))
    return LoRABatch(placed[0], None if of_tokens is None else placed[2], placed[1], layout, lease)


def renewed(batch: LoRABatch, lease: Lease) -> LoRABatch:
    """The arrays of `batch` under another lease of the same adapters."""
    layout = replace(batch.layout, lease=weakref.ref(lease))
    return LoRABatch(batch.slots, batch.token_slots, batch.stamps, layout, lease)
