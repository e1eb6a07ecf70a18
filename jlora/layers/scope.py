"""`with jlora.use(batch)`: which adapter every row of the traced forward takes."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.core
import jax.extend.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jlora.errors import AdapterMismatchError, LoRAError
from jlora.layers.site import Site
from jlora.pallas.plan import Plan, make_plan

_OUTSIDE = (
    "{path}: this layer serves LoRA adapters and was called outside `jlora.use`. Say which adapters the rows take:\n"
    "    with jlora.use(batch):      # inside your jitted function; batch = manager.prepare([...])\n"
    "        return model(tokens)\n"
    "or `with jlora.use(None):` for the base model alone."
)
_STALE = (
    "this batch was opened outside `jax.jit` and is read inside it: it would be baked into the compiled function as a "
    "constant and go stale. Pass it as an argument: `forward(model, tokens, batch)`, with `with jlora.use(batch):` "
    "inside forward."
)
_STALE_SLOTS = (
    "{path}: the model is read inside `jax.jit` without being an argument of it: its slots would be baked into the "
    "compiled function as constants, and later adapters would not be seen. Pass the model (or the state that you split "
    "from it) as an argument: `forward(model, tokens, batch)`."
)


class Tracking:
    """Which sites of one wrapped model the traced forward really calls. One a manager; compared by identity."""

    def __init__(self):
        self.sites: tuple[Site, ...] = ()
        self.uncalled: dict[Site, None] = {}
        self.claims: Callable[[Site], Sequence[str]] = lambda site: ()

    def __deepcopy__(self, memo):
        raise LoRAError(
            "a wrapped model cannot be deep-copied: no manager would write the slots of the copy. Copy the model "
            "before it is wrapped"
        )

    def finish(self, called: set[Site]) -> None:
        """Record one whole forward. Raises if an adapter brought weights for a layer that was not called."""
        self.uncalled.update((site, None) for site in self.sites if site not in called)
        for site in self.uncalled:
            if names := self.claims(site):
                raise AdapterMismatchError(f"adapter {names[0]!r}: {self.reason(site)}")

    @staticmethod
    def reason(site: Site) -> str:
        return (
            f"brings weights for {site.path!r}, but the forward never calls that layer (its parameters are read "
            "directly, or the step runs only a part of the model), so they would do nothing. Call the layer, or, if "
            "several functions make up one forward, open `jlora.use(batch, partial=True)` in each of them."
        )


@jax.tree_util.register_pytree_node_class
class LoRABatch:
    """The adapters of one batch, made by `LoRAManager.prepare`: a pytree of small int32 arrays.

    Also a context manager: the slots it names stay loaded and untouched until it closes.

    Attributes:
      slots: int32 [B], the slot of each sequence; `max_loras` for a sequence that takes no adapter.
      token_slots: int32 [T] or None, the same for each row of packed tokens, when token counts were given.
      has_adapters: whether any sequence takes an adapter; known where `prepare` returned the batch, not in a traced
        function. A step may run its base-only variant where none does, at no cost over the unwrapped model:
        `forward(model, tokens, batch if batch.has_adapters else None)`.

    Mapped by `jax.vmap` over its sequences, a batch inside is one sequence with a scalar `slots`. Sharded over its
    sequences by `jax.shard_map`, a batch inside holds the sequences and packed rows of its own shard.
    """

    def __init__(
        self,
        slots: Int[jax.Array, "B"],
        token_slots: Int[jax.Array, "T"] | None,
        tracking: Tracking,
        release: Callable[[], None] | None = None,
        num_sequences: int | None = None,
        has_adapters: bool = True,
    ):
        self.slots = slots
        self.token_slots = token_slots
        self._tracking = tracking
        # Of the whole batch: packed rows of one shard may belong to more sequences than the shard has `slots`.
        self._num_sequences = slots.shape[0] if num_sequences is None else num_sequences
        self.has_adapters = has_adapters
        self._release = release
        self._closed = False

    def close(self) -> None:
        """Give the slots back. Closing twice is harmless."""
        self._closed = True
        if self._release is not None:
            self._release()
            self._release = None

    def __enter__(self) -> "LoRABatch":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def __del__(self):
        # A batch that was never closed must not hold its slots for ever.
        if getattr(self, "_release", None) is not None:
            self.close()

    def tree_flatten(self):
        if self._closed:
            raise LoRAError("this LoRABatch is closed: its slots may hold other adapters now; prepare a new one")
        return (self.slots, self.token_slots), (self._tracking, self._num_sequences)

    @classmethod
    def tree_unflatten(cls, static, children):
        (slots, token_slots), (tracking, num_sequences) = children, static
        return cls(slots, token_slots, tracking, num_sequences=num_sequences)


class _Scope:
    """One open `use`: the batch, the plans made so far, and the sites called so far."""

    def __init__(self, batch: LoRABatch | None):
        self.batch = batch
        self.called: set[Site] = set()
        self.lengths: set[tuple[bool, int]] = set()  # (under vmap, length) of rows seen as [batch, length]
        self.trace = jax.extend.core.get_opaque_trace_state()
        self.plans: dict[tuple[str, int], Plan] = {}

    def row_slots(self, site: Site, base: Float[Array, "*lead N"]) -> Int[jax.Array, "M"]:
        """The slot of each row of `base`."""
        ids, repeats = self._runs(self._layout(site, base))
        return jnp.repeat(ids, repeats, total_repeat_length=ids.shape[0] * repeats)

    def plan(self, site: Site, base: Float[Array, "*lead N"]) -> Plan:
        """The plan of the rows of `base`, made once and shared by all layers."""
        layout = self._layout(site, base)
        # A value made inside scan, remat or grad must not outlive it, so there nothing is kept (XLA finds that the
        # layers' plans are the same).
        keep = jax.extend.core.get_opaque_trace_state() == self.trace
        if keep and layout in self.plans:
            return self.plans[layout]
        assert self.batch is not None
        ids, repeats = self._runs(layout)
        plan = make_plan(
            ids,
            num_groups=site.spec.num_slots,
            max_active=self.batch._num_sequences,
            repeats=repeats,
            backend=site.backend,
        )
        if keep:
            self.plans[layout] = plan
        return plan

    def _runs(self, layout: tuple[str, int]) -> tuple[Int[jax.Array, "runs"], int]:
        """Slot of each run of rows, and the rows of a run."""
        assert self.batch is not None
        kind, repeats = layout
        ids = self.batch.token_slots if kind == "packed" else self.batch.slots.reshape(-1)
        assert ids is not None
        return ids, repeats

    def _layout(self, site: Site, base: Array) -> tuple[str, int]:
        """("packed", 1), or ("sequences", rows of each sequence). Raises where the rows fit no layout."""
        assert self.batch is not None
        lead = base.shape[:-1]
        mapped = _mapped(base) and not _mapped(self.batch.slots)
        lengths = {length for under_vmap, length in self.lengths if under_vmap == mapped}
        sequences = self.batch.slots.size
        packed = None if self.batch.token_slots is None else self.batch.token_slots.shape[0]
        match lead:
            case (batch, length) if batch == sequences:
                self.lengths.add((mapped, length))
                return "sequences", length
            case (rows,) if mapped and not lengths:
                raise LoRAError(
                    f"{site.path}: under jax.vmap, {rows} rows may be those of one sequence or of the whole batch. If "
                    "each call is one sequence, map the batch too: jax.vmap(f, in_axes=(None, 0, 0))(model, tokens, "
                    "batch), with `with jlora.use(batch):` inside f"
                )
            case (rows,) if rows == packed:
                return "packed", 1
            case (rows,) if rows == sequences:
                return "sequences", 1
            case (rows,) if packed is None and rows in {sequences * length for length in lengths}:
                return "sequences", rows // sequences
            case (rows,) if packed is None and not lengths and rows % sequences == 0:
                return "sequences", rows // sequences
            case () if self.batch.slots.ndim == 0:
                return "sequences", 1
        tokens = f"{packed} packed tokens" if packed is not None else f"{sequences} x length flattened rows"
        raise LoRAError(
            f"{site.path}: rows of shape {lead} fit no layout of this batch of {sequences} sequences; expected "
            f"[{sequences}, length, features], {tokens}, or one row a sequence [{sequences}, features]. A layer whose "
            "rows are not the batch's (a position table, say) is left out by LoRAConfig.target_modules"
        )


_current: contextvars.ContextVar[_Scope | None] = contextvars.ContextVar("jlora_scope", default=None)

# Functions traced inside a scope close over its batch, so JAX must not reuse their traces in another scope.
_trace_key = jax.make_user_context(None)


def _mapped(value: Any) -> bool:
    """True if a `jax.vmap` around the code that runs now maps `value`; one around a jit inside is not seen."""
    while isinstance(value, jax.core.Tracer):
        if type(value).__name__ == "BatchTracer":  # JAX does not export the class
            return True
        value = getattr(value, "primal", None)  # differentiated inside the vmap
    return False


def _staged() -> bool:
    """True while jit (or scan, remat, ...) is tracing; eager grad and vmap are not staged."""
    return isinstance(lax.full((), 0, jnp.int32), jax.core.Tracer)


def check_slots_fresh(path: str, slots: jax.Array) -> None:
    """Raises where slot arrays that are no argument of the traced function would become constants of it."""
    if not isinstance(slots, jax.core.Tracer) and _staged():
        raise LoRAError(_STALE_SLOTS.format(path=path))


def _check_fresh(batch: LoRABatch) -> None:
    if not isinstance(batch.slots, jax.core.Tracer) and _staged():
        raise LoRAError(_STALE)


@contextlib.contextmanager
def use(batch: LoRABatch | None, *, partial: bool = False) -> Iterator[None]:
    """Trace-time scope: the wrapped layers called inside serve the adapters of `batch`.

    Args:
      batch: what `LoRAManager.prepare` returned, passed to your jitted function as an argument; None serves the base
        model alone, in a compiled variant of its own.
      partial: set it when the code inside runs only a part of the model (an embedding step, a pipeline stage).
        Without it, a wrapped layer that is not called inside is known not to serve LoRA, and an adapter that brings
        weights for it is refused.

    Raises:
      LoRAError: the batch is closed, or it is a constant inside `jax.jit`.
      AdapterMismatchError: on leaving, if a loaded adapter brings weights for a layer that was never called.
    """
    if batch is not None:
        if not isinstance(batch, LoRABatch):
            raise LoRAError(
                f"jlora.use takes a LoRABatch from manager.prepare(...) or None, got {type(batch).__name__}"
            )
        if batch._closed:
            raise LoRAError("this LoRABatch is closed: its slots may hold other adapters now; prepare a new one")
        _check_fresh(batch)
    scope = _Scope(batch)
    token = _current.set(scope)
    # A concrete batch is never read by a jitted function, so eager calls may share what JAX has compiled.
    key = "base" if batch is None else object() if isinstance(batch.slots, jax.core.Tracer) else "eager"
    try:
        with _trace_key(key):
            yield
    finally:
        _current.reset(token)
    if batch is not None and not partial:
        batch._tracking.finish(scope.called)


def enter_site(site: Site, tracking: Tracking) -> _Scope | None:
    """Called by a wrapped layer: the open scope, or None for the base model. Raises outside any scope."""
    scope = _current.get()
    if scope is None:
        raise LoRAError(_OUTSIDE.format(path=site.path))
    if scope.batch is None:
        return None
    if scope.batch._tracking is not tracking:
        raise LoRAError(f"{site.path}: this batch was prepared by the manager of another model")
    _check_fresh(scope.batch)
    scope.called.add(site)
    return scope


def host_batch(slots: np.ndarray, token_slots: np.ndarray | None, tracking: Tracking) -> LoRABatch:
    """Move a batch's int32 arrays to the device in one call. The batch holds no lease."""
    on_device, tokens_on_device = jax.device_put((slots, token_slots))
    return LoRABatch(on_device, tokens_on_device, tracking)
