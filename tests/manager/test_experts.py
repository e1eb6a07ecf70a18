"""Adapters of experts through the manager: from files of each kind into slots, updated, exported, refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jlora
from jlora.adapters import ExpertsLoRA
from jlora.errors import AdapterMismatchError
from tests.layers.expert_models import EXPERTS, HIDDEN, INNER, LAYERS, Alternating, Interleaved, Model, Seams, reference
from tests.manager import tiny
from tests.records import slot_names

pytestmark = pytest.mark.device

SIZES = {"gate_proj": (HIDDEN, INNER), "up_proj": (HIDDEN, INNER), "down_proj": (INNER, HIDDEN)}
NAMES = ["x", None, "y", "x"]


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32) * 0.5


def pair(e, part, rank=2):
    k, n = SIZES[part]
    return normal([e, *map(ord, part)], rank, k), normal([e, 1, *map(ord, part)], n, rank)


def each(name, experts=range(EXPERTS), parts=tuple(SIZES)):
    """An adapter of 2D modules."""
    arrays = {
        f"layers.{layer}.experts.{e}.{part}": pair(e + 10 * layer, part)
        for layer in range(LAYERS)
        for e in experts
        for part in parts
    }
    return jlora.Adapter.from_arrays(name, arrays, alpha=3)


def stacked(name, parts=tuple(SIZES), *, experts=EXPERTS, shared=False):
    """The same weights with all experts in one module each; `shared`: one A of gate and up, one B of down."""
    modules = {}
    for layer in range(LAYERS):
        for part in parts:
            pairs = [pair(e + 10 * layer, part) for e in range(experts)]
            a, b = np.stack([a for a, _ in pairs]), np.stack([b for _, b in pairs])
            if shared:
                a, b = (a, b[:1]) if part == "down_proj" else (a[:1], b)
            modules[f"layers.{layer}.experts.{part}"] = ExpertsLoRA(a=a, b=b, alpha=3.0, scaling=1.5)
    return jlora.Adapter(name=name, modules=modules)


def one_by_one(adapter):
    """The 2D adapter that is meant by one of all experts."""
    arrays = {}
    for name, module in adapter.modules.items():
        block, _, part = name.rpartition(".")
        for e in range(EXPERTS):
            arrays[f"{block}.{e}.{part}"] = module.a[e % len(module.a)], module.b[e % len(module.b)]
    return jlora.Adapter.from_arrays(adapter.name, arrays, alpha=3)


def plain(adapter):
    """The equivalent 2D adapter, for the reference."""
    experts = {name: m for name, m in adapter.modules.items() if m.kind == "experts"}
    others = {name: m for name, m in adapter.modules.items() if name not in experts}
    apart = one_by_one(jlora.Adapter(name=adapter.name, modules=experts)).modules if experts else {}
    return jlora.Adapter(name=adapter.name, modules={**others, **apart})


class World(tiny.World):
    """A model of experts, whose answers are compared with merged weights."""

    def __init__(self, model, names=NAMES, **sizes):
        self.names, self.x = names, jax.random.normal(jax.random.key(1), (len(names), 2, HIDDEN))
        super().__init__(model, jlora.LoRAManager(model, jlora.LoRAConfig(max_lora_rank=4, **sizes)), self.x)

    def serve(self, names=None):
        return super().serve(names or self.names)

    def check(self, names=None, **adapters):
        found, names = self.serve(names), names or self.names
        meant = {name: plain(adapter) for name, adapter in adapters.items()}
        owners = [meant.get(name) for name in names for _ in range(2)]
        expected = reference(self.model, np.asarray(self.x).reshape(-1, HIDDEN), owners).reshape(found.shape)
        np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())
        assert len(self.traces) <= 2  # with a batch, and the base model alone
        return found


@functools.cache
def world_of(cls):
    return World(Model(cls, nnx.Rngs(0)), max_loras=2, max_cpu_loras=8)


@pytest.fixture
def world():
    world = world_of(Seams)
    world.manager.remove_all_adapters()
    return world


@pytest.mark.parametrize(("cls", "exchanged"), [(Seams, False), (Interleaved, True), (Alternating, False)])
def test_merged_gate_and_up_have_the_column_order_of_the_layer(cls, exchanged):
    """One A for both, and B in the column order of the checkpoint."""
    world = world_of(cls)
    world.manager.remove_all_adapters()
    modules, arrays = {}, {}
    for layer in range(LAYERS):
        a, b = normal([layer, 1], EXPERTS, 3, HIDDEN), normal([layer, 2], EXPERTS, 2 * INNER, 3)
        own = b
        if cls in (Interleaved, Alternating):
            own = np.stack(np.split(b, 2, axis=1), axis=2).reshape(b.shape)
        halves = (own.transpose(0, 2, 1), a.transpose(0, 2, 1)) if exchanged else (a, own)
        modules[f"layers.{layer}.experts.gate_up_proj"] = ExpertsLoRA(
            a=halves[0], b=halves[1], alpha=3.0, scaling=1.0, exchanged=None, flat=True
        )
        for e in range(EXPERTS):
            arrays[f"layers.{layer}.experts.{e}.gate_proj"] = a[e], b[e, :INNER]
            arrays[f"layers.{layer}.experts.{e}.up_proj"] = a[e], b[e, INNER:]
    world.load(jlora.Adapter(name="x", modules=modules), each("y"))
    world.check(x=jlora.Adapter.from_arrays("x", arrays, alpha=3), y=each("y"))


LISTED = {"gate_up_proj": "gate_up_projs.{}", "down_proj": "down_projs.{}"}
NUMBERED = {"gate_up_proj": "{}.gate_up_proj", "down_proj": "{}.down_proj"}


@pytest.mark.parametrize("form", [LISTED, NUMBERED, None], ids=["listed", "numbered", "three axes"])
@pytest.mark.parametrize("cls", [Seams, Interleaved, Alternating])
def test_merged_tensors_of_one_expert_have_the_column_order_of_the_checkpoint(cls, form):
    world = world_of(cls)
    world.manager.remove_all_adapters()
    files, arrays = {}, {}
    for layer in range(LAYERS):
        merged: list = []
        for e in range(EXPERTS):
            a, b = normal([layer, e, 1], 3, HIDDEN), normal([layer, e, 2], 2 * INNER, 3)
            down = normal([layer, e, 3], 3, INNER), normal([layer, e, 4], HIDDEN, 3)
            own = b if cls is Seams else np.stack(np.split(b, 2), axis=1).reshape(b.shape)  # row by row
            merged.append((a, own))
            block = f"layers.{layer}.experts"
            for part, factors in (("gate_proj", (a, b[:INNER])), ("up_proj", (a, b[INNER:])), ("down_proj", down)):
                arrays[f"{block}.{e}.{part}"] = factors
            if form is not None:
                for part, factors in (("gate_up_proj", (a, own)), ("down_proj", down)):
                    files[f"{block}.{form[part].format(e)}"] = factors
        if form is None:
            a, b = (np.stack(factors) for factors in zip(*merged, strict=True))
            files[f"{block}.gate_up_proj"] = ExpertsLoRA(a=a, b=b, alpha=3.0, scaling=1.0)
            a, b = (np.stack([arrays[f"{block}.{e}.down_proj"][i] for e in range(EXPERTS)]) for i in range(2))
            files[f"{block}.down_proj"] = ExpertsLoRA(a=a, b=b, alpha=3.0, scaling=1.0)
    found = jlora.Adapter(name="x", modules=files) if form is None else jlora.Adapter.from_arrays("x", files, alpha=3)
    expected = jlora.Adapter.from_arrays("x", arrays, alpha=3)
    world.load(found, each("y"))
    world.check(x=expected, y=each("y"))
    again = world.manager.export_adapter("x")
    world.manager.remove_adapter("x")
    world.load(again)
    world.check(x=expected, y=each("y"))


def test_a_mapped_tensor_of_one_expert_has_the_column_order_of_the_checkpoint():
    model, rules = Model(Alternating, nnx.Rngs(0)), {r"moe\.(\d+)\.w13$": r"experts.\1.gate_up_proj"}
    manager = jlora.LoRAManager(model, jlora.LoRAConfig(max_loras=2, max_lora_rank=4), name_map=rules)
    a, b = normal(1, 3, HIDDEN), normal(2, 2 * INNER, 3)
    alternating = np.stack(np.split(b, 2), axis=1).reshape(b.shape)
    manager.add_adapter(jlora.Adapter.from_arrays("x", {"layers.0.moe.2.w13": (a, alternating)}, alpha=3))
    with manager.prepare(["x"]):
        found = manager.export_adapter("x").modules
    for name, want in (("gate_proj", b[:INNER]), ("up_proj", b[INNER:])):
        np.testing.assert_array_equal(found[f"layers.0.moe.2.{name}"].b, want)


def test_a_request_that_says_another_format_than_its_file_is_refused(world, tmp_path):
    each("x").save_pretrained(tmp_path / "2d")
    down = ExpertsLoRA(a=normal(1, EXPERTS, 2, INNER), b=normal(2, EXPERTS, HIDDEN, 2), alpha=3.0, scaling=1.5)
    jlora.Adapter(name="x", modules={"layers.0.experts.down_proj": down}).save_pretrained(tmp_path / "3d")
    for path, said, found in (("2d", True, "no tensor of all experts"), ("3d", False, "all experts of")):
        request = jlora.LoRARequest("x", str(tmp_path / path), is_3d_lora_weight=said)
        with pytest.raises(AdapterMismatchError, match=f"is_3d_lora_weight={said}, and the file has {found}"):
            world.manager.add_adapter(request)
        assert not world.manager.list_adapters()
        world.manager.add_adapter(jlora.LoRARequest("x", str(tmp_path / path), is_3d_lora_weight=not said))
        world.manager.remove_adapter("x")


def test_weights_of_one_expert_are_updated(world):
    world.load(stacked("x"), each("y"))
    before = one_by_one(stacked("x"))
    world.check(x=before, y=each("y"))
    name = "layers.1.experts.3.up_proj"
    new = {f"{name}.lora_A.weight": normal(50, 2, HIDDEN), f"{name}.lora_B.weight": normal(51, INNER, 2)}
    world.manager.update_adapter("x", {key: jnp.asarray(a) for key, a in new.items()})
    arrays = {key: (module.a, module.b) for key, module in before.modules.items()} | {name: tuple(new.values())}
    world.check(x=jlora.Adapter.from_arrays("x", arrays, alpha=3), y=each("y"))
    assert world.manager.stats().compilations == 1


GATE = "layers.0.experts.gate_proj"


def gate(a, b, **fields):
    """An adapter with arrays of these shapes in one module."""
    module = ExpertsLoRA(**{"a": normal(0, *a), "b": normal(0, *b), "alpha": 3.0, "scaling": 1.5, **fields})
    return jlora.Adapter(name="x", modules={**stacked("x").modules, GATE: module})


def only(name):
    return jlora.Adapter(name="x", modules={name: stacked("x").modules[GATE]})


BOTH = {**stacked("x").modules, **each("x", experts=(2,), parts=("up_proj",)).modules}


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        (stacked("x", experts=4), "A is of 4 experts, and 'layers.0.experts.wi' has 5"),
        (gate((4, 2, HIDDEN), (1, INNER, 2)), "A is of 4 experts"),
        (gate((1, 2, HIDDEN), (6, INNER, 2)), "B is of 6 experts"),
        (gate((5, 9, HIDDEN), (5, INNER, 9)), "rank 9 is above max_lora_rank=4"),
        (gate((5, 2, 7), (5, INNER, 2)), "A takes 7 and B gives 6"),
        (gate((5, 2, HIDDEN), (5, INNER, 2), exchanged=True), "A takes 8 and B gives 6"),
        (gate((5, 2, 7), (5, INNER, 2), exchanged=None), "A takes 7 and B gives 6"),
        (
            jlora.Adapter(name="x", modules=BOTH),
            "fills slice 1 of 'layers.0.experts.wi' for expert 2, which layers.0.experts.up_proj fills too",
        ),
        (only("layers.0.gate"), "takes linear weights, and these are experts weights"),
        (only("layers.0.experts.0.gate_proj"), "names one of 5 experts, and these are weights of all of them"),
    ],
)
def test_misfit_of_experts_changes_nothing(world, adapter, message):
    world.manager.add_adapter(each("y"))
    with pytest.raises(AdapterMismatchError, match=message):
        world.manager.add_adapter(adapter)
    assert list(world.manager.list_adapters()) == ["y"]
    assert slot_names(world.manager).count("y") <= 1


def router(name, seed):
    pairs = {
        f"layers.{i}.gate": (normal([seed, i], 2, HIDDEN), normal([seed, i, 1], EXPERTS, 2)) for i in range(LAYERS)
    }
    return jlora.Adapter.from_arrays(name, pairs, alpha=3)
