"""`with jlora.use(batch)`: which adapter every row of the traced forward takes."""

import contextlib
import functools
import math
from collections.abc import Generator, Hashable, Mapping, Sequence
from typing import Literal, TypeAlias

import jax
import jax.core
import jax.extend.core
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from jlora.errors import LoRAError, LoRAUsageError
from jlora.layers.forward.batch import LoRABatch, check_batch, check_copy
from jlora.layers.forward.context import Opened, around, opening
from jlora.layers.forward.forward_record import Calls, ForwardRecord
from jlora.layers.forward.mesh import check_mesh, here
from jlora.layers.forward.rows import RowMap, current_rows
from jlora.layers.forward.rows_on_mesh import Lead, lead_of, plan_of_experts, plan_of_rows
from jlora.layers.site import ModelSites, Site, SlotSpec, is_named
from jlora.pallas.moe import plan_experts
from jlora.pallas.plan import Plan, make_plan
from jlora.sharding.rules import KernelSharding

_OUTSIDE = (
    "{path}: this layer serves LoRA adapters and was called outside `jlora.use`. Say which adapters the rows take:\n"
    "    with jlora.use(batch):      # inside your jitted function; batch = manager.prepare([...])\n"
    "        return model(tokens)\n"
    "or `with jlora.use(None):` for the base model alone."
)
_STALE = (
    "this batch was opened outside `jax.jit` and is read inside it: it would be baked into the compiled function as a "
    "constant and go stale. Pass it as an argument: `forward(model, tokens, batch)`, with `with jlora.use(batch):` "
    "inside forward. `lax.scan`, `nnx.scan`, `jax.checkpoint` and `jax.eval_shape` trace what they are given as "
    "`jax.jit` does: call them inside a function that is jitted, and open the batch there."
)
_EAGER = (
    "{what} was opened inside {outer}, which was opened outside `jax.jit` and is still open: layers would serve "
    "whichever was opened last. Close that first; a generator must not yield inside it"
)
_STALE_SLOTS = (
    "{path}: the model is read inside `jax.jit` without being an argument of it: its slots would be baked into the "
    "compiled function as constants, and later adapters would not be seen. Pass the model (or the state that you split "
    "from it) as an argument: `forward(model, tokens, batch)`."
)
_UNSERVED = (
    "`with jlora.use(batch)` ends, and {count} of the model's wrapped layers served no adapter:\n"
    "{layers}\n"
    "Weights that an adapter brings for them would do nothing. Either run `manager.verify(forward, inputs)` once, with "
    "a forward that runs all of your steps: it puts the layers that none of them serves into `manager.unserved`. Or "
    "leave them out: LoRAConfig(exclude_modules={names})"
)
_WITHOUT = ". Or say that this step does not run them: `jlora.use(batch, without={names})`"
_NOT_CALLED = "it was not called (its parameters are read directly, or the step runs only a part of the model)"
_SHOWN = 8  # layers in a message

# What the rows of a layer are, and how many rows of each there are in turn.
RowLayout: TypeAlias = tuple[RowMap | Literal["packed", "sequences"], int]


