"""Slot arrays after a load, against a packing in plain NumPy; and the memory that a load takes."""

import functools
import itertools
import weakref
from typing import NamedTuple

import jax
import ml_dtypes
import numpy as np
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jlora
from jlora.adapters import tensor_data
from jlora.slots import packing
from tests.layers.expert_models import EXPERTS, HIDDEN, INNER, Block, Seams
from tests.small_device import on_small_device

FILES = [np.dtype(t) for t in (np.float32, ml_dtypes.bfloat16, np.float16, np.float64)]
SLOTS = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
SCALINGS = (0.25, 1 / 3, 1.0, 2.0, -1.5, 0.0)
STACK = 6  # layers


class Place(NamedTuple):
    """Place of one module in the slot arrays of a layer."""

    layer: nnx.Module
    prefix: str  # of the names of its slot arrays
    lead: tuple[int, ...]  # index of the layer in a stack, or ()
    rows: tuple[int, ...]  # index of the expert, or ()
    slices: slice
    columns: slice
    k: int

    def read(self, slot):
        """A [n, R, K], B [R, N], and ranks and scales [n, 2] of the module."""
        a, b, ranks = (
            np.asarray(getattr(self.layer, f"{self.prefix}_{end}")[...])[(*self.lead, slot, *self.rows)]
            for end in ("a", "b", "ranks")
        )
        return a[self.slices], b[:, self.columns], ranks[self.slices]


def assert_packed(places, adapter, slot, dtype):
    """Compare the slot with a NumPy packing: A and B cast to slot dtype, beside the rank and the scaling."""
    for name, module in adapter.modules.items():
        a, b, ranks = places[name].read(slot)
        assert (ranks == np.array([module.rank if module.scaling else 0, module.scaling], np.float32)).all(), name
        with np.errstate(over="ignore", invalid="ignore"):
            want_a, want_b = (factor.astype(SLOTS[dtype]) for factor in (module.a, module.b.T))
        for found in a:
            np.testing.assert_array_equal(found[: module.rank], want_a, err_msg=name)
        np.testing.assert_array_equal(b[: module.rank], want_b, err_msg=name)
    filled = {key for name in adapter.modules for key in cells(places[name])}
    for name, place in places.items():
        if not filled & set(cells(place)):
            assert not place.read(slot)[2].any(), f"{name} is not in the adapter"


def cells(place):
    """The output slices that a module fills."""
    slices = range(place.slices.start, place.slices.stop)
    return [(id(place.layer), place.prefix, place.lead, place.rows, i) for i in slices]


def numbers(rng, shape, dtype, transposed):
    """Random numbers of very different sizes, in either memory order."""
    found = rng.normal(size=shape) * 2.0 ** rng.integers(-7, 7)
    return np.array(found.astype(dtype), order="F" if transposed else "C")


def draw_adapter(draw, places, max_rank, name):
    """Draw an adapter with some of these modules, each of its own rank, scaling, dtypes and memory order."""
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    missing = draw(st.sampled_from([0.0, 0.1, 0.9]))  # share of the modules
    modules, used = {}, set()
    rank = int(rng.integers(1, max_rank + 1))
    for i in rng.permutation(len(places)):
        found = list(places)[i]
        place = places[found]
        if used & set(cells(place)) or (modules and rng.random() < missing):
            continue
        used |= set(cells(place))
        r = rank if rng.random() < 0.9 else int(rng.integers(1, max_rank + 1))
        a, b = (
            numbers(rng, shape, FILES[rng.integers(len(FILES))], rng.random() < 0.5)
            for shape in ((r, place.k), (place.columns.stop - place.columns.start, r))
        )
        scaling = SCALINGS[rng.integers(len(SCALINGS))]
        modules[found] = jlora.ModuleLoRA(
            a=a, b=b, alpha=scaling * r, scaling=scaling, kind="embedding" if found == "embed" else "linear"
        )
    return jlora.Adapter(name=name, modules=modules)


def check_swaps(draw, manager, places, max_rank, dtype):
    """Load three adapters into two slots; both slots are right after each load."""
    current = {}
    for name in "abc":
        current[name] = draw_adapter(draw, places, max_rank, name)
        manager.add_adapter(current[name], load_inplace=True)
        manager.prepare([name]).close()
        for held, info in manager.list_adapters(list(current)).items():
            if info.slot is not None:
                assert_packed(places, current[held], info.slot, dtype)


