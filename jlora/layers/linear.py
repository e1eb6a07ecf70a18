"""LoRA on anything linear: how each layer kind lays out rows and features, and the one class that adds the delta."""

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float

from jlora.errors import LoRAError
from jlora.layers.scope import check_slots_fresh, enter_site
from jlora.layers.site import Site
from jlora.pallas.api import add_lora

Restore = Callable[[Array], Array]
Rows = Callable[..., tuple[Array, Array, Restore]]


@dataclass(frozen=True)
class LinearLayer:
    """What jlora must know of a linear layer class.

    Attributes:
      in_features, out_features: K and N (all axes multiplied).
      param: name of the kernel attribute; its dtype is the slots' dtype unless configured.
      in_axes, out_axes: the kernel's axes, in the order in which they flatten to K and to N.
      rows: `rows(layer, x, y, *args, **kwargs)` -> x as [*lead, K], y as [*lead, N], and the way back from
        [*lead, N] to y's own shape. None: K and N are the last axes of input and output.
    """

    in_features: int
    out_features: int
    param: str = "kernel"
    in_axes: tuple[int, ...] = (0,)
    out_axes: tuple[int, ...] = (1,)
    rows: Rows | None = None


def describe_linear(layer: nnx.Linear) -> LinearLayer:
    return LinearLayer(layer.in_features, layer.out_features)


def describe_general(layer: nnx.LinearGeneral) -> LinearLayer | str:
    """`nnx.LinearGeneral`, or the reason why it cannot be wrapped."""
    if layer.batch_axis:
        return "its batch_axis gives every batch entry a kernel of its own"
    n_in = len(layer.in_features)
    return LinearLayer(
        math.prod(layer.in_features),
        math.prod(layer.out_features),
        in_axes=tuple(range(n_in)),
        out_axes=tuple(range(n_in, n_in + len(layer.out_features))),
        rows=_general_rows,
    )


def _general_rows(layer: nnx.LinearGeneral, x: Array, y: Array, *_, **__):
    # Flax sorts the axes before it contracts them with the kernel's leading ones.
    axes = sorted(axis % x.ndim for axis in layer.axis)
    lead = [axis for axis in range(x.ndim) if axis not in axes]
    x = x.transpose(*lead, *axes)
    shape = x.shape[: len(lead)]
    return x.reshape(*shape, -1), y.reshape(*shape, -1), lambda rows: rows.reshape(y.shape)


@dataclass(frozen=True)
class _EinsumAxes:
    x: tuple[int, ...]  # x transposed to lead + in axes
    y: tuple[int, ...]  # y transposed to lead + out axes
    lead: int
    kernel_in: tuple[int, ...]
    kernel_out: tuple[int, ...]


def _einsum_axes(equation: str, x_ndim: int | None = None) -> _EinsumAxes | str:
    """Read "BTD,DNH->BTNH", or say why the equation is not a linear layer. Axes of x and y need `x_ndim`."""
    x, rest = equation.replace(" ", "").split(",")
    kernel, y = rest.split("->")
    if "..." in kernel:
        return f"the kernel of {equation!r} has an ellipsis"
    if "..." in x:
        spread = 0 if x_ndim is None else x_ndim - len(x.replace("...", ""))
        stand_in = "".join(chr(0x3B1 + i) for i in range(spread))  # Greek letters: never in an equation
        x, y = x.replace("...", stand_in), y.replace("...", stand_in)
    shared = sorted(set(x) & set(kernel) & set(y))
    summed = sorted((set(x) - set(kernel) - set(y)) | (set(kernel) - set(x) - set(y)))
    if len(set(x)) < len(x) or len(set(kernel)) < len(kernel):
        return f"{equation!r} takes a diagonal"
    if shared:
        return f"{equation!r} has a kernel of its own for each entry of {', '.join(shared)}"
    if summed:
        return f"{equation!r} sums over {', '.join(summed)} alone"
    inner = [c for c in kernel if c in x]
    outer = [c for c in kernel if c in y]
    lead = [c for c in x if c not in kernel]
    return _EinsumAxes(
        tuple(x.index(c) for c in (*lead, *inner)),
        tuple(y.index(c) for c in (*lead, *outer)),
        len(lead),
        tuple(kernel.index(c) for c in inner),
        tuple(kernel.index(c) for c in outer),
    )


