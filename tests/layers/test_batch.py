"""Batches and their leases: every copy of a batch holds its lease or raises, and no other object keeps it alive."""

import copy
import gc
import pickle
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jlora
from tests.layers.merging import (
    Holder,
    Target,
    assert_close,
    expected_rows,
    make_adapter,
    make_manager,
    merge,
    normal,
    serve,
)
from tests.records import slot_names

pytestmark = pytest.mark.device


def model_of():
    return Holder(nnx.Linear(6, 5, rngs=nnx.Rngs(0)))


TARGETS = [Target("proj", 6, 5, "proj.kernel")]
A, B = make_adapter("a", TARGETS, 3), make_adapter("b", TARGETS, 2)
X, NAMES = normal(8, 2, 6), ["a", None, "a", "a", None, "a", None, "a"]


class World:
    """One slot and two adapters: preparing `b` takes the slot of `a` unless a lease holds it."""

    def __init__(self, **config):
        self.model = model_of()
        self.twins = {a.name: merge(self.model, TARGETS, a) for a in (A, B)} | {None: nnx.clone(self.model)}
        self.manager = make_manager(self.model, [A, B], max_loras=1, **config)
        self.traces = []

        def step(model, x, batch):
            self.traces.append(1)
            with jlora.use(batch):
                return model(x)

        self.step = jax.jit(step)

    def serves(self, batch, names=NAMES):
        assert_close(self.step(self.model, X, batch), expected_rows(self.twins, names, X))

    def take_slot(self):
        with self.manager.prepare(["b"] * 8) as batch:
            self.serves(batch, ["b"] * 8)

    def check_held(self):
        assert self.manager.stats().leased == 1
        with pytest.raises(jlora.NoFreeSlotError):
            self.manager.prepare(["b"])

    def check_free(self):
        if self.manager.leases():
            gc.collect()  # a second and more, late in a run
        assert self.manager.leases() == ()
        assert self.manager.stats().leased == 0


@pytest.fixture(scope="module")
def shared():
    return World()


@pytest.fixture
def world(shared):
    """Share one compiled step between tests, and check that no test leaves a lease open."""
    shared.check_free()
    yield shared
    shared.check_free()
    assert len(shared.traces) <= 1


def mesh():
    return jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))


COPIES = {
    "device_put": jax.device_put,
    "tree.map": lambda b: jax.tree.map(lambda x: x + 0, b),
    "tree.map to NumPy": lambda b: jax.tree.map(np.asarray, b),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "in a dict": lambda b: jax.tree.map(lambda x: x, {"batch": b})["batch"],
}
copies = pytest.mark.parametrize("how", COPIES)


# --- Copies ---------------------------------------------------------------------------------------------------------


@copies
def test_a_copy_holds_the_slot_until_one_is_closed(world, how):
    duplicate = COPIES[how](world.manager.prepare(NAMES))
    assert duplicate.has_adapters
    assert duplicate.versions == tuple(None if name is None else 0 for name in NAMES)
    another = COPIES[how](duplicate)
    del another
    gc.collect()
    world.check_held()
    world.serves(duplicate)
    original = copy.copy(duplicate)
    duplicate.close()
    duplicate.close()
    world.take_slot()
    with pytest.raises(jlora.LoRAError, match="is closed"):
        world.step(world.model, X, COPIES[how](original))
    for closed in (original, duplicate):
        with pytest.raises(jlora.LoRAError, match="is closed: its slots may hold other adapters"):
            world.step(world.model, X, closed)
        with pytest.raises(jlora.LoRAError, match="is closed"), jlora.use(closed):
            pass


def test_a_treedef_holds_nothing(world):
    batch = world.manager.prepare(NAMES)
    leaves, treedef = jax.tree.flatten(batch)
    del batch
    world.check_free()
    with pytest.raises(jlora.LoRAError, match="is closed"):
        world.step(world.model, X, jax.tree.unflatten(treedef, leaves))


def test_pickling_is_refused(world):
    with world.manager.prepare(NAMES) as batch, pytest.raises(jlora.LoRAUsageError, match="cannot be pickled"):
        pickle.dumps(batch)


# --- What comes out of traced functions -----------------------------------------------------------------------------


@jax.jit
def same(batch):
    return batch


OUT_OF_TRACES = {
    "jit": same,
    "nnx.jit": nnx.jit(lambda b: b),
    "vmap": jax.vmap(lambda b: b),
    "scan": lambda b: jax.lax.scan(lambda carry, _: (carry, None), b, None, length=2)[0],
    "shard_map": lambda b: jax.jit(jax.shard_map(lambda b: b, mesh=mesh(), in_specs=P("data"), out_specs=P("data")))(b),
    "eval_shape": lambda b: jax.eval_shape(lambda b: b, b),
    "a copy of it": lambda b: copy.copy(jax.device_put(jax.tree.map(lambda x: x, same(b)))),
}


