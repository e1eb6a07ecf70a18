"""Adapters that change nothing or a part of what they target: one warning, with counts and first names."""

import dataclasses
import json
import logging

import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import jlora
from tests.layers.expert_models import Model, Seams
from tests.manager.test_experts import each, stacked
from tests.manager.tiny import MAX_RANK, Stack, make_adapter, make_world

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


def with_b(adapter, names):
    modules = {n: dataclasses.replace(m, b=0 * m.b) if n in names else m for n, m in adapter.modules.items()}
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
        # Of an expression, those names count of which there are some weights.
        (["layers.1.q_proj"], {"target_modules": "all-linear"}, ["weights for 1 of 2 targeted"]),
        (["layers.1.q_proj"], {"target_modules": r".*\.(q|k)_proj"}, ["weights for 1 of 2 targeted"]),
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
def test_factors_of_zeros(world, tmp_path, caplog, names, count):
    """From files and from memory; one value in the last row is an effect, and so is an update."""
    adapter = make_adapter("a", modules=LINEAR)
    with caplog.at_level(logging.WARNING, "jlora"):
        warnings = loaded(world, tmp_path, change=lambda adapter: with_b(adapter, names))
        assert world.manager.add_adapter(with_b(adapter, names), load_inplace=True)
    assert world.manager.list_adapters()["a"].warnings == warnings
    assert 2 * len(warnings) == len(caplog.records) == 2 * bool(count)
    fresh = "B is zero in all 8 modules, which change nothing: they are not trained yet"
    for text in (*warnings, *(record.getMessage() for record in caplog.records)):
        assert (fresh if count == 8 else f"{count} of 8 modules {IDLE}: {names[0]!r}") in text
    for name in names:
        b = np.zeros_like(adapter.modules[name].b)
        b[-1, -1] = 1e-3
        world.manager.update_adapter("a", {f"{name}.lora_B.weight": b})
    assert world.manager.list_adapters()["a"].warnings == ()


class Scanned(nnx.Module):
    """Three layers in one module, as `nnx.scan` takes them, below a module."""

    def __init__(self):
        self.layers = nnx.Module()
        self.layers.q_proj = Stack().layers


def on_scanned(tmp_path, modules, **fields):
    rng = np.random.default_rng(0)
    halves = rng.normal(size=(2, 8)).astype(np.float32), rng.normal(size=(8, 2)).astype(np.float32)
    jlora.Adapter.from_arrays("a", dict.fromkeys(modules, halves), alpha=2).save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    manager = jlora.LoRAManager(Scanned(), jlora.LoRAConfig(max_loras=1, max_lora_rank=MAX_RANK))
    manager.add_adapter(jlora.LoRARequest("a", tmp_path))
    return manager.list_adapters()["a"].warnings


def test_layers_of_a_stack_are_counted_one_by_one(tmp_path):
    (warning,) = on_scanned(tmp_path, ["layers.1.q_proj"], target_modules=["q_proj"])
    assert warning == "brings weights for 1 of 3 targeted layers; none for 'layers.q_proj[0]', 'layers.q_proj[2]'"
    assert on_scanned(tmp_path, [f"layers.{i}.q_proj" for i in range(3)], target_modules=["q_proj"]) == ()


def test_a_head_without_lora_has_no_warning():
    adapter = jlora.Adapter(name="a", modules={}, heads={"score": jlora.SavedHead(np.ones((3, 4), np.float32))})
    assert adapter.warnings() == []


def test_layers_to_transform_of_a_stack(tmp_path):
    fields = {"target_modules": ["q_proj"], "layers_to_transform": [1, 2, 5], **LAYERS}
    (warning,) = on_scanned(tmp_path, ["layers.1.q_proj"], **fields)
    assert warning == "layers_to_transform: no layer has index '5'"


def test_a_head_that_is_saved_and_targeted_is_complete(tmp_path):
    """PEFT leaves modules_to_save out of the targets."""
    model = nnx.Dict({name: nnx.Linear(4, 4, use_bias=False, rngs=nnx.Rngs(0)) for name in ("proj", "score")})
    heads = {"score": jlora.SavedHead(np.ones((3, 4), np.float32))}
    plain = jlora.Adapter.from_arrays("a", {"proj": (np.ones((1, 4)), np.ones((4, 1)))}, alpha=1, heads=heads)
    plain.save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"target_modules": ["proj", "score"]}))
    config = jlora.LoRAConfig(max_loras=1, max_lora_rank=2, saved_heads={"score": 3})
    manager = jlora.LoRAManager(model, config)
    manager.add_adapter(jlora.LoRARequest("a", tmp_path))
    assert manager.list_adapters()["a"].warnings == ()


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "gate_proj", "up_proj", "down_proj"], r".*experts.*"])
@pytest.mark.parametrize("form", [each, stacked])
def test_adapters_of_experts_alone_are_counted(tmp_path, form, targets):
    """All experts of a projection are one layer, and a projection of which no layer has weights is not counted."""
    form("a").save_pretrained(tmp_path)
    file, weights = tmp_path / "adapter_config.json", tmp_path / "adapter_model.safetensors"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"target_modules": targets}))
    manager = jlora.LoRAManager(Model(Seams, nnx.Rngs(0)), jlora.LoRAConfig(max_loras=1, max_lora_rank=2))
    manager.add_adapter(jlora.LoRARequest("a", tmp_path))
    assert manager.list_adapters()["a"].warnings == ()
    kept = {key: value for key, value in load_file(weights).items() if "layers.1.experts" not in key or "up_" in key}
    save_file(kept, weights)
    manager.add_adapter(jlora.LoRARequest("a", tmp_path, load_inplace=True))
    (warning,) = manager.list_adapters()["a"].warnings
    assert "brings weights for 4 of 6 targeted layers; none for 'layers.1.experts.gate_proj'" in warning
