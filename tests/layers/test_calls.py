"""A step serves every wrapped layer or raises; layers that `verify` found unserved stay so, and refuse adapters."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jlora
from tests.layers.merging import Target, assert_close, expected_rows, make_adapter, make_manager, merge, normal


class Model(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.one, self.two, self.three = (nnx.Linear(6, 6, rngs=rngs) for _ in range(3))
        self.norm = nnx.RMSNorm(6, rngs=rngs)

    def __call__(self, x):
        return self.three(jnp.tanh(self.two(jnp.tanh(self.one(x)))))


ALL = [Target(name, 6, 6, f"{name}.kernel") for name in ("one", "two", "three")]
ADAPTERS = [make_adapter("one", ALL[:1], 2), make_adapter("late", ALL[1:], 2), make_adapter("all", ALL, 2)]
X = normal(3, 2, 6)
NAMES = ["all", None, "late"]
NOT_CALLED = "it was not called"


class World:
    """A wrapped model and the functions of a user; `traces` counts their traces."""

    def __init__(self):
        self.model = Model()
        self.twins = {a.name: merge(self.model, ALL, a) for a in ADAPTERS} | {None: nnx.clone(self.model)}
        self.manager = make_manager(self.model, ADAPTERS)
        self.traces: dict[str, int] = {"full": 0, "first": 0}

        def full(model, x, batch):
            self.traces["full"] += 1
            with jlora.use(batch):
                return model(x)

        def first(model, x, batch, without=()):
            self.traces["first"] += 1
            with jlora.use(batch, without=without):
                return model.one(x)

        self.full, self.first = jax.jit(full), jax.jit(first, static_argnums=3)

    def serves(self, *names):
        with self.manager.prepare(names) as batch:
            assert_close(self.full(self.model, X, batch), expected_rows(self.twins, names, X))


@pytest.fixture
def world():
    return World()


# --- Calls that a step must make ---


def test_a_step_that_omits_a_layer_raises_with_the_remedies(world):
    """A step raises for every batch, because it is compiled for all of them."""
    for names in (NAMES, [None] * 3):  # a step that raised is not compiled
        refused = pytest.raises(jlora.LoRAError, match=rf"(?s)2 of .*two: {NOT_CALLED}.*three: {NOT_CALLED}")
        with world.manager.prepare(names) as batch, refused as raised:
            world.first(world.model, X, batch)
    message = str(raised.value)
    assert "manager.verify(forward, inputs)" in message
    assert "LoRAConfig(exclude_modules=['two', 'three'])" in message
    assert "jlora.use(batch, without=['two', 'three'])" in message
    world.serves(*NAMES)
    assert world.traces == {"full": 1, "first": 2}


def test_without_waives_the_layers_that_it_names(world):
    with world.manager.prepare(NAMES) as batch:
        found = world.first(world.model, X, batch, ("two", "three"))
        assert_close(found[1], np.asarray(world.twins[None].one(X))[1])
        assert_close(found[0], np.asarray(world.twins["all"].one(X))[0])
        assert_close(world.first(world.model, X, batch, ("*",)), found)
        with pytest.raises(jlora.LoRAError, match=rf"1 of .*\n  two: {NOT_CALLED}"):
            world.first(world.model, X, batch, ("three", "norm"))  # a module that is not wrapped may be named too


def test_without_takes_names_as_exclude_modules_does():
    class Nested(nnx.Module):
        packed_modules = {"kv": ("k", "v")}

        def __init__(self):
            rngs = nnx.Rngs(0)
            self.proj, self.kv = nnx.Linear(6, 6, rngs=rngs), nnx.Linear(6, 6, rngs=rngs)
            self.mtp = nnx.List([nnx.Dict(proj=nnx.Linear(6, 6, rngs=rngs)) for _ in range(2)])

    def proj(model, batch, without):
        with jlora.use(batch, without=without):
            return model.proj(jnp.asarray(X))

    manager = make_manager(Nested())
    with manager.prepare([None] * 3) as batch:
        for names in (["mtp", "kv"], ["mtp.0", "mtp.1.proj", "v"]):
            jax.eval_shape(partial(proj, without=names), manager.model, batch)
        with pytest.raises(jlora.LoRAError, match=r"mtp.1.proj: it was not called"):
            jax.eval_shape(partial(proj, without=["mtp.0", "kv"]), manager.model, batch)


@pytest.mark.usefixtures("unchecked_calls")
@pytest.mark.parametrize(
    ("without", "message"), [(["twoo"], r"without \['twoo'\] match no module"), ("two", "must be a list of names")]
)
def test_without_raises_for_an_unknown_name(world, without, message):
    with (
        world.manager.prepare([None] * 3) as batch,
        pytest.raises(jlora.LoRAUsageError, match=message),
        jlora.use(batch, without=without),
    ):
        pass


def test_scopes_of_parts_together_cover_the_model(world):
    @jax.jit
    def rest(model, x, batch):
        with jlora.use(batch, without=["one"]):
            return model.three(jnp.tanh(model.two(jnp.tanh(x))))

    for names in (NAMES, [None, "all", "one"]):
        with world.manager.prepare(names) as batch:
            hidden = world.first(world.model, X, batch, ("two", "three"))
            assert_close(rest(world.model, hidden, batch), expected_rows(world.twins, names, X))
    assert world.traces["first"] == 1


def test_eager_calls_are_served(world):
    with (
        world.manager.prepare(NAMES) as batch,
        pytest.raises(jlora.LoRAError, match=f"two: {NOT_CALLED}"),
        jlora.use(batch),
    ):
        world.model.one(jnp.asarray(X))
    with world.manager.prepare(NAMES) as batch, jlora.use(batch):
        assert_close(world.model(jnp.asarray(X)), expected_rows(world.twins, NAMES, X))
    with world.manager.prepare(NAMES) as batch, pytest.raises(ZeroDivisionError), jlora.use(batch):
        raise ZeroDivisionError
    with jlora.use(None):
        world.model.one(jnp.asarray(X))


# --- Scopes inside scopes ---


def test_calls_in_nested_scopes_of_the_manager_count(world):
    @jax.jit
    def nested(model, x, batch):
        with jlora.use(batch):
            with jlora.use(batch):
                x = jnp.tanh(model.one(x))
            with jlora.use(batch, without=["one"]):
                return model.three(jnp.tanh(model.two(x)))

    with world.manager.prepare(NAMES) as batch:
        assert_close(nested(world.model, X, batch), expected_rows(world.twins, NAMES, X))


def test_a_function_traced_in_an_eager_scope_checks_its_own_calls(world):
    """JAX caches the trace, so a later eager scope would not see the calls in it."""
    with world.manager.prepare(NAMES) as batch:
        for _ in range(2):
            with jlora.use(batch, without=["*"]):
                assert_close(world.full(world.model, X, batch), expected_rows(world.twins, NAMES, X))
            with pytest.raises(jlora.LoRAError, match=f"two: {NOT_CALLED}"), jlora.use(batch, without=["*"]):
                world.first(world.model, X, batch)


@pytest.mark.parametrize("wrap", [nnx.jit, jax.checkpoint], ids=["nnx.jit", "remat"])
def test_layers_called_in_an_inner_function_count(world, wrap):
    """JAX caches the trace of an inner function. A second outer function must still count its calls."""
    inner = wrap(lambda layer, x: layer(x))

    def outer(model, x, batch):
        with jlora.use(batch):
            return inner(model.three, jnp.tanh(inner(model.two, jnp.tanh(inner(model.one, x)))))

    for step in (jax.jit(lambda *args: outer(*args)), jax.jit(lambda *args: 1 * outer(*args))):
        for _ in range(2):
            with world.manager.prepare(NAMES) as batch:
                assert_close(step(world.model, X, batch), expected_rows(world.twins, NAMES, X))


# --- Layers that verify finds unserved ---


def test_unserved_layers_refuse_adapters_until_verify_sees_them_served(world):
    world.serves(*NAMES)
    assert world.manager.unserved == {}
    report = world.manager.verify(world.first, X)
    assert report.checked == ("one",)
    assert set(world.manager.unserved) == set(report.unserved) == {"two", "three"}
    for names in (["one", None, "one"], [None] * 3):
        with world.manager.prepare(names) as batch:
            found = world.first(world.model, X, batch)
            assert_close(found[0], np.asarray(world.twins[names[0]].one(X))[0])
    reason = r"(two|three)', which takes no adapter: the forward never calls that layer"
    with pytest.raises(jlora.AdapterMismatchError, match=rf"adapter 'late': brings weights for '{reason}"):
        world.manager.prepare(["one", None, "late"])
    with pytest.raises(jlora.AdapterMismatchError, match=r"'two' takes no adapter yet: the forward never calls"):
        world.manager.add_adapter(make_adapter("new", ALL, 1))
    assert [layer.reason is None for layer in world.manager.layers()] == [True, False, False]
    world.manager.verify(world.full, X)
    assert world.manager.unserved == {}
    world.manager.add_adapter(make_adapter("new", ALL, 1))
    world.serves(*NAMES)


def test_a_change_of_unserved_retraces_each_step_once(world):
    def traced_by(call):
        before = world.traces["full"]
        call()
        return world.traces["full"] - before

    assert traced_by(lambda: world.serves("one", None, None)) == 1
    world.manager.verify(lambda model, x, batch: world.first(model, x, batch), X)
    assert traced_by(lambda: world.serves("one", None, None)) == 1
    for names in (["one"] * 3, [None, "one", None], [None] * 3):
        assert traced_by(lambda names=names: world.serves(*names)) == 0
    world.manager.verify(lambda model, x, batch: world.first(model, x, batch), X)  # the result is the same
    assert traced_by(lambda: world.serves("one", None, None)) == 0


def test_verify_that_fails_changes_nothing(world):
    world.manager.verify(world.first, X)
    before = world.manager.unserved
    with pytest.raises(jlora.LoRAUsageError, match="batch_axis"):
        world.manager.verify(lambda model, x, batch: world.full(model, x, batch).mean(0), X)
    assert world.manager.unserved is before
