"""Row groups: images and other items, each of which belongs to one sequence of the batch."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jlora
from jlora import Items
from tests.layers.merging import assert_close, expected_rows, make_adapter, make_manager, merge, normal, serve
from tests.layers.vision_model import HIDDEN, LENGTH, PATCH, ROW_GROUPS, TARGETS, VOCAB, VisionModel, image_inputs

NAMES = ["one", None, "two"]
ONE, TWO = make_adapter("one", TARGETS, 3), make_adapter("two", TARGETS, 2)


class World:
    """A wrapped model with two adapters, and copies with merged weights."""

    def __init__(self, **config):
        self.model = VisionModel()
        self.twins = {None: nnx.clone(self.model)}
        self.twins |= {adapter.name: merge(self.model, TARGETS, adapter) for adapter in (ONE, TWO)}
        self.manager = make_manager(self.model, [ONE, TWO], row_groups=ROW_GROUPS, **config)

    def expected(self, names, inputs):
        return expected_rows(self.twins, names, inputs)


@pytest.fixture(scope="module")
def world():
    return World()


IMAGES = {
    "0, 1 and 3 images": ([4, 8, 4, 12], [2, 1, 2, 2]),
    "none": ([], []),
    "one without an adapter": ([8, 4], [1, None]),
}


@pytest.mark.parametrize("case", IMAGES)
def test_packed_images_take_the_adapter_of_their_sequence(world, case):
    images = image_inputs(*IMAGES[case], pad=40)
    with world.manager.prepare(NAMES, items=images.items) as batch:
        found = serve(world.model, images.inputs, batch)
    assert_close(found, world.expected(NAMES, images.inputs), 1e-5)


def test_other_options():
    world = World(batch_invariant=True, activated=True)
    images = image_inputs([4, 8, 4, 12], [2, 1, 2, 2], pad=32)
    with world.manager.prepare(NAMES, items=images.items, active_from=[0] * 3, length=LENGTH) as batch:
        found = serve(world.model, images.inputs, batch)
    assert_close(found, world.expected(NAMES, images.inputs), 1e-5)


def test_factors_and_mixtures():
    world = World(max_adapters_per_sequence=2)
    images = image_inputs([8, 8, 8], [2, 0, 2])

    def scaled(adapter, factor):
        modules = {name: replace(m, scaling=m.scaling * factor) for name, m in adapter.modules.items()}
        return replace(adapter, modules=modules)

    part = merge(world.twins[None], TARGETS, scaled(ONE, 0.25))
    mixed = merge(merge(world.twins[None], TARGETS, scaled(ONE, 0.5)), TARGETS, scaled(TWO, 2))
    twins = {"part": part, "mixed": mixed, None: world.twins[None]}
    names = [jlora.Mix({"one": 0.25}), None, jlora.Mix({"one": 0.5, "two": 2})]
    with world.manager.prepare(names, items=images.items) as batch:
        found = serve(world.model, images.inputs, batch)
    assert_close(found, expected_rows(twins, ["part", None, "mixed"], images.inputs), 1e-5)


@pytest.mark.parametrize("flattened", [True, False])
def test_on_a_mesh(flattened):
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "t"))
    model = VisionModel()
    twins = {None: nnx.clone(model), **{a.name: merge(model, TARGETS, a) for a in (ONE, TWO)}}
    specs = {"visual.qkv": P(None, "t"), "visual.merger.fc": P("t"), "text.q": P("t"), "text.mlp": P(None, "t")}
    for path, value in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        spec = specs.get(".".join(path[:-1]), P()) if path[-1] == "kernel" else P()
        value.set_value(jax.device_put(value.get_value(), NamedSharding(mesh, spec)))
    nnx.update(model, nnx.state(model))
    manager = make_manager(model, [ONE, TWO], row_groups=ROW_GROUPS, data_axes=("data",))
    images = image_inputs([8, 8, 8, 8], [2, 0, 2, 3], flattened=flattened, sequences=4)
    names = [*NAMES, "one"]
    with manager.prepare(names, items=images.items) as batch:
        found = serve(model, images.inputs, batch)
    assert_close(found, expected_rows(twins, names, images.inputs), 1e-5)


def test_a_shard_takes_its_own_items(world):
    """Inside a user's shard_map over sequences and items, as packed rows do."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("d",))

    @jax.jit
    def step(model, x, batch):
        def local(x, batch):
            with jlora.use(batch, without=["*"]):
                return model.visual.embed(x)

        return jax.shard_map(local, mesh=mesh, in_specs=(P("d"), P("d")), out_specs=P("d"))(x, batch)

    x, owners, names = normal(4, 2, PATCH), [2, None, 0, 1], ["one", None, "two", "two"]
    with world.manager.prepare(names, items={"images": Items(owners, [2] * 4)}) as batch:
        found = step(world.model, x.reshape(8, PATCH), batch)
    twins = [world.twins[None if owner is None else names[owner]] for owner in owners]
    expected = np.stack([twin.visual.embed(x[i]) for i, twin in enumerate(twins)])
    assert_close(np.asarray(found).reshape(expected.shape), expected, 1e-5)


