"""Weights files are read or refused with a message that names the cause."""

import ml_dtypes
import numpy as np
import pytest

from jlora import LoRAError
from jlora.errors import AdapterFormatError, AdapterMismatchError, LoRAUsageError
from tests.adapters.conftest import PREFIX, Q, V, lora_tensors
from tests.adapters.reading import load_all_ways as load

EMBED, HEAD = "model.embed_tokens", "lm_head"


@pytest.mark.parametrize("prefix", [PREFIX, ""])
def test_key_prefixes(folder_of, prefix):
    tensors = lora_tensors({Q: 4, V: 4}, prefix)
    adapter = load(folder_of(tensors))
    assert list(adapter.modules) == [Q, V]
    for module, lora in adapter.modules.items():
        np.testing.assert_array_equal(lora.a, tensors[f"{prefix}{module}.lora_A.weight"])
        np.testing.assert_array_equal(lora.b, tensors[f"{prefix}{module}.lora_B.weight"])
        assert (lora.kind, lora.rank, lora.alpha, lora.scaling) == ("linear", 4, 8.0, 2.0)


@pytest.mark.parametrize("dtype", ["int8", np.int32, "floaty", "complex64", "float8_e4m3fn"])
def test_conversion_to_a_dtype_that_is_not_served(folder_of, dtype):
    with pytest.raises(LoRAUsageError, match="dtype"):
        load(folder_of(), dtype=dtype)


def test_rank_and_alpha_patterns_and_rslora(folder_of):
    tensors = lora_tensors({Q: 4, V: 2})
    folder = folder_of(tensors, rank_pattern={"v_proj": 2}, alpha_pattern={"layers.1.self_attn.v_proj": 3})
    modules = load(folder).modules
    assert [(m.rank, m.alpha, m.scaling) for m in modules.values()] == [(4, 8.0, 2.0), (2, 3.0, 1.5)]
    folder = folder_of(tensors, rank_pattern={"v_proj": 2}, use_rslora=True)
    assert [m.scaling for m in load(folder).modules.values()] == [4.0, 8 / 2**0.5]
    assert load(folder).rank == 4


def embedding_tensors(r=4, vocabulary=11, width=6):
    rng = np.random.default_rng(3)
    return {
        f"{PREFIX}{EMBED}.lora_embedding_A": rng.normal(size=(r, vocabulary)).astype(np.float32),
        f"{PREFIX}{EMBED}.lora_embedding_B": rng.normal(size=(width, r)).astype(np.float32),
        f"{PREFIX}{EMBED}.base_layer.weight": rng.normal(size=(vocabulary, width)).astype(np.float32),
    }


def test_embedding(folder_of):
    tensors = embedding_tensors()
    adapter = load(folder_of(tensors, target_modules=["embed_tokens"]))
    lora = adapter.modules[EMBED]
    assert (lora.kind, lora.a.shape, lora.b.shape) == ("embedding", (4, 11), (6, 4))
    np.testing.assert_array_equal(lora.a, tensors[f"{PREFIX}{EMBED}.lora_embedding_A"])
    np.testing.assert_array_equal(lora.b, tensors[f"{PREFIX}{EMBED}.lora_embedding_B"])
    np.testing.assert_array_equal(adapter.base_weights[EMBED], tensors[f"{PREFIX}{EMBED}.base_layer.weight"])


def test_lm_head(folder_of):
    tensors = lora_tensors({HEAD: 4}, k=6, n=11) | {f"{PREFIX}{HEAD}.base_layer.weight": np.ones((11, 6), np.float16)}
    adapter = load(folder_of(tensors, target_modules=["lm_head"]), dtype="float32")
    assert adapter.modules[HEAD].kind == "linear"
    assert {name: w.dtype for name, w in adapter.base_weights.items()} == {HEAD: np.float16}


