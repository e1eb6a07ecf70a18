"""Experts' LoRA that PEFT itself wrote: each expert's delta against what PEFT adds to the weights when it merges."""

import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from jlora.adapters import Adapter, ExpertsLoRA, decide_exchanged
from jlora.errors import AdapterFormatError
from tests.adapters.test_peft_roundtrip import to_numpy, trained

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


FAMILIES = {"mixtral": (mixtral, 12), "qwen3-moe": (qwen3, 12), "gpt-oss": (gpt_oss, 12), "square": (gpt_oss, HIDDEN)}
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
CONFIGS = {
    "both": {"target_parameters": BOTH},
    "both with attention": {"target_parameters": BOTH, "target_modules": ["q_proj"], "use_rslora": True},
    "gate and up alone": {"target_parameters": BOTH[:1]},
    "down alone": {"target_parameters": BOTH[1:]},
    "of one layer": {"target_parameters": [f"model.layers.1.{name}" for name in BOTH]},
    "ranks": {"target_parameters": BOTH, "rank_pattern": {"gate_up_proj": 5}, "alpha_pattern": {"down_proj": 9}},
}


def served(folder, model):
    """Return {parameter: {expert: delta [out, in]}}, computed by plain loops over the adapter that was read."""
    base = dict(model.named_parameters())
    found = {}
    for name, module in Adapter.from_pretrained(folder).modules.items():
        if not isinstance(module, ExpertsLoRA):
            continue
        weight = base[name]
        transposed = getattr(model.get_submodule(name.rpartition(".")[0]), "is_transposed", False)
        site = tuple(weight.shape[1:] if transposed else weight.shape[:0:-1])  # (in, out)
        exchanged = module.exchanged
        if exchanged is None:
            sizes = (module.a.shape[2], module.b.shape[1])
            stored = "in_out" if transposed else "out_in"
            exchanged = decide_exchanged(sizes, site, module.peft_version, name, stored=stored)
        assert len(module.a) == len(module.b) == EXPERTS
        deltas = {}
        for e in range(EXPERTS):
            delta = module.scaling * (module.b[e].astype(np.float64) @ module.a[e])
            deltas[e] = delta.T if exchanged else delta
        found[name] = {e: delta.T if transposed else delta for e, delta in deltas.items()}
    return found


@pytest.mark.parametrize("fields", CONFIGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_target_parameters(tmp_path, family, fields):
    build, inner = FAMILIES[family]
    torch.manual_seed(0)
    base = build(inner).eval()
    config = peft.LoraConfig(**{"r": 3, "lora_alpha": 7, "target_modules": []} | CONFIGS[fields])
    model = trained(base, config)
    model.save_pretrained(tmp_path / "theirs")
    before = {name: to_numpy(parameter).copy() for name, parameter in base.named_parameters()}
    merged = copy.deepcopy(model).merge_and_unload()
    wanted = {name: to_numpy(p) - before[name] for name, p in merged.named_parameters() if "experts." in name}
    wanted = {name: delta for name, delta in wanted.items() if delta.any()}
    if (family, fields) == ("square", "down alone"):  # an older transformers would have had PEFT exchange the two
        with pytest.raises(AdapterFormatError, match="nothing tells whether"):
            served(tmp_path / "theirs", base)
        return
    got = served(tmp_path / "theirs", base)
    assert got.keys() == wanted.keys()
    assert got
    for name, deltas in got.items():
        assert np.abs(wanted[name]).max() > 1e-3
        for e, delta in deltas.items():
            np.testing.assert_allclose(delta, wanted[name][e], rtol=0, atol=1e-6)

    # PEFT gives the same model from the saved adapter.
    Adapter.from_pretrained(tmp_path / "theirs").save_pretrained(tmp_path / "ours")
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
    before = {name: to_numpy(parameter).copy() for name, parameter in base.named_parameters()}
    modules = Adapter.from_pretrained(tmp_path).modules
    merged = copy.deepcopy(model).merge_and_unload()
    wanted = {name: to_numpy(p) - before[name] for name, p in merged.named_parameters() if ".mlp." in name}
    for name, deltas in served(tmp_path, base).items():
        for e, delta in deltas.items():
            np.testing.assert_allclose(delta, wanted[name][e], rtol=0, atol=1e-6)
    ranks = {name.rpartition(".")[2]: module.rank for name, module in modules.items()}
    assert ranks == {"gate_up_proj": 6, "down_proj": 3, "gate": 3, "q_proj": 3}
    gate = modules["model.layers.0.mlp.gate"]
    np.testing.assert_allclose(
        gate.scaling * gate.b @ gate.a, wanted["model.layers.0.mlp.gate.weight"], rtol=0, atol=1e-6
    )
