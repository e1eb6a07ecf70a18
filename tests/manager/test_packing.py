"""Factors cast and packed, against plain NumPy, which knows nothing of blocks; and memory given back meanwhile."""

import functools
import gc
import threading
import weakref

import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

import jlora
from jlora import _threads
from jlora.adapters import tensor_data
from jlora.errors import AdapterMismatchError
from jlora.layers.wrap.apply import wrap_model
from jlora.manager import packing
from jlora.manager.blocks import cut, unpack
from jlora.manager.fit import place
from jlora.manager.names import SiteIndex
from jlora.manager.packing import pack_modules
from tests.layers.expert_models import EXPERTS, HIDDEN, INNER, Block, Model, Seams
from tests.manager.test_shared_experts import shared
from tests.matrix import thinned

SIZES = {
    "experts.gate_proj": (HIDDEN, INNER),
    "experts.up_proj": (HIDDEN, INNER),
    "experts.down_proj": (INNER, HIDDEN),
    "gate": (HIDDEN, EXPERTS),
}
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
SLOTS = ("float32", "bfloat16", "float16")
FILES = [np.dtype(t) for t in (np.float32, ml_dtypes.bfloat16, np.float16, np.float64)]
STACK = 6  # layers


class Stacked(nnx.Module):
    """Layers in one stack: their routers are rows of one site, and so are the experts of all of them."""

    def __init__(self):
        make = nnx.split_rngs(splits=STACK)(nnx.vmap(lambda rngs: Block(Seams, rngs), in_axes=0, out_axes=0))
        self.layers = make(nnx.Rngs(0))


@functools.cache
def wrapped_as(stacked, dtype):
    sizes = {"max_loras": 3, "max_lora_rank": 4, "max_expert_loras": 1, "max_shared_expert_loras": 1}
    return wrap_model(Stacked() if stacked else Model(Seams, nnx.Rngs(0)), jlora.LoRAConfig(**sizes, dtype=dtype))


def on_several_threads(monkeypatch):
    monkeypatch.setattr(_threads, "_WORTHWHILE", 0)


def fitted(adapter, stacked=False, dtype="float32", max_bytes=1 << 20):
    return fitted_to(wrapped_as(stacked, dtype), dict(adapter.modules), max_bytes)


def fitted_to(wrapped, modules, max_bytes=1 << 20):
    index = SiteIndex(wrapped, ())
    placed = place("here", modules, index)
    return pack_modules("here", modules, placed, {}, wrapped, index, cut(tuple(wrapped.modules), max_bytes))


def assert_numbers(found, adapter, dtype):
    """Every placement's numbers by plain NumPy: A, and scaling * B in float32, each rounded once."""
    placements, blocks = found
    rows = unpack(blocks, {(p.site, p.row) for p in placements})
    slot_dtype = BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype)
    assert [p.module for p in placements] == list(adapter.modules)
    for p in placements:
        module = adapter.modules[p.module]
        a, b = rows[p.site, p.row]
        start = sum(p.site.spec.out_sizes[: p.first])
        scaled = np.float32(module.scaling) * module.b.astype(np.float32).T
        wide = module.a.astype(np.float64 if module.a.dtype == np.float64 else np.float32)
        want_a = np.ldexp(wide, p.shift).astype(slot_dtype)
        want_b = np.ldexp(scaled, -p.shift).astype(slot_dtype)
        np.testing.assert_array_equal(a[p.first, : module.rank], want_a)
        np.testing.assert_array_equal(b[: module.rank, start : start + len(module.b)], want_b)
        assert (p.rank, p.alpha, p.scaling) == (module.rank, module.alpha, module.scaling)
        assert dtype == "float16" or p.shift == 0


def experts_of(part, layer, experts=range(EXPERTS)):
    return [f"layers.{layer}.experts.{e}.{part}" for e in experts]


def size_of(name):
    parts = name.split(".")
    return SIZES[".".join(part for part in parts[2:] if not part.isdecimal())]


def shape_of(name, half, rank):
    k, n = size_of(name)
    return (rank, k) if half == "a" else (n, rank)


def numbers(rng, shape, dtype, turned):
    """Of very different sizes; `turned`: columns lie together in memory."""
    found = rng.normal(size=shape) * 2.0 ** rng.integers(-7, 7)
    return np.array(found.astype(dtype), order="F" if turned else "C")


