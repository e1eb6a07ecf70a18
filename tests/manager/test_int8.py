"""Adapters of int8 slots: updates, exports, experts, and what is refused."""

import logging
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jlora
from jlora.adapters import ExpertsLoRA
from jlora.errors import AdapterMismatchError
from tests.layers.expert_models import HIDDEN, Gathering, Model, reference
from tests.layers.merging import assert_close, in_int8, make_adapter, make_manager, make_module, merge, run, serve
from tests.layers.test_experts_on_mesh import on_mesh
from tests.layers.test_int8 import PARTS, ROWS, SLICES, WHOLE, X, twins_of
from tests.layers.test_int8 import Model as Merged
from tests.manager.test_shared_experts import ADAPTERS, NAMES, plain

ONE, TWO = make_adapter("one", WHOLE, 4), make_adapter("two", PARTS, 3)


def serving(*adapters, **config):
    return make_manager(Merged(), adapters, dtype="int8", **config)


@pytest.mark.parametrize("where", [np.asarray, jnp.asarray], ids=["host", "device"])
@pytest.mark.parametrize("halves", ["AB", "B"])
def test_updates_are_rounded_as_loads(rng, where, halves):
    """Of one slice, twice, so that the second from device arrays takes the plan of the first."""
    manager = serving(ONE, TWO)
    two = TWO
    for _ in range(2):
        new = make_module(rng, 12, 4, 3)
        new = new if halves == "AB" else replace(new, a=two.modules["v"].a)
        factors = {"A": new.a, "B": new.b}
        manager.update_adapter("two", {f"v.lora_{half}.weight": where(factors[half]) for half in halves})
        two = replace(two, modules={**two.modules, "v": new})
        with manager.prepare(ROWS) as batch:
            found = serve(manager.model, X, batch)
        assert_close(found[2], run(twins_of(ONE, two)["two"], X)[2])


@pytest.mark.usefixtures("write_programs")
@pytest.mark.parametrize("rank", [pytest.param(3, marks=pytest.mark.slow), 20])
def test_a_prefetched_swap_moves_nothing_and_takes_the_programs_of_floats(moved, rank):
    """To an adapter of the same ranks, and back. Rank 20 has two blocks that overlap."""
    programs = {}
    for dtype in ("float32", "int8"):
        adapters = [make_adapter(name, WHOLE, rank) for name in ("one", "two", "three")]
        manager = make_manager(Merged(), adapters, dtype=dtype, max_lora_rank=rank, max_loras=1)
        for name in ("one", "two", "three"):  # the slot has had these ranks
            manager.prepare([name]).close()
        manager.prefetch("two").result(60)
        moved.clear()
        count = writes_of(manager)
        manager.pin_adapter("two")
        programs[dtype] = writes_of(manager) - count
        assert moved == []
        with manager.prepare(["two"] * 3) as batch:
            found = serve(manager.model, X, batch)
        two = adapters[1] if dtype == "float32" else in_int8(adapters[1], SLICES)
        assert_close(found, run(merge(Merged(), WHOLE, two), X))
    assert programs["int8"] == programs["float32"]


def writes_of(manager):
    """Return the number of programs that have written the only slot."""
    (stamps,) = (array for array in jax.tree.leaves(manager.slots) if array.dtype == np.int32)
    return int(stamps[0])


def test_an_update_of_all_weights_keeps_no_old_scale(rng):
    manager = serving(TWO)
    for scale in (1, 30):
        modules = {t.name: make_module(rng, t.k, t.n, 3) for t in PARTS}
        modules = {name: replace(module, a=scale * module.a) for name, module in modules.items()}
        arrays = {f"{name}.lora_A.weight": jnp.asarray(module.a) for name, module in modules.items()}
        arrays |= {f"{name}.lora_B.weight": jnp.asarray(module.b) for name, module in modules.items()}
        manager.update_adapter("two", arrays)
        with manager.prepare(["two"] * 3) as batch:
            found = serve(manager.model, X, batch)
        assert_close(found, run(twins_of(ONE, replace(TWO, modules=modules))["two"], X))


