"""A runner of tpu-inference on virtual CPU devices: its models, its `get_flax_model` and its LoRA calls.

Import after `vllm_stubs.install()`. Weights are random, and attention is plain.
"""

import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from tpu_inference.layers.jax import pp_utils
from tpu_inference.models.common import model_loader
from tpu_inference.models.jax import gemma4, gemma4_mm, llama3, qwen2, qwen2_5_vl, qwen3
from tpu_inference.runner.lora_utils import LoraUtils

from tests.integrations.vllm_stubs import EngineCore, LoRARequest

IMAGE = 120  # token of an image

traces: list[str] = []  # one entry for each layer of each traced step


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Metadata:
    input_positions: jax.Array
    sequence: jax.Array


def attention(kv_cache, q, k, v, metadata, mesh, head_dim, sm_scale=None, **_):
    traces.append("attention")
    k, v = (jnp.repeat(each, q.shape[1] // k.shape[1], 1) for each in (k, v))
    scores = jnp.einsum("tnh,snh->nts", q, k) * (sm_scale or head_dim**-0.5)
    same = metadata.sequence[:, None] == metadata.sequence[None]
    seen = same & (metadata.input_positions[:, None] >= metadata.input_positions[None])
    return kv_cache, jnp.einsum("nts,snh->tnh", jax.nn.softmax(jnp.where(seen, scores, -1e9)), v)


def flash_attention(sm_scale=1.0, **_):
    """Stand for the kernel of the towers: attention between all rows of a segment."""

    def attend(q, k, v, segments):
        scores = jnp.einsum("bnth,bnsh->bnts", q, k) * sm_scale
        seen = (segments.q[:, :, None] == segments.kv[:, None])[:, None]
        return jnp.einsum("bnts,bnsh->bnth", jax.nn.softmax(jnp.where(seen, scores, -1e9)), v)

    return attend


def make_model(model_class, vllm_config, rng, mesh, pooler=None, is_draft_model=False):
    """Stand for the loader's own, which reads a checkpoint: return the model with random weights on its mesh."""

    @jax.jit
    def create():
        model = model_class(vllm_config, rng, mesh)
        state = nnx.state(model)
        nnx.update(model, jax.lax.with_sharding_constraint(state, nnx.get_partition_spec(state)))
        return model

    with jax.set_mesh(mesh):
        return create()


def prepare_imports() -> None:
    """Replace attention, the loader of weights, and what asks the absent vLLM or a TPU."""
    one = SimpleNamespace(is_first_rank=True, is_last_rank=True, rank_in_group=0, world_size=1)
    for module in (qwen3, qwen2, llama3, gemma4, qwen2_5_vl, pp_utils):
        module.get_pp_group = lambda: one
        module.set_default_rope_theta = lambda config, **_: None
        module.attention = attention
    qwen2_5_vl.sharded_flash_attention = gemma4_mm.sharded_flash_attention = flash_attention
    pp_utils.get_pp_indices = lambda count, *_: (0, count)
    model_loader._get_nnx_model = make_model
    model_loader.get_step_fn_compiler_options = dict  # its options are of XLA for TPUs
    model_loader.get_tpu_quantization_config = lambda config: config.quant_config
    model_loader.update_vllm_config_for_qwix_quantization = lambda config: None
    model_loader.supports_kw = lambda *_: False
    model_loader.maybe_create_mm_encoder_jit_manager = lambda **_: None
    classes = {"Qwen3": qwen3.Qwen3ForCausalLM, "Qwen2": qwen2.Qwen2ForCausalLM, "Llama": llama3.LlamaForCausalLM}
    classes["Qwen2_5_VL"] = qwen2_5_vl.Qwen2_5_VLForConditionalGeneration
    classes["Gemma4"] = gemma4_mm.Gemma4ForConditionalGeneration
    model_loader._get_model_architecture = lambda config: classes[config.architectures[0]]


def hf_config(architecture: str, **given: Any) -> SimpleNamespace:
    """Return the configuration of a tiny model, with padded heads (Llama's are of 64, which its kernels take)."""
    sizes = {
        "architectures": [architecture],
        "vocab_size": 123 if architecture == "Qwen3" else 124,  # of these models, Qwen3's alone pads it to the shards
        "head_dim": 64 if architecture == "Llama" else 16,
    }
    sizes |= {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    sizes |= {"intermediate_size": 96, "hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
    sizes |= {"rope_theta": 1e4, "rope_parameters": {}, "rope_scaling": None}
    vision = {"hidden_size": 32, "num_hidden_layers": 1, "depth": 1, "num_heads": 2, "num_attention_heads": 2}
    vision |= {"intermediate_size": 48, "hidden_act": "silu", "patch_size": 2, "temporal_patch_size": 1}
    vision |= {"in_channels": 3, "spatial_merge_size": 2, "window_size": 8, "fullatt_block_indexes": [0]}
    vision |= {"out_hidden_size": 64, "pooling_kernel_size": 2, "default_output_length": 4, "head_dim": 16}
    vision |= {"rope_parameters": {}}
    if architecture in ("Qwen2_5_VL", "Gemma4"):
        sizes |= {"vision_config": SimpleNamespace(**vision), "image_token_id": IMAGE, "video_token_id": IMAGE + 1}
    if architecture == "Gemma4":  # a local and a global layer
        sizes |= {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64, "rope_parameters": {}}
        sizes |= {"rope_local_base_freq": 1e4, "attention_bias": False, "hidden_size_per_layer_input": 8}
        sizes |= {"vocab_size_per_layer_input": 120, "num_kv_shared_layers": 0, "final_logit_softcapping": 30.0}
        sizes |= {"global_head_dim": 16, "attention_k_eq_v": True, "num_global_key_value_heads": None}
    found = SimpleNamespace(**(sizes | given))
    if architecture in ("Qwen2", "Qwen2_5_VL", "Gemma4"):
        found.text_config = found  # which its class reads
    return found


def vllm_config(hf: SimpleNamespace, tensor: int = 1, lora: dict[str, Any] | None = None, **given: Any) -> Any:
    """Return the parts of vLLM's configuration that tpu-inference's models and the plugin read."""
    of_lora = {"max_loras": 4, "max_lora_rank": 8, "max_cpu_loras": 6, "fully_sharded_loras": False}
    of_lora |= {"lora_dtype": "auto", "target_modules": None}
    model = {"hf_config": hf, "get_vocab_size": lambda: hf.vocab_size, "dtype": jnp.float32, "runner_type": "generate"}
    parts = {
        "model_config": SimpleNamespace(**model, multimodal_config=None),
        "parallel_config": SimpleNamespace(tensor_parallel_size=tensor, pipeline_parallel_size=1),
        "cache_config": SimpleNamespace(cache_dtype="auto"),
        "scheduler_config": SimpleNamespace(max_num_seqs=5),
        "load_config": SimpleNamespace(load_format="auto"),
        "quant_config": None,
        "speculative_config": None,
        "sharding_config": SimpleNamespace(apply_vision_sharding=lambda: None),
        "aux_output_config": SimpleNamespace(enable_return_routed_experts=False),
        "additional_config": {},
        "lora_config": SimpleNamespace(**(of_lora | (lora or {}))),
    }
    return SimpleNamespace(**(parts | given))


def make_mesh(tensor: int) -> Mesh:
    """Return a mesh with the axes of tpu-inference."""
    axes = ("data", "attn_dp", "attn_dp_expert", "expert", "model", "dcp", "pcp")
    shape = [tensor if axis == "model" else 1 for axis in axes]
    return Mesh(np.array(jax.devices()[:tensor]).reshape(shape), axes)


class Runner:
    """What of `TPUModelRunner` a step needs."""

    def __init__(self, config: Any, tensor: int = 1):
        self.mesh = make_mesh(tensor)
        self.vllm_config = config
        with jax.set_mesh(self.mesh):
            model = model_loader.get_flax_model(config, jax.random.PRNGKey(0), self.mesh)
        self.model, self.state, self.lora_manager = model.model, model.state, model.lora_manager
        self.state_leaves = model.state_leaves
        self.model_fn, self.compute_logits_fn = model.model_fn, model.compute_logits_fn
        self.multimodal_fns = model.multimodal_fns
        self.lora_utils = LoraUtils(self)
        self.hf = config.model_config.hf_config
        self.layers = self.hf.num_hidden_layers
        self.core = EngineCore()
        if self.lora_manager is not None:
            self.core.model_executor = SimpleNamespace(add_lora=self.lora_manager.add_adapter)

    def warm_up(self, sizes: list[int]) -> None:
        """Compile steps as the runner does: prepare each, then run all. Then compile the logits of eight rows."""
        tasks = []
        for rows in sizes:
            self.lora_manager.set_active_adapters(set(), SimpleNamespace(index_mapping=(0,) * rows))
            tasks.append((rows, self.lora_utils.extract_lora_metadata()))
        with jax.set_mesh(self.mesh):
            for rows, batch in tasks:
                hidden = self._run(*[jnp.zeros(rows, jnp.int32)] * 3, batch)
                if hasattr(self.hf, "vision_config"):
                    self.multimodal_fns.embed_input_ids_fn(
                        self.state_leaves, jnp.zeros(24 - rows, jnp.int32), None, is_multimodal=None
                    )
            assert self.compute_logits_fn.lower(self.state_leaves, hidden[:8], tasks[-1][1]).compile()
        self.lora_manager.remove_all_adapters()

    def _run(self, tokens: Any, positions: Any, sequence: Any, batch: Any, images: Any = None) -> jax.Array:
        metadata = Metadata(jnp.asarray(positions, jnp.int32), jnp.asarray(sequence, jnp.int32))
        ids, embeds, caches = jnp.asarray(tokens, jnp.int32), None, [None] * self.layers
        if images is not None:
            found = self.multimodal_fns.embed_multimodal_fn(self.state_leaves, modality="image", **images)
            embeds = self.multimodal_fns.embed_input_ids_fn(self.state_leaves, ids, found, is_multimodal=ids == IMAGE)
            ids = None
        args = (caches, ids, metadata, embeds, metadata.input_positions, (), batch, None, True, True)
        return self.model_fn(self.state_leaves, *args)[1]

    def step(
        self,
        requests: list[tuple[LoRARequest | None, np.ndarray]],
        *,
        rows: int = 16,
        prompt_logprobs: bool = False,
        images: dict[str, Any] | None = None,
        computed: Sequence[int] = (),
    ) -> np.ndarray:
        """Run one step as the runner does, and return the logits of the last token of each request.

        With `prompt_logprobs`, logits are computed for all rows, and returned for those of requests. `images` are the
        arguments of the tower, and `computed` the numbers of tokens of each prompt before those of the step.
        """
        prompts = {str(i): SimpleNamespace(prompt_token_ids=tokens) for i, (_, tokens) in enumerate(requests)}
        computed = np.array(computed or [0] * len(requests))
        requests = [(lora, tokens[n:]) for (lora, tokens), n in zip(requests, computed, strict=True)]
        counts = np.array([len(tokens) for _, tokens in requests])
        loras = [lora for lora, _ in requests]

        def make_lora_inputs(counts):
            numbers = [lora.lora_int_id if lora else 0 for lora in loras]
            by_token = np.repeat(numbers, counts)
            return tuple(numbers), tuple(by_token), {lora.lora_int_id: lora for lora in loras if lora}.values()

        logprobs = {"request": 1} if prompt_logprobs else {}
        self.input_batch = SimpleNamespace(make_lora_inputs=make_lora_inputs, num_prompt_logprobs=logprobs)
        self.input_batch.req_ids, self.input_batch.num_computed_tokens_cpu = [*prompts], computed
        self.requests = prompts
        pad = rows - counts.sum()
        positions = np.concatenate([*map(np.arange, counts), np.zeros(pad, int)])
        sequence = np.repeat(np.arange(len(counts) + 1), [*counts, pad])
        tokens = np.concatenate([*(tokens for _, tokens in requests), np.zeros(pad, int)])
        with jax.set_mesh(self.mesh):
            batch = None
            if self.vllm_config.lora_config is not None:
                self.lora_utils.set_active_loras(counts, counts.sum(), rows)
                batch = self.lora_utils.extract_lora_metadata()
            hidden = self._run(tokens, positions, sequence, batch, images)
            last = np.cumsum(counts) - 1
            if prompt_logprobs:
                return np.asarray(self.compute_logits_fn(self.state_leaves, hidden, batch))[: counts.sum()]
            hidden = hidden[np.concatenate([last, np.zeros(8 - len(last), int)])]
            return np.asarray(self.compute_logits_fn(self.state_leaves, hidden, batch))[: len(counts)]
