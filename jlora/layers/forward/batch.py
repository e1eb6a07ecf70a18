"""`LoRABatch`: the adapters of each sequence of a batch as arrays, and the lease that keeps them in slots."""

import weakref
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jlora.adapters.activation import active_from
from jlora.errors import LoRAError, LoRAUsageError
from jlora.layers.forward.batch_shape import LENGTH_NEEDED, FirstRows, checked_length, first_rows_of
from jlora.layers.forward.lease import Lease
from jlora.layers.forward.row_space import RowSpace, put_tree
from jlora.layers.site import SEQUENCES, ModelSites, Site

_CLOSED = "this LoRABatch is closed: its slots may hold other adapters now; prepare a new one"
_TRACED = (
    "this LoRABatch came out of a traced function, and JAX hands back the lease of the function's first call: which "
    "adapters its slots hold is not known. Use the batch that went in"
)
_JOINED = (
    "a LoRABatch of {sequences} sequences holds {rows} slots: batches that were put together (jax.tree.map with "
    "concatenate, stack or repeat) hold the lease of one of them. Prepare one batch of all sequences"
)
_UNDECIDED = (
    "this LoRABatch holds activated LoRA (aLoRA) adapters and no first active rows: give prepare(..., active_from=) or "
    "batch.activate(first rows of this forward), each with `length`"
)
_ARRAYS = (jax.Array, np.ndarray)
_SHOWN = 8  # sequences in a repr


@dataclass(frozen=True)
class Layout:
    """The static part of a batch, on which a compiled function depends. The lease is carried along but not compared.

    Attributes:
      sites: sites of the model that the batch was prepared for.
      num_sequences: sequences of the whole batch; one shard of it may have fewer `slots`.
      unserved: the sites that serve no adapter.
      undecided: True if there are aLoRA adapters, and the first active rows are not given.
      orphan: True if the batch was returned by a traced function. A step is traced for it and raises.
      lease: weak reference to the lease of the batch, since compiled functions keep their static fields alive forever.
        None if the batch was returned by a traced function.
    """

    sites: ModelSites
    num_sequences: int
    unserved: frozenset[Site]
    undecided: bool = False
    orphan: bool = False
    lease: weakref.ref[Lease] | None = field(default=None, compare=False, repr=False)


