"""`LoRABatch`: the adapter of each sequence of a batch as arrays, and the lease that keeps these adapters in slots."""

import time
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, TypeAlias, cast, runtime_checkable

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int, Shaped

from jlora._compat import to_device
from jlora.adapters.activation import NOWHERE, active_from
from jlora.errors import LoRAError, LoRAUsageError
from jlora.layers.forward.batch_shape import (
    LENGTH_NEEDED,
    BatchShape,
    FirstRows,
    checked_first_rows,
    checked_length,
)
from jlora.layers.forward.mesh import across_mesh, here
from jlora.layers.forward.row_groups import Items
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
_UNDECIDED = (
    "this LoRABatch holds activated LoRA (aLoRA) adapters and no first active rows: give prepare(..., active_from=) or "
    "batch.activate(first rows of this forward), each with `length`"
)
_GROUPS = (
    "LoRABatch.activate: this batch has the row groups {groups}, whose items take no adapter that is active from a "
    "later row on, and the first rows of a traced function are not known: activate the batch outside of it"
)
_ARRAYS = (jax.Array, np.ndarray)
_SHOWN = 8  # sequences in a repr


@runtime_checkable
class Served(Protocol):
    """An adapter held by a lease."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> int: ...


ServedParts: TypeAlias = tuple[tuple[str, int, float], ...]  # (name, version, factor) of the adapters of a sequence


class CacheKey(NamedTuple):
    """The identity of the results of a sequence.

    Attributes:
      adapters: (name, version, scale) of each adapter of the sequence, in the order of their sum.
      active_from: the first row of the forward that the adapters change; 0 if they change all.
      items: (row group, number of its items that the sequence owns), for groups with such items.
    """

    adapters: ServedParts
    active_from: int = 0
    items: tuple[tuple[str, int], ...] = ()


class Lease:
    """Host state of one `prepare`. While it is open, the adapters of the batch keep their slots.

    It is shared by all copies of the batch, and ends when one of them is closed or when the last of them is collected.

    Attributes:
      adapters: the distinct adapters of the batch.
      parts: for each sequence, (name, version, factor) of its adapters, in the order of their sum; () for the base
        model.
      invocations: `LoRABatch.invocation_tokens`; () if no adapter has any.
      shape: the shape of the batch; None if rows are neither packed, of a declared length, nor inactive.
      opened: `time.monotonic()` when it was opened, in seconds.
      thread: identifier of the thread that opened it.
      where: the stack trace of the call that opened it, if recorded.
      closed: True once it has ended.
    """

    __slots__ = (
        "__weakref__", "_on_close", "adapters", "closed", "invocations", "opened", "parts", "shape", "thread", "where"
    )  # fmt: skip

    def __init__(
        self,
        adapters: Sequence[Served],
        parts: Sequence[ServedParts],
        thread: int,
        where: str | None = None,
        on_close: Callable[[], object] | None = None,
        *,
        invocations: tuple[tuple[int, ...], ...] = (),
        shape: BatchShape | None = None,
    ):
        self.adapters = tuple(adapters)
        self.parts = parts
        self.invocations = invocations
        self.shape = shape
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
      activated: True if first active rows are given, so that rows of a sequence differ.
      one_each: True if packed row b is known to be the only row of sequence b, so that [T, features] and [B, features]
        of one shape are the same rows.
      undecided: True if there are aLoRA adapters, and the first active rows are not given.
      orphan: True if the batch was returned by a traced function. A step is traced for it and raises.
      lease: weak reference to the lease of the batch, since compiled functions keep static parts alive forever. None if
        the batch was returned by a traced function.
    """

    sites: ModelSites
    num_sequences: int
    unserved: frozenset[Site]
    length: int | None = None
    activated: bool = False
    one_each: bool = False
    undecided: bool = False
    orphan: bool = False
    lease: weakref.ref[Lease] | None = field(default=None, compare=False, repr=False)


class Assigned(NamedTuple):
    """One adapter of each sequence, as arrays.

    Attributes:
      slots: int32 [B], the slot of each sequence; `max_loras` for a sequence without an adapter.
      token_slots: int32 [T], the slot of each row of packed tokens; None without token counts.
      stamps: int32 [B], the number of the write that put each sequence's adapter into its slot; 0 for no check.
      scales: float32 [B], the factor of the adapter of each sequence; None if the manager serves no factors.
      token_scales: float32 [T], the factor of each row of packed tokens, likewise.
      groups: row group -> `slots` and `scales` of its items, or `token_slots` and `token_scales` of its flattened rows;
        None without groups.
    """

    slots: Any
    token_slots: Any
    stamps: Any
    scales: Any = None
    token_scales: Any = None
    groups: "dict[str, Assigned] | None" = None


