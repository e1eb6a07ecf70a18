"""Which slices of which layer a checkpoint name fills, and how its factors are folded into slot dtype."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

import jlora
from tests.manager.tiny import Model, lora, make_adapter, make_world


def make_manager(model, *, rank=4, slots=2, dtype=None, **kwargs):
    return jlora.LoRAManager(model, jlora.LoRAConfig(max_loras=slots, max_lora_rank=rank, dtype=dtype), **kwargs)


def factors(rng, rank, k, n, *, dtype=np.float32, scaling=1.0, kind="linear"):
    a, b = rng.normal(size=(rank, k)).astype(dtype), rng.normal(size=(n, rank)).astype(dtype)
    return jlora.ModuleLoRA(a=a, b=b, kind=kind, alpha=scaling * rank, scaling=scaling)


class Merged(nnx.Module):
    """One projection of 12 outputs."""

    def __init__(self, **attributes):
        self.proj = nnx.Linear(3, 12, use_bias=False, rngs=nnx.Rngs(0))
        for name, value in attributes.items():
            setattr(self.proj, name, value)


def placed(manager, modules):
    """A [n, R, K], B [R, N] and ranks [n] of slot 0 of `proj`, after loading these modules."""
    manager.add_adapter(jlora.Adapter(name="x", modules=modules))
    manager.activate_adapter("x")
    layer = manager.model.proj
    return np.asarray(layer.jlora_a[0]), np.asarray(layer.jlora_b[0]), layer.jlora_ranks[0].tolist()


def test_parts_fill_their_slices_alone(rng):
    manager = make_manager(Merged(output_sizes=(2, 4, 6)), packed_modules={"proj": ("p", "q", "r")})
    p, r = factors(rng, 1, 3, 2), factors(rng, 3, 3, 6)
    a, b, ranks = placed(manager, {"p": p, "r": r})
    assert ranks == [1, 0, 3]
    want_a, want_b = np.zeros((3, 4, 3), np.float32), np.zeros((4, 12), np.float32)
    want_a[0, :1], want_a[2, :3] = p.a, r.a
    want_b[:1, :2], want_b[:3, 6:] = p.b.T, r.b.T
    np.testing.assert_array_equal(a, want_a)
    np.testing.assert_array_equal(b, want_b)


def test_a_merged_tensor_fills_every_slice_with_one_a(rng):
    manager = make_manager(Merged(), packed_modules={"proj": ("p", "q", "r")})  # even thirds
    whole = factors(rng, 2, 3, 12)
    a, b, ranks = placed(manager, {"proj": whole})
    assert ranks == [2, 2, 2]
    np.testing.assert_array_equal(a[:, :2], np.stack([whole.a] * 3))
    np.testing.assert_array_equal(b[:2], whole.b.T)
    assert not a[:, 2:].any()
    assert not b[2:].any()


def test_a_name_may_cover_several_slices(rng):
    manager = make_manager(Merged(), packed_modules={"proj": {"qk": (2, 4), "v": 6}})
    qk, v = factors(rng, 2, 3, 6), factors(rng, 4, 3, 6)
    a, b, ranks = placed(manager, {"qk": qk, "v": v})
    assert ranks == [2, 2, 4]
    np.testing.assert_array_equal(a[0, :2], qk.a)
    np.testing.assert_array_equal(a[1, :2], qk.a)
    np.testing.assert_array_equal(a[2], v.a)
    np.testing.assert_array_equal(b[:2, :6], qk.b.T)
    np.testing.assert_array_equal(b[:, 6:], v.b.T)


@pytest.mark.parametrize(
    ("attributes", "packed", "message"),
    [
        ({"output_sizes": (6, 6)}, {"proj": ("p", "q", "r")}, "names 3 parts .* output_sizes"),
        ({}, {"proj": ("p", "q", "r", "s", "t")}, "give the sizes"),
        ({}, {"proj": {"p": 6, "q": 5}}, "sum to 11, but the layer has 12"),
    ],
)
def test_packed_modules_that_do_not_add_up(attributes, packed, message):
    with pytest.raises(jlora.LoRAError, match=message):
        make_manager(Merged(**attributes), packed_modules=packed)


@pytest.mark.parametrize(
    ("name_map", "name"),
    [
        ({r"^model\.": ""}, "model.layers.1.o_proj"),
        ({r"^h\.(\d+)\.attn\.out$": r"layers.\1.o_proj"}, "h.1.attn.out"),
        ({"^never": "x", "^h": "layers", "^layers": "y"}, "h.1.o_proj"),  # the first that is found, and that one alone
        ({}, "layers.1.o_proj"),
    ],
)
def test_name_map(rng, name_map, name):
    model = Model()
    manager = make_manager(model, name_map=name_map)
    module = factors(rng, 2, 16, 16)
    manager.add_adapter(jlora.Adapter(name="x", modules={name: module}))
    manager.activate_adapter("x")
    assert model.layers[1].o_proj.jlora_ranks[0].tolist() == [2]
    np.testing.assert_array_equal(model.layers[1].o_proj.jlora_a[0, 0, :2], module.a)
    assert model.layers[0].o_proj.jlora_ranks[0].tolist() == [0]


@pytest.mark.parametrize("name_map", [{"(": ""}, {"a": r"\1"}, {"a": r"\g<x>"}, {"a": None}, {3: "a"}])
def test_a_name_map_that_cannot_work_is_refused_at_once(name_map):
    model = Model()
    with pytest.raises(jlora.LoRAError, match="name_map"):
        make_manager(model, name_map=name_map)


def test_after_a_refused_name_map_the_model_is_as_it_was():
    model = Model()
    with pytest.raises(jlora.LoRAError, match="name_map"):
        make_manager(model, name_map={"(": ""})
    assert type(model.embed) is nnx.Embed
    make_manager(model)


def test_names_are_exact_on_dots(rng):
    manager = make_manager(Model())
    for name in ("o_proj", "0.o_proj", "layers.0.o_pro", "xlayers.0.o_proj", "layers.0.o_proj.x", "Layers.0.o_proj"):
        with pytest.raises(jlora.AdapterMismatchError, match=f"no module '{name}'"):
            manager.add_adapter(jlora.Adapter(name="x", modules={name: factors(rng, 2, 16, 16)}))


def test_a_layer_left_out_by_target_modules_takes_nothing():
    world = make_world(target_modules=["o_proj", "v_proj"])
    with pytest.raises(jlora.AdapterMismatchError, match=r"lm_head.*not among the configured target_modules"):
        world.manager.add_adapter(make_adapter("x", modules=["lm_head"]))
    # v_proj is a part of the merged layer, so the whole of it is wrapped.
    adapter = make_adapter("x", modules=["layers.0.q_proj", "layers.1.o_proj"])
    world.manager.add_adapter(adapter)
    world.check(world.serve(["x", None, "x"]), [adapter, None, adapter])


def test_both_uses_of_a_tied_table(world):
    """The lookup and the logits are sites of their own, under PEFT's names for them."""
    adapters = {name: make_adapter(name, modules=[name]) for name in ("embed", "lm_head")}
    for adapter in adapters.values():
        world.manager.add_adapter(adapter)
    world.check(world.serve(["embed", None, "lm_head"]), [adapters["embed"], None, adapters["lm_head"]])


