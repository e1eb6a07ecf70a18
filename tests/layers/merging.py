"""Reference for the tests of layers: an unwrapped Flax model with weights merged in float64 NumPy."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jlora.adapters import Adapter, ModuleLoRA
from jlora.config import LoRAConfig
from jlora.layers.forward.scope import use
from jlora.manager.manager import LoRAManager


@dataclass(frozen=True)
class Target:
    """One module of a checkpoint, and the base parameter of the test model that its delta [N, K] changes.

    `into` maps the delta to the shape of `param[at]`. The default transposes it.
    """

    name: str
    k: int
    n: int
    param: str
    into: Callable[[np.ndarray], np.ndarray] = np.transpose
    at: tuple = ()
    kind: str = "linear"


def make_adapter(name: str, targets: Sequence[Target], rank: int, seed: int = 0) -> Adapter:
    rng = np.random.default_rng((seed, sum(map(ord, name))))
    return Adapter(name=name, modules={t.name: make_module(rng, t.k, t.n, rank, t.kind) for t in targets})


def make_dora(name: str, targets: Sequence[Target], rank: int) -> Adapter:
    """Return an adapter with a random magnitude for each module."""
    plain, rng = make_adapter(name, targets, rank), np.random.default_rng(rank)
    modules = {
        key: replace(module, vectors={"dora": rng.uniform(1, 3, len(module.b)).astype(np.float32)})
        for key, module in plain.modules.items()
    }
    return replace(plain, modules=modules)


def make_module(rng, k: int, n: int, rank: int, kind: str = "linear") -> ModuleLoRA:
    a = rng.normal(size=(rank, k)).astype(np.float32)
    b = rng.normal(size=(n, rank)).astype(np.float32)
    return ModuleLoRA(a=a, b=b, kind=kind, alpha=0.75 * rank, scaling=0.75)  # type: ignore[arg-type]  # kind is a plain str here


def in_int8(adapter: Adapter, sizes: Mapping[str, Sequence[int]] | None = None) -> Adapter:
    """Return an adapter with its linear factors rounded to 255 values a row, as slots of int8 have them.

    `sizes` has the output slices of modules that fill several.
    """

    def rounded(rows: np.ndarray) -> np.ndarray:
        step = np.abs(rows).max(axis=-1, keepdims=True).astype(np.float64) / 127
        return (np.round(rows / np.where(step > 0, step, 1)) * step).astype(np.float32)

    def module_of(name: str, module: ModuleLoRA) -> ModuleLoRA:
        if module.kind != "linear":
            return module
        parts = np.split(module.b, np.cumsum((sizes or {}).get(name, ()))[:-1].astype(int))
        b = np.concatenate([rounded(part.T).T for part in parts])
        return replace(module, a=rounded(module.a), b=b)

    return replace(adapter, modules={name: module_of(name, module) for name, module in adapter.modules.items()})


def delta(module: ModuleLoRA) -> np.ndarray:
    return module.scaling * module.b.astype(np.float64) @ module.a.astype(np.float64)


def at_path(model, path: str):
    def step(node, key):
        if isinstance(node, Mapping):
            return node[key]
        return node[int(key)] if key.isdecimal() else getattr(node, key)

    return functools.reduce(step, path.split("."), model)


def merge(model: nnx.Module, targets: Sequence[Target], adapter: Adapter | None) -> nnx.Module:
    """Return a copy of an unwrapped model with one adapter merged into its weights."""
    copy = nnx.clone(model)
    for target in targets:
        if adapter is not None and target.name in adapter.modules:
            param = at_path(copy, target.param)
            weight = np.asarray(param[...], np.float64).copy()
            module = adapter.modules[target.name]
            weight[target.at] += target.into(delta(module)).reshape(weight[target.at].shape)
            if "dora" in module.vectors:
                weight[target.at] *= _scales(target, weight[target.at], module.vectors["dora"])
            param.set_value(jax.device_put(weight.astype(param.dtype)))  # an assignment compiles programs for its shape
    return copy


def _scales(target: Target, weight: np.ndarray, magnitude: np.ndarray) -> np.ndarray:
    """Return the factors of a weight with which its N columns have the norms `magnitude`, as DoRA gives them."""
    n, k = target.n, target.k
    place = target.into(np.arange(1.0, n * k + 1).reshape(n, k)).reshape(weight.shape).astype(int) - 1
    columns = np.empty(n * k)
    columns[place[place >= 0]] = weight[place >= 0]
    scales = np.repeat(magnitude / np.linalg.norm(columns.reshape(n, k), axis=1), k)
    return np.where(place >= 0, scales[place], 1)


@jax.jit
def serve(model, x, batch):
    with use(batch):
        return model(x)


@jax.jit
def run(model, x):
    return model(x)


class Holder(nnx.Module):
    """A model of one layer."""

    def __init__(self, layer: nnx.Module):
        self.proj = layer

    def __call__(self, x):
        return self.proj(x)


def step_of_one_trace():
    """Return a new compiled step, which raises if it is traced twice."""
    return jax.jit(chex.assert_max_traces(serve.__wrapped__, n=1))


def make_manager(model: nnx.Module, adapters: Sequence[Adapter] = (), **kwargs) -> LoRAManager:
    options = {"max_loras": 3, "max_lora_rank": 4, "max_cpu_loras": 8}
    options.update((key, kwargs.pop(key)) for key in list(kwargs) if key in LoRAConfig.__dataclass_fields__)
    manager = LoRAManager(model, LoRAConfig(**options), **kwargs)
    for adapter in adapters:
        manager.add_adapter(adapter)
    return manager


def rounding_of(slots) -> float:
    """Return the tolerance of float32 outputs: the kernels round a @ x to slots of 16 bits, and XLA's path does not."""
    return 2**-8 if jax.default_backend() != "cpu" and jnp.dtype(slots).itemsize == 2 else 1e-6


