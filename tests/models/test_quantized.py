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
from jlora.models import ModelError, QuantizedLinear, from_pretrained, read_skeleton
from tests.models import checkpoints, goldens
from tests.models.test_mesh import make_mesh

slow = pytest.mark.slow
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
    if kind in ("mixture", "gemma3"):
        return goldens.FOLDER / {"mixture": "qwen3-moe-mlp-layer", "gemma3": "gemma3-tied"}[kind]
    fields = checkpoints.DENSE["qwen3-tied" if kind == "tied" else "llama"]
    checkpoints.write(tmp_path / "source", fields | WIDE)
    return tmp_path / "source"


@pytest.mark.parametrize(
    ("kind", "quantize"),
    [
        ("untied", "int8"),
        ("gemma3", "fp8"),
        pytest.param("mixture", "blocks", marks=slow),
        pytest.param("tied", "fp8", marks=slow),
    ],
)
def test_rows_equal_merged_weights(tmp_path, kind, quantize):
    case = Case(tmp_path, source_of(tmp_path, kind), quantize)
    model = case.load()
    with case.serve(model).prepare(case.names) as batch:
        found = np.asarray(logits(model, case.tokens, batch))
    assert goldens.relative_error(found, case.truths()) < TOLERANCE


@pytest.mark.slow
def test_base_rows_keep_the_bits_of_the_unwrapped_model(tmp_path, as_users_compile):
    case = Case(tmp_path, source_of(tmp_path, "untied"), "int8")
    model = case.load()
    base = np.asarray(logits(model, case.tokens))
    with case.serve(model).prepare(case.names) as batch:
        found = np.asarray(logits(model, case.tokens, batch))
    np.testing.assert_array_equal(found[0], base[0])
    assert not np.array_equal(found[1], base[1])


