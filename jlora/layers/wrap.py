"""Find the eligible layers of any `nnx.Module` and make each of them serve LoRA, in place."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx

from jlora.config import LoRAConfig
from jlora.errors import LoRAError
from jlora.layers.coverage import Coverage
from jlora.layers.embedding import embed_methods
from jlora.layers.linear import LinearLayer, describe_einsum, describe_general, describe_linear, linear_methods
from jlora.layers.site import Site, SlotSpec, attach, detach

# "qkv_proj": ("q_proj", "k_proj", "v_proj"), or name -> size(s) of the slice(s) it covers.
PackedModules = Mapping[str, Sequence[str] | Mapping[str, int | Sequence[int]]]
Describe = Callable[[Any], LinearLayer | str]

_describe: dict[type, Describe] = {
    nnx.Linear: describe_linear,
    nnx.LinearGeneral: describe_general,
    nnx.Einsum: describe_einsum,
}


def register_layer(cls: type[nnx.Module], describe: Describe) -> None:
    """Let managers made from now on wrap layers of the class `cls` (and subclasses that keep its `__call__`).

    Args:
      cls: a linear layer: its `__call__` takes the input first and returns the projection of it.
      describe: `describe(layer)` returns a `LinearLayer` (sizes, kernel attribute, axes), or a string that says why
        this instance cannot serve LoRA.

    Example:
      >>> jlora.register_layer(MyDense, lambda layer: jlora.LinearLayer(layer.n_in, layer.n_out, param="w"))
    """
    if not (isinstance(cls, type) and issubclass(cls, nnx.Module)):
        raise LoRAError(f"register_layer takes a subclass of nnx.Module, got {cls!r}")
    _describe[cls] = describe


class WrappedModel:
    """A wrapped model: its sites, the layer of each, and what could not be wrapped.

    Attributes:
      modules: Site -> layer.
      tracking: shared by all layers; knows which of them the traced forward calls.
      unwrapped: path -> why that module takes no adapter.
    """

    def __init__(self, model: nnx.Module):
        self.model = model
        self.modules: dict[Site, nnx.Module] = {}
        self.tracking = Coverage()
        self.unwrapped: dict[str, str] = {}
        self._classes: list[tuple[nnx.Module, type]] = []

    def check(self) -> None:
        """Raises `LoRAError` once the model was given back."""
        if not self.modules:
            raise LoRAError("this manager gave its model back (unwrap); make a new LoRAManager")

    def unwrap(self) -> None:
        """Give the model back as it was: classes restored, slot arrays gone."""
        for site, layer in self.modules.items():
            detach(layer, site)
        for layer, cls in self._classes:
            for name in ("jlora_spec", "jlora_tracking"):
                if hasattr(layer, name):
                    delattr(layer, name)
            _set_class(layer, cls)
        self.modules, self._classes = {}, []


def wrap_model(model: nnx.Module, config: LoRAConfig, packed_modules: PackedModules | None = None) -> WrappedModel:
    """Wrap the eligible layers of `model` in place and give them zero slots.

    Args:
      model: any `nnx.Module`; layers reachable by several paths are wrapped once.
      config: sizes, dtype, target_modules and backend.
      packed_modules: which checkpoint names make up a merged projection; None reads the model's own
        `packed_modules` attribute if it has one.

    Raises:
      LoRAError: a target that matches nothing or a layer that cannot be wrapped; a model that is wrapped already.
    """
    if config.fully_sharded:
        raise LoRAError("LoRAConfig.fully_sharded shards the factors over a mesh, and meshes are not served yet")
    packed = packed_modules if packed_modules is not None else getattr(model, "packed_modules", {})
    paths = _paths(model)
    layers = {id(layer): layer for _, layer in paths}
    aliases: dict[int, list[str]] = {}
    for path, layer in paths:
        aliases.setdefault(id(layer), []).append(path)
    heads = {id(layer) for path, layer in paths if path.rpartition(".")[2] == "lm_head"}

    wrapped = WrappedModel(model)
    plans: list[tuple[Any, type, LinearLayer | None, list[Site]]] = []
    matched: set[str] = set()
    for key, names in aliases.items():
        layer = layers[key]
        if hasattr(layer, "jlora_tracking"):
            raise LoRAError(f"{names[0]}: this model is wrapped already; call unwrap() on its manager first")
        found = _sites(layer, tuple(names), config, packed, heads <= {key})
        if isinstance(found, str):
            if hits := _hits(config, names, ()):
                raise LoRAError(f"target_modules {hits} match {names[0]!r} ({type(layer).__name__}), but {found}")
            wrapped.unwrapped.update((name, found) for name in names)
            continue
        spec, sites = found
        chosen = []
        for site in sites:
            hits = _hits(config, site.aliases, site.parts)
            matched.update(hits)
            if hits or config.target_modules is None:
                chosen.append(site)
            else:
                reason = "it is not among the configured target_modules"
                wrapped.unwrapped.update((name, reason) for name in site.aliases)
        if chosen:
            plans.append((layer, type(layer), spec, chosen))
    if missing := [t for t in config.target_modules or () if t not in matched]:
        raise LoRAError(f"target_modules {missing} match no layer of {type(model).__name__}")
    if not plans:
        raise LoRAError(f"{type(model).__name__} has no layer that can serve LoRA")

    for layer, cls, spec, sites in plans:
        _set_class(layer, _lora_class(cls, embed_methods if spec is None else linear_methods))
        layer.jlora_tracking = wrapped.tracking
        if spec is not None:
            layer.jlora_spec = spec
        for site in sites:
            attach(layer, site)
            wrapped.modules[site] = layer
        wrapped._classes.append((layer, cls))
    wrapped.tracking.sites = tuple(wrapped.modules)
    return wrapped


def kernel_of(layer: nnx.Module) -> tuple[Any, LinearLayer | None]:
    """The base parameter of a wrapped layer and how its axes flatten (None for an embedding table)."""
    spec: LinearLayer | None = getattr(layer, "jlora_spec", None)
    return getattr(layer, "embedding" if spec is None else spec.param), spec


def _paths(model: nnx.Module) -> list[tuple[str, nnx.Module]]:
    """Every (dotted path, module) below `model`, a shared module once for each path."""

    def walk(node: Any, path: str, above: tuple[int, ...]) -> Iterator[tuple[str, nnx.Module]]:
        if id(node) in above:
            return
        above = (*above, id(node))
        if isinstance(node, nnx.Pytree) and not isinstance(node, nnx.Variable):
            if path and isinstance(node, nnx.Module):
                yield path, node
            children = vars(node).items()
        elif isinstance(node, Mapping):
            children = node.items()
        elif isinstance(node, (list, tuple)):
            children = enumerate(node)
        else:
            return
        for name, child in children:
            yield from walk(child, f"{path}.{name}" if path else str(name), above)

    if type(model) in _describe or isinstance(model, nnx.Embed):
        raise LoRAError(
            f"the model itself is a {type(model).__name__}; hold it in an nnx.Module, so that it has a path"
        )
    return list(walk(model, "", ()))


def _hits(config: LoRAConfig, aliases: Sequence[str], parts: Sequence[str] | Mapping[str, Any]) -> list[str]:
    """The configured targets that name this layer, by a full path or a suffix that starts at a dot."""
    names = {*aliases, *parts}
    return [t for t in config.target_modules or () if any(n == t or n.endswith("." + t) for n in names)]


def _sites(
    layer: nnx.Module, aliases: tuple[str, ...], config: LoRAConfig, packed: PackedModules, tied: bool
) -> tuple[LinearLayer | None, list[Site]] | str:
    """The sites of one layer, or why it has none."""
    if isinstance(layer, nnx.Embed):
        if type(layer).__call__ is not nnx.Embed.__call__ or type(layer).attend is not nnx.Embed.attend:
            return f"{type(layer).__name__} overrides the lookup of nnx.Embed, and jlora cannot know what it computes"
        spec, ndim, param = None, 2, layer.embedding
    else:
        base = next((cls for cls in type(layer).__mro__ if cls in _describe), None)
        if base is None:
            return f"{type(layer).__name__} is not a linear or embedding layer that jlora knows (jlora.register_layer)"
        if type(layer).__call__ is not base.__call__:
            return (
                f"{type(layer).__name__} overrides the __call__ of {base.__name__}, and jlora cannot know what it "
                "computes (jlora.register_layer says so)"
            )
        described = _describe[base](layer)
        if isinstance(described, str):
            return described
        spec, param = described, getattr(layer, described.param)
        ndim = len(spec.in_axes) + len(spec.out_axes)
    stack = param.ndim - ndim
    if stack not in (0, 1):
        return f"its parameter has shape {tuple(param.shape)}: {stack} axes more than one stack of layers"
    dtype = jnp.dtype(param.dtype if config.dtype is None else config.dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        return f"its parameter is {dtype}; set LoRAConfig.dtype to a floating dtype for the slots"
    layers = param.shape[0] if stack else None

    def slot_spec(in_features: int, out_sizes: tuple[int, ...]) -> SlotSpec:
        return SlotSpec(layers, config.max_loras, in_features, out_sizes, config.max_lora_rank, dtype.name)

    if spec is None:
        rows, features = layer.num_embeddings, layer.features  # type: ignore[attr-defined]  # an nnx.Embed
        whole = dict.fromkeys(aliases, (0, 1))
        sites = [Site(aliases[0], aliases, "embedding", slot_spec(rows, (features,)), whole, config.backend)]
        if tied:
            # No layer is called lm_head, so the table may serve as one; PEFT calls those weights "lm_head".
            names = tuple(f"{alias}.attend" for alias in aliases)
            parts = dict.fromkeys((*aliases, *names, "lm_head"), (0, 1))
            head = slot_spec(features, (rows,))
            sites.append(
                Site(names[0], (*names, "lm_head"), "linear", head, parts, config.backend, prefix="jlora_attend")
            )
        return None, sites
    sizes, parts = _slices(layer, aliases, spec.out_features, packed)
    return spec, [Site(aliases[0], aliases, "linear", slot_spec(spec.in_features, sizes), parts, config.backend)]


def _slices(
    layer: nnx.Module, aliases: tuple[str, ...], out_features: int, packed: PackedModules
) -> tuple[tuple[int, ...], dict[str, tuple[int, int]]]:
    """Output slices of a layer, and the checkpoint names that fill them."""
    sizes: tuple[int, ...] = tuple(getattr(layer, "output_sizes", ())) or (out_features,)
    names: dict[str, tuple[int, int]] = {}
    path = aliases[0]
    entry = next((packed[alias.rpartition(".")[2]] for alias in aliases if alias.rpartition(".")[2] in packed), None)
    if isinstance(entry, Mapping):
        covered = {name: (size,) if isinstance(size, int) else tuple(size) for name, size in entry.items()}
        sizes = tuple(size for group in covered.values() for size in group)
    elif entry is not None:
        if len(sizes) == 1 and out_features % len(entry) == 0:
            sizes = (out_features // len(entry),) * len(entry)
        if len(sizes) != len(entry):
            raise LoRAError(
                f"{path}: packed_modules names {len(entry)} parts {tuple(entry)}, but the layer has output_sizes "
                f"{sizes}; give the sizes: {{name: size, ...}}"
            )
        covered = {name: (size,) for name, size in zip(entry, sizes, strict=True)}
    else:
        covered = {}
    if sum(sizes) != out_features:
        raise LoRAError(f"{path}: output slices {sizes} sum to {sum(sizes)}, but the layer has {out_features} outputs")
    for alias in aliases:
        parent = alias.rpartition(".")[0]
        names[alias] = (0, len(sizes))
        start = 0
        for name, group in covered.items():
            names[f"{parent}.{name}" if parent else name] = (start, len(group))
            start += len(group)
    return sizes, names


def _set_class(layer: nnx.Module, cls: type) -> None:
    # Not `layer.__class__ = cls`: flax would list the class among the layer's attributes, for jit to compare.
    object.__setattr__(layer, "__class__", cls)


@functools.cache
def _lora_class(cls: type, methods: Callable[[type], dict[str, Callable]]) -> type:
    """The subclass of a layer's own class that serves LoRA; one a class, so that jit sees one type.

    It has the layer's class as its only base: Python lets an object change to a class of the same layout alone.
    """
    body = {"__module__": cls.__module__, "__doc__": cls.__doc__, **methods(cls)}
    is_pytree = getattr(
        cls, "_pytree__is_pytree", True
    )  # flax's own default would undo `class Dense(..., pytree=False)`
    return type(cls)(f"{cls.__name__}WithLoRA", (cls,), body, pytree=is_pytree)
