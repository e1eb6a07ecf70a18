"""Adapters that PEFT itself wrote, against PEFT's own modules; and ours loaded back into PEFT."""

import copy
import json

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

import jlora
from jlora import active_from
from jlora.adapters import Adapter, ExpertsLoRA
from jlora.adapters.variants import COMBINATIONS
from jlora.errors import LoRAError
from tests.adapters.reading import contents

# PEFT warns when it saves more than LoRA.
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def llama(tied=False, dtype=torch.float32):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=37,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
    )
    return transformers.LlamaForCausalLM(config).to(dtype).eval()


def gpt2():
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=37, n_embd=16, n_layer=2, n_head=4, n_positions=32)
    return transformers.GPT2LMHeadModel(config).eval()


def trained(base, config):
    """A PEFT model whose every LoRA matrix is random, B too."""
    model = peft.get_peft_model(copy.deepcopy(base), config, autocast_adapter_dtype=False).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def to_numpy(tensor):
    if tensor.dtype == torch.bfloat16:
        return tensor.detach().contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.detach().numpy()


def lora_modules(model):
    """name -> (kind, A, B, scaling) of every LoRA layer, as PEFT holds them."""
    found = {}
    for name, module in model.base_model.model.named_modules():
        if isinstance(module, peft.tuners.lora.Embedding):
            a, b = module.lora_embedding_A["default"], module.lora_embedding_B["default"]
            found[name] = ("embedding", to_numpy(a), to_numpy(b), module.scaling["default"])
        elif isinstance(module, peft.tuners.lora.Linear):
            a, b = module.lora_A["default"].weight, module.lora_B["default"].weight
            found[name] = ("linear", to_numpy(a), to_numpy(b), module.scaling["default"])
    assert found
    return found


def magnitudes(model):
    """name -> magnitude of every LoRA layer with DoRA, as PEFT holds them."""
    layers = {n: m for n, m in model.base_model.model.named_modules() if isinstance(m, peft.tuners.lora.LoraLayer)}
    return {
        n: to_numpy(m.lora_magnitude_vector["default"].weight) for n, m in layers.items() if m.lora_magnitude_vector
    }


def assert_holds(adapter, expected):
    assert set(adapter.modules) == set(expected)
    for name, (kind, a, b, scaling) in expected.items():
        lora = adapter.modules[name]
        assert (lora.kind, lora.scaling) == (kind, scaling)
        for ours, theirs in ((lora.a, a), (lora.b, b)):
            assert (ours.dtype, ours.shape, ours.tobytes()) == (theirs.dtype, theirs.shape, theirs.tobytes())


FEATURES = {
    "r and alpha": {"r": 5, "lora_alpha": 7},
    "rslora": {"use_rslora": True, "r": 6},
    "rank and alpha patterns": {
        "target_modules": ALL,
        "rank_pattern": {"q_proj": 3, "layers.1.self_attn.v_proj": 1, r"layers\.\d+\.mlp\.up_proj": 7, "own_proj": 2},
        "alpha_pattern": {"q_proj": 5, "^model.layers.0.self_attn.v_proj": 9},
    },
    "regular expression": {"target_modules": r".*\.(0|2)\.(self_attn|mlp)\.(q|up)_proj"},
    "all-linear": {"target_modules": "all-linear"},
    "layers": {"target_modules": ALL, "layers_to_transform": [0, 2]},
    "one layer with a pattern": {"target_modules": ALL, "layers_to_transform": 1, "layers_pattern": "layers"},
    "excluded": {"target_modules": ALL, "exclude_modules": ["layers.1.mlp.up_proj", "k_proj"]},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "head": {"target_modules": ["lm_head"]},
    "embedding and head": {"target_modules": ["embed_tokens", "lm_head", "v_proj"], "rank_pattern": {"lm_head": 2}},
    "gaussian": {"init_lora_weights": "gaussian"},
    "mica with dropout": {"init_lora_weights": "mica", "lora_dropout": 0.3},
    "DoRA": {"use_dora": True, "target_modules": ALL},
    "DoRA of embedding and head": {"use_dora": True, "target_modules": ["embed_tokens", "lm_head", "v_proj"]},
    "DoRA with rslora and patterns": {"use_dora": True, "rank_pattern": {"v_proj": 3}, "use_rslora": True},
    "aLoRA": {"alora_invocation_tokens": [3, 4], "target_modules": ALL},
    "aLoRA of the head": {"alora_invocation_tokens": [3], "target_modules": ["lm_head", "q_proj"]},
    "config left by a conversion": {"corda_config": {"corda_method": "ipm"}},
}