@st.composite
def adapters(draw, stacked):
    modules = {}
    layers = range(STACK if stacked else 2)
    for part in draw(st.lists(st.sampled_from(sorted(SIZES)), min_size=1, max_size=4, unique=True)):
        block, _, own = part.rpartition(".")
        names = (
            [name for layer in layers for name in experts_of(own, layer)]
            if block
            else [f"layers.{i}.gate" for i in layers]
        )
        names = [name for name in names if draw(st.integers(0, 9))]  # few are missing
        rank, other = draw(st.permutations([1, 2, 3, 4]))[:2]
        ranks = [draw(st.sampled_from([rank] * 9 + [other])) for _ in names]
        dtype = draw(st.sampled_from(FILES))
        if not names:
            continue
        rng = np.random.default_rng(draw(st.integers(0, 99)))
        turned = draw(st.booleans())
        a, b = (
            [numbers(rng, shape_of(name, half, r), t, turned) for name, r in zip(names, ranks, strict=True)]
            for half, t in (("a", dtype), ("b", draw(st.sampled_from(FILES))))
        )
        alphas = [draw(st.sampled_from([2.0] * 9 + [3.0])) for _ in names]
        modules |= {
            name: jlora.ModuleLoRA(a=one, b=other, alpha=alpha, scaling=alpha / len(one))
            for name, one, other, alpha in zip(names, a, b, alphas, strict=True)
        }
    order = draw(st.permutations(sorted(modules))) if draw(st.booleans()) else list(modules)
    return jlora.Adapter(name="x", modules={name: modules[name] for name in order})


@pytest.mark.parametrize("dtype", thinned(SLOTS, 0, 1))
@pytest.mark.parametrize("stacked", [False, True])
def test_numbers_are_those_of_numpy(monkeypatch, stacked, dtype):
    on_several_threads(monkeypatch)

    @given(adapter=adapters(stacked).filter(lambda a: a.modules), max_bytes=st.sampled_from([1, 700, 1 << 20]))
    def check(adapter, max_bytes):
        assert_numbers(fitted(adapter, stacked, dtype, max_bytes), adapter, dtype)

    check()


def even(names, *, rank=2, dtype=np.float32, seed=0):
    """Modules of these names, one behind the other in one piece of memory."""
    rng = np.random.default_rng(seed)
    shapes = [shape_of(name, half, rank) for name in names for half in "ab"]
    counts = [rows * columns for rows, columns in shapes]
    numbers = rng.normal(size=sum(counts)).astype(dtype)
    parts = np.split(numbers, np.cumsum(counts)[:-1])
    arrays = [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]
    return {
        name: jlora.ModuleLoRA(a=a, b=b, alpha=2.0 * rank, scaling=2.0)
        for name, a, b in zip(names, arrays[::2], arrays[1::2], strict=True)
    }


GATES = experts_of("gate_proj", 0)


# ---- memory


