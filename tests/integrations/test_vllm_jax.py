"""LoRA in the JAX models of vLLM: tpu-inference's wheel, in front of stubs of what it requires, on virtual devices.

The oracle adds the deltas to the weights of a second model, in NumPy. Run by `.ci/newest`.
"""

import asyncio
import dataclasses
import importlib.util
import json
import re
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

import jlora

if importlib.util.find_spec("tpu_inference") is None or importlib.util.find_spec("vllm") is not None:
    pytest.skip("needs tpu-inference without vLLM: .ci/newest", allow_module_level=True)

from tests.integrations import vllm_stubs

vllm_stubs.install()

from tpu_inference.layers.jax.linear import JaxEinsum, JaxQKVParallelLinear
from tpu_inference.layers.jax.quantization.configs import QuantizationConfig, QuantLinearConfig
from tpu_inference.layers.jax.quantization.fp8 import Fp8TensorwiseLinearMethod
from tpu_inference.worker.tpu_worker import TPUWorker
from vllm.v1.core import kv_cache_utils

from jlora.integrations.vllm_jax import register
from jlora.integrations.vllm_jax.hooks import drift
from jlora.integrations.vllm_jax.layers import describe_layers
from jlora.integrations.vllm_jax.upload import Upload
from tests.integrations import vllm_steps
from tests.integrations.vllm_stubs import LoRAAdapterNotFoundError, LoRARequest

vllm_steps.prepare_imports()
register()
pytestmark = pytest.mark.filterwarnings("ignore")  # of the wheel

RANK, ALPHA = 4, 12.0
LENGTHS = (5, 1, 2, 3)


