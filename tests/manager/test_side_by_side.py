"""Modules whose factors lie evenly in memory are written together: the same bits as those of copies, written alone.

And the same as plain NumPy says, which knows nothing of blocks.
"""

import functools
import gc
import math
import mmap
import threading
import weakref
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from hypothesis import event, given
from hypothesis import strategies as st

import jlora
from jlora import _threads
from jlora.adapters import values
from jlora.errors import AdapterMismatchError
from jlora.layers.wrap import wrap_model
from jlora.manager import fit as fitting
from jlora.manager import side_by_side
from jlora.manager.blocks import cut, unpack
from jlora.manager.fit import fit
from jlora.manager.names import SiteIndex
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
    monkeypatch.setattr(_threads, "_processors", lambda: 3)


def fitted(adapter, stacked=False, dtype="float32", max_bytes=1 << 20):
    return fitted_to(wrapped_as(stacked, dtype), dict(adapter.modules), max_bytes)


def fitted_to(wrapped, modules, max_bytes=1 << 20):
    index = SiteIndex(wrapped, ())
    placed = fitting.place("here", modules, index)
    return fit("here", modules, placed, {}, wrapped, index, cut(tuple(wrapped.modules), max_bytes))


def copied(array):
    """The same in memory of its own."""
    own = np.array(array, order="K")
    assert own.base is None
    return own


def copies(adapter):
    modules = {name: replace(m, a=copied(m.a), b=copied(m.b)) for name, m in adapter.modules.items()}
    return replace(adapter, modules=modules)


def assert_same(found, expected):
    assert found.placements == expected.placements
    assert len(found.blocks) == len(expected.blocks)
    for one, other in zip(found.blocks, expected.blocks, strict=True):
        assert (one.chunk.rows, one.row, one.start) == (other.chunk.rows, other.row, other.start)
        assert one.a.tobytes() == other.a.tobytes()
        assert one.b.tobytes() == other.b.tobytes()


def assert_numbers(found, adapter, dtype):
    """Every placement's numbers by plain NumPy: A, and scaling * B in float32, each rounded once."""
    rows = unpack(found.blocks, {(p.site, p.row) for p in found.placements})
    slot_dtype = BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype)
    assert [p.module for p in found.placements] == list(adapter.modules)
    for p in found.placements:
        module = adapter.modules[p.module]
        a, b = rows[p.site, p.row]
        start = sum(p.site.spec.out_sizes[: p.first])
        scaled = np.float32(module.scaling) * copied(module.b).astype(np.float32).T
        wide = copied(module.a).astype(np.float64 if module.a.dtype == np.float64 else np.float32)
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


# ---- memory


def memory(kind, numbers):
    """The numbers in one piece of memory, and what gives a view of some of them."""
    if kind == "bytes":
        held = numbers.tobytes()
        return lambda at, count: np.ndarray((count,), numbers.dtype, held, at * numbers.itemsize)
    if kind == "misaligned bytes":
        held = b"-" + numbers.tobytes()
        return lambda at, count: np.ndarray((count,), numbers.dtype, held, 1 + at * numbers.itemsize)
    if kind == "mmap":
        mapped = mmap.mmap(-1, numbers.nbytes)
        mapped[:] = numbers.tobytes()
        whole = np.frombuffer(mapped, np.uint8).view(numbers.dtype)
    elif kind == "backwards":
        whole = numbers[::-1].copy()[::-1]
    else:
        whole = numbers
        whole.flags.writeable = kind != "read only"
    return lambda at, count: whole[at : at + count]


MEMORY = ["array", "read only", "bytes", "misaligned bytes", "mmap", "backwards"]


