"""The promise of one compilation: 300 random operations, one trace of the user's step, every value checked."""

import chex
import jax
import pytest
from flax import nnx

import jlora
from jlora.errors import LoRAError
from tests.manager.tiny import MAX_RANK, SEQUENCES, make_adapter, make_world, request
from tests.records import on_host, slot_names

pytestmark = pytest.mark.device

NAMES = list("abcdefgh")


def test_300_operations_one_trace_one_compilation(rng, tmp_path):
    world = make_world(max_loras=3, max_cpu_loras=5)
    m, slots = world.manager, world.manager.config.max_loras
    versions: dict[str, int] = {}
    done, ranks_served, slots_used, adapters_in_batch = set(), set(), set(), set()

    def load(name, **kwargs):
        versions[name] = int(rng.integers(0, 6))
        return m.add_adapter(request(tmp_path, name, versions[name]), **kwargs)

    for _ in range(300):
        name = str(rng.choice(NAMES))
        known = on_host(m)
        operation = str(rng.choice(["add", "replace", "remove", "activate", "deactivate", "oldest", "all", "mix"]))
        if operation == "all" and rng.random() < 0.7:
            operation = "mix"
        match operation:
            case "add" if name not in known:
                load(name)
            case "replace":
                load(name, load_inplace=True)
            case "remove":
                m.remove_adapter(name)
            case "activate" if known:
                m.activate_adapter(str(rng.choice(known)))
            case "deactivate":
                m.deactivate_adapter(name)
            case "oldest":
                m.remove_oldest_adapter()
            case "all":
                m.remove_all_adapters()
        done.add(operation)

        known = on_host(m)
        picked = rng.permutation(known)[: rng.integers(0, slots + 1)]
        names = [None if not len(picked) or rng.random() < 0.25 else str(rng.choice(picked)) for _ in range(SEQUENCES)]
        adapters = [None if name is None else make_adapter(name, versions[name]) for name in names]
        world.check(world.serve(names), adapters)
        ranks_served.update(adapter.rank for adapter in adapters if adapter)
        slots_used.add(sum(name is not None for name in slot_names(m)))
        adapters_in_batch.add(len({name for name in names if name}))

    assert len(world.traces) == 1
    assert world.forward._cache_size() == 1
    assert m.stats().compilations == 1
    # The walk went where it should.
    assert done == {"add", "replace", "remove", "activate", "deactivate", "oldest", "all", "mix"}
    assert ranks_served == set(range(1, MAX_RANK + 1))
    assert slots_used == set(range(slots + 1))
    assert adapters_in_batch == set(range(slots + 1))
    stats = m.stats()
    assert stats.slot_evictions > 20
    assert stats.host_evictions > 5


def test_slots_are_the_state_of_the_model(world):
    world.manager.add_adapter(make_adapter("a"))
    before = world.manager.slots
    assert world.manager.slots is before  # no write in between
    world.manager.activate_adapter("a")
    after = world.manager.slots
    assert after is not before
    state = nnx.state(world.model, jlora.SlotParam)
    chex.assert_trees_all_equal_structs(after, state, before)
    chex.assert_trees_all_equal(after, state)
    assert set(map(id, jax.tree.leaves(after))) == set(map(id, jax.tree.leaves(state)))  # no copies


def test_no_slots_of_a_model_that_was_given_back():
    manager = make_world().manager
    model = manager.unwrap()
    with pytest.raises(LoRAError, match="gave its model back"):
        _ = manager.slots
    jlora.LoRAManager(model, manager.config)  # nor those of the next manager
    with pytest.raises(LoRAError, match="gave its model back"):
        _ = manager.slots