@pytest.fixture(autouse=True)
def as_vllm_runs():
    """Allow the promotions that the models of the wheel rely on."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def module_sizes(hf, *, head: bool = True) -> dict[str, tuple[int, int]]:
    """Return checkpoint module -> (features in, out)."""
    d, q, kv = hf.hidden_size, hf.num_attention_heads * hf.head_dim, hf.num_key_value_heads * hf.head_dim
    layer = {
        "self_attn.q_proj": (d, q),
        "self_attn.k_proj": (d, kv),
        "self_attn.v_proj": (d, kv),
        "self_attn.o_proj": (q, d),
        "mlp.gate_proj": (d, hf.intermediate_size),
        "mlp.up_proj": (d, hf.intermediate_size),
        "mlp.down_proj": (hf.intermediate_size, d),
    }
    sizes = {f"model.layers.{i}.{name}": size for i in range(hf.num_hidden_layers) for name, size in layer.items()}
    if hf.architectures == ["Gemma4"]:
        del sizes["model.layers.1.self_attn.v_proj"]  # the keys are the values
        sizes["model.per_layer_model_projection"] = d, 2 * hf.hidden_size_per_layer_input
        sizes["model.layers.0.per_layer_projection"] = hf.hidden_size_per_layer_input, d
    sizes["model.embed_tokens"] = hf.vocab_size, d
    return sizes | ({"lm_head": (d, hf.vocab_size)} if head else {})


def write_adapter(folder, sizes, seed=0, scale=0.2, spelling="model.", **fields):
    """Write a PEFT adapter, and return module -> delta [in, out] of its weight."""
    rng = np.random.default_rng(seed)
    tensors, deltas = {}, {}
    for name, (k, n) in sizes.items():
        a, b = (scale * rng.normal(size=shape).astype("float32") for shape in ((RANK, k), (n, RANK)))
        kind = "lora_embedding_{}" if name.endswith("embed_tokens") else "lora_{}.weight"
        given = name.replace("model.", spelling, 1)
        tensors |= {f"base_model.model.{given}.{kind.format(half)}": x for half, x in (("A", a), ("B", b))}
        deltas[name] = ALPHA / RANK * (b @ a).T
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    modules = sorted({name.rpartition(".")[2] for name in sizes})
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": modules, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config | {"task_type": "CAUSAL_LM", **fields}))
    return deltas


def merge(model, hf, deltas) -> None:
    """Add deltas [in, out] of a checkpoint to the weights of a model of tpu-inference."""
    for name, delta in deltas.items():
        part = model
        for step in path(model, name).split("."):
            other = getattr(part, "gate_up_proj", None) or getattr(
                part, "embed", None
            )  # of another name than the file's
            part = part[int(step)] if step.isdigit() else getattr(part, step, None) or other
        held = part.weight if "weight" in vars(part) else vars(part).get("kernel", vars(part).get("embedding"))
        weight, last = np.array(held[...]), name.rpartition(".")[2]
        if last in ("q_proj", "k_proj", "v_proj"):
            heads = delta.reshape(hf.hidden_size, -1, hf.head_dim)
            weight[:, :, : hf.head_dim] += np.repeat(heads, weight.shape[1] // heads.shape[1], 1)
        elif last == "o_proj":
            weight[:, : hf.head_dim] += delta.reshape(-1, hf.head_dim, hf.hidden_size)
        elif last in ("gate_proj", "up_proj") and weight.shape != delta.shape:  # the parts of each shard, side by side
            shards = held[...].sharding.mesh.shape["model"]
            columns = weight.reshape(hf.hidden_size, shards, 2, -1)
            columns[:, :, int(last == "up_proj")] += delta.reshape(hf.hidden_size, shards, -1)
        else:
            weight[tuple(map(slice, delta.shape))] += delta
        held[...] = jax.device_put(weight, held[...].sharding)


def path(model, name) -> str:
    """Return the path of a module of the text part."""
    return name.replace("model.", "model.language_model.", 1) if hasattr(model.model, "language_model") else name


def requests_of(hf, names, seed=0):
    rng = np.random.default_rng(seed)
    return [(name, rng.integers(0, hf.vocab_size, length)) for name, length in zip(names, LENGTHS, strict=False)]


def merged_logits(config, tensor, every, requests, **options) -> list[np.ndarray]:
    """Return the logits of a model without LoRA, for each of several adapters merged into its weights."""
    runner = vllm_steps.Runner(SimpleNamespace(**(vars(config) | {"lora_config": None})), tensor)
    base = runner.state_leaves
    found = []
    for deltas in every:
        nnx.update(runner.model, jax.tree.unflatten(jax.tree.structure(runner.state), base))
        merge(runner.model, config.model_config.hf_config, deltas)
        runner.state_leaves = tuple(jax.tree.leaves(nnx.state(runner.model)))
        found.append(runner.step([(None, tokens) for _, tokens in requests], **options))
    return found


def load(runner, name, number, folder, **options) -> LoRARequest:
    request = LoRARequest(name, number, str(folder), **options)
    assert runner.core.add_lora(request)
    return dataclasses.replace(request, load_inplace=False)


IMAGES = {
    "Qwen2_5_VL": {"pixel_values": np.ones((16, 12), "float32"), "image_grid_thw": ((1, 4, 4),)},
    "Gemma4": {
        "pixel_values": np.ones((1, 16, 12), "float32"),
        "pixel_position_ids": np.stack(np.meshgrid(np.arange(4), np.arange(4)), -1).reshape(1, 16, 2),
    },
}


@pytest.mark.parametrize(("architecture", "tensor"), [("Qwen2_5_VL", 1), ("Gemma4", 2)])
def test_adapters_of_the_language_part_with_text_and_images_mixed(tmp_path, architecture, tensor):
    hf = vllm_steps.hf_config(architecture)
    config = vllm_steps.vllm_config(hf, tensor)
    runner = vllm_steps.Runner(config, tensor)
    sizes = module_sizes(hf)
    old, new = "model.", "model.language_model."  # transformers' spellings of the same module
    deltas = {"a": write_adapter(tmp_path / "a", sizes, 1, spelling=old)}
    deltas["b"] = write_adapter(tmp_path / "b", sizes, 2, spelling=new)
    runner.warm_up([8, 16])
    a, b = (load(runner, name, i + 1, tmp_path / name) for i, name in enumerate("ab"))
    mixed = requests_of(hf, [a, None, b, a])
    mixed[0] = a, np.array([7, *[vllm_steps.IMAGE] * 4])
    for images in (IMAGES[architecture], None):
        check_mixed(runner, config, tensor, deltas, mixed, images=images)


def check_mixed(runner, config, tensor, deltas, mixed, **options):
    """Compare each request's logits with those of its adapter merged into the weights. Return them."""
    got = runner.step(mixed, **options)
    base, *merged = merged_logits(config, tensor, [{}, deltas["a"], deltas["b"]], mixed, **options)
    want = dict(zip("ab", merged, strict=True))
    assert np.abs(want["a"] - base).max() > 0.05 * np.abs(base).max()
    for row, (request, _) in enumerate(mixed):
        assert_close(got[row], base[row] if request is None else want[request.lora_name][row])
    return got


