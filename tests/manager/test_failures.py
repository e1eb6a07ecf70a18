"""A load or a write that fails leaves the host cache, the slots and every running adapter bitwise as they were."""

import json

import jax
import numpy as np
import pytest

import jlora
from tests.manager.tiny import MAX_RANK, VOCAB, WIDTH, World, lora, make_adapter, same


@pytest.fixture
def busy(world) -> World:
    """Two adapters in slots, one of them in an open batch, and one more on the host."""
    for name in "abc":
        world.manager.add_adapter(make_adapter(name))
    world.serve(["a", "b", None])
    return world


def adapter(name="bad", **modules):
    return jlora.Adapter(name=name, modules={key.replace("__", "."): value for key, value in modules.items()})


def factors(rank, k, n, kind="linear", scaling=1.0):
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(rank, k)).astype(np.float32), rng.normal(size=(n, rank)).astype(np.float32)
    return jlora.ModuleLoRA(a=a, b=b, kind=kind, alpha=1.0, scaling=scaling)


def with_base(world, change, name="embed"):
    table = np.array(world.model.embed.embedding[...])
    return jlora.Adapter(name="bad", modules=make_adapter("x").modules, base_weights={name: change(table)})


# what is wrong -> (the adapter, what the message says: the tensor, what was expected, what was found)
BAD = {
    "rank": (
        lambda w: adapter(layers__0__q_proj=factors(MAX_RANK + 1, WIDTH, 16)),
        ["layers.0.q_proj", "rank 5", "max_lora_rank=4"],
    ),
    "unknown module": (
        lambda w: adapter(layers__0__up_proj=factors(2, WIDTH, 16)),
        ["layers.0.up_proj", "the model has no module", "name_map"],
    ),
    "layer past the end": (
        lambda w: adapter(layers__7__q_proj=factors(2, WIDTH, 16)),
        ["layers.7.q_proj", "the model has no module"],
    ),
    "part of a name": (
        lambda w: adapter(q_proj=factors(2, WIDTH, 16)),
        ["q_proj", "the model has no module"],
    ),
    "A": (
        lambda w: adapter(layers__1__k_proj=factors(2, WIDTH + 1, 8)),
        ["layers.1.k_proj", "(2, 17)", "(2, 16)", "(8, 2)", "layers.1.qkv_proj"],
    ),
    "B": (
        lambda w: adapter(layers__1__k_proj=factors(2, WIDTH, 16)),
        ["layers.1.k_proj", "(16, 2)", "(8, 2)"],
    ),
    "all of a merged layer": (
        lambda w: adapter(layers__0__qkv_proj=factors(2, WIDTH, 16)),
        ["layers.0.qkv_proj", "(16, 2)", "(32, 2)"],
    ),
    "vocabulary": (
        lambda w: adapter(embed=factors(2, VOCAB + 1, WIDTH, "embedding")),
        ["embed", f"(2, {VOCAB + 1})", f"(2, {VOCAB})"],
    ),
    "embedding for linear": (
        lambda w: adapter(layers__0__o_proj=factors(2, WIDTH, 16, "embedding")),
        ["layers.0.o_proj", "takes linear weights", "these are embedding weights"],
    ),
    "a part twice": (
        lambda w: adapter(layers__0__qkv_proj=factors(2, WIDTH, 32), layers__0__k_proj=factors(2, WIDTH, 8)),
        ["layers.0.k_proj", "slice 1 of 'layers.0.qkv_proj'", "layers.0.qkv_proj fills too"],
    ),
    "a layer under two names": (
        lambda w: adapter(lm_head=lora("lm_head", 2, np.random.default_rng(0)), embed__attend=factors(2, WIDTH, VOCAB)),
        ["embed.attend", "lm_head fills too"],
    ),
    "nothing in it": (lambda w: jlora.Adapter(name="bad", modules={}), ["no LoRA weights", "found none"]),
    "scaling": (
        lambda w: adapter(layers__0__o_proj=factors(2, WIDTH, 16, scaling=float("nan"))),
        ["layers.0.o_proj", "scaling must be a finite float32", "nan"],
    ),
    "overflow": (
        lambda w: adapter(layers__0__o_proj=factors(2, WIDTH, 16, scaling=3e38)),
        ["layers.0.o_proj", "scaling * B must be finite", "float32"],
    ),
    "base values": (
        lambda w: with_base(w, lambda table: table + np.float32(1e-3)),
        ["embed.base_layer.weight", "values differ", "another base model"],
    ),
    "base shape": (
        lambda w: with_base(w, lambda table: np.concatenate([table, table[:1]])),
        ["embed.base_layer.weight", f"({VOCAB + 1}, {WIDTH})", f"({VOCAB}, {WIDTH})"],
    ),
    "base of the logits": (
        lambda w: with_base(w, lambda table: table * 2, "lm_head"),
        ["lm_head.base_layer.weight", "values differ"],
    ),
    "base of nothing": (
        lambda w: with_base(w, lambda table: table, "extra"),
        ["extra.base_layer.weight", "no module 'extra'"],
    ),
}