@pytest.mark.device(devices=8)
@pytest.mark.parametrize("how", OUT_OF_TRACES)
def test_a_batch_that_comes_out_of_a_traced_function_raises_when_used(how):
    """JAX returns the static part of the first call, which belongs to `a` even if the second call serves `b`."""
    world = World()
    with world.manager.prepare(NAMES) as batch:
        world.serves(batch)  # the step is compiled before
        OUT_OF_TRACES[how](batch)
    with world.manager.prepare(["b"] * 8) as batch:
        out = OUT_OF_TRACES[how](batch)
        with pytest.raises(jlora.LoRAError, match="came out of a traced function"), jlora.use(out):
            pass
        if how != "eval_shape":
            for _ in range(2):
                with pytest.raises(jlora.LoRAError, match="came out of a traced function"):
                    world.step(world.model, X, out)
        world.serves(batch, ["b"] * 8)
    world.check_free()


def test_a_traced_batch_hides_its_versions(world):
    seen = []

    @jax.jit
    def step(batch):
        seen.append(batch.has_adapters)
        with pytest.raises(jlora.LoRAUsageError, match="known outside traced functions only"):
            _ = batch.versions
        return batch.slots

    with world.manager.prepare([None] * 8) as batch:
        step(batch)
    assert seen == [True]  # the compiled step serves batches with and without adapters


# --- Ways to hand it over -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("counts", [None, [2] * 8])
def test_donated_batches_are_not_reused(world, counts):
    """The next `prepare` of the same adapters does not return arrays that a step consumed."""
    x = X if counts is None else X.reshape(16, 6)

    def step(model, x, batch):
        with jlora.use(batch):
            y = model(x)
        return y, *jax.tree.leaves(
            (batch.slots + 1, batch.token_slots, batch.stamps + 1)
        )  # results that reuse the buffers of the batch

    step = jax.jit(step, donate_argnums=2)
    for _ in range(3):
        with world.manager.prepare(NAMES, token_counts=counts) as batch:
            found = step(world.model, x, batch)[0]
            assert batch.slots.is_deleted()
        assert_close(found.reshape(8, 2, 5), expected_rows(world.twins, NAMES, X))


# --- What holds a lease ---------------------------------------------------------------------------------------------


def test_compiled_functions_hold_no_lease(world):
    """The cache of a compiled function holds the static part of its first batch."""
    # New functions, so that this is their first call.
    steps = [jax.jit(lambda *args: world.step.__wrapped__(*args)) for _ in range(2)]
    steps += [nnx.jit(lambda *args: world.step.__wrapped__(*args))]
    traced = len(world.traces)
    batch = world.manager.prepare(NAMES)
    lease = weakref.ref(batch.lease)
    for step in steps:
        step(world.model, X, batch)
    jax.eval_shape(world.step, world.model, X, batch)
    ahead = steps[0].lower(world.model, X, batch)
    kept = [*steps, ahead, ahead.compile(), jax.make_jaxpr(lambda b: b.slots + 1)(batch)]
    kept += [jax.tree.map(jax.typeof, batch), jax.tree.map(lambda x: x.sharding, batch)]
    del batch
    gc.collect()
    assert lease() is None
    world.check_free()
    del world.traces[traced:], kept


# --- Traces ---------------------------------------------------------------------------------------------------------


# --- Listing --------------------------------------------------------------------------------------------------------


def test_open_leases_are_listed(world, caplog):
    caplog.set_level("DEBUG", "jlora.leases")
    assert world.manager.leases() == ()
    with world.manager.prepare(NAMES) as batch, world.manager.prepare([None]):
        duplicate = copy.copy(batch)
        first, second = world.manager.leases()
        assert (first.adapters, second.adapters) == (("a",), ())
        assert first.age >= second.age >= 0
        assert first.thread == threading.get_ident()
        assert first.where is not None
        assert "test_open_leases_are_listed" in first.where
        assert world.manager.leases()[0].age > first.age
        del duplicate
    assert world.manager.leases() == ()


def test_concatenated_batches_raise():
    """A concatenated batch would hold the first lease only, and serve the base to the rows of the second."""
    model = model_of()
    manager = make_manager(model, [A, B], max_loras=2)

    def join(*arrays):
        return jnp.concatenate(arrays)

    @jax.jit
    def joins(model, x, *batches):
        with jlora.use(jax.tree.map(join, *batches)):
            return model(x)

    with manager.prepare(["a", "a"]) as first, manager.prepare(["b", "b"]) as second:
        whole = jax.tree.map(join, first, second)
        for call in (lambda: serve(model, X[:4], whole), lambda: joins(model, X[:4], first, second)):
            with pytest.raises(jlora.LoRAError, match="of 2 sequences holds 4 slots: batches that were put together"):
                call()


def test_rows_of_a_closed_batch_are_not_served_by_the_adapter_that_took_its_slot():
    """The stamps of the batch are older than those of the slot."""
    adapters = [make_adapter(name, TARGETS, 2) for name in "abc"]
    model = model_of()
    manager = make_manager(model, adapters, max_loras=2)

    with manager.prepare(["a", "a"]) as first:
        with manager.prepare(["b", "b"]) as second:
            mixed = jax.tree.map(lambda one, two: jnp.where(jnp.array([True, False]), one, two), first, second)
        with manager.prepare(["c"]):
            assert set(slot_names(manager)) == {"a", "c"}
            assert np.isnan(serve(model, X[:2], mixed)).all()
            with jlora.use(mixed), pytest.raises(jlora.LoRAError, match="this copy of the model"):
                model(jnp.asarray(X[:2]))
