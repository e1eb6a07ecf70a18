"""A load or a write that fails leaves the host cache, the slots and every running adapter bitwise as they were."""

import dataclasses
import errno
import itertools
import os
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jlora
from jlora._compat import raw_value
from tests.manager.tiny import (
    MAX_RANK,
    MODULES,
    VOCAB,
    WIDTH,
    DeviceError,
    World,
    as_new,
    failing_call,
    failing_write,
    lora,
    make_adapter,
    refused,
    request,
    same,
)
from tests.records import evict, slot_names


@pytest.fixture
def busy(world) -> World:
    """Two adapters in slots, one of them in an open batch, and one more on the host."""
    world.load(*"abc")
    world.serve(["a", "b", None])
    return world


def factors(rank, k, n, scaling=1.0, b=None):
    rng = np.random.default_rng(0)
    a, random = rng.normal(size=(rank, k)).astype(np.float32), rng.normal(size=(n, rank)).astype(np.float32)
    return jlora.ModuleLoRA(a=a, b=random if b is None else b, alpha=1.0, scaling=scaling)


HEAD = lora("lm_head", 2, np.random.default_rng(0))
# The modules, and parts of the message: tensor, expected, found.
BAD = [
    (
        {"layers.1.k_proj": factors(2, WIDTH + 1, 8)},
        ["layers.1.k_proj", "(2, 17)", "(2, 16)", "(8, 2)", "layers.1.qkv_proj"],
    ),
    ({"layers.1.k_proj": factors(2, WIDTH, 16)}, ["layers.1.k_proj", "(16, 2)", "(8, 2)"]),
    ({"layers.0.qkv_proj": factors(2, WIDTH, 16)}, ["layers.0.qkv_proj", "(16, 2)", "(32, 2)"]),
    (
        {"layers.0.qkv_proj": factors(2, WIDTH, 32), "layers.0.k_proj": factors(2, WIDTH, 8)},
        ["layers.0.k_proj", "slice 1 of 'layers.0.qkv_proj'", "layers.0.qkv_proj fills too"],
    ),
    ({"lm_head": HEAD, "embed.attend": factors(2, WIDTH, VOCAB)}, ["embed.attend", "lm_head fills too"]),
    ({}, ["no LoRA weights", "found none"]),
    (
        {"layers.0.o_proj": factors(2, WIDTH, 16, scaling=float("nan"))},
        ["layers.0.o_proj", "scaling must be a finite float32", "nan"],
    ),
    (
        {"layers.0.o_proj": factors(2, WIDTH, 16, b=np.full((16, 2), 1e300))},
        ["layers.0.o_proj", "B must be finite", "float32", "reaches 1e+300"],
    ),
]
# A layer, the change of its base weights, and parts of the message.
BAD_BASES = [
    ("embed", lambda table: table + np.float32(1e-3), ["embed.base_layer.weight", "values differ", "another base"]),
    ("embed", lambda table: np.concatenate([table, table[:1]]), [f"({VOCAB + 1}, {WIDTH})", f"({VOCAB}, {WIDTH})"]),
    ("lm_head", lambda table: table * 2, ["lm_head.base_layer.weight", "values differ"]),
    ("extra", lambda table: table, ["extra.base_layer.weight", "no module 'extra'"]),
]


def test_misfits_change_nothing(busy):
    """In the place of an adapter that is in a slot."""
    table = np.array(busy.model.embed.embedding[...])
    cases = [(jlora.Adapter(name="b", modules=modules), parts) for modules, parts in BAD]
    for name, change, parts in BAD_BASES:
        bad = dataclasses.replace(make_adapter("x"), name="b", base_weights={name: change(table)})
        cases.append((bad, parts))
    with busy.manager.prepare(["a", None, "a"]) as batch:
        first, before, stats = busy.logits(batch), busy.held(), busy.manager.stats()
        for bad, parts in cases:
            with pytest.raises(jlora.AdapterMismatchError) as caught:
                busy.manager.add_adapter(bad, load_inplace=True)
            for part in ("adapter 'b'", *parts):
                assert part in str(caught.value)
            assert same(before, busy.held())
        assert busy.manager.stats() == stats
        np.testing.assert_array_equal(busy.logits(batch), first)
    busy.check(busy.serve(["a", "b", None]), [make_adapter("a"), make_adapter("b"), None])


@pytest.mark.usefixtures("unchecked_calls")
def test_misfits_are_named_together_with_the_way_out(busy):
    modules = {f"layers.{i}.w": factors(2, WIDTH, 16) for i in range(11)}
    with pytest.raises(jlora.AdapterMismatchError) as caught:
        busy.manager.add_adapter(jlora.Adapter(name="bad", modules=modules))
    assert sum(f"layers.{i}.w:" in str(caught.value) for i in range(11)) == 8
    assert "... and 3 more" in str(caught.value)
    ranks = dict(zip(MODULES, [2, 5, 6, 5, 5, 2, 6, 5, 5], strict=False))
    modules = {name: lora(name, rank, np.random.default_rng(0)) for name, rank in ranks.items()}
    with pytest.raises(jlora.AdapterMismatchError, match=r"rank 6 is above max_lora_rank=4 .7 modules.*_rank=6"):
        busy.manager.add_adapter(jlora.Adapter(name="bad", modules=modules))
    for name in (None, "", 3):
        with pytest.raises(jlora.LoRAUsageError, match="non-empty string"):
            busy.manager.add_adapter(jlora.Adapter(name=name, modules=make_adapter("x").modules))


