"""`jlora.use(batch)`: select the adapter of each row in the traced forward."""

import contextlib
from collections.abc import Generator, Sequence

import jax
import jax.core
from flax import nnx
from jaxtyping import Array, Float

from jlora import _qwix
from jlora.errors import LoRAError, LoRAUsageError
from jlora.layers.forward.batch import LoRABatch, check_batch
from jlora.layers.forward.call_rows import CallRows, Rows
from jlora.layers.forward.context import Opened, around, opening, tracing
from jlora.layers.forward.forward_record import Calls, ForwardRecord, check_all_served
from jlora.layers.forward.lengths import Lengths
from jlora.layers.forward.row_layout import RowLayout
from jlora.layers.forward.rows import RowMap
from jlora.layers.site import SEQUENCES, ModelSites, Site, is_named

_OUTSIDE = (
    "{path}: this layer serves LoRA adapters and was called outside `jlora.use`. Say which adapters the rows take:\n"
    "    with jlora.use(batch):      # inside your jitted function; batch = manager.prepare([...])\n"
    "        return model(tokens)\n"
    "or `with jlora.use(None):` for the base model alone."
)
_QUANTIZED_LATER = (
    "{path}: qwix.quantize_model was called with a model that jlora had wrapped, and returned a copy whose slots no "
    "manager writes. Quantize first, and wrap the model that is returned:\n"
    "    model = qwix.quantize_model(model, provider, inputs)\n"
    "    manager = jlora.LoRAManager(model, config)"
)
_STALE = (
    "this batch was opened outside `jax.jit` and is read inside it: it would be baked into the compiled function as a "
    "constant and go stale. Pass it as an argument: `forward(model, tokens, batch)`, with `with jlora.use(batch):` "
    "inside forward. `lax.scan`, `nnx.scan`, `jax.checkpoint` and `jax.eval_shape` trace what they are given as "
    "`jax.jit` does: call them inside a function that is jitted, and open the batch there."
)
_NO_GROUP = (
    "{path}: this layer is of the row group {group!r}, and the batch was prepared without it. Say which sequence each "
    "of its items belongs to:\n"
    "    manager.prepare(names, items={{{group!r}: jlora.Items([0, 0, 1, None])}})   # counts= for flattened rows\n"
    "A step that calls no layer of the group says jlora.use(batch, without=[{group!r}])"
)
_EAGER = (
    "{what} was opened inside {outer}, which was opened outside `jax.jit` and is still open: layers would serve "
    "whichever was opened last. Close that first; a generator must not yield inside it"
)


class BaseScope(Opened):
    """An open `use(None)`.

    Attributes:
      eager: True if it was opened outside of any JAX trace.
    """

    def __init__(self):
        super().__init__("jlora.use(None)", "base")
        self.eager = not tracing()


class Scope(Opened):
    """An open `use(batch)`: the batch, the calls so far, and the plans made for them.

    Attributes:
      batch: the open batch.
      eager: True if it was opened outside of any JAX trace.
      calls: calls of the layers inside, shared with an enclosing scope of the same model, if there is one.
      checks: True if the scope checks at its end that every layer served an adapter.
      undeclared: the lengths that undeclared layers have seen, checked at its end.
    """

    def __init__(self, batch: LoRABatch):
        self.batch = batch
        self.eager = not isinstance(batch.slots, jax.core.Tracer)
        # A concrete batch is never read by a jitted function, so eager calls may share compiled functions.
        super().__init__("jlora.use(batch)", "eager" if self.eager else object())
        outer = self._outer_calls()
        self.calls = Calls() if outer is None else outer
        self.checks = outer is None
        self._spaces = {name: Rows(space, batch.layout.num_sequences) for name, space in batch.spaces.items()}
        self.undeclared = Lengths()

    @property
    def sites(self) -> ModelSites:
        """Sites of the model that the batch was prepared for."""
        return self.batch.layout.sites

    @property
    def recorded(self) -> bool:
        """True if `manager.verify` records the calls."""
        return any(isinstance(each, ForwardRecord) for each in around())

    def refuse(self, site: Site, reason: str) -> None:
        """Record the reason why a call of the layer serves no adapter."""
        self.calls.refused.setdefault(site, reason)

    def rows(self, site: Site, base: Float[Array, "*lead N"], row_map: RowMap | None = None) -> CallRows | None:
        """Return the rows of one call of a layer, or None if they fit no layout.

        In the second case the layer returns its base output, and the scope raises when it ends. Rows that are not those
        of a declared group raise at once.

        Args:
          site: the site of the layer.
          base: the output of the layer, or another array with the same axes before the features.
          row_map: a map provided by the layer itself, as the products of experts do.

        Raises:
          LoRAError: the layer's mesh differs from the mesh of the calling code, the batch lacks the layer's row group
            or has it with another number of rows, or as in `layout_of`.
          LoRAUsageError: a row map is open around a layer of a row group, or as in `layout_of`.
        """
        rows = self._rows_of(site)
        layout = rows.layout(site, base, row_map)
        if isinstance(layout, str):
            if site.space != SEQUENCES and site.doubt is None:  # its rows are declared, so no other layout is meant
                raise LoRAError(f"{site.path}: {layout}")
            self.refuse(site, layout)
            return None
        if layout.length is not None:
            self.undeclared.add(site, layout.length)
        return rows.of_call(site, base, layout)

    def num_indexed(self, site: Site, base: Float[Array, "*lead N"], row_map: RowMap) -> int:
        """Return the size of the range that the map of one call indexes: the number of sequences or of tokens."""
        layout = self._rows_of(site).layout(site, base, row_map)
        assert isinstance(layout, RowLayout)  # rows of a map fit, or the call above raises
        return layout.num_indexed

    def _rows_of(self, site: Site) -> Rows:
        """Return the rows of the row space of a site. Raise `LoRAError` if the batch lacks its row group."""
        if site.space not in self._spaces:
            raise LoRAError(_NO_GROUP.format(path=site.path, group=site.space))
        return self._spaces[site.space]

    def _outer_calls(self) -> Calls | None:
        """Return the calls of the enclosing scope or record that also counts this scope's calls, or None."""
        for outer in around():
            if isinstance(outer, ForwardRecord) and outer.sites is self.sites:
                return outer.calls
            # JAX caches functions traced in an eager scope. A later scope that reuses them would not see their calls.
            if isinstance(outer, Scope) and outer.sites is self.sites and (self.eager or not outer.eager):
                return outer.calls
        return None


