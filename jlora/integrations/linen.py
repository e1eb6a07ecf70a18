"""Serve LoRA in Flax Linen models: `jlora.LinenModule` holds one as an `nnx.Module`.

The slots of a layer are passed to Linen beside its parameters, so that `nn.scan` and `nn.vmap` slice both alike.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias, cast

import flax.core
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx
from flax.nnx.bridge import variables as bridge
from jaxtyping import Float

from jlora._typing import is_mapping
from jlora.adapters import Adapter, ModuleLoRA
from jlora.errors import AdapterMismatchError, LoRAError, LoRAUsageError
from jlora.layers.einsum import einsum_spec, is_equation
from jlora.layers.specs import EmbedSpec, LinearSpec, Restore, rows_along
from jlora.layers.wrap.discover import register_layer, registered

__all__ = ["LinenModule", "openpi_adapter"]

Path: TypeAlias = tuple[str, ...]  # of a Linen scope
_NO_MATRICES = ("scale", "bias", "b")  # the parameters of norms and biases, which have two axes in a stack
_NESTED = "jlora_nested"  # flag of scopes in which no call is served
_PROBE = "jlora_probe"
_WRONG_AXIS = "{name}: stack_axis={axis} of LinenModule is not the axis of its layers in nn.scan or nn.vmap{why}"


@dataclasses.dataclass(frozen=True, eq=False)
class Use:
    """The use of one parameter by a Linen class.

    Attributes:
      param: name of the parameter.
      spec: the spec of one layer, or the reason why it is not served. None: `equation` is a guess.
      owner: the class whose own methods are served.
      equation: the equation of the call; None without one.
      shape: shape of the parameter inside the module.
      stack: axis of the layers in the parameter of a stack; None for one layer.
    """

    param: str
    spec: LinearSpec | EmbedSpec | str | None
    owner: type | None = None
    equation: str | None = None
    shape: tuple[int, ...] = ()
    stack: int | None = None


class LinenNode(nnx.Module):
    """The variables of one Linen scope under their own names. The scopes below are attributes too."""

    def __init__(self, children: Mapping[str, Any]):
        for name, child in children.items():
            nnx.Module.__setattr__(self, name, child if isinstance(child, LinenNode) else nnx.Param(child))

    def linen_variables(self) -> dict[str, Any]:
        """Return the variables and the slots as Linen's nested dict of arrays."""
        values: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, LinenNode):
                own = value.linen_variables()
                values |= own if isinstance(value, LinenLayer) and value.linen_shared else {name: own}
            elif isinstance(value, nnx.Variable):
                values[name] = value[...]
        return values


class LinenLayer(LinenNode):
    """The variables of a layer, those of a stack with the layers first.

    Its methods run on a copy that holds the arrays of one call (`linen_view`).
    """

    def __init__(self, children: Mapping[str, Any], use: Use, shared: bool):
        super().__init__(children)
        self.linen_use, self.linen_shared = use, shared
        if use.spec is None:
            self.equation = use.equation  # by which jlora finds the spec

    def linen_variables(self) -> dict[str, Any]:
        """Return the variables and the slots with the layers of a stack on its own axis."""
        values, axis = super().linen_variables(), self.linen_use.stack
        if axis is not None:
            # Sliced on another axis, a probe has another shape, even where all other arrays have not. It stands for the
            # index of the layers in the stack, which has one axis.
            values = {name: value for name, value in values.items() if not _is_index(name)}
            layers = len(values[self.linen_use.param])
            values[_PROBE] = np.zeros((layers, *(layers + 1,) * (axis + 1)), bool)
        moved = {k: jnp.moveaxis(v, 0, axis) if axis and not is_mapping(v) else v for k, v in values.items()}
        return {self._key(name): value for name, value in moved.items()}

    def linen_view(self, compute: Callable[..., Any], context: Any) -> "LinenLayer":
        """Return a copy with the arrays that the Linen module sees, such as those of one layer of a stack."""
        view, use, seen = (
            cast("LinenLayer", object.__new__(type(self))),
            self.linen_use,
            context.module.variables["params"],
        )
        if use.stack is not None:
            layers: int = vars(self)[use.param].shape[0]
            if seen[self._key(_PROBE)].shape != (layers + 1,) * (use.stack + 1):
                raise LoRAError(_WRONG_AXIS.format(name=".".join(context.module.scope.path), axis=use.stack, why=""))
        for name, value in vars(self).items():
            kind: type[Any] = type(cast("object", value))
            sliced = issubclass(kind, nnx.Variable) and not _is_index(name)
            vars(view)[name] = kind(seen[self._key(name)]) if sliced else value
        vars(view)["linen_call"] = compute, context
        return view

    def _key(self, name: str) -> str:
        """Return the name of an attribute among the parameters of the scope, which other layers may share."""
        return f"{name}.{self.linen_use.param}" if name.startswith("jlora_") else name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return vars(self)["linen_call"][0](*args, **kwargs)


