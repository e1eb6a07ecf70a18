"""`Mix` and `active_from` of `prepare`: values against NumPy, one compilation, and refusals."""

import dataclasses

import jax
import numpy as np
import pytest

import jlora
from jlora import Mix
from tests.manager.tiny import LENGTH, SEQUENCES, expected, make_adapter, make_world

NAMES = ("a", "b", "c", "d")


@pytest.fixture(scope="module")
def adapters():
    return {name: make_adapter(name, rank=i + 1) for i, name in enumerate(NAMES)}


def served(adapters, **config):
    world = make_world(max_loras=4, **config)
    world.load(*adapters.values())
    return world


@pytest.fixture(scope="module")
def world(adapters):
    return served(adapters, max_adapters_per_sequence=3, activated=True)


def parts_of(entry, adapters):
    if entry is None:
        return ()
    return [(adapters[name], scale) for name, scale in (entry.terms if isinstance(entry, Mix) else [(entry, 1)])]


def check(world, adapters, entries, first=(0, 0, 0)):
    with world.manager.prepare(entries, active_from=first, length=LENGTH) as batch:
        got = world.logits(batch)
    want = [
        expected(world.model, parts_of(entry, adapters), tokens, start)
        for entry, tokens, start in zip(entries, np.asarray(world.tokens), first, strict=True)
    ]
    np.testing.assert_allclose(got, np.stack(want), rtol=0, atol=4e-6 * np.abs(want).max())
    return got


def test_random_batches_of_all_kinds_compile_once(adapters):
    world = served(adapters, max_adapters_per_sequence=3, activated=True)
    rng = np.random.default_rng(0)

    def entry():
        kind, names = rng.integers(4), rng.permutation(NAMES)
        if kind < 2:
            return (None, str(names[0]))[kind]
        if kind == 2:
            return Mix({str(names[0]): float(rng.choice([0, -1.5, 0.25, 3]))})
        return Mix({str(name): float(rng.normal()) for name in names[: rng.integers(1, 4)]})

    for _ in range(25):
        entries = [entry() for _ in range(SEQUENCES)]
        while len({adapter.name for e in entries for adapter, _ in parts_of(e, adapters)}) > 4:
            entries = [entry() for _ in range(SEQUENCES)]
        check(world, adapters, entries, rng.integers(0, LENGTH + 2, SEQUENCES).tolist())
    assert len(world.traces) == 1


def test_handles_of_a_batch_serve_its_versions(world, adapters):
    entries = ["a", Mix({"b": -0.5}), Mix({"c": 1, "a": 2})]
    with world.manager.prepare(entries) as batch:
        before, versions = world.logits(batch), batch.versions
        first, scaled, mix = handles = world.manager.handles(batch)
    assert (type(first), type(scaled), type(mix)) == (jlora.AdapterHandle, Mix, Mix)
    for name in "abc":  # they outlive the batch, and are not those of its names
        world.manager.add_adapter(make_adapter(name, 1), load_inplace=True)
    with world.manager.prepare(handles) as batch:
        assert batch.versions == versions
        np.testing.assert_array_equal(world.logits(batch), before)
    with world.manager.prepare([first, "a", None]) as batch:
        first.close()  # that of its own sequence alone
        with pytest.raises(jlora.LoRAUsageError, match="is closed"):
            world.manager.prepare(handles)
        world.manager.prepare([*handles[1:], None]).close()
        assert batch.versions[0] == versions[0] < batch.versions[1]
    for adapter in adapters.values():
        world.manager.add_adapter(adapter, load_inplace=True)


def test_handles_takes_an_open_batch_of_this_manager(world, adapters):
    with world.manager.prepare(["a"]) as closed:
        pass
    other = served(adapters)
    with other.manager.prepare(["a"]) as foreign:
        for batch in (closed, foreign, jax.jit(lambda batch: batch)(foreign)):
            with pytest.raises(jlora.LoRAUsageError, match="handles takes an open batch of this manager"):
                world.manager.handles(batch)


def test_factor_0_and_inactive_rows_are_bitwise_base(world):
    base = world.serve([None, None, None])
    with world.manager.prepare(
        [Mix({"a": 0}), "b", Mix({"a": 0, "c": 1})], active_from=[0, LENGTH, 2], length=LENGTH
    ) as batch:
        got = world.logits(batch)
    assert (got[:2] == base[:2]).all()
    assert (got[2, :2] == base[2, :2]).all()
    assert (got[2, 2:] != base[2, 2:]).any(-1).all()