TOWERS = {
    "Qwen2_5_VL": ("visual.blocks.0.attn.qkv", "model.visual.blocks.0.mlp.up_proj", "visual.merger.mlp.0"),
    "Gemma4": ("model.vision_tower.encoder.layers.0.mlp.up_proj", "model.embed_vision.embedding_projection"),
}


@pytest.mark.parametrize("architecture", TOWERS)
def test_weights_for_a_tower_or_connector_are_refused_by_name(tmp_path, architecture):
    runner = vllm_steps.Runner(vllm_steps.vllm_config(vllm_steps.hf_config(architecture)))
    for name in TOWERS[architecture]:
        write_adapter(tmp_path / "a", module_sizes(runner.hf) | {name: (32, 32)})
        tower = name.removeprefix("model.").partition(".")[0]
        named = rf"{re.escape(name)}: .*exclude_modules \((model\.)?{tower}"
        with pytest.raises(jlora.AdapterMismatchError, match=named):
            load(runner, "a", 1, tmp_path / "a")
    assert runner.lora_manager.list_adapters() == set()


@pytest.mark.parametrize(("architecture", "tensor"), [("Llama", 1), ("Qwen3", 4)])
def test_whole_model_equals_merged_weights(tmp_path, architecture, tensor):
    hf = vllm_steps.hf_config(architecture, num_hidden_layers=2 if tensor == 4 else 1)
    config = vllm_steps.vllm_config(hf, tensor)
    if tensor == 1:
        config.scheduler_config.max_num_seqs = 16  # as many as the padded rows of a step
    runner = vllm_steps.Runner(config, tensor)
    sizes = module_sizes(hf, head=architecture != "Llama")  # its head is an array of the model, and no layer
    deltas = {name: write_adapter(tmp_path / name, sizes, seed) for seed, name in enumerate("ab")}
    a, b = (load(runner, name, i + 1, tmp_path / name) for i, name in enumerate("ab"))
    mixed = requests_of(hf, [a, None, b, a])
    got = check_mixed(runner, config, tensor, deltas, mixed)
    assert_close(last_rows(runner.step(mixed, prompt_logprobs=True)), got)


def last_rows(logits):
    """Return the logits of the last row of each request, of those of all rows."""
    ends = np.cumsum(LENGTHS)
    return logits[ends[ends <= len(logits)] - 1]


def assert_close(got, want):
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5 * np.abs(want).max())


def test_swaps_and_reloads_compile_nothing(tmp_path):
    hf = vllm_steps.hf_config("Qwen3", num_hidden_layers=1)
    config = vllm_steps.vllm_config(hf, 2, {"max_loras": 2, "max_cpu_loras": 3})
    runner = vllm_steps.Runner(config, 2)
    sizes = module_sizes(hf)
    every = [write_adapter(tmp_path / str(i), sizes, i) for i in range(5)]
    loras = [load(runner, f"n{i}", i + 1, tmp_path / str(i)) for i in range(5)]  # more than the host cache holds
    tokens = requests_of(hf, [None, None])
    base, *want = merged_logits(config, 2, [{}, *every], tokens)
    content = list(range(5))
    runner.warm_up([8, 16])
    assert_close(runner.step(tokens), base)
    traced, programs = len(vllm_steps.traces), []
    jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: programs.append(event))
    for i in range(12):
        if i == 4:  # jlora's own programs, which write slots, have been compiled
            programs.clear()
        one, other = i % 5, (i * 3 + 1) % 5
        if i % 4 == 3:  # new weights under the same name
            content[one] = (content[one] + 1) % 5
            load(runner, f"n{one}", one + 1, tmp_path / str(content[one]), load_inplace=True)
        got = runner.step([(loras[one], tokens[0][1]), (loras[other] if i % 3 else None, tokens[1][1])])
        assert_close(got[0], want[content[one]][0])
        assert_close(got[1], want[content[other]][1] if i % 3 else base[1])
    assert len(vllm_steps.traces) == traced
    assert "/jax/core/compile/backend_compile_duration" not in programs
    got = last_rows(runner.step([(loras[0], tokens[0][1]), (loras[1], tokens[1][1])], prompt_logprobs=True))
    assert_close(got[0], want[content[0]][0])
    assert_close(got[1], want[content[1]][1])


