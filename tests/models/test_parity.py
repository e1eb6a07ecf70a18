"""Random variants of every family against transformers itself, through files that transformers wrote."""

import jax
import numpy as np
import pytest
from safetensors import safe_open

from jlora.models import from_pretrained, generate
from tests.models import goldens
from tests.models.families import GEMMA3, GEMMA3_VISION, LINEAR_ROPE, LLAMA3_ROPE, MOE, YARN_ROPE, build
from tests.models.test_checkpoint import edit
from tests.models.test_layouts import configure, pack

pytestmark = pytest.mark.parity

VARIANTS = [
    ("llama", {"num_key_value_heads": 4, "head_dim": 20}),
    ("llama", {"attention_bias": True, "num_key_value_heads": 1, "rope_parameters": YARN_ROPE}),
    ("llama", {"mlp_bias": True, "tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE}),
    ("llama", {"rope_parameters": {**YARN_ROPE, "beta_fast": 4.0, "beta_slow": 2.0, "truncate": False}}),
    ("llama", {"rope_parameters": {**YARN_ROPE, "mscale": 1.0, "mscale_all_dim": 0.4}}),
    ("llama", {"rope_parameters": {**YARN_ROPE, "attention_factor": 1.7}}),
    ("mistral", {"sliding_window": None}),
    ("mistral", {"sliding_window": 16, "rope_parameters": LINEAR_ROPE, "tie_word_embeddings": True}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}),
    ("qwen3", {"head_dim": 16, "attention_bias": True}),
    ("qwen3", {"head_dim": 8, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    ("qwen3", {"head_dim": 16, "rope_parameters": YARN_ROPE, "rms_norm_eps": 1e-2}),
    ("mixtral", MOE["mixtral"]),
    ("mixtral", {**MOE["mixtral"], "num_local_experts": 9, "num_experts_per_tok": 1, "head_dim": 20}),
    ("qwen2_moe", {**MOE["qwen2_moe"], "norm_topk_prob": True, "qkv_bias": False}),
    (
        "qwen2_moe",
        {
            **MOE["qwen2_moe"],
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["full_attention", "sliding_attention"],
        },
    ),
    ("qwen3_moe", MOE["qwen3_moe"]),
    ("qwen3_moe", {**MOE["qwen3_moe"], "norm_topk_prob": False, "attention_bias": True}),
    ("qwen3_moe", {**MOE["qwen3_moe"], "use_sliding_window": True, "sliding_window": 5, "decoder_sparse_step": 2}),
    ("gpt_oss", MOE["gpt_oss"]),
    ("gpt_oss", {**MOE["gpt_oss"], "intermediate_size": 32, "num_experts_per_tok": 4}),
    ("gpt_oss", {**MOE["gpt_oss"], "attention_bias": False, "swiglu_alpha": 0.7, "tie_word_embeddings": True}),
    ("gpt_oss", {**MOE["gpt_oss"], "rope_parameters": None, "layer_types": ["full_attention", "sliding_attention"]}),
    ("gemma3_text", GEMMA3),
    # The defaults: scores divided by 16, windows in all layers but each sixth, bases of 1e6 and 1e4.
    ("gemma3_text", {"num_hidden_layers": 7, "head_dim": 8, "sliding_window": 5, "attention_bias": True}),
    ("gemma3_text", {**GEMMA3, "query_pre_attn_scalar": 12, "layer_types": ["full_attention"] * 3}),
]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("seed", "variant"), list(enumerate(VARIANTS)), ids=lambda v: v[0] if type(v) is tuple else v)
def test_logits_and_greedy_answers(tmp_path, seed, variant):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model_type, fields = variant
    theirs = build(torch, transformers, model_type, 100 + seed, **fields)
    theirs.save_pretrained(tmp_path, max_shard_size="30KB" if seed % 2 else "1GB")
    ours = from_pretrained(tmp_path)
    compare(torch, ours, theirs, seed)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3", *MOE, "gemma3_text"])
def test_older_spelling_beside_the_newer(tmp_path, model_type, seed):
    """transformers 5 writes `rope_parameters`. `rope_scaling`, added by hand, replaces it, its base too."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    mixtral = {**MOE["mixtral"], "head_dim": 20}  # transformers' YaRN needs it set
    fields = {**MOE, "mixtral": mixtral, "gemma3_text": GEMMA3}.get(model_type, {})
    build(torch, transformers, model_type, 70 + seed, **fields).save_pretrained(tmp_path)
    scaling = [{**YARN_ROPE, "rope_theta": 300.0}, {"rope_type": "linear", "factor": 8.0}][seed]
    configure(tmp_path, rope_scaling=scaling, max_position_embeddings=32 if seed == 0 else 256)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    compare_logits(torch, from_pretrained(tmp_path), theirs.eval(), seed)


@pytest.mark.parametrize("model_type", MOE)
def test_experts_as_transformers_5_has_them(tmp_path, model_type):
    """transformers writes all experts in one tensor unless it restores the older layout."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    theirs = build(torch, transformers, model_type, 7, **MOE[model_type])
    theirs.save_pretrained(tmp_path, save_original_format=False)
    with safe_open(tmp_path / "model.safetensors", framework="np") as file:
        assert "model.layers.0.mlp.experts.gate_up_proj" in file.keys()  # noqa: SIM118 - it is no mapping
    compare_logits(torch, from_pretrained(tmp_path), theirs, 7)


@pytest.mark.filterwarnings("ignore")
def test_mxfp4_as_transformers_reads_it(tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 96}
    build(torch, transformers, "gpt_oss", 8, **MOE["gpt_oss"], **sizes).save_pretrained(tmp_path)
    configure(tmp_path, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    rng = np.random.default_rng(0)
    edit(tmp_path, lambda tensors: pack(tensors, rng) and None)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    assert theirs.model.layers[0].mlp.experts.down_proj.dtype == torch.float32
    compare_logits(torch, from_pretrained(tmp_path), theirs.eval(), 8)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("original", [True, False], ids=["older names", "names of transformers 5"])
def test_text_of_a_multimodal_checkpoint(tmp_path, original):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    theirs = build(torch, transformers, "gemma3", 9, **GEMMA3_VISION)
    theirs.save_pretrained(tmp_path, save_original_format=original)
    with safe_open(tmp_path / "model.safetensors", framework="np") as file:
        assert any(name.startswith("language_model.model.") for name in file.keys()) == original  # noqa: SIM118 - as above
    compare_logits(torch, from_pretrained(tmp_path), theirs, 9)


def compare_logits(torch, ours, theirs, seed):
    """Compare all logits, and return the tokens."""
    tokens = np.random.default_rng(seed).integers(0, 64, (3, 70))
    with torch.no_grad():
        want = theirs(torch.from_numpy(tokens)).logits.numpy()
    got = jax.jit(lambda model, tokens: model(tokens))(ours, tokens.astype(np.int32))
    assert goldens.relative_error(got, want) < goldens.TOLERANCE
    return tokens


def compare(torch, ours, theirs, seed):
    """Compare all logits and greedy answers."""
    tokens = compare_logits(torch, ours, theirs, seed)
    # Greedy answers step by step: transformers scores each of our tokens, so near-ties cannot hide a wrong cache.
    prompts = [row[:length].tolist() for row, length in zip(tokens, (3, 11, 24), strict=True)]
    for prompt, answer in zip(prompts, generate(ours, prompts, max_new_tokens=12), strict=True):
        assert len(answer) == 12
        with torch.no_grad():
            scores = theirs(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].numpy()
        chosen = scores[np.arange(12), answer]
        assert (scores.max(axis=1) - chosen).max() < goldens.TOLERANCE * np.abs(scores).max()