# --- steps of text alone --------------------------------------------------------------------------------------------


def text_inputs(length: int = LENGTH):
    tokens = np.random.default_rng(1).integers(0, VOCAB, (3, length))
    return {"patches": None, "image": None, "tokens": tokens, "places": np.full((3, length), -1)}


@pytest.mark.parametrize("without", [["images", "merged"], ["visual"]])
def test_a_step_of_text_alone_leaves_the_groups_out(world, without):
    @jax.jit
    def step(model, inputs, batch):
        with jlora.use(batch, without=without):
            return model(inputs)

    inputs = text_inputs()
    with world.manager.prepare(NAMES) as batch:
        assert_close(step(world.model, inputs, batch), world.expected(NAMES, inputs), 1e-5)


def test_a_layer_whose_group_the_batch_lacks_raises(world):
    images = image_inputs([8, 8, 8], [0, 1, 2], flattened=False)

    message = r"(?s)visual\.embed: .*row group 'images'.*items=.*without=\['images'\]"
    with world.manager.prepare(NAMES) as batch, pytest.raises(jlora.LoRAError, match=message):
        serve(world.model, images.inputs, batch)


def test_a_batch_without_groups_holds_no_more_arrays(world):
    plain = make_manager(VisionModel(), [ONE, TWO])
    with world.manager.prepare(NAMES) as batch, plain.prepare(NAMES) as other:
        assert [leaf.shape for leaf in jax.tree.leaves(batch)] == [leaf.shape for leaf in jax.tree.leaves(other)]


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("unchecked_calls")
@pytest.mark.parametrize(
    ("items", "message"),
    [
        ({"pictures": Items([0])}, r"'pictures', and .* of this manager are 'images', 'merged'.*row_groups"),
        (["images"], "items maps row groups to jlora.Items, got list"),
        ({"images": [0]}, r"items\['images'\] must be jlora.Items\(owners\), got list"),
        ({"images": Items([0, 3])}, r"item 1 to sequence 3, and the batch has 3 sequences; give 0 to 2, or None"),
    ],
)
def test_items_that_do_not_fit_the_batch_are_refused(world, items, message):
    with pytest.raises(jlora.LoRAUsageError, match=message):
        world.manager.prepare(NAMES, items=items)
    with pytest.raises(jlora.LoRAUsageError, match=message):
        world.manager.verify(serve, None, jlora.BatchShape(3, items=items))


@pytest.mark.usefixtures("unchecked_calls")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"owners": [0, -1]}, r"owners are sequences, from 0 on, or None, got \[0, -1\]"),
        ({"owners": ["one"]}, r"owners must be integers or None, got \['one'\]"),
        ({"owners": [0, 0, 2], "counts": [4, 4]}, r"counts must be one number.* each of the 3 owners"),
        ({"owners": [0, 0, 2], "counts": [4, 4, 4], "pad_to": 8}, r"pad_to is 8, and there are 12 rows"),
        ({"owners": [0, 0, 2], "pad_to": 2}, "pad_to is 2, and there are 3 items"),
        ({"owners": [0], "pad_to": 2.5}, "pad_to must be integers, got float"),
    ],
)
def test_items_that_disagree_are_refused(arguments, message):
    with pytest.raises(jlora.LoRAUsageError, match=f"Items: {message}"):
        Items(**arguments)


def test_items_of_equal_values_are_equal():
    """So that a batch of equal items takes its arrays from the cache."""
    assert len({Items([0, 2], [4, 4]), Items((0, 2), (4, 4), 8), Items(owners=range(0, 3, 2), counts=[4, 4])}) == 1


