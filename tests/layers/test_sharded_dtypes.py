"""Dtypes on a mesh, compared with the same wrapped layer on one device."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jlora
from tests.layers.merging import Target, assert_close, make_adapter, make_manager, merge, normal, run, serve
from tests.layers.mesh_models import mesh_of, placed

pytestmark = pytest.mark.mesh


@functools.cache
def the_mesh() -> Mesh:
    return mesh_of(t=4)


TARGETS = [Target("column", 16, 8, "column.kernel"), Target("row", 16, 8, "row.kernel")]
SPECS = {"column": P(None, "t"), "row": P("t")}


class Pair(nnx.Module):
    def __init__(self, **options):
        rngs = nnx.Rngs(0)
        self.column = nnx.Linear(16, 8, rngs=rngs, **options)
        self.row = nnx.Linear(16, 8, rngs=rngs, **options)

    def __call__(self, x):
        return {"column": self.column(x), "row": self.row(x)}


class Masked(nnx.Linear):
    """A layer that ignores every fourth input, which is padding with any value."""

    def __call__(self, x):
        return super().__call__(jnp.where(np.arange(16)[None, None] % 4 != 3, x, 0))


jlora.register_layer(Masked, lambda layer: jlora.LinearSpec(16, 8, in_index=[i for i in range(16) if i % 4 != 3]))


def test_ranks_of_several_blocks_in_several_shards():
    """Ranks have blocks of 16, and the last one overlaps. 42 ranks in 4 parts are 11 each with 2 of padding."""
    model = placed(Pair(), the_mesh(), SPECS)
    adapters = [make_adapter(f"of {rank}", TARGETS, rank) for rank in (42, 23, 16, 3, 33)]
    manager = make_manager(model, adapters, max_loras=1, max_lora_rank=42, fully_sharded=True)
    x = normal(2, 2, 16)
    for adapter in adapters:
        with manager.prepare([adapter.name, None]) as batch:
            found = serve(model, x, batch)
        twin = merge(Pair(), TARGETS, adapter)
        for name, want in run(twin, x).items():
            assert_close(found[name][0], want[0], 1e-5)
        for name, module in manager.export_adapter(adapter.name).modules.items():
            assert module.a.tobytes() == adapter.modules[name].a.tobytes()


class Padding(nnx.Linear):
    """A layer with 5 of 16 outputs as padding: all of the last of four shards, and one of another shard."""


jlora.register_layer(Padding, lambda layer: jlora.LinearSpec(16, 16, real_vocab=11))


def test_padding_of_outputs_keeps_the_bits_of_the_base():
    """Padding keeps its bits even if the sums of an adapter overflow or adding zero would change a sign."""

    class Model(nnx.Module):
        def __init__(self):
            self.column = Padding(16, 16, rngs=nnx.Rngs(0))
            self.column.kernel[...] = self.column.kernel[...].at[:, 11:].set(-0.0)

        def __call__(self, x):
            return self.column(x)

    adapter = make_adapter("one", [Target("column", 16, 11, "")], 3)
    module = adapter.modules["column"]
    huge = dataclasses.replace(module, a=np.full_like(module.a, 3e38))
    adapters = [adapter, dataclasses.replace(adapter, name="huge", modules={"column": huge})]
    model = placed(Model(), mesh_of(t=4), {"column": P(None, "t")})
    x = np.abs(normal(3, 2, 16))
    base = np.asarray(run(model, x))
    with make_manager(model, adapters, max_loras=2, fully_sharded=True).prepare(["one", "huge", None]) as batch:
        found = np.asarray(serve(model, x, batch))
    assert found[..., 11:].tobytes() == base[..., 11:].tobytes()
    assert not np.isfinite(found[1, :, :11]).all()
    assert (found[0, :, :11] != base[0, :, :11]).all()
