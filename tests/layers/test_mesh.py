"""Models on a mesh, compared with merged weights: layouts of rows, transformations, shardings, ranks and padding."""

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
from jlora.layers.site import SlotParam, SlotRanks
from jlora.layers.wrap.apply import survey
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
    run,
    serve,
)  # fmt: skip
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
    Written,
    mesh_of,
    placed,
    tokens_of,
)  # fmt: skip
from tests.records import slot_names

pytestmark = [pytest.mark.device, pytest.mark.mesh]


@functools.cache
def the_mesh() -> Mesh:
    return mesh_of(data=2, t=2)


TOKENS = tokens_of(4, LENGTH)


def forward(model, tokens, batch):
    with jlora.use(batch):
        return model(tokens)


step = jax.jit(forward)


def twins_of(model):
    return {"one": merge(model, SMALL_TARGETS, ONE), "two": merge(model, SMALL_TARGETS, TWO), None: nnx.clone(model)}


@pytest.fixture(scope="module")
def twins():
    return twins_of(Small())


@pytest.fixture(scope="module")
def want(twins):
    return expected_rows(twins, NAMES, TOKENS)


def serving(mesh=None, adapters=(ONE, TWO), cls=Small, specs=SMALL, **config):
    model = placed(cls(), mesh or the_mesh(), specs)
    return model, make_manager(model, adapters, max_lora_rank=3, **{"data_axes": ["data"], **config})


@pytest.fixture(scope="module")
def served():
    return serving()


# --- Layouts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "split"),
    [
        (NAMES, True),
        (["two", "one", None], False),  # the data axis does not divide them
    ],
)
def test_sequences(served, twins, names, split):
    model, manager = served
    tokens = TOKENS[: len(names)]
    placed_tokens = jax.device_put(tokens, NamedSharding(the_mesh(), P("data"))) if split else tokens
    with manager.prepare(names) as batch:
        assert_close(step(model, placed_tokens, batch), expected_rows(twins, names, tokens))


def test_packed_rows(served, want):
    model, manager = served
    counts = [3, 0, 2, 3]
    rows = np.zeros(9, np.int32)  # the data axis does not divide 9
    rows[:8] = np.concatenate([TOKENS[i, :n] for i, n in enumerate(counts)])
    with manager.prepare(NAMES, counts, 9) as batch:
        found = np.asarray(step(model, rows, batch))
    assert_close(found[:8], np.concatenate([want[i, :n] for i, n in enumerate(counts)]))
    assert_close(found[8:], np.asarray(run(Small(), rows[8:])))


def test_rows_without_an_adapter_are_the_base(served):
    """Rows keep the bits of the base if the product is not replaced, and with `use(None)` everywhere."""
    model, manager = served
    bare = placed(Small(), the_mesh(), SMALL)

    @jax.jit
    def columns(model, tokens):
        return model.up(model.embed(tokens))

    @jax.jit
    def served_columns(model, tokens, batch):
        with jlora.use(batch, without=["*"]):
            return model.up(model.embed(tokens))

    with manager.prepare(NAMES) as batch:
        found = np.asarray(served_columns(model, TOKENS, batch))
    base = np.asarray(columns(bare, TOKENS))
    assert found[1].tobytes() == base[1].tobytes()
    assert found[0].tobytes() != base[0].tobytes()
    assert np.asarray(step(model, TOKENS, None)).tobytes() == np.asarray(run(bare, TOKENS)).tobytes()


# --- The user's own shard_map -----------------------------------------------------------------------------------------


def test_inside_a_shard_map_over_the_sequences(served, want):
    """The mesh has one more axis, which the layers map themselves."""
    model, manager = served
    over_data = {"in_specs": (P(), P("data"), P("data")), "out_specs": P("data"), "axis_names": {"data"}}
    mapped = jax.jit(jax.shard_map(forward, mesh=the_mesh(), **over_data, check_vma=False))
    with manager.prepare(NAMES) as batch:
        assert_close(mapped(model, TOKENS, batch), want)


