"""`LoRAConfig` and `LoRARequest` check their fields."""

import dataclasses
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jlora import LoRAConfig, LoRAError, LoRARequest, LoRAUsageError


def test_defaults():
    config = LoRAConfig(max_loras=3, max_lora_rank=8)
    assert config == LoRAConfig(max_loras=3, max_lora_rank=8, max_cpu_loras=3)
    assert hash(config) == hash(LoRAConfig(max_loras=3, max_lora_rank=8))
    assert LoRAConfig(max_loras=1, max_lora_rank=1, target_modules=["q_proj"]).target_modules == ("q_proj",)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", np.float32, jnp.bfloat16, np.dtype("float16")])
def test_slot_dtypes(dtype):
    assert LoRAConfig(max_loras=1, max_lora_rank=1, dtype=dtype).dtype is dtype


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("max_loras", 0, "max_loras must be a positive int, got 0"),
        ("max_lora_rank", "8", "max_lora_rank must be a positive int, or .*, got '8'"),
        ("max_lora_rank", {"q_proj": 8}, r'"\*" for all others, got {.q_proj'),
        ("max_lora_rank", {"*": 8, 3: 8}, "a mapping of names of layers to positive ints"),
        ("max_cpu_loras", 1, r"\(max_loras=2\): max_cpu_loras must be None or an int of at least max_loras, .* got 1"),
        ("process_timeout", 0, "process_timeout must be seconds above 0, got 0"),
        ("data_axes", "data", "data_axes must be a list of names of axes of a mesh, got 'data'"),
        ("saved_heads", ["score"], "saved_heads must be None or a mapping of names of layers to their most outputs"),
        ("saved_heads", {"score": 0}, 'such as {"score": 8}, got'),
        ("max_cpu_bytes", 0, "max_cpu_bytes must be None or a positive int"),
        ("dtype", "int16", "dtype must be None or one of"),
        ("max_adapters_per_sequence", 3, "must be None or a positive int of at most max_loras, got 3"),
        ("expert_slots", 1, 'expert_slots must be None or a mapping of "per_expert", "shared" or both to positive'),
        ("expert_slots", {"per_expert": 3}, "at most max_loras in all"),
        ("expert_slots", {"shared": 2}, '1 left for "per_expert"'),
        ("target_modules", "q_proj", r'such as \["q_proj"\], got .q_proj'),
        ("target_modules", ["q_proj", 3], "at least one name"),
        ("variants", "dora", r'variants must be a list of names, such as \["dora"\], got .dora'),
        ("variants", True, "variants must be a list of names"),
        ("bitwise_base", "no", "bitwise_base must be a bool, got 'no'"),
        ("backend", "cuda", "backend must be one of .*'cuda'"),
    ],
)
def test_a_bad_configuration_is_refused(field, value, message):
    with pytest.raises(LoRAError, match=message):
        LoRAConfig(**{"max_loras": 2, "max_lora_rank": 8, field: value})


def test_options_are_named_and_frozen():
    with pytest.raises(TypeError):
        LoRAConfig(2, 8)
    with pytest.raises(dataclasses.FrozenInstanceError):
        LoRAConfig(max_loras=2, max_lora_rank=8).max_loras = 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        LoRARequest("a", Path("b")).name = "c"
    assert LoRARequest("a", Path("b")) == LoRARequest("a", "b")


@pytest.mark.parametrize(
    ("field", "value", "what"),
    [
        ("path", "", "a folder or a repo id, got ''"),
        ("base_model_name", ["m"], "None or a non-empty string, got ['m']"),
        ("revision", "", "None or a non-empty string"),
        ("load_inplace", None, "a bool, got None"),
        ("is_3d_lora_weight", 1, "None or a bool, got 1"),
    ],
)
def test_a_request_is_of_the_right_kinds(field, value, what):
    with pytest.raises(LoRAUsageError, match=re.escape(f"LoRARequest('sql'): {field} must be {what}")):
        LoRARequest(**{"name": "sql", "path": "x", field: value})
    with pytest.raises(LoRAError, match="name must be a non-empty string"):
        LoRARequest("", "x")
