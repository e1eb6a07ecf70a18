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
from jlora.layers.coverage import Coverage
from jlora.layers.mesh import across_mesh, here
from jlora.layers.site import Site
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
_NOTHING: frozenset[Site] = frozenset()
_ARRAYS = (jax.Array, np.ndarray)


@runtime_checkable
class Served(Protocol):
    """What a lease must know of an adapter that it holds."""

    @property
    def name(self) -> str: ...

    @property
    def generation(self) -> int: ...

    @property
    def sites(self) -> frozenset[Site]: ...


class Trace:
    """The trace of a step that a batch was handed to, where it was the first.

    JAX gives that to every call whose static part is equal, also to one that comes from another thread while it is
    being made, when nobody knows yet what it will leave out. So a batch says whether it may take it (`Layout.__eq__`).

    Attributes:
      begun: whether there is one.
      left_out: the sites that it does not serve.
    """

    def __init__(self) -> None:
        self.begun = False
        self.left_out: frozenset[Site] = _NOTHING
        self._touched: frozenset[Site] = _NOTHING
        self._batch: Callable[[], LoRABatch | None] = lambda: None  # alive while the trace is being made

    def begin(self, batch: "LoRABatch", lease: "Lease | None") -> None:
        self._touched = _NOTHING if lease is None else lease.touched
        self._batch = weakref.ref(batch)
        self.begun = True

    def suits(self, other: "Layout") -> bool:
        """Whether a batch may take it, where there is one."""
        if not self.begun or (lease := _lease(other)) is None:
            return True
        if self._batch() is not None:  # it will serve what its own batch needs, or raise
            return lease.touched <= self._touched
        return lease.touched.isdisjoint(self.left_out)


class Lease:
    """Host state of one `prepare`: while it is open, the adapters of the batch keep their slots.

    Every copy of the batch holds it. It ends when one of them is closed, or when the last of them is gone.

    Attributes:
      adapters: the different adapters of the batch.
      touched: the sites that they bring weights for.
      generations: which generation each sequence is served from; None for the base model.
      opened: `time.monotonic()` at which it was opened.
      thread: identifier of the thread that opened it.
      where: the stack at which it was opened, if that is recorded.
      closed: whether it has ended.
      trace: of the step that the batch is handed to next, if that is its first.
    """

    __slots__ = (
        "__weakref__", "_on_close", "_unsure", "adapters", "closed", "generations", "opened", "thread", "touched",
        "trace", "where",
    )  # fmt: skip

    def __init__(
        self,
        adapters: Sequence[Served],
        generations: tuple[int | None, ...],
        thread: int,
        where: str | None = None,
        on_close: Callable[[], object] | None = None,
    ):
        self.adapters = tuple(adapters)
        self.generations = generations
        different = {adapter.sites for adapter in adapters}  # mostly one: equal ones are the same object
        self.touched = different.pop() if len(different) == 1 else _NOTHING.union(*different)
        self.thread = thread
        self.where = where
        self.opened = time.monotonic()
        self.closed = False
        self._on_close = on_close
        self.trace = Trace()
        self._unsure: tuple[int, frozenset[int]] = (-1, frozenset())

    def close(self) -> None:
        """Let the slots be given to other adapters. Closing twice is harmless."""
        self.closed = True
        if self._on_close is not None:
            self._on_close()

    def bringing(self, site: Site) -> list[str]:
        return [adapter.name for adapter in self.adapters if site in adapter.sites]

    def unsure(self, coverage: Coverage) -> frozenset[int]:
        """`coverage.unsure(self.touched)`, remembered: it is asked for at every step."""
        version = coverage.version
        if self._unsure[0] != version:
            self._unsure = (version, coverage.unsure(self.touched))
        return self._unsure[1]


