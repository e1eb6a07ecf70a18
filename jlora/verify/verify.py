"""`LoRAManager.verify`: compare a wrapped model with merged weights, row by row.

Shapes cannot distinguish a sequence axis from another axis of equal length, a layer that scales its input from one that
does not, or kernel axes of equal length. Therefore the slots of every wrapped layer get random values, a mixed batch is
served, and each row is compared with a copy of the model that has the same values merged into its kernels. A layer that
stores its weight in another form adds the delta of one adapter to all of its rows in that copy, without slots and
plans. Its own product is compared with that of its dequantized weight, which then takes its place.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from jlora.errors import LoRAError, LoRAUsageError
from jlora.layers.base_kernel import can_dequantize, held_by
from jlora.layers.forward.batch import LoRABatch
from jlora.layers.forward.batch_shape import BatchShape
from jlora.layers.forward.context import opening
from jlora.layers.forward.experts import has_grouped_products
from jlora.layers.forward.forward_record import ForwardRecord
from jlora.layers.forward.lease import Lease
from jlora.layers.forward.make_batch import make_batch
from jlora.layers.site import HEAD, Site, SlotSpec, delete_attribute
from jlora.layers.specs import LinearSpec
from jlora.layers.wrap.wrapped import WrappedModel, spec_of
from jlora.sharding.put import put, whole
from jlora.slots.codec import to_stored
from jlora.verify.model_copies import cast_to_float32, in_float32, is_exact, merge, unwrapped_copy, wrapped_copy
from jlora.verify.quantized import Products

Forward: TypeAlias = Callable[[nnx.Module, Any, LoRABatch | None], Any]
Rederive: TypeAlias = Callable[[nnx.Module], object]
# The values of one slot: a [(layers,) (E,) n, r, K], b [.., r, N], and extras [(layers,) N] of each finisher.
Values: TypeAlias = tuple[np.ndarray, np.ndarray, Sequence[np.ndarray]]
Outputs: TypeAlias = list[np.ndarray]  # the arrays of one forward, rows first

_TOLERANCE, _HALF_TOLERANCE, _QUANTIZED_TOLERANCE = 1e-4, 2e-2, 1e-1
_NAMES = ("one", "two")
_ROWS_ONLY = (
    "without LinearSpec.dequantize, neither the order and the scale of its features nor the order of the rows of one "
    "sequence was compared"
)
_ALONE = "with random adapters there alone,"
_FEW_ROWS = (
    "fewer than two different rows of it were seen in the whole forward, so its product was not compared with that of "
    "its dequantized weight; verify with more rows"
)


@dataclass(frozen=True)
class VerifyReport:
    """Result of a successful `verify`.

    Attributes:
      checked: Paths of the layers that were compared, in the order in which the forward calls them.
      unserved: Path -> the reason why that wrapped layer serves no adapter in this forward. `manager.unserved` contains
        it from now on.
      unchecked: Path -> the reason why that layer, which serves adapters, was not compared.
      confirmed: Paths of the layers with an uncertain spec, such as a guessed one, that were confirmed.
      error: The largest error of a row. It is relative to the outputs' largest value if the model computes in float32,
        else to the norm of the row's delta.
      tolerance: The upper bound for `error`: 1e-4 for a model in float32, else 2e-2; 1e-1 if a quantized layer, which
        may round its input to few bits, has no `LinearSpec.dequantize` or is a table or a product of experts.
      batches: Number of mixed batches that were compared.
      rows_only: Path -> what was not compared, for the layers in `checked` without a kernel of floats or
        `LinearSpec.dequantize`. Their rows were compared with those of other sequences alone.
    """

    checked: tuple[str, ...]
    unserved: Mapping[str, str]
    unchecked: Mapping[str, str]
    confirmed: tuple[str, ...]
    error: float
    tolerance: float
    batches: int
    rows_only: Mapping[str, str]


def verify(
    wrapped: WrappedModel,
    forward: Forward,
    inputs: Any,
    shape: BatchShape | None,
    batch_axis: int,
    seed: int,
    rederive: Rederive | None,
    plain: Collection[Site] = (),
) -> tuple[VerifyReport, Mapping[Site, str]]:
    """Return the report of `LoRAManager.verify`, and the reason for each wrapped site that serves no adapter.

    The other arguments are its own. `plain` has the sites whose extras no adapter can fill.
    """
    shape = shape or BatchShape(_count(inputs, batch_axis))
    layout = _RowOwners(shape.all_active(wrapped.sites), batch_axis)
    probe = _Probe(wrapped, forward, inputs, layout, seed, rederive, plain)
    # Layers that serve no adapter are recorded instead of raising. All forwards run at one precision, since a jitted
    # forward is compiled for each.
    with opening(probe.record), jax.default_matmul_precision("highest"):
        served, unchecked, unserved = probe.look()
        if not served:
            why = next(iter((unchecked | unserved).values()), "none")
            raise LoRAError(f"verify: forward calls no layer that serves LoRA ({why})")
        probe.check_rederive()
        error, changed = probe.compare(served)
        if not error <= probe.tolerance:
            probe.blame(served, error)
        if not changed:
            raise LoRAError("verify: random adapters change no row of what forward returns, so nothing can be compared")
        confirmed = probe.confirm(served, unserved)
    report = VerifyReport(
        tuple(site.path for site in served),
        _by_path(unserved),
        _by_path(unchecked),
        confirmed,
        error,
        probe.tolerance,
        probe.batches,
        {site.path: _ROWS_ONLY for site in served if site in probe.rows_only},
    )
    return report, unserved


def _by_path(reasons: Mapping[Site, str]) -> dict[str, str]:
    return {site.path: reason for site, reason in reasons.items()}


def _copied(leaf: Any) -> Any:
    return leaf.copy() if isinstance(leaf, jax.Array) else leaf


def _count(inputs: Any, batch_axis: int) -> int:
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(inputs) if np.ndim(leaf) > batch_axis]
    if not shapes or not shapes[0][batch_axis]:
        raise LoRAUsageError(
            "verify: no array of `inputs` says how many sequences there are; give jlora.BatchShape(num_sequences)"
        )
    return shapes[0][batch_axis]


@dataclass(frozen=True)
class _RowOwners:
    """The mapping from rows of inputs and outputs to sequences."""

    shape: BatchShape
    axis: int

    @property
    def packed(self) -> np.ndarray | None:
        """The sequence of each packed row; None if rows are not packed."""
        return self.shape.row_owners()

    def rows(self, output: Any) -> tuple[Outputs, list[np.ndarray]]:
        """Return the arrays of an output in float64, rows first, and the sequence of each row, -1 for padding."""
        arrays: Outputs = []
        owners: list[np.ndarray] = []
        for leaf in jax.tree.leaves(output):
            if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
                continue
            array = whole(leaf).astype(np.float64)
            owner = self._owner(array.shape)
            if owner is None:
                raise LoRAUsageError(
                    f"verify: forward returned an array of shape {array.shape}, whose axis {self.axis} is not that of "
                    f"{self._expected()}. Give BatchShape(token_counts=) for packed rows, length= for flattened ones; "
                    "if sequences are on another axis, give batch_axis; else return rows of sequences alone"
                )
            array = array[0] if self._is_single(array.shape) else np.moveaxis(array, self.axis, 0)
            arrays.append(array.reshape(len(owner), -1))
            owners.append(owner)
        if not arrays:
            raise LoRAUsageError(
                "verify: forward must return floating arrays with rows of the batch, and returned none"
            )
        return arrays, owners

    def _is_single(self, shape: tuple[int, ...]) -> bool:
        """Return True for packed rows of shape [1, tokens, ...]."""
        packed = self.packed
        return packed is not None and shape[:2] == (1, len(packed)) and shape[0] != self.shape.num_sequences

    def _owner(self, shape: tuple[int, ...]) -> np.ndarray | None:
        packed = self.packed
        size = shape[self.axis] if len(shape) > self.axis else None
        if packed is not None and (size == len(packed) or self._is_single(shape)):
            return packed
        sequences, length = self.shape.num_sequences, self.shape.length
        if size == sequences:
            return np.arange(sequences)
        return np.repeat(np.arange(sequences), length) if length and size == sequences * length else None

    def _expected(self) -> str:
        packed = self.packed
        also = "" if packed is None else f" or {len(packed)} packed rows"
        sequences, length = self.shape.num_sequences, self.shape.length
        also += "" if length is None else f" or {sequences * length} flattened rows"
        return f"{sequences} sequences{also}"


class _Probe:
    """One verification: its random factors, and the forwards that serve or merge some of them."""

    def __init__(
        self,
        wrapped: WrappedModel,
        forward: Forward,
        inputs: Any,
        layout: _RowOwners,
        seed: int,
        rederive: Rederive | None,
        plain: Collection[Site],
    ):
        self.wrapped, self.forward, self.inputs, self.layout = wrapped, forward, inputs, layout
        self.rederive, self.plain = rederive, plain
        self.rng = np.random.default_rng(seed)
        # The factors that experts share are added to the same rows, so checking the other factors suffices.
        self.sites = tuple(site for site in wrapped.modules if site.spec.whole and site.kind != "head")
        self.names = _NAMES[: min(site.spec.num_slots for site in self.sites)]
        self.exact = frozenset(site for site in self.sites if is_exact(wrapped, site))
        self.rows_only = frozenset(self.sites) - self.exact - set(filter(self._can_dequantize, self.sites))
        others = [site for site in self.sites if site not in self.exact]
        self.inexact = [s for s in others if s.spec.experts is None and self._linear(s) is not None]
        # Only their own product may round its input to few bits, and it is replaced after the first forward.
        self.quantized = [s for s in self.inexact if s not in self.rows_only]
        self.rounds = any(site not in self.quantized and not self._multiplies_floats(site) for site in others)
        self.batches = 0
        self.record = ForwardRecord(wrapped.sites)
        self._steps: dict[tuple[str, Site], tuple[float, float]] = {}  # of int8
        self.values: dict[str, dict[Site, Values]] = {name: self._draw(i) for i, name in enumerate(self.names)}
        self._filled: dict[Site, list[Array]] = {}
        self._empty: dict[SlotSpec, list[Array]] = {}
        self._bases: dict[bool, Outputs] = {}
        self._owners: list[np.ndarray] = []

    def _choose_tolerance(self, dtypes: Iterable[Any]) -> None:
        """Choose the tolerance of a model that computes in these dtypes, among others."""
        found = {jnp.dtype(s.spec.dtype) for s in self.sites} | {_kernel(self.wrapped, s).dtype for s in self.exact}
        short = any(jnp.issubdtype(d, jnp.floating) and d.itemsize < 4 for d in found.union(dtypes))
        self.half = self.rounds or short
        self.tolerance = _QUANTIZED_TOLERANCE if self.rounds else _HALF_TOLERANCE if short else _TOLERANCE
        # A cast would change the bits of activations that a layer rounds, so both sides run in the dtype of the model.
        self._casts = short and not self.rounds

    def _draw(self, i: int) -> dict[Site, Values]:
        """Return random values of a slot for every site. The product of the factors is about as large as the kernel.

        The second adapter has half the rank.
        """
        values: dict[Site, Values] = {}
        for site in self.sites:
            spec = site.spec
            rank = spec.max_rank if i == 0 else max(1, spec.max_rank // 2)
            size = 0.0
            if site in self.exact:
                size = float(jnp.sqrt(jnp.mean(jnp.square(_kernel(self.wrapped, site).astype(jnp.float32)))))
            size = size or spec.in_features**-0.5
            a = self.rng.normal(size=(*spec.entries, spec.slices, rank, spec.in_features))
            b = self.rng.normal(size=(*spec.entries, rank, spec.out_features)) * (size / rank**0.5)
            # Round to the slots' dtype, so that the merged copy has the same factors.
            steps = 1.0, 1.0
            if spec.dtype == "int8":
                steps = 2.0**-5, 2.0 ** round(math.log2(size / rank**0.5) - 5)
                a, b = (np.rint(each / step).clip(-127, 127) * step for each, step in zip((a, b), steps, strict=True))
            dtype = jnp.dtype(spec.float_dtype)
            a, b = (factor.astype(dtype).astype(np.float32) for factor in (a, b))
            size_of_extra = (*spec.stack, spec.out_features)
            spread = 0.0 if site in self.plain else 0.5
            extras = [extra.fill + self.rng.uniform(-spread, spread, size_of_extra) for extra in spec.extras]
            values[site] = a, b, [extra.astype(np.float32) for extra in extras]
            self._steps[self.names[i], site] = steps
        return values

    def _linear(self, site: Site) -> LinearSpec | None:
        """Return the spec of a linear layer or product, and None for a table."""
        spec = spec_of(self.wrapped.modules[site], site)
        return spec if isinstance(spec, LinearSpec) else None

    def _can_dequantize(self, site: Site) -> bool:
        spec = self._linear(site)
        return spec is not None and can_dequantize(self.wrapped.modules[site], spec)

    def _multiplies_floats(self, site: Site) -> bool:
        """Return True for experts whose products are those of a dequantized weight, and round no input."""
        return site.spec.experts is not None and has_grouped_products(self.wrapped.modules[site])

    # --- the two sides --------------------------------------------------------------------------------------------

    def serve(self, sites: Iterable[Site], names: Sequence[str | None], products: Products | None = None) -> Outputs:
        """Return the outputs of one mixed batch, with factors only in `sites`.

        If `products` is given, layers that can be dequantized compute their own product and add it there.
        """
        chosen = set(sites)
        copy, layers = wrapped_copy(self.wrapped, self.quantized, products)
        for site in self.sites:
            delete_attribute(layers[site], f"{HEAD}_site")  # no saved heads here: merged weights have none
        for site in self.sites:
            arrays = self._random(site, layers[site]) if site in chosen else self._zeros(site, layers[site])
            for attribute, array in zip(site.attributes, arrays, strict=True):
                vars(layers[site])[attribute].set_value(array)
        none = max(site.spec.slots.stop for site in self.wrapped.modules)
        entries = [[(i, 0, 1.0)] for i in range(len(self.names))]
        index = [len(entries) if name is None else self.names.index(name) for name in names]
        # The manager does not use the copy's slots, so the lease holds no adapter. It lasts for this forward.
        shape = self.layout.shape
        lease = Lease((), ((),) * len(names), 0, shape)
        batch = make_batch([*entries, []], index, shape, self.wrapped.sites, lease, none=none, unserved=frozenset())
        arrays, self._owners = self._run(copy, self.inputs, batch)
        return arrays

    def merged(self, sites: Iterable[Site], name: str | None, cast: bool) -> Outputs:
        """Return the outputs of an unwrapped copy, with one adapter's factors merged into the kernels of `sites`."""
        copy, layers = unwrapped_copy(self.wrapped, self.inexact, jnp.float32 if cast else None)
        inputs = self.inputs
        if cast:
            cast_to_float32(copy, [layers[site] for site in self.quantized])
            inputs = jax.tree.map(in_float32, inputs)
        for site in sites if name is not None else ():
            merge(layers[site], self.wrapped, site, *self.values[name or ""][site])
        if self.rederive is not None:
            self.rederive(copy)
        return self._run(copy, inputs, None)[0]

    def _run(self, model: nnx.Module, inputs: Any, batch: LoRABatch | None) -> tuple[Outputs, Any]:
        """Run one forward on copies of the inputs, which it may donate, and return its rows and their owners."""
        given: Any = jax.tree.map(_copied, inputs)
        return self.layout.rows(self.forward(model, given, batch))

    def _random(self, site: Site, layer: nnx.Module) -> list[Array]:
        if site not in self._filled:
            values = _blank(site.spec)
            lead = (slice(None),) * len(site.spec.stack)
            for slot, name in enumerate(self.names):
                a, b, extras = self.values[name][site]
                rank, (step_a, step_b) = b.shape[-2], self._steps[name, site]
                for half, factor in enumerate((a / step_a, b / step_b)):
                    values[half][(*lead, slot)][..., :rank, :] = to_stored(factor, site.spec, half, np)
                for array, extra, of in zip(values[3:], extras, site.spec.extras, strict=True):
                    array[(*lead, slot)] = to_stored(extra, site.spec, 1, np, of.fill)
                values[2][(*lead, slot)] = rank, *(step_a * step_b,) * (values[2].shape[-1] - 1)
            self._filled[site] = _like(values, site, layer)
        return self._filled[site]

    def _zeros(self, site: Site, layer: nnx.Module) -> list[Array]:
        if site.spec not in self._empty:
            self._empty[site.spec] = _like(_blank(site.spec), site, layer)
        return self._empty[site.spec]

    # --- comparing ------------------------------------------------------------------------------------------------

    def look(self) -> tuple[list[Site], dict[Site, str], dict[Site, str]]:
        """Run the forward once and classify the sites by their calls.

        Returns:
          The sites to compare, in call order; the sites that serve but cannot be compared, with reasons; and the sites
            that do not serve, with reasons.

        Raises:
          LoRAError: the product of a layer is not that of its dequantized weight.
        """
        products = Products()
        if not all(np.isfinite(rows).all() for rows in self.serve((), self._mixes()[0], products)):
            self.blame_base()
        jax.effects_barrier()
        self._choose_tolerance(products.dtypes)
        called, unserved = self.record.calls.called, dict(self.record.calls.refused)
        unserved |= {site: "the forward never calls that layer" for site in self.sites if site not in called}
        unchecked: dict[Site, str] = {}
        for site in called:
            linear = site.spec.experts is None and self._linear(site) is not None
            if site in unserved or site in self.exact or (linear and not (site.doubt and site in self.rows_only)):
                continue
            why = "its parameter is quantized, so nothing can be merged into it to compare with"
            (unchecked if site.doubt is None else unserved)[site] = why
        compared = [site for site in called if site in self.quantized and site not in unserved]
        for site, (rows, wrong, first) in zip(compared, products.judge(compared), strict=True):
            if wrong:
                self._refuse(
                    site,
                    f"its product is not that of its dequantized weight in {wrong} of {site.spec.out_features} output "
                    f"features, the first of which is {first}.",
                )
            if rows < 2:
                unserved[site] = _FEW_ROWS
        return [site for site in called if site not in unserved and site not in unchecked], unchecked, unserved

    def check_rederive(self) -> None:
        """Raise `LoRAError` if derived parameters that are computed again change the outputs of the base model."""
        if self.rederive is None:
            return
        copy, _ = unwrapped_copy(self.wrapped, self.inexact)
        for found, kept in zip(self.merged((), None, False), self._run(copy, self.inputs, None)[0], strict=True):
            error = float(np.abs(found - kept).max() / max(np.abs(kept).max(), 1e-30))
            if not error <= self.tolerance:
                raise LoRAError(
                    f"verify: rederive changes the outputs of the base model by {error:.2g}, and {self.tolerance:g} is "
                    "allowed; it must compute each parameter as the model does when it is loaded"
                )

    def _mixes(self) -> list[list[str | None]]:
        """Return batches in which each sequence takes an adapter or the base model, shuffled.

        Any two sequences differ in at least one of them, since the digits of their numbers choose. The base model in
        all of them is left to the items of no sequence.
        """
        choices = (*self.names, None)
        shape = self.layout.shape
        unowned = any(None in items.owners for items in shape.items.values())
        turns = 1
        while len(choices) ** turns < shape.num_sequences + unowned:
            turns += 1
        order = self.rng.permutation(shape.num_sequences)
        return [[choices[int(i) // len(choices) ** turn % len(choices)] for i in order] for turn in range(turns)]

    def compare(self, sites: Sequence[Site]) -> tuple[float, bool]:
        """Return the largest error of a row, and True if some row changed, with factors only in `sites`.

        The error is taken over several mixed batches.
        """
        mixes = self._mixes()
        served = [self.serve(sites, names) for names in mixes]
        own = self._base(False)
        base = self._base(self._casts)
        if not all(np.isfinite(rows).all() for rows in (*own, *base)):
            self.blame_base()
        worst, changed, scale = 0.0, False, 0.0
        for name in (*self.names, None):
            # Only one merged copy exists at a time.
            expected = base if name is None else self.merged(sites, name, self._casts)
            for names, found in zip(mixes, served, strict=True):
                takes = np.array([other == name for other in names])
                for f, e, b, o, owner in zip(found, expected, base, own, self._owners, strict=True):
                    rows = (owner >= 0) & takes[owner]
                    change = np.linalg.norm(e[rows] - b[rows], axis=1)
                    changed |= bool(change.any())
                    scale = max(scale, change.max(initial=0))
                    worst = max(worst, self._error(f[rows], e[rows], b[rows], o[rows], e, change, scale))
        self.batches += len(mixes)
        return worst, changed

    def _base(self, cast: bool) -> Outputs:
        if cast not in self._bases:
            try:
                self._bases[cast] = self.merged((), None, cast)
            except Exception:
                if not cast:
                    raise
                # The model does not run in float32 (it stores its dtype elsewhere). Merge in float32 and run in its own
                # dtype.
                self._casts = False
                return self._base(False)
        return self._bases[cast]

    def _error(self, found: Any, expected: Any, base: Any, own: Any, whole: Any, change: Any, scale: float) -> float:
        """Return the largest error of these rows.

        In float32 it is relative to the largest output. Otherwise it is, for each row, the error of its delta relative
        to the norm of the expected delta.
        """
        if not len(found):
            return 0.0
        if not (np.isfinite(found).all() and np.isfinite(whole).all()):
            return float("inf")
        if not self.half:
            return float(np.abs(found - expected).max() / max(np.abs(whole).max(), 1e-30))
        off = np.linalg.norm((found - own) - (expected - base), axis=1)
        norm = np.maximum(change, max(0.1 * scale, 1e-30))  # bounded below for rows that hardly change
        return float((off / norm).max())

    def blame_base(self) -> NoReturn:
        """Raise `LoRAError` for a model whose base outputs are not finite, naming the layer with the bad parameter."""
        kernels = ((s, _kernel(self.wrapped, s).astype(jnp.float32)) for s in self.sites if s in self.exact)
        cause = next((site.path for site, kernel in kernels if not jnp.isfinite(kernel).all()), None)
        raise LoRAError(
            "verify: what forward returns without adapters is not finite, so nothing can be compared"
            + ("; return finite values alone" if cause is None else f": the parameter of {cause} is not finite")
        )

    def _refuse(self, site: Site, found: str) -> NoReturn:
        name = type(self.wrapped.modules[site]).__name__.removesuffix("WithLoRA")
        guess = "" if site.doubt is None else f" {site.doubt.why}: that does not hold."
        raise LoRAError(
            f"verify: {site.path} ({name}) is off: {found}{guess} Either its rows are not the batch's (patches that "
            "sequences share, another axis as long as the batch, packed rows without token_counts), or the model mixes "
            "sequences after it (BatchNorm or Dropout in training mode: call model.eval() first), or its spec does not "
            "say what it computes (axes, a scaled input or output; if the columns of the kernel are ordered unlike the "
            "output, LinearSpec(dequantize=) returns the kernel in the order of the output), or the model multiplies a "
            "parameter that is derived from its kernel. Register its class with the right spec, or leave it out: "
            "LoRAConfig.exclude_modules"
        )

    def blame(self, sites: Sequence[Site], error: float) -> NoReturn:
        """Raise `LoRAError` for the first layer that differs when only it has factors."""
        for site in sites:
            alone, _ = self.compare([site])
            if not alone <= self.tolerance:
                found = f"some row of the batch differs from merged weights by {alone:.2g}, and {self.tolerance:g}"
                if not np.isfinite(alone):
                    self._refuse(site, f"{_ALONE} some row is not finite, as served or with merged weights.")
                self._refuse(site, f"{_ALONE} {found} is allowed.")
        raise LoRAError(
            f"verify: some row differs from merged weights by {error:.2g}, and {self.tolerance:g} is allowed, though "
            f"each of the {len(sites)} layers is right alone: the model is too sensitive to rounding for this check, "
            "or layers act on each other in a way that depends on the batch"
        )

    def confirm(self, sites: Sequence[Site], reasons: dict[Site, str]) -> tuple[str, ...]:
        """Return the paths of the uncertain layers that are confirmed.

        Each must have changed some row on its own. The others get a reason in `reasons`.
        """
        confirmed: list[str] = []
        for site in sites:
            if site.doubt is None:
                continue
            error, changed = self.compare([site])
            if not error <= self.tolerance:
                self.blame([site], error)
            if not changed:
                reasons[site] = (
                    f"{site.doubt.why}, and a random adapter there changes no row, so nothing was seen of it"
                )
                continue
            confirmed.append(site.path)
        return tuple(confirmed)


def _kernel(wrapped: WrappedModel, site: Site) -> Array:
    layer = wrapped.modules[site]
    return cast("Any", held_by(layer, spec_of(layer, site))).get_value()


def _blank(spec: SlotSpec) -> list[np.ndarray]:
    """Return the arrays of empty slots."""
    return [np.full(array.shape, array.fill, array.dtype) for array in spec.arrays.values()]


def _like(values: Sequence[np.ndarray], site: Site, layer: nnx.Module) -> list[Array]:
    """Return the values on the device, sharded like the slot arrays."""
    arrays = [vars(layer)[attribute].get_value() for attribute in site.attributes]
    return put(values, [array.sharding for array in arrays])