def wrapped_paths(manager: LoRAManager) -> list[str]:
    return [layer.path for layer in manager.layers() if layer.wrapped]


def assert_close(found, expected, tolerance: float = 2e-5) -> None:
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    chex.assert_equal_shape([found, expected])
    assert np.abs(found - expected).max() <= tolerance * np.abs(expected).max()


def expected_rows(twins: Mapping[str | None, nnx.Module], names: Sequence[str | None], x, step=run) -> np.ndarray:
    """Return row i from the model merged with the adapter of sequence i. Check that each adapter changes its rows."""
    outputs = {name: np.asarray(step(twins[name], x), np.float64) for name in {*names, None}}
    for i, name in enumerate(names):
        if name is not None:
            change = np.abs(outputs[name][i] - outputs[None][i]).max()
            assert change > 1e-2 * np.abs(outputs[None][i]).max(), f"{name} changes nothing: the test proves nothing"
    return np.stack([outputs[name][i] for i, name in enumerate(names)])


def check_against_merged(
    model: nnx.Module, targets: Sequence[Target], x, *, adapters: Sequence[Adapter] | None = None, **kwargs
) -> LoRAManager:
    """Wrap `model`, serve two adapters and the base in one batch of three, compare with merged weights, then unwrap
    and compare with the base. Return the manager of the unwrapped model."""
    if adapters is None:
        adapters = [make_adapter("one", targets, 3), make_adapter("two", targets[:1], 1)]
    names = [adapters[0].name, None, adapters[-1].name]
    twins: dict[str | None, nnx.Module] = {a.name: merge(model, targets, a) for a in adapters}
    twins[None] = nnx.clone(model)
    base = np.asarray(run(model, x))
    manager = make_manager(model, adapters, **kwargs)
    with manager.prepare(names) as batch:
        assert_close(serve(model, x, batch), expected_rows(twins, names, x))
    with manager.prepare([None] * 3) as batch:
        # In each program, accelerators time the algorithms of a product anew, and JAX 0.12 fuses it anew on CPUs.
        same_bits = jax.default_backend() == "cpu" and jax.__version_info__ < (0, 12)
        assert_close(serve(model, x, batch), base, tolerance=0 if same_bits else 1e-6)
    manager.unwrap()
    np.testing.assert_array_equal(np.asarray(run(model, x)), base)
    return manager


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)