def through_jlora(base, model, folder):
    """Return the adapter that PEFT writes, and PEFT's model of the folder that jlora writes from it."""
    model.save_pretrained(folder / "theirs")
    adapter = Adapter.from_pretrained(folder / "theirs")
    adapter.save_pretrained(folder / "ours")
    base = copy.deepcopy(base)
    return adapter, peft.PeftModel.from_pretrained(base, folder / "ours", autocast_adapter_dtype=False).eval()


def assert_served(base, model, folder, same_layout=True):
    """PEFT's folder loads as PEFT holds it, and the folder written from it gives PEFT the same model again.

    Logits are compared bitwise, unless PEFT itself held a matrix as a transposed view of another: PyTorch then sums in
    another order, though the matrices are bitwise the same.
    """
    adapter, again = through_jlora(base, model, folder)
    for one in (model, again):
        assert_holds(adapter, lora_modules(one))
        theirs, ours = magnitudes(one), {n: m.vectors["dora"] for n, m in adapter.modules.items() if m.vectors}
        assert {n: (m.dtype, m.tobytes()) for n, m in theirs.items()} == {
            n: (m.dtype, m.tobytes()) for n, m in ours.items()
        }
        assert list(adapter.invocation_tokens) == (one.peft_config["default"].alora_invocation_tokens or [])
        assert ("dora" in adapter.variants) == one.peft_config["default"].use_dora
    tokens = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        theirs, ours, plain = (m(tokens).logits for m in (model, again, base))
    if same_layout:
        assert torch.equal(theirs, ours)
    else:
        torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-6)
    assert (theirs - plain).abs().max() > 1e-3
    return adapter


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("feature", FEATURES)
def test_features(tmp_path, feature, tied):
    fields = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]} | FEATURES[feature]
    base = llama(tied)
    assert_served(base, trained(base, peft.LoraConfig(task_type="CAUSAL_LM", **fields)), tmp_path)


@given(
    tokens=st.lists(st.lists(st.integers(0, 2), min_size=9, max_size=9), min_size=1, max_size=4),
    invocation=st.lists(st.integers(0, 2), min_size=1, max_size=4),
)
def test_activation_is_where_peft_has_it(tokens, invocation):
    config = {"default": peft.LoraConfig(alora_invocation_tokens=invocation, task_type="CAUSAL_LM")}
    offsets = peft.tuners.lora.variants.calculate_alora_offsets(config, "default", torch.tensor(tokens))
    first = [2**31 - 1 if offset is None else 9 - offset for offset in offsets]
    assert [active_from(prompt, invocation) for prompt in tokens] == first


@pytest.mark.parametrize("use_dora", [False, True])
def test_fan_in_fan_out(tmp_path, use_dora):
    base = gpt2()
    config = peft.LoraConfig(r=3, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True, use_dora=use_dora)
    adapter = assert_served(base, trained(base, config), tmp_path)
    assert adapter.fan_in_fan_out
    assert adapter.modules["transformer.h.0.attn.c_attn"].b.shape == (48, 3)


def test_base_weights_beside_embeddings(tmp_path):
    base = llama()
    adapter = assert_served(base, trained(base, peft.LoraConfig(target_modules=["embed_tokens", "lm_head"])), tmp_path)
    assert set(adapter.base_weights) == {"model.embed_tokens", "lm_head"}
    np.testing.assert_array_equal(adapter.base_weights["lm_head"], base.lm_head.weight.detach().numpy())
    np.testing.assert_array_equal(
        adapter.base_weights["model.embed_tokens"], base.model.embed_tokens.weight.detach().numpy()
    )


