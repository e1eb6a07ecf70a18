"""Configurations of small random models, and the recipe that turns one into a checkpoint (needs transformers)."""

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 4.0, "factor": 8.0, "original_max_position_embeddings": 32}
# gpt-oss's own rope and limits, in sizes at which they show in 48 tokens and random weights.
GPT_OSS_ROPE = {**YARN_ROPE, "rope_theta": 150.0, "beta_fast": 4.0, "truncate": False}
MOE = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 24,
    },
    "qwen3_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
        "head_dim": 12,
    },
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 12,
        "sliding_window": 7,
        "swiglu_limit": 1.5,
        "rope_parameters": GPT_OSS_ROPE,
    },
}
# Two layers with a window, one without; the scores are not divided by the square root of the head's width.
GEMMA3 = {
    "num_hidden_layers": 3,
    "head_dim": 12,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 20,
    "sliding_window": 7,
    "sliding_window_pattern": 3,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}
GEMMA3_VISION = {
    "text_config": {**SMALL, **GEMMA3},
    "vision_config": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "image_size": 28,
        "patch_size": 14,
        "vision_use_head": False,
    },
    "mm_tokens_per_image": 4,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}


def build(torch, transformers, model_type: str, seed: int, **fields):
    """Return a float32 model with weights large enough to make every part matter in the logits."""
    config = transformers.AutoConfig.for_model(model_type, **{**SMALL, **fields})
    config._attn_implementation = "eager"
    gemma = model_type.startswith("gemma")  # its norms multiply by 1 + w
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:
                weight.copy_(0.5 * torch.randn_like(weight) + (1.0 if "norm" in name and not gemma else 0.0))
            else:
                embedding = 0.3 * weight.shape[-1] ** -0.5 if gemma else 0.3  # Gemma multiplies it by the square root
                std = embedding if "embed" in name else 1.5 * weight.shape[-1] ** -0.5
                weight.copy_(std * torch.randn_like(weight))
    return model