@pytest.mark.mesh
@pytest.mark.parametrize(("kind", "quantize"), [("untied", "int8"), pytest.param("mixture", "fp8", marks=slow)])
def test_a_mesh_reads_the_same_values(tmp_path, kind, quantize):
    """A scale is that of a whole column, also where the mesh splits its inputs."""
    case = Case(tmp_path, source_of(tmp_path, kind), quantize)
    one, mesh = case.load(), case.load(make_mesh({"tensor": 2}))
    with case.serve(mesh).prepare(case.names) as batch:
        found = np.asarray(logits(mesh, case.tokens, batch))
    assert goldens.relative_error(found, case.truths()) < TOLERANCE
    for name in ("self_attn.o_proj", "self_attn.qkv_proj"):
        layers = [get(model.model.layers[0], name) for model in (one, mesh)]
        if name.endswith("o_proj"):
            for leaf in ("kernel", "kernel_scale"):
                values = [np.asarray(vars(layer)[leaf][...]).astype(np.float32) for layer in layers]
                np.testing.assert_array_equal(*values)
        shards = {shard.data.shape for shard in layers[1].kernel[...].addressable_shards}
        k, n = layers[1].kernel.shape
        assert shards == {(k // 2, n) if name.endswith("o_proj") else (k, n // 2)}


@pytest.mark.mesh
def test_blocks_that_a_mesh_would_split_are_refused(tmp_path):
    case = Case(tmp_path, source_of(tmp_path, "untied"), "blocks")
    with pytest.raises(ModelError, match=r"num_attention_heads \* head_dim \(192\) must be a multiple of 128"):
        case.load(make_mesh({"tensor": 2}))


def get(module, path):
    for name in path.split("."):
        module = getattr(module, name)
    return module


# --- What is stored ---------------------------------------------------------------------------------------------------


def test_the_stored_values_are_those_of_the_checkpoint(tmp_path):
    """Blocks keep their bits, and other kernels have one scale a column. The embedding keeps its dtype."""
    case = Case(tmp_path, source_of(tmp_path, "untied"), "blocks")
    model = case.load(dtype=jnp.bfloat16)
    down = model.model.layers[0].mlp.down_proj
    values, scales = in_blocks(case.tensors["model.layers.0.mlp.down_proj.weight"])
    np.testing.assert_array_equal(np.asarray(down.kernel[...]).view(np.uint8), values.T.view(np.uint8))
    np.testing.assert_array_equal(down.kernel_scale[...], scales.T.repeat(128, 1)[:, :192])
    assert isinstance(model.lm_head, nnx.Linear)
    assert model.model.embed_tokens.embedding.dtype == jnp.bfloat16

    skeleton = read_skeleton(tmp_path / "stored").model.layers[0].mlp.down_proj
    assert (skeleton.kernel.dtype, skeleton.kernel_scale.shape) == (jnp.float8_e4m3fn, (3, 192))

    again = from_pretrained(tmp_path / "source", jnp.bfloat16, quantize="int8")
    assert isinstance(again.lm_head, QuantizedLinear)
    assert again.lm_head.kernel.dtype == jnp.int8
    assert again.lm_head.kernel_scale.shape == (1, 64)
    assert again.model.embed_tokens.embedding.dtype == jnp.bfloat16


@pytest.mark.parametrize("name", ["gpt-oss-square", "mixtral-window"])
def test_experts_of_every_layout(name):
    stored, read = (from_pretrained(goldens.FOLDER / name, quantize=quantize) for quantize in (None, "int8"))
    for product in ("gate_up_proj", "down_proj"):
        experts = read.model.layers[0].mlp.experts
        weight = np.asarray(getattr(stored.model.layers[0].mlp.experts, product)[...]).swapaxes(1, 2)
        assert getattr(experts, product).dtype == jnp.int8
        want = np.stack([dequantized(one, "int8") for one in weight]).swapaxes(1, 2)
        np.testing.assert_allclose(np.asarray(experts.dequantized(product)), want, atol=1e-6)


@pytest.mark.slow
def test_verify_passes(tmp_path):
    case = Case(tmp_path, source_of(tmp_path, "untied"), "blocks")
    report = case.serve(case.load()).verify(logits, case.tokens)
    assert "model.layers.0.self_attn.qkv_proj" in report.checked
    assert report.rows_only == {}
    assert report.unchecked == {}


# --- Refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"quant_method": "awq"}, "quantization_config has quant_method 'awq'"),
        (FP8 | {"weight_block_size": None}, r"weight_block_size must be \[128, 128\], got None"),
        (FP8 | {"activation_scheme": "static"}, "activation_scheme must be 'dynamic', got 'static'"),
        (FP8 | {"modules_to_not_convert": ["model.layers.0.self_attn.q_proj"]}, "modules_to_not_convert"),
    ],
)
def test_other_quantizations_are_refused_by_name(tmp_path, found, message):
    checkpoints.write(tmp_path, checkpoints.DENSE["llama"] | {"quantization_config": found})
    with pytest.raises(ModelError, match=message):
        from_pretrained(tmp_path)


def test_unknown_and_second_quantizations_are_refused(tmp_path):
    case = Case(tmp_path, source_of(tmp_path, "untied"), "blocks")
    with pytest.raises(ModelError, match="the checkpoint is in fp8 already"):
        from_pretrained(tmp_path / "stored", quantize="int8")
    with pytest.raises(ModelError, match="quantize must be 'int8', 'fp8' or None, got 'int4'"):
        from_pretrained(tmp_path / "source", quantize="int4")
    name = "model.layers.0.mlp.down_proj.weight"
    save(tmp_path / "float", case.config | {"quantization_config": FP8}, case.tensors)
    with pytest.raises(ModelError, match="missing"):
        from_pretrained(tmp_path / "float")
    case.tensors[name][3, 5] = np.inf
    save(tmp_path / "inf", case.config, case.tensors)
    with pytest.raises(ModelError, match=f"{name}: holds a value that is not finite"):
        from_pretrained(tmp_path / "inf", quantize="int8")