@pytest.mark.parametrize("targets", [["embed_tokens", "lm_head"], ["embed_tokens"], ["lm_head"]])
def test_tied_adapters(tmp_path, targets):
    base = llama(tied=True)
    model = trained(base, peft.LoraConfig(target_modules=targets, ensure_weight_tying=True))
    adapter = assert_served(base, model, tmp_path, same_layout=False)
    table, head = adapter.modules["model.embed_tokens"], adapter.modules["lm_head"]
    np.testing.assert_array_equal(head.a, table.b.T)
    np.testing.assert_array_equal(head.b, table.a.T)


def test_every_field_of_this_peft_is_decided(tmp_path):
    """No field of PEFT's configuration is refused as unknown, whatever its value."""
    peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"
    config = json.loads(file.read_text())

    def unknown(field: str) -> bool:
        file.write_text(json.dumps({**config, field: {"unheard": "of"}}))
        try:
            Adapter.from_pretrained(tmp_path)
        except LoRAError as error:
            return "does not know the field" in str(error)
        return False

    assert unknown("no_such_field")
    assert not [field for field in {*peft.LoraConfig().to_dict(), "runtime_config"} if unknown(field)]


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": ALL[:3]},
        {"target_modules": "all-linear"},
        {"target_modules": r".*layers\.[01]\.self_attn\.(q|k)_proj"},
        {"target_modules": ["v_proj"], "layers_to_transform": [0, 2]},
        {"target_modules": ["q_proj", "embed_tokens"], "exclude_modules": r".*\.1\..*"},
    ],
)
def test_layers_that_peft_targets(tmp_path, fields):
    """Of an adapter with all but one of its modules, the count and the name left out are PEFT's."""
    base = llama()
    base.save_pretrained(tmp_path / "base")
    model = trained(base, peft.LoraConfig(r=2, task_type="CAUSAL_LM", **fields))
    model.save_pretrained(tmp_path / "it")
    file = tmp_path / "it" / "adapter_model.safetensors"
    tensors = load_file(file)
    targets = sorted(set(model.targeted_module_names))
    left_out = f"{targets[-1]}."
    save_file({key: value for key, value in tensors.items() if left_out not in key}, file)
    manager = jlora.LoRAManager(
        jlora.models.from_pretrained(tmp_path / "base"), jlora.LoRAConfig(max_loras=1, max_lora_rank=2)
    )
    manager.add_adapter(jlora.LoRARequest("it", tmp_path / "it"))
    (warning,) = manager.list_adapters()["it"].warnings
    count = len(targets)
    assert warning == f"brings weights for {count - 1} of {count} targeted layers; none for {targets[-1]!r}"


def test_a_state_dict_of_a_live_model(tmp_path):
    """PEFT's configuration holds sets and enumerations, and its state dict is what its folder has."""
    model = trained(llama(), peft.LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "down_proj"], use_dora=True))
    tensors = {name: tensor.numpy() for name, tensor in peft.get_peft_model_state_dict(model).items()}
    found = Adapter.from_state_dict(tensors, model.peft_config["default"], name="live")
    model.save_pretrained(tmp_path)
    assert found.variants == ("dora",)
    assert contents(found) == contents(Adapter.from_pretrained(tmp_path))


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
    adapter, again = through_jlora(base, model, tmp_path)
    assert any(isinstance(module, ExpertsLoRA) for module in adapter.modules.values())
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


def test_variants_are_those_of_peft():
    """For each set of the fields that jlora serves, and each kind of module, PEFT has a variant where jlora has one."""
    layer = peft.tuners.lora.layer
    tables = {"linear": layer.Linear, "embedding": layer.Embedding, "experts": layer.ParamWrapper}
    fields = {field for combination in COMBINATIONS for field in combination}
    for kind, cls in tables.items():
        table = cls.lora_variants.fget(None)
        assert {each for each in table if fields.issuperset(each)} == {
            each for each in COMBINATIONS if kind in COMBINATIONS[each]
        }