def test_reload_changes_the_key_of_the_prefix_cache(tmp_path):
    hf = vllm_steps.hf_config("Llama", num_hidden_layers=1)
    runner = vllm_steps.Runner(vllm_steps.vllm_config(hf))
    write_adapter(tmp_path / "a", module_sizes(hf, head=False))
    first = load(runner, "a", 1, tmp_path / "a")
    keys = block_keys(first)
    (tmp_path / "a" / "adapter_config.json").rename(tmp_path / "kept")
    with pytest.raises(jlora.LoRAError):
        load(runner, "a", 1, tmp_path / "a", load_inplace=True)
    assert keys == block_keys(first)
    (tmp_path / "kept").rename(tmp_path / "a" / "adapter_config.json")
    load(runner, "a", 1, tmp_path / "a", load_inplace=True)
    keys += block_keys(first)
    again = load(runner, "a", 2, tmp_path / "a")  # vLLM's number after an unload
    keys += block_keys(again)
    assert len(set(keys)) == 3
    assert all(key[0] == ("lora", "a", str(tmp_path / "a")) for key in keys)
    assert block_keys(None) == [None]


def block_keys(lora, prompt=(), size=1, **options) -> list:
    """Return the keys of the blocks of a prompt in the prefix cache."""
    request = SimpleNamespace(lora_request=lora, prompt_token_ids=list(prompt), **options)
    starts = range(0, max(1, len(prompt)), size)
    return [kv_cache_utils.generate_block_hash_extra_keys(request, i, i + size, 0)[0] for i in starts]


CALL = (3, 4)  # invocation tokens


def alora(hf, folder, seed=0):
    """Write an aLoRA adapter that changes no keys and values, so that rows of a model of one layer are independent."""
    sizes = {name: size for name, size in module_sizes(hf).items() if not name.endswith(("k_proj", "v_proj", "tokens"))}
    return write_adapter(folder, sizes, seed, alora_invocation_tokens=list(CALL))


def test_alora_acts_from_its_invocation(tmp_path):
    tensor = 2
    hf = vllm_steps.hf_config("Qwen3", num_hidden_layers=1)
    config = vllm_steps.vllm_config(hf, tensor, additional_config={"jlora": {"activated": True}})
    runner = vllm_steps.Runner(config, tensor)
    called = alora(hf, tmp_path / "called")
    plain = write_adapter(tmp_path / "plain", module_sizes(hf), 1)
    runner.warm_up([16])
    traced = len(vllm_steps.traces)
    loras = [load(runner, name, i, tmp_path / name) for i, name in enumerate(("called", "plain"), start=1)]
    loras.append(LoRARequest("unannounced", 3, str(tmp_path / "called")))  # loaded by the step
    prompts = [[*CALL, 9, *CALL, 8], [5, 6, 7], [1, *CALL], [3, 9]]
    mixed = [(lora, np.array(p)) for lora, p in zip([loras[0], loras[1], loras[2], loras[0]], prompts, strict=True)]
    chunk = [4, 2, 2, 1]  # tokens before a later chunk of each prompt, whose rows see only one another
    got, last, later = (runner.step(mixed, **how) for how in ({"prompt_logprobs": True}, {}, {"computed": chunk}))
    assert len(vllm_steps.traces) == traced
    base, with_called, with_plain = merged_logits(config, tensor, [{}, called, plain], mixed, prompt_logprobs=True)
    active = np.array([0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 1, 1, 0, 0], bool)[:, None]
    want = np.where(active, with_called, base)
    want[6:9] = with_plain[6:9]
    assert np.abs(with_called - base).min(0).max() > 0.01 * np.abs(base).max()
    assert_close(got, want)
    assert_close(last, want[[5, 8, 11, 13]])
    base, with_called, with_plain = merged_logits(config, tensor, [{}, called, plain], mixed, computed=chunk)
    assert_close(later, np.stack([with_called[0], with_plain[1], with_called[2], base[3]]))


