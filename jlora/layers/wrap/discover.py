"""Find the layers of an `nnx.Module`: all paths to each, and its spec or the reason why it has none."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from flax import nnx

from jlora import _qwix
from jlora._typing import is_list_or_tuple, is_mapping
from jlora.errors import LoRAError, LoRAUsageError
from jlora.layers.base_kernel import forgotten, held_by, kernel_of
from jlora.layers.einsum import describe_einsum, einsum_axes, einsum_spec, is_equation
from jlora.layers.forward.experts import describe_grouped, has_grouped_products
from jlora.layers.specs import (
    Describe,
    Doubt,
    EmbedSpec,
    ExpertsSpec,
    LinearSpec,
    Spec,
    describe_embed,
    describe_general,
    describe_linear,
    describe_quantized,
    own_attribute,
)
from jlora.layers.wrap.linen import LinenDense, LinenEmbed, LinenNode, describe_dense
from jlora.layers.wrap.linen import describe_embed as describe_linen_embed

_describe: dict[type[nnx.Module], Describe] = {
    nnx.Linear: describe_linear,
    nnx.LinearGeneral: describe_general,
    nnx.Einsum: describe_einsum,
    nnx.Embed: describe_embed,
    LinenDense: describe_dense,
    LinenEmbed: describe_linen_embed,
}
_BIASES = ("bias", "b")
_NO_WEIGHTS = (nnx.Cache, nnx.BatchStat, nnx.Intermediate, nnx.RngState)
_STACK = (
    "its kernel fits its spec as a stack of {layers} layers on axis {axis}{like}, and stacks are served with the "
    "layers on axis 0: nnx.StateAxes({{nnx.Param: 0, ...}}) in nnx.vmap and nnx.scan"
)
_NORMS = (nnx.BatchNorm, nnx.LayerNorm, nnx.RMSNorm, nnx.GroupNorm, nnx.InstanceNorm)


def register_layer(cls: type[nnx.Module], describe: Describe) -> None:
    """Register a layer class, so that managers made later wrap it and its subclasses that keep its methods.

    Args:
      cls: a layer class. Linear: its `__call__` takes the input (the first argument that is an array) and returns its
        projection, or (projection, bias). Embedding: its methods are those named in the spec.
      describe: function `describe(layer)` that returns a `LinearSpec` (also from `einsum_spec`), an `EmbedSpec`, an
        `ExpertsSpec`, or a string with the reason why this instance cannot serve LoRA.

    Raises:
      LoRAUsageError: `cls` is no subclass of `nnx.Module`.

    Example:
      >>> jlora.register_layer(MyDense, lambda layer: jlora.LinearSpec(layer.n_in, layer.n_out, param="w"))
    """
    if not (isinstance(cls, type) and issubclass(cls, nnx.Module)):
        raise LoRAUsageError(f"register_layer takes a subclass of nnx.Module, got {cls!r}")
    _describe[cls] = describe


@dataclass(frozen=True, eq=False)
class ModuleInfo:
    """One module of a model.

    Attributes:
      module: the module.
      aliases: every dotted path that reaches it.
      spec: its spec, or the reason why it cannot serve LoRA.
      guess: the uncertainty of a guessed spec, else None.
      reasons: method of an embedding ("lookup" or "attend") -> the reason why it serves no LoRA.
      stacks: (axis, layers) of each axis of a kernel that can be the axis of a stack of layers; empty for one layer.
      excluded: True if the configuration excludes it. `spec` is then the reason, and the module was not described.
    """

    module: nnx.Module
    aliases: tuple[str, ...]
    spec: Spec | str
    guess: Doubt | None = None
    reasons: Mapping[str, str] = field(default_factory=dict[str, str])
    stacks: frozenset[tuple[int, int]] = frozenset()
    excluded: bool = False

    @property
    def candidate(self) -> bool:
        """True if LoRA could be expected here: a layer of a known class, or a module with a matrix of its own."""
        if isinstance(self.module, _NORMS):
            return False
        return _base_of(type(self.module)) is not None or _is_bridged(self.module) or bool(_matrices(self.module))


def discover(model: nnx.Module, excluded: Callable[[tuple[str, ...]], str | None]) -> list[ModuleInfo]:
    """Return every module below `model` in path order, shared modules once.

    Args:
      model: any `nnx.Module`.
      excluded: aliases of a module -> the reason why the configuration excludes the module, or None. An excluded module
        is not described.

    Raises:
      LoRAUsageError: the model is itself a layer, so it has no path.
    """
    if type(model) in _describe or isinstance(model, nnx.Embed):
        raise LoRAUsageError(
            f"the model itself is a {type(model).__name__}; hold it in an nnx.Module, so that it has a path"
        )
    modules: dict[int, nnx.Module] = {}
    aliases: dict[int, list[str]] = {}
    for path, module in walk(model):
        modules[id(module)] = module
        aliases.setdefault(id(module), []).append(path)
    infos: list[ModuleInfo] = []
    for key, paths in aliases.items():
        module, names = modules[key], tuple(paths)
        reason = excluded(names)
        infos.append(_info_of(module, names) if reason is None else ModuleInfo(module, names, reason, excluded=True))
    return _with_known_stacks(infos)


def _with_known_stacks(everything: Sequence[ModuleInfo]) -> list[ModuleInfo]:
    """Return the modules, and refuse layers that fit as a stack on axis 0 and on one that is known from other layers.

    A kernel [heads, layers, ...] with as many layers as heads is an example: its shape is that of both.
    """
    known = {
        stack: info.aliases[0]
        for info in reversed(everything)
        if not any(axis == 0 for axis, _ in info.stacks)
        for stack in info.stacks
    }
    kept: list[ModuleInfo] = []
    for info in everything:
        stack = next((stack for stack in sorted(info.stacks) if stack in known), None)
        if stack is not None and not isinstance(info.spec, str):
            like = f", as that of {known[stack]!r} does"
            info = replace(info, spec=_STACK.format(axis=stack[0], layers=stack[1], like=like))
        kept.append(info)
    return kept


def walk(model: nnx.Module) -> Iterator[tuple[str, nnx.Module]]:
    """Yield (dotted path, module) for every module below `model`, a shared module once for each path."""

    def below(node: Any, path: str, above: tuple[int, ...]) -> Iterator[tuple[str, nnx.Module]]:
        if id(node) in above:
            return
        above = (*above, id(node))
        if isinstance(node, nnx.Pytree) and not isinstance(node, nnx.Variable):
            if path and isinstance(node, nnx.Module):
                yield path, node
            children: Iterable[tuple[Any, Any]] = vars(node).items()
        elif is_mapping(node):
            children = node.items()
        elif is_list_or_tuple(node):
            children = enumerate(node)
        else:
            return
        for name, child in children:
            yield from below(child, f"{path}.{name}" if path else str(name), above)

    return below(model, "", ())


def _info_of(module: nnx.Module, aliases: tuple[str, ...]) -> ModuleInfo:
    """Return a module with its spec. Any error becomes the module's reason, so that the others are still served."""
    try:
        return _described(module, aliases)
    except LoRAError as error:
        return ModuleInfo(module, aliases, str(error))
    except Exception as error:  # `describe` of a layer class may raise any error
        reason = f"{type(module).__name__} cannot be described: {error!r}{_how_to_register(module)}"
        return ModuleInfo(module, aliases, reason)


