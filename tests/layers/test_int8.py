"""Slots of int8 serve the adapter rounded to int8, with the accuracy of float32."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.layers import test_sharded
from tests.layers.merging import (
    Target,
    assert_close,
    expected_rows,
    in_int8,
    make_adapter,
    make_manager,
    merge,
    normal,
    serve,
)
from tests.layers.mesh_models import NAMES, Zoo, adapters_of, expected, mesh_of, placed

X = normal(3, 2, 8)
ROWS = ["one", None, "two"]
SLICES = {"qkv": (12, 4, 4)}
WHOLE = [Target("up", 8, 12, "up.kernel"), Target("qkv", 12, 20, "qkv.kernel"), Target("down", 20, 3, "down.kernel")]
PARTS = [
    Target("up", 8, 12, "up.kernel"),
    Target("q", 12, 12, "qkv.kernel", at=(slice(None), slice(12))),
    Target("v", 12, 4, "qkv.kernel", at=(slice(None), slice(16, 20))),
]


class Model(nnx.Module):
    packed_modules = {"qkv": ("q", "k", "v")}

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.up = nnx.Linear(8, 12, rngs=rngs)
        self.qkv = nnx.Linear(12, 20, rngs=rngs)
        self.qkv.output_sizes = SLICES["qkv"]
        self.down = nnx.Linear(20, 3, rngs=rngs)

    def __call__(self, x):
        return self.down(jnp.tanh(self.qkv(jnp.tanh(self.up(x)))))


def twins_of(one, two):
    base = Model()
    return {
        None: base,
        "one": merge(base, WHOLE, in_int8(one, SLICES)),
        "two": merge(base, PARTS, in_int8(two)),
    }


@pytest.mark.parametrize("largest", [4, 20, 24])
def test_layers_and_slices_equal_the_rounded_factors(largest):
    """Of ranks in one block of 16, in two, and in two that overlap."""
    one, two = make_adapter("one", WHOLE, largest), make_adapter("two", PARTS, 3)
    manager = make_manager(Model(), [one, two], max_lora_rank=largest, dtype="int8")
    assert {info.dtype for info in manager.layers()} == {"int8"}
    with manager.prepare(["two", "one", None]):
        pass  # slots that held another adapter before
    with manager.prepare(ROWS) as batch:
        assert_close(serve(manager.model, X, batch), expected_rows(twins_of(one, two), ROWS, X))


MESHES = [({"u": 2, "t": 2}, {"fully_sharded": True}), ({"data": 2, "t": 4}, {"data_axes": ["data"]})]


@pytest.mark.mesh
@pytest.mark.parametrize(("axes", "config"), MESHES, ids=["fully sharded", "data and tensor"])
def test_every_kind_of_layer_on_a_mesh(axes, config):
    zoo = Zoo(4)
    adapters = {adapter.name: in_int8(adapter) for adapter in adapters_of(zoo)}
    want = expected(zoo, adapters, tuple(NAMES), test_sharded.inputs_of(4))
    model = placed(Zoo(4), mesh_of(**axes))
    manager = make_manager(model, adapters_of(zoo), max_lora_rank=6, dtype="int8", **config)
    with manager.prepare(NAMES) as batch:
        test_sharded.check(serve(model, test_sharded.inputs_of(4), batch), want)


def test_slots_take_about_half_the_bytes_of_bfloat16():
    def nbytes(dtype):
        model = nnx.Linear(1024, 2048, rngs=nnx.Rngs(0))
        (info,) = make_manager(nnx.Dict(layer=model), max_lora_rank=16, dtype=dtype).layers()
        arrays = [array for name, array in vars(model).items() if name in ("jlora_a", "jlora_b", "jlora_ranks")]
        assert sum(array[...].nbytes for array in arrays) == 3 * (info.slot_bytes - 4)  # the stamp
        return info.slot_bytes

    assert nbytes("int8") <= 0.52 * nbytes("bfloat16")


def test_tables_and_saved_heads_stay_in_floats():
    class Tower(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.embed, self.score = nnx.Embed(11, 8, rngs=rngs), nnx.Linear(8, 2, rngs=rngs)

        def __call__(self, tokens):
            return self.score(self.embed(tokens))

    model = make_manager(Tower(), dtype="int8", saved_heads={"score": 3}).model
    dtypes = {name: array.dtype for name, array in vars(model.score).items() if name.endswith(("_a", "_b"))}
    assert dtypes == {"jlora_a": "int8", "jlora_b": "int8", "jlora_head_a": "float32", "jlora_head_b": "float32"}
    assert model.embed.jlora_a.dtype == model.embed.jlora_b.dtype == np.float32