@jax.tree_util.register_pytree_node_class
class LoRABatch:
    """The adapters of one batch, made by `LoRAManager.prepare`: a pytree of small arrays.

    It is also a context manager: its adapters stay in their slots until it closes. Copies (`jax.device_put`,
    `jax.tree.map`, `copy.copy`) share one lease, so closing one closes all. A batch returned by a traced function
    raises when it is used, and so does a batch with more rows than were prepared. Combining rows of several batches,
    for example with `jnp.where`, is not supported: the result holds only one of their leases.

    Attributes:
      assigned: the first adapter of each sequence, then the second of each, up to
        `LoRAConfig.max_adapters_per_sequence`.
      active_from: int32 [B], the first row of each sequence that takes its adapters, among the `layout.length` rows of
        this forward; None for all rows, and for packed rows, whose `token_slots` hold it.

    Under `jax.vmap` over its sequences, the batch inside is one sequence with a scalar `slots`. Under `jax.shard_map`
    over its sequences, the batch inside holds the sequences and packed rows of its own shard.
    """

    def __init__(self, assigned: Any, active_from: Any, layout: Layout, lease: Lease | None):
        self.assigned = assigned
        self.active_from = active_from
        self.layout = layout
        self.lease = lease

    @property
    def slots(self) -> Any:
        """Slot of the first adapter of each sequence, int32 [B]; `max_loras` for a sequence without one."""
        return self.assigned[0].slots

    @property
    def token_slots(self) -> Any:
        """Slot of the first adapter of each row of packed tokens, int32 [T]; None without token counts."""
        return self.assigned[0].token_slots

    @property
    def stamps(self) -> Any:
        """Number of the write that put the first adapter of each sequence into its slot, int32 [B]; 0 for no check."""
        return self.assigned[0].stamps

    @property
    def has_adapters(self) -> bool:
        """True if any sequence takes an adapter; always True inside a traced function, which must serve both cases.

        Use it to run a base-only variant of a step, which costs no more than the unwrapped model: `forward(model,
        tokens, batch if batch.has_adapters else None)`.
        """
        return True if self.lease is None else bool(self.lease.adapters)

    @property
    def versions(self) -> tuple[int | tuple[int, ...] | None, ...]:
        """Version of the adapter of each sequence: a tuple for several adapters, None for the base model.

        A version identifies one content of an adapter name.

        Raises:
          LoRAUsageError: inside a traced function, where the versions are unknown.
        """
        versions = (tuple(version for _, version, _ in parts) for parts in self._host_state().parts)
        return tuple(None if not each else each[0] if len(each) == 1 else each for each in versions)

    @property
    def cache_keys(self) -> tuple[Hashable | None, ...]:
        """Key of the results of each sequence, for prefix caches; None for rows of the base model alone.

        A key holds the names, versions and factors of the adapters, the first active row of this forward, and the
        number of items of each row group that the sequence owns. Rows with equal keys, equal tokens and equal positions
        have equal results, if the forward begins with the first token of the sequence. For a later chunk, add the first
        active token of the prompt (`jlora.active_from`) to the key. If a sequence owns some of the items that it reads
        and not others, add which. If all declared rows (`token_counts`, `length`) of a sequence precede the first
        active one, they are those of the base model, and the key is None.

        Raises:
          LoRAUsageError: inside a traced function, where the keys are unknown; the batch has activated LoRA adapters
            and no first active rows (`needs_activation`).
        """
        lease = self._host_state()
        if self.layout.undecided:
            raise LoRAUsageError(_UNDECIDED)
        shape = lease.shape or BatchShape(len(lease.parts))
        first = shape.active_from if self.active_from is None else jax.device_get(self.active_from).tolist()
        rows = shape.token_counts or (self.layout.length,) * len(lease.parts)
        keys: list[CacheKey | None] = []
        for i, parts in enumerate(lease.parts):
            start, count = 0 if first is None else first[i], rows[i]
            inactive = not parts or (count is not None and start >= count > 0)
            items = tuple((group, owned) for group, given in shape.items if (owned := given.owners.count(i)))
            keys.append(None if inactive else CacheKey(parts, start, items))
        return tuple(keys)

    def _host_state(self) -> Lease:
        if self.lease is None:
            raise LoRAUsageError(
                "the versions, cache_keys and invocation_tokens of a LoRABatch are known outside traced functions "
                "only; read them before the step"
            )
        return self.lease

    def close(self) -> None:
        """Release the slots. Closing twice is harmless."""
        if self.lease is not None:
            self.lease.close()

    @property
    def invocation_tokens(self) -> tuple[tuple[int, ...], ...]:
        """Invocation tokens of the aLoRA adapter of each sequence; () for other adapters and the base model.

        Raises:
          LoRAUsageError: inside a traced function, where they are unknown.
        """
        lease = self._host_state()
        return lease.invocations or ((),) * len(lease.parts)

    @property
    def needs_activation(self) -> bool:
        """True if there are aLoRA adapters and `prepare` was not given their first active rows; see `activate`."""
        return self.layout.undecided

    @property
    def can_activate(self) -> bool:
        """True if `activate` is possible: the manager has `LoRAConfig(activated=True)`, and rows are not packed."""
        return self.layout.sites.activated and self.token_slots is None

    def activate(self, first_rows: FirstRows, *, length: int | None = None) -> "LoRABatch":
        """Return the same batch for another forward, as `prepare(..., active_from=first_rows, length=length)` would.

        It shares the lease, and may be called inside a traced function. It is for rows that are not packed.

        Args:
          first_rows: integers [B], the first row of each sequence in that forward that takes its adapter; 0 for all
            rows, and `jlora.NOWHERE`, or any value above it, for none. Traced values below 0 count as 0.
          length: rows of each sequence in that forward, padding included. It is required.

        Raises:
          LoRAUsageError: the manager has no `LoRAConfig(activated=True)`, the rows are packed, the shape differs, a
            value is no integer or negative, `length` is missing or not positive, or a sequence that owns items of a row
            group has another first row than 0. Inside a traced function, the batch has row groups.
        """
        if not self.can_activate:
            raise LoRAUsageError("LoRABatch.activate needs LoRAConfig(activated=True), and rows that are not packed")
        if length is None:
            raise LoRAUsageError(LENGTH_NEEDED.format(call="batch.activate(first_rows"))
        length = checked_length("LoRABatch.activate: length", length)
        groups, shape = self.assigned[0].groups, self.slots.shape
        traced = isinstance(first_rows, jax.core.Tracer)
        if groups and (traced or self.lease is None):
            raise LoRAUsageError(_GROUPS.format(groups=sorted(groups)))
        if traced:
            first = _clamped(first_rows, shape)
        else:
            owned = self.lease.shape.items if self.lease is not None and self.lease.shape is not None else ()
            given: Any = first_rows if shape else [first_rows]
            rows = checked_first_rows("LoRABatch.activate: first_rows", given, self.slots.size, owned)
            array = np.array(rows, np.int32).reshape(shape)
            # Placed as by `prepare`, so that no step is compiled again.
            first = jnp.asarray(array) if self.lease is None else _placed([array], self.layout.sites)[0]
        layout = replace(self.layout, length=length, activated=True, undecided=False)
        return LoRABatch(self.assigned, first, layout, self.lease)

    def activate_in(
        self, prompts: Sequence[Sequence[int]], *, length: int | None = None, start: int = 0
    ) -> "LoRABatch":
        """Return the same batch for a forward over these prompts, each row active from its invocation tokens on.

        Args:
          prompts: token ids of the whole prompt of each sequence.
          length: rows of each sequence in that forward, padding included. It is required.
          start: number of tokens of each prompt that are in the cache already. Row 0 of the forward is the next one.

        Raises:
          LoRAUsageError: as `activate`, or inside a traced function; another number of prompts than of sequences.
        """
        called = self.invocation_tokens
        if len(prompts) != len(called):
            raise LoRAUsageError(f"LoRABatch.activate_in: {len(prompts)} prompts for {len(called)} sequences")
        pairs = zip(prompts, called, strict=True)
        return self.activate([active_from(prompt, tokens, start=start) for prompt, tokens in pairs], length=length)

    def check_usable(self) -> None:
        """Raise `LoRAError` unless the slots hold the adapters of the batch."""
        traced = isinstance(self.slots, jax.core.Tracer)
        if self.layout.orphan or not (traced or self.layout.lease):
            raise LoRAError(_TRACED)
        if not traced and (self.lease is None or self.lease.closed):
            raise LoRAError(_CLOSED)
        if self.slots.size > self.layout.num_sequences:
            raise LoRAError(_JOINED.format(sequences=self.layout.num_sequences, rows=self.slots.size))

    def __repr__(self) -> str:
        if self.lease is None:  # inside a traced function, or returned by one
            return f"LoRABatch({self.layout.num_sequences} sequences, traced)"
        names = [
            " + ".join(f"{name!r}" + (f" * {scale:g}" if scale != 1 else "") for name, _, scale in parts) or "None"
            for parts in self.lease.parts[:_SHOWN]
        ]
        more = ["..."] if len(self.lease.parts) > _SHOWN else []
        state = "closed" if self.lease.closed else "open"
        return f"LoRABatch({self.layout.num_sequences} sequences: {', '.join(names + more)}; {state})"

    def __enter__(self) -> "LoRABatch":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __copy__(self) -> "LoRABatch":
        return LoRABatch(self.assigned, self.active_from, self.layout, self.lease)

    def __deepcopy__(self, memo: object) -> "LoRABatch":
        return self.__copy__()

    def __reduce__(self) -> Any:
        raise LoRAUsageError("a LoRABatch cannot be pickled: its slots mean something to its manager alone")

    def tree_flatten(self) -> tuple[tuple[Any, Any], Layout]:
        slots, layout = self.slots, self.layout
        if isinstance(slots, jax.core.Tracer):
            # JAX caches this layout for all calls of a traced function that returns the batch.
            layout = replace(layout, lease=None)
        elif isinstance(slots, _ARRAYS) and not layout.orphan:
            # Passing an orphan around is allowed. Only using it raises. Skip the check for ShapeDtypeStructs.
            self.check_usable()
        return (self.assigned, self.active_from), layout

    @classmethod
    def tree_unflatten(cls, layout: Layout, children: tuple[Any, Any]) -> "LoRABatch":
        # Traced arrays, shapes and other placeholders of JAX get no lease, since a cache of compiled functions may keep
        # them after the call.
        try:
            first: object = children[0][0].slots
        except (AttributeError, TypeError):  # a placeholder of all assigned adapters
            first = None
        if isinstance(first, jax.core.Tracer) or not isinstance(first, _ARRAYS):
            return cls(*children, layout, None)
        if layout.lease is None:
            return cls(*children, replace(layout, orphan=True), None)
        return cls(*children, layout, layout.lease())