def _check_fresh(batch: LoRABatch) -> None:
    if not isinstance(batch.slots, jax.core.Tracer) and tracing():
        raise LoRAError(_STALE)


@contextlib.contextmanager
def use(batch: LoRABatch | None, *, without: Sequence[str] = ()) -> Generator[None, None, None]:
    """Serve the adapters of `batch` in the wrapped layers called inside, at trace time.

    If the scope ends without an exception, every wrapped layer must have been called with rows of the batch, except
    those in `manager.unserved`. A nested `use` of the same manager adds its calls to the outer one, which makes this
    check. A `use` in a function traced inside an eager `use` makes its own check.

    Args:
      batch: the result of `LoRAManager.prepare`, passed to your jitted function as an argument. None serves the base
        model alone, in a separate compiled variant, without any check.
      without: modules that the code inside does not run, named as in `LoRAConfig.exclude_modules`, and row groups
        ("images", for steps of text alone); ["*"] for code that runs single layers. They need not be called. If they
        are called, they serve the batch or raise as usual.

    Raises:
      LoRAError: the batch is closed, was returned by a traced function, lacks adapters that were not ready, or is a
        constant inside `jax.jit`. On exit: a wrapped layer served no adapter, or undeclared layers have rows [B, L,
        features] of several L; the message lists the remedies.
      LoRAUsageError: `batch` is no `LoRABatch`; `without` is a string, or one of its names matches no module.
    """
    if isinstance(without, str):  # its letters would be taken as names
        raise LoRAUsageError(f"jlora.use: without must be a list of names of modules, got {without!r:.100}")
    names = tuple(without)
    scope = BaseScope() if batch is None else _scope_of(batch, names)
    _check_eager(scope)
    with opening(scope):
        try:
            yield
        except LoRAError as error:
            _check_lengths(scope, error)  # it may be the cause
            raise
    _check_lengths(scope)
    if isinstance(scope, Scope) and scope.checks:
        check_all_served(scope.calls, scope.sites, scope.batch.layout.unserved, names)


def _check_lengths(scope: BaseScope | Scope, after: LoRAError | None = None) -> None:
    if isinstance(scope, Scope):
        try:
            scope.undeclared.check(scope.batch.layout.num_sequences)
        except LoRAError as error:
            raise error from after


def _scope_of(batch: object, without: Sequence[str]) -> Scope:
    """Return a scope of `batch` after checking that it may be served here. Raises as `use`."""
    if not isinstance(batch, LoRABatch):
        raise LoRAUsageError(
            f"jlora.use takes a LoRABatch from manager.prepare(...) or None, got {type(batch).__name__}"
        )
    check_batch(batch)
    _check_fresh(batch)
    _check_names(without, batch.layout.sites)
    return Scope(batch)


def _check_names(names: Sequence[str], sites: ModelSites) -> None:
    """Raise `LoRAUsageError` unless every name matches a module of the model."""
    missing = [name for name in names if name != "*" and name not in sites.groups and not is_named(name, sites.names)]
    if missing:
        raise LoRAUsageError(
            f"jlora.use: without {missing} match no module or row group of the model; give names as in "
            "LoRAConfig.exclude_modules, or ['*'] where single layers run"
        )


def _check_eager(scope: BaseScope | Scope) -> None:
    """Raise `LoRAError` if an open eager scope makes it ambiguous which scope a layer serves."""
    for outer in around():
        if not isinstance(outer, BaseScope | Scope) or not outer.eager:
            continue
        if isinstance(outer, Scope) and isinstance(scope, Scope):
            confused = scope.eager and outer.sites is scope.sites
        else:
            confused = True
        if confused:
            raise LoRAError(_EAGER.format(what=scope.what, outer=outer.what))


def enter_site(site: Site, layer: nnx.Module) -> Scope | None:
    """Record a call of a wrapped layer and return the open scope, or None if the layer serves the base model.

    Raises:
      LoRAError: no scope is open, the batch belongs to another model, it may not be served here, or the layer is one of
        a copy that qwix made of the wrapped model.
    """
    sites: ModelSites = vars(layer)["jlora_sites"]
    if _qwix.is_intercepted(layer) and not sites.intercepted:
        raise LoRAError(_QUANTIZED_LATER.format(path=site.path))
    scope = next((each for each in around() if isinstance(each, BaseScope | Scope)), None)
    if scope is None:
        raise LoRAError(_OUTSIDE.format(path=site.path))
    if isinstance(scope, BaseScope):
        return None
    if scope.sites is not sites:
        raise LoRAError(f"{site.path}: this batch was prepared by the manager of another model")
    _check_fresh(scope.batch)
    scope.batch.check_usable()  # the batch may have been closed inside the scope
    scope.calls.called.setdefault(site)
    return None if site in scope.batch.layout.unserved else scope