def dora_tensors(name="lora_magnitude_vector", dtype=np.float32):
    """Tensors of a linear layer and an embedding, with magnitudes."""
    tensors = lora_tensors({Q: 4})
    tensors |= {key: t for key, t in embedding_tensors().items() if "lora_" in key}
    for module, size in ((Q, 5), (EMBED, 6)):
        tensors[f"{PREFIX}{module}.{name}"] = np.linspace(1, 2, size).astype(dtype)
    return tensors


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("lora_magnitude_vector", np.float16),
        ("lora_magnitude_vector.weight", ml_dtypes.bfloat16),
        ("lora_magnitude_vector.default", np.float32),
        ("lora_magnitude_vector.default.weight", np.float64),
    ],
)
def test_magnitudes(folder_of, name, dtype):
    tensors, shapes = dora_tensors(name, dtype), []
    folder = folder_of(tensors, use_dora=True, target_modules=["q_proj", "embed_tokens"])
    adapter = load(folder, check=shapes.append)
    assert adapter.variants == ("dora",)
    assert set(adapter.modules) == {Q, EMBED}
    for module, lora in adapter.modules.items():
        expected = tensors[f"{PREFIX}{module}.{name}"]
        magnitude = lora.vectors["dora"]
        assert (magnitude.dtype, magnitude.tobytes()) == (expected.dtype, expected.tobytes())
    assert adapter.nbytes == shapes[0].nbytes == sum(tensor.nbytes for tensor in tensors.values())
    converted = load(folder, dtype="bfloat16", check=shapes.append)
    assert {lora.vectors["dora"].dtype for lora in converted.modules.values()} == {np.dtype(ml_dtypes.bfloat16)}
    assert converted.nbytes == shapes[1].nbytes


BOTH = ["q_proj", "embed_tokens"]
PLAIN = {key: t for key, t in dora_tensors().items() if "magnitude" not in key}
EXPERTS = {f"{PREFIX}mlp.experts.lora_{x}.weight": np.ones(s, np.float32) for x, s in (("A", (8, 6)), ("B", (5, 8)))}
OF_EXPERTS = {"target_parameters": ["mlp.experts.down_proj"], "target_modules": []}
ALORA = {"alora_invocation_tokens": [1]}


@pytest.mark.parametrize(
    ("tensors", "fields", "cause"),
    [
        (
            dora_tensors(),
            {"use_dora": True, **ALORA, "target_modules": BOTH},
            r"use_dora and alora_.* are set together",
        ),
        (PLAIN, {**ALORA, "target_modules": BOTH}, f"'{EMBED}' is of kind 'embedding', and PEFT has activated LoRA"),
        (EXPERTS, {**ALORA, **OF_EXPERTS}, "down_proj' is of kind 'experts', and PEFT has activated LoRA"),
        (EXPERTS, {"use_dora": True, **OF_EXPERTS}, "down_proj' is of kind 'experts', and PEFT has DoRA for linear"),
    ],
)
def test_combinations_that_peft_refuses(folder_of, tensors, fields, cause):
    with pytest.raises(AdapterMismatchError, match=cause):
        load(folder_of(tensors, **fields))