def _described(module: nnx.Module, aliases: tuple[str, ...]) -> ModuleInfo:
    """Return a module with its spec.

    Raises:
      LoRAError: the spec does not fit the module. Errors of the class's `describe` are passed on.
    """
    cls, base = type(module), _base_of(type(module))
    reasons: dict[str, str] = {}
    guess: str | None = None
    if base is None and has_grouped_products(module):
        spec = describe_grouped(module)
    elif base is None and own_attribute(module, "dequantized") is not None:
        spec = describe_quantized(module)
    elif base is None:
        spec = _einsum_by_equation(module)
        if isinstance(spec, LinearSpec):
            guess = f"{cls.__name__} was taken for an einsum by its equation and its only parameter"
    else:
        spec = _describe[base](module)
        if not issubclass(base, nnx.Embed) and cls.__call__ is not base.__call__:
            guess = f"{cls.__name__} overrides the __call__ of {base.__name__}, and was taken for one"
            if isinstance(spec, LinearSpec) and spec.param not in vars(module):
                spec = _einsum_by_equation(module)
    if isinstance(spec, EmbedSpec):
        spec, reasons = _kept_methods(spec, cls, base or cls)
    stacks = _stacks(module, spec)
    if stacks and all(axis for axis, _ in stacks):
        axis, layers = min(stacks)
        return ModuleInfo(module, aliases, _STACK.format(axis=axis, layers=layers, like=""), stacks=stacks)
    if isinstance(spec, ExpertsSpec):
        for name, product in spec.products.items():
            if base is not None and getattr(cls, name, None) is not getattr(base, name, None):
                raise LoRAUsageError(
                    f"{cls.__name__} overrides the {name} of {base.__name__}, and jlora cannot know what it computes; "
                    "register the class itself with an ExpertsSpec"
                )
            if problem := _contradiction(module, product, spec.experts) or _unsliced(name, product, spec):
                raise LoRAUsageError(f"{name}: {problem}")
    elif isinstance(spec, LinearSpec | EmbedSpec):
        spec = _contradiction(module, spec) or spec
    elif not isinstance(spec, str):
        raise LoRAUsageError(
            f"describe of {cls.__name__} must return a LinearSpec, an EmbedSpec, an ExpertsSpec or a string that says "
            f"why not, got {type(spec).__name__}"
        )
    doubt = None
    if guess is not None and isinstance(spec, LinearSpec):
        doubt = Doubt(guess, "say what the class computes with jlora.register_layer")
    return ModuleInfo(module, aliases, spec, doubt, reasons, stacks)