def _clamped(first: Any, shape: tuple[int, ...]) -> Int[Array, "B"]:
    """Return traced first rows as int32, from 0 to `NOWHERE`. Raises `LoRAUsageError` for another shape or dtype."""
    if first.shape != shape or not jnp.issubdtype(first.dtype, jnp.integer):
        raise LoRAUsageError(
            f"LoRABatch.activate takes integers {list(shape)}, one a sequence, got {first.dtype}{list(first.shape)}"
        )
    wide = first.astype(jnp.int32) if first.dtype.itemsize < 4 else first
    return jnp.clip(wide, 0, NOWHERE).astype(jnp.int32)


def check_batch(batch: LoRABatch) -> None:
    """Raise `LoRAError` unless `jlora.use` may serve `batch`."""
    batch.check_usable()
    if batch.layout.undecided:
        raise LoRAError(_UNDECIDED)


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

    slots, needed = batch.slots, batch.stamps
    if len(batch.assigned) > 1:
        slots, needed = (jnp.stack(each) for each in zip(*((a.slots, a.stamps) for a in batch.assigned), strict=True))
    operands = stamps, here(slots), here(needed)
    if any(isinstance(operand, jax.core.Tracer) for operand in (out, *operands)):
        return across_mesh(compare, out, *operands)
    if _missed(*operands):
        raise LoRAError(_COPY.format(path=path))
    return out


