"""Slots for adapters whose experts share factors, against weights merged expert by expert, where each has its own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jlora
from jlora.adapters import ExpertsLoRA
from jlora.errors import AdapterMismatchError
from tests.layers.expert_models import EXPERTS, HIDDEN, INNER, LAYERS, Gathering, Model, Ragged, Roomy, Scanned, Seams
from tests.manager import test_experts
from tests.manager.test_experts import each, normal, router, stacked
from tests.manager.tiny import as_new
from tests.records import slot_names, write_programs
from tests.small_device import on_small_device

pytestmark = pytest.mark.device

NAMES = ["full", "s", None, "dense", "t", "s"]
plain = test_experts.plain


def shared(name, seed=0, *, parts=("gate_proj", "up_proj", "down_proj"), rank=2, gate=False):
    """One A of gate and one of up, one B of down; with `gate`, LoRA on the router too."""
    modules = {}
    for layer in range(LAYERS):
        for part in parts:
            k, n = (INNER, HIDDEN) if part == "down_proj" else (HIDDEN, INNER)
            of_a, of_b = (EXPERTS, 1) if part == "down_proj" else (1, EXPERTS)
            key = [seed, layer, *map(ord, part)]
            a, b = normal([*key, 0], of_a, rank, k), normal([*key, 1], of_b, n, rank)
            modules[f"layers.{layer}.experts.{part}"] = ExpertsLoRA(a=a, b=b, alpha=3.0, scaling=3.0 / rank)
    return jlora.Adapter(name=name, modules=modules | (dict(router(name, seed).modules) if gate else {}))


ADAPTERS = {
    "full": each("full"),
    "s": shared("s", 1, gate=True),
    "t": shared("t", 2, parts=("up_proj", "down_proj"), rank=3),
    "dense": router("dense", 3),
}


class World(test_experts.World):
    """Five slots: two for experts of any kind, two for experts that share factors, one for neither."""

    def __init__(self, model, **config):
        sizes = {"max_loras": 5, "expert_slots": {"per_expert": 2, "shared": 2}, "max_cpu_loras": 12}
        super().__init__(model, NAMES, **sizes | config)

    def check(self, names=NAMES, **adapters):
        return super().check(names, **{**ADAPTERS, **adapters})

    def fill(self):
        self.manager.remove_all_adapters()
        self.load(*ADAPTERS.values())
        return self


STYLES = {
    "methods": lambda: World(Model(Gathering, nnx.Rngs(0))),
    "scanned ragged_dot": lambda: on_small_device(1024, World, Scanned(Ragged, nnx.Rngs(0))),  # in many blocks
    "scanned": lambda: World(Scanned(Seams, nnx.Rngs(0))),
    "one-hot": lambda: World(Model(Roomy, nnx.Rngs(0)), max_loras=4, expert_slots={"shared": 2}),
    "none that share": lambda: World(Model(Seams, nnx.Rngs(0)), max_loras=4, expert_slots={"per_expert": 2}),
}


@functools.cache
def world_of(style):
    return STYLES[style]()


@pytest.fixture
def world():
    return world_of("methods").fill()


@pytest.mark.parametrize(
    "style",
    [
        "methods",
        *(pytest.param(style, marks=pytest.mark.slow) for style in ("scanned ragged_dot", "scanned", "one-hot")),
    ],
)
def test_rows_of_every_kind_of_slot_in_one_batch(style):
    world = world_of(style).fill()
    found = world.check()
    base = np.asarray(world.forward(world.model, world.x, None))
    np.testing.assert_array_equal(found[2], base[2])
    assert np.abs(found - base)[[0, 1, 3, 4, 5]].max(axis=(1, 2)).min() > 1e-3  # every adapter does something
    held = [(slot, name) for slot, name in enumerate(slot_names(world.manager)) if name is not None]
    assert sorted(name for slot, name in held if slot in (2, 3) and name != "dense") == ["s", "t"]
    world.check(["t", "dense", "s", None, "full", "t"])


def test_other_rows_are_the_bits_of_a_model_without_such_slots(world):
    without = World(Model(Seams, nnx.Rngs(0)), expert_slots={"per_expert": 2})
    without.load(ADAPTERS["full"], ADAPTERS["dense"])
    others = [name if name in ("full", "dense") else None for name in NAMES]
    rows = [i for i, name in enumerate(NAMES) if name == others[i]]
    np.testing.assert_array_equal(world.serve()[rows], without.serve(others)[rows])


def changed(change):
    """An adapter of stacked experts, with the arrays that `change` returns for each module."""
    arrays = {name: change("down" in name, m) for name, m in stacked("x").modules.items()}
    modules = {name: ExpertsLoRA(a=a, b=b, alpha=3.0, scaling=1.5) for name, (a, b) in arrays.items()}
    return jlora.Adapter(name="x", modules=modules)


KINDS = {
    "shared": shared("x", 5),
    "2D": each("x"),
    "some experts": each("x", experts=(1,)),
    "of down alone": shared("x", 6, parts=("down_proj",), rank=4),
    "3D": stacked("x"),
    "dense": router("x", 7),
    "the other factors shared": changed(lambda down, m: (m.a[:1], m.b) if down else (m.a, m.b[:1])),
    "both shared": changed(lambda down, m: (m.a[:1], m.b[:1])),
}
SHARED = ("shared", "of down alone", "both shared")


def test_kinds_of_adapters_take_turns_without_a_compilation(world):
    """Missing modules do not keep the previous weights, and each adapter is in a slot of its kind."""
    for name in ("full", "t"):
        world.manager.remove_adapter(name)
    for kind in (*KINDS, *KINDS):
        world.manager.add_adapter(KINDS[kind], load_inplace=True)
        world.check(["x", "s", None, "dense", "x", "s"], x=KINDS[kind])
        slot = slot_names(world.manager).index("x")
        assert slot in (2, 3) if kind in SHARED else slot in (0, 1) if kind != "dense" else True
    assert world.manager.stats().compilations == 1


def test_bytes(world):
    infos = world.manager.layers()
    experts, dense = ([i for i in infos if (i.kind == "experts") == which] for which in (True, False))
    assert len(experts) == 2 * LAYERS
    arrays = sum(array.nbytes for array in jax.tree.leaves(world.manager.slots))
    kinds = [sum(i.slot_bytes for i in dense), sum(i.slot_bytes for i in experts)]
    once = sum(i.shared_slot_bytes for i in experts)
    assert 5 * kinds[0] + 2 * kinds[1] + 2 * once == arrays
    assert not any(i.shared_slot_bytes for i in dense)
    assert world.manager.stats().slot_bytes == sum(kinds)
    # The host cache holds as much as the slots, because rank 2 of a slot of rank 4 is one block; and all ranks.
    router, ranks = 4 * (HIDDEN + EXPERTS), 2 * (1 + 3 * EXPERTS)
    assert world.manager.list_adapters()["s"].nbytes == once + LAYERS * 4 * (router + ranks)


def test_no_array_stands_for_the_factor_that_is_not_held(world):
    """XLA, of JAX 0.11, crashes where a map over a mesh takes an empty array beside another."""
    world.serve()
    operands = [program.in_avals for program in write_programs(world.manager)]
    assert all(array.size for array in jax.tree.leaves([world.manager.slots, operands]))


def test_no_room_for_more(world):
    world.manager.add_adapter(shared("u", 8))
    with pytest.raises(jlora.NoFreeSlotError, match="3 of them one of the 2 for experts that share factors, but of 5"):
        world.manager.prepare(["s", "t", "u"])
    world.check(["u", "s", None, "dense", "full", "u"], u=shared("u", 8))


def test_others_leave_room_and_make_room(world):
    world.serve()
    assert slot_names(world.manager)[4] == "dense"  # the smallest
    dense = {f"d{i}": router(f"d{i}", 10 + i) for i in range(4)}
    world.load(*dense.values())
    world.check(["d0", "d1", "d2", None, "dense", "d3"], **dense)  # in every slot
    world.check(["s", "full", "d1", None, "t", "d1"], **dense)


def test_exported_as_it_came_and_loaded_again(world, tmp_path):
    world.serve()
    found = world.manager.export_adapter("s")
    assert found.modules.keys() == ADAPTERS["s"].modules.keys()
    for name, module in ADAPTERS["s"].modules.items():
        np.testing.assert_array_equal(found.modules[name].a, module.a)
        np.testing.assert_allclose(found.modules[name].b, module.b, rtol=1e-6)
    found.save_pretrained(tmp_path)
    before = world.serve()
    world.manager.add_adapter(jlora.LoRARequest("s", str(tmp_path), load_inplace=True))
    np.testing.assert_allclose(world.serve(), before, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("made", [np.asarray, jnp.asarray])
def test_updated(world, made):
    world.serve()
    new = {"layers.0.experts.gate_proj": normal(20, 2, HIDDEN), "layers.1.experts.3.down_proj": normal(21, 2, INNER)}
    arrays = {f"{name}.lora_A.weight": made(a) for name, a in new.items()}
    arrays["layers.0.experts.2.up_proj.lora_B.weight"] = made(normal(22, INNER, 2))
    modules = dict(ADAPTERS["s"].modules)
    gate, up, down = (modules[f"layers.{i}.experts.{p}_proj"] for i, p in ((0, "gate"), (0, "up"), (1, "down")))
    own_a, own_b = down.a.copy(), up.b.copy()
    own_a[3], own_b[2] = new["layers.1.experts.3.down_proj"], normal(22, INNER, 2)
    for name, a, b in (
        ("layers.0.experts.gate_proj", new["layers.0.experts.gate_proj"][None], gate.b),
        ("layers.0.experts.up_proj", up.a, own_b),
        ("layers.1.experts.down_proj", own_a, down.b),
    ):
        modules[name] = ExpertsLoRA(a=a, b=b, alpha=3.0, scaling=1.5)
    for _ in range(2):
        world.manager.update_adapter("s", arrays)
        world.check(s=jlora.Adapter(name="s", modules=modules))
    assert world.manager.stats().compilations == 1


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("layers.0.experts.3.gate_proj.lora_A", (2, HIDDEN), "expected lora_B, found lora_A .what all experts share"),
        ("layers.0.experts.gate_proj.lora_B", (INNER, 2), "expected lora_A, found lora_B"),
        ("layers.0.experts.gate_proj.lora_A", (3, HIDDEN), r"A has shape \(3, 8\); expected \(2, 8\)"),
        ("layers.0.experts.9.gate_proj.lora_B", (INNER, 2), "no such module"),
    ],
)
def test_updates_that_do_not_fit(world, name, shape, message):
    before = world.serve()
    with pytest.raises(AdapterMismatchError, match=message):
        world.manager.update_adapter("s", {f"{name}.weight": np.ones(shape, np.float32)})
    np.testing.assert_array_equal(world.serve(), before)


def test_rows_of_experts_elsewhere_keep_their_bits(world):
    """Also if the delta would be zero: -0.0 + 0.0 has other bits."""

    @jax.jit
    def down(model, x, y, expert, batch):
        rows = jlora.RowMap(jnp.array([0, 9, 1, -1]), of="tokens", length=2, expert=expert)
        with jlora.use(batch, without=["*"]):
            return jlora.expert_delta(model.layers[0].experts, "down", x, y, rows)

    x, y = jax.random.normal(jax.random.key(0), (4, INNER)), jnp.full((4, HIDDEN), -0.0)
    experts = [EXPERTS, 0, -1, 1], [4, 0, 1, 2]
    with world.manager.prepare(["s"] * 2) as batch:
        found = [np.asarray(down(world.model, x, y, jnp.array(expert), batch)) for expert in experts]
    assert np.signbit(found[0]).all()
    assert not found[0].any()
    assert found[1].any(axis=1).tolist() == [True, False, True, False]


@pytest.mark.slow
def test_experts_alone_with_a_stamp_for_every_slot():
    """Where only experts are wrapped, the writes of the shared slots are stamped there too."""
    world = World(Model(Seams, nnx.Rngs(0)), target_modules=["experts.wi", "experts.wo"])
    world.load(*(each("full"), shared("s", 1), shared("t", 2)))
    names = ["full", "s", None, "t", "s", None]
    world.check(names, s=shared("s", 1), t=shared("t", 2))
    stale = nnx.clone(world.model, arrays=True)
    world.manager.add_adapter(shared("s", 9), load_inplace=True)
    with world.manager.prepare(names) as batch:
        found = np.isnan(world.forward(stale, world.x, batch))
    assert found[[0, 1, 3, 4]].all()
    assert not found[[2, 5]].any()


def varied(name, seed):
    """`each` of other values."""
    adapter = each(name)
    arrays = {key: (m.a * (1 + seed / 5), m.b) for key, m in adapter.modules.items()}
    return jlora.Adapter.from_arrays(name, arrays, alpha=3)


FEW = {f"e{i}": varied(f"e{i}", i) for i in range(4)} | {f"d{i}": router(f"d{i}", i) for i in range(4)}


@pytest.fixture
def few():
    few = world_of("none that share")
    few.manager.remove_all_adapters()
    few.load(*FEW.values())
    return few


def test_experts_take_the_first_slots_and_others_leave_them_free(few):
    few.check(["d0", "d1", None, "e0", "d0", "e1"], **FEW)
    assert [name[0] for name in slot_names(few.manager)] == ["e", "e", "d", "d"]
    few.check(["e2", "d2", "e0", None, "d1", "e2"], **FEW)  # e2 takes the place of e1, d2 that of d0
    assert set(slot_names(few.manager)) == {"e0", "e2", "d1", "d2"}


def test_dense_adapters_take_slots_of_experts_only_if_others_are_full(few):
    few.check(["d0", "d1", "d2", "d3", None, "d0"], **FEW)
    few.check(["e3", "d3", "e1", "d2", None, "e3"], **FEW)
    few.check(["d0", "d1", "d2", "d3", None, "d0"], **FEW)  # the ranks of experts are not those that e3 left
    assert few.manager.stats().compilations == 1


def test_no_room_for_experts(few):
    with pytest.raises(jlora.NoFreeSlotError, match="3 of them one of the 2 for experts, but of 4 slots 4 are free"):
        few.manager.prepare(["e0", "e1", "e2"])
    with few.manager.prepare(["e0", "e1"]), few.manager.prepare(["d0"]):
        with pytest.raises(jlora.NoFreeSlotError, match=r"Raise max_loras or expert_slots\['per_expert'\]"):
            few.manager.prepare(["e2"])
        assert few.manager.fits(["d1"])
        assert not few.manager.fits(["e2"])
        few.manager.prepare(["d1"]).close()


def test_making_room_leaves_a_free_slot(few, tmp_path):
    """Both adapters in slots for experts move. One of these slots is then free, and a saved state can be restored."""
    few.check(["d0", "d1", "d2", "d3", None, "d0"], **FEW)
    for name in slot_names(few.manager)[2:]:
        few.manager.remove_adapter(name)
    one, two = slot_names(few.manager)[:2]
    few.check(["e0", one, two, None, "e0", one], **FEW)
    assert sorted(slot_names(few.manager)[:2], key=bool) == [None, "e0"]
    assert sorted(slot_names(few.manager)[2:]) == sorted([one, two])
    few.manager.save(tmp_path)
    as_new(few).manager.restore(tmp_path)
    assert {name for name in slot_names(few.manager) if name} == {"e0", one, two}
