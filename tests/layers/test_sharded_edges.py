"""Models on a mesh: shardings from metadata, ranks and padding in parts, and calls that LoRA does not support."""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jlora
from jlora.errors import LoRAError
from jlora.layers.site import SlotRanks
from jlora.layers.wrap.apply import survey
from tests.layers.merging import (
    Target,
    assert_close,
    expected_rows,
    make_adapter,
    make_manager,
    merge,
    normal,
    run,
    serve,
)
from tests.layers.mesh_models import (
    LENGTH,
    NAMES,
    ONE,
    SMALL,
    SMALL_TARGETS,
    TWO,
    D,
    H,
    Small,
    mesh_of,
    placed,
    tokens_of,
)

pytestmark = pytest.mark.mesh


@functools.cache
def the_mesh() -> Mesh:
    return mesh_of(data=2, t=2)


TOKENS = tokens_of(4, LENGTH)


@jax.jit
def step(model, tokens, batch):
    with jlora.use(batch):
        return model(tokens)


def twins_of(model):
    return {"one": merge(model, SMALL_TARGETS, ONE), "two": merge(model, SMALL_TARGETS, TWO), None: nnx.clone(model)}


@pytest.fixture(scope="module")
def twins():
    return twins_of(Small())


def serving(mesh=None, cls=Small, specs=SMALL, **config):
    model = placed(cls(), mesh or the_mesh(), specs)
    return model, make_manager(model, [ONE, TWO], max_lora_rank=3, **{"data_axes": ["data"], **config})


def check(model, manager, twins, names=NAMES, tokens=TOKENS):
    with manager.prepare(names) as batch:
        assert_close(step(model, tokens, batch), expected_rows(twins, names, TOKENS))


def test_shardings_from_metadata():
    """Shardings come from `nnx.with_partitioning` under a mesh that is set, with arrays or shapes alone."""

    class Annotated(Small):
        def __init__(self):
            super().__init__()
            rngs, init = nnx.Rngs(0), nnx.initializers.lecun_normal()
            self.up = nnx.Linear(D, H, rngs=rngs, kernel_init=nnx.with_partitioning(init, (None, "t")))
            self.down = nnx.Linear(H, D, rngs=rngs, kernel_init=nnx.with_partitioning(init, ("t", None)))

    with jax.set_mesh(the_mesh()):
        model = Annotated()
        twins = twins_of(model)
        manager = make_manager(model, [ONE, TWO], max_lora_rank=3)
        assert model.up.jlora_b[...].sharding.spec == P(None, None, "t")
        assert model.down.jlora_a[...].sharding.spec == P(None, None, None, "t")
        check(model, manager, twins)
    with jax.set_mesh(mesh_of(AxisType.Explicit, data=2, t=2)):
        found = survey(nnx.eval_shape(Annotated), jlora.LoRAConfig(max_loras=1, max_lora_rank=2))
    spec = next(site.spec for site in found.modules if site.path == "up")
    assert spec.shardings[1].spec == P(None, None, "t")