@pytest.mark.parametrize(
    ("dora", "dtype"), [(False, None), (True, None), (True, "int8")], ids=["", "dora", "dora in int8"]
)
def test_inside_a_shard_map_over_all_axes(twins, dora, dtype):
    """The user sums the outputs of row-parallel layers, and each part of the sum contains its LoRA."""
    two = make_dora("two", SMALL_TARGETS[1:], 2) if dora else TWO
    served = in_int8(two) if dtype else two
    twins = {"two": merge(Small(), SMALL_TARGETS, served), None: twins[None]}
    config = {"exclude_modules": ["embed"], "variants": ["dora"] * dora, "dtype": dtype}
    model, manager = serving(adapters=[two], fully_sharded=True, **config)
    model.up.bias.set_value(jax.device_put(model.up.bias[...], NamedSharding(the_mesh(), P("t"))))
    specs = jax.tree.map(lambda array: array.sharding.spec, nnx.state(model))
    graphdef, _ = nnx.split(model)

    def local(state, x, batch):
        model = nnx.merge(graphdef, state)
        bias, model.down.bias[...] = model.down.bias[...], jnp.zeros_like(model.down.bias[...])
        with jlora.use(batch):
            x = x + jax.lax.psum(model.down(jnp.tanh(model.up(x))), "t") + bias[None, None]
            return model.head(x)

    mapped = jax.shard_map(
        local, mesh=the_mesh(), in_specs=(specs, P("data"), P("data")), out_specs=P("data", None, "t"), check_vma=False
    )
    x = np.asarray(Small().embed(TOKENS))
    names = ["two", None, "two", "two"]

    @jax.jit
    def plain(model, x):
        return model.head(x + model.down(jnp.tanh(model.up(x))))

    with manager.prepare(names) as batch:
        found = jax.jit(mapped)(nnx.state(model), x, batch)
    assert_close(found, expected_rows(twins, names, x, plain))


# --- Transformations --------------------------------------------------------------------------------------------------


def test_gradients_are_those_of_one_device(served):
    """Gradients of every slot array through `nnx.split`, for A and B, split or not."""
    single = Small()
    adapters = {"mesh": served, "single": (single, make_manager(single, [ONE, TWO], max_lora_rank=3))}
    grads = {}
    for where, (model, manager) in adapters.items():
        graphdef, ranks, slots, rest = nnx.split(model, SlotRanks, SlotParam, ...)

        @jax.jit
        def gradient(slots, ranks, rest, batch, graphdef=graphdef):
            def loss(slots):
                return (forward(nnx.merge(graphdef, ranks, slots, rest), TOKENS, batch) ** 2).sum()

            return jax.grad(loss)(slots)

        with manager.prepare(NAMES) as batch:
            places = {name: slot for slot, name in enumerate(slot_names(manager))}
            _, ranks, slots, rest = nnx.split(model, SlotRanks, SlotParam, ...)
            found = nnx.to_flat_state(gradient(slots, ranks, rest, batch))
        order = [places["one"], places["two"]]
        grads[where] = {path: np.asarray(value[...])[order] for path, value in found}
    assert grads["mesh"].keys() == grads["single"].keys()
    for path, value in grads["single"].items():
        assert np.abs(value).max() > 0 or "jlora_attend" in str(path)  # never called
        assert_close(grads["mesh"][path], value, 1e-5)


class Stack(nnx.Module):
    """Stacked layers for `nnx.scan`."""

    def __init__(self, layers=3):
        self.layers = nnx.vmap(lambda rngs: nnx.Linear(D, D, rngs=rngs))(nnx.Rngs(0).split(layers))

    def __call__(self, x):
        @nnx.scan
        def body(x, layer):
            return x + jnp.tanh(layer(x)), None

        return body(x, self.layers)[0]


COLUMNS, ROWS = P(None, None, "t"), P(None, "t")


@pytest.mark.parametrize(("spec", "fully"), [(COLUMNS, True), pytest.param(ROWS, False, marks=pytest.mark.slow)])
def test_a_stack_of_layers(spec, fully):
    targets = [Target(f"layers.{i}", D, D, "layers.kernel", at=(i,)) for i in range(3)]
    adapters = [make_adapter("one", targets, 3), make_adapter("two", targets[1:2], 2)]
    twins = {a.name: merge(Stack(), targets, a) for a in adapters} | {None: Stack()}
    model = placed(Stack(), the_mesh(), {"layers": spec})
    manager = make_manager(model, adapters, max_lora_rank=3, data_axes=["data"], fully_sharded=fully)
    x = np.random.default_rng(0).normal(size=(4, 2, D)).astype(np.float32)
    with manager.prepare(NAMES) as batch:
        assert_close(step(model, x, batch), expected_rows(twins, NAMES, x))
    assert_close(manager.export_adapter("one").modules["layers.2"].b, adapters[0].modules["layers.2"].b, 1e-6)


