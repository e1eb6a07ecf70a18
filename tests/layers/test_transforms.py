"""JAX and Flax transformations inside and around a wrapped model: values, traces and leaks."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jlora.errors import LoRAError
from jlora.layers.forward.scope import use
from jlora.layers.site import SlotParam, SlotRanks
from tests.layers.merging import Target, assert_close, expected_rows, make_adapter, make_manager, merge, normal

pytestmark = pytest.mark.device


class Model(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.up = nnx.Linear(6, 8, rngs=rngs)
        self.down = nnx.Linear(8, 6, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jnp.tanh(self.up(x)))


TARGETS = [Target("up", 6, 8, "up.kernel"), Target("down", 8, 6, "down.kernel")]
ONE, TWO = make_adapter("one", TARGETS, 3), make_adapter("two", TARGETS[:1], 1)
X, NAMES = normal(8, 2, 6), ["one", None, "two", "one", "two", "two", None, "one"]


def forward(model, x, batch):
    with use(batch):
        return model(x)


@pytest.fixture(scope="module")
def served():
    model = Model()
    twins = {"one": merge(model, TARGETS, ONE), "two": merge(model, TARGETS, TWO), None: nnx.clone(model)}
    manager = make_manager(model, [ONE, TWO])
    manager.activate_adapter("one")
    manager.activate_adapter("two")
    return model, manager, expected_rows(twins, NAMES, X), twins


# --- Ways to pass the model -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("jit", [jax.jit, nnx.jit])
def test_model_passed_straight_and_swapped_without_a_second_trace(served, jit):
    _, _, _, twins = served
    model = Model()
    manager = make_manager(model, [ONE, TWO], max_loras=1)

    @jit
    @chex.assert_max_traces(n=1)
    def step(model, x, batch):
        return forward(model, x, batch)

    for names in (["one"] * 8, ["two"] * 8, ["one", None] * 4):
        with manager.prepare(names) as batch:
            assert_close(step(model, X, batch), expected_rows(twins, names, X))


# --- Traces that share a function ---------------------------------------------------------------------------------

# --- Differentiation ------------------------------------------------------------------------------------------------


def test_gradients_of_slots_and_inputs():
    """The gradients of sum(w * y) through one linear layer equal those written out in float64."""

    class One(nnx.Module):
        def __init__(self):
            self.proj = nnx.Linear(6, 5, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.proj(x)

    model, names = One(), NAMES
    adapters = [make_adapter(n, [Target("proj", 6, 5, "")], r) for n, r in (("one", 3), ("two", 1))]
    manager, w = make_manager(model, adapters), normal(8, 2, 5, seed=3)
    with manager.prepare(names) as batch:
        graphdef, ranks, slots, rest = nnx.split(model, SlotRanks, SlotParam, ...)

        @jax.jit
        def gradients(slots, x, ranks, rest, batch):
            def loss(slots, x):
                with use(batch):
                    model = nnx.merge(graphdef, ranks, slots, rest)
                    return (w * jax.checkpoint(model)(x)).sum()

            return jax.grad(loss, argnums=(0, 1))(slots, x)

        d_slots, d_x = gradients(slots, X, ranks, rest, batch)
        rows = np.asarray(batch.slots)
    a, b = (np.asarray(v[...], np.float64) for v in (model.proj.jlora_a, model.proj.jlora_b))
    kernel = np.asarray(model.proj.kernel[...], np.float64)
    d_a, d_b, expected_x = np.zeros_like(a), np.zeros_like(b), w @ kernel.T
    scaled = adapters[0].modules["proj"].scaling * w.astype(np.float64)
    for i, slot in enumerate(rows):
        if slot < 3:
            for t in range(2):
                d_a[slot, 0] += np.outer(b[slot] @ scaled[i, t], X[i, t])
                d_b[slot] += np.outer(a[slot, 0] @ X[i, t], scaled[i, t])
                expected_x[i, t] += a[slot, 0].T @ (b[slot] @ scaled[i, t])
    # Rows past an adapter's rank are no part of it and get no gradient.
    true_ranks = {slot: {"one": 3, "two": 1}[name] for slot, name in zip(rows, names, strict=True) if name}
    for slot, rank in true_ranks.items():
        d_a[slot, :, rank:], d_b[slot, rank:] = 0, 0
    assert_close(d_slots["proj"]["jlora_a"][...], d_a)
    assert_close(d_slots["proj"]["jlora_b"][...], d_b)
    assert_close(d_x, expected_x)


# --- vmap -----------------------------------------------------------------------------------------------------------


def test_vmap_over_sequences_with_their_batch(served):
    """vmap over sequences of a model for one sequence [length, features]."""
    model, manager, expected, _ = served
    with manager.prepare(NAMES) as batch:
        assert_close(jax.jit(jax.vmap(forward, in_axes=(None, 0, 0)))(model, X, batch), expected)
        assert_close(jax.vmap(forward, in_axes=(None, 0, 0))(model, X[:, 0], batch), expected[:, 0])


@pytest.mark.parametrize("length", [8, 16])
@pytest.mark.parametrize("wrap", [lambda f: f, lambda f: jax.grad(lambda x: f(x).sum())], ids=["plain", "grad"])
def test_vmap_over_sequences_without_their_batch_is_refused(served, length, wrap):
    """The rows of one sequence look like one row a sequence (8) or like flattened rows (16)."""
    model, manager, _, _ = served

    @jax.jit
    def step(model, x, batch):
        with use(batch):
            return jax.vmap(wrap(model))(x)

    with manager.prepare(NAMES) as batch, pytest.raises(LoRAError, match=r"up: under jax.vmap, .* map the batch too"):
        step(model, normal(8, length, 6), batch)


# --- shard_map ------------------------------------------------------------------------------------------------------


def shard(step, specs):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=P("data")))


@pytest.mark.device(devices=8)
def test_shard_map_over_packed_rows(served):
    """A shard may have rows of more sequences than its own, including those of other shards."""
    model, manager, expected, _ = served
    counts = [1, 2, 1, 1, 2, 0, 1, 2]  # 10 rows and 6 of padding, 2 a shard
    rows = np.concatenate([X[i, :n] for i, n in enumerate(counts)] + [X[0, :1]] * 6)
    with manager.prepare(NAMES, token_counts=counts, pad_to=16) as batch:
        found = shard(forward, (P(), P("data"), P("data")))(model, rows, batch)
    assert_close(found[:10], np.concatenate([expected[i, :n] for i, n in enumerate(counts)]))
