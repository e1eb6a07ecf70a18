"""Experts in every layout of checkpoints, and errors that name the fault of a file."""

import json
import re
import shutil

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jlora.models import ModelError, from_pretrained
from tests.models import goldens
from tests.models.test_checkpoint import assert_same, edit, params

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]  # exponent and mantissa of 4 bits; the highest bit is the sign


@pytest.fixture
def copy(tmp_path):
    return lambda name: shutil.copytree(goldens.FOLDER / name, tmp_path / name)


def configure(folder, **fields):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def fuse(tensors):
    """Fuse one tensor an expert and projection into all experts in one [E, out, in], with names of transformers 5."""
    out, experts = {}, {}
    for name, value in tensors.items():
        name = name.replace("block_sparse_moe", "mlp")
        for old, new in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
            name = name.replace(f".{old}.", f".{new}.")
        if match := re.fullmatch(r"(.*\.experts)\.(\d+)\.(.*)\.weight", name):
            experts.setdefault(match[1], {}).setdefault(match[3], {})[int(match[2])] = value
        else:
            out[name] = value
    for name, parts in experts.items():
        gate, up, down = (
            np.stack([parts[part][e] for e in range(len(parts[part]))])
            for part in ("gate_proj", "up_proj", "down_proj")
        )
        out |= {f"{name}.gate_up_proj": np.concatenate([gate, up], axis=1), f"{name}.down_proj": down}
    return out


@pytest.mark.parametrize("name", ["mixtral-window", "qwen3-moe-mlp-layer"])
def test_all_experts_in_one_tensor(copy, name):
    folder = copy(name)
    want = from_pretrained(folder)
    edit(folder, fuse)
    assert_same(from_pretrained(folder), want)


def gates_first(leaf, value):
    """Return gpt-oss tensors with gate columns before up columns, which alternate in its checkpoints."""
    return np.concatenate([value[..., 0::2], value[..., 1::2]], axis=-1) if "gate_up_proj" in leaf else value


