"""DoRA in every kind of layer, on one device and on meshes, compared with merged weights of the adapter's norms."""

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

from tests.layers.merging import (
    Target,
    assert_close,
    expected_rows,
    in_int8,
    make_adapter,
    make_dora,
    make_manager,
    merge,
    normal,
    serve,
)
from tests.layers.mesh_models import (
    NAMES,
    SMALL,
    SMALL_TARGETS,
    Small,
    Zoo,
    expected,
    mesh_of,
    placed,
    source_of,
    tables_of,
    targets_of,
)
from tests.layers.test_sharded import check, inputs_of

pytestmark = pytest.mark.device


def with_biases(model):
    for i, (_, layer) in enumerate(nnx.iter_modules(model)):
        if getattr(layer, "bias", None) is not None:
            layer.bias.set_value(jax.device_put(normal(*layer.bias.shape, seed=i)))
    return model


def zoo_of():
    """A zoo whose padding adds nothing to real features, and whose copies of features are equal."""
    zoo = with_biases(Zoo())
    zoo.padded_in.kernel.set_value(zoo.padded_in.kernel[...].at[3::4].set(0))
    source = source_of(zoo.copied.output_blocks)
    zoo.copied.bias.set_value(zoo.copied.bias[...][np.array([source.index(feature) for feature in source])])
    return zoo


def adapters_of(zoo):
    every = [*targets_of(zoo), *tables_of(True)]
    some = [t for i, t in enumerate(every) if i % 3]
    return [
        make_dora("one", every, 6),
        make_adapter("two", [*some, *tables_of(False)], 2),
        make_dora("three", every, 5),
    ]


@pytest.mark.parametrize(
    ("axes", "fully_sharded", "dtype"),
    [
        ({}, False, None),
        pytest.param({}, False, "int8", marks=pytest.mark.slow),
        pytest.param({"u": 2, "t": 2}, True, None, marks=pytest.mark.mesh),
        pytest.param({"u": 2, "t": 2}, True, "int8", marks=pytest.mark.slow),
        pytest.param({"data": 2, "t": 4}, False, None, marks=pytest.mark.slow),
    ],
)
def test_every_kind_of_layer(axes, fully_sharded, dtype):
    """In int8, of the rounded factors with the magnitudes of the file."""
    zoo = placed(zoo_of(), mesh_of(**axes)) if axes else zoo_of()
    adapters = adapters_of(zoo_of())
    served = [in_int8(adapter) for adapter in adapters] if dtype else adapters
    config = {"fully_sharded": fully_sharded, "data_axes": [name for name in axes if name == "data"], "dtype": dtype}
    manager = make_manager(zoo, adapters, max_lora_rank=6, variants=["dora"], **config)
    manager.prepare(["three", "two", "one", None]).close()  # slots that held another adapter before
    manager.remove_adapter("one")
    manager.add_adapter(adapters[0])
    for names in (NAMES, ["two", "three", None, "one"]):
        want = expected(zoo_of(), {a.name: a for a in served}, tuple(names), inputs_of(4))
        with manager.prepare(names) as batch:
            check(serve(zoo, inputs_of(4), batch), want)


@pytest.mark.mesh
def test_explicit_axes():
    mesh = mesh_of(AxisType.Explicit, t=2)
    model, adapter = placed(with_biases(Small()), mesh, SMALL), make_dora("one", SMALL_TARGETS[1:], 2)
    manager = make_manager(model, [adapter], variants=["dora"])
    single = with_biases(Small())
    own = make_manager(single, [adapter], variants=["dora"])
    for each in (manager, own):
        each.pin_adapter("one")
    of_mesh, of_one = (nnx.to_flat_state(nnx.state(m)) for m in (model, single))
    held = {path: np.asarray(v[...]) for path, v in of_mesh if str(path[-1]).endswith("_dora")}
    want = {path: np.asarray(v[...]) for path, v in of_one if str(path[-1]).endswith("_dora")}
    assert len(held) == 4
    for path, values in want.items():
        np.testing.assert_allclose(held[path], values, rtol=1e-6)


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.proj = nnx.Linear(6, 6, bias_init=nnx.initializers.normal(), rngs=rngs)

    def __call__(self, x):
        return x + jax.numpy.tanh(self.proj(x))


class Stack(nnx.Module):
    def __init__(self):
        self.layers = nnx.vmap(Layer, in_axes=0, out_axes=0)(nnx.Rngs(0).split(3))

    def __call__(self, x):
        return nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)


def test_stacked_layers():
    targets = [Target(f"layers.{i}.proj", 6, 6, "layers.proj.kernel", at=(i,)) for i in range(3)]
    model, one, some = Stack(), make_dora("one", targets, 3), make_dora("two", targets[1:2], 2)
    twins = {a.name: merge(model, targets, a) for a in (one, some)} | {None: nnx.clone(model)}
    x = normal(4, 2, 6)
    manager = make_manager(model, [one, some, make_adapter("plain", targets[:1], 1)], max_loras=2, variants=["dora"])
    for names in (["one", None, "two", "one"], ["two", "one", None, None]):
        with manager.prepare(names) as batch:
            assert_close(serve(model, x, batch), expected_rows(twins, names, x), 2e-6)