def test_cached_blocks_before_the_invocation_are_those_of_the_base_model(tmp_path):
    hf = vllm_steps.hf_config("Qwen3", num_hidden_layers=1)
    runner = vllm_steps.Runner(vllm_steps.vllm_config(hf, additional_config={"jlora": {"activated": True}}))
    alora(hf, tmp_path / "a")
    a = load(runner, "a", 1, tmp_path / "a")
    prompt = [5, 6, 7, 8, *CALL, 9, 8]
    first = block_keys(a, prompt, 2)
    assert first[:2] == block_keys(None, prompt, 2)[:2] == [None, None]
    assert None not in first[2:]
    assert block_keys(a, [5, *prompt], 2)[:2] == [None, None]
    assert block_keys(a, [5, *prompt], 2)[2] is not None  # the invocation begins in this block
    assert block_keys(a, [5, 6, 7], 2) == [None, None]  # never called
    image = [("mm", "hash", 0)]
    assert block_keys(a, prompt, 2, other_keys=image)[:2] == [tuple(image)] * 2
    # The same tokens of a block, of which the last one was generated: the adapter acts from another row on.
    assert block_keys(a, [*CALL, 9, *CALL], 5) != block_keys(a, [*CALL, 9], 5)
    # An adapter that the engine did not load shares nothing.
    assert None not in block_keys(LoRARequest("late", 9, str(tmp_path / "a")), prompt, 2)
    # A request that waits was cached by the invocation tokens of its time.
    alora(hf, tmp_path / "a", seed=1)
    load(runner, "a", 1, tmp_path / "a", load_inplace=True)
    assert block_keys(a, prompt, 2)[:2] == [None, None]
    assert block_keys(a, prompt, 2)[2:] != first[2:]
    write_adapter(tmp_path / "a", module_sizes(hf))
    with pytest.raises(jlora.AdapterMismatchError, match=r"'a': its .* were \[3, 4\] and are \[\]"):
        load(runner, "a", 1, tmp_path / "a", load_inplace=True)


def worker_of(lora_manager):
    return SimpleNamespace(model_runner=SimpleNamespace(lora_manager=lora_manager))