# --- Explicit axes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fully", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_explicit_axes(want, fully):
    mesh = mesh_of(AxisType.Explicit, data=2, t=2)
    with jax.set_mesh(mesh):
        model = placed(Written(), mesh, SMALL | {"embed": P()})
    config = {"data_axes": ["data"], "fully_sharded": fully, "max_lora_rank": 3}
    manager = make_manager(model, [ONE, TWO], **config)
    tokens = jax.device_put(TOKENS, NamedSharding(mesh, P("data")))
    with jax.set_mesh(mesh), manager.prepare(NAMES) as batch:
        assert_close(step(model, tokens, batch), want)
    found = manager.export_adapter("one")
    for name, module in ONE.modules.items():
        assert_close(found.modules[name].a, module.a, 1e-6)
        assert_close(found.modules[name].b, module.b, 1e-6)


def test_updates_from_explicit_arrays():
    mesh = mesh_of(AxisType.Explicit, data=2, t=2)
    _, manager = serving(mesh, cls=Written, specs=SMALL | {"embed": P()})
    new = {"base_model.model.up.lora_A.weight": jax.device_put(jnp.ones((2, D)), NamedSharding(mesh, P(None, "t")))}
    for context in (jax.set_mesh(mesh), contextlib.nullcontext()):
        with context:
            manager.pin_adapter("two")
            manager.update_adapter("two", new)
            manager.pin_adapter("two")
            assert (manager.export_adapter("two").modules["up"].a == 1).all()


# --- Shardings --------------------------------------------------------------------------------------------------------


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
        with manager.prepare(NAMES) as batch:
            assert_close(step(model, TOKENS, batch), expected_rows(twins, NAMES, TOKENS))
    with jax.set_mesh(mesh_of(AxisType.Explicit, data=2, t=2)):
        found = survey(nnx.eval_shape(Annotated), jlora.LoRAConfig(max_loras=1, max_lora_rank=2))
    spec = next(site.spec for site in found.modules if site.path == "up")
    assert spec.arrays["b"].sharding.spec == P(None, None, "t")


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
    with manager.prepare(["two"] * 4) as batch:
        assert_close(step(model, TOKENS, batch), expected_rows(twins, ["two"] * 4, TOKENS))
    assert manager.stats().compilations == before
    assert {shard.data.shape for shard in model.up.jlora_b[...].addressable_shards} == {(1, 3, H // 2)}


# --- Calls without support --------------------------------------------------------------------------------------------


def mapped(model, local, axes, specs):
    """Return a function of the model's state, its inputs and a batch that runs `local` under a shard_map."""
    graphdef, _ = nnx.split(model)

    def on_shard(state, tokens, batch):
        with jlora.use(batch, without=["*"]):
            return local(nnx.merge(graphdef, state), tokens)

    mesh, ins = model.up.kernel[...].sharding.mesh, (specs, P("data"), P("data"))
    return jax.jit(
        jax.shard_map(on_shard, mesh=mesh, in_specs=ins, out_specs=P("data"), check_vma=False, axis_names=axes)
    )


def test_a_lookup_inside_a_shard_map_over_the_vocabulary():
    model, manager = serving()
    specs = jax.tree.map(lambda array: array.sharding.spec, nnx.state(model))
    lookup = mapped(model, lambda model, tokens: model.embed(tokens), {"data", "t"}, specs)
    with manager.prepare(NAMES) as batch, pytest.raises(LoRAError, match="embed: a lookup in a table whose rows are"):
        lookup(nnx.state(model), TOKENS, batch)


def test_a_shard_map_over_some_axes_of_a_kernel_raises():
    model, manager = serving(mesh_of(data=2, u=2, t=2), specs=SMALL | {"down": P(("u", "t"))})
    whole = mapped(model, lambda model, tokens: model(tokens), {"data", "u"}, P())
    with manager.prepare(NAMES) as batch, pytest.raises(LoRAError, match=r"down: .* 'u' and 't', .* over 'u' alone"):
        whole(nnx.state(model), TOKENS, batch)


# --- Ranks and padding ------------------------------------------------------------------------------------------------

PAIR_TARGETS = [Target("column", 16, 8, "column.kernel"), Target("row", 16, 8, "row.kernel")]
PAIR = {"column": P(None, "t"), "row": P("t")}


class Pair(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.column, self.row = nnx.Linear(16, 8, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)

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