def _is_index(name: str) -> bool:
    """Return True for the index of the layers in a stack (`Site.index`), and False for parameters of the module."""
    return name.startswith("jlora_") and name.endswith("_index")


class LinenLinear(LinenLayer):
    """The variables of a linear layer, or of a module that is not served, with the reason as its spec."""


class LinenEmbed(LinenLayer):
    """The variables of an embedding."""

    def lookup(self, *args: Any, **kwargs: Any) -> Any:
        _, context = vars(self)["linen_call"]
        # `manager.verify` replaces the table of one method, and the module may have read it in its `setup`.
        table = {self.linen_use.param: vars(self)[self.linen_use.param][...]}
        params = {**context.module.variables["params"], **table}
        scope = flax.core.bind({"params": params}, flags={_NESTED: True})
        return getattr(context.module.clone(parent=scope, name=None), context.method_name)(*args, **kwargs)

    attend = lookup


class LinenModule(LinenNode):
    """A Linen model and its variables as one `nnx.Module`, for `LoRAManager` to wrap.

    Paths are those of the parameters, such as "decoder.layer_0.q_proj". If several layers share one scope
    (`nn.share_scope`), the name of the parameter follows.

    Without `calls`, every `nn.Dense` and `nn.Embed` serves LoRA. With it, jlora traces the calls once, and also serves
    `nn.DenseGeneral`, registered classes (`jlora.register_layer`), modules with one matrix and an einsum equation (of
    the call or their own, after `manager.verify`), and all of these inside `nn.scan` and `nn.vmap`. Layers in a stack
    of stacks are rejected. A subclass is served where it calls the method of its base class.

    Args:
      module: the Linen module, as passed to `apply`, or an initialized `nnx.bridge.ToNNX` that holds it.
      variables: the result of `module.init` or the contents of a checkpoint, {"params": ...}; None for `ToNNX`.
      calls: function of one argument, that stands for the model and takes the arguments of `module.apply` after the
        variables. It makes each kind of call that the model will get.
      stack_axis: axis of the layers in the parameters of a stack, as in `variable_axes` of `nn.scan` and `nn.vmap`.
        Other axes than 0 cost a copy of these parameters.

    Raises:
      LoRAUsageError: the arguments are not of these types, a parameter has the name of an attribute of `nnx.Module`,
        the module holds parameters itself, or a stack has its layers on another axis. If all sizes are equal, the first
        call raises that as `LoRAError`. Errors of `calls` are passed on.

    Example:
      >>> model = jlora.LinenModule(module, {"params": params}, lambda model: model(tokens))
      >>> model(tokens)  # module.apply({"params": params}, tokens)
    """

    def __init__(
        self,
        module: nn.Module | nnx.bridge.ToNNX,
        variables: Mapping[str, Any] | None = None,
        calls: Callable[[Callable[..., Any]], Any] | None = None,
        *,
        stack_axis: int = 0,
    ):
        if isinstance(module, nnx.bridge.ToNNX):
            own = {k: v for k, v in vars(module).items() if not k.startswith(("to_nnx__", "_pytree__"))}
            variables = cast("dict[str, Any]", bridge.nnx_attrs_to_linen_vars(own))
            module = module.to_nnx__module
        if not isinstance(module, nn.Module) or not isinstance(variables, Mapping) or "params" not in variables:
            raise LoRAUsageError('LinenModule takes a Linen module and its variables, {"params": {...}}')
        if calls is not None and not callable(calls):
            raise LoRAUsageError(f"LinenModule: calls must be a function of the model, got {calls!r:.100}")
        if not isinstance(stack_axis, int) or stack_axis < 0:
            raise LoRAUsageError(f"LinenModule: stack_axis must be an int of at least 0, got {stack_axis!r}")
        unboxed = nn.meta.unbox(variables)
        params = unboxed["params"]
        if taken := [name for name in params if hasattr(LinenModule, name) or name.startswith("linen_")]:
            raise LoRAUsageError(f"LinenModule: parameters named {taken} clash with attributes of nnx.Module")
        if not all(isinstance(value, Mapping) for value in params.values()):
            raise LoRAUsageError("LinenModule: the module holds parameters itself; hold it in another module")
        uses = None if calls is None else _find_uses(module, unboxed, calls, stack_axis)
        super().__init__({name: _node(value, (name,), uses) for name, value in params.items()})
        self.linen_module = module
        self.linen_collections = nnx.data({k: dict(v) for k, v in unboxed.items() if k != "params"})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return `module.apply(variables, *args, **kwargs)`, with LoRA if the model is wrapped."""
        variables = {"params": self.linen_variables(), **self.linen_collections}
        with nn.intercept_methods(self._serve):
            return self.linen_module.apply(variables, *args, **kwargs)

    def _serve(self, compute: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], context: Any) -> Any:
        found = _use_of(args, kwargs, context)
        layer = None if found is None else self.linen_layer(context.module.scope.path, found[0].param)
        if found is None or layer is None or layer.linen_use.owner is not found[0].owner:
            return compute(*args, **kwargs)
        return getattr(layer.linen_view(compute, context), found[1])(*args, **kwargs)

    def linen_layer(self, path: Path, param: str) -> LinenLayer | None:
        """Return the layer of a parameter, or None."""
        node: Any = self
        for name in path:
            node = vars(node).get(name) if isinstance(node, LinenNode) else None
        if type(node) is LinenNode:
            node = vars(node).get(param)
        return node if isinstance(node, LinenLayer) and node.linen_use.param == param else None


def _node(variables: Mapping[str, Any], path: Path, uses: Mapping[tuple[Path, str], Use] | None) -> LinenNode:
    """Return the node of a scope. The scope of a single layer is that layer."""
    children = {k: _node(v, (*path, k), uses) if is_mapping(v) else v for k, v in variables.items()}

    def layer(use: Use, own: Mapping[str, Any], shared: bool) -> LinenLayer:
        cls = LinenEmbed if isinstance(use.spec, EmbedSpec) else LinenLayer if use.spec is None else LinenLinear
        if use.stack:
            own = {k: v if isinstance(v, LinenNode) else jnp.moveaxis(v, use.stack, 0) for k, v in own.items()}
        return cls(own, use, shared)

    held = [
        _guessed(name, value.shape)
        if uses is None
        else uses.get((path, name), Use(name, "it was not called in `calls`"))
        for name, value in _matrices(variables).items()
    ]
    if len(held) == 1:
        return layer(held[0], children, shared=False)
    return LinenNode(children | {use.param: layer(use, {use.param: children[use.param]}, shared=True) for use in held})


def _matrices(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arrays of a scope that can be matrices of layers."""
    return {
        name: value
        for name, value in params.items()
        if getattr(value, "ndim", 0) >= 2 and name not in _NO_MATRICES and not name.startswith("jlora_")
    }


