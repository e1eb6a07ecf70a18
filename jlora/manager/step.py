"""`LoRAManager.jit`: compile a function of the model, and pass the model's variables to it as one flat list.

`jax.jit` flattens an `nnx.Module` at every call, which takes the host milliseconds. Here the model is split once. A
call compares the attributes of its modules by identity and reads the values of its variables, which takes 75 us for a
decoder of 28 layers.
"""

import inspect
import operator
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial, update_wrapper, wraps
from itertools import chain
from types import NoneType, SimpleNamespace
from typing import Any, NamedTuple, cast

import jax
from flax import nnx

from jlora._compat import raw_value, trace_state_clean
from jlora.errors import LoRAUsageError
from jlora.layers.forward.compiling import compiler_options
from jlora.layers.forward.context import around, tracing
from jlora.layers.forward.forward_record import ForwardRecord
from jlora.manager.state import State

_DICTS = (dict, OrderedDict, defaultdict)
# The children and the static part of a registered pytree; None for a leaf.
_flatten = cast("Callable[[Any], Any]", jax.tree_util.default_registry.flatten_one_level)
_FLAX_STATE = "_pytree__state"  # of each module; it holds no array
_OTHER_MODEL = (
    "a step of LoRAManager.jit takes the model of its manager as its first argument, by position, and got {found}: "
    "call step(manager.model, ...). Make another manager for another model; pass a copy to jax.jit(forward)"
)
_NESTED = (
    "a step of LoRAManager.jit was called inside jax.jit: the weights would be constants of the outer function and go "
    "stale. Call the plain function there, and compile the outer one with LoRAManager.jit"
)
_CHANGED = (
    "the structure of the model changed after the first call of this step ({difference}). Layers that were added serve "
    "no adapter: call manager.unwrap() and make a new LoRAManager. After a change of an attribute alone, such as "
    "model.eval(), call manager.jit again"
)


class Structure(NamedTuple):
    """A model without the values of its variables.

    Attributes:
      paths: dotted path of each variable.
      graphdef: the modules and their static attributes.
      state: treedef of the state, with each variable as a leaf.
      variables: treedef of each variable, with its value as a leaf.
    """

    paths: tuple[str, ...]
    graphdef: Any
    state: Any
    variables: tuple[Any, ...]

    def merge(self, values: Iterable[Any]) -> Any:
        """Return a model with these values."""
        variables = [tree.unflatten([value]) for tree, value in zip(self.variables, values, strict=True)]
        return nnx.merge(self.graphdef, self.state.unflatten(variables))

    def difference(self, new: "Structure") -> str:
        """Return the first changes of variables between this structure and a new one, for messages."""
        added, removed = ([p for p in a.paths if p not in b.paths] for a, b in ((new, self), (self, new)))
        found = [f"{what}: {', '.join(paths[:4])}" for what, paths in (("added", added), ("removed", removed)) if paths]
        return "; ".join(found) or "a static attribute, or the type or metadata of a variable"


class FlatModel:
    """The variables of a model in a fixed order. Variables that replace others at their paths are followed.

    Attributes:
      structure: the structure at the last `read`, the same object while structures are equal; None before the first.
    """

    def __init__(self, model: nnx.Module):
        self._model = model
        self.clear()

    def clear(self) -> None:
        """Release the variables until the next `read`."""
        self.structure: Structure | None = None
        self._watched: list[Iterable[Any]] = [(object(),)]  # live views of the items of all containers
        self._seen: list[Any] = [object()]  # their items when the model was last split
        self._variables: list[Any] = []

    def read(self) -> list[Any]:
        """Return the current value of each variable, in the order of `structure.variables`."""
        if not all(map(operator.is_, chain.from_iterable(self._watched), self._seen)):
            self._split()
        return list(map(raw_value, self._variables))

    def _split(self) -> None:
        watched = _watched(self._model)
        watched.append((object(),))  # last, so that an item more or fewer is found
        graphdef, state = cast("tuple[Any, Any]", nnx.split(self._model))
        found, tree = cast("tuple[Any, Any]", jax.tree_util.tree_flatten_with_path(state, is_leaf=_is_variable))
        paths = tuple(".".join(str(getattr(key, "key", key)) for key in path) for path, _ in found)
        leaves: list[Any] = [leaf for _, leaf in found]
        structure_of = cast("Callable[..., Any]", jax.tree.structure)
        variables = tuple(structure_of(leaf, is_leaf=partial(operator.is_not, leaf)) for leaf in leaves)
        new = Structure(paths, graphdef, tree, variables)
        self._variables = [leaf if _is_variable(leaf) else SimpleNamespace(_raw_value=leaf) for leaf in leaves]
        self.structure = self.structure if self.structure == new else new
        # Last, so that the next call repeats an interrupted split.
        self._watched, self._seen = watched, list(chain.from_iterable(watched))


