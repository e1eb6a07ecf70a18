"""`target_modules`, `exclude_modules` and `skip`: selected layers and errors."""

import itertools
import re

import pytest
from flax import nnx

from jlora.config import LoRAConfig
from jlora.errors import AdapterMismatchError, LoRAError, LoRAUsageError
from jlora.manager.manager import LoRAManager
from tests.layers.merging import Target, make_adapter, make_manager, wrapped_paths


class Attention(nnx.Module):
    def __init__(self, rngs):
        self.qkv_proj = nnx.Linear(6, 12, rngs=rngs)
        self.q_proj = nnx.Linear(6, 6, rngs=rngs)
        self.proj = nnx.Linear(6, 6, rngs=rngs)
        self.conv = nnx.Conv(6, 6, (1,), rngs=rngs)


class Model(nnx.Module):
    packed_modules = {"qkv_proj": ("query", "key", "value")}

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(11, 6, rngs=rngs)
        self.layers = nnx.List([Attention(rngs), Attention(rngs)])
        self.proj = nnx.Linear(6, 6, rngs=rngs)


def layers_of(*indices: int, names: tuple[str, ...] = ("qkv_proj", "q_proj", "proj")) -> set[str]:
    return {f"layers.{i}.{name}" for i in indices for name in names}


EVERYTHING = {"embed", "embed.attend", "proj"} | layers_of(0, 1)


@pytest.mark.parametrize(
    ("targets", "paths"),
    [
        (None, EVERYTHING),
        (["q_proj"], layers_of(0, 1, names=("q_proj",))),
        (["1.q_proj"], {"layers.1.q_proj"}),
        (["proj"], {"proj", "layers.0.proj", "layers.1.proj"}),  # never q_proj or qkv_proj
        (["key"], layers_of(0, 1, names=("qkv_proj",))),
        (["layers.0.value", "embed"], {"layers.0.qkv_proj", "embed", "embed.attend"}),
        (["lm_head"], {"embed.attend"}),
        (["embed.attend", "proj"], {"embed.attend", "proj", "layers.0.proj", "layers.1.proj"}),
    ],
)
def test_targets_are_suffixes_full_paths_and_packed_names(targets, paths):
    assert {*wrapped_paths(make_manager(Model(), target_modules=targets))} == paths


@pytest.mark.parametrize(
    ("excluded", "left_out"),
    [
        (["q_proj"], layers_of(0, 1, names=("q_proj",))),
        (["key"], layers_of(0, 1, names=("qkv_proj",))),
        (["lm_head"], {"embed.attend"}),
        (["embed"], {"embed", "embed.attend"}),
        (["layers.0"], layers_of(0)),
        (["layers", "conv"], layers_of(0, 1)),
    ],
)
def test_exclude_modules_leaves_layers_out(excluded, left_out):
    manager = make_manager(Model(), exclude_modules=excluded)
    assert {*wrapped_paths(manager)} == EVERYTHING - left_out


@pytest.mark.parametrize("target", ["roj", "layers", "layers.2.q_proj", "Proj", "s.0.proj"])
def test_a_target_that_matches_nothing_raises(target):
    model = Model()
    with pytest.raises(LoRAError, match=r"match no layer of Model|match 'layers"):
        make_manager(model, target_modules=["q_proj", target])
    assert type(model.proj) is nnx.Linear


def test_a_model_with_nothing_to_wrap_raises():
    class Bare(nnx.Module):
        def __init__(self):
            self.norm = nnx.RMSNorm(6, rngs=nnx.Rngs(0))

    with pytest.raises(LoRAError, match=r"Bare has no layer that can serve LoRA"):
        make_manager(Bare())
    with pytest.raises(LoRAError, match=r"hold it in an nnx.Module"):
        make_manager(nnx.Linear(6, 6, rngs=nnx.Rngs(0)))