@st.composite
def views(draw, shapes, dtype):
    """An array of each shape: views of one piece of memory, which may overlap, and lie evenly but for some gaps."""
    counts = [rows * columns for rows, columns in shapes]
    step = draw(st.sampled_from(["one after the other", *range(-40, 41)]))
    some = draw(st.sampled_from([[0], [0] * 9 + [1, 7, -3], [0, 1, 7, -3]]))
    gaps = draw(st.lists(st.sampled_from(some), min_size=len(shapes), max_size=len(shapes)))
    places, at = [], 0
    for count, gap in zip(counts, gaps, strict=True):
        places.append(at)
        at += (count if isinstance(step, str) else step) + gap
    places = [place - min(places) for place in places]
    if draw(st.integers(0, 3)) == 0:
        places = draw(st.permutations(places))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    size = max(place + count for place, count in zip(places, counts, strict=True))
    powers = 2.0 ** np.repeat(rng.integers(-7, 7, size // 16 + 1), 16)[:size]
    view = memory(draw(st.sampled_from(MEMORY)), (rng.normal(size=size) * powers).astype(dtype))
    turned = draw(st.booleans())
    return [
        view(place, rows * columns).reshape(columns, rows).T
        if turned
        else view(place, rows * columns).reshape(rows, columns)
        for place, (rows, columns) in zip(places, shapes, strict=True)
    ]


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
        shapes = [[shape_of(name, half, r) for name, r in zip(names, ranks, strict=True)] for half in "ab"]
        if not names:
            continue
        if draw(st.booleans()):  # as in a file: A, B, A, B
            both = draw(views([shape for pair in zip(*shapes, strict=True) for shape in pair], dtype))
            a, b = both[::2], both[1::2]
        else:
            a, b = draw(views(shapes[0], dtype)), draw(views(shapes[1], draw(st.sampled_from(FILES))))
        alphas = [draw(st.sampled_from([2.0] * 9 + [3.0])) for _ in names]
        modules |= {
            name: jlora.ModuleLoRA(a=one, b=other, alpha=alpha, scaling=alpha / len(one))
            for name, one, other, alpha in zip(names, a, b, alphas, strict=True)
        }
    order = draw(st.permutations(sorted(modules))) if draw(st.booleans()) else list(modules)
    return jlora.Adapter(name="x", modules={name: modules[name] for name in order})


@pytest.mark.parametrize("dtype", thinned(SLOTS, 0, 1))
@pytest.mark.parametrize("stacked", [False, True])
def test_the_bits_are_those_of_copies(monkeypatch, stacked, dtype):
    on_several_threads(monkeypatch)

    @given(adapter=adapters(stacked).filter(lambda a: a.modules), max_bytes=st.sampled_from([1, 700, 1 << 20]))
    def check(adapter, max_bytes):
        found = fitted(adapter, stacked, dtype, max_bytes)
        placed = {p.module: (p.site, p.row, p.first, p.count) for p in found.placements}
        event(f"{max(map(len, side_by_side.evenly_spaced(adapter.modules, placed)))} together")
        assert_same(found, fitted(copies(adapter), stacked, dtype, max_bytes))
        assert_numbers(found, adapter, dtype)

    check()


# ---- which are written together


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


def groups(modules, stacked=False):
    """How many of them are written together, and that each is once."""
    wrapped = wrapped_as(stacked, "float32")
    placed = fitting.place("here", modules, SiteIndex(wrapped, ()))
    found = side_by_side.evenly_spaced(modules, placed)
    assert sorted(name for names in found for name in names) == sorted(modules)
    for names in found:
        rows = [placed[name][1] for name in names]
        assert rows == list(range(rows[0], rows[0] + len(rows)))
    return sorted(map(len, found))


GATES = experts_of("gate_proj", 0)


def test_what_lies_evenly_is_written_together():
    assert groups(even(GATES)) == [5]
    assert groups(even(list(reversed(GATES)))) == [5]
    assert groups(even(GATES + experts_of("up_proj", 0))) == [5, 5]
    both = [name for pair in zip(GATES, experts_of("up_proj", 0), strict=True) for name in pair]
    assert groups(even(both)) == [5, 5]  # each at twice the distance
    assert groups(even([f"layers.{i}.gate" for i in range(STACK)]), stacked=True) == [STACK]
    every = [name for layer in range(STACK) for name in experts_of("down_proj", layer)]
    assert groups(even(every), stacked=True) == [STACK * EXPERTS]


def test_what_does_not_is_written_apart():
    assert groups(even([GATES[i] for i in (0, 2, 1, 3, 4)])) == [1, 2, 2]
    assert groups(even(GATES[:2] + GATES[3:])) == [2, 2]  # an expert is missing
    assert groups(even(["layers.0.gate", "layers.1.gate"])) == [1, 1]  # sites of one row
    assert groups(even(GATES[:2]) | even(GATES[2:])) == [2, 3]  # in other memory
    of_own = copies(jlora.Adapter(name="x", modules=even(GATES))).modules
    assert groups(of_own) == [1] * 5
    for half in "ab":  # one of the two lies in another order
        modules = even(GATES)
        moved = {GATES[i]: getattr(modules[GATES[j]], half) for i, j in ((1, 2), (2, 1))}
        assert groups(modules | {name: replace(modules[name], **{half: moved[name]}) for name in moved}) == [1, 2, 2]
    for fields in ({"alpha": 3.0}, {"scaling": 3.0}):
        modules = even(GATES)
        assert groups(modules | {GATES[2]: replace(modules[GATES[2]], **fields)}) == [1, 2, 2]


def in_memory(memories, i, *, rank=2, dtypes=(np.float16, np.float16), turned=""):
    """A module whose A and B lie in two arrays of bytes, at places that `i` decides; its B is part of a wider one."""
    halves = []
    for half, memory, dtype, shape in zip("ab", memories, dtypes, ((2, HIDDEN), (INNER, 2)), strict=True):
        begin = 100 * i + (40 if half == "b" else 0)
        own = memory[begin : begin + 2 * math.prod(shape)].view(dtype)
        own = own.reshape(shape[::-1]).T if half in turned else own.reshape(shape)
        halves.append(own[:rank] if half == "a" else own[:, :rank])
    return jlora.ModuleLoRA(a=halves[0], b=halves[1], alpha=4.0, scaling=2.0)


@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"rank": 1},
        {"dtypes": (BFLOAT16, np.float16)},
        {"dtypes": (np.float16, BFLOAT16)},
        {"turned": "a"},
        {"turned": "b"},
        {"memories": "10"},
        {"memories": "01"},
    ],
    ids=str,
)
def test_what_lies_evenly_and_is_not_alike_is_written_apart(change, slots):
    """The third of five differs in one thing. Its memory may be the others' by another name."""
    held = bytearray(np.random.default_rng(0).normal(size=400).astype(np.float16).tobytes())
    names = [np.frombuffer(held, np.uint8) for _ in range(2)]
    assert names[0].base is not names[1].base
    fields = dict(change)
    others = tuple(names[int(which)] for which in fields.pop("memories", "00"))
    modules = {name: in_memory((names[0], names[0]), i) for i, name in enumerate(GATES)}
    modules[GATES[2]] = in_memory(others, 2, **fields)
    assert groups(modules) == ([1, 2, 2] if change else [5])
    adapter = jlora.Adapter(name="x", modules=modules)
    found = fitted(adapter, dtype=slots)
    assert_same(found, fitted(copies(adapter), dtype=slots))
    assert_numbers(found, adapter, slots)


