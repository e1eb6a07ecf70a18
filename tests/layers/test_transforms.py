"""JAX and Flax transformations inside and around a wrapped model: values, traces and leaks."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jlora
from jlora.errors import AdapterMismatchError, LoRAError
from jlora.layers.forward.scope import use
from jlora.layers.site import SlotParam, SlotRanks
from tests import oracle
from tests.layers.merging import (
    Holder,
    Target,
    assert_close,
    check_against_merged,
    expected_rows,
    make_adapter,
    make_manager,
    merge,
    normal,
    serve,
)  # fmt: skip
from tests.records import slot_names

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
    manager.pin_adapter("one")
    manager.pin_adapter("two")
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


# --- Differentiation ------------------------------------------------------------------------------------------------


def test_gradients_of_slots_and_inputs():
    model, names = Holder(nnx.Linear(6, 5, rngs=nnx.Rngs(0))), NAMES
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
        slot_of_row = np.repeat(batch.slots, 2)
    true_ranks = {"one": 3, "two": 1, None: 0}
    scales = np.array([[[true_ranks[name], adapters[0].modules["proj"].scaling]] for name in slot_names(manager)])
    factors = model.proj.jlora_a[...], model.proj.jlora_b[...]
    of_x, d_a, d_b = oracle.lora_gradients(w.reshape(16, 5), X.reshape(16, 6), slot_of_row, *factors, (5,), scales)
    assert_close(d_slots["proj"]["jlora_a"][...], d_a)
    assert_close(d_slots["proj"]["jlora_b"][...], d_b)
    assert_close(d_x, w @ np.asarray(model.proj.kernel[...], np.float64).T + of_x.reshape(X.shape))


# --- vmap -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
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


# --- Layers under nnx.scan ----------------------------------------------------------------------------------------


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(6, 8, rngs=rngs)
        self.down = nnx.Einsum("BTF,FD->BTD", (8, 6), rngs=rngs)

    def __call__(self, x):
        return x + self.down(jnp.tanh(self.up(x)))


class Scanned(nnx.Module):
    def __init__(self, axes, remat=False):
        self.blocks = nnx.vmap(Block, in_axes=0, out_axes=0)(nnx.Rngs(0).split(3))
        self.axes, self.remat = axes, remat

    def __call__(self, x):
        def step(x, block):
            return block(x)

        body = nnx.remat(step) if self.remat else step
        return nnx.scan(body, in_axes=(nnx.Carry, self.axes), out_axes=nnx.Carry)(x, self.blocks)


def stacked_targets(template):
    return [
        Target(template.format(i, name), k, n, f"blocks.{name}.kernel", at=(i,))
        for i in range(3)
        for name, k, n in (("up", 6, 8), ("down", 8, 6))
    ]


@pytest.mark.parametrize(
    ("axes", "remat"),
    [(0, True), (nnx.StateAxes({nnx.Param: 0, SlotParam: 0, ...: None}), False)],
    ids=["remat", "state axes"],
)
def test_layers_under_nnx_scan(axes, remat):
    """One module holds all layers; checkpoint names carry the layer's index."""
    targets = stacked_targets("blocks.{}.{}")
    adapters = [make_adapter("all", targets[::-1], 3), make_adapter("last", targets[4:], 2)]
    check_against_merged(Scanned(axes, remat), targets, normal(3, 2, 6), adapters=adapters)


def test_nnx_scan_that_does_not_map_the_slots_raises():
    model = Scanned(nnx.StateAxes({nnx.Param: 0, ...: None}))
    manager = make_manager(model)
    with manager.prepare([None] * 3) as batch, pytest.raises(LoRAError, match=r"map jlora\.SlotParam over axis 0"):
        serve(model, normal(3, 2, 6), batch)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("blocks.3.up", "'blocks.3.up' is a stack of 3 layers, and the name has no layer index below that"),
        ("blocks.up", "is a stack of 3 layers, and the name has"),
    ],
)
def test_layer_index_is_checked(name, reason):
    manager = make_manager(Scanned(0))
    with pytest.raises(AdapterMismatchError, match=reason):
        manager.add_adapter(make_adapter("bad", [Target(name, 6, 8, "")], 2))


def test_gradients_of_a_token_that_repeats_are_summed_in_float32():
    class Table(nnx.Module):
        def __init__(self):
            self.table = nnx.Embed(16, 8, rngs=nnx.Rngs(0))

        def __call__(self, tokens):
            return self.table(tokens)

    model = Table()
    manager = make_manager(model, dtype=jnp.bfloat16, max_lora_rank=2)
    for name in ("one", "two"):
        a, b = normal(2, 16), normal(8, 2)
        manager.add_adapter(jlora.Adapter.from_arrays(name, {"table": (a, b)}, alpha=2, embeddings=["table"]))
    tokens = np.array([[3] * 600, [5, 3] * 300, [3] * 600], np.int32)
    graph, slots, rest = nnx.split(model, SlotParam, ...)
    with manager.prepare(["one", "two", None]) as batch:

        def loss(slots):
            return forward(nnx.merge(graph, slots, rest), tokens, batch)[..., 0].sum()

        ((_, found),) = [
            (path, value[...])
            for path, value in nnx.to_flat_state(jax.grad(loss, allow_int=True)(slots))
            if path[-1] == "jlora_a"
        ]
        b = np.asarray(vars(model.table)["jlora_b"][...], np.float64)  # [slots, R, N]
        one, two = map(slot_names(manager).index, ("one", "two"))
    expected = np.zeros((3, 2, 16))
    expected[one, :, 3] = 600 * b[one, :2, 0]
    expected[two, :, 3] = expected[two, :, 5] = 300 * b[two, :2, 0]
    np.testing.assert_allclose(np.asarray(found, np.float64)[:, 0, :2], expected, rtol=2**-8)