# --- into slot dtype --------------------------------------------------------------------------------------------------

DTYPES = [ml_dtypes.bfloat16, np.float16, np.float32, np.float64]


@pytest.mark.parametrize("slot_dtype", DTYPES[:3])
@pytest.mark.parametrize("file_dtype", DTYPES)
def test_scaling_is_folded_in_float32_and_rounded_once(rng, file_dtype, slot_dtype):
    manager = make_manager(Merged(), dtype=slot_dtype)
    scaling = 1 / 3
    module = factors(rng, 4, 3, 12, dtype=file_dtype, scaling=scaling)
    a, b, _ = placed(manager, {"proj": module})
    assert a.dtype == b.dtype == slot_dtype
    np.testing.assert_array_equal(a[0], module.a.astype(slot_dtype))
    want = (np.float32(scaling) * module.b.T.astype(np.float32)).astype(slot_dtype)
    np.testing.assert_array_equal(b, want)


def test_folding_in_float32_differs_from_folding_in_slot_dtype(rng):
    """The check above can tell the two apart."""
    b = rng.normal(size=100).astype(ml_dtypes.bfloat16)
    late = (np.float32(1 / 3) * b.astype(np.float32)).astype(ml_dtypes.bfloat16)
    early = ml_dtypes.bfloat16(1 / 3) * b
    assert (late != early).any()