def _base_of(cls: type[nnx.Module]) -> type[nnx.Module] | None:
    """Return the registered class that describes `cls`: itself or its nearest registered ancestor."""
    return next((ancestor for ancestor in cls.__mro__ if ancestor in _describe), None)


def _is_bridged(module: nnx.Module) -> bool:
    return isinstance(module, nnx.bridge.ToNNX)


def _einsum_by_equation(module: nnx.Module) -> LinearSpec | str:
    """Return the spec of a module with one equation and one parameter besides a bias, or why it has none."""
    name = type(module).__name__
    if _is_bridged(module):
        return "it is a Linen module: hold it in a jlora.LinenModule instead"
    if isinstance(module, LinenNode):
        several = next((shape for shape in _matrices(module).values() if len(shape) > 2), None)
        why = "this is another module of it"
        if several is not None:
            why = (
                f"this holds a kernel {several}: it is a stack of them (nn.scan, nn.vmap), or another module, such as "
                "nn.DenseGeneral. Call layers of a stack in a Python loop, each with parameters of its own"
            )
        return f"jlora.LinenModule serves the nn.Dense and nn.Embed of a Linen model, and {why}"
    equations = {value for value in vars(module).values() if is_equation(value)}
    own: dict[str, Any] = vars(module)
    params: dict[str, Any] = {
        key: value
        for key, value in own.items()
        if key not in _BIASES and (isinstance(value, nnx.Param) or _qwix.is_quantized(value))
    }
    if len(equations) != 1 or len(params) != 1:
        return f"{name} is not a linear or embedding layer that jlora knows{_how_to_register(module)}"
    equation, (param, kernel) = equations.pop(), *params.items()
    axes = einsum_axes(equation)
    if isinstance(axes, str):
        return axes
    letters = len(axes.kernel_in) + len(axes.kernel_out)
    shape: tuple[int, ...] = kernel.shape[-letters:]
    if len(shape) != letters:
        return f"{name} has the equation {equation!r}, and a parameter of the shape {shape}"
    return einsum_spec(equation, shape, param, bias=next((name for name in _BIASES if name in own), None))