class Scope(Opened):
    """One open `use`: the batch, the plans made so far, and the calls so far.

    Attributes:
      batch: None for the base model.
      eager: whether it was opened outside whatever JAX traces.
      calls: of the layers inside; those of the scope of the same model around it, if there is one.
      checks: whether it must have served each layer when it ends.
    """

    def __init__(self, batch: LoRABatch | None):
        self.batch = batch
        if batch is None:
            self.eager = not staged()
            super().__init__("jlora.use(None)", "base")
        else:
            # A concrete batch is never read by a jitted function, so eager calls may share what JAX has compiled.
            self.eager = not isinstance(batch.slots, jax.core.Tracer)
            super().__init__("jlora.use(batch)", "eager" if self.eager else object())
        around_it = None if batch is None else self._calls_around(batch.layout.sites)
        self.calls = Calls() if around_it is None else around_it
        self.checks = batch is not None and around_it is None
        self.lengths: set[tuple[bool, int]] = set()  # (under vmap, length) of rows seen as [batch, length]
        self.trace: object = jax.extend.core.get_opaque_trace_state()
        self.plans: dict[Hashable, Plan] = {}
        self.row_maps: dict[tuple[int, int, str, int | None], RowMap] = {}

    def _calls_around(self, sites: ModelSites) -> Calls | None:
        """Those of what is open around it and counts its calls too."""
        for outer in around():
            if isinstance(outer, ForwardRecord) and outer.sites is sites:
                return outer.calls
            if not isinstance(outer, Scope) or outer.batch is None or outer.batch.layout.sites is not sites:
                continue
            # JAX keeps what is traced in an eager scope, for later ones that would not see its calls.
            if self.eager or not outer.eager:
                return outer.calls
        return None

    @property
    def recorded(self) -> bool:
        """Whether `manager.verify` looks at the calls."""
        return any(isinstance(each, ForwardRecord) for each in around())

    def refuse(self, site: Site, reason: str) -> None:
        """A call of the layer serves no adapter."""
        self.calls.refused.setdefault(site, reason)

    def runs(self, site: Site, base: Float[Array, "*lead N"]) -> Int[Array, "..."]:
        """Slots along the first axes of `base`, where `plan` found a layout: all rows along the others are of one."""
        layout = self._layout(site, base)
        assert not isinstance(layout, str)
        ids, repeats = self._runs(layout, site)
        return ids if layout[0] == "sequences" and repeats > 1 else ids.reshape(base.shape[:-1])

    def row_slots(self, site: Site, base: Float[Array, "*lead N"]) -> Int[Array, "M"]:
        """The slot of each row of `base`, where `plan` found a layout for them."""
        layout = self._layout(site, base)
        assert not isinstance(layout, str)
        ids, repeats = self._runs(layout, site)
        return jnp.repeat(ids, repeats, total_repeat_length=ids.shape[0] * repeats)

    def plan(
        self, site: Site, base: Float[Array, "*lead N"], row_map: RowMap | None = None, held: Site | None = None
    ) -> Plan | None:
        """The plan of the rows of `base`, made once and shared by all layers. None where they fit no layout.

        `row_map` is what the layer itself says of its rows, if it does; `held` is one of `site.shared`, for a plan of
        its slots. A layer without a plan gives its base output, and the scope raises when it ends.
        """
        layout = self._layout(site, base, row_map)
        if isinstance(layout, str):
            self.refuse(site, layout)
            return None
        spec = (held or site).spec
        # A value made inside scan, remat or grad must not outlive it, so there nothing is kept (XLA finds that the
        # layers' plans are the same).
        keep: bool = self.trace == jax.extend.core.get_opaque_trace_state()
        sharding = spec.sharding
        if sharding is not None:
            check_mesh(site)
        lead = None if sharding is None else self._lead(sharding, layout, base)
        shape = base.shape[:-1] if lead is not None and lead.split else None
        split = () if sharding is None else sharding.experts
        key = (layout, spec.slots, spec.experts, site.backend, lead, shape, split)
        if keep and key in self.plans:
            return self.plans[key]
        assert self.batch is not None
        if site.spec.experts is not None:
            assert isinstance(layout[0], RowMap)
            plan = self._plan_experts(layout[0], site, spec)
        else:
            make = functools.partial(self._make_plan, site)
            if sharding is not None and lead is not None and lead.split:
                plan = plan_of_rows(sharding, lead, base.shape[:-1], self.runs(site, base), make)
            else:
                plan = make(*self._runs(layout, site))
        if keep:
            self.plans[key] = plan
        return plan

    def _make_plan(self, site: Site, ids: Int[Array, "runs"], repeats: int) -> Plan:
        assert self.batch is not None
        return make_plan(
            ids,
            num_groups=site.spec.num_slots,
            max_active=self.batch.layout.num_sequences,
            repeats=repeats,
            backend=site.backend,
        )

    def lead(self, site: Site, base: Float[Array, "*lead N"], row_map: RowMap | None = None) -> Lead:
        """How the rows of `base` lie on the mesh, where `plan` found a layout for them."""
        layout, sharding = self._layout(site, base, row_map), site.spec.sharding
        assert not isinstance(layout, str)
        assert sharding is not None
        return self._lead(sharding, layout, base)

    def _lead(self, sharding: KernelSharding, layout: RowLayout, base: Float[Array, "*lead N"]) -> Lead:
        assert self.batch is not None
        kind, axes = layout[0], base.ndim - 1
        if kind == "packed":
            return lead_of(sharding, base, axes - 1, base.shape[-2])
        one = isinstance(kind, RowMap) or self.batch.slots.ndim == 0
        return lead_of(sharding, base, None if one else 0, self.batch.slots.size)

    def _plan_experts(self, row_map: RowMap, site: Site, spec: SlotSpec) -> Plan:
        """By slot and expert; or, for the factors that experts share, by slot."""
        assert self.batch is not None
        assert row_map.expert is not None
        assert site.spec.experts is not None
        slots, index = row_map.places(*self._slots(), self._lengths())
        slots = slots if spec.slots.start == 0 else slots - spec.slots.start
        sequences = self.batch.layout.num_sequences

        def make(slots: Array, index: Array, expert: Array, own: int) -> Plan:
            experts = own
            if spec.experts is None:  # as one expert: rows of those elsewhere are nobody's still
                expert, experts = jnp.where((expert >= 0) & (expert < own), 0, -1), 1
            return plan_experts(
                slots,
                index,
                expert,
                num_slots=spec.num_slots,
                num_experts=experts,
                max_active=sequences * experts,
                backend=site.backend,
            )

        operands = slots, index, jnp.asarray(row_map.expert)
        if site.spec.sharding is None:
            return make(*operands, site.spec.experts)
        return plan_of_experts(site, make, *operands)

    def counted(self, row_map: RowMap) -> int:
        """How many rows of the batch a map counts."""
        assert self.batch is not None
        return row_map.counted(*self._slots(), self._lengths())

    def _slots(self) -> tuple[Int[Array, "B"], Int[Array, "T"] | None]:
        """Of sequences, and of packed rows."""
        assert self.batch is not None
        tokens = self.batch.token_slots
        return here(self.batch.slots.reshape(-1)), None if tokens is None else here(tokens)

    def _lengths(self) -> frozenset[int]:
        """What the tokens of a sequence may number, where a RowMap does not say it."""
        assert self.batch is not None
        declared = self.batch.layout.length
        return frozenset(length for _, length in self.lengths) if declared is None else frozenset({declared})

    def shared(self, row_map: object) -> object:
        """The first map of the same arrays, so that the products of one layer share a plan; what is no map stays."""
        if not isinstance(row_map, RowMap) or row_map.expert is None:
            return row_map
        if self.trace != jax.extend.core.get_opaque_trace_state():  # as with plans
            return row_map
        # The maps that are kept hold the arrays, so no other can have their identity.
        key = id(row_map.source), id(row_map.expert), row_map.of, row_map.length
        return self.row_maps.setdefault(key, row_map)

    def checked(self, layer: nnx.Module, site: Site, base: Float[Array, "*lead N"]) -> Float[Array, "*lead N"]:
        """The base output of a layer; NaN in the stamped layer of a copy that missed a write: see `check_copy`."""
        assert self.batch is not None
        return check_copy(self.batch, site.path, base, vars(layer)[site.stamps][...]) if site.stamped else base

    def _runs(self, layout: RowLayout, site: Site) -> tuple[Int[Array, "runs"], int]:
        """Slot of each run of rows, and the rows of a run."""
        assert self.batch is not None
        kind, repeats = layout
        sequences, tokens = self._slots()
        if isinstance(kind, RowMap):
            ids = kind.slots(sequences, tokens, self._lengths(), site.spec.num_slots)
        elif kind == "packed":
            assert tokens is not None
            ids = tokens
        else:
            ids = sequences
        return ids, repeats

    def _layout(self, site: Site, base: Float[Array, "*lead N"], row_map: RowMap | None = None) -> RowLayout | str:
        """(a RowMap or "packed", 1), or ("sequences", rows of each sequence); or why the rows fit no layout."""
        assert self.batch is not None
        lead = base.shape[:-1]
        if row_map is None:
            row_map = current_rows(site.path, staged)
        if (site.spec.experts is not None) != (row_map is not None and row_map.expert is not None):
            raise LoRAUsageError(
                f"{site.path}: a RowMap with `expert` is for the products of experts, and needed there"
                + ("" if site.spec.experts is None else "; none was given")
            )
        if row_map is not None:
            if math.prod(lead) != row_map.source.shape[0]:
                raise LoRAUsageError(
                    f"{site.path}: {math.prod(lead)} rows of shape {lead}, and a RowMap of "
                    f"{row_map.source.shape[0]} rows"
                )
            return row_map, 1
        mapped = _mapped(base) and not _mapped(self.batch.slots)
        declared = self.batch.layout.length
        lengths = {length for under_vmap, length in self.lengths if under_vmap == mapped}
        if declared is not None:
            lengths.add(declared)
        sequences = self.batch.slots.size
        packed = None if self.batch.token_slots is None else self.batch.token_slots.shape[0]
        if self.batch.slots.ndim == 0:  # mapped over its sequences: every row is of this one
            return "sequences", math.prod(lead)
        match lead:
            case (rows,) if mapped and not lengths:
                raise LoRAUsageError(
                    f"{site.path}: under jax.vmap, {rows} rows may be those of one sequence or of the whole batch. If "
                    "each call is one sequence, map the batch too: jax.vmap(f, in_axes=(None, 0, 0))(model, tokens, "
                    "batch), with `with jlora.use(batch):` inside f"
                )
            case (rows,) | (1, rows) if rows == packed:
                return "packed", 1
            case (batch, *between) if between and batch == sequences:
                if len(between) == 1:
                    self.lengths.add((mapped, between[0]))
                return "sequences", math.prod(between)
            case (rows,) if rows == sequences:
                return "sequences", 1
            case (rows,) if packed is None and rows in {sequences * length for length in lengths}:
                return "sequences", rows // sequences
            case _:
                pass
        tokens = f"{packed} packed tokens" if packed is not None else "a declared or seen length"
        return (
            f"its rows of shape {lead} fit no layout of this batch of {sequences} sequences: expected "
            f"[{sequences}, ..., features], one row a sequence [{sequences}, features], or {tokens} (declare flattened "
            "rows with prepare(..., length=), or say what they are with jlora.rows)"
        )