def test_an_upload_reaches_all_workers_or_none(tmp_path, monkeypatch):
    hf = vllm_steps.hf_config("Llama", num_hidden_layers=1)
    config = vllm_steps.vllm_config(hf)
    runner, sizes = vllm_steps.Runner(config), module_sizes(hf, head=False)
    deltas = [write_adapter(tmp_path / str(i), sizes, i) for i in range(2)]
    workers, loaded = [worker_of(runner.lora_manager)], []

    class Engine:
        async def collective_rpc(self, method, args):
            return [getattr(TPUWorker, method)(worker, *args) for worker in workers]

    class Models:
        async def load_lora_adapter(self, request):
            loaded.append(load(runner, request.lora_name, 1, request.lora_path, load_inplace=request.load_inplace))
            return "Success"

    async def own(request):
        return PlainTextResponse("vLLM's own")

    app = Starlette(routes=[Route("/v1/load_lora_adapter", own, methods=["POST"])])
    plugin = Upload()
    plugin.attach_router(app)
    state = SimpleNamespace(openai_serving_models=Models())
    monkeypatch.setenv("VLLM_PLUGINS", "jlora_vllm_jax_upload")
    with pytest.raises(jlora.LoRAError, match="needs jlora_vllm_jax too"):
        asyncio.run(plugin.init_state(Engine(), state, None))
    monkeypatch.setenv("VLLM_PLUGINS", "jlora_vllm_jax_upload,jlora_vllm_jax")
    asyncio.run(plugin.init_state(Engine(), state, None))
    client = TestClient(app)
    assert client.post("/v1/load_lora_adapter", json={}).text == "vLLM's own"

    def push(i):
        names = {"adapter_model": "adapter_model.safetensors", "adapter_config": "adapter_config.json"}
        files = {field: (None, (tmp_path / str(i) / name).read_bytes()) for field, name in names.items()}
        form = {"lora_name": (None, "a"), "load_inplace": (None, "true"), **files}
        return client.post("/v1/load_lora_adapter", files=form)

    tokens = requests_of(hf, [None])
    want = [row for (row,) in merged_logits(config, 1, deltas, tokens)]
    assert push(0).status_code == 200
    assert_close(runner.step([(loaded[0], tokens[0][1])])[0], want[0])
    workers.append(worker_of(None))
    response = push(1)
    assert response.status_code == 400
    assert "needs --enable-lora" in response.json()["error"]["message"]
    assert_close(runner.step([(loaded[0], tokens[0][1])])[0], want[0])
    workers.pop()
    keys = block_keys(loaded[0])
    assert push(1).status_code == 200
    assert_close(runner.step([(loaded[1], tokens[0][1])])[0], want[1])
    assert len(loaded) == 2
    assert len({*keys, *block_keys(loaded[1]), *block_keys(loaded[0])}) == 3  # vLLM's path, and the number of reloads
    (tmp_path / "1" / "adapter_config.json").write_text("{")
    response = push(1)
    assert response.status_code == 400
    assert "adapter_config" in response.text
    with pytest.raises(LoRAAdapterNotFoundError):  # bytes are dropped after the call
        load(runner, "b", 2, loaded[1].lora_path)


def test_worker_protocol(tmp_path):
    hf = vllm_steps.hf_config("Llama", num_hidden_layers=1)
    runner = vllm_steps.Runner(vllm_steps.vllm_config(hf))
    sizes = module_sizes(hf, head=False)
    loras = runner.lora_manager
    for i, name in enumerate("abc"):
        write_adapter(tmp_path / name, sizes, i)
        load(runner, name, i + 1, tmp_path / name)
    assert loras.list_adapters() == {1, 2, 3}
    assert loras.pin_adapter(1)
    assert loras.manager.list_adapters()["a@1"].pinned
    assert loras.remove_adapter(2)
    assert not loras.remove_adapter(2)
    with pytest.raises(jlora.AdapterNotFoundError, match="number 2"):
        loras.pin_adapter(2)
    with pytest.raises(LoRAAdapterNotFoundError):
        load(runner, "d", 4, tmp_path / "missing")
    assert loras.list_adapters() == {1, 3}
    with loras.dummy_lora_cache():  # as vLLM warms up
        assert loras.add_dummy_lora(
            LoRARequest("warmup_1", 9, "/not/a/real/path"), rank=loras.get_dummy_lora_warmup_rank(8)
        )
    loras.set_active_adapters(set(), SimpleNamespace(index_mapping=(0,) * 16))
    loras.remove_all_adapters()
    assert loras.list_adapters() == set()


class OneLayer(nnx.Module):
    """A model of one layer, of the class and in the mesh that a test is about."""

    tie_word_embeddings = False

    def __init__(self, make):
        self.proj = make()

    def __call__(self, x):
        return self.proj(x)


