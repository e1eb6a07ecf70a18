"""The write of one adapter into one slot: one dispatch, in place, compiled once, no more memory than it needs."""

import tempfile
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jlora.manager.swap import make_layout, make_write, pack

import jlora
from tests.manager.tiny import make_adapter, make_world, same

NAMES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Block(nnx.Module):
    """Seven projections; tiny, and of two shapes."""

    def __init__(self, rngs):
        for name in NAMES:
            setattr(self, name, nnx.Linear(4, 8 if name in ("gate_proj", "up_proj") else 4, use_bias=False, rngs=rngs))


class Blocks(nnx.Module):
    def __init__(self, layers):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([Block(rngs) for _ in range(layers)])


def block_adapter(name, layers, rng):
    modules = {}
    for i in range(layers):
        for n in NAMES:
            a = rng.normal(size=(2, 4)).astype(np.float32)
            b = rng.normal(size=(8 if n in ("gate_proj", "up_proj") else 4, 2)).astype(np.float32)
            modules[f"layers.{i}.{n}"] = jlora.ModuleLoRA(a=a, b=b, alpha=2.0, scaling=1.0)
    return jlora.Adapter(name=name, modules=modules)


def runs(call) -> dict[str, float]:
    """Jitted program -> how often it ran in `call`, as JAX's profiler saw it, in units of a program that runs once."""

    @jax.jit
    def once(x):
        return x + 1

    one = jnp.ones(3)
    once(one)
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            jax.block_until_ready(once(one))
            jax.block_until_ready(call())
        (file,) = Path(folder).glob("**/*.xplane.pb")
        planes = jax.profiler.ProfileData.from_file(str(file)).planes
        seen = Counter(event.name for plane in planes for line in plane.lines for event in line.events)
    unit = seen.pop("PjitFunction(once)")
    return {name: count / unit for name, count in seen.items() if name.startswith("PjitFunction(")}


def swap(manager, old, new):
    """Evict one adapter for another; returns all slot arrays."""
    manager.deactivate_adapter(old)
    manager.activate_adapter(new)
    return jax.tree.leaves(manager.slots)


def test_seven_modules_in_32_layers_are_one_dispatch(rng, monkeypatch):
    model = Blocks(32)
    manager = jlora.LoRAManager(model, jlora.LoRAConfig(max_loras=2, max_lora_rank=2, max_cpu_loras=3))
    adapters = {name: block_adapter(name, 32, rng) for name in "abc"}
    for adapter in adapters.values():
        manager.add_adapter(adapter)
    manager.activate_adapter("a")
    manager.activate_adapter("b")
    assert len(jax.tree.leaves(manager.slots)) == 7 * 32 * 3

    moved = []
    put = jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda x, *args, **kwargs: (moved.append(x), put(x, *args, **kwargs))[1])
    old = jax.tree.leaves(manager.slots)
    assert runs(lambda: swap(manager, "a", "c")) == {"PjitFunction(write)": 1}
    assert [{name: buffer.size for name, buffer in tree.items()} for tree in moved] == [
        {"float32": sum(m.a.size + m.b.size for m in adapters["c"].modules.values()), "int32": 7 * 32}
    ]
    assert all(array.is_deleted() for array in old)

    for i, layer in enumerate(model.layers):
        for name in NAMES:
            want = [adapters[held].modules[f"layers.{i}.{name}"] for held in ("c", "b")]
            projection = getattr(layer, name)
            np.testing.assert_array_equal(projection.jlora_a[:, 0], np.stack([m.a for m in want]))
            np.testing.assert_array_equal(projection.jlora_b[...], np.stack([m.b.T for m in want]))
            np.testing.assert_array_equal(projection.jlora_ranks[...], [[2], [2]])


def test_the_count_of_dispatches_would_see_more():
    x = jnp.ones((4, 4))
    seen = runs(lambda: [x.at[i].set(2.0) for i in range(3)])
    assert sum(seen.values()) >= 3


def compiled_write(world):
    modules, layout = world.manager._wrapped.modules, world.manager._layout
    arrays = [tuple(getattr(modules[s], name).get_value() for name in s.attributes) for s in layout.sites]
    buffers = pack(layout, ())
    compiled = make_write(layout, lambda: None).lower(arrays, buffers, np.int32(0)).compile()
    return compiled.memory_analysis(), arrays, buffers


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_the_write_needs_the_pool_and_one_adapter(dtype):
    """Peak memory = arguments + outputs - what is aliased + temporaries."""
    world = make_world(max_loras=5, max_cpu_loras=5, dtype=dtype)
    memory, arrays, buffers = compiled_write(world)
    leaves = jax.tree.leaves(arrays)
    pool = sum(array.nbytes for array in leaves)
    adapter = sum(buffer.nbytes for buffer in buffers.values())
    assert pool == 5 * adapter
    assert adapter == world.manager.stats().slot_bytes
    assert memory.alias_size_in_bytes == pool
    peak = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    peak += memory.temp_size_in_bytes
    tables = 8 * (len(leaves) + 1) + np.dtype(np.int32).itemsize  # the outputs' table of pointers, and the slot index
    assert pool + adapter <= peak <= pool + adapter + tables


