"""Copies of a wrapped model, which the manager does not write: right until a slot is written, NaN afterwards.

Sequences without an adapter keep their answers.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jlora
from jlora.errors import LoRAError
from tests.layers.merging import Holder, Target, make_manager, serve
from tests.layers.merging import make_adapter as layer_adapter
from tests.layers.mesh_models import mesh_of, placed
from tests.manager.tiny import DeviceError, Stack, failing_write, make_adapter, make_world, tensors
from tests.records import slot_names

pytestmark = pytest.mark.device


def through_state(model):
    graphdef, state = nnx.split(model)
    return nnx.merge(graphdef, jax.tree.map(jnp.copy, state))


ADAPTERS = {name: make_adapter(name, rank=2, modules=["layers.0.q_proj", "lm_head"]) for name in "abc"}


@pytest.fixture(scope="module")
def shared():
    return make_world(max_loras=2)


@pytest.fixture
def loaded(shared):
    """One compiled step for all tests, and each begins with a and b in their slots."""
    shared.reset()
    shared.load(*ADAPTERS.values())
    shared.serve(["a", "b", None])
    return shared


def step(world, model, names):
    with world.manager.prepare(names) as batch:
        return np.asarray(world.forward(model, world.tokens, batch))


def no_answers(found, names, base):
    """Check that sequences with an adapter have NaN alone, and the others the bits of the base model."""
    for row, name, without in zip(found, names, base, strict=True):
        assert np.isnan(row).all() if name is not None else np.array_equal(row, without)


def refused(world, model, names):
    no_answers(step(world, model, names), names, step(world, world.model, [None] * 3))


def test_a_copy_that_missed_a_write_gives_no_answer(loaded):
    twin = through_state(loaded.model)
    loaded.check(step(loaded, twin, ["a", "b", None]), [ADAPTERS["a"], ADAPTERS["b"], None])
    refused(loaded, twin, ["c", "b", None])  # c is in the slot that a had
    loaded.check(step(loaded, loaded.model, ["c", "b", None]), [ADAPTERS["c"], ADAPTERS["b"], None])
    refused(loaded, twin, [None, None, "c"])
    fresh = through_state(loaded.model)
    loaded.check(step(loaded, fresh, ["c", "b", None]), [ADAPTERS["c"], ADAPTERS["b"], None])
    assert loaded.traces == [1]


def test_outdated_copy_raises_outside_jit(loaded):
    twin = through_state(loaded.model)
    outdated = pytest.raises(LoRAError, match=r"embed: this copy of the model was made before an adapter of the batch")
    with loaded.manager.prepare(["c", None, None]) as batch, outdated, jlora.use(batch):
        twin(loaded.tokens)
    assert np.isfinite(step(loaded, loaded.model, ["c", None, None])).all()


def test_copy_serves_slots_that_were_not_written_since(loaded):
    """Writes of other slots do not matter to a batch, nor does any to the base model; those of an update do."""
    twin = through_state(loaded.model)
    base = step(loaded, loaded.model, [None] * 3)
    loaded.serve(["c", None, None])
    (kept,) = set(slot_names(loaded.manager)) - {"c"}
    loaded.check(step(loaded, twin, [kept, None, kept]), [ADAPTERS[kept], None, ADAPTERS[kept]])
    np.testing.assert_array_equal(step(loaded, twin, [None] * 3), base)
    new = make_adapter(kept, 1, rank=2, modules=list(ADAPTERS[kept].modules))
    loaded.manager.update_adapter(kept, tensors(new, np.asarray))
    refused(loaded, twin, [kept, None, None])
    loaded.check(step(loaded, loaded.model, [kept, None, None]), [new, None, None])


def test_an_adapter_that_came_back_to_its_slot(loaded):
    """A copy made while another was there: the slot and the adapter are those of an earlier batch."""
    slots = slot_names(loaded.manager)
    loaded.serve(["c", None, None])
    (evicted,) = set(slots) - set(slot_names(loaded.manager))
    twin = through_state(loaded.model)
    loaded.manager.remove_adapter("c")
    loaded.serve([evicted, None, None])
    assert slot_names(loaded.manager) == slots
    refused(loaded, twin, ["a", "b", None])


def test_a_copy_of_slots_that_were_half_written(loaded):
    """A slot is stamped before its last array is written, and the repair stamps it with another number."""
    with failing_write(loaded.manager, 2), pytest.raises(DeviceError):
        loaded.serve(["c", None, None])
    twin = through_state(loaded.model)
    loaded.check(loaded.serve(["c", None, None]), [ADAPTERS["c"], None, None])
    refused(loaded, twin, ["c", None, None])


SHARDED = {"data_axes": ["data"], "fully_sharded": True}
ON_MESH = [pytest.mark.mesh, pytest.mark.device(devices=8)]


@pytest.mark.parametrize(
    ("kind", "split", "config"),
    [
        ("linear", None, {"variants": ["dora"]}),
        ("linear", None, {"dtype": "int8"}),
        ("embedding", None, {}),
        pytest.param("linear", P(None, "t"), SHARDED, marks=ON_MESH),
        pytest.param("linear", P("t"), {}, marks=ON_MESH),  # the product is computed together with its LoRA
        pytest.param("linear", P("u", "t"), SHARDED, marks=ON_MESH),
        pytest.param("embedding", P("t"), {}, marks=ON_MESH),
        pytest.param("embedding", P(None, "t"), SHARDED, marks=ON_MESH),
    ],
    ids=str,
)
def test_a_model_of_one_layer(kind, split, config):
    make = nnx.Embed if kind == "embedding" else nnx.Linear
    model = Holder(make(8, 8, rngs=nnx.Rngs(0)))
    if split is not None:
        placed(model, mesh_of(data=2, u=2, t=2), {"proj": split})
    adapters = [layer_adapter(name, [Target("proj", 8, 8, "", kind=kind)], 2) for name in "ab"]
    manager = make_manager(model, adapters, max_loras=1, target_modules=["proj"], **config)
    x = jnp.arange(8, dtype=jnp.int32).reshape(4, 2) if kind == "embedding" else jnp.ones((4, 2, 8))
    names = ["a", None, "a", None]
    manager.prepare(["a"]).close()
    twin = through_state(model)
    with manager.prepare(names) as batch:
        np.testing.assert_array_equal(serve(twin, x, batch), serve(model, x, batch))
    manager.prepare(["b"]).close()
    with manager.prepare(names) as batch:
        found = np.asarray(serve(model, x, batch))
        assert np.isfinite(found).all()
        no_answers(np.asarray(serve(twin, x, batch)), names, found)


def test_a_model_of_scanned_layers_alone(rng):
    """The stamps are in the stack."""
    model = Stack()
    manager = jlora.LoRAManager(model, jlora.LoRAConfig(max_loras=1, max_lora_rank=2, max_cpu_loras=2))
    for name in "ab":
        pairs = {f"layers.{i}": (rng.normal(size=(2, 8)), rng.normal(size=(8, 2))) for i in range(3)}
        manager.add_adapter(jlora.Adapter.from_arrays(name, pairs, alpha=2))

    @jax.jit
    def forward(model, x, batch):
        with jlora.use(batch):
            return model(x)

    x = jnp.asarray(rng.normal(size=(1, 2, 8)), jnp.float32)
    manager.prepare(["a"]).close()
    twin = through_state(model)
    with manager.prepare(["a"]) as batch:
        np.testing.assert_array_equal(forward(twin, x, batch), forward(model, x, batch))
    with manager.prepare(["b"]) as batch:
        assert np.isnan(forward(twin, x, batch)).all()
        assert np.isfinite(forward(model, x, batch)).all()