def one_layer(make, tensor, **head_dim):
    """Return a model of one layer on a mesh, and its manager, described as the plugin describes it."""
    config = vllm_steps.vllm_config(vllm_steps.hf_config("Qwen3"), tensor)
    mesh = vllm_steps.make_mesh(tensor)
    with jax.set_mesh(mesh):

        @jax.jit
        def create():
            model = OneLayer(make)
            state = nnx.state(model)
            nnx.update(model, jax.lax.with_sharding_constraint(state, nnx.get_partition_spec(state)))
            return model

        model = create()
        for name, value in head_dim.items():
            setattr(model, name, value)
        model.proj.prefix = "proj"
        base = nnx.clone(model)
        describe_layers(model, config, mesh)
        packed = {"proj": tuple("qkv"[: len(getattr(model.proj, "output_sizes", (0,)))])}
        options = jlora.LoRAConfig(max_loras=2, max_lora_rank=8, dtype="float32")
        manager = jlora.LoRAManager(model, options, packed_modules=packed if len(packed["proj"]) > 1 else None)
    return mesh, base, manager


def served(mesh, manager, x, names, counts):
    @jax.jit
    def step(slots, rest, x, batch):
        with jlora.use(batch):
            return nnx.merge(graph, slots, rest)(x)

    with jax.set_mesh(mesh), manager.prepare(names, counts) as batch:
        graph, _, rest = nnx.split(manager.model, jlora.SlotParam, ...)
        return step(manager.slots, rest, x, batch)


@pytest.mark.parametrize("tensor", [2, 4])
def test_layer_of_queries_keys_and_values_equals_merged_weights(tmp_path, tensor):
    """The kernel has the parts of each shard side by side, and the layer returns its parts."""
    rng = np.random.default_rng(3)
    sizes = {name: (16, size) for name, size in zip("qkv", (32, 8, 8), strict=True)}
    options = {"hidden_size": 16, "num_heads": 16, "num_kv_heads": 4, "head_dim": 2, "use_bias": True}
    mesh, base, manager = one_layer(lambda: JaxQKVParallelLinear(**options, dtype=np.float32, rngs=nnx.Rngs(0)), tensor)
    deltas = write_adapter(tmp_path / "a", sizes)
    manager.add_adapter(jlora.LoRARequest("a", path=str(tmp_path / "a")))
    x = rng.normal(size=(5, 16)).astype("float32")
    got = served(mesh, manager, x, ["a", None], [3, 2])
    with jax.set_mesh(mesh):
        want = jax.jit(lambda model, x: model(x))(base, x)
    flat = [
        np.concatenate([np.asarray(each).reshape(5, -1) for each in jax.tree.leaves(out)], -1) for out in (got, want)
    ]
    flat[1][:3] += x[:3] @ np.concatenate(list(deltas.values()), 1)
    assert jax.tree.map(lambda each: each.shape, got) == jax.tree.map(lambda each: each.shape, want)
    assert_close(*flat)


QUANTIZED = {
    "TD,DNH->TNH": ((32, 4, 128), (None, "model", None), "q_proj"),
    "TNH,NHD->TD": ((4, 128, 32), ("model", None, None), "o_proj"),
    "mn,np->mp": ((32, 64), (None, "model"), "up_proj"),
}


@pytest.mark.parametrize("equation", QUANTIZED)
def test_quantized_layer_adds_its_delta(tmp_path, equation):
    shape, spec, _ = QUANTIZED[equation]

    def make():
        kernel = nnx.with_partitioning(nnx.initializers.uniform(), spec)
        return JaxEinsum(equation, shape, nnx.Rngs(0), param_dtype=np.float32, kernel_init=kernel, quant_config=Fp8())

    mesh, base, manager = one_layer(make, 4, head_dim_original=16)
    k, n = {"q": (32, 64), "o": (64, 32), "u": (32, 64)}[QUANTIZED[equation][2][0]]
    delta = write_adapter(tmp_path / "a", {"proj": (k, n)})["proj"]
    manager.add_adapter(jlora.LoRARequest("a", path=str(tmp_path / "a")))
    rng = np.random.default_rng(1)
    x = rng.normal(size=(5, *(shape[:-1] if equation.startswith("TNH") else shape[:1]))).astype("float32")
    got = np.array(served(mesh, manager, x, ["a", None], [3, 2]))
    with jax.set_mesh(mesh):
        want = np.array(jax.jit(lambda model, x: model(x))(base, x))
    real = x[..., :16] if x.ndim == 3 else x
    added = real.reshape(5, k)[:3] @ delta
    if want.ndim == 3:
        want[:3, :, :16] += added.reshape(3, 4, 16)
    else:
        want[:3] += added
    assert_close(got, want)