def _guessed(name: str, shape: tuple[int, ...]) -> Use:
    """Return the use of a parameter by its name and shape alone."""
    if len(shape) == 2 and name == "kernel":
        return Use(name, LinearSpec(*shape), nn.Dense)
    if len(shape) == 2 and name == "embedding":
        return Use(name, EmbedSpec(*shape, attend="attend"), nn.Embed)
    return Use(
        name, f"it holds {name} {tuple(shape)}, and no nn.Dense or nn.Embed; give LinenModule `calls`, to see its use"
    )


def _use_of(args: tuple[Any, ...], kwargs: Mapping[str, Any], context: Any) -> tuple[Use, str] | None:
    """Return the use of a parameter in one call, and the method of its `LinenLayer`; None if it is no call of a layer.

    Calls of methods that a subclass overrides are none. If they call the method of the base class, that call is one.
    """
    module, method = cast("nn.Module", context.module), context.method_name
    if module.scope is None or module.scope.get_flag(_NESTED, False) or method == "setup":
        return None
    cls = type(cast("object", context.module))
    params = module.variables.get("params", {})
    fields = [getattr(module, each.name, None) for each in dataclasses.fields(module)]
    equation = next((value for value in (*args, *kwargs.values(), *fields) if is_equation(value)), None)
    # Modules that share a scope hold the name of their parameter.
    named = [value for value in fields if isinstance(value, str) and value in _matrices(params)] or [*_matrices(params)]
    param: str | None = named[0] if len(named) == 1 else None
    owner, describe = registered(cls) or (cls, None)
    spec: Any = None
    methods: dict[str | None, str] = {"__call__": "__call__"}
    try:
        if describe is None and equation is not None and param is not None:
            einsum_spec(equation, params[param].shape, param)
        elif describe is not None and context.orig_method.func is getattr(
            getattr(owner, method, None), "__wrapped__", 0
        ):
            spec = describe(module)
        else:
            return None
    except Exception as error:  # `describe` of a class may raise any error
        spec = f"{cls.__name__} cannot be described: {error}"
    if isinstance(spec, EmbedSpec):
        methods = {spec.lookup: "lookup", spec.attend: "attend"}
    elif describe is not None and not isinstance(spec, LinearSpec | str):
        spec = f"a Linen class needs a LinearSpec or an EmbedSpec, and {owner.__name__} has {spec!r:.100}"
    param = spec.param if isinstance(spec, LinearSpec | EmbedSpec) else param
    if method not in methods or param is None or param not in params:
        return None
    return Use(param, spec, owner, equation, params[param].shape), methods[method]