@pytest.mark.usefixtures("unchecked_calls")
@pytest.mark.parametrize(
    ("row_groups", "message"),
    [
        ({"vision": "images"}, r"row_groups \['vision'\] match no layer of VisionModel"),
        (["visual"], "row_groups maps names"),
    ],
)
def test_declarations_that_fit_no_layer_are_refused(row_groups, message):
    model = VisionModel()
    with pytest.raises(jlora.LoRAUsageError, match=message):
        make_manager(model, row_groups=row_groups)
    make_manager(model)  # the model is as it was


@pytest.mark.parametrize(
    ("flat", "expected"),
    [(True, r"\[32, features\], flattened"), (False, r"\[3, \.\.\., features\], one entry an item")],
)
def test_rows_of_another_number_are_refused(flat, expected):
    """The merger's rows are fewer than the patches, so it is a group of its own."""
    model = VisionModel()
    manager = make_manager(model, [ONE], row_groups={"visual": "images"})
    images = image_inputs([8, 8, 8], [0, 1, 2], pad=32 if flat else None, flattened=flat)
    items = {"images": images.items["images"]}
    if not flat:
        images.inputs["patches"] = images.inputs["patches"][:2]
        images.inputs["image"] = images.inputs["image"][:2]
    message = rf"^visual\.[a-z.]*: its rows .* its row group 'images' in this batch: expected {expected}"
    with manager.prepare(["one", None, None], items=items) as batch, pytest.raises(jlora.LoRAError, match=message):
        serve(model, images.inputs, batch)


def test_a_row_map_around_a_layer_of_a_group_is_refused(world):
    @jax.jit
    def tower(model, patches, source, batch):
        with jlora.use(batch, without=["*"]), jlora.rows(jlora.RowMap(source)):
            with jlora.rows(None):
                model.visual.embed(patches)
            return model.visual.embed(patches)

    with (
        world.manager.prepare(NAMES, items={"images": Items([0, 0, 2])}) as batch,
        pytest.raises(jlora.LoRAUsageError, match=r"visual\.embed: .*'images', and a jlora\.rows map is open"),
    ):
        tower(world.model, normal(3, PATCH), jnp.arange(3), batch)


def test_images_of_activated_adapters_are_refused():
    manager = make_manager(VisionModel(), [ONE], row_groups=ROW_GROUPS, activated=True)
    text = [target for target in TARGETS if target.name.startswith("text") and target.kind == "linear"]
    manager.add_adapter(replace(make_adapter("later", text, 2), invocation_tokens=(3, 4)))
    with pytest.raises(
        jlora.LoRAUsageError, match=r"item 1 of group 'images' belongs to sequence 1, which has an aLoRA"
    ):
        manager.prepare(["one", "later"], items={"images": Items([0, 1])}, active_from=[0, 0], length=LENGTH)
    with pytest.raises(jlora.LoRAUsageError, match=r"belongs to sequence 1, whose adapter is active from row 2 on"):
        manager.prepare(["one", "later"], items={"images": Items([0, 1])}, active_from=[0, 2], length=LENGTH)
    manager.prepare(["one", "later"], items={"images": Items([0, None])}, active_from=[0, 2], length=LENGTH).close()


def test_activation_of_a_batch_with_images():
    """Sequences with images are active from row 0 on, whenever the first rows are given."""
    manager = make_manager(VisionModel(), [ONE], row_groups=ROW_GROUPS, activated=True)
    with manager.prepare(["one", None, "one"], items={"images": Items([0, None])}) as batch:
        batch.activate([0, 2, 2], length=LENGTH)
        for first in ([1, 0, 0], jnp.array([1, 0, 0])):
            with pytest.raises(jlora.LoRAUsageError, match=r"first_rows: item 0 .* active from row 1 on"):
                batch.activate(first, length=LENGTH)
        for step in (
            lambda batch: batch.activate(jnp.zeros_like(batch.slots), length=LENGTH),
            lambda batch: batch.activate([0, 0, 0], length=LENGTH),
        ):
            with pytest.raises(jlora.LoRAUsageError, match=r"the row groups \['images'\].*outside of it"):
                jax.jit(step)(batch)


