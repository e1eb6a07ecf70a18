"""Models in the style of other codebases, compared with merged weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jlora.errors import AdapterMismatchError, LoRAError
from jlora.layers.site import SlotParam
from tests.layers.merging import (
    Target,
    assert_close,
    check_against_merged,
    make_adapter,
    make_manager,
    normal,
    rounding_of,
    serve,
)

pytestmark = pytest.mark.device


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
    [
        (0, True),
        (nnx.StateAxes({nnx.Param: 0, SlotParam: 0, ...: None}), False),
    ],
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


# --- Mixed dtypes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("param", "compute", "slots"),
    [("bfloat16", "bfloat16", "float32"), ("float32", "float32", "bfloat16"), ("bfloat16", "float32", None)],
)
def test_slot_dtype_apart_from_the_models(param, compute, slots):
    """The output is the base plus the float64 delta of the slots, rounded once to the dtype of the base."""

    class Model(nnx.Module):
        def __init__(self):
            self.proj = nnx.Linear(6, 5, param_dtype=jnp.dtype(param), dtype=jnp.dtype(compute), rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.proj(x)

    model, x = Model(), jnp.asarray(normal(3, 2, 6), compute)
    base = np.asarray(jax.jit(lambda model, x: model(x))(model, x))
    assert base.dtype == compute
    adapter = make_adapter("one", [Target("proj", 6, 5, "")], 3)
    manager = make_manager(model, [adapter], dtype=slots)
    with manager.prepare(["one", None, "one"]) as batch:
        found = np.asarray(serve(model, x, batch))
    held = jnp.dtype(slots or compute)
    assert model.proj.jlora_a.dtype == model.proj.jlora_b.dtype == held
    module = adapter.modules["proj"]
    a, b = (np.asarray(jnp.asarray(factor, held), np.float64) for factor in (module.a, module.b))
    x_seen = np.asarray(x.astype(held), np.float64)
    expected = base.astype(np.float64)
    expected[[0, 2]] += module.scaling * (x_seen @ a.T @ b.T)[[0, 2]]
    assert found.dtype == base.dtype
    np.testing.assert_array_equal(found[1], base[1])
    assert_close(found, expected, tolerance=2**-8 if compute == "bfloat16" else rounding_of(held))
    assert np.abs(found - base).max() > 0.1
