"""`LoRABatch`: the adapter of each sequence of a batch as arrays, and the lease that keeps these adapters in slots."""

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
    """An adapter held by a lease."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> int: ...


class Lease:
    """Host state of one `prepare`. While it is open, the adapters of the batch keep their slots.

    It is shared by all copies of the batch, and ends when one of them is closed or when the last of them is collected.

    Attributes:
      adapters: the distinct adapters of the batch.
      versions: the adapter version of each sequence; None for the base model.
      opened: `time.monotonic()` when it was opened, in seconds.
      thread: identifier of the thread that opened it.
      where: the stack trace of the call that opened it, if recorded.
      closed: True once it has ended.
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
        """Release the slots for other adapters. Closing twice is harmless."""
        self.closed = True
        if self._on_close is not None:
            self._on_close()


@dataclass(frozen=True)
class Layout:
    """The static part of a batch, on which a compiled function depends. The lease is carried along but not compared.

    Attributes:
      sites: sites of the model that the batch was prepared for.
      num_sequences: sequences of the whole batch; one shard of it may have fewer `slots`.
      unserved: the sites that serve no adapter.
      length: rows of each sequence, if declared.
      absent: True if sequences lack their adapter.
      orphan: True if the batch was returned by a traced function. A step is traced for it and raises.
      lease: weak reference to the lease of the batch, since compiled functions keep static parts alive forever. None if
        the batch was returned by a traced function.
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

    It is also a context manager: its adapters stay in their slots until it closes. Copies (`jax.device_put`,
    `jax.tree.map`, `copy.copy`) share one lease, so closing one closes all. A batch returned by a traced function
    raises when it is used, and so does a batch with more rows than were prepared. Combining rows of several batches,
    for example with `jnp.where`, is not supported: the result holds only one of their leases.

    Attributes:
      slots: int32 [B], the slot of each sequence; `max_loras` for a sequence without an adapter.
      token_slots: int32 [T], the slot of each row of packed tokens; None without token counts.
      stamps: int32 [B], the number of the write that put each sequence's adapter into its slot; 0 for no check.

    Under `jax.vmap` over its sequences, the batch inside is one sequence with a scalar `slots`. Under `jax.shard_map`
    over its sequences, the batch inside holds the sequences and packed rows of its own shard.
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
        """True if any sequence takes an adapter; always True inside a traced function, which must serve both cases.

        Use it to run a base-only variant of a step, which costs no more than the unwrapped model: `forward(model,
        tokens, batch if batch.has_adapters else None)`.
        """
        return True if self.lease is None else bool(self.lease.adapters)

    @property
    def versions(self) -> tuple[int | None, ...]:
        """Version of the adapter of each sequence; None for the base model.

        A version identifies one content of an adapter name. Prefix caches must use both as their key.

        Raises:
          LoRAUsageError: inside a traced function, where the versions are unknown.
        """
        if self.lease is None:
            raise LoRAUsageError("LoRABatch.versions is known outside traced functions only; read it before the step")
        return self.lease.versions

    def close(self) -> None:
        """Release the slots. Closing twice is harmless."""
        if self.lease is not None:
            self.lease.close()

    def drop_absent(self) -> "LoRABatch":
        """Return the same batch, for callers that drop the rows or the results of sequences that are not ready.

        The base model computes those rows, so their results are meaningless. See `LoRAManager.prepare(...,
        wait=False)`.
        """
        layout = self.layout
        return LoRABatch(self.slots, self.token_slots, self.stamps, replace(layout, absent=False), self.lease)

    def check_usable(self) -> None:
        """Raise `LoRAError` unless the slots hold the adapters of the batch."""
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
            # JAX caches this layout for all calls of a traced function that returns the batch.
            layout = replace(layout, lease=None)
        elif isinstance(slots, _ARRAYS) and not layout.orphan:
            # Passing an orphan around is allowed. Only using it raises. Skip the check for ShapeDtypeStructs.
            self.check_usable()
        return (self.slots, self.token_slots, self.stamps), layout

    @classmethod
    def tree_unflatten(cls, layout: Layout, children: tuple[Any, Any, Any]) -> "LoRABatch":
        # Traced arrays, shapes and other placeholders of JAX get no lease, since a cache of compiled functions may keep
        # them after the call.
        if isinstance(children[0], jax.core.Tracer) or not isinstance(children[0], _ARRAYS):
            return cls(*children, layout, None)
        if layout.lease is None:
            return cls(*children, replace(layout, orphan=True), None)
        return cls(*children, layout, layout.lease())


def check_batch(batch: LoRABatch) -> None:
    """Raise `LoRAError` unless `jlora.use` may serve `batch`."""
    batch.check_usable()
    if batch.layout.absent:
        raise LoRAError(_ABSENT)


def check_copy(
    batch: LoRABatch, path: str, out: Float[Array, "*lead N"], stamps: Int[Array, "S"]
) -> Float[Array, "*lead N"]:
    """Return `out` of the stamped layer, or NaN if its copy of the model missed a write of a slot in the batch.

    A traced function cannot raise at run time, so it returns NaN. An eager call raises instead.

    Raises:
      LoRAError: in an eager call, the copy missed a write.
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
    """Return a batch with its int32 arrays on the device or the mesh.

    Args:
      slots: the slot of each sequence.
      shape: the shape of the batch.
      sites: the sites of the model.
      lease: the lease of the adapters in these slots.
      none: the slot of rows without an adapter.
      unserved: the sites that serve no adapter.
      stamps: the stamp of each sequence. None: every copy of the model is accepted.
      absent: True if sequences lack their adapter.
    """
    of_sequences = np.array(slots, np.int32)
    of_tokens = shape.token_slots(of_sequences, none)
    of_writes = np.zeros_like(of_sequences) if stamps is None else np.array(stamps, np.int32)
    layout = Layout(sites, shape.num_sequences, unserved, shape.length, absent, lease=weakref.ref(lease))
    arrays = [of_sequences, of_writes] if of_tokens is None else [of_sequences, of_writes, of_tokens]
    if sites.sharding is None:
        placed = [to_device(array, sites.device) for array in arrays]
    else:  # replicated over the mesh, so each shard of rows slices its own without communication
        placed = put(arrays, [sites.sharding.whole] * len(arrays))
    return LoRABatch(placed[0], None if of_tokens is None else placed[2], placed[1], layout, lease)


def renewed(batch: LoRABatch, lease: Lease) -> LoRABatch:
    """Return a batch with the arrays of `batch` under another lease of the same adapters."""
    old = batch.layout
    # `dataclasses.replace` takes 3 us, a tenth of a `prepare` of a known batch.
    layout = Layout(old.sites, old.num_sequences, old.unserved, old.length, old.absent, lease=weakref.ref(lease))
    return LoRABatch(batch.slots, batch.token_slots, batch.stamps, layout, lease)
