"""Meshes with Explicit axes, on which wrapped layers need no more shardings than plain ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jlora
from tests.layers.merging import Target, assert_close, expected_rows, make_adapter, make_manager, merge


class Model(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(11, 8, rngs=rngs)
        self.up = nnx.Linear(8, 16, rngs=rngs)
        self.down = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, tokens, sharding=None):
        x = self.embed(tokens, out_sharding=sharding)
        return self.embed.attend(self.down(jnp.tanh(self.up(x))))


TARGETS = [Target("up", 8, 16, "up.kernel"), Target("down", 16, 8, "down.kernel")]
ONE, TWO = make_adapter("one", TARGETS, 3), make_adapter("two", TARGETS[:1], 1)
NAMES = ["one", None, "two", "one"]


@pytest.fixture(scope="module")
def served():
    model = Model()
    twins = {"one": merge(model, TARGETS, ONE), "two": merge(model, TARGETS, TWO), None: nnx.clone(model)}
    manager = make_manager(model, [ONE, TWO])
    manager.pin_adapter("one")
    manager.pin_adapter("two")
    return model, manager, twins


def mesh_of(shape):
    return jax.set_mesh(jax.make_mesh(shape, ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("sharded", [False, True])
def test_rows_on_an_explicit_mesh(served, packed, sharded):
    model, manager, twins = served
    tokens = np.random.default_rng(0).integers(0, 11, (4, 4)).astype(np.int32)
    expected = expected_rows(twins, NAMES, tokens)
    counts = [3, 0, 4, 1]
    rows = np.concatenate([tokens[i, :n] for i, n in enumerate(counts)])

    @(manager.jit if packed else jax.jit)
    def step(model, tokens, batch):
        with jlora.use(batch):
            return model(tokens, sharding=P("data", *(None,) * tokens.ndim) if sharded else None)

    with manager.prepare(NAMES, **({"token_counts": counts} if packed else {})) as batch, mesh_of((2, 2)):
        inputs = rows if packed else tokens
        found = np.asarray(step(model, jax.device_put(inputs, P("data")) if sharded else inputs, batch))
    want = np.concatenate([expected[i, :n] for i, n in enumerate(counts)]) if packed else expected
    assert_close(found, want)


def test_verify_on_an_explicit_mesh(served):
    _, manager, _ = served

    @manager.jit
    def forward(model, tokens, batch):
        with jlora.use(batch):
            return model(tokens, sharding=P("data", None, None))

    with mesh_of((1, 1)):
        tokens = jax.device_put(np.random.default_rng(0).integers(0, 11, (4, 3)), P("data"))
        assert manager.verify(forward, tokens).error < 1e-5