def _find_uses(
    module: nn.Module, variables: Mapping[str, Any], calls: Callable[[Callable[..., Any]], Any], axis: int
) -> dict[tuple[Path, str], Use]:
    """Return the use of each parameter, by scope and name, from a trace of `calls`. Raises as `LinenModule`."""
    uses: dict[tuple[Path, str], Use] = {}

    def note(compute: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], context: Any) -> Any:
        scope, cls = context.module.scope, type(cast("object", context.module))
        if scope is not None and context.method_name != "setup":
            for name in _matrices(context.module.variables.get("params", {})):
                uses.setdefault((scope.path, name), Use(name, _reason(cls, name)))
            use, _ = _use_of(args, kwargs, context) or (None, "")
            if use is not None and (not isinstance(use.spec, str) or isinstance(uses[scope.path, use.param].spec, str)):
                uses[scope.path, use.param] = use
        return compute(*args, **kwargs)

    def trace(variables: Mapping[str, Any]) -> None:
        def model(*args: Any, **kwargs: Any) -> Any:
            with nn.intercept_methods(note):
                return module.apply(variables, *args, **kwargs)

        calls(model)

    jax.eval_shape(trace, variables)
    for (path, name), use in uses.items():
        held: Any = functools.reduce(lambda node, key: node[key], (*path, name), variables["params"])
        if isinstance(use.spec, str) or held.shape == use.shape:
            continue
        change: dict[str, Any] = {"stack": axis}
        if held.ndim - len(use.shape) > 1:
            change = {
                "spec": f"its {name} {held.shape} is a stack of stacks of {use.shape}, and jlora serves one stack"
            }
        elif held.shape[:axis] + held.shape[axis + 1 :] != use.shape:
            why = f": {name} {held.shape} is {use.shape} inside"
            raise LoRAUsageError(_WRONG_AXIS.format(name=".".join(path), axis=axis, why=why))
        uses[path, name] = dataclasses.replace(use, **change)
    return uses


def _reason(cls: type, name: str) -> str:
    """Return the reason why a parameter of a class is not served."""
    if (described := registered(cls)) is not None:
        return f"{cls.__name__} overrides the call of {described[0].__name__}, and jlora cannot know what it computes"
    line = f'jlora.einsum_spec("<its equation>", layer.variables["params"]["{name}"].shape, "{name}")'
    return (
        f"{cls.__name__} is not a linear or embedding layer that jlora knows; say what it computes before the "
        f"LinenModule is made: jlora.register_layer({cls.__name__}, lambda layer: {line})"
    )


def _describe_general(layer: Any) -> LinearSpec | str:
    if layer.batch_dims:
        return "its batch_dims give every batch entry a kernel of its own"
    axis = (layer.axis,) if isinstance(layer.axis, int) else tuple(layer.axis)
    shape, n = layer.variables["params"]["kernel"].shape, len(axis)
    ins, outs = tuple(range(n)), tuple(range(n, len(shape)))

    def rows(_: Any, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array, Restore]:
        return rows_along(axis, x, y)

    return LinearSpec(math.prod(shape[:n]), math.prod(shape[n:]), in_axes=ins, out_axes=outs, rows=rows)