A, B, MAGNITUDE = (f"{PREFIX}{Q}.{end}" for end in ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector"))
DORA = {"use_dora": True, "target_modules": ["q_proj", "embed_tokens", "v_proj"]}
# The tensors that are replaced (None: left out), and the message.
MALFORMED = {
    "no B": ({B: None}, r"module 'model.layers.0.self_attn.q_proj' has tensor .*expected one A and one B"),
    "both kinds": ({f"{PREFIX}{Q}.lora_embedding_{x}": np.ones((4, 4), np.float32) for x in "AB"}, "one A and one B"),
    "one dim": ({A: np.ones(4, np.float32)}, r"has shape \(4,\); expected \(4, in\)"),
    "scalar": ({B: np.ones((), np.float32)}, r"has shape \(\); expected \(out, 4\)"),
    "empty": ({A: np.ones((4, 0), np.float32)}, r"has shape \(4, 0\)"),
    "int8": ({A: np.ones((4, 6), np.int8)}, r"has dtype I8; expected one of F16, BF16, F32, F64"),
    "two prefixes": ({A.removeprefix(PREFIX): np.ones((4, 6), np.float32)}, "mean the same array"),
    "empty name": ({"..lora_A.weight": np.ones((4, 6), np.float32)}, "not a dotted module name"),
    "long name": ({"a" * 600 + ".lora_A.weight": np.ones((4, 6), np.float32)}, "not a dotted module name"),
}
MALFORMED_DORA = {
    "missing": ({MAGNITUDE: None}, rf"module '{Q}' has no tensor lora_magnitude_vector; expected one"),
    "short": ({MAGNITUDE: np.ones(4, np.float32)}, rf"'{MAGNITUDE}' has shape \(4,\); expected \(5,\)"),
    "int8": ({MAGNITUDE: np.ones(5, np.int8)}, rf"'{MAGNITUDE}' has dtype I8; expected one of F16"),
    "NaN": ({MAGNITUDE: np.full(5, np.nan, np.float32)}, f"'{MAGNITUDE}' holds NaN or infinity"),
    "two names": ({f"{MAGNITUDE}.weight": np.ones(5, np.float32)}, "mean the same array"),
    "of another module": (
        {f"{PREFIX}{V}.lora_magnitude_vector": np.ones(5, np.float32)},
        f"module '{V}' has tensor '{PREFIX}{V}.lora_magnitude_vector'; expected one A and one B",
    ),
    "of none": ({}, r"lora_magnitude_vector' is of DoRA, and 'use_dora' is not set"),
}


@pytest.mark.parametrize("case", [*MALFORMED, *(f"DoRA: {case}" for case in MALFORMED_DORA)])
def test_malformed_tensors(folder_of, case):
    dora, name = case.startswith("DoRA: "), case.removeprefix("DoRA: ")
    change, cause = (MALFORMED_DORA if dora else MALFORMED)[name]
    tensors = (dora_tensors() if dora else lora_tensors({Q: 4, V: 4})) | change
    fields = DORA | {"use_dora": name != "of none"} if dora else {}
    folder = folder_of({key: tensor for key, tensor in tensors.items() if tensor is not None}, **fields)
    for dtype in (None, "float16"):
        with pytest.raises(AdapterFormatError, match=cause) as raised:
            load(folder, dtype=dtype)
        assert "adapter 'sql'" in str(raised.value)
        assert "adapter_model.safetensors" in str(raised.value)


WHOLE = "a weight or bias of a module itself, which modules_to_save in adapter_config.json does not name"
UNSERVED = {
    **dict.fromkeys((f"{Q}.bias", "score.modules_to_save.weight", "score.weight", "model.norm.weight"), WHOLE),
    **dict.fromkeys((f"{Q}.lora_B.bias", f"{Q}.lora_E", "nonsense"), "of a kind that jlora does not serve"),
}


@pytest.mark.parametrize("key", UNSERVED)
def test_unserved_tensors(folder_of, key):
    with pytest.raises(AdapterMismatchError) as raised:
        load(folder_of(lora_tensors({Q: 4}) | {f"{PREFIX}{key}": np.ones((2, 2), np.float32)}))
    assert f"'{PREFIX}{key}'" in str(raised.value)
    assert UNSERVED[key] in str(raised.value)


@pytest.mark.parametrize("halves", ["AB", "A", "B"])
def test_transposed_factors_are_named(folder_of, halves):
    tensors = lora_tensors({Q: 4})
    for half in halves:
        key = f"{PREFIX}{Q}.lora_{half}.weight"
        tensors[key] = np.ascontiguousarray(tensors[key].T)
    with pytest.raises(
        AdapterFormatError, match=f"lora_{halves[0]}.weight' has shape .*: A and B are transposed or exchanged"
    ):
        load(folder_of(tensors))


def test_names_in_messages_are_escaped_and_cut(folder_of):
    odd = "\x1b[31m\nadapter 'other': all is well" + "x" * 5000
    for tensors in (
        {odd: np.ones((4, 6), np.float32)},
        lora_tensors({Q: 4}) | {f"{odd}.lora_A.weight": np.ones((4, 6), np.float32)},
        {f"{odd}.lora_A.weight": np.ones((4, 6), np.float32)},
        lora_tensors({"m." + "y" * 500: 4}),
        lora_tensors({Q: 4}) | {A: np.ones((1,) * 50, np.float32)},
    ):
        with pytest.raises(LoRAError) as raised:
            load(folder_of(tensors), name=odd)
        assert str(raised.value).isprintable()
        assert len(str(raised.value)) < 1500


def test_convolution(folder_of):
    with pytest.raises(AdapterMismatchError, match="convolutions"):
        load(folder_of({A: np.ones((4, 6, 3, 3), np.float32), B: np.ones((5, 4, 1, 1), np.float32)}))


@pytest.mark.parametrize(
    ("module", "fields"),
    [
        (Q, {"target_modules": ["v_proj"]}),
        (Q, {"target_modules": r".*\.v_proj"}),
        (Q, {"exclude_modules": ["layers.0.self_attn.q_proj"]}),
        (Q, {"layers_to_transform": [1]}),
        (Q, {"layers_to_transform": [0], "layers_pattern": "h"}),
        (HEAD, {"target_modules": "all-linear"}),
        ("mlp.q_proj.base_layer", {"target_modules": ".*"}),  # LoRA of a parameter
    ],
)
def test_modules_that_the_configuration_does_not_target(folder_of, module, fields):
    with pytest.raises(AdapterMismatchError, match="does not target module"):
        load(folder_of(lora_tensors({module: 4}), **fields))


def test_base_weight_of_another_shape(folder_of):
    tensors = embedding_tensors()
    tensors[f"{PREFIX}{EMBED}.base_layer.weight"] = np.ones((6, 11), np.float32)
    with pytest.raises(AdapterFormatError, match=r"base_layer.weight' has shape \(6, 11\); expected \(11, 6\)"):
        load(folder_of(tensors, target_modules=["embed_tokens"]))