def describe_einsum(layer: nnx.Einsum) -> LinearLayer | str:
    """`nnx.Einsum`, or the reason why it cannot be wrapped."""
    if layer.einsum_str is None:
        return "it has no einsum_str of its own"
    axes = _einsum_axes(layer.einsum_str)
    if isinstance(axes, str):
        return axes
    shape = layer.kernel_shape
    return LinearLayer(
        math.prod(shape[i] for i in axes.kernel_in),
        math.prod(shape[i] for i in axes.kernel_out),
        in_axes=axes.kernel_in,
        out_axes=axes.kernel_out,
        rows=_einsum_rows,
    )


def _einsum_rows(layer: Any, x: Array, y: Array, einsum_str: str | None = None, *_, **__):
    own = _einsum_axes(layer.einsum_str)
    axes = _einsum_axes(einsum_str or layer.einsum_str, x.ndim)
    if isinstance(axes, str) or isinstance(own, str) or axes.kernel_in != own.kernel_in:
        raise LoRAError(
            f"{layer.jlora_site.path}: called with einsum_str={einsum_str!r}, which uses the kernel otherwise than its "
            f"own {layer.einsum_str!r}: LoRA cannot follow that"
        )
    moved = y.transpose(axes.y)
    shape = moved.shape[: axes.lead]
    back = tuple(axes.y.index(i) for i in range(y.ndim))
    return (
        x.transpose(axes.x).reshape(*shape, -1),
        moved.reshape(*shape, -1),
        lambda rows: rows.reshape(moved.shape).transpose(back),
    )


def add_delta(
    layer: Any,
    site: Site,
    base: Float[Array, "*lead N"],
    x: Float[Array, "*lead K"],
) -> Float[Array, "*lead N"]:
    """`base` plus the LoRA of every row, in the scope that is open; the base itself in `use(None)`.

    Raises:
      LoRAError: outside `jlora.use`, or where `lead` fits no layout of the batch.
    """
    scope = enter_site(site, layer.jlora_tracking)
    if scope is None or not base.size:
        return base
    plan = scope.plan(site, base)
    if plan is None:  # its rows fit no layout: the scope refuses adapters that bring weights for it
        return base
    a, b, ranks = slot_arrays(layer, site)
    with jax.named_scope("lora"):
        out = add_lora(
            base.reshape(-1, site.spec.out_features),
            # PEFT casts the input to the adapter's dtype too (peft.tuners.lora.layer, _cast_input_dtype).
            x.reshape(-1, site.spec.in_features).astype(a.dtype),
            a,
            b,
            plan,
            slice_sizes=site.spec.out_sizes,
            ranks=ranks,
            backend=site.backend,
        )
    return out.reshape(base.shape)


def slot_arrays(layer: Any, site: Site) -> tuple[Array, Array, Array]:
    """A [S, n, R, K], B [S, R, N] and ranks [S, n] of a layer inside the forward."""
    a, b, ranks = (getattr(layer, name)[...] for name in site.attributes)
    check_slots_fresh(site.path, a)
    if a.ndim != 4:
        raise LoRAError(
            f"{site.path}: this layer is one of a stack of {site.spec.layers}, but its slot arrays still have the "
            "stack axis; map jlora.SlotParam over axis 0 in the StateAxes of your nnx.scan, as the kernel is"
        )
    return a, b, ranks


def linear_methods(cls: type) -> dict[str, Callable]:
    """The method with which a subclass of the linear layer class `cls` serves LoRA: the layer's own, plus the delta."""
    name = list(inspect.signature(cls.__call__).parameters)[1]

    @functools.wraps(cls.__call__)
    def call(self, *args, **kwargs):
        y = cls.__call__(self, *args, **kwargs)
        if not args:
            args = (kwargs.pop(name),)
        spec: LinearLayer = self.jlora_spec
        if spec.rows is None:
            return add_delta(self, self.jlora_site, y, args[0])
        x, base, restore = spec.rows(self, args[0], y, *args[1:], **kwargs)
        return restore(add_delta(self, self.jlora_site, base, x))

    return {"__call__": call}