def test_order_of_a_mix_is_fixed_and_company_does_not_matter(world):
    mix = Mix({"a": 0.5, "b": 0.25, "c": 2})
    alone = world.serve([mix, None, None])[0]
    assert (world.serve([mix, "d", Mix({"a": 2})])[0] == alone).all()
    assert (world.serve([mix, Mix({"b": 1}), "c"])[0] == alone).all()


def test_cache_keys(world):
    entries = ["a", Mix({"a": 0.5}), Mix({"a": 1, "b": 2}), Mix({"a": 0}), None]
    with world.manager.prepare(entries, [3, 3, 3, 3, 3], active_from=[0, 2, 0, 0, 0]) as batch:
        keys, versions = batch.cache_keys, batch.versions
    version = world.manager.list_adapters()["a"].version
    other = world.manager.list_adapters()["b"].version
    assert versions == (version, version, (version, other), None, None)
    assert keys[3:] == (None, None)
    assert len(set(keys)) == 4
    with world.manager.prepare(entries, [3, 3, 3, 3, 3], active_from=[3, 2, 0, 0, 0]) as batch:
        assert batch.cache_keys == (None, *keys[1:])


def test_factors_of_one_float32_have_one_key(world):
    third = float(np.float32(0.1))
    assert Mix({"a": 0.1}) == Mix({"a": third})
    assert Mix({"a": 0.1, "b": 1e-60}) == Mix({"a": third})
    with world.manager.prepare([Mix({"a": 0.1}), Mix({"a": third}), Mix({"a": 0.1, "b": 0})]) as batch:
        assert len(set(batch.cache_keys)) == 1
    with world.manager.prepare([Mix({"a": 1, "b": 2}), Mix({"b": 2, "a": 1}), "a"]) as batch:
        assert len(set(batch.cache_keys)) == 3  # sums in another order may differ in their last bits


def test_an_undecided_batch_has_no_keys(adapters):
    world = make_world(activated=True)
    world.manager.add_adapter(dataclasses.replace(adapters["a"], name="called", invocation_tokens=(3,)))
    with world.manager.prepare(["called", None, None]) as batch:
        with pytest.raises(jlora.LoRAUsageError, match=r"no first active rows: give prepare\(\.\.\., active_from=\)"):
            _ = batch.cache_keys
        assert batch.activate([1, 0, 0], length=LENGTH).cache_keys[0].active_from == 1
        read = jax.jit(lambda first: batch.activate(first, length=LENGTH).cache_keys)
        with pytest.raises(
            jlora.LoRAUsageError, match="known outside traced functions only; read them before the step"
        ):
            read(np.array([1, 0, 0]))


@pytest.mark.usefixtures("unchecked_calls")
def test_malformed_descriptions_are_refused(world):
    for make, message in (
        (lambda: Mix({"a": float("nan")}), "finite"),
        (lambda: Mix({"a": 1e39}), "finite float32"),
        (lambda: Mix({"a": -np.float16(np.inf)}), "finite float32"),
        (lambda: Mix({"a": True}), "finite"),
        (lambda: Mix({None: 1.0}), "names"),
        (lambda: Mix({}), "at least one"),
        (lambda: Mix(["a"]), "mapping"),
        (lambda: Mix({"a": "x"}), "finite"),
        (lambda: Mix({3: 1.0}), "names"),
    ):
        with pytest.raises(jlora.LoRAUsageError, match=message):
            make()
    for first in ([1], [0, 0, -1], [0, 0, 0, 0], [0, 1.5, 0], 3):
        with pytest.raises(jlora.LoRAUsageError, match="active_from"):
            world.manager.prepare(["a", None, "b"], active_from=first)


def test_unconfigured_features_name_their_switch():
    manager = make_world().manager
    for entry, options, message in (
        (Mix({"a": 0.5}), {}, "max_adapters_per_sequence=1"),
        (Mix({"a": 1, "b": 1}), {}, "max_adapters_per_sequence=2"),
        (Mix({"a": 2}), {}, "max_adapters_per_sequence=1"),
        ("a", {"active_from": [1], "length": 1}, "activated=True"),
    ):
        with pytest.raises(jlora.LoRAUsageError, match=message):
            manager.prepare([entry], **options)