def test_trained_slots_keep_their_layout(twins):
    """A training step returns slots with an equivalent layout, so the next write does not compile."""
    model, manager = serving(max_loras=1)
    with manager.prepare(["one"] * 4):
        _, _, slots, _ = nnx.split(model, SlotRanks, jlora.SlotParam, ...)
        nnx.update(model, jax.jit(lambda slots: jax.tree.map(lambda array: 2 * array, slots))(slots))
        found = manager.export_adapter("one")
    for name, module in ONE.modules.items():
        np.testing.assert_array_equal(found.modules[name].a, 2 * module.a)
    before = manager.stats().compilations
    check(model, manager, twins, ["two"] * 4)
    assert manager.stats().compilations == before
    assert {shard.data.shape for shard in model.up.jlora_b[...].addressable_shards} == {(1, 3, H // 2)}


# --- Axes of several types --------------------------------------------------------------------------------------------


class Written(Small):
    """A model with the sharding of sequences written out."""

    def __call__(self, tokens):
        x = self.embed(tokens, out_sharding=P("data", *(None,) * tokens.ndim))
        return self.head(x + self.down(jnp.tanh(self.up(x))))


def test_updates_from_explicit_arrays():
    mesh = mesh_of(AxisType.Explicit, data=2, t=2)
    _, manager = serving(mesh, Written, SMALL | {"embed": P()})
    new = {"base_model.model.up.lora_A.weight": jax.device_put(jnp.ones((2, D)), NamedSharding(mesh, P(None, "t")))}
    for context in (jax.set_mesh(mesh), contextlib.nullcontext()):
        with context:
            manager.activate_adapter("two")
            manager.update_adapter("two", new)
            manager.activate_adapter("two")
            assert (manager.export_adapter("two").modules["up"].a == 1).all()


# --- Calls without support --------------------------------------------------------------------------------------------


def test_an_equation_that_uses_the_kernel_otherwise():
    class Turned(nnx.Module):
        def __init__(self):
            self.proj = nnx.Einsum("BTK,KN->BTN", (8, 8), rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.proj(x, "BTN,KN->BTK")

    model = placed(Turned(), the_mesh(), {"proj": P("t")})
    manager = make_manager(model, [make_adapter("one", [Target("proj", 8, 8, "")], 2)])
    with manager.prepare(["one"] * 4) as batch, pytest.raises(LoRAError, match=r"^proj: "):
        step(model, normal(4, 2, 8), batch)


def mapped(model, local, axes, specs, out):
    graphdef, _ = nnx.split(model)

    def on_shard(state, tokens, batch):
        with jlora.use(batch, without=["*"]):
            return local(nnx.merge(graphdef, state), tokens)

    return jax.jit(
        jax.shard_map(
            on_shard,
            mesh=model.up.kernel[...].sharding.mesh,
            in_specs=(specs, P("data"), P("data")),
            out_specs=out,
            check_vma=False,
            axis_names=axes,
        )
    )


def test_a_lookup_inside_a_shard_map_over_the_vocabulary():
    model, manager = serving()
    specs = jax.tree.map(lambda array: array.sharding.spec, nnx.state(model))
    lookup = mapped(model, lambda model, tokens: model.embed(tokens), {"data", "t"}, specs, P("data"))
    with manager.prepare(NAMES) as batch, pytest.raises(LoRAError, match="embed: a lookup in a table whose rows are"):
        lookup(nnx.state(model), TOKENS, batch)


def test_a_shard_map_over_some_axes_of_a_kernel_raises():
    model, manager = serving(mesh_of(data=2, u=2, t=2), specs=SMALL | {"down": P(("u", "t"))})
    whole = mapped(model, lambda model, tokens: model(tokens), {"data", "u"}, P(), P("data"))
    with manager.prepare(NAMES) as batch, pytest.raises(LoRAError, match=r"down: .* 'u' and 't', .* over 'u' alone"):
        whole(nnx.state(model), TOKENS, batch)


# --- Ranks and padding ------------------------------------------------------------------------------------------------

PAIR_TARGETS = [Target("column", 16, 8, "column.kernel"), Target("row", 16, 8, "row.kernel")]
PAIR = {"column": P(None, "t"), "row": P("t")}


class Pair(nnx.Module):
    def __init__(self, **options):
        rngs = nnx.Rngs(0)
        self.column = nnx.Linear(16, 8, rngs=rngs, **options)
        self.row = nnx.Linear(16, 8, rngs=rngs, **options)

    def __call__(self, x):
        return {"column": self.column(x), "row": self.row(x)}


def test_ranks_of_several_blocks_in_several_shards():
    """Ranks have blocks of 16, and the last one overlaps. 42 ranks in 4 parts are 11 each with 2 of padding."""
    model = placed(Pair(), mesh_of(t=4), PAIR)
    adapters = [make_adapter(f"of {rank}", PAIR_TARGETS, rank) for rank in (42, 23, 16, 3, 33)]
    manager = make_manager(model, adapters, max_loras=1, max_lora_rank=42, fully_sharded=True)
    x = normal(2, 2, 16)
    for adapter in adapters:
        with manager.prepare([adapter.name, None]) as batch:
            found = serve(model, x, batch)
        twin = merge(Pair(), PAIR_TARGETS, adapter)
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