def test_fully_sharded_needs_a_mesh():
    model = nnx.Sequential(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    with pytest.raises(LoRAError, match="fully_sharded"):
        LoRAManager(model, LoRAConfig(max_loras=1, max_lora_rank=1, fully_sharded=True))
    assert type(model.layers[0]) is nnx.Linear


@pytest.mark.parametrize("name", ["roj", "layers.0.q", "*"])
def test_an_exclusion_that_matches_nothing_raises(name):
    model = Model()
    with pytest.raises(LoRAUsageError, match=rf"exclude_modules \['{re.escape(name)}'\] match no layer of Model"):
        make_manager(model, exclude_modules=["q_proj", name])
    assert type(model.proj) is nnx.Linear
    with pytest.raises(LoRAUsageError, match="exclude_modules must be None or a list"):
        LoRAConfig(max_loras=1, max_lora_rank=1, exclude_modules="proj")


# --- layers() and unknown names -------------------------------------------------------------------------------------


def test_layers_reports_wrapped_layers_and_reasons():
    manager = make_manager(Model(), exclude_modules=["layers.0.q_proj"])
    shown = {layer.path: layer for layer in manager.layers()}
    assert set(shown) == EVERYTHING | {"layers.0.conv", "layers.1.conv"}
    qkv = shown["layers.1.qkv_proj"]
    assert (qkv.kind, qkv.in_features, qkv.out_features, qkv.wrapped, qkv.reason) == ("linear", 6, 12, True, None)
    assert (shown["embed"].kind, shown["embed"].in_features, shown["embed"].out_features) == ("embedding", 11, 6)
    assert not shown["layers.0.q_proj"].wrapped
    assert "exclude_modules" in (shown["layers.0.q_proj"].reason or "")
    assert "Conv is not a linear or embedding layer that jlora knows" in (shown["layers.0.conv"].reason or "")


@pytest.mark.parametrize(
    ("name", "near"), [("model.layers.1.self_attn.q_proj", "layers.1.q_proj"), ("layers.7.q_proj", "layers.1.q_proj")]
)
def test_an_unknown_module_raises_with_the_nearest_path(name, near):
    manager = make_manager(Model())
    with pytest.raises(AdapterMismatchError, match=rf"no module '{name}' .*; the nearest is '{near}'"):
        manager.add_adapter(make_adapter("one", [Target(name, 6, 6, "")], 2))
    with pytest.raises(LoRAUsageError, match=r"match no layer of Model; the nearest is 'layers.1.q_proj'"):
        make_manager(Model(), target_modules=["self_attn.q_proj"])


def test_a_thousand_unknown_names_get_a_few_hints():
    """Every search takes milliseconds, and an adapter can have any number of names."""
    letters = ["".join(each) for each in itertools.product("abcdefghij", repeat=3)]
    targets = [Target(f"other.{name}_proj", 6, 6, "") for name in letters]
    with pytest.raises(AdapterMismatchError) as caught:
        make_manager(Model()).add_adapter(make_adapter("one", targets, 1))
    assert len(caught.value.problems) == len(targets) == 1000
    assert 0 < sum("the nearest is" in problem for problem in caught.value.problems) <= 8


# --- skip -----------------------------------------------------------------------------------------------------------


def test_skip_ignores_matching_modules_only():
    here, mtp = Target("proj", 6, 6, ""), Target("mtp.0.proj", 6, 6, "")
    tower = Target("vision_tower.q_proj", 4, 4, "")
    manager = make_manager(Model(), skip=[r"^mtp\.", r"^vision_tower\."])
    manager.add_adapter(make_adapter("one", [here, mtp, tower], 2))
    skipped = {layer.path: layer.reason for layer in manager.layers() if layer.kind == "skipped"}
    assert set(skipped) == {"mtp.0.proj", "vision_tower.q_proj"}
    assert "skip='^mtp" in (skipped["mtp.0.proj"] or "")
    with pytest.raises(AdapterMismatchError, match=r"no module 'audio\.proj'"):
        manager.add_adapter(make_adapter("two", [here, mtp, Target("audio.proj", 6, 6, "")], 2))
    with pytest.raises(AdapterMismatchError, match="weights for skipped modules only"):
        manager.add_adapter(make_adapter("three", [mtp], 2))
    with pytest.raises(AdapterMismatchError, match=r"no module 'mtp.0.proj' .*skip"):
        make_manager(Model()).add_adapter(make_adapter("one", [here, mtp], 2))


@pytest.mark.usefixtures("unchecked_calls")
@pytest.mark.parametrize("skip", ["mtp", ["("], [None]])
def test_a_malformed_skip_is_refused(skip):
    model = Model()
    with pytest.raises(LoRAUsageError, match="skip"):
        make_manager(model, skip=skip)
    assert type(model.proj) is nnx.Linear