def whole(name, version=0):
    """An adapter of all modules, so that every program that writes runs."""
    return make_adapter(name, version, modules=list(MODULES))


@pytest.fixture
def full(world) -> World:
    """a and b in slots, c and d on the host: each brings every module."""
    for name in "abcd":
        world.manager.add_adapter(whole(name))
    world.serve(["a", "b", None])
    return world


def check_everything(world):
    """Every adapter serves its own values, in both slots, and the books agree with that."""
    for names in (["b", None, "b"], ["a", "b", None], ["c", "a", "c"], ["d", "c", None], [None, "a", "b"]):
        world.check(world.serve(names), [None if name is None else whole(name) for name in names])
        assert set(names) - {None} <= set(slot_names(world.manager))
    assert world.manager.stats().leased == 0
    assert world.manager.stats().compilations == 1


def test_a_failed_transfer_leaves_the_slots_as_they_were(full):
    """The first transfer of a write comes before anything is written."""
    before, stats = full.held(), full.manager.stats()
    for call in (lambda: full.manager.prepare(["c", "d", None]), lambda: full.manager.pin_adapter("c")):
        with failing_call(jax, "device_put", 1), pytest.raises(DeviceError):
            call()
        assert same(before, full.held())
        assert full.manager.stats() == stats
    check_everything(full)


def delete(slot, job, operands, donate):
    """Delete the arrays, as after a device error in a program that donates them."""
    for variable in job.variables:
        raw_value(variable).delete()


WRITES = 2 * 5  # of two adapters: the lookup, the logits, merged, o_proj, ranks