def _missed(stamps: Array, slots: Array, needed: Array) -> Array:
    return ((needed > 0) & (stamps.at[slots].get(mode="clip") != needed)).any()


def make_batch(
    slots: Sequence[int] | Int[np.ndarray, "B k"],
    shape: BatchShape,
    sites: ModelSites,
    lease: Lease,
    *,
    none: int,
    unserved: frozenset[Site],
    stamps: Int[np.ndarray, "B k"] | None = None,
    scales: Float[np.ndarray, "B k"] | None = None,
) -> LoRABatch:
    """Return a batch with its arrays on the device or the mesh.

    Args:
      slots: the slot of each sequence, or [B, k] those of its k adapters, at most `sites.adapters`.
      shape: the shape of the batch.
      sites: the sites of the model.
      lease: the lease of the adapters in these slots.
      none: the slot of rows without an adapter.
      unserved: the sites that serve no adapter.
      stamps: the stamp of each of `slots`. None: every copy of the model is accepted.
      scales: the factor of each of `slots`. None: all are 1.
    """
    # [adapters of a sequence, B]
    of_slots = _by_adapter(slots, none, sites.adapters, np.int32)
    of_stamps = np.zeros_like(of_slots) if stamps is None else _by_adapter(stamps, 0, sites.adapters, np.int32)
    of_scales: Any = (None,) * len(of_slots)
    if sites.scaled:
        ones = np.ones(shape.num_sequences) if scales is None else scales
        of_scales = _by_adapter(ones, 1, sites.adapters, np.float32)
    assigned: list[Assigned] = []
    for own, stamp, scale in zip(of_slots, of_stamps, of_scales, strict=True):
        of_sequences = shape.active_slots(own, none)
        assigned.append(
            Assigned(
                slots=of_sequences,
                token_slots=shape.token_slots(own, none),
                stamps=stamp if of_sequences is own else np.where(of_sequences == none, 0, stamp),
                scales=scale,
                token_scales=None if scale is None else shape.by_token(scale, 1),
                groups=_of_groups(shape.items, own, scale, none) if shape.items else None,
            )
        )
    of_batch = tuple(assigned), shape.first_rows()
    tree = cast("Any", jax.tree.structure(of_batch))
    found, first = jax.tree.unflatten(tree, _placed(jax.tree.leaves(of_batch), sites))
    layout = Layout(
        sites,
        shape.num_sequences,
        unserved,
        shape.length,
        activated=shape.active_from is not None,
        one_each=shape.one_each and not sites.rows_declared,
        undecided=shape.active_from is None and any(lease.invocations),
        lease=weakref.ref(lease),
    )
    return LoRABatch(found, first, layout, lease)


