"""Adapters made in memory, and the round trip through a PEFT folder."""

import dataclasses
import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from jlora.adapters import Adapter, ModuleLoRA
from jlora.errors import AdapterFormatError, AdapterMismatchError, LoRAError, LoRAUsageError
from tests.adapters.conftest import Q, V
from tests.adapters.reading import contents

# Names that end in one another, or read as a regular expression.
NAMES = ["lm_head", "model.lm_head", "a.b", "axb", "x.a.b", "m.layers.0.q", "layers.0.q", "q+", "c(d", "embed-1", "ü"]
DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]


def arrays_of(seed, ranks, dtype=np.float32, k=3, n=2):
    rng = np.random.default_rng(seed)
    return {
        module: (rng.normal(size=(r, k)).astype(dtype), rng.normal(size=(n, r)).astype(dtype))
        for module, r in ranks.items()
    }


@given(
    ranks=st.dictionaries(st.sampled_from(NAMES), st.integers(1, 5), min_size=1, max_size=6),
    alphas=st.lists(st.one_of(st.integers(-4, 64), st.floats(-1e3, 1e3)), min_size=6, max_size=6),
    dtype=st.sampled_from(DTYPES),
    use_rslora=st.booleans(),
    seed=st.integers(0, 9),
)
def test_round_trip_is_bitwise(tmp_path_factory, ranks, alphas, dtype, use_rslora, seed):
    folder = tmp_path_factory.mktemp("saved")
    adapter = Adapter.from_arrays(
        "a",
        arrays_of(seed, ranks, dtype),
        alpha=dict(zip(ranks, alphas, strict=False)),
        use_rslora=use_rslora,
        embeddings=[name for name in ranks if name == "embed-1"],
        base_model_name="org/base",
    )
    adapter.save_pretrained(folder)
    assert contents(adapter) == contents(Adapter.from_pretrained(folder))
    Adapter.from_pretrained(folder).save_pretrained(folder / "again")
    weights = "adapter_model.safetensors"
    assert (folder / weights).read_bytes() == (folder / "again" / weights).read_bytes()
    assert sorted(p.name for p in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors", "again"]


def test_round_trip_of_base_weights(tmp_path):
    (a, b), table = arrays_of(0, {"e": 2}, k=7, n=3)["e"], np.arange(21, dtype=np.float16).reshape(7, 3)
    adapter = Adapter(
        name="a",
        modules={"model.embed_tokens": ModuleLoRA(a=a, b=b, kind="embedding", alpha=2.0, scaling=1.0)},
        base_weights={"model.embed_tokens": table, "lm_head": table},
        fan_in_fan_out=True,
    )
    adapter.save_pretrained(tmp_path)
    assert contents(adapter) == contents(Adapter.from_pretrained(tmp_path))
    assert sorted(load_file(tmp_path / "adapter_model.safetensors")) == [
        "base_model.model.lm_head.weight",
        "base_model.model.model.embed_tokens.base_layer.weight",
        "base_model.model.model.embed_tokens.lora_embedding_A",
        "base_model.model.model.embed_tokens.lora_embedding_B",
    ]


def of_dora(magnitudes):
    return {name: {"dora": magnitude} for name, magnitude in magnitudes.items()}


@pytest.mark.parametrize("dtype", DTYPES)
def test_round_trip_of_dora_and_of_invocation_tokens(tmp_path, dtype):
    arrays, shapes = arrays_of(0, {"q": 2, "embed-1": 3}, dtype), []
    magnitudes = {name: np.arange(1, 3).astype(dtype) for name in arrays}
    dora = Adapter.from_arrays("a", arrays, alpha=4, embeddings=["embed-1"], vectors=of_dora(magnitudes))
    activated = Adapter.from_arrays("a", arrays, alpha=4, invocation_tokens=[49152, 7, 7])
    assert (dora.variants, activated.variants) == (("dora",), ())
    assert (dora.invocation_tokens, activated.invocation_tokens) == ((), (49152, 7, 7))
    assert dora.nbytes == activated.nbytes + sum(m.nbytes for m in magnitudes.values())
    for adapter in (activated, dora):
        adapter.save_pretrained(tmp_path)
        assert contents(adapter) == contents(Adapter.from_pretrained(tmp_path, check=shapes.append))
        assert shapes[-1].invocation_tokens == adapter.invocation_tokens
        config = json.loads((tmp_path / "adapter_config.json").read_text())
        assert config.get("use_dora", False) is ("dora" in adapter.variants)
        assert config.get("alora_invocation_tokens", []) == list(adapter.invocation_tokens)
    tensors = load_file(tmp_path / "adapter_model.safetensors") if dtype is not ml_dtypes.bfloat16 else {}
    for name in tensors and magnitudes:
        np.testing.assert_array_equal(tensors[f"base_model.model.{name}.lora_magnitude_vector"], magnitudes[name])


@pytest.mark.parametrize(
    ("options", "error", "cause"),
    [
        ({"vectors": of_dora({"q": np.ones(2)})}, AdapterFormatError, "module 'e' has no vector 'dora'"),
        (
            {"vectors": of_dora(dict.fromkeys("qex", np.ones(2)))},
            LoRAUsageError,
            "alpha, embeddings and vectors must name",
        ),
        ({"vectors": of_dora(dict.fromkeys("qe", np.ones(3)))}, AdapterFormatError, "'dora' .3,. must"),
        ({"vectors": of_dora(dict.fromkeys("qe", np.ones(2, int)))}, AdapterFormatError, "'dora'. must"),
        ({"vectors": of_dora(dict.fromkeys("qe", np.ones((2, 1))))}, AdapterFormatError, "'dora'. must"),
        (
            {"vectors": {key: {"x": np.ones(2)} for key in "qe"}},
            AdapterFormatError,
            "'x' is no variant; expected .*dora",
        ),
        ({"invocation_tokens": [True]}, AdapterFormatError, "adapter 'a': invocation_tokens"),
        ({"invocation_tokens": [-1]}, AdapterFormatError, "adapter 'a': invocation_tokens"),
        ({"invocation_tokens": [1], "embeddings": ["e"]}, AdapterMismatchError, "'a': 'e' is of kind 'embedding'"),
        (
            {"invocation_tokens": [1], "vectors": of_dora(dict.fromkeys("qe", np.ones(2)))},
            AdapterMismatchError,
            "adapter 'a': use_dora and alora_invocation_tokens",
        ),
    ],
)
def test_variants_that_cannot_be_made(options, error, cause):
    with pytest.raises(error, match=cause):
        Adapter.from_arrays("a", arrays_of(0, {"q": 2, "e": 2}), alpha=4, **options)


def test_dora_of_some_modules_is_refused():
    arrays = arrays_of(0, {"q": 2, "e": 2})
    dora = Adapter.from_arrays("a", arrays, alpha=4, vectors=of_dora(dict.fromkeys("qe", np.ones(2))))
    mixed = {"q": dora.modules["q"], "e": dataclasses.replace(dora.modules["e"], vectors={})}
    with pytest.raises(AdapterFormatError, match="module 'e' has no vector 'dora'"):
        dataclasses.replace(dora, modules=mixed)


FIELDS = {
    "task_type": "CAUSAL_LM",
    "fan_in_fan_out": True,
    "base_model_name_or_path": "org/base",
    "revision": "v2",
    "auto_mapping": {"base_model_class": "Net", "parent_library": "my.models"},
    "inference_mode": False,
    "lora_dropout": 0.05,
    "peft_version": "0.21.2",
    "megatron_core": "megatron.core",
    "use_rslora": True,
    "init_lora_weights": "gaussian",
    "ensure_weight_tying": False,
    "qalora_group_size": 16,
    "eva_config": None,
    "runtime_config": {"ephemeral_gpu_offload": False},
}


def test_fields_of_peft_survive_a_save_without_shapes_and_targets(folder_of, tmp_path):
    """Fields derived from the modules are not kept, and fields that could change the result are refused."""
    adapter = Adapter.from_pretrained(folder_of(exclude_modules=["x"], layers_to_transform=[0, 1], **FIELDS))
    adapter.save_pretrained(tmp_path / "again")
    written = json.loads((tmp_path / "again" / "adapter_config.json").read_text())
    assert {name: written[name] for name in FIELDS} == FIELDS
    again = Adapter.from_pretrained(tmp_path / "again")
    assert contents(again) == contents(adapter)
    assert again.peft_fields == adapter.peft_fields
    derived = {"r", "lora_alpha", "target_modules", "exclude_modules", "layers_to_transform", "bias"}
    assert not derived & adapter.peft_fields.keys()
    for name in ("use_dora", "r", "new_field"):
        odd = dataclasses.replace(adapter, peft_fields={name: True})
        with pytest.raises(LoRAUsageError, match=f"peft_fields may hold .*found .*{name}"):
            odd.save_pretrained(tmp_path / "odd")
    assert not (tmp_path / "odd").exists()


def test_fields_that_cannot_be_checked_are_reported(folder_of):
    adapter = Adapter.from_pretrained(folder_of(target_modules=r"^(?!.*vision).*_proj"))
    assert set(adapter.modules) == {Q, V}
    assert [line.partition(":")[0] for line in adapter.unchecked] == ["field 'target_modules'"]
    assert Adapter.from_pretrained(folder_of(target_modules=r".*_proj")).unchecked == ()


def test_from_jax_and_transposed_arrays(tmp_path):
    a = np.arange(6, dtype=np.float32).reshape(3, 2).T
    adapter = Adapter.from_arrays("a", {Q: (a, jnp.ones((4, 2), jnp.bfloat16))}, alpha=1)
    adapter.save_pretrained(tmp_path)
    lora = Adapter.from_pretrained(tmp_path).modules[Q]
    np.testing.assert_array_equal(lora.a, [[0, 2, 4], [1, 3, 5]])
    assert lora.b.dtype == ml_dtypes.bfloat16


@pytest.mark.usefixtures("unchecked_calls")
def test_arrays_and_options_that_do_not_fit():
    for a, b in (
        (np.ones((2, 3)), np.ones((4, 3))),
        (np.ones(2), np.ones((4, 2))),
        (np.ones((2, 3), int), np.ones((4, 2))),
        (np.ones((0, 3)), np.ones((4, 0))),
        ("a", "b"),
    ):
        with pytest.raises(AdapterFormatError, match="ModuleLoRA"):
            Adapter.from_arrays("a", {Q: (a, b)}, alpha=1)
    with pytest.raises(AdapterFormatError, match="kind"):
        ModuleLoRA(a=np.ones((1, 1)), b=np.ones((1, 1)), kind="conv", alpha=1, scaling=1)
    for options in ({"alpha": {Q: 1}}, {"alpha": 1, "embeddings": ["x"]}, {"alpha": 1, "embeddings": Q}):
        with pytest.raises(LoRAUsageError, match="must name the modules"):
            Adapter.from_arrays("a", arrays_of(0, {Q: 2, V: 2}), **options)
    for alpha in ("8", None, True, [8]):
        with pytest.raises(LoRAUsageError, match="must be a number"):
            Adapter.from_arrays("a", arrays_of(0, {Q: 2}), alpha=alpha)


@pytest.mark.usefixtures("unchecked_calls")
def test_adapters_that_cannot_be_saved_are_refused(tmp_path):
    (tmp_path / "file").write_text("")
    adapter = Adapter.from_arrays("a", arrays_of(0, {Q: 2}), alpha=4)
    with pytest.raises(LoRAError, match="is a file"):
        adapter.save_pretrained(tmp_path / "file")
    with pytest.raises(LoRAError, match="no module"):
        Adapter(name="a", modules={}).save_pretrained(tmp_path / "x")
    lora = adapter.modules[Q]
    odd = ModuleLoRA(a=lora.a, b=lora.b, alpha=4.0, scaling=3.0)
    with pytest.raises(LoRAError, match=r"has scaling 3.0, but PEFT would compute 2.0"):
        Adapter(name="a", modules={Q: odd}).save_pretrained(tmp_path / "x")
    assert not (tmp_path / "x").exists()
