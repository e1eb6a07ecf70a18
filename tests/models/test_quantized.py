"""Quantized decoders with adapters, compared with adapters merged into the dequantized weights of a checkpoint."""

import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

import jlora
from jlora.adapters import ModuleLoRA
from jlora.models import from_pretrained
from tests.models import checkpoints, goldens

TOLERANCE = 1e-4  # of the largest logit
SCALING = 0.5
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"}
# Partial blocks on both axes, and more than one.
WIDE = {"hidden_size": 192, "intermediate_size": 320, "head_dim": 24, "num_hidden_layers": 1}


@nnx.jit
def logits(model, tokens, batch=None):
    with jlora.use(batch):
        return model(tokens)


# --- The same in NumPy ------------------------------------------------------------------------------------------------


def round_trip(values, scale, quantize):
    """Return values [out, in] as they are after quantization with a scale that broadcasts to them."""
    if quantize == "int8":
        return np.round(values / scale).astype(np.int8), scale
    return (values / scale).astype(ml_dtypes.float8_e4m3fn), scale


def quantized(weight, quantize):
    """Return a weight [out, in] quantized with one scale for each output."""
    top = np.abs(weight).max(axis=-1, keepdims=True)
    return round_trip(weight, top / np.float32(127 if quantize == "int8" else 448), quantize)


def dequantized(weight, quantize):
    values, scale = quantized(weight, quantize)
    return values.astype(np.float32) * scale


def in_blocks(weight):
    """Return float8 [out, in] and float32 [out / 128, in / 128] of a weight."""
    rows, columns = (-(-size // 128) for size in weight.shape)
    scales = np.zeros((rows, columns), np.float32)
    values = np.zeros(weight.shape, ml_dtypes.float8_e4m3fn)
    for i in range(rows):
        for j in range(columns):
            block = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
            scales[i, j] = np.abs(weight[block]).max() / 448
            values[block] = (weight[block] / scales[i, j]).astype(values.dtype)
    return values, scales


def is_quantized(name, config, blocks=False):
    """Return True for the weights that the decoder quantizes."""
    if name == "lm_head.weight":
        return not blocks
    return name.endswith("_proj.weight")


def save(folder, config, tensors):
    """Write a checkpoint, with float8 tensors too."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    header, data = {}, b""
    types = {"float32": "F32", "float8_e4m3fn": "F8_E4M3"}
    for name, array in tensors.items():
        ends = [len(data), len(data) + array.nbytes]
        header[name] = {"dtype": types[array.dtype.name], "shape": list(array.shape), "data_offsets": ends}
        data += np.ascontiguousarray(array).tobytes()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)


class Case:
    """A checkpoint, its dequantized weights, and the adapters of the test."""

    def __init__(self, folder, source, quantize):
        self.folder, self.quantize = folder, None if quantize == "blocks" else quantize
        self.config = json.loads((source / "config.json").read_text())
        self.tensors = load_file(source / "model.safetensors")
        self.base = dict(self.tensors)
        stored = dict(self.tensors)
        for name, weight in self.tensors.items():
            if is_quantized(name, self.config, blocks=quantize == "blocks"):
                if quantize == "blocks":
                    values, scales = in_blocks(weight)
                    stored[name], stored[f"{name}_scale_inv"] = values, scales
                    whole = scales.repeat(128, 0).repeat(128, 1)[: weight.shape[0], : weight.shape[1]]
                    self.base[name] = values.astype(np.float32) * whole
                else:
                    self.base[name] = dequantized(weight, quantize)
        extra = {"quantization_config": FP8} if quantize == "blocks" else {}
        save(folder / "stored", self.config | extra, stored)
        targets = [name for name in self.tensors if is_quantized(name, self.config)]
        self.adapters = [self.adapter(1, 3, targets), self.adapter(2, 2, targets[::2])]
        self.names = [None, "1", "2", "1"]
        self.tokens = np.random.default_rng(0).integers(0, self.config["vocab_size"], (4, 6)).astype(np.int32)

    def adapter(self, seed, rank, targets):
        rng = np.random.default_rng(seed)
        modules = {}
        for name in targets:
            n, k = self.tensors[name].shape
            a, b = rng.normal(size=(rank, k)) * k**-0.5, rng.normal(size=(n, rank)) * 0.3
            modules[name.removesuffix(".weight")] = ModuleLoRA(
                a=a.astype(np.float32), b=b.astype(np.float32), kind="linear", alpha=SCALING * rank, scaling=SCALING
            )
        return jlora.Adapter(name=str(seed), modules=modules)

    def load(self, mesh=None, dtype=jnp.float32):
        return from_pretrained(self.folder / "stored", dtype, mesh, quantize=self.quantize)

    def serve(self, model):
        manager = jlora.LoRAManager(model, jlora.LoRAConfig(max_loras=2, max_lora_rank=4, dtype=jnp.float32))
        for adapter in self.adapters:
            manager.add_adapter(adapter)
        return manager

    def truths(self):
        """Return the logits of each row, by weights merged into the dequantized ones."""
        found = []
        for i, adapter in enumerate([None, *self.adapters]):
            merged = dict(self.base)
            for name, module in adapter.modules.items() if adapter else ():
                merged[f"{name}.weight"] = merged[f"{name}.weight"] + SCALING * module.b @ module.a
            save(self.folder / f"{i}", self.config, merged)
            found.append(np.asarray(logits(from_pretrained(self.folder / f"{i}"), self.tokens)))
        return np.stack([found[0 if name is None else int(name)][i] for i, name in enumerate(self.names)])


def source_of(tmp_path, kind):
    if kind == "mixture":
        return goldens.FOLDER / "qwen3-moe-mlp-layer"
    fields = checkpoints.DENSE["qwen3-tied" if kind == "tied" else "llama"]
    checkpoints.write(tmp_path / "source", fields | WIDE)
    return tmp_path / "source"


@pytest.mark.parametrize(
    ("kind", "quantize"),
    [
        ("untied", "int8"),
        ("tied", "fp8"),
        ("tied", "blocks"),
        ("untied", "blocks"),
        ("mixture", "int8"),
        ("mixture", "fp8"),
        ("mixture", "blocks"),
    ],
)
def test_rows_equal_merged_weights(tmp_path, kind, quantize):
    case = Case(tmp_path, source_of(tmp_path, kind), quantize)
    model = case.load()
    base = np.asarray(logits(model, case.tokens))
    with case.serve(model).prepare(case.names) as batch:
        found = np.asarray(logits(model, case.tokens, batch))
    assert goldens.relative_error(found[0], base[0]) < 1e-6
    assert goldens.relative_error(found, case.truths()) < TOLERANCE