@pytest.mark.parametrize("dtype", SLOTS)
@pytest.mark.parametrize("odd", [1, 2, 3])
def test_factors_an_odd_number_of_bytes_apart(odd, dtype):
    modules = even(GATES)
    size, step = sum(m.a.nbytes + m.b.nbytes for m in modules.values()), modules[GATES[0]].a.nbytes + odd
    held = bytearray(size * 3)
    made = {}
    for i, (name, m) in enumerate(modules.items()):
        arrays = []
        for at, array in ((i * step, m.a), (size + i * 97, m.b)):
            held[at : at + array.nbytes] = array.tobytes()
            arrays.append((array.shape, at))
        made[name] = arrays
    memory = np.frombuffer(held, np.uint8)

    def at(shape, place):
        return memory[place : place + 4 * shape[0] * shape[1]].view(np.float32).reshape(shape)

    found = {name: replace(modules[name], a=at(*arrays[0]), b=at(*arrays[1])) for name, arrays in made.items()}
    assert groups(found) == [5]
    expected = jlora.Adapter(name="x", modules=modules)
    assert_same(fitted(replace(expected, modules=found), dtype=dtype), fitted(copies(expected), dtype=dtype))


@pytest.mark.parametrize("dtype", SLOTS)
def test_one_array_for_all(dtype):
    one = next(iter(even(GATES).values()))
    adapter = jlora.Adapter(name="x", modules=dict.fromkeys(GATES, one))
    assert groups(adapter.modules) == [5]
    found = fitted(adapter, dtype=dtype)
    assert_same(found, fitted(copies(adapter), dtype=dtype))
    assert_numbers(found, adapter, dtype)