def _is_tracer(value: object) -> bool:
    return isinstance(value, jax.core.Tracer)


def _mapped(value: object) -> bool:
    """True if a `jax.vmap` around the code that runs now maps `value`; one around a jit inside is not seen."""
    while _is_tracer(value):
        if type(value).__name__ == "BatchTracer":  # JAX does not export the class
            return True
        value = getattr(value, "primal", None)  # differentiated inside the vmap
    return False


def staged() -> bool:
    """True while jit (or scan, remat, ...) is tracing; eager grad and vmap are not staged."""
    return _is_tracer(lax.full((), 0, jnp.int32))


def check_slots_fresh(path: str, slots: jax.Array) -> None:
    """Raises where slot arrays that are no argument of the traced function would become constants of it."""
    if not _is_tracer(slots) and staged():
        raise LoRAError(_STALE_SLOTS.format(path=path))


def _check_fresh(batch: LoRABatch) -> None:
    if not _is_tracer(batch.slots) and staged():
        raise LoRAError(_STALE)


@contextlib.contextmanager
def use(batch: LoRABatch | None, *, without: Sequence[str] = ()) -> Generator[None, None, None]:
    """Trace-time scope: the wrapped layers called inside serve the adapters of `batch`.

    When it ends without an exception, every wrapped layer must have been called, with rows of the batch, but for those
    in `manager.unserved`. A `use` inside another of the same manager leaves that to the outer one, and its calls count
    there. A function that is traced inside an eager `use` answers for itself.

    Args:
      batch: what `LoRAManager.prepare` returned, passed to your jitted function as an argument; None serves the base
        model alone, in a compiled variant of its own, and checks nothing.
      without: modules that the code inside does not run, named as in `LoRAConfig.exclude_modules`; ["*"] for code that
        runs single layers. Only the check that they are called is waived: those that are called are served, or raise.

    Raises:
      LoRAError: the batch is closed, came out of a traced function, lacks adapters that were not ready, or is a
        constant inside `jax.jit`. On leaving: a wrapped layer served no adapter; the message shows the ways out.
      LoRAUsageError: it is no batch; `without` is a string, or one of its names matches no module.
    """
    if isinstance(without, str):  # it would be taken letter by letter
        raise LoRAUsageError(f"jlora.use: without must be a list of names of modules, got {without!r:.100}")
    names = tuple(without)
    if batch is not None:
        if not isinstance(batch, LoRABatch):
            raise LoRAUsageError(
                f"jlora.use takes a LoRABatch from manager.prepare(...) or None, got {type(batch).__name__}"
            )
        check_batch(batch)
        _check_fresh(batch)
        _check_names(names, batch.layout.sites)
    scope = Scope(batch)
    _check_eager(scope)
    with opening(scope):
        yield
    if batch is not None and scope.checks:
        _check_all_served(batch, scope.calls, names)


