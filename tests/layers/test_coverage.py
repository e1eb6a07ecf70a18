"""What a forward leaves out is known of that forward alone, costs one trace, and never drops an adapter silently."""

import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jlora
from tests.layers.merging import Target, assert_close, expected_rows, make_adapter, make_manager, merge, normal, run


class Model(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.one, self.two, self.three = (nnx.Linear(6, 6, rngs=rngs) for _ in range(3))

    def __call__(self, x):
        return self.three(jnp.tanh(self.two(jnp.tanh(self.one(x)))))


ALL = [Target(name, 6, 6, f"{name}.kernel") for name in ("one", "two", "three")]
ONE, TWO, THREE = ALL
ADAPTERS = {
    "one": [ONE],
    "two": [TWO],
    "three": [THREE],
    "ends": [ONE, THREE],
    "late": [TWO, THREE],
    "all": ALL,
}
X = normal(3, 2, 6)
NOT_CALLED = "but the forward never calls that layer"


class World:
    """A wrapped model and what its users' functions compute of it; `traces` counts theirs."""

    def __init__(self):
        self.model = Model()
        adapters = [make_adapter(name, targets, 2) for name, targets in ADAPTERS.items()]
        self.twins = {a.name: merge(self.model, ALL, a) for a in adapters} | {None: nnx.clone(self.model)}
        self.manager = make_manager(self.model, adapters, max_loras=6)
        self.traces: dict[str, int] = {"full": 0, "first": 0, "ends": 0, "inner": 0}

        def full(model, x, batch):
            self.traces["full"] += 1
            with jlora.use(batch):
                return model(x)

        def first(model, x, batch, partial=False):
            self.traces["first"] += 1
            with jlora.use(batch, partial=partial):
                return model.one(x)

        def ends(model, x, batch):
            self.traces["ends"] += 1
            with jlora.use(batch):
                return model.three(jnp.tanh(model.one(x)))

        self.full, self.ends = jax.jit(full), jax.jit(ends)
        self.first = jax.jit(first, static_argnums=3)

    def serves(self, *names):
        with self.manager.prepare(names) as batch:
            assert_close(self.full(self.model, X, batch), expected_rows(self.twins, names, X))

    def serves_first(self, *names):
        with self.manager.prepare(names) as batch:
            found = self.first(self.model, X, batch)
        outputs = {name: np.asarray(run(self.twins[name].one, X)) for name in names}  # type: ignore[attr-defined]
        assert_close(found, np.stack([outputs[name][i] for i, name in enumerate(names)]))

    def refuses(self, step, *names, layer, who):
        with (
            self.manager.prepare(names) as batch,
            pytest.raises(
                jlora.AdapterMismatchError, match=f"adapter '{who}': brings weights for '{layer}', {NOT_CALLED}"
            ),
        ):
            step(self.model, X, batch)


@pytest.fixture
def world():
    return World()


def test_one_partial_forward_does_not_poison_later_ones(world):
    world.refuses(world.first, "all", None, None, layer="two", who="all")
    for _ in range(2):
        world.serves("all", None, "two")
    world.serves_first("one", None, "one")
    world.refuses(world.first, "all", None, None, layer="two", who="all")
    world.serves("all", None, "two")
    assert world.traces["full"] == 2  # once more after `first` was seen, and compiled, to leave two and three out


def test_a_registered_adapter_breaks_nobodys_step(world):
    """Six are registered, and in slots; the step serves those whose layers it calls."""
    with world.manager.prepare(list(ADAPTERS)):
        world.serves_first("one", None, "one")
        world.serves_first(None, None, None)
    assert world.traces["first"] == 1


def test_a_function_compiled_for_the_base_does_not_drop_an_adapter(world):
    """A compiled function runs no Python of ours: it is traced once more, and looks."""
    world.serves_first(None, None, None)
    for expected_traces in (2, 3):  # what raised was not compiled
        world.refuses(world.first, None, "late", None, layer="two", who="late")
        assert world.traces["first"] == expected_traces
    world.serves_first("one", None, None)
    assert world.traces["first"] == 3


def test_a_second_function_that_calls_the_layer_serves_it(world):
    """Compiled before the first was seen to leave it out, it is traced once more; after, not at all."""
    world.serves("two", None, None)
    assert world.traces["full"] == 1
    world.serves_first(None, None, None)
    for _ in range(3):
        world.serves("two", None, None)
        world.serves(None, "two", "one")
    assert world.traces["full"] == 2
    world.serves("one", None, None)  # touches nothing that anybody left out
    assert world.traces["full"] == 2


def test_traces_do_not_depend_on_which_adapters_come_together(world):
    """Adapters bring what they like, in any mixture: what another function left out costs one trace, not one each."""
    world.serves(None, None, None)
    world.serves_first(None, None, None)  # leaves out two and three
    for names in (["two", None, None], ["three"] * 3, ["two", "three", "one"], ["late", None, "ends"], ["all"] * 3):
        world.serves(*names)
        assert world.traces["full"] == 2


def test_a_function_that_leaves_out_a_part_of_it(world):
    """`ends` leaves out a part of what `first` does. Each refuses what it leaves out, whatever came before."""
    world.serves_first(None, None, None)  # two and three are one group now
    with world.manager.prepare(["three", None, None]) as batch:
        found = world.ends(world.model, X, batch)  # splits it while a batch of the whole is open
        twin = world.twins["three"]
        assert_close(found[0], np.asarray(twin.three(jnp.tanh(twin.one(X))))[0])
        assert_close(world.ends(world.model, X, batch), found)
    for _ in range(2):
        world.refuses(world.ends, "two", None, None, layer="two", who="two")  # not what was compiled for `three`
        for name in ("two", "late", "all"):
            world.refuses(world.ends, name, "three", None, layer="two", who=name)
        world.refuses(world.first, "three", None, None, layer="three", who="three")
        world.refuses(world.first, None, "two", None, layer="two", who="two")
        world.serves("late", "two", "three")


def test_what_is_learnt_while_a_batch_is_open(world):
    with world.manager.prepare(["late", None, "one"]) as batch:
        expected = expected_rows(world.twins, ["late", None, "one"], X)
        assert_close(world.full(world.model, X, batch), expected)
        world.serves_first(None, None, None)
        with pytest.raises(jlora.AdapterMismatchError, match=f"adapter 'late': .*'two', {NOT_CALLED}"):
            world.first(world.model, X, batch)
        assert_close(world.full(world.model, X, batch), expected)
        assert world.traces == {"full": 2, "first": 2, "ends": 0, "inner": 0}
        # And a copy made before.
        assert_close(world.full(world.model, X, jax.device_put(batch)), expected)
    assert world.traces["full"] == 2


def test_partial_leaves_it_to_the_caller(world):
    with world.manager.prepare(["late", None, "one"]) as batch:
        found = world.first(world.model, X, batch, True)
    assert_close(found[0], np.asarray(world.twins[None].one(X))[0])
    world.serves("late", None, "one")
    assert world.traces["full"] == 1  # nothing was left out unknowingly
    world.refuses(world.first, "late", None, "one", layer="two", who="late")


def test_parts_of_a_forward_that_make_up_the_whole(world):
    @jax.jit
    def rest(model, x, batch):
        with jlora.use(batch, without=["*"]):
            return model.three(jnp.tanh(model.two(jnp.tanh(x))))

    names = ["all", None, "late"]
    for _ in range(2):
        with world.manager.prepare(names) as batch:
            hidden = world.first(world.model, X, batch, True)
            assert_close(rest(world.model, hidden, batch), expected_rows(world.twins, names, X))
    assert world.traces["first"] == 1


@pytest.mark.parametrize("wrap", [jax.jit, nnx.jit, jax.checkpoint], ids=["jit", "nnx.jit", "remat"])
def test_layers_called_in_an_inner_function_count(world, wrap):
    """Whose trace JAX keeps: the second outer function does not run its Python, and must know what it calls."""

    @wrap
    def inner(layer, x):
        world.traces["inner"] += 1
        return layer(x)

    def outer(model, x, batch):
        with jlora.use(batch):
            return inner(model.three, jnp.tanh(inner(model.two, jnp.tanh(inner(model.one, x)))))

    names = ["all", None, "late"]
    for step in (jax.jit(lambda *args: outer(*args)), jax.jit(lambda *args: 1 * outer(*args))):
        for _ in range(2):
            with world.manager.prepare(names) as batch:
                assert_close(step(world.model, X, batch), expected_rows(world.twins, names, X))


def test_an_inner_function_that_leaves_out_a_layer(world):
    inner = jax.jit(lambda layer, x: layer(x))

    @jax.jit
    def outer(model, x, batch):
        with jlora.use(batch):
            return inner(model.three, jnp.tanh(inner(model.one, x)))

    with world.manager.prepare(["ends", None, None]) as batch:
        outer(world.model, X, batch)
    world.refuses(outer, "all", None, None, layer="two", who="all")


def test_a_forward_that_raises_teaches_nothing(world):
    @jax.jit
    def broken(model, x, batch):
        with jlora.use(batch):
            model.one(x)
            raise ZeroDivisionError

    with world.manager.prepare(["all", None, None]) as batch, pytest.raises(ZeroDivisionError):
        broken(world.model, X, batch)
    world.serves("all", None, None)
    world.serves("late", None, None)
    assert world.traces["full"] == 1


def test_rows_that_fit_no_layout_are_known_of_that_function_alone(world):
    @jax.jit
    def odd(model, x, batch):
        with jlora.use(batch, without=["*"]):
            return model.two(jnp.zeros((7, 6))), model.one(x)

    with world.manager.prepare(["one", None, None]) as batch:
        odd(world.model, X, batch)
    world.serves("two", None, "all")
    for _ in range(2):
        with (
            world.manager.prepare(["one", "all", None]) as batch,
            pytest.raises(jlora.AdapterMismatchError, match=r"adapter 'all': brings weights for 'two', but its rows"),
        ):
            odd(world.model, X, batch)
    world.serves("two", None, "all")


def test_eagerly(world):
    with (
        world.manager.prepare(["late", None, None]) as batch,
        pytest.raises(jlora.AdapterMismatchError, match=f"adapter 'late': .*'two', {NOT_CALLED}"),
        jlora.use(batch),
    ):
        world.model.one(jnp.asarray(X))
    with world.manager.prepare(["late", None, "one"]) as batch, jlora.use(batch):
        assert_close(world.model(jnp.asarray(X)), expected_rows(world.twins, ["late", None, "one"], X))


@pytest.mark.parametrize("early", [None, "one"])
def test_a_trace_of_another_thread_is_not_taken_before_it_is_known_what_it_leaves_out(early: str | None) -> None:
    """JAX has the second caller of a function wait for the first one's trace, and take it."""
    world = World()
    inside, go_on = threading.Event(), threading.Event()
    traced: list[str] = []

    @jax.jit
    def first(model: Model, x: jax.Array, batch: jlora.LoRABatch) -> jax.Array:
        traced.append(threading.current_thread().name)
        if len(traced) == 1:
            inside.set()
            assert go_on.wait(60)
        with jlora.use(batch):
            return model.one(x)

    def call(name: str | None) -> np.ndarray:
        with world.manager.prepare([name, None, None]) as batch:
            return np.asarray(first(world.model, X, batch))

    with ThreadPoolExecutor(3) as threads:
        begun = threads.submit(call, early)
        try:
            assert inside.wait(60)
            late, same = threads.submit(call, "all"), threads.submit(call, early)
            with pytest.raises(jlora.AdapterMismatchError, match=f"'all': brings weights for 'two', {NOT_CALLED}"):
                late.result(60)
        finally:
            go_on.set()
        np.testing.assert_array_equal(begun.result(60), same.result(60))
    assert len(traced) == 2  # who needs no more than the first shares its trace