def test_much_is_cut_for_other_threads(monkeypatch):
    modules = even(GATES)
    nbytes = modules[GATES[0]].a.nbytes + modules[GATES[0]].b.nbytes
    expected = fitted(jlora.Adapter(name="x", modules=modules))
    for fit_in, sizes in ((2 * nbytes, [1, 2, 2]), (2 * nbytes - 1, [1] * 5), (1, [1] * 5)):
        monkeypatch.setattr(side_by_side, "_TOGETHER", fit_in)
        assert groups(modules) == sizes
        assert_same(fitted(jlora.Adapter(name="x", modules=modules)), expected)


def test_groups_come_in_the_order_of_the_adapter():
    """What was read first is done with first, whatever the numbers of layers and experts."""
    late, early = experts_of("down_proj", 3), experts_of("gate_proj", 1)
    modules = even(late + early + ["layers.0.gate"])
    wrapped = wrapped_as(True, "float32")
    found = side_by_side.evenly_spaced(modules, fitting.place("here", modules, SiteIndex(wrapped, ())))
    assert found == [late, early, ["layers.0.gate"]]


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
    there, original = [], fitting._fill

    def fill(*args):
        there.append([i for i, held in enumerate(memory) if held() is not None])
        return original(*args)

    monkeypatch.setattr(fitting, "_fill", fill)
    expected = fitted(jlora.Adapter(name="x", modules=dict(modules)), True)
    assert there == [list(range(STACK))] * STACK  # the adapter is the caller's
    there.clear()
    assert_same(fitted_to(wrapped_as(True, "float32"), modules), expected)
    assert not modules
    assert [i for i, held in enumerate(memory) if held() is not None] == [1]
    assert kept.a.size
    if threads:  # of three, at most two others are still at some earlier one
        assert all(len({*found} - {1}) <= STACK - i + 2 for i, found in enumerate(there))
    else:
        assert there == [sorted({*range(i, STACK), 1}) for i in range(STACK)]


def test_a_load_lets_go_of_what_it_read(tmp_path, monkeypatch):
    names = [f"layers.{i}.gate" for i in range(STACK)] + experts_of("gate_proj", 1)
    jlora.Adapter(name="x", modules=even(names)).save_pretrained(tmp_path)
    monkeypatch.setattr(values, "_WHOLE", 1)
    read, original = [], fitting._fill

    def fill(where, names, modules, *args):
        assert all(memory() is None for memory in read)
        read.extend(weakref.ref(half.base) for m in modules for half in (m.a, m.b))
        return original(where, names, modules, *args)

    monkeypatch.setattr(fitting, "_fill", fill)
    config = jlora.LoRAConfig(max_loras=1, max_lora_rank=4)
    jlora.LoRAManager(Stacked(), config).add_adapter(jlora.LoRARequest("x", str(tmp_path)))
    assert len(read) == 2 * len(names)