@pytest.mark.parametrize(("a", "b", "scaling", "which"), [(7e4, 1.0, 1.0, "A"), (1.0, 6e4, 2.0, "scaling")])
def test_what_overflows_the_slots_is_refused(a, b, scaling, which):
    module = jlora.ModuleLoRA(
        a=np.full((2, 3), a, np.float32), b=np.full((12, 2), b, np.float32), alpha=2 * scaling, scaling=scaling
    )
    with pytest.raises(jlora.AdapterMismatchError, match=rf"'x': proj: {which}.*finite.*float16, and reaches"):
        placed(make_manager(Merged(), dtype=jnp.float16), {"proj": module})
    a, b, _ = placed(make_manager(Merged(), dtype=jnp.bfloat16), {"proj": module})
    assert np.isfinite(a).all()
    assert np.isfinite(b).all()


def test_what_is_large_alone_but_fits_when_scaled_is_served():
    module = jlora.ModuleLoRA(
        a=np.ones((2, 3), np.float32), b=np.full((12, 2), 1e5, np.float32), alpha=0.2, scaling=0.1
    )
    _, b, _ = placed(make_manager(Merged(), dtype=jnp.float16), {"proj": module})
    np.testing.assert_array_equal(b[:2], np.full((2, 12), 1e4, np.float16))


def test_base_weights_equal_to_the_model_are_accepted():
    for dtype in (jnp.float32, jnp.bfloat16):
        world = make_world(dtype=dtype)
        table = np.asarray(world.model.embed.embedding[...]).astype(np.float32)
        modules = {"embed": lora("embed", 2, np.random.default_rng(0))}
        for name in ("embed", "lm_head"):
            adapter = jlora.Adapter(name=name, modules=modules, base_weights={name: table})
            assert world.manager.add_adapter(adapter)


# --- requests ---------------------------------------------------------------------------------------------------------


def test_a_request_is_read_from_its_folder(world, tmp_path):
    adapter = make_adapter("x", base_model_name="org/base")
    adapter.save_pretrained(tmp_path)
    request = jlora.LoRARequest("sql", tmp_path, base_model_name="org/base")
    assert world.manager.add_adapter(request)
    assert not world.manager.add_adapter(request)
    info = world.manager.list_adapters()["sql"]
    assert (info.path, info.base_model_name, info.rank) == (str(tmp_path), "org/base", adapter.rank)
    world.check(world.serve(["sql", None, "sql"]), [adapter, None, adapter])
    make_adapter("x", 1).save_pretrained(tmp_path / "new")
    assert world.manager.add_adapter(jlora.LoRARequest("sql", str(tmp_path / "new"), load_inplace=True))
    world.check(world.serve(["sql", None, None]), [make_adapter("x", 1), None, None])


@pytest.mark.parametrize("says", ["org/base", None])
def test_a_request_for_another_base_model_is_refused(world, tmp_path, says):
    make_adapter("x", base_model_name=says).save_pretrained(tmp_path)
    with pytest.raises(jlora.AdapterMismatchError, match=r"'sql'.*base_model_name_or_path is .*'org/other'"):
        world.manager.add_adapter(jlora.LoRARequest("sql", tmp_path, base_model_name="org/other"))
    assert world.manager.list_adapters() == {}


def test_an_adapter_is_read_back_from_its_slot(world):
    adapter = make_adapter("a", rank=3)
    world.manager.add_adapter(adapter)
    with pytest.raises(jlora.LoRAError, match="in no slot"):
        world.manager.export_adapter("a")
    with pytest.raises(jlora.AdapterNotFoundError):
        world.manager.export_adapter("b")
    world.manager.activate_adapter("a")
    read = world.manager.export_adapter("a")
    assert list(read.modules) == list(adapter.modules)
    for name, module in adapter.modules.items():  # the scaling is a power of two: exact
        np.testing.assert_array_equal(read.modules[name].a, module.a)
        np.testing.assert_array_equal(read.modules[name].b, module.b)
        assert (read.modules[name].alpha, read.modules[name].scaling) == (module.alpha, module.scaling)


def test_a_scaling_of_zero_cannot_be_read_back(rng):
    manager = make_manager(Merged())
    placed(manager, {"proj": factors(rng, 2, 3, 12, scaling=0.0)})
    with pytest.raises(jlora.LoRAError, match="scaling 0"):
        manager.export_adapter("x")