@pytest.mark.parametrize("how", ["before", "consumed", "after"])
@pytest.mark.parametrize("nth", [1, WRITES // 2 + 1, WRITES])
def test_failed_write_is_repaired(full, nth, how):
    """Two adapters are swapped in and the nth program fails; the next batches are right."""
    damage = delete if how == "consumed" else lambda *args: None
    with failing_write(full.manager, nth, damage, late=how == "after"), pytest.raises(DeviceError):
        full.manager.prepare(["c", "d", None])
    assert full.manager.stats().leased == 0
    if nth <= WRITES // 2:  # d was not begun: b has its slot
        full.check(full.serve([None, "b", None]), [None, whole("b"), None])
        assert slot_names(full.manager)[1] == "b"
    full.check(full.serve(["c", "d", None]), [whole("c"), whole("d"), None])
    check_everything(full)
    full.serve(["a", "b", None])
    with failing_write(full.manager, 0) as calls:
        full.serve(["c", "d", None])
    assert len(calls) == WRITES  # so each of them fails above


@pytest.mark.parametrize("nth", [1, WRITES // 2])
def test_a_failed_write_leaves_other_slots_alone(full, nth):
    """Under an open batch, whose slot keeps every bit."""
    with full.manager.prepare([None, "b", None]) as batch:
        first = full.logits(batch)
        with failing_write(full.manager, nth), pytest.raises(DeviceError):
            full.manager.prepare(["c", None, None])
        np.testing.assert_array_equal(full.logits(batch), first)
        full.manager.prepare(["a", None, None]).close()
        np.testing.assert_array_equal(full.logits(batch), first)
    check_everything(full)


@pytest.mark.parametrize("nth", [1, WRITES // 2])
def test_a_replacement_that_fails_to_be_written_is_written_by_the_next(full, nth):
    """The books change at once, the slot at the next `prepare`; never the old weights under the new version."""
    old = full.manager.list_adapters()["a"].version
    assert full.manager.add_adapter(whole("a", 1), load_inplace=True)
    assert slot_names(full.manager) == (None, "b")
    with failing_write(full.manager, nth), pytest.raises(DeviceError):
        full.manager.prepare(["a", None, None])
    full.check(full.serve(["a", "b", None]), [whole("a", 1), whole("b"), None])
    assert full.manager.list_adapters()["a"].version == old + 1


def test_a_failure_while_mending_is_mended_too(full):
    for nth in (3, 2, 4, 1):
        with failing_write(full.manager, nth, delete), pytest.raises(DeviceError):
            full.manager.prepare(["c", "d", None])
    check_everything(full)


def test_a_step_that_donates_the_slot_arrays(full):
    """A step that takes the model's state as a donated argument consumes the slots with it."""
    graphdef, slots, rest = nnx.split(full.model, jlora.SlotParam, ...)

    def step(slots, rest, tokens, batch):
        with jlora.use(batch):
            return nnx.merge(graphdef, slots, rest)(tokens), jax.tree.map(lambda array: array + 0, slots)

    donating = jax.jit(step, donate_argnums=0)
    with full.manager.prepare(["a", "b", None]) as batch:
        logits, _ = donating(slots, rest, full.tokens, batch)
    full.check(np.asarray(logits), [whole("a"), whole("b"), None])
    assert all(array.is_deleted() for _, array in full.slots())
    full.check(full.serve(["a", "b", None]), [whole("a"), whole("b"), None])  # the same batch as before
    check_everything(full)


def test_one_slot_array_replaced_by_hand(full):
    full.model.layers[0].o_proj.jlora_b[...] = jnp.full_like(full.model.layers[0].o_proj.jlora_b[...], jnp.nan)
    full.check(full.serve(["a", "b", None]), [whole("a"), whole("b"), None])
    check_everything(full)


@pytest.mark.parametrize("damage", ["gone", "truncated", "rank"])
def test_an_evicted_adapter_that_cannot_be_read_again(world, tmp_path, caplog, damage):
    """The error has one class for all causes, the name stays known, and files that are back are served."""
    manager, folder = as_new(world).manager, tmp_path / "a"
    make_adapter("a").save_pretrained(folder)
    asked = jlora.LoRARequest("a", folder)
    manager.add_adapter(asked)
    assert evict(manager)
    folder.rename(tmp_path / "kept")
    if damage == "truncated":
        shutil.copytree(tmp_path / "kept", folder)
        (folder / "adapter_model.safetensors").write_bytes(b"x" * 100)
    elif damage == "rank":
        make_adapter("a", rank=MAX_RANK + 1).save_pretrained(folder)
    calls = [
        lambda: manager.prepare(["a", None]),
        lambda: manager.prepare([asked]),
        lambda: manager.pin_adapter("a"),
        lambda: manager.update_adapter("a", {}),
        lambda: manager.prefetch("a").result(30),
        lambda: manager.prepare(["a", None]),  # the error of the prefetch
    ]
    for number, call in enumerate(calls):
        caplog.clear()
        with pytest.raises(jlora.AdapterUnavailableError, match=f"'a' was evicted.*{re.escape(str(folder))}") as caught:
            call()
        assert isinstance(caught.value, jlora.AdapterNotFoundError)
        assert isinstance(caught.value.__cause__, jlora.LoRAError)
        warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert len(warned) == (number < len(calls) - 1)
        assert all(str(folder) in line for line in warned)
        assert manager.list_adapters()["a"].level == "evicted"
    with pytest.raises(jlora.AdapterNotFoundError) as unknown:
        manager.prepare(["b"])
    assert type(unknown.value) is jlora.AdapterNotFoundError
    shutil.rmtree(folder, ignore_errors=True)
    (tmp_path / "kept").rename(folder)
    world.check(world.serve(["a", None, None]), [make_adapter("a"), None, None])


class _Fails:
    """Calls of `os` that read below a folder; the nth of them fails."""

    def __init__(self, monkeypatch, folder, n):
        self.calls, self.failed = 0, False
        self._folder, self._n, self._opened = str(folder), n, set()
        for name in ("open", "stat", "lstat", "fstat", "preadv", "scandir", "readlink"):
            monkeypatch.setattr(os, name, self._counted(getattr(os, name)))

    def _counted(self, real):
        def call(path, *args, **kwargs):
            ours = path in self._opened if isinstance(path, int) else self._folder in os.fspath(path)
            if ours:
                self.calls += 1
                if self.calls == self._n:
                    self.failed = True
                    raise OSError(errno.EIO, os.strerror(errno.EIO), path)
            found = real(path, *args, **kwargs)
            if ours and real.__name__ == "open":
                self._opened.add(found)
            return found

        return call


def test_a_disk_fails_on_the_nth_read(world, tmp_path, monkeypatch):
    """For every n, the error names the file, other adapters are served, and a later load succeeds."""
    good, bad = request(tmp_path / "good", "good"), request(tmp_path / "bad", "bad")
    world.manager.add_adapter(good)
    want = world.serve(["good", None, None])
    open_files = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None
    for n in itertools.count(1):
        with monkeypatch.context() as patched:
            disk = _Fails(patched, tmp_path / "bad", n)
            error = refused(world.manager.add_adapter, bad)
        if error is not None:
            assert disk.failed
            assert "adapter 'bad'" in str(error)
            assert str(tmp_path / "bad") in str(error)
            assert list(world.manager.list_adapters()) == ["good"]
            np.testing.assert_array_equal(world.serve(["good", None, None]), want)
        there = "bad" in world.manager.list_adapters()
        assert world.manager.add_adapter(bad) != there
        world.check(world.serve(["good", "bad", None]), [make_adapter("good"), make_adapter("bad"), None])
        world.manager.remove_adapter("bad")
        if not disk.failed:
            break
    assert n > 10
    if open_files is not None:
        assert len(os.listdir("/proc/self/fd")) <= open_files