def pack(tensors, rng):
    """Replace weights of experts by random mxfp4 blocks, and return their values by a table and a loop."""
    values = {}
    for name in [name for name in tensors if re.search(r"\.experts\.(gate_up|down)_proj$", name)]:
        num_experts, inputs, outputs = tensors.pop(name).shape
        blocks = rng.integers(0, 256, (num_experts, outputs, inputs // 32, 16), dtype=np.uint8)
        scales = rng.integers(120, 130, blocks.shape[:3], dtype=np.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        value = np.zeros((num_experts, inputs, outputs))
        for e, n, b, i in np.ndindex(blocks.shape):
            for half, code in enumerate((blocks[e, n, b, i] & 15, blocks[e, n, b, i] >> 4)):
                magnitude = E2M1[code & 7] * 2.0 ** (int(scales[e, n, b]) - 127)
                value[e, 32 * b + 2 * i + half, n] = -magnitude if code & 8 else magnitude
        values[name] = value
    return values


@pytest.fixture
def packed(copy, rng):
    """Return a packed gpt-oss with 32 values an expert and two blocks a row of `gate_up`, and its weights."""
    folder = copy("gpt-oss-square")
    configure(folder, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    values = {}
    edit(folder, lambda tensors: values.update(pack(tensors, rng)))
    assert len(values) == 4
    return folder, values


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_mxfp4_is_exact(packed, dtype):
    folder, values = packed
    got = params(from_pretrained(folder, dtype=dtype))
    for name, value in values.items():
        assert got[name].dtype == dtype
        np.testing.assert_array_equal(got[name].astype(np.float64), gates_first(name, value))


def test_mxfp4_smallest_and_largest_scales(packed):
    folder, _ = packed
    blocks, scales = (f"model.layers.0.mlp.experts.down_proj_{part}" for part in ("blocks", "scales"))

    def change(tensors):
        tensors[blocks][0, 0] = 2  # 1.0 and 0.0
        tensors[scales][0, 0], tensors[scales][0, 1], tensors[scales][0, 2] = 1, 254, 0
        tensors[blocks][0, 1] = 0x21  # 0.5 and 1.0
        tensors[blocks][0, 2] = 0xF5  # 3.0 and -6.0

    edit(folder, change)
    got = params(from_pretrained(folder))["model.layers.0.mlp.experts.down_proj"][0].astype(np.float64)
    assert (got[0, 0], got[1, 0]) == (2.0**-126, 0)
    assert (got[0, 1], got[1, 1]) == (2.0**126, 2.0**127)
    assert (got[0, 2], got[1, 2]) == (3 * 2.0**-127, -6 * 2.0**-127)


GPT = "model.layers.0.mlp.experts"
MIXTRAL = "model.layers.1.block_sparse_moe.experts"


def test_damaged_mxfp4(packed):
    folder, _ = packed
    original = load_file(folder / "model.safetensors")
    blocks, scales = f"{GPT}.gate_up_proj_blocks", f"{GPT}.gate_up_proj_scales"
    nan = original[scales].copy()
    nan[1, 3, 0] = 255
    for change, message in [
        ({scales: nan}, f"{blocks}: a scale of its mxfp4 blocks is 255"),
        ({scales: original[scales].astype(np.float32)}, rf"{scales} is F32; expected one of \('U8',\)"),
        ({scales: original[scales][:, :-1].copy()}, rf"{scales} \[4, 64, 1\], found \[4, 63, 1\]"),
        ({blocks: original[blocks].reshape(4, 64, 16, 1)}, rf"{blocks} \[4, 64, 1, 16\], found \[4, 64, 16, 1\]"),
        ({scales: None}, rf"1 missing \['{scales}'\]"),
        ({f"{GPT}.gate_up_proj": np.zeros((4, 32, 64), np.float32)}, rf"unexpected \['{GPT}.gate_up_proj'\]"),
    ]:
        tensors = {name: value for name, value in (original | change).items() if value is not None}
        save_file(tensors, folder / "model.safetensors")
        with pytest.raises(ModelError, match=message):
            from_pretrained(folder)


def test_sizes_that_mxfp4_cannot_hold(copy, packed):
    folder, _ = packed
    configure(folder, hidden_size=40)
    with pytest.raises(ModelError, match="gate_up_proj_blocks cannot hold 40 values in blocks of 32"):
        from_pretrained(folder)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "mixtral-window",
            lambda t: t.pop(f"{MIXTRAL}.2.w3.weight") is None,
            rf"1 missing \['{MIXTRAL}.2.w3.weight'\], 0 unexpected",
        ),
        (
            "gpt-oss-square",
            lambda t: t.update({f"{GPT}.gate_up_proj": t[f"{GPT}.gate_up_proj"].transpose(0, 2, 1).copy()}),
            rf"{GPT}.gate_up_proj \[4, 32, 64\], found \[4, 64, 32\]",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(copy, name, change, message):
    folder = copy(name)
    edit(folder, lambda tensors: change(tensors) and None)
    with pytest.raises(ModelError, match=message):
        from_pretrained(folder)


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("mixtral-window", {"num_local_experts": 3}, "0 missing .* 6 unexpected"),
        (
            "mixtral-window",
            {"num_local_experts": 2**20},
            "config.json asks for 1048576 experts, and the files hold 12 tensors of model.layers.0.block_sparse_moe",
        ),
        ("qwen3-moe-mlp-layer", {"mlp_only_layers": []}, "6 experts, and the files hold 0 tensors of .*layers.1"),
        ("qwen3-moe-mlp-layer", {"mlp_only_layers": [0, 1]}, r"missing \['model.layers.0.mlp.down_proj.weight'"),
        ("gpt-oss-square", {"num_local_experts": 5}, r"down_proj \[5, 32, 32\], found \[4, 32, 32\]"),
        ("llama-tied-linear", {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}, "8 experts"),
        ("mixtral-window", {"model_type": "mistral"}, "26 unexpected"),
    ],
)
def test_configurations_that_do_not_fit_are_named(copy, name, fields, message):
    folder = copy(name)
    configure(folder, **fields)
    with pytest.raises(ModelError, match=message) as caught:
        from_pretrained(folder)
    assert len(str(caught.value)) < 1000