@pytest.mark.parametrize("threads", [False, True])
def test_what_is_written_goes_back_to_the_system(monkeypatch, threads):
    """Before what comes after it is written, unless somebody else refers to it."""
    if threads:
        on_several_threads(monkeypatch)
    layers = [even(experts_of("gate_proj", layer)) for layer in range(STACK)]
    memory = [weakref.ref(next(iter(modules.values())).a.base) for modules in layers]
    kept = layers[1][experts_of("gate_proj", 1)[0]]
    modules = {name: module for of_layer in layers for name, module in of_layer.items()}
    del layers
    there, original = [], packing._fill

    def fill(*args):
        there.append([i for i, held in enumerate(memory) if held() is not None])
        return original(*args)

    monkeypatch.setattr(packing, "_fill", fill)
    fitted(jlora.Adapter(name="x", modules=dict(modules)), True)
    assert there == [list(range(STACK))] * len(modules)  # the adapter is the caller's
    there.clear()
    fitted_to(wrapped_as(True, "float32"), modules)
    assert not modules
    assert [i for i, held in enumerate(memory) if held() is not None] == [1]
    assert kept.a.size
    others = 2 if threads else 0  # threads that may still be at an earlier one
    assert all(len({*found} - {1}) <= STACK - i // EXPERTS + others for i, found in enumerate(there))


def test_a_load_lets_go_of_what_it_read(tmp_path, monkeypatch):
    names = [f"layers.{i}.gate" for i in range(STACK)] + experts_of("gate_proj", 1)
    jlora.Adapter(name="x", modules=even(names)).save_pretrained(tmp_path)
    monkeypatch.setattr(tensor_data, "_WHOLE", 1)
    read, original = [], packing._fill

    def fill(where, name, module, *args):
        assert all(memory() is None for memory in read)
        read.extend(weakref.ref(half.base) for half in (module.a, module.b))
        return original(where, name, module, *args)

    monkeypatch.setattr(packing, "_fill", fill)
    config = jlora.LoRAConfig(max_loras=1, max_lora_rank=4)
    jlora.LoRAManager(Stacked(), config).add_adapter(jlora.LoRARequest("x", str(tmp_path)))
    assert len(read) == 2 * len(names)


def test_blocks_do_not_keep_what_they_were_made_of():
    adapter = jlora.Adapter(name="x", modules=even(GATES, dtype=BFLOAT16))
    held = weakref.ref(adapter.modules[GATES[0]].a.base)
    _, found = fitted(adapter, dtype="bfloat16")
    del adapter
    gc.collect()
    assert held() is None
    assert found


# ---- each with its own power of two, and its own error


def test_routers_in_a_stack_keep_a_power_of_two_each():
    """Also those of an adapter whose experts share factors, and so one power."""
    names = [f"layers.{i}.gate" for i in range(STACK)]
    modules = even(names)
    for i, name in enumerate(names):
        modules[name].b[...] *= 2.0 ** (-4 * i)
    of_experts = {name: module for name, module in shared("x").modules.items() if name.startswith("layers.0.")}
    adapter = jlora.Adapter(name="x", modules=modules | of_experts)
    found, _ = fitted(adapter, True, "float16")
    alone, _ = fitted(jlora.Adapter(name="x", modules=modules), True, "float16")
    assert [p for p in found if p.module in names] == list(alone)
    assert len({p.shift for p in alone}) > 3


@pytest.mark.parametrize("powers", [(0, 0), (0, -8), (-8, 0)])
def test_doubles_are_rounded_once(powers):
    """In float32, 1 + 2**-11 + 2**-40 would be halfway between two numbers of float16, and 65520 - 2**-9 too large."""
    modules = even(GATES[:2], dtype=np.float64)
    for m, power in zip(modules.values(), powers, strict=True):
        m.a[...], m.b[...] = 1 + 2.0**-11 + 2.0**-40, 2.0 ** (power - 1)
        m.a[0, 0] = -1
    adapter = jlora.Adapter(name="x", modules=modules)
    found = fitted(adapter, dtype="float16")
    assert [p.shift for p in found[0]] == [power // 2 for power in powers]
    assert_numbers(found, adapter, "float16")
    for m in modules.values():
        m.a[1, 1], m.b[...] = 65520 - 2.0**-9, m.b * 2.0**15
    found = fitted(adapter, dtype="float16")
    assert [p.shift for p in found[0]] == [power // 2 for power in powers]
    assert_numbers(found, adapter, "float16")


@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("half", ["a", "b"])
@pytest.mark.parametrize("bad", range(EXPERTS))
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_module_with_a_value_too_large_is_named(monkeypatch, threads, half, bad, dtype):
    if threads:
        on_several_threads(monkeypatch)
    modules = even(GATES + experts_of("up_proj", 0))
    for expert in range(bad, EXPERTS):  # the first is named
        m = modules[GATES[expert]]
        m.a[...], m.b[...] = (1, 1e-3) if dtype == "float16" else (1, 1)
        getattr(m, half)[0, 1] = 3e38 if half == "b" else 3.4e38
        if dtype == "float16":
            (m.b if half == "a" else m.a)[...] = 1e6
    adapter = jlora.Adapter(name="x", modules=modules)
    with pytest.raises(AdapterMismatchError, match=rf"here: {GATES[bad]}: .* must be finite in the slots' dtype"):
        fitted(adapter, dtype=dtype)


def test_modules_are_written_by_several_threads(monkeypatch):
    """And each of them ignores what NumPy says of numbers that are not finite, as the caller's thread does."""
    modules = even([name for layer in range(STACK) for name in experts_of("down_proj", layer)])
    for m in modules.values():
        m.b[0, 0], m.b[0, 1] = np.nan, np.inf
    adapter = jlora.Adapter(name="x", modules=modules)
    expected = fitted(adapter, True, "float16")
    on_several_threads(monkeypatch)
    threads, original, met = set(), packing._fill, threading.Barrier(4)

    def fill(*args):
        if threading.current_thread() not in threads:
            threads.add(threading.current_thread())
            met.wait(20)
        return original(*args)

    monkeypatch.setattr(packing, "_fill", fill)
    found = fitted(adapter, True, "float16")
    assert len(threads) == 4
    assert found[0] == expected[0]
    for one, other in zip(found[1], expected[1], strict=True):
        assert one.a.tobytes() == other.a.tobytes()
        assert one.b.tobytes() == other.b.tobytes()