def _kept_methods(spec: EmbedSpec, cls: type, base: type) -> tuple[Spec | str, dict[str, str]]:
    """Return the spec without the methods that a subclass of the registered class overrides, and the reasons."""
    reasons: dict[str, str] = {}
    for role in ("lookup", "attend"):
        name = getattr(spec, role)
        if name is None:
            continue
        if not callable(getattr(cls, name, None)):
            raise LoRAUsageError(f"EmbedSpec.{role} is {name!r}, and {cls.__name__} has no such method")
        if getattr(cls, name) is not getattr(base, name):
            reasons[role] = (
                f"{cls.__name__} overrides the {name} of {base.__name__}, and jlora cannot know what it computes "
                "(jlora.register_layer with a jlora.EmbedSpec says so)"
            )
    if all(role in reasons or getattr(spec, role) is None for role in ("lookup", "attend")):
        return next(iter(reasons.values())), {}
    return replace(spec, **dict.fromkeys(reasons)), reasons


def _unsliced(name: str, product: LinearSpec, spec: ExpertsSpec) -> str | None:
    slices = len(spec.names[name])
    if product.real_out % slices:
        return f"its {product.real_out} outputs are no {slices} slices of one size, as its names say"
    return None


def _stacks(module: nnx.Module, spec: object) -> frozenset[tuple[int, int]]:
    """Return (axis, size) of each axis without which a kernel of floats fits its spec. See `ModuleInfo.stacks`."""
    products = spec.products.values() if isinstance(spec, ExpertsSpec) else (spec,)
    experts = (spec.experts,) if isinstance(spec, ExpertsSpec) else ()
    found: set[tuple[int, int]] = set()
    for product in products:
        if not isinstance(product, LinearSpec | EmbedSpec) or (kernel := kernel_of(module, product)) is None:
            continue
        linear = product.table if isinstance(product, EmbedSpec) else product
        shape: tuple[int, ...] = tuple(kernel.array.shape)
        named = sorted((*linear.in_axes, *linear.out_axes))
        if named != list(range(len(shape) - len(experts) - 1)) or not _is_float(kernel.dtype):
            continue
        for axis, size in enumerate(shape):
            one = shape[:axis] + shape[axis + 1 :]
            own = one[len(experts) :]
            sizes = [math.prod(own[i] for i in axes) for axes in (linear.in_axes, linear.out_axes)]
            if one[: len(experts)] == experts and sizes == [linear.in_features, linear.out_features]:
                found.add((axis, size))
    return frozenset(found)


def _contradiction(module: nnx.Module, spec: LinearSpec | EmbedSpec, experts: int | None = None) -> str | None:
    """Return how the parameter of a layer contradicts its spec, or None.

    With `experts`, the parameter has an axis of that size before the axes of the spec.
    """
    kernel = kernel_of(module, spec)
    if kernel is None:
        return _no_kernel(module, spec, experts)
    if _qwix.is_quantized(held_by(module, spec)) and not (isinstance(spec, LinearSpec) and experts is None):
        return (
            f"its parameter {spec.param!r} is quantised by qwix, and jlora serves quantised linear layers only; leave "
            "this one out of the module_path of the qwix.QuantizationRule"
        )
    shape, dtype = tuple(kernel.array.shape), kernel.dtype
    axes = (0, 1) if isinstance(spec, EmbedSpec) else (*spec.in_axes, *spec.out_axes)
    if len(shape) < len(axes) + (experts is not None):
        return f"its parameter {spec.param!r} has shape {shape}, and its spec names {len(axes)} axes"
    if experts is not None and shape[-len(axes) - 1] != experts:
        return f"its parameter {spec.param!r} has shape {shape}, and its spec says {experts} experts before its axes"
    own = shape[len(shape) - len(axes) :]
    if sorted(axes) != list(range(len(axes))):
        return f"in_axes and out_axes must name each axis of {spec.param!r} {own} once, got {axes}"
    if not _is_float(dtype):
        return None  # packed weights have other shapes
    if isinstance(spec, EmbedSpec):
        return None if own == (spec.vocab, spec.features) else f"its table has shape {own}, and its spec says {spec}"
    sizes = tuple(math.prod(own[i] for i in axes) for axes in (spec.in_axes, spec.out_axes))
    if sizes != (spec.in_features, spec.out_features):
        return (
            f"its parameter {spec.param!r} {own} has {sizes[0]} features in and {sizes[1]} out by in_axes="
            f"{spec.in_axes} and out_axes={spec.out_axes}, and its spec says {spec.in_features} and {spec.out_features}"
        )
    return None