def test_exports_have_the_values_of_the_file_or_of_the_slot(tmp_path, caplog):
    TWO.save_pretrained(tmp_path / "two")
    manager = serving(ONE)
    manager.add_adapter(jlora.LoRARequest("two", str(tmp_path / "two")))
    manager.prepare(["one"]).close()
    manager.prepare(["two"]).close()

    def check(name, want):
        found = manager.export_adapter(name)
        assert found.modules.keys() == want.modules.keys()
        for key, module in want.modules.items():
            assert found.modules[key].scaling == module.scaling
            np.testing.assert_allclose(found.modules[key].a, module.a, rtol=1e-6)
            np.testing.assert_allclose(found.modules[key].b, module.b, rtol=1e-6)

    check("one", in_int8(ONE, SLICES))
    check("two", TWO)
    ONE.save_pretrained(tmp_path / "two")  # another adapter now
    with caplog.at_level(logging.WARNING, "jlora"):
        check("two", in_int8(TWO))
    assert "have changed" in caplog.text


def test_a_saved_adapter_is_restored_with_the_same_bits(tmp_path):
    manager = serving(ONE, TWO)
    manager.save(tmp_path)
    other = serving()
    other.restore(tmp_path)

    def outputs(manager):
        with manager.prepare(ROWS) as batch:
            return np.asarray(serve(manager.model, X, batch))

    np.testing.assert_array_equal(outputs(other), outputs(manager))


def over_experts(model):
    return on_mesh(model, {"expert": 5}, ("expert", None, None))


def rounded(adapter):
    """The adapter of experts as slots of int8 have it: of B that all share, A has one step a row for all of them."""

    def steps(rows, over):
        return np.abs(rows).max(axis=over, keepdims=True).astype(np.float64) / 127

    def module_of(module):
        a, b = module.a.astype(np.float64), module.b.astype(np.float64)
        experts = isinstance(module, ExpertsLoRA)
        of_a = steps(a, (0, 2) if experts and len(b) == 1 else -1)
        of_b = steps(b, -2)
        a, b = np.round(a / of_a) * of_a, np.round(b / of_b) * of_b
        return replace(module, a=a.astype(np.float32), b=b.astype(np.float32))

    return replace(adapter, modules={name: module_of(module) for name, module in adapter.modules.items()})


@pytest.mark.parametrize(
    "place", [lambda model: model, pytest.param(over_experts, marks=pytest.mark.mesh)], ids=["one device", "mesh"]
)
def test_experts_and_experts_that_share_factors(place):
    sizes = {"max_loras": 5, "expert_slots": {"per_expert": 2, "shared": 2}, "max_lora_rank": 4, "max_cpu_loras": 8}
    manager = jlora.LoRAManager(place(Model(Gathering, nnx.Rngs(0))), jlora.LoRAConfig(**sizes, dtype="int8"))
    for adapter in ADAPTERS.values():
        manager.add_adapter(adapter)
    x = jax.random.normal(jax.random.key(1), (len(NAMES), 2, HIDDEN))
    with manager.prepare(NAMES) as batch:
        found = serve(manager.model, x, batch)
    meant = {name: plain(rounded(adapter)) for name, adapter in ADAPTERS.items()}
    owners = [meant.get(name) for name in NAMES for _ in range(2)]
    assert_close(found, reference(manager.model, np.asarray(x).reshape(-1, HIDDEN), owners).reshape(found.shape))
    name = next(name for name, module in ADAPTERS["s"].modules.items() if isinstance(module, ExpertsLoRA))
    module = ADAPTERS["s"].modules[name]
    with pytest.raises(AdapterMismatchError, match=r"in int8 .*load_inplace=True"):
        manager.update_adapter("s", {f"{name}.lora_A.weight": module.a[0]})


def test_values_that_are_none_or_too_large(rng):
    modules = dict(TWO.modules)
    modules["up"] = replace(modules["up"], a=modules["up"].a.astype(np.float64))
    modules["up"].a[1, 2] = 1e300
    with pytest.raises(AdapterMismatchError, match=r"up: A must be finite .* reaches 1e"):
        serving(replace(TWO, modules=modules))
    modules["up"].a[1, 2] = np.nan
    with pytest.raises(jlora.AdapterFormatError, match="holds NaN"):
        serving(replace(TWO, modules=modules))
    manager = serving(replace(TWO, modules=modules), allow_nonfinite=True)
    with manager.prepare(["two", None, None]) as batch:
        found = np.asarray(serve(manager.model, X, batch))
    assert np.isnan(found[0]).all()
    assert np.isfinite(found[1:]).all()
