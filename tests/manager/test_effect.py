"""Adapters that change nothing or a part of what they target: one warning, with counts and first names."""

import dataclasses
import json
import logging

import numpy as np
import pytest
from flax import nnx

import jlora
from tests.manager.tiny import MAX_RANK, make_adapter, make_world

LINEAR = [f"layers.{i}.{name}" for i in range(2) for name in ("k_proj", "o_proj", "q_proj", "v_proj")]
LAYERS = {"layers_pattern": "layers"}  # PEFT needs it for a list that nothing holds
QKV = ["q_proj", "k_proj", "v_proj"]
IDLE = "change nothing (lora_alpha is 0, or A or B all zeros)"


@pytest.fixture(scope="module")
def world():
    return make_world(max_cpu_loras=64)


def loaded(world, tmp_path, modules=LINEAR, change=lambda adapter: adapter, **fields) -> tuple[str, ...]:
    """Save an adapter of these modules with these fields of its configuration, load it, and return the warnings."""
    world.manager.remove_all_adapters()
    change(make_adapter("a", modules=modules)).save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"
    config = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
    world.manager.add_adapter(jlora.LoRARequest("a", tmp_path))
    return world.manager.list_adapters()["a"].warnings


def with_b(adapter, names, b=np.zeros_like):
    modules = {n: dataclasses.replace(m, b=b(m.b)) if n in names else m for n, m in adapter.modules.items()}
    return dataclasses.replace(adapter, modules=modules)


@pytest.mark.parametrize(
    ("modules", "fields", "expected"),
    [
        (LINEAR, {}, []),
        (LINEAR, {"target_modules": [*QKV, "o_proj"]}, []),
        (LINEAR, {"target_modules": "all-linear"}, []),
        (LINEAR, {"target_modules": r"layers\.\d\..*_proj"}, []),
        (["layers.0.q_proj"], {"target_modules": ["q_proj"], "layers_to_transform": [0], **LAYERS}, []),
        (["layers.0.q_proj"], {"target_modules": ["q_proj"], "exclude_modules": r"layers\.1\..*"}, []),
        (["layers.0.q_proj"], {"target_modules": ["q_proj"], "ensure_weight_tying": True},
         ["weights for 1 of 2 targeted layers; none for 'layers.1.q_proj'"]),
        (["layers.1.q_proj", "layers.0.o_proj"], {"target_modules": [*QKV, "o_proj"]},
         ["weights for 2 of 8 targeted layers; none for 'layers.0.q_proj', 'layers.0.k_proj', 'layers.0.v_proj', ..."]),
        (["layers.1.q_proj"], {"target_modules": "all-linear"}, ["weights for 1 of 8 targeted"]),
        (["layers.1.q_proj"], {"target_modules": r".*\.(q|k)_proj"}, ["weights for 1 of 4 targeted"]),
        (["layers.0.q_proj"], {"target_modules": ["q_proj", "embed"]}, ["1 of 3 targeted layers; none for 'embed'"]),
        (["layers.0.q_proj"], {"target_modules": ["q_proj"], "layers_to_transform": [0, 7, 9], **LAYERS},
         ["layers_to_transform: no layer has index '7', '9'"]),
        (LINEAR, {"rank_pattern": {"qproj": 3}}, ["rank_pattern: 1 keys match no module: 'qproj'"]),
        (LINEAR, {"alpha_pattern": {"x": 3, "layers.7.q_proj": 3}},
         ["alpha_pattern: 2 keys match no module: 'x', 'layers.7.q_proj'"]),
        (LINEAR, {"lora_alpha": 0}, [f"8 of 8 modules {IDLE}: 'layers.0.k_proj', "]),
        (LINEAR, {"alpha_pattern": {"o_proj": 0}}, [f"2 of 8 modules {IDLE}: 'layers.0.o_proj', 'layers.1.o_proj'"]),
    ],
)  # fmt: skip
def test_configurations(world, tmp_path, modules, fields, expected):
    same_rank = lambda adapter: dataclasses.replace(  # noqa: E731
        adapter,
        modules={n: dataclasses.replace(m, alpha=2.0, scaling=2.0 / m.rank) for n, m in adapter.modules.items()},
    )
    warnings = loaded(world, tmp_path, modules, same_rank, **({"alpha_pattern": {}} | fields))
    assert len(warnings) == len(expected), warnings
    assert all(text in warning for text, warning in zip(expected, warnings, strict=True)), warnings


@pytest.mark.parametrize(("names", "count"), [([], 0), (LINEAR, 8), (LINEAR[3:5], 2)], ids=["none", "all", "some"])
@pytest.mark.parametrize("memory", [False, True])
def test_factors_of_zeros(world, tmp_path, caplog, names, count, memory):
    with caplog.at_level(logging.WARNING, "jlora"):
        if memory:
            world.manager.remove_all_adapters()
            world.manager.add_adapter(with_b(make_adapter("a", modules=LINEAR), names))
            warnings = world.manager.list_adapters()["a"].warnings
        else:
            warnings = loaded(world, tmp_path, change=lambda adapter: with_b(adapter, names))
    assert len(warnings) == len(caplog.records) == bool(count)
    for text in (*warnings, *(record.getMessage() for record in caplog.records)):
        assert f"{count} of 8 modules {IDLE}: {names[0]!r}" in text


def test_one_value_in_the_last_row_is_an_effect(world):
    def b(array):
        new = np.zeros_like(array)
        new[-1, -1] = 1e-3
        return new

    world.manager.remove_all_adapters()
    world.manager.add_adapter(with_b(make_adapter("a", modules=LINEAR), LINEAR, b))
    assert world.manager.list_adapters()["a"].warnings == ()


def test_an_update_ends_the_warnings(world):
    world.manager.remove_all_adapters()
    adapter = make_adapter("a", modules=LINEAR[:1])
    world.manager.add_adapter(with_b(adapter, LINEAR))
    assert world.manager.list_adapters()["a"].warnings
    world.manager.update_adapter("a", {f"{LINEAR[0]}.lora_B.weight": adapter.modules[LINEAR[0]].b})
    assert world.manager.list_adapters()["a"].warnings == ()


class Stack(nnx.Module):
    """Three layers in one module, as `nnx.scan` takes them."""

    def __init__(self):
        make = nnx.vmap(lambda rngs: nnx.Linear(8, 8, use_bias=False, rngs=rngs))
        self.layers = make(nnx.Rngs(0).split(3))

    def __call__(self, x):
        return nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)


def test_layers_of_a_stack_are_counted_one_by_one(tmp_path):
    rng = np.random.default_rng(0)
    halves = rng.normal(size=(2, 8)).astype(np.float32), rng.normal(size=(8, 2)).astype(np.float32)
    jlora.Adapter.from_arrays("a", {"layers.1": halves}, alpha=2).save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"target_modules": r"layers\.[0-9]"}))
    manager = jlora.LoRAManager(Stack(), jlora.LoRAConfig(max_loras=1, max_lora_rank=MAX_RANK))
    manager.add_adapter(jlora.LoRARequest("a", tmp_path))
    (warning,) = manager.list_adapters()["a"].warnings
    assert warning == "brings weights for 1 of 3 targeted layers; none for 'layers.0', 'layers.2'"