def _of_groups(items: Sequence[tuple[str, Items]], slots: Any, scales: Any, none: int) -> dict[str, Assigned]:
    """Return the slots and factors of the items or flattened rows of groups, from those [B] of the sequences."""
    found: dict[str, Assigned] = {}
    for group, given in items:
        of_rows = given.by_row(slots, none)
        of_scales = None if scales is None else given.by_row(scales, 1)
        flattened = given.counts is not None
        found[group] = (
            Assigned(None, of_rows, None, None, of_scales) if flattened else Assigned(of_rows, None, None, of_scales)
        )
    return found


def batch_of_group(batch: LoRABatch, name: str) -> LoRABatch | None:
    """Return a batch whose sequences are the items of a row group, or its flattened rows; None if it has no such group.

    Layers of the group see its rows as other layers see those of the whole batch.
    """
    if name not in (batch.assigned[0].groups or {}):
        return None
    assigned: list[Assigned] = []
    for each in batch.assigned:
        own: Assigned = each.groups[name]
        if own.token_slots is not None:
            own = own._replace(slots=own.token_slots, scales=own.token_scales)
        assigned.append(own)
    # Each row is an entry of its own, and all of them are active.
    layout = replace(batch.layout, length=None, activated=False, one_each=True)
    return LoRABatch(tuple(assigned), None, layout, batch.lease)


def _placed(arrays: Sequence[np.ndarray], sites: ModelSites) -> Sequence[jax.Array]:
    """Return arrays of a batch on the device, or replicated over the mesh, so that each shard slices its own rows."""
    if sites.sharding is None:
        return [to_device(array, sites.device) for array in arrays]
    return put(arrays, [sites.sharding.whole] * len(arrays))


def _by_adapter(values: Any, other: int, adapters: int, dtype: type[np.generic]) -> Shaped[np.ndarray, "adapters B"]:
    """Return a row of values for each adapter of a sequence, from `values` [B] or [B, k] and `other` past the k."""
    given = np.asarray(values, dtype)
    given = given.reshape(len(given), -1).T
    if len(given) == adapters:
        return np.ascontiguousarray(given)
    return np.concatenate([given, np.full((adapters - len(given), given.shape[1]), other, dtype)])


def renewed(batch: LoRABatch, lease: Lease) -> LoRABatch:
    """Return a batch with the arrays of `batch` under another lease of the same adapters."""
    old = batch.layout
    # `dataclasses.replace` takes 3 us, a tenth of a `prepare` of a known batch.
    of_old = old.sites, old.num_sequences, old.unserved, old.length, old.activated, old.one_each, old.undecided
    layout = Layout(*of_old, lease=weakref.ref(lease))
    return LoRABatch(batch.assigned, batch.active_from, layout, lease)