@dataclass(frozen=True)
class Layout:
    """The static part of a batch: what a compiled function depends on. The lease is not, and is not compared.

    Attributes:
      coverage: of the model that the batch was prepared for.
      num_sequences: of the whole batch; one shard of it may have fewer `slots`.
      length: rows a sequence, where declared.
      unsure: groups of sites that its adapters touch and some traced function does not serve; see `Coverage`.
      absent: whether sequences lack their adapter.
      orphan: whether the batch came out of a traced function. Compared, so that a step is traced for it, and raises.
      lease: the lease of the batch that this describes. Weak, for compiled functions keep static parts for ever.
      traced: whether the arrays were being traced.
      trace: of a step that is traced for it.
    """

    coverage: Coverage
    num_sequences: int
    length: int | None = None
    unsure: frozenset[int] = frozenset()
    absent: bool = False
    orphan: bool = False
    lease: weakref.ref[Lease] | None = field(default=None, compare=False, repr=False)
    traced: bool = field(default=False, compare=False, repr=False)
    trace: Trace = field(default_factory=Trace, compare=False, repr=False)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Layout):
            return NotImplemented
        # Asked at every step.
        same = (
            self.coverage is other.coverage
            and self.num_sequences == other.num_sequences
            and self.length == other.length
            and self.unsure == other.unsure
            and self.absent == other.absent
            and self.orphan == other.orphan
        )
        return same and self.trace.suits(other) and other.trace.suits(self)


def _lease(layout: Layout) -> Lease | None:
    return None if layout.lease is None else layout.lease()


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
    def generations(self) -> tuple[int | None, ...]:
        """Which generation of its adapter each sequence is served from, None for the base model.

        A generation is one content of a name: what a cache of prefixes must key on beside the name.

        Raises:
          LoRAUsageError: inside a traced function, where it is not known.
        """
        if self.lease is None:
            raise LoRAUsageError(
                "LoRABatch.generations is known outside traced functions only; read it before the step"
            )
        return self.lease.generations

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
        if self.layout.orphan:
            raise LoRAError(_TRACED)
        if not isinstance(self.slots, jax.core.Tracer) and (self.lease is None or self.lease.closed):
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
        layout, lease = self.layout, self.lease
        # JAX and Flax pass what comes out of a function around; only its use is wrong. Shapes serve nobody.
        if not layout.orphan and isinstance(self.slots, _ARRAYS):
            self.check_usable()
        traced = isinstance(self.slots, jax.core.Tracer)
        if traced or lease is None:
            return (self.slots, self.token_slots, self.stamps), replace(layout, traced=traced, trace=Trace())
        if lease.trace.begun:
            lease.trace = Trace()
        unsure, trace = lease.unsure(layout.coverage), lease.trace
        if layout.traced or unsure != layout.unsure or trace is not layout.trace:
            layout = self.layout = replace(layout, unsure=unsure, traced=False, trace=trace)
        return (self.slots, self.token_slots, self.stamps), layout

    @classmethod
    def tree_unflatten(cls, layout: Layout, children: tuple[Any, Any, Any]) -> "LoRABatch":
        slots, token_slots, stamps = children
        traced = isinstance(slots, jax.core.Tracer)
        if layout.traced and not traced:
            layout = replace(layout, orphan=True, traced=False)
        # Traced arrays hold no lease, nor do shapes and whatever else JAX puts in their place: they may outlive the
        # call, in a cache of compiled functions.
        if traced or not isinstance(slots, _ARRAYS):
            batch = cls(slots, token_slots, stamps, layout, None)
            if traced:
                layout.trace.begin(batch, _lease(layout))
            return batch
        return cls(slots, token_slots, stamps, layout, _lease(layout))


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
    slots: np.ndarray,
    token_slots: np.ndarray | None,
    coverage: Coverage,
    lease: Lease,
    *,
    stamps: np.ndarray | None = None,
    length: int | None = None,
    absent: bool = False,
) -> LoRABatch:
    """Move a batch's int32 arrays to the device, or onto the mesh. Without `stamps` it takes any copy of the model."""
    stamps = np.zeros_like(slots) if stamps is None else stamps
    layout = Layout(coverage, slots.shape[0], length, absent=absent, lease=weakref.ref(lease), trace=lease.trace)
    arrays = [slots, stamps] if token_slots is None else [slots, stamps, token_slots]
    if coverage.sharding is None:
        placed = [to_device(array, coverage.device) for array in arrays]
    else:  # whole on all of the mesh, for a shard of rows then takes its own without being sent them
        placed = put(arrays, [coverage.sharding.whole] * len(arrays))
    return LoRABatch(placed[0], None if token_slots is None else placed[2], placed[1], layout, lease)


def renewed(batch: LoRABatch, lease: Lease) -> LoRABatch:
    """The arrays of `batch` under another lease of the same adapters."""
    layout = batch.layout
    layout = Layout(
        layout.coverage,
        layout.num_sequences,
        layout.length,
        absent=layout.absent,
        lease=weakref.ref(lease),
        trace=lease.trace,
    )
    return LoRABatch(batch.slots, batch.token_slots, batch.stamps, layout, lease)