class Fp8(QuantizationConfig):
    """The wheel's float8 kernels with a scale for each column."""

    def __init__(self):
        super().__init__({})

    def get_quant_method(self, layer, prefix):
        return Fp8TensorwiseLinearMethod(layer, QuantLinearConfig(layer, enable_sp=False))


def test_tied_table_serves_logits(tmp_path):
    """Qwen2's layers have biases. The oracle is a model with a head of its own, a copy of the table."""
    tied, untied = (
        vllm_steps.vllm_config(vllm_steps.hf_config("Qwen2", tie_word_embeddings=tie, num_hidden_layers=1), 2)
        for tie in (True, False)
    )
    hf = untied.model_config.hf_config
    runner = vllm_steps.Runner(tied, 2)
    assert runner.lora_manager.heads == ("model.embed_tokens.attend",)
    deltas = write_adapter(tmp_path / "a", module_sizes(hf))
    a = load(runner, "a", 1, tmp_path / "a")
    mixed = requests_of(hf, [a, None])
    own_head = vllm_steps.make_model(vllm_steps.qwen2.Qwen2ForCausalLM, untied, jax.random.PRNGKey(0), runner.mesh)
    table, head = (np.asarray(x[...]) for x in (own_head.model.embed_tokens.weight, own_head.lm_head.weight))
    copied = {"lm_head": table.T - head}
    merged = deltas | {"lm_head": deltas["lm_head"] + copied["lm_head"]}
    base, want = merged_logits(untied, 2, [copied, merged], mixed)
    got = runner.step(mixed)
    assert_close(got[0], want[0])
    assert_close(got[1], base[1])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"parallel_config": SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=2)}, "pipeline parallel"),
        ({"additional_config": {"enable_continue_decode": True}}, "enable_continue_decode"),
        ({"lora": {"enable_tower_connector_lora": True}}, "enable-tower-connector-lora"),
    ],
)
def test_refused_configurations_are_named(change, named):
    config = vllm_steps.vllm_config(vllm_steps.hf_config("Llama", num_hidden_layers=1), **change)
    with pytest.raises(jlora.LoRAError, match=named):
        vllm_steps.Runner(config)


def test_drafts_refuse_heads_and_get_no_adapters(tmp_path):
    hf = vllm_steps.hf_config("Qwen3", num_hidden_layers=1)
    config = vllm_steps.vllm_config(hf, speculative_config=SimpleNamespace(method="eagle3", draft_model_config=None))
    runner = vllm_steps.Runner(config)
    assert runner.lora_manager.heads == ()
    write_adapter(tmp_path / "a", {"lm_head": (hf.hidden_size, hf.vocab_size)})
    with pytest.raises(jlora.AdapterMismatchError, match="speculative decoding"):
        load(runner, "a", 1, tmp_path / "a")
    model = vllm_steps.model_loader._get_nnx_model(
        vllm_steps.qwen3.Qwen3ForCausalLM, config, jax.random.PRNGKey(0), runner.mesh, is_draft_model=True
    )
    assert type(model) is vllm_steps.qwen3.Qwen3ForCausalLM


def test_drift_is_named():
    wrong = r"EngineCore.add_lora takes \(self, lora_request\), not \(self, request\)"
    assert drift(vllm_stubs.EngineCore, "add_lora", "self lora_request") is None
    assert re.search(wrong, drift(vllm_stubs.EngineCore, "add_lora", "self request"))
    assert "EngineCore.gone does not exist" in drift(vllm_stubs.EngineCore, "gone", "self counts")


def test_step_without_metadata_raises():
    runner = vllm_steps.Runner(vllm_steps.vllm_config(vllm_steps.hf_config("Llama", num_hidden_layers=1)))
    runner.lora_utils.extract_lora_metadata = lambda: None
    with pytest.raises(jlora.LoRAError, match="no LoRA metadata"):
        runner.step([(None, np.arange(3))])