@pytest.mark.parametrize("what", BAD)
@pytest.mark.parametrize("name", ["bad", "b"])
def test_a_misfit_changes_nothing(busy, what, name):
    """As a new adapter, and in the place of one that is in a slot."""
    make, parts = BAD[what]
    bad = make(busy)
    bad = jlora.Adapter(name=name, modules=bad.modules, base_weights=bad.base_weights)
    with busy.manager.prepare(["a", None, "a"]) as batch:
        first, before, stats = busy.logits(batch), busy.held(), busy.manager.stats()
        with pytest.raises(jlora.AdapterMismatchError) as caught:
            busy.manager.add_adapter(bad, load_inplace=True)
        for part in (f"adapter '{name}'", *parts):
            assert part in str(caught.value)
        assert same(before, busy.held())
        assert busy.manager.stats() == stats
        np.testing.assert_array_equal(busy.logits(batch), first)
    busy.check(busy.serve(["a", "b", None]), [make_adapter("a"), make_adapter("b"), None])


def test_every_misfit_of_an_adapter_is_named_at_once(busy):
    modules = {f"layers.{i}.w": factors(2, WIDTH, 16) for i in range(11)}
    with pytest.raises(jlora.AdapterMismatchError) as caught:
        busy.manager.add_adapter(jlora.Adapter(name="bad", modules=modules))
    assert sum(f"layers.{i}.w:" in str(caught.value) for i in range(11)) == 8
    assert "... and 3 more" in str(caught.value)


@pytest.mark.parametrize("thing", [None, "a", {"name": "a"}, 3])
def test_only_requests_and_adapters_are_added(busy, thing):
    before = busy.held()
    with pytest.raises(jlora.LoRAError, match="takes a LoRARequest or an Adapter"):
        busy.manager.add_adapter(thing)
    assert same(before, busy.held())


@pytest.mark.parametrize("name", [None, "", 3])
def test_an_adapter_needs_a_name(busy, name):
    with pytest.raises(jlora.LoRAError, match="non-empty string"):
        busy.manager.add_adapter(jlora.Adapter(name=name, modules=make_adapter("x").modules))


@pytest.mark.parametrize("damage", ["no folder", "a file", "truncated", "json", "rank", "tensor", "base model"])
def test_a_folder_that_does_not_load_changes_nothing(busy, tmp_path, damage):
    folder = tmp_path / "a"
    make_adapter("a", 1, base_model_name="org/base").save_pretrained(folder)
    weights, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    request = {"name": "b", "path": folder, "load_inplace": True}
    error = jlora.AdapterFormatError
    if damage == "no folder":
        request["path"], error = tmp_path / "nowhere", jlora.AdapterNotFoundError
    elif damage == "a file":
        request["path"], error = weights, jlora.LoRAError
    elif damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-7])
    elif damage == "json":
        config.write_text("[" + config.read_text())
    elif damage == "rank":
        config.write_text(json.dumps({**json.loads(config.read_text()), "r": -2}))
    elif damage == "tensor":
        raw = bytearray(weights.read_bytes())
        at = raw.index(b"lora_A")
        raw[at : at + 6] = b"lora_Z"
        weights.write_bytes(raw)
        error = jlora.LoRAError
    else:
        request["base_model_name"], error = "org/other", jlora.AdapterMismatchError
    before, stats = busy.held(), busy.manager.stats()
    with pytest.raises(error, match="'b'"):
        busy.manager.add_adapter(jlora.LoRARequest(**request))
    assert same(before, busy.held())
    assert busy.manager.stats() == stats
    busy.check(busy.serve(["a", "b", None]), [make_adapter("a"), make_adapter("b"), None])