def _check_names(names: Sequence[str], sites: ModelSites) -> None:
    """Raises `LoRAUsageError` for a name that matches no module."""
    missing = [name for name in names if name != "*" and not is_named(name, sites.names)]
    if missing:
        raise LoRAUsageError(
            f"jlora.use: without {missing} match no module of the model; give names as in LoRAConfig.exclude_modules, "
            "or ['*'] where single layers run"
        )


def _check_all_served(batch: LoRABatch, calls: Calls, without: Sequence[str]) -> None:
    """Raises `LoRAError` for layers that served no adapter, and are neither unserved nor waived."""
    missing: dict[str, str] = {}
    skipped: list[str] = []
    for site in batch.layout.sites.sites:
        if site in batch.layout.unserved:
            continue
        if site in calls.refused:
            missing[site.path] = calls.refused[site]
        elif site not in calls.called and not _waived(site, without):
            missing[site.path] = _NOT_CALLED
            skipped.append(site.path)
    if missing:
        raise LoRAError(_message(missing, skipped))


def _waived(site: Site, without: Sequence[str]) -> bool:
    return any(name == "*" or is_named(name, (*site.aliases, *site.parts)) for name in without)


def _message(missing: Mapping[str, str], skipped: Sequence[str]) -> str:
    lines = [f"  {path}: {reason}" for path, reason in missing.items()][:_SHOWN]
    if len(missing) > _SHOWN:
        lines.append(f"  ... and {len(missing) - _SHOWN} more")
    message = _UNSERVED.format(count=len(missing), layers="\n".join(lines), names=[*missing][:_SHOWN])
    return message + _WITHOUT.format(names=skipped[:_SHOWN]) if skipped else message


def _check_eager(scope: Scope) -> None:
    """Raises `LoRAError` where an eager scope that is open could be confused with this one."""
    for outer in around():
        if not isinstance(outer, Scope) or not outer.eager:
            continue
        alike = outer.batch is None or scope.batch is None
        if not alike and scope.eager:
            assert outer.batch is not None
            assert scope.batch is not None
            alike = outer.batch.layout.sites is scope.batch.layout.sites
        if alike:
            raise LoRAError(_EAGER.format(what=scope.what, outer=outer.what))


def enter_site(site: Site, sites: ModelSites) -> Scope | None:
    """Called by a wrapped layer: the open scope, or None where it serves the base model. Raises outside any scope."""
    scope = next((each for each in around() if isinstance(each, Scope)), None)
    if scope is None:
        raise LoRAError(_OUTSIDE.format(path=site.path))
    if scope.batch is None:
        return None
    if scope.batch.layout.sites is not sites:
        raise LoRAError(f"{site.path}: this batch was prepared by the manager of another model")
    _check_fresh(scope.batch)
    scope.batch.check_usable()  # it may have been closed in its own scope
    scope.calls.called.setdefault(site)
    return None if site in scope.batch.layout.unserved else scope
