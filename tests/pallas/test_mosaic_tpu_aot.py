"""The TPU kernel through the compilers of real chips: a covering part of what `benchmarks/aot_tpu.py` does."""

import pytest

from benchmarks.aot_tpu import VMEM_MIB, compile_add_lora, compile_experts
from benchmarks.moe_specs import MODELS
from benchmarks.specs import PROJECTIONS

pytestmark = pytest.mark.usefixtures("as_users_compile")  # what is read off a program must be that of an optimised one
slow = pytest.mark.slow
# Every chip, projection, rank and number of tokens of the matrix occurs, at least once each; one chip of the four in
# `make test`.
MATRIX = [
    ("v5e", "qkv", 8, 1),
    pytest.param("v5e", "gate_up", 16, 64, marks=slow),
    pytest.param("v5e", "down", 64, 2048, marks=slow),
    pytest.param("v5p", "o", 16, 8, marks=slow),
    pytest.param("v5p", "qkv", 128, 256, marks=slow),
    pytest.param("v6e", "down", 128, 32, marks=slow),
    pytest.param("v6e", "gate_up", 8, 256, marks=slow),
    pytest.param("tpu7x", "o", 64, 8192, marks=slow),
    pytest.param("tpu7x", "qkv", 16, 64, marks=slow),
    pytest.param("tpu7x", "gate_up", 128, 32, marks=slow),
]
# Sizes of other models: chip, tokens, K, slices, rank, groups, dtype.
OTHERS = [
    ("v5e", 40, 2880, (2880, 2880), 32, 16, "bfloat16"),
    pytest.param("v6e", 300, 11008, (4096,), 4, 16, "bfloat16", marks=slow),
    pytest.param("tpu7x", 9, 14336, (4096,), 512, 8, "bfloat16", marks=slow),
    # A vocabulary: its last columns take a copy of their own.
    pytest.param("tpu7x", 16, 4096, (32001,), 64, 8, "bfloat16", marks=slow),
    pytest.param("v5p", 33, 1408, (2048,), 24, 9, "float32", marks=slow),
]


def check(chip, facts):
    assert 0 < facts["vmem_bytes"] <= VMEM_MIB[chip] << 20
    assert facts["in_place"]
    assert facts["weights_in_place"]


@pytest.mark.parametrize(("chip", "projection", "rank", "tokens"), MATRIX)
def test_compiles_the_matrix(chip, projection, rank, tokens):
    p = PROJECTIONS[projection]
    check(chip, compile_add_lora(chip, tokens, p.k, p.slices, rank))


@pytest.mark.parametrize(("chip", "tokens", "k", "slices", "rank", "groups", "dtype"), OTHERS)
def test_compiles_other_sizes(chip, tokens, k, slices, rank, groups, dtype):
    check(chip, compile_add_lora(chip, tokens, k, slices, rank, groups=groups, dtype=dtype))


def test_compiles_odd_sizes():
    """XLA gives arrays this small layouts of its own choice, so copies before the kernel are not its fault."""
    assert compile_add_lora("v5p", 300, 77, (45, 13), 5, groups=9, dtype="float32")["vmem_bytes"] < 4 << 20


QWEN3, GPT_OSS, MIXTRAL = (MODELS[name] for name in ("qwen3-30b-a3b", "gpt-oss-20b", "mixtral-8x7b"))
GROUPS_INNERMOST = pytest.mark.xfail(
    strict=True, reason="K = 2880 is no multiple of 128 and G = 2048 is: XLA lays groups out innermost and copies"
)
# Chip, model, tokens, rank, layers: 64 slots of every expert. Those of rank 64 take 9 GB a layer.
EXPERTS = [
    ("v5e", QWEN3, 64, 16, 2),
    *(
        pytest.param(chip, QWEN3, tokens, rank, 1 if (chip, rank) == ("v5e", 64) else 2, marks=slow)
        for chip in VMEM_MIB
        for rank in (16, 64)
        for tokens in (64, 2048)
        if (chip, rank, tokens) != ("v5e", 16, 64)
    ),
    pytest.param("v6e", QWEN3, 8192, 8, 2, marks=slow),
    pytest.param("v5p", GPT_OSS, 64, 16, 2, marks=[slow, GROUPS_INNERMOST]),
    pytest.param("tpu7x", MIXTRAL, 2048, 16, 2, marks=slow),
]


@pytest.mark.parametrize(("chip", "model", "tokens", "rank", "layers"), EXPERTS)
def test_compiles_experts_by_default(chip, model, tokens, rank, layers, monkeypatch):
    for module in ("api", "moe", "tiles"):
        monkeypatch.setattr(f"jlora.pallas.{module}.platform", lambda: "tpu")
    facts = compile_experts(chip, model, tokens, rank, layers=layers)
    assert facts["kernels"] == 2 * layers
    assert 0 < facts["vmem_bytes"] <= VMEM_MIB[chip] << 20
    assert facts["weights_in_place"]
    assert facts["temp_bytes"] < facts["argument_bytes"]