class DeviceError(Exception):
    pass


def break_device(monkeypatch, world, where, nth):
    """Let the nth transfer, or the nth write, of an adapter from now on fail before it does anything."""
    owner, name = (jax, "device_put") if where == "transfer" else (world.manager, "_write")
    working, calls = getattr(owner, name), []

    def broken(*args, **kwargs):
        calls.append(args)
        if len(calls) == nth:
            raise DeviceError
        return working(*args, **kwargs)

    monkeypatch.setattr(owner, name, broken)


@pytest.mark.parametrize("where", ["transfer", "write"])
def test_a_failed_write_of_a_replacement_keeps_the_old_one(busy, monkeypatch, where):
    before, stats = busy.held(), busy.manager.stats()
    with monkeypatch.context() as patch:
        break_device(patch, busy, where, 1)
        with pytest.raises(DeviceError):
            busy.manager.add_adapter(make_adapter("a", 1), load_inplace=True)
    assert same(before, busy.held())
    assert busy.manager.stats() == stats
    busy.check(busy.serve(["a", "b", None]), [make_adapter("a"), make_adapter("b"), None])
    assert busy.manager.add_adapter(make_adapter("a", 1), load_inplace=True)
    busy.check(busy.serve(["a", "b", None]), [make_adapter("a", 1), make_adapter("b"), None])


@pytest.mark.parametrize("where", ["transfer", "write"])
def test_a_failed_write_of_the_first_of_a_batch_changes_nothing(busy, monkeypatch, where):
    busy.manager.add_adapter(make_adapter("d"))
    before, stats = busy.held(), busy.manager.stats()
    for call in (lambda: busy.manager.prepare(["c", "d", None]), lambda: busy.manager.pin_adapter("c")):
        with monkeypatch.context() as patch:
            break_device(patch, busy, where, 1)
            with pytest.raises(DeviceError):
                call()
        assert same(before, busy.held())
        assert busy.manager.stats() == stats
    busy.check(busy.serve(["c", "d", None]), [make_adapter("c"), make_adapter("d"), None])


@pytest.mark.parametrize("where", ["transfer", "write"])
def test_a_write_that_fails_after_another_leaves_books_that_are_true(busy, monkeypatch, where):
    """c was written over a, then d failed: c is in its slot, b still in its own, and nothing is held."""
    busy.manager.add_adapter(make_adapter("d"))
    with monkeypatch.context() as patch:
        break_device(patch, busy, where, 2)
        with pytest.raises(DeviceError):
            busy.manager.prepare(["c", "d", None])
    assert busy.manager.slot_names == ("c", "b")
    assert busy.manager.stats().leased == 0
    busy.check(busy.serve(["b", "c", None]), [make_adapter("b"), make_adapter("c"), None])
    assert busy.manager.slot_names == ("c", "b")
    busy.check(busy.serve(["a", "d", None]), [make_adapter("a"), make_adapter("d"), None])


def test_a_full_host_evicts_nothing_for_an_adapter_that_does_not_fit(busy):
    busy.manager.add_adapter(make_adapter("d"))
    before = busy.held()
    with pytest.raises(jlora.AdapterMismatchError):
        busy.manager.add_adapter(BAD["rank"][0](busy))
    assert same(before, busy.held())