class Projections(nnx.Module):
    def __init__(self, k, sizes, rngs):
        for i, parts in enumerate(sizes):
            setattr(self, f"proj{i}", nnx.Linear(k, sum(parts), use_bias=False, rngs=rngs))


class Dense(nnx.Module):
    """An embedding, and layers in a list or in a stack."""

    def __init__(self, k, sizes, layers, stacked):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(5, k, rngs=rngs)
        if stacked:
            make = nnx.split_rngs(splits=layers)(nnx.vmap(lambda rngs: Projections(k, sizes, rngs), out_axes=0))
            self.layers = make(rngs)
        else:
            self.layers = nnx.List([Projections(k, sizes, rngs) for _ in range(layers)])


def places_of(model, k, sizes, layers, stacked):
    found = {"embed": Place(model.embed, "jlora", (), (), slice(0, 1), slice(0, k), 5)}
    for layer, (i, parts) in itertools.product(range(layers), enumerate(sizes)):
        owner = getattr(model.layers if stacked else model.layers[layer], f"proj{i}")
        at = owner, "jlora", (layer,) if stacked else (), ()
        found[f"layers.{layer}.proj{i}"] = Place(*at, slice(0, len(parts)), slice(0, sum(parts)), k)
        for part, size in enumerate(parts):
            start = sum(parts[:part])
            where = slice(part, part + 1), slice(start, start + size)
            found[f"layers.{layer}.part{i}_{part}"] = Place(*at, *where, k)
    return found


SPECS = st.fixed_dictionaries(
    {
        "k": st.sampled_from([4, 12]),
        "sizes": st.lists(st.lists(st.sampled_from([4, 8]), min_size=1, max_size=3), min_size=1, max_size=3),
        "layers": st.integers(1, 3),
        "stacked": st.booleans(),
    }
)


