"""Experts' LoRA that PEFT itself wrote, and loads again from what jlora saves; tests/parity compares their logits."""

import copy

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from jlora.adapters import Adapter, ExpertsLoRA
from tests.adapters.test_peft_roundtrip import trained

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

HIDDEN, EXPERTS = 16, 4
SIZES = {
    "vocab_size": 37,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32,
}


def mixtral(inner):
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**SIZES, intermediate_size=inner, num_local_experts=EXPERTS)
    )


def qwen3(inner):
    return transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(
            **SIZES, intermediate_size=20, moe_intermediate_size=inner, num_experts=EXPERTS, decoder_sparse_step=1
        )
    )


def gpt_oss(inner):
    return transformers.GptOssForCausalLM(
        transformers.GptOssConfig(**SIZES, intermediate_size=inner, num_local_experts=EXPERTS)
    )


FAMILIES = {"mixtral": (mixtral, 12), "qwen3-moe": (qwen3, 12), "square": (gpt_oss, HIDDEN)}
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
CONFIGS = {
    "both": {"target_parameters": BOTH},
    "both with attention": {"target_parameters": BOTH, "target_modules": ["q_proj"], "use_rslora": True},
    "down alone": {"target_parameters": BOTH[1:]},
    "of one layer": {"target_parameters": [f"model.layers.1.{name}" for name in BOTH]},
    "ranks": {"target_parameters": BOTH, "rank_pattern": {"gate_up_proj": 5}, "alpha_pattern": {"down_proj": 9}},
}


@pytest.mark.parametrize("fields", CONFIGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_peft_gives_the_same_model_from_the_adapter_that_was_read_and_saved(tmp_path, family, fields):
    build, inner = FAMILIES[family]
    torch.manual_seed(0)
    base = build(inner).eval()
    config = peft.LoraConfig(**{"r": 3, "lora_alpha": 7, "target_modules": []} | CONFIGS[fields])
    model = trained(base, config)
    model.save_pretrained(tmp_path / "theirs")
    adapter = Adapter.from_pretrained(tmp_path / "theirs")
    assert any(isinstance(module, ExpertsLoRA) for module in adapter.modules.values())
    adapter.save_pretrained(tmp_path / "ours")
    again = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "ours", autocast_adapter_dtype=False).eval()
    tokens = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, again(tokens).logits)


def test_experts_targeted_by_mixtrals_old_names(tmp_path):
    """PEFT turns w1, w2, w3 and the gate into parameters, fuses two of them at twice the rank, and warns."""
    torch.manual_seed(0)
    base = mixtral(12).eval()
    config = peft.LoraConfig(r=3, lora_alpha=7, target_modules=["w1", "w2", "w3", "gate", "q_proj"])
    model = trained(base, config)
    model.save_pretrained(tmp_path)
    modules = Adapter.from_pretrained(tmp_path).modules
    ranks = {name.rpartition(".")[2]: module.rank for name, module in modules.items()}
    assert ranks == {"gate_up_proj": 6, "down_proj": 3, "gate": 3, "q_proj": 3}
