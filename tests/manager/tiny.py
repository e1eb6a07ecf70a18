"""A tiny model, adapters for it, and its logits in plain NumPy."""

import contextlib
import dataclasses
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jlora
from tests.records import slot_names

VOCAB, WIDTH, LAYERS, MAX_RANK = 13, 16, 2, 4
SEQUENCES, LENGTH = 3, 4
PARTS = {"q_proj": (0, 16), "k_proj": (16, 24), "v_proj": (24, 32)}

# Checkpoint name -> (K, N, kind) of everything an adapter may bring.
MODULES: dict[str, tuple[int, int, str]] = {
    "embed": (VOCAB, WIDTH, "embedding"),
    "lm_head": (WIDTH, VOCAB, "linear"),
    **{
        f"layers.{i}.{name}": (WIDTH, stop - start, "linear")
        for i in range(LAYERS)
        for name, (start, stop) in PARTS.items()
    },
    **{f"layers.{i}.o_proj": (WIDTH, WIDTH, "linear") for i in range(LAYERS)},
}


class Layer(nnx.Module):
    """A merged projection whose parts all reach the output, and one after it."""

    def __init__(self, dtype, rngs):
        self.qkv_proj = nnx.Linear(WIDTH, 32, use_bias=False, param_dtype=dtype, dtype=dtype, rngs=rngs)
        self.o_proj = nnx.Linear(WIDTH, WIDTH, param_dtype=dtype, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        y = self.qkv_proj(x)
        return x + self.o_proj(y[..., :16] + jnp.concatenate([y[..., 16:24], -y[..., 24:]], axis=-1))


class Model(nnx.Module):
    tie_word_embeddings = True
    packed_modules: ClassVar = {"qkv_proj": {name: stop - start for name, (start, stop) in PARTS.items()}}

    def __init__(self, seed=0, dtype=jnp.float32):
        rngs = nnx.Rngs(seed)
        self.embed = nnx.Embed(VOCAB, WIDTH, param_dtype=dtype, dtype=dtype, rngs=rngs)
        self.layers = nnx.List([Layer(dtype, rngs) for _ in range(LAYERS)])

    def __call__(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.embed.attend(x)


class Stack(nnx.Module):
    """Three layers in one module, as `nnx.scan` takes them, and nothing else."""

    def __init__(self):
        make = nnx.vmap(lambda rngs: nnx.Linear(8, 8, use_bias=False, rngs=rngs))
        self.layers = make(nnx.Rngs(0).split(3))

    def __call__(self, x):
        axes = nnx.StateAxes({nnx.Param: 0, jlora.SlotParam: 0, ...: None})
        return nnx.scan(lambda layer, x: layer(x), in_axes=(axes, nnx.Carry), out_axes=nnx.Carry)(self.layers, x)


def expected(model: Model, adapter, tokens, active_from: int = 0) -> np.ndarray:
    """Logits of one sequence [L] -> [L, V], float64, in plain NumPy.

    `adapter` is an adapter, None for the base, or pairs (adapter, factor) that are summed. Rows before `active_from`
    take the base.
    """
    parts = () if adapter is None else ((adapter, 1.0),) if isinstance(adapter, jlora.Adapter) else adapter
    active = np.arange(len(tokens))[:, None] >= active_from

    def weight(variable):
        return np.asarray(variable[...], np.float64)

    def delta(name, x):
        total = 0.0
        for each, factor in parts:
            if name in each.modules:
                lora = each.modules[name]
                a, b = (np.asarray(half, np.float64) for half in (lora.a, lora.b))
                total = total + factor * lora.scaling * (x @ a.T) @ b.T
        return np.where(active, total, 0)

    def project(name, x, w):
        """x @ w [K, N] plus the delta; for DoRA in the norms that the adapter gives the columns of the sum."""
        y = x @ w + delta(name, x)
        lora = parts[0][0].modules.get(name) if parts else None
        if lora is None or "dora" not in lora.vectors:
            return y
        whole = w.T + lora.scaling * np.asarray(lora.b, np.float64) @ np.asarray(lora.a, np.float64)
        return np.where(active, y * (lora.vectors["dora"] / np.linalg.norm(whole, axis=1)), y)

    tokens = np.asarray(tokens)
    table = weight(model.embed.embedding)
    x = table[tokens] + delta("embed", np.eye(VOCAB)[tokens])
    for i, layer in enumerate(model.layers):
        qkv = weight(layer.qkv_proj.kernel)
        q, k, v = (project(f"layers.{i}.{name}", x, qkv[:, s:e]) for name, (s, e) in PARTS.items())
        mixed = q + np.concatenate([k, -v], axis=-1)
        x = x + project(f"layers.{i}.o_proj", mixed, weight(layer.o_proj.kernel)) + weight(layer.o_proj.bias)
    return project("lm_head", x, table.T)


def lora(name: str, rank: int, rng: np.random.Generator, *, scaling=0.5, dtype=np.float32) -> jlora.ModuleLoRA:
    """Random factors for one module of the model."""
    k, n, kind = MODULES[name]
    return jlora.ModuleLoRA(
        a=rng.normal(size=(rank, k)).astype(dtype),
        b=rng.normal(size=(n, rank)).astype(dtype),
        kind=kind,
        alpha=scaling * rank,
        scaling=scaling,
    )


def make_adapter(name: str, version: int = 0, *, rank: int | None = None, modules=None, **fields) -> jlora.Adapter:
    """An adapter that name and version decide: ranks 1 to MAX_RANK, all or some of the modules."""
    rng = np.random.default_rng([zlib.crc32(name.encode()), version])
    rank = int(rng.integers(1, MAX_RANK + 1)) if rank is None else rank
    if modules is None:
        modules = rng.permutation(list(MODULES))[: rng.integers(1, len(MODULES) + 1)]
    return jlora.Adapter(name=name, modules={m: lora(str(m), rank, rng) for m in modules}, **fields)


def as_dora(adapter: jlora.Adapter) -> jlora.Adapter:
    """Return an adapter with a random magnitude for each module."""
    rng = np.random.default_rng(zlib.crc32(adapter.name.encode()))
    vectors = {n: {"dora": rng.uniform(1, 3, len(m.b))} for n, m in adapter.modules.items()}
    modules = {n: dataclasses.replace(m, vectors=vectors[n]) for n, m in adapter.modules.items()}
    return dataclasses.replace(adapter, modules=modules)


def tensors(adapter: jlora.Adapter, put) -> dict[str, object]:
    """Return the arguments of `update_adapter`: PEFT tensor names -> arrays, converted by `put`."""
    found = {}
    for name, lora in adapter.modules.items():
        halves = ("lora_embedding_A", "lora_embedding_B") if name == "embed" else ("lora_A.weight", "lora_B.weight")
        found.update({f"{name}.{half}": put(array) for half, array in zip(halves, (lora.a, lora.b), strict=True)})
    return found


@dataclass
class World:
    """A served model and the user's one jitted step."""

    model: Model
    manager: jlora.LoRAManager
    tokens: jax.Array
    traces: list[int] = field(default_factory=list)

    def __post_init__(self):
        @jax.jit
        def forward(model, tokens, batch):
            self.traces.append(1)
            with jlora.use(batch):
                return model(tokens)

        self.forward = forward

    def logits(self, batch: jlora.LoRABatch) -> np.ndarray:
        return jax.device_get(self.forward(self.model, self.tokens, batch))

    def load(self, *adapters: str | jlora.Adapter, **fields) -> None:
        """Add these adapters, or those that names and `fields` decide (`make_adapter`)."""
        for each in adapters:
            self.manager.add_adapter(make_adapter(each, **fields) if isinstance(each, str) else each)

    def serve(self, names) -> np.ndarray:
        """Logits [B, L, V] of one batch."""
        with self.manager.prepare(names) as batch:
            return self.logits(batch)

    def check(self, logits: np.ndarray, adapters) -> None:
        """Compare with the NumPy model, given the adapter of each sequence."""
        want = np.stack([expected(self.model, a, t) for a, t in zip(adapters, np.asarray(self.tokens), strict=True)])
        np.testing.assert_allclose(logits, want, rtol=0, atol=2e-6 * np.abs(want).max())

    def held(self) -> tuple:
        """Everything a failed call must leave alone."""
        listed = self.manager.list_adapters()
        slots = [(path, np.asarray(value)) for path, value in self.slots()]
        return tuple(listed.values()), slot_names(self.manager), slots

    def slots(self):
        return [(path, v[...]) for path, v in nnx.to_flat_state(nnx.state(self.model, jlora.SlotParam))]

    def reset(self) -> None:
        self.manager.remove_all_adapters()


def make_world(*, max_loras=2, max_cpu_loras=4, dtype=jnp.float32, seed=0, **config) -> World:
    model = Model(seed, dtype)
    manager = jlora.LoRAManager(
        model, jlora.LoRAConfig(max_loras=max_loras, max_cpu_loras=max_cpu_loras, max_lora_rank=MAX_RANK, **config)
    )
    tokens = np.random.default_rng(seed).integers(0, VOCAB, (SEQUENCES, LENGTH))
    return World(model, manager, jnp.asarray(tokens, jnp.int32))


def request(folder, name: str, version: int = 0) -> jlora.LoRARequest:
    """Return a request for such an adapter, saved to a folder of its own."""
    path = folder / f"{name}-{version}"
    if not path.exists():
        make_adapter(name, version).save_pretrained(path)
    return jlora.LoRARequest(name, str(path))


class DeviceError(Exception):
    pass


@contextlib.contextmanager
def failing_call(owner, name: str, nth: int, damage=lambda *args: None, *, late=False) -> Iterator[list[int]]:
    """Let the nth call of a function raise: before it did anything, after damage, or after all (`late`).

    Yields the list of the numbers of its calls.
    """
    working, calls = getattr(owner, name), []

    def broken(*args, **kwargs):
        calls.append(len(calls) + 1)
        if len(calls) != nth:
            return working(*args, **kwargs)
        if late:
            working(*args, **kwargs)
        damage(*args)
        raise DeviceError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, broken)
        yield calls


def failing_write(manager: jlora.LoRAManager, nth: int, *args, **kwargs):
    """Let the nth program that writes a slot fail, as `failing_call` does. No public call reaches one program."""
    return failing_call(manager._state.slot_arrays, "_run", nth, *args, **kwargs)


def as_new(world: World) -> World:
    """The same manager as one that never had an adapter: a new one compiles for a second."""
    world.manager.remove_all_adapters()
    world.manager._state.cache.clear()
    return world


def infos(world: World) -> list:
    """Return the records that a restore must return. The slot of an adapter may differ."""
    listed = world.manager.list_adapters().values()
    return [dataclasses.replace(info, slot=None if info.slot is None else 0) for info in listed]


def same(before: tuple, after: tuple) -> bool:
    """Bitwise equality of two `World.held`."""
    return before[:2] == after[:2] and all(
        path == other and a.dtype == b.dtype and a.tobytes() == b.tobytes()
        for (path, a), (other, b) in zip(before[2], after[2], strict=True)
    )


def refused(call, *args):
    """The LoRAError that a call raises, if it does."""
    try:
        call(*args)
    except jlora.LoRAError as error:
        return error
    return None