def test_blocks_do_not_keep_what_they_were_made_of():
    adapter = jlora.Adapter(name="x", modules=even(GATES, dtype=BFLOAT16))
    held = weakref.ref(adapter.modules[GATES[0]].a.base)
    found = fitted(adapter, dtype="bfloat16")
    del adapter
    gc.collect()
    assert held() is None
    assert found.blocks


# ---- each with its own power of two, and its own error


def test_routers_in_a_stack_keep_a_power_of_two_each():
    """Also those of an adapter whose experts share factors, and so one power."""
    names = [f"layers.{i}.gate" for i in range(STACK)]
    modules = even(names)
    for i, name in enumerate(names):
        modules[name].b[...] *= 2.0 ** (-4 * i)
    of_experts = {name: module for name, module in shared("x").modules.items() if name.startswith("layers.0.")}
    adapter = jlora.Adapter(name="x", modules=modules | of_experts)
    assert groups(modules, stacked=True) == [STACK]
    found = fitted(adapter, True, "float16")
    alone = fitted(
        replace(adapter, modules={**copies(replace(adapter, modules=modules)).modules, **of_experts}), True, "float16"
    )
    assert_same(found, alone)
    assert len({p.shift for p in found.placements if p.module in names}) > 3


@pytest.mark.parametrize("powers", [(0, 0), (0, -8), (-8, 0)])
def test_doubles_are_rounded_once(powers):
    """In float32, 1 + 2**-11 + 2**-40 would be halfway between two numbers of float16, and 65520 - 2**-9 too large."""
    modules = even(GATES[:2], dtype=np.float64)
    for m, power in zip(modules.values(), powers, strict=True):
        m.a[...], m.b[...] = 1 + 2.0**-11 + 2.0**-40, 2.0 ** (power - 1)
        m.a[0, 0] = -1
    adapter = jlora.Adapter(name="x", modules=modules)
    found = fitted(adapter, dtype="float16")
    assert [p.shift for p in found.placements] == [power // 2 for power in powers]
    assert_numbers(found, adapter, "float16")
    for m in modules.values():
        m.a[1, 1], m.b[...] = 65520 - 2.0**-9, m.b * 2.0**15
    found = fitted(adapter, dtype="float16")
    assert [p.shift for p in found.placements] == [power // 2 for power in powers]
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
    with pytest.raises(AdapterMismatchError) as alone:
        fitted(copies(adapter), dtype=dtype)
    with pytest.raises(
        AdapterMismatchError, match=rf"here: {GATES[bad]}: .* must be finite in the slots' dtype"
    ) as found:
        fitted(adapter, dtype=dtype)
    assert str(found.value) == str(alone.value)


def test_groups_are_written_by_several_threads(monkeypatch):
    """And each of them ignores what NumPy says of numbers that are not finite, as the caller's thread does."""
    on_several_threads(monkeypatch)
    modules = even([name for layer in range(STACK) for name in experts_of("down_proj", layer)])
    for m in modules.values():
        m.b[0, 0], m.b[0, 1] = np.nan, np.inf
    adapter = jlora.Adapter(name="x", modules=modules)
    expected = fitted(adapter, True, "float16")
    monkeypatch.setattr(side_by_side, "_TOGETHER", 1)
    threads, original, met = set(), fitting._fill, threading.Barrier(3)

    def fill(*args):
        if threading.current_thread() not in threads:
            threads.add(threading.current_thread())
            met.wait(20)
        return original(*args)

    monkeypatch.setattr(fitting, "_fill", fill)
    assert_same(fitted(adapter, True, "float16"), expected)
    assert len(threads) == 3
