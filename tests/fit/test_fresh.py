"""New adapters to train; `tests/parity/test_fresh.py` compares their initial values with those of PEFT."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jlora
from tests.layers.merging import serve
from tests.manager import tiny


def manager_of(model=None, **options) -> jlora.LoRAManager:
    return jlora.LoRAManager(model or tiny.Model(), jlora.LoRAConfig(max_loras=3, max_lora_rank=4, **options))


def test_a_new_adapter_is_served_without_effect_or_warning(caplog):
    manager, tokens = manager_of(), np.arange(4)[None].repeat(2, 0)
    with caplog.at_level(logging.WARNING, logger="jlora"):
        adapter = manager.new_adapter("new", rank=3, alpha=6)
    assert caplog.messages == []
    assert manager.list_adapters()["new"].warnings == ()
    assert adapter.modules.keys() == tiny.MODULES.keys() - {"embed"}
    with manager.prepare(["new", None]) as batch:
        found = np.asarray(serve(manager.model, tokens, batch))
    np.testing.assert_array_equal(found[0], found[1])


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (["v_proj"], {f"layers.{i}.v_proj" for i in range(2)}),
        (["layers.1.q_proj", "embed"], {"layers.1.q_proj", "embed"}),
        (["qkv_proj"], {f"layers.{i}.qkv_proj" for i in range(2)}),
        (["qkv_proj", "q_proj"], {f"layers.{i}.q_proj" for i in range(2)}),
        (["lm_head"], {"lm_head"}),
    ],
)
def test_targets(targets, expected):
    assert manager_of().new_adapter("new", rank=1, alpha=1, target_modules=targets).modules.keys() == expected


def test_stacked_layers_have_numbers():
    adapter = manager_of(tiny.Stack()).new_adapter("new", rank=2, alpha=2)
    assert adapter.modules.keys() == {f"layers.{i}" for i in range(3)}
    assert not np.array_equal(adapter.modules["layers.0"].a, adapter.modules["layers.1"].a)


def test_a_seed_gives_a_module_its_values_whatever_the_other_targets():
    manager = manager_of()
    one = manager.new_adapter("one", rank=2, alpha=2, seed=1)
    two = manager.new_adapter("two", rank=2, alpha=2, seed=1, target_modules=["o_proj"])
    other = manager.new_adapter("other", rank=2, alpha=2, seed=2, target_modules=["o_proj"])
    for name, module in two.modules.items():
        np.testing.assert_array_equal(module.a, one.modules[name].a)
        assert not np.array_equal(module.a, other.modules[name].a)


def test_training_begins_with_float32_under_slots_of_bfloat16(caplog):
    manager = manager_of(tiny.Model(dtype=jnp.bfloat16))
    with caplog.at_level(logging.WARNING, logger="jlora"):
        drawn = manager.new_adapter("new", rank=2, alpha=2).modules["layers.0.q_proj"].a.copy()
        trainer = manager.trainer(lambda *_: None, capacity=1)
        trainer.add("new")
    np.testing.assert_array_equal(trainer.adapter("new").modules["layers.0.q_proj"].a, drawn)
    assert caplog.messages == []


def test_nothing_is_drawn_where_a_state_is_given(monkeypatch):
    trainer, drawn = manager_of().trainer(lambda *_: None, capacity=1), []
    draw = np.random.default_rng
    monkeypatch.setattr(np.random, "default_rng", lambda seed: drawn.append(seed) or draw(seed))
    trainer.add("new", rank=2, alpha=2)
    state, count = trainer.state_of("new"), len(drawn)
    assert count == len(trainer.adapter("new").modules)
    trainer.remove("new")
    trainer.add("new", rank=2, alpha=2, state=state)
    assert len(drawn) == count
    jax.tree.map(np.testing.assert_array_equal, trainer.state_of("new"), state)


@pytest.mark.usefixtures("unchecked_calls")
def test_wrong_arguments_are_refused():
    manager = manager_of()
    for options, error, cause in (
        ({"rank": 0}, jlora.LoRAUsageError, "rank must be a positive integer, got 0"),
        ({"rank": 5}, jlora.AdapterMismatchError, "rank"),
        ({"alpha": "8"}, jlora.LoRAUsageError, "alpha"),
        ({"target_modules": "q_proj"}, jlora.LoRAUsageError, "a list of names, at least one, got 'q_proj'"),
        ({"target_modules": []}, jlora.LoRAUsageError, r"at least one, got \[\]"),
        ({"target_modules": ["q_porj"]}, jlora.LoRAUsageError, "'q_porj' matches no layer .* nearest is .*q_proj"),
        ({"name": ""}, jlora.LoRAUsageError, "non-empty string"),
    ):
        with pytest.raises(error, match=cause):
            manager.new_adapter(**{"name": "new", "rank": 2, "alpha": 2} | options)
    assert manager.list_adapters() == {}
    manager.new_adapter("new", rank=2, alpha=2)
    with pytest.raises(jlora.LoRAUsageError, match="'new' exists; expected a new name, or remove it first"):
        manager.new_adapter("new", rank=2, alpha=2)