def _watched(model: nnx.Module) -> list[Iterable[Any]]:
    """Return live views, which together differ in an item if a leaf of the model, or its path, is another one."""
    views: list[Iterable[Any]] = []
    for path, node in cast("Iterable[tuple[tuple[Any, ...], Any]]", nnx.iter_graph(model)):
        if isinstance(node, nnx.Pytree):
            views.append(vars(node).values())
            if not getattr(type(node), "_pytree__is_pytree", True):
                views.append(vars(node))  # the names; in others, Flax replaces an attribute where one is deleted
        elif type(node) is list:
            views.append(cast("list[Any]", node))
        elif type(node) in _DICTS:
            views += [node, node.values()]
        elif not isinstance(node, tuple | nnx.Variable | NoneType) and path[-1] != _FLAX_STATE and _flatten(node):
            views.append(_Children(node))
    return views


class _Children:
    """The children of a registered pytree, such as a dataclass. Each iteration flattens it again."""

    def __init__(self, node: Any):
        self._node = node
        self._static: Any = None

    def __iter__(self) -> Iterator[Any]:
        children, static = _flatten(self._node)
        if static != self._static:  # JAX compares it like this; the object is often a new one
            self._static = static
        return chain(children, (self._static,))


def _is_variable(leaf: object) -> bool:
    """Return True for a variable that is a pytree. A hijax variable is passed to JAX as it is, like an array."""
    return isinstance(leaf, nnx.Variable) and not leaf.hijax


class Step:
    """A function of the model that `LoRAManager.jit` compiles, a `jax.stages.Wrapped`."""

    def __init__(
        self,
        function: Callable[..., Any],
        options: dict[str, Any],
        flat: FlatModel,
        state: State,
    ):
        _check_options(function, options)
        update_wrapper(self, function)
        self._function = function
        given: dict[str, Any] = (compiler_options() or {}) | (options.get("compiler_options") or {})
        given = {name: value for name, value in given.items() if value is not None}
        self._options: dict[str, Any] = options | {"compiler_options": given}
        jax.jit(function, **self._options)  # raises for options that are unknown or do not fit the function
        self._flat, self._state, self._lock = flat, state, state.lock.step
        self._own: Structure | None = None  # of the manager's model, at the first call
        self._programs: list[tuple[Structure, Any]] = []  # one, and those of the copies of `verify`

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run the function on the model, the first of `args`."""
        with self._lock:
            self._state.policy.takes_turns = True
            program, values = self._read(*args[:1])
            return program(values, *args[1:], **kwargs)

    def trace(self, /, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        """Trace the function for a call, as `jax.jit(...).trace`."""
        with self._lock:
            program, values = self._read(*args[:1])
            return program.trace(values, *args[1:], **kwargs)

    def lower(self, /, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Lower the function for a call, as `jax.jit(...).lower`, to inspect its shapes, costs and memory."""
        return self.trace(*args, **kwargs).lower()

    def _read(self, model: Any = None, /) -> tuple[Any, list[Any]]:
        """Return the compiled function of a list of values, and the values of the model."""
        if not trace_state_clean() and tracing():
            raise LoRAUsageError(_NESTED)
        if model is self._state.wrapped.model:
            flat = self._flat
            values = flat.read()
            assert flat.structure is not None
            if flat.structure is not self._own:
                self._state.wrapped.check()
                if self._own is not None and self._own != flat.structure:
                    raise LoRAUsageError(_CHANGED.format(difference=self._own.difference(flat.structure)))
                self._own = flat.structure
        elif isinstance(model, nnx.Module) and any(isinstance(each, ForwardRecord) for each in around()):
            flat = FlatModel(model)  # a copy that `verify` made
            values = flat.read()
            assert flat.structure is not None
        else:
            raise LoRAUsageError(_OTHER_MODEL.format(found=_described(model)))
        return self._program(flat.structure), values

    def _program(self, structure: Structure) -> Any:
        for known, program in self._programs:
            if known == structure:
                return program
        function = self._function

        @wraps(function)  # JAX resolves names of arguments by its signature
        def run(values: list[Any], /, *args: Any, **kwargs: Any) -> Any:
            return function(structure.merge(values), *args, **kwargs)

        self._programs.append((structure, jax.jit(run, **self._options)))
        return self._programs[-1][1]

    def _cache_size(self) -> int:
        """Return the number of compiled programs. JAX's own jitted functions have the same method."""
        return sum(program._cache_size() for _, program in self._programs)


def _described(model: object) -> str:
    if isinstance(model, nnx.Module):
        return f"another {type(model).__name__}"
    return "none" if model is None else repr(type(model).__name__)


def _check_options(function: Callable[..., Any], options: dict[str, Any]) -> None:
    """Raise `LoRAUsageError` if an option of `jax.jit` donates the model or makes it static."""
    parameters = inspect.signature(function).parameters.values()
    ordered = [each for each in parameters if each.kind is not inspect.Parameter.KEYWORD_ONLY]
    if not ordered:
        raise LoRAUsageError("LoRAManager.jit takes a function whose first argument is the model")
    for option in ("donate_argnums", "donate_argnames", "static_argnums", "static_argnames"):
        named = options.get(option)
        named = () if named is None else (named,) if isinstance(named, int | str) else named
        if {0, -len(ordered), ordered[0].name}.intersection(named):
            raise LoRAUsageError(
                f"LoRAManager.jit({option}={options[option]!r}) names the model, the argument {ordered[0].name!r} at "
                "position 0. Its variables are kept and passed as arrays at every call: leave it out"
            )