def split(model, axis, stacked):
    """Split every kernel over two devices along its inputs (0) or outputs (1)."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "tensor"))
    for path, param in nnx.iter_graph(model):
        if isinstance(param, nnx.Param):
            axes = [None] * param.get_value().ndim
            if "embed" not in path:
                axes[axis + stacked] = "tensor"
            param.set_value(jax.device_put(param.get_value(), NamedSharding(mesh, PartitionSpec(*axes))))


def test_slots_of_any_spec_equal_numpy_packing(write_programs):
    """Any sizes, ranks and slot dtype; layers in a list or a stack; on one device or a mesh; in any number of waves."""

    @settings(max_examples=settings.default.max_examples // 2 if write_programs == "each" else 2)
    @given(data=st.data(), spec=SPECS, dtype=st.sampled_from(sorted(SLOTS)), max_rank=st.sampled_from([1, 4, 16, 20]))
    def check(data, spec, dtype, max_rank):
        model = Dense(**spec)
        axis = data.draw(st.sampled_from([None, None, 0, 1]), "split axis")
        if axis is not None:
            split(model, axis, spec["stacked"])
        staging = data.draw(st.sampled_from([1, 3000, 1 << 20]), "staging")
        config = jlora.LoRAConfig(max_loras=2, max_cpu_loras=3, max_lora_rank=max_rank, dtype=dtype)
        parts = {f"proj{i}": {f"part{i}_{j}": n for j, n in enumerate(p)} for i, p in enumerate(spec["sizes"])}
        manager = on_small_device(staging, jlora.LoRAManager, model, config, packed_modules=parts)
        check_swaps(data.draw, manager, places_of(model, **spec), max_rank, dtype)

    check()


class Stacked(nnx.Module):
    """Layers in one stack: their routers are rows of one site, and so are the experts of all of them."""

    def __init__(self):
        make = nnx.split_rngs(splits=STACK)(nnx.vmap(lambda rngs: Block(Seams, rngs), in_axes=0, out_axes=0))
        self.layers = make(nnx.Rngs(0))


@functools.cache
def manager_of_experts(dtype):
    config = jlora.LoRAConfig(max_loras=2, max_lora_rank=4, max_cpu_loras=3, dtype=dtype)
    return on_small_device(3000, jlora.LoRAManager, Stacked(), config)


def places_of_experts(model):
    block, found = model.layers, {}
    parts = [("gate_proj", "jlora_gate_up", 0, INNER, HIDDEN), ("up_proj", "jlora_gate_up", 1, INNER, HIDDEN)]
    parts += [("down_proj", "jlora_down", 0, HIDDEN, INNER)]
    for layer in range(STACK):
        found[f"layers.{layer}.gate"] = Place(block.gate, "jlora", (layer,), (), slice(0, 1), slice(0, EXPERTS), HIDDEN)
        for e, (part, prefix, i, n, k) in itertools.product(range(EXPERTS), parts):
            columns = slice(i * n, (i + 1) * n)
            place = Place(block.experts, prefix, (layer,), (e,), slice(i, i + 1), columns, k)
            found[f"layers.{layer}.experts.{e}.{part}"] = place
    return found


def test_slots_of_experts_equal_numpy_packing():
    manager = manager_of_experts("float16")
    places = places_of_experts(manager.model)

    @settings(max_examples=settings.default.max_examples // 2)
    @given(data=st.data())
    def check(data):
        manager.remove_all_adapters()
        check_swaps(data.draw, manager, places, 4, "float16")

    check()


def even(names, places, *, rank=2, dtype=np.float32):
    """Modules of these names whose arrays are parts of one array."""
    shapes = [shape for name in names for shape in ((rank, places[name].k), (width(places[name]), rank))]
    values = np.random.default_rng(0).normal(size=sum(map(np.prod, shapes))).astype(dtype)
    parts = np.split(values, np.cumsum([np.prod(shape) for shape in shapes])[:-1])
    arrays = [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]
    return {
        name: jlora.ModuleLoRA(a=a, b=b, alpha=2.0 * rank, scaling=2.0)
        for name, a, b in zip(names, arrays[::2], arrays[1::2], strict=True)
    }


def width(place):
    return place.columns.stop - place.columns.start


def wide_model(layers, k):
    model = nnx.List([nnx.Linear(k, 1, use_bias=False, rngs=nnx.Rngs(0)) for _ in range(layers)])
    return model, {str(i): Place(layer, "jlora", (), (), slice(0, 1), slice(0, 1), k) for i, layer in enumerate(model)}


def test_adapter_packed_by_threads_equals_numpy_packing():
    """From 128 MiB on several threads pack. NaN and infinity raise no warning in any of them."""
    model, places = wide_model(3, 1 << 21)
    sizes = {"max_loras": 1, "max_lora_rank": 16, "allow_nonfinite": True, "max_cpu_bytes": 1 << 30}
    manager = jlora.LoRAManager(model, jlora.LoRAConfig(**sizes, dtype="bfloat16"))
    rng = np.random.default_rng(0)
    modules = {}
    for name in places:
        a = np.tile(rng.normal(size=(1, 1 << 13)).astype(np.float32), (1, 1 << 8))
        modules[name] = jlora.ModuleLoRA(a=a, b=rng.normal(size=(1, 1)).astype(np.float32), alpha=1.0, scaling=1 / 3)
    modules["1"].a[0, 5], modules["2"].a[0, 6] = np.inf, -np.inf
    adapter = jlora.Adapter(name="x", modules=modules)
    manager.add_adapter(adapter)
    assert manager.list_adapters()["x"].nbytes > 128 << 20
    manager.prepare(["x"]).close()
    assert_packed(places, adapter, 0, "bfloat16")


def test_load_frees_arrays_once_they_are_packed(tmp_path, monkeypatch):
    """An adapter of gigabytes is not in memory twice. Only the hooks show this at the size of a test."""
    model = Stacked()
    places = places_of_experts(model)
    names = [f"layers.{i}.gate" for i in range(STACK)] + [f"layers.1.experts.{e}.gate_proj" for e in range(EXPERTS)]
    jlora.Adapter(name="x", modules=even(names, places)).save_pretrained(tmp_path)
    monkeypatch.setattr(tensor_data, "_WHOLE", 1)  # each tensor in an array of its own
    read, fill = [], packing._fill

    def checked(where, name, module, *args):
        assert all(memory() is None for memory in read)
        read.extend(weakref.ref(half.base) for half in (module.a, module.b))
        return fill(where, name, module, *args)

    monkeypatch.setattr(packing, "_fill", checked)
    config = jlora.LoRAConfig(max_loras=1, max_lora_rank=4)
    jlora.LoRAManager(model, config).add_adapter(jlora.LoRARequest("x", str(tmp_path)))
    assert len(read) == 2 * len(names)