def _is_float(dtype: Any) -> bool:
    return str(dtype).startswith(("float", "bfloat"))


def _no_kernel(module: nnx.Module, spec: LinearSpec | EmbedSpec, experts: int | None) -> str | None:
    """Return why a module without the kernel of its spec cannot be served, or None for a linear layer that can."""
    kind, value = type(module).__name__, held_by(module, spec)
    linear = spec if isinstance(spec, LinearSpec) and experts is None else None
    if linear is not None and (linear.param is None or linear.dequantize is not None):
        return None
    if value is not None:
        advice = (
            f"; if {kind} stores its weight in a form of its own, say so: jlora.register_layer({kind}, lambda layer: "
            'jlora.LinearSpec(n_in, n_out, param=None, dtype="bfloat16"))'
        )
        found = f"its parameter {spec.param!r} is a {type(value).__name__} and no nnx.Variable"
        return found + (advice if linear is not None else "")
    if linear is not None and linear.param == LinearSpec.param and not forgotten(module, linear):
        return None
    held = [name for name, value in vars(module).items() if isinstance(value, nnx.Variable)]
    return f"its spec names the parameter {spec.param!r}, and the layer holds {sorted(held)}{_how_to_register(module)}"


def _matrices(module: nnx.Module) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of the module's own weights with at least two axes.

    Those of a norm, and the bias of another layer, have two in a stack of Linen layers.
    """
    found: dict[str, tuple[int, ...]] = {}
    for name, value in vars(module).items():
        if isinstance(module, LinenNode) and name in ("scale", *_BIASES):
            continue
        if isinstance(value, nnx.Variable) and not isinstance(value, _NO_WEIGHTS):
            shape = getattr(cast("object", value.get_value()), "shape", ())
            if is_list_or_tuple(shape) and len(shape) >= 2:
                found[name] = tuple(shape)
    return found


def _how_to_register(module: nnx.Module) -> str:
    """Return advice for registering the class of a module, as far as its parameters show it; "" without a matrix."""
    cls, matrices = type(module), _matrices(module)
    if not matrices or cls.__module__.startswith("flax."):
        return ""
    (name, shape), several = next(iter(matrices.items())), len(matrices) > 1
    equation = next((key for key, value in vars(module).items() if is_equation(value)), None)
    if several and all(len(shape) > 2 for shape in matrices.values()) and len({s[0] for s in matrices.values()}) == 1:
        return f"; if {', '.join(matrices)} are of experts, register {cls.__name__} with a jlora.ExpertsSpec"
    if several:
        return f"; it holds {', '.join(matrices)}: make each of them a layer of its own"
    if isinstance(module, nnx.Embed) or "embed" in cls.__name__.lower():
        spec = f'jlora.EmbedSpec(*layer.{name}.shape, param="{name}")'
    elif equation is not None:
        spec = f'jlora.einsum_spec(layer.{equation}, layer.{name}.shape, param="{name}")'
    elif len(shape) == 2:
        spec = f'jlora.LinearSpec(*layer.{name}.shape, param="{name}")'
    else:
        spec = f'jlora.einsum_spec("<its equation>", layer.{name}.shape, param="{name}")'
    return f"; say what it computes: jlora.register_layer({cls.__name__}, lambda layer: {spec})"
