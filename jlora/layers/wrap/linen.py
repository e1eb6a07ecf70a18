"""Serve LoRA in Flax Linen models: `LinenModule` holds one as an `nnx.Module`."""

from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import numpy as np
from flax import linen as nn
from flax import nnx
from flax.nnx.bridge import variables as bridge

from jlora._typing import is_mapping
from jlora.errors import LoRAUsageError
from jlora.layers.specs import EmbedSpec, LinearSpec


class LinenNode(nnx.Module):
    """The variables of one Linen module under its own names. Submodules are attributes too."""

    def __init__(self, variables: Mapping[str, Any]):
        self.linen_names = tuple(variables)
        for name, value in variables.items():
            nnx.Module.__setattr__(self, name, _node(value))

    def linen_variables(self) -> dict[str, Any]:
        """Return the variables as Linen's nested dict of arrays."""
        values = {name: vars(self)[name] for name in self.linen_names}
        return {
            name: value.linen_variables() if isinstance(value, LinenNode) else value[...]
            for name, value in values.items()
        }


class LinenDense(LinenNode):
    """The variables of an `nn.Dense`."""

    def __call__(self, x: jax.Array, compute: Callable[[jax.Array], jax.Array]) -> jax.Array:
        return compute(x)


class LinenEmbed(LinenNode):
    """The variables of an `nn.Embed`."""

    def lookup(self, inputs: jax.Array | np.ndarray, module: nn.Embed) -> jax.Array:
        return self._apply(inputs, module, "__call__")

    def attend(self, query: jax.Array | np.ndarray, module: nn.Embed) -> jax.Array:
        return self._apply(query, module, "attend")

    def _apply(self, x: jax.Array | np.ndarray, module: nn.Embed, method: str) -> Any:
        table = vars(self)["embedding"][...]
        return module.clone(parent=None, name=None).apply({"params": {"embedding": table}}, x, method=method)


def describe_dense(layer: LinenDense) -> LinearSpec:
    """Return the spec of an `nn.Dense`."""
    return LinearSpec(*vars(layer)["kernel"].get_value().shape)


def describe_embed(layer: LinenEmbed) -> EmbedSpec:
    """Return the spec of an `nn.Embed`."""
    return EmbedSpec(*vars(layer)["embedding"].get_value().shape, lookup="lookup", attend="attend")


class LinenModule(LinenNode):
    """A Linen model and its variables as one `nnx.Module`, for `LoRAManager` to wrap.

    Paths are those of the parameters, such as "decoder.layer_0.q_proj". Every `nn.Dense` and `nn.Embed` of the model
    serves LoRA. Not supported, and rejected with an error, are subclasses that override the call, `nn.DenseGeneral`,
    `nn.Einsum`, and layers under `nn.scan` and `nn.vmap`, whose kernels are stacked. Collections changed by the call
    are not supported.

    Args:
      module: the Linen module, as passed to `apply`, or an initialized `nnx.bridge.ToNNX` that holds it.
      variables: the result of `module.init` or the contents of a checkpoint, {"params": ...}; None for `ToNNX`.

    Example:
      >>> model = jlora.LinenModule(module, {"params": params})
      >>> model(tokens)  # module.apply({"params": params}, tokens)
    """

    def __init__(self, module: nn.Module | nnx.bridge.ToNNX, variables: Mapping[str, Any] | None = None):
        if isinstance(module, nnx.bridge.ToNNX):
            own = {k: v for k, v in vars(module).items() if not k.startswith(("to_nnx__", "_pytree__"))}
            variables = cast("dict[str, Any]", bridge.nnx_attrs_to_linen_vars(own))
            module = module.to_nnx__module
        if not isinstance(module, nn.Module) or not isinstance(variables, Mapping) or "params" not in variables:
            raise LoRAUsageError('LinenModule takes a Linen module and its variables, {"params": {...}}')
        unboxed = nn.meta.unbox(variables)
        params = unboxed["params"]
        if taken := [name for name in params if hasattr(LinenModule, name) or name.startswith("linen_")]:
            raise LoRAUsageError(f"LinenModule: parameters named {taken} clash with attributes of nnx.Module")
        if not all(isinstance(value, Mapping) for value in params.values()):
            raise LoRAUsageError("LinenModule: the module holds parameters itself; hold it in another Linen module")
        super().__init__(params)
        self.linen_module = module
        self.linen_collections = nnx.data({k: dict(v) for k, v in unboxed.items() if k != "params"})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return `module.apply(variables, *args, **kwargs)`, with LoRA if the model is wrapped."""
        variables = {"params": self.linen_variables(), **self.linen_collections}
        with nn.intercept_methods(self._serve):
            return self.linen_module.apply(variables, *args, **kwargs)

    def _serve(self, compute: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], context: Any) -> Any:
        module, name = context.module, context.method_name
        layer = self._at(module.scope.path) if module.scope is not None else None
        if isinstance(layer, LinenDense) and name == "__call__" and type(module).__call__ is nn.Dense.__call__:
            return layer(*args, **kwargs, compute=compute)
        if isinstance(layer, LinenEmbed) and type(module) is nn.Embed and name in ("__call__", "attend"):
            method = layer.lookup if name == "__call__" else layer.attend
            return method(*args, **kwargs, module=module)
        return compute(*args, **kwargs)

    def _at(self, path: tuple[str, ...]) -> Any:
        node: Any = self
        for name in path:
            node = vars(node).get(name) if isinstance(node, LinenNode) else None
        return node


def _node(value: Any) -> "LinenNode | nnx.Param[Any]":
    if not is_mapping(value):
        return nnx.Param(value)
    for name, cls in (("kernel", LinenDense), ("embedding", LinenEmbed)):
        if getattr(value.get(name), "ndim", None) == 2:
            return cls(value)
    return LinenNode(value)