def test_the_write_is_in_place(world):
    """The arrays after a write are the same memory, and the arrays before it are gone."""
    world.manager.add_adapter(make_adapter("a"))
    world.manager.add_adapter(make_adapter("b"))
    world.manager.activate_adapter("a")
    before = [array for _, array in world.slots()]
    places = [array.unsafe_buffer_pointer() for array in before]
    world.manager.activate_adapter("b")
    assert all(array.is_deleted() for array in before)
    assert [array.unsafe_buffer_pointer() for _, array in world.slots()] == places


def test_one_compilation_for_every_slot_rank_and_set_of_modules(world):
    compilations, cached = world.manager.stats().compilations, world.manager._write._cache_size()
    assert compilations == cached <= 1
    for version in range(12):
        world.manager.add_adapter(make_adapter("a", version, rank=version % 4 + 1), load_inplace=True)
        world.manager.add_adapter(make_adapter("b", version))
        world.serve(["a", "b", None] if version % 2 else ["b", "a", None])
        if version % 3 == 0:
            world.manager.deactivate_adapter("a")
        world.manager.remove_adapter("b")
    assert world.manager.stats().compilations == world.manager._write._cache_size() == 1


def test_other_slots_are_bitwise_as_before(world):
    for name in "abc":
        world.manager.add_adapter(make_adapter(name))
    world.serve(["a", "b", None])
    before = [np.asarray(array)[1] for _, array in world.slots()]
    world.serve(["c", "b", None])
    assert world.manager.slot_names == ("c", "b")
    for old, (_, new) in zip(before, world.slots(), strict=True):
        np.testing.assert_array_equal(old, np.asarray(new)[1])


def test_a_write_leaves_alone_what_else_the_model_holds(world):
    world.manager.add_adapter(make_adapter("a"))
    base = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(world.model, nnx.Param)))
    world.serve(["a", None, None])
    after = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(world.model, nnx.Param)))
    jax.tree.map(np.testing.assert_array_equal, base, after)


def test_sites_of_different_dtypes_are_packed_apart(rng):
    class Mixed(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.low = nnx.Linear(3, 5, use_bias=False, param_dtype=jnp.bfloat16, rngs=rngs)
            self.high = nnx.Linear(5, 2, use_bias=False, rngs=rngs)

    model = Mixed()
    manager = jlora.LoRAManager(model, jlora.LoRAConfig(max_loras=2, max_lora_rank=4))
    layout = make_layout(manager._pool.sites)
    assert layout.sizes == {"int32": 2, "bfloat16": 4 * (3 + 5), "float32": 4 * (5 + 2)}
    assert layout.nbytes == 2 * 4 + 2 * 4 * (3 + 5) + 4 * 4 * (5 + 2)
    a, b = rng.integers(-8, 8, (3, 5)).astype(np.float32), rng.integers(-8, 8, (2, 3)).astype(np.float32)
    manager.add_adapter(jlora.Adapter(name="x", modules={"high": jlora.ModuleLoRA(a=a, b=b, alpha=6.0, scaling=2.0)}))
    manager.activate_adapter("x")
    np.testing.assert_array_equal(model.high.jlora_a[0, 0], np.pad(a, ((0, 1), (0, 0))))
    np.testing.assert_array_equal(model.high.jlora_b[0], np.pad(2 * b.T, ((0, 1), (0, 0))))
    assert model.high.jlora_ranks[...].tolist() == [[3], [0]]
    assert not model.low.jlora_a[...].any()
    assert model.low.jlora_a.dtype == model.low.jlora_b.dtype == jnp.bfloat16


def test_the_pool_after_an_emptied_slot_serves_the_base_bitwise(world):
    """A slot given up is not written: nothing refers to it, and rows without an adapter never read it."""
    base = world.serve([None, None, None])
    world.manager.add_adapter(make_adapter("a"))
    world.serve(["a", "a", "a"])
    before = world.held()
    world.manager.deactivate_adapter("a")
    np.testing.assert_array_equal(world.serve([None, None, None]), base)
    assert not same(before, world.held())