def test_cache_keys_count_the_items_of_a_sequence(world):
    def keys(**owners):
        with world.manager.prepare(NAMES, items={group: Items(own) for group, own in owners.items()}) as batch:
            return batch.cache_keys

    owned, of_none = keys(images=[0, 2, 2]), keys(images=[None, 2, None])
    assert owned[0] != of_none[0]
    assert owned[0].items == (("images", 1),)
    assert owned[1] is of_none[1] is None  # the base model
    assert owned[2] != of_none[2]
    assert keys(images=[None, None]) == keys()
    assert keys(images=[0], merged=[0])[0] != keys(images=[0])[0]


# --- undeclared layers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("declared", ["images", "sequences"])
def test_as_many_images_as_sequences_are_what_their_layers_are_declared_to_see(declared):
    model = VisionModel()
    twins = {None: nnx.clone(model), **{a.name: merge(model, TARGETS, a) for a in (ONE, TWO)}}
    manager = make_manager(model, [ONE, TWO], row_groups={"visual": declared})
    owners = [0, 1, 2] if declared == "sequences" else [2, 2, 0]
    images = image_inputs([8, 8, 8], owners, flattened=False)
    items = {"images": Items(owners)} if declared == "images" else {}
    with manager.prepare(NAMES, items=items) as batch:
        found = serve(model, images.inputs, batch)
    assert_close(found, expected_rows(twins, NAMES, images.inputs), 1e-5)


def linear(rngs):
    return nnx.Linear(HIDDEN, HIDDEN, use_bias=False, rngs=rngs)


class Attention(nnx.Module):
    def __init__(self, rngs):
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (linear(rngs) for _ in range(4))

    def __call__(self, x, of):
        scores = self.q_proj(x) @ jnp.swapaxes(self.k_proj(of), 1, 2)
        return x + self.out_proj(jax.nn.softmax(scores, axis=-1) @ self.v_proj(of))


class DecoderLayer(nnx.Module):
    def __init__(self, rngs):
        self.self_attn, self.encoder_attn, self.fc1 = Attention(rngs), Attention(rngs), linear(rngs)

    def __call__(self, x, encoded):
        return self.fc1(self.encoder_attn(self.self_attn(x, x), encoded))


class Whisper(nnx.Module):
    """Frames [B, S, HIDDEN] and tokens [B, T]: an encoder, and a decoder with cross-attention."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.encoder = nnx.Dict(layers=nnx.List([Attention(rngs) for _ in range(2)]))
        layers = nnx.List([DecoderLayer(rngs) for _ in range(2)])
        self.decoder = nnx.Dict(embed_tokens=nnx.Embed(VOCAB, HIDDEN, rngs=rngs), layers=layers)

    def __call__(self, inputs):
        x, tokens = inputs
        for layer in self.encoder.layers:
            x = layer(x, x)
        y = self.decoder.embed_tokens(tokens)
        for layer in self.decoder.layers:
            y = layer(y, x)
        return y


def test_error_lists_the_layers_of_each_length():
    inputs = normal(3, 5, HIDDEN), np.arange(12).reshape(3, 4) % VOCAB
    model = Whisper()
    manager = make_manager(model, [])
    with manager.prepare([None] * 3) as batch, pytest.raises(jlora.LoRAError, match="of several L") as caught:
        serve(model, inputs, batch)
    found = {row.partition(": ")[0]: row for row in str(caught.value).splitlines() if row.startswith("  L = ")}
    assert "encoder.layers.*.q_proj" in found["  L = 5"]
    assert "decoder.layers.*.encoder_attn.k_proj" in found["  L = 5"]
    assert "decoder.embed_tokens" in found["  L = 4"]
    assert 'row_groups={"NAME": "sequences"}' in str(caught.value)
    manager.unwrap()
    manager = make_manager(model, [], row_groups={"decoder": "sequences"})
    with manager.prepare([None] * 3) as batch:
        serve(model, inputs, batch)


# --- verify ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_verify_takes_items():
    model = VisionModel()
    manager = make_manager(model, row_groups=ROW_GROUPS)
    images = image_inputs([8, 8, 8], [2, 0, 1])
    report = manager.verify(serve, images.inputs, jlora.BatchShape(3, items=images.items))
    assert set(report.checked) == {target.name for target in TARGETS}