@jax.tree_util.register_pytree_node_class
class LoRABatch:
    """The adapters of one batch, made by `LoRAManager.prepare`: a pytree of small arrays.

    It is also a context manager: its adapters stay in their slots until it closes. Copies (`jax.device_put`,
    `jax.tree.map`, `copy.copy`) share one lease, so closing one closes all. A batch returned by a traced function
    raises when it is used, and so does a batch with more rows than were prepared. Combining rows of several batches,
    for example with `jnp.where`, is not supported: the result holds only one of their leases.

    Attributes:
      spaces: "sequences" and each row group of the batch -> the adapters of its rows.

    Under `jax.vmap` over its sequences, the batch inside is one sequence with a scalar `slots`. Under `jax.shard_map`
    over its sequences, the batch inside holds the sequences and packed rows of its own shard.
    """

    def __init__(self, spaces: Any, layout: Layout, lease: Lease | None):
        self.spaces: Mapping[str, RowSpace] = spaces
        self.layout = layout
        self.lease = lease

    @property
    def sequences(self) -> RowSpace:
        """The adapters of the rows of the batch's sequences."""
        return self.spaces[SEQUENCES]

    @property
    def slots(self) -> Any:
        """Slot of the first adapter of each sequence, int32 [B]; `max_loras` for a sequence without one."""
        return self.sequences.entries.slots[0]

    @property
    def token_slots(self) -> Any:
        """Slot of the first adapter of each row of packed tokens, int32 [T]; None without token counts."""
        rows = self.sequences.packed
        return None if rows is None else rows.slots[0]

    @property
    def stamps(self) -> Any:
        """Number of the write that put the first adapter of each sequence into its slot, int32 [B]; 0 for no check."""
        return None if self.sequences.stamps is None else self.sequences.stamps[0]

    @property
    def active_from(self) -> Any:
        """First row of each sequence that takes its adapters, int32 [B], among the declared rows of this forward.

        None for all rows, and for packed rows, whose `token_slots` hold it.
        """
        return self.sequences.first

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
        versions = (tuple(version for _, version, _ in terms) for terms in self._host_state().terms)
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
        lease, first = self._host_state(self.active_from), self.active_from
        if self.layout.undecided:
            raise LoRAUsageError(_UNDECIDED)
        return lease.cache_keys(self.sequences.length, None if first is None else jax.device_get(first).tolist())

    def _host_state(self, first: Any = None) -> Lease:
        if self.lease is None or isinstance(first, jax.core.Tracer):  # as from `activate` in a traced function
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
        tokens = {(each.name, each.version): each.invocation_tokens for each in lease.adapters}
        of_terms = ((tokens[name, version] for name, version, _ in terms) for terms in lease.terms)
        return tuple(next(filter(None, found), ()) for found in of_terms)

    @property
    def needs_activation(self) -> bool:
        """True if there are aLoRA adapters and `prepare` was not given their first active rows; see `activate`."""
        return self.layout.undecided

    @property
    def can_activate(self) -> bool:
        """True if `activate` is possible: the manager has `LoRAConfig(activated=True)`, and rows are not packed."""
        return self.layout.sites.config.activated and self.sequences.packed is None

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
        lease, groups = self.lease, sorted(self.spaces.keys() - {SEQUENCES})
        items = None if lease is None else lease.shape.items
        first = first_rows_of(first_rows, self.slots.shape, groups, items)
        if lease is None:
            first = jnp.asarray(first)
        elif not isinstance(first, jax.Array):  # placed as by `prepare`, so that no step is compiled again
            first = put_tree(first, self.layout.sites)
        own = replace(self.sequences, first=first, length=length, differ=True)
        return LoRABatch({**self.spaces, SEQUENCES: own}, replace(self.layout, undecided=False), lease)

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
            " + ".join(f"{name!r}" + (f" * {scale:g}" if scale != 1 else "") for name, _, scale in terms) or "None"
            for terms in self.lease.terms[:_SHOWN]
        ]
        more = ["..."] if len(self.lease.terms) > _SHOWN else []
        state = "closed" if self.lease.closed else "open"
        return f"LoRABatch({self.layout.num_sequences} sequences: {', '.join(names + more)}; {state})"

    def __enter__(self) -> "LoRABatch":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __copy__(self) -> "LoRABatch":
        return LoRABatch(self.spaces, self.layout, self.lease)

    def __deepcopy__(self, memo: object) -> "LoRABatch":
        return self.__copy__()

    def __reduce__(self) -> Any:
        raise LoRAUsageError("a LoRABatch cannot be pickled: its slots mean something to its manager alone")

    def tree_flatten(self) -> tuple[tuple[Any], Layout]:
        slots, layout = self.slots, self.layout
        if isinstance(slots, jax.core.Tracer):
            # JAX caches this layout for all calls of a traced function that returns the batch.
            layout = replace(layout, lease=None)
        elif isinstance(slots, _ARRAYS) and not layout.orphan:
            # Passing an orphan around is allowed. Only using it raises. Skip the check for ShapeDtypeStructs.
            self.check_usable()
        return (self.spaces,), layout

    @classmethod
    def tree_unflatten(cls, layout: Layout, children: tuple[Any]) -> "LoRABatch":
        # Traced arrays, shapes and other placeholders of JAX get no lease, since a cache of compiled functions may keep
        # them after the call.
        try:
            first: object = children[0][SEQUENCES].entries.slots[0]
        except (AttributeError, TypeError):  # a placeholder of all spaces, or of all slots
            first = None
        if isinstance(first, jax.core.Tracer) or not isinstance(first, _ARRAYS):
            return cls(*children, layout, None)
        if layout.lease is None:
            return cls(*children, replace(layout, orphan=True), None)
        return cls(*children, layout, layout.lease())


def check_batch(batch: LoRABatch) -> None:
    """Raise `LoRAError` unless `jlora.use` may serve `batch`."""
    batch.check_usable()
    if batch.layout.undecided:
        raise LoRAError(_UNDECIDED)
