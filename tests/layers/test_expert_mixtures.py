"""`Mix` and `active_from` with adapters of experts, against merged weights, on one device and on meshes."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

import jlora
from jlora import Mix
from tests.layers.expert_models import HIDDEN, Gathering, Model, reference
from tests.layers.test_experts import ADAPTERS as OF_SOME
from tests.layers.test_experts_on_mesh import Served, close
from tests.manager import test_shared_experts as shared_experts

pytestmark = pytest.mark.device

SEQUENCES, LENGTH = 6, 2
SWITCHES = {"max_adapters_per_sequence": 3, "activated": True}
ADAPTERS = {**shared_experts.ADAPTERS, "some": OF_SOME["some"]}
PLAIN = {name: shared_experts.plain(adapter) for name, adapter in ADAPTERS.items()}


def summed(entry):
    """Return an adapter whose deltas are those of an entry of a batch; None for none."""
    parts = () if entry is None else entry.terms if isinstance(entry, Mix) else ((entry, 1.0),)
    modules = {}
    for name, weight in parts:
        for key, module in PLAIN[name].modules.items():
            a, b = module.a, weight * module.scaling * module.b
            if key in modules:
                a, b = np.concatenate([modules[key].a, a]), np.concatenate([modules[key].b, b], axis=1)
            modules[key] = jlora.ModuleLoRA(a=a, b=b, alpha=len(a), scaling=1.0)
    return jlora.Adapter(name="sum", modules=modules) if modules else None


def served(model):
    """Two slots for experts of any kind, two for experts that share factors, one for neither."""
    world = shared_experts.World(model, **SWITCHES)
    for adapter in ADAPTERS.values():
        world.manager.add_adapter(adapter)
    return world


def drawn(rng):
    kind, names = rng.integers(5), rng.permutation(list(ADAPTERS)).tolist()
    if kind < 2:
        return (None, names[0])[kind]
    if kind == 2:
        return Mix({names[0]: float(rng.choice([0, -1.5, 0.5, 2]))})
    return Mix({name: float(rng.normal()) for name in names[: rng.integers(1, 4)]})


def check(world, entries, first, x=None, counts=None):
    """Compare a batch with merged weights, and its inactive rows with the bits of the base."""
    x = world.x if x is None else x
    layout = {"length": LENGTH} if counts is None else {"token_counts": counts}
    counts = [LENGTH] * SEQUENCES if counts is None else counts
    with world.manager.prepare(entries, active_from=first, **layout) as batch:
        found = np.asarray(world.forward(world.model, x, batch)).reshape(-1, HIDDEN)
    with world.manager.prepare([None] * SEQUENCES, active_from=first, **layout) as batch:
        base = np.asarray(world.forward(world.model, x, batch)).reshape(-1, HIDDEN)
    owners = [
        summed(entry) if row >= start else None
        for entry, start, count in zip(entries, first, counts, strict=True)
        for row in range(count)
    ]
    expected = reference(world.model, np.asarray(x).reshape(-1, HIDDEN), owners)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 * np.abs(expected).max())
    free = [owner is None for owner in owners]
    np.testing.assert_array_equal(found[free], base[free])


@pytest.mark.slow
def test_random_batches_equal_merged_weights():
    world, rng = served(Model(Gathering, nnx.Rngs(0))), np.random.default_rng(0)
    for _ in range(6):
        check(world, [drawn(rng) for _ in range(SEQUENCES)], rng.integers(0, LENGTH + 1, SEQUENCES).tolist())
    assert world.manager.stats().compilations == 1
    counts, first = [3, 1, 0, 2, 4, 1], [1, 0, 0, 2, 3, 1]
    x = jax.random.normal(jax.random.key(2), (sum(counts), HIDDEN))
    check(world, ["s", Mix({"full": 0.5, "t": 2}), None, "some", Mix({"full": -1}), "dense"], first, x, counts)


@pytest.mark.slow
def test_an_activated_adapter_of_experts():
    """PEFT has aLoRA on linear layers, so on experts with a module each."""
    called = dataclasses.replace(ADAPTERS["some"], name="called", invocation_tokens=(3, 4))
    world = served(Model(Gathering, nnx.Rngs(0)))
    world.manager.remove_adapter("some")
    world.manager.add_adapter(called)
    with world.manager.prepare(["called"] * SEQUENCES) as batch:
        prompts = [[3, 4], [4, 3], [1], [2, 3, 4], [3, 4, 3], [3, 4, 3, 4]]
        found = np.asarray(world.forward(world.model, world.x, batch.activate_in(prompts, length=LENGTH)))
    first = [0, LENGTH, LENGTH, 1, 0, 2]
    with world.manager.prepare(["called"] * SEQUENCES, active_from=first, length=LENGTH) as batch:
        np.testing.assert_array_equal(found, np.asarray(world.forward(world.model, world.x, batch)))


def test_dora_of_experts_is_refused():
    model = Model(Gathering, nnx.Rngs(0))
    manager = jlora.LoRAManager(model, jlora.LoRAConfig(max_loras=1, max_lora_rank=4, variants=["dora"]))
    modules = {
        name: dataclasses.replace(module, vectors={"dora": np.ones(len(module.b), np.float32)})
        for name, module in ADAPTERS["some"].modules.items()
    }
    adapter = jlora.Adapter(name="dora", modules=modules)
    with pytest.raises(jlora.AdapterMismatchError, match=r"'dora'.*\n.*experts\.0\.\w+: DoRA is served for linear lay"):
        manager.add_adapter(adapter)


# --- Meshes -----------------------------------------------------------------------------------------------------------

ENTRIES = (
    [Mix({"a": 0.5, "b": -1.0}), "c", Mix({"b": 2.0}), None],
    ["a", Mix({"c": 2.0, "a": 0.25, "d": 1.0}), "d", Mix({"c": -0.5})],
)
FIRST = ([0, 2, 1, 0], [3, 1, 5, 0])


def logits(served):
    found = []
    for entries, first in zip(ENTRIES, FIRST, strict=True):
        with served.manager.prepare(entries, active_from=first, length=served.tokens.shape[1]) as batch:
            found.append(np.asarray(served.forward(served.model, served.tokens, batch)))
    return np.stack(found)


@pytest.mark.mesh
def test_meshes_equal_one_device():
    world = Served({"expert": 2, "tensor": 2}, "all_to_all", **SWITCHES)
    close(logits(world), logits(Served(**SWITCHES)))
    assert world.traces == world.manager.stats().compilations == 1