def _spec_of(layer: LinenLayer) -> Any:
    spec = layer.linen_use.spec
    if isinstance(spec, EmbedSpec):  # by the methods of `LinenEmbed`
        spec = dataclasses.replace(spec, lookup=spec.lookup and "lookup", attend=spec.attend and "attend")
    return spec


register_layer(nn.Dense, lambda layer: LinearSpec(*layer.variables["params"]["kernel"].shape))
register_layer(nn.DenseGeneral, _describe_general)
register_layer(nn.Embed, lambda layer: EmbedSpec(layer.num_embeddings, layer.features, attend="attend"))
register_layer(LinenLinear, _spec_of)
register_layer(LinenEmbed, _spec_of)


def openpi_adapter(
    name: str, model: LinenModule, params: Mapping[str, Any], *, alpha: float, use_rslora: bool = False
) -> Adapter:
    """Return the `lora_a` and `lora_b` of a model that openpi trained as an adapter for the same model without them.

    openpi has a pair of factors for each head. The adapter has them side by side, so its rank is that of openpi times
    the number of heads. openpi does not scale the factors of its feed-forward layers.

    Args:
      name: name of the adapter.
      model: the model without LoRA, made with `calls`.
      params: the parameters of the trained model, or those of LoRA alone, with the paths of the model.
      alpha: `alpha` of openpi's `LoRAConfig`, whose `axes` must be the default.
      use_rslora: `rslora` of it.

    Raises:
      AdapterMismatchError: the model lacks the layer of a pair, or does not call it with an equation.
    """
    modules: dict[str, ModuleLoRA] = {}
    for path, prefix, pair in _pairs(params, ()):
        layer, rank = model.linen_layer(path, prefix or "w"), pair[0].shape[-1]
        use = None if layer is None else layer.linen_use
        feed_forward = {"gating_einsum": "td,ndf->tnf", "linear": "tf,fd->td"}  # `x @ w[i]` and `x @ w`
        equation = feed_forward.get(prefix, use and use.equation)
        if layer is None or use is None or equation is None:
            where = ".".join((*path, prefix))
            raise AdapterMismatchError(
                f"adapter {name!r}: the model calls no einsum for the lora_a and lora_b of {where}"
            )
        scaling = 1.0 if prefix else alpha / (math.sqrt(rank) if use_rslora else rank)
        names = (*path, prefix) if layer.linen_shared else path
        stacked = pair[0].ndim > len(equation.partition(",")[2].partition("->")[0])
        for i, (a, b) in enumerate(zip(*pair, strict=True) if stacked else [pair]):
            a, b = _side_by_side(equation, a, b)
            own = (names[0], str(i), *names[1:]) if stacked else names
            modules[".".join(own)] = ModuleLoRA(a=a, b=b, alpha=scaling * len(a), scaling=scaling)
    return Adapter(name=name, modules=modules)


def _pairs(params: Mapping[str, Any], path: Path) -> Iterator[tuple[Path, str, list[np.ndarray]]]:
    """Yield (scope, prefix of the names, [A, B]) of each pair."""
    for name, value in params.items():
        if is_mapping(value):
            yield from _pairs(value, (*path, name))
        elif name.endswith("lora_a"):
            pair = [np.asarray(params[f"{name[:-1]}{half}"], np.float32) for half in "ab"]
            yield path, name.removesuffix("lora_a").removesuffix("_"), pair


def _side_by_side(
    equation: str, a: Float[np.ndarray, "*heads K r"], b: Float[np.ndarray, "*heads r N"]
) -> tuple[Float[np.ndarray, "R K_all"], Float[np.ndarray, "N_all R"]]:
    """Return the factors of all heads as one pair of the whole kernel, whose last axes they factorize.

    Heads that go out have factors of their own. Heads that go in have one A together, and their B are summed.
    """
    kernel, y = equation.replace(" ", "").partition(",")[2].split("->")
    own = [i for i, letter in enumerate(kernel[:-2]) if letter in y]
    summed = tuple(i for i, letter in enumerate(kernel[:-2]) if letter not in y)
    rank, n = a.shape[-1], b.shape[-1]
    a = a.transpose(*own, a.ndim - 1, *summed, a.ndim - 2)
    heads = math.prod(a.shape[: len(own)])
    b = b.sum(summed).reshape(heads, rank, n)
    whole = np.zeros((heads, n, heads, rank), np.float32)
    whole[range(heads), :, range(heads)] = b.transpose(0, 2, 1)
    return a.reshape(heads * rank, -1), whole.reshape(heads * n, heads * rank)
