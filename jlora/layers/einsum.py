"""Einsum equations of linear layers: map the axes of input, kernel and output to rows, K and N."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from flax import nnx
from jax import Array

from jlora._typing import DType
from jlora.errors import LoRAError, LoRAUsageError
from jlora.layers.specs import Blocks, LinearSpec, Restore

_EQUATION = re.compile(r"[\w.\s]+,[\w.\s]+->[\w.\s]*")  # `jnp.einsum` takes letters of all scripts, and digits


def is_equation(value: Any) -> bool:
    """Return True for a string such as "BTD,DNH->BTNH"."""
    return isinstance(value, str) and _EQUATION.fullmatch(value) is not None


@dataclass(frozen=True)
class EinsumAxes:
    """How the axes of one equation flatten.

    Attributes:
      x: permutation of the input to lead axes followed by in axes.
      y: permutation of the output to lead axes followed by out axes.
      lead: number of lead axes.
      kernel_in, kernel_out: in and out axes of the kernel.
    """

    x: tuple[int, ...]
    y: tuple[int, ...]
    lead: int
    kernel_in: tuple[int, ...]
    kernel_out: tuple[int, ...]


def einsum_axes(equation: str, x_ndim: int | None = None) -> EinsumAxes | str:
    """Return the axes of an equation such as "BTD,DNH->BTNH", or the reason why it is not a linear layer.

    With an ellipsis, the axes of x and y are valid only if `x_ndim` is given.
    """
    if not is_equation(equation):
        return f"{equation!r} is not an einsum of one input and one kernel"
    x, rest = re.sub(r"\s", "", equation).split(",")
    kernel, y = rest.split("->")
    if "..." in kernel:
        return f"the kernel of {equation!r} has an ellipsis"
    if "..." in x:
        spread = 0 if x_ndim is None else x_ndim - len(x.replace("...", ""))
        stand_in = "".join(chr(0xE000 + i) for i in range(spread))  # of no script, so no equation contains them
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
    if not inner or not outer:
        return f"{equation!r} has no axis that goes {'in' if not inner else 'out'}"
    if x_ndim is not None and x_ndim != len(x):
        return f"{equation!r} takes {len(x)} axes, and the input has {x_ndim}"
    lead = [c for c in x if c not in kernel]
    return EinsumAxes(
        tuple(x.index(c) for c in (*lead, *inner)),
        tuple(y.index(c) for c in (*lead, *outer)),
        len(lead),
        tuple(kernel.index(c) for c in inner),
        tuple(kernel.index(c) for c in outer),
    )


@dataclass(frozen=True)
class EinsumRows:
    """The `rows` function of an einsum layer. A call may pass another equation for the same kernel."""

    equation: str

    def __call__(self, layer: Any, x: Array, y: Array, *args: Any, **kwargs: Any) -> tuple[Array, Array, Restore]:
        axes = self._axes_of_call(x, args, kwargs)
        moved = y.transpose(axes.y)
        shape = moved.shape[: axes.lead]
        back = tuple(axes.y.index(i) for i in range(y.ndim))
        return (
            x.transpose(axes.x).reshape(*shape, -1),
            moved.reshape(*shape, -1),
            lambda rows: rows.reshape(moved.shape).transpose(back),
        )

    def flat_bias(self, bias: Array, x: Array, y: Array, *args: Any, **kwargs: Any) -> Array:
        """Return a bias in the order of the output's axes as [N], in the order of the kernel's out axes."""
        axes = self._axes_of_call(x, args, kwargs)
        out = axes.y[axes.lead :]
        order = sorted(out)
        return bias.reshape([y.shape[i] for i in order]).transpose([order.index(i) for i in out]).reshape(-1)

    def _axes_of_call(self, x: Array, args: Sequence[Any], kwargs: Mapping[str, Any]) -> EinsumAxes:
        given = next((value for value in (*args, *kwargs.values()) if is_equation(value)), None)
        return self.axes(given or self.equation, x.ndim)

    def axes(self, given: str, x_ndim: int) -> EinsumAxes:
        """Return the axes of the equation that a call passes. Raises `LoRAError` if it uses the kernel differently."""
        own, axes = einsum_axes(self.equation), einsum_axes(given, x_ndim)
        if isinstance(axes, str):
            raise LoRAError(f"it cannot follow the call: {axes}")
        if isinstance(own, str) or axes.kernel_in != own.kernel_in:
            raise LoRAError(
                f"called with einsum_str={given!r}, which uses the kernel otherwise than its own {self.equation!r}: "
                "LoRA cannot follow that"
            )
        return axes


def einsum_spec(
    equation: str,
    shape: Sequence[int],
    param: str | None = "w",
    *,
    in_index: Sequence[int] | np.ndarray | None = None,
    out_index: Sequence[int] | np.ndarray | None = None,
    out_blocks: Blocks | None = None,
    dtype: DType | None = None,
    bias: str | None = "bias",
    dequantize: Callable[[Any], Array] | None = None,
    product: Callable[[Array, Array], Array] | None = None,
) -> LinearSpec:
    """Return the spec of a layer that computes `einsum(equation, x, kernel)`.

    Args:
      equation: input, kernel and output: "BTD,DNH->BTNH". A call of the layer may pass another equation for the same
        kernel, as any argument. A letter that only the kernel has, as L in "BTD,DLNH->BTNH", is the axis of a stack of
        layers (`LinearSpec.stack_axis`), which are called without it.
      shape: the kernel's shape, in the equation's order.
      param: name of the kernel attribute; None if the layer stores the kernel in a form of its own.
      in_index: as in `LinearSpec`: positions in the flattened in axes, in the kernel's order, that belong to a
        checkpoint, for padded heads or interleaved shards.
      out_index: the same for the out axes.
      out_blocks: as in `LinearSpec`, instead of `out_index`: runs of the flattened out axes, which may be repeated.
      dtype: dtype of the slots, as in `LinearSpec`.
      bias: name of the attribute that the layer adds to its output, as in `LinearSpec`, in the order of the output's
        axes.
      dequantize: as in `LinearSpec`: [K, N] has the kernel's in axes and out axes in the equation's order.
      product: as in `LinearSpec`.

    Returns:
      The spec, with `rows` set.

    Raises:
      LoRAUsageError: the equation is not a linear layer, or has another number of axes than `shape`.

    Example:
      >>> jlora.register_layer(Einsum, lambda layer: jlora.einsum_spec(layer.equation, layer.w.shape))
    """
    equation, stack_axis = _without_stack(equation)
    axes = einsum_axes(equation)
    if isinstance(axes, str):
        raise LoRAUsageError(f"einsum_spec: {axes}")
    shape = [size for axis, size in enumerate(shape) if axis != stack_axis]
    if len(shape) != len(axes.kernel_in) + len(axes.kernel_out):
        raise LoRAUsageError(f"einsum_spec: the kernel of {equation!r} cannot have the shape {tuple(shape)}")
    return LinearSpec(
        math.prod(shape[i] for i in axes.kernel_in),
        math.prod(shape[i] for i in axes.kernel_out),
        param,
        in_axes=axes.kernel_in,
        out_axes=axes.kernel_out,
        rows=EinsumRows(equation),
        in_index=in_index,
        out_index=out_index,
        out_blocks=out_blocks,
        dtype=dtype,
        bias=bias,
        dequantize=dequantize,
        product=product,
        stack_axis=stack_axis,
    )


def _without_stack(equation: str) -> tuple[str, int | None]:
    """Return an equation without the letter that only the kernel has, and its axis; None if there is no such letter."""
    x, kernel, y = re.split(",|->", re.sub(r"\s", "", equation)) if is_equation(equation) else ("", "", "")
    alone = [axis for axis, letter in enumerate(kernel) if letter not in x + y]
    if len(alone) != 1:
        return equation, None
    return f"{x},{kernel[: alone[0]]}{kernel[alone[0] + 1 :]}->{y}", alone[0]


def describe_einsum(layer: nnx.Einsum) -> LinearSpec | str:
    """Return the spec of an `nnx.Einsum`, or the reason why it cannot be wrapped."""
    if not isinstance(layer.einsum_str, str):  # None is possible despite Flax's annotation, if calls pass equations
        return "it has no einsum_str of its own"
    axes = einsum_axes(layer.einsum_str)
    return axes if isinstance(axes, str) else einsum_spec(layer.einsum_str, layer.kernel_shape, "kernel")
