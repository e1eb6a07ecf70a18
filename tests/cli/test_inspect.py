"""`jlora inspect`: its output, escaping of file contents, and agreement with the manager."""

import json
import resource
import shutil
from dataclasses import replace

import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import jlora
from jlora.cli.commands import run
from jlora.cli.demo import DEMO
from jlora.cli.inspect import fit
from tests.models import checkpoints, goldens

TIED = goldens.FOLDER / "llama-tied-linear"


def adapter(modules, *, embeddings=(), name="it", rank=2) -> jlora.Adapter:
    """Return an adapter of random factors. `modules`: name -> (in, out)."""
    rng = np.random.default_rng(0)
    arrays = {
        module: tuple(rng.normal(size=shape).astype(np.float32) for shape in ((rank, inputs), (outputs, rank)))
        for module, (inputs, outputs) in modules.items()
    }
    return jlora.Adapter.from_arrays(name, arrays, alpha=4, embeddings=embeddings)


def test_inspect_prints_the_contents_and_fit_of_an_adapter(capsys):
    assert run(["inspect", str(DEMO / "adapters" / "swap"), "--model", str(DEMO / "model")]) == 0
    out = capsys.readouterr().out
    assert "modules      16, rank up to 16" in out
    assert "4 x q_proj" in out
    assert "bfloat16" in out
    assert ": yes; " in out


def test_inspect_shows_saved_heads(capsys, tmp_path):
    checkpoints.write(tmp_path / "base", checkpoints.DENSE["mistral"])
    tensors = load_file(tmp_path / "base" / "model.safetensors")
    tensors["score.weight"] = tensors.pop("lm_head.weight")[:2]
    save_file(tensors, tmp_path / "base" / "model.safetensors")
    config = tmp_path / "base" / "config.json"
    fields = json.loads(config.read_text()) | {"architectures": ["MistralForSequenceClassification"]}
    config.write_text(json.dumps(fields))
    plain = adapter({f"{ATTENTION}.q_proj": (32, 64)})
    for size, fits in ((32, True), (31, False)):
        heads = {"score": jlora.SavedHead(np.ones((5, size), np.float32))}
        replace(plain, heads=heads, task_type="SEQ_CLS").save_pretrained(tmp_path / "it")
        code = run(["inspect", str(tmp_path / "it"), "--model", str(tmp_path / "base")])
        out = capsys.readouterr()
        assert "score: 5 outputs, without bias, float32; served with LoRAConfig(saved_heads={'score': 5})" in out.out
        assert (code == 0) == fits
        assert (": yes; " if fits else "has 31 input features, and 'score' has 32") in out.out + out.err


def test_a_saved_embedding_gets_no_advice(capsys, tmp_path):
    plain = adapter({f"{ATTENTION}.k_proj": (32, 16)})
    heads = {"model.embed_tokens": jlora.SavedHead(np.ones((64, 32), np.float32))}
    replace(plain, heads=heads).save_pretrained(tmp_path / "it")
    assert run(["inspect", str(tmp_path / "it")]) == 0
    out = capsys.readouterr().out
    assert "saved table  model.embed_tokens: 64 rows; a fully trained embedding is not served\n" in out
    assert "saved_heads" not in out
    assert run(["inspect", str(tmp_path / "it"), "--model", str(TIED)]) == 1
    assert "it is an embedding, and only linear layers are replaced" in capsys.readouterr().err


def test_inspect_shows_activated_lora_and_dora(capsys, tmp_path):
    plain = adapter({f"{ATTENTION}.k_proj": (32, 16)}, name="act")
    tokens = tuple(range(40))
    replace(plain, invocation_tokens=tokens[:3]).save_pretrained(tmp_path / "act")
    assert run(["inspect", str(tmp_path / "act"), "--model", str(TIED)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "aLoRA        active from tokens 0 1 2 on; served with LoRAConfig(activated=True)" in lines
    assert any(line.startswith("fits ") for line in lines)
    replace(plain, invocation_tokens=tokens).save_pretrained(tmp_path / "act")
    assert run(["inspect", str(tmp_path / "act")]) == 0
    assert " 30 31 ... on;" in capsys.readouterr().out
    modules = {n: replace(m, vectors={"dora": np.ones(len(m.b), np.float32)}) for n, m in plain.modules.items()}
    replace(plain, modules=modules).save_pretrained(tmp_path / "dora")
    assert run(["inspect", str(tmp_path / "dora")]) == 0
    assert "variants     dora; served with LoRAConfig(variants=['dora'])\n" in capsys.readouterr().out
    plain.save_pretrained(tmp_path / "plain")
    assert run(["inspect", str(tmp_path / "plain")]) == 0
    assert "LoRAConfig" not in capsys.readouterr().out


def test_skipped_modules_are_counted_and_listed(capsys, tmp_path):
    modules = {f"mtp.layers.0.x{i}": (3, 3) for i in range(9)} | {"model.layers.0.mlp.down_proj": (40, 32)}
    adapter(modules, name="it").save_pretrained(tmp_path / "it")
    command = ["inspect", str(tmp_path / "it"), "--model", str(TIED)]
    assert run(command) == 1
    assert "mtp.layers.0.x0" in capsys.readouterr().err
    assert run([*command, "--skip", r"^mtp\.", "--skip", "vision"]) == 0
    out = capsys.readouterr().out
    assert "skipped      9 modules\n  mtp.layers.0.x0\n" in out
    assert "  ... and 1 more\n" in out
    assert ": yes; " in out
    assert run([*command, "--skip", "layers"]) == 1
    assert "skipped modules only" in capsys.readouterr().err
    assert run([*command, "--skip", "("]) == 1
    assert "is not a regular expression" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", str(TIED)], "is a local folder, which has no revision 'v1'"),
        ([], "--revision is of the model's repo; give the repo by --model"),
    ],
)
def test_a_revision_of_no_repo_is_refused(capsys, options, message):
    assert run(["inspect", str(DEMO / "adapters" / "swap"), *options, "--revision", "v1"]) == 1
    assert message in capsys.readouterr().err


def test_text_of_an_adapter_is_escaped(capsys, tmp_path):
    folder = tmp_path / "evil\nfits         anything: yes\x1b[2J"
    shutil.copytree(DEMO / "adapters" / "sort", folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = "base\r\nfits         \u202eyes\x1b]0;title\x07\x9b"
    (folder / "adapter_config.json").write_text(json.dumps(config))
    assert run(["inspect", str(folder)]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert all(line.isprintable() for line in lines)
    assert [line for line in lines if line.startswith("fits")] == []
    assert r"evil\nfits         anything: yes\x1b[2J" in lines[0]
    assert r"base\r\nfits         \u202eyes\x1b]0;title\x07\x9b" in lines[1]


MLP = "model.layers.0.mlp"
ATTENTION = "model.layers.0.self_attn"
CASES = {
    "parts": ({f"{ATTENTION}.k_proj": (32, 16), f"{MLP}.down_proj": (40, 32)}, ()),
    "whole": ({f"{ATTENTION}.qkv_proj": (32, 64)}, ()),
    "whole and part": ({f"{ATTENTION}.qkv_proj": (32, 64), f"{ATTENTION}.v_proj": (32, 16)}, ()),
    "embedding": ({"model.embed_tokens": (64, 32)}, ("model.embed_tokens",)),
    "tied head": ({"lm_head": (32, 64)}, ()),
    "wrong size": ({f"{ATTENTION}.k_proj": (32, 32)}, ()),
    "wrong kind": ({f"{MLP}.down_proj": (40, 32)}, (f"{MLP}.down_proj",)),
    "no layer": ({"model.layers.7.mlp.down_proj": (40, 32)}, ()),
    "a norm": ({"model.norm": (32, 32)}, ()),
    "no module": ({f"{MLP}.side_proj": (40, 32)}, ()),
}


def refusal(judge, *arguments) -> str | None:
    try:
        judge(*arguments)
    except jlora.AdapterMismatchError as error:
        return str(error)
    return None


def test_inspect_agrees_with_the_manager():
    model = jlora.models.from_pretrained(TIED)
    manager = jlora.LoRAManager(model, jlora.LoRAConfig(max_loras=1, max_lora_rank=16, max_cpu_loras=len(CASES)))
    verdicts = {}
    for case, (modules, embeddings) in CASES.items():
        made = adapter(modules, embeddings=embeddings, name=case)
        verdicts[case] = refusal(manager.add_adapter, made), refusal(fit, made, TIED)
        for error in verdicts[case]:
            assert error is None or any(module in error for module in modules)
    assert all((mine is None) == (theirs is None) for theirs, mine in verdicts.values()), verdicts
    fits = [case for case, (_, mine) in verdicts.items() if mine is None]
    assert fits == ["parts", "whole", "embedding", "tied head"]


def test_slot_bytes_equal_the_arrays():
    model = jlora.models.from_pretrained(TIED)
    jlora.LoRAManager(model, jlora.LoRAConfig(max_loras=1, max_lora_rank=16))
    arrays = [leaf[...] for _, leaf in nnx.to_flat_state(nnx.state(model, jlora.SlotParam))]
    found = fit(adapter({"lm_head": (32, 64)}, rank=16), TIED)[0]
    assert (found["dense"], sum(found.values())) == (sum(a.nbytes for a in arrays),) * 2


def test_base_weights_must_equal_the_models():
    table, made = load_file(TIED / "model.safetensors")["model.embed_tokens.weight"], adapter({"lm_head": (32, 64)})
    for dtype in ("float32", "bfloat16"):
        fit(replace(made, base_weights={"lm_head": table.astype(dtype)}), TIED)
    for name, wrong in (("lm_head", table + 1), ("lm_head", table[:-1]), (f"{MLP}.no_proj", table)):
        with pytest.raises(jlora.AdapterMismatchError, match=name):
            fit(replace(made, base_weights={name: wrong}), TIED)


def test_huge_rank_is_refused_without_allocating_slots(capsys, tmp_path):
    """Slots at rank 400,000 would take 17 GB. The tensors of the file, one column wide, take 3 MB."""
    adapter({"model.layers.0.mlp.up_proj": (1, 1)}, rank=400_000).save_pretrained(tmp_path / "wide")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert run(["inspect", str(tmp_path / "wide"), "--model", str(DEMO / "model")]) == 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024  # kB
    out, err = capsys.readouterr()
    assert "rank up to 400000" in out
    assert "has rank 400000; expected at most 512" in err


def test_every_problem_is_listed(capsys, tmp_path):
    modules = {f"{MLP}.side_proj": (40, 32), f"{MLP}.down_proj": (40, 31), f"{ATTENTION}.q_proj": (32, 64)}
    modules |= {f"model.layers.0.mlp.x{i}": (3, 3) for i in range(12)}
    adapter(modules).save_pretrained(tmp_path / "it")
    file = tmp_path / "it" / "adapter_config.json"
    fields = {"lora_bias": True, "bias": "all", "novel": 3, "lora_alpha": "8"}
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    weights = tmp_path / "it" / "adapter_model.safetensors"
    tensors = load_file(weights)
    del tensors[f"base_model.model.{ATTENTION}.q_proj.lora_B.weight"]
    tensors[f"base_model.model.{ATTENTION}.k_proj.bias"] = np.ones(3, np.float32)
    tensors[f"base_model.model.{ATTENTION}.v_proj.bias"] = np.ones(3, np.float32)
    save_file(tensors, weights)
    expected = [*map(repr, fields), "has tensor", "(and 1 more) is a weight or bias"]
    expected += ["side_proj", "down_proj", *(f"mlp.x{i}:" for i in range(12))]
    for arguments, count in (([], 6), (["--model", str(TIED)], len(expected))):
        assert run(["inspect", str(tmp_path / "it"), *arguments]) == 1
        out, err = capsys.readouterr()
        lines = [line for line in out.splitlines() if line.startswith("problem ")]
        assert len(lines) == count
        for text in expected[:count]:
            assert sum(text in line for line in lines) == 1, text
        assert err.startswith("jlora: error: adapter 'it'")


def test_warnings_are_printed(capsys, tmp_path):
    made = adapter({f"{ATTENTION}.k_proj": (32, 16), f"{ATTENTION}.q_proj": (32, 32)})
    modules = {n: replace(m, b=np.zeros_like(m.b)) for n, m in made.modules.items()}
    replace(made, modules=modules).save_pretrained(tmp_path / "it")
    file = tmp_path / "it" / "adapter_config.json"
    fields = {"target_modules": ["k_proj", "q_proj", "v_proj"], "alpha_pattern": {"none": 3}}
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    idle = "warning      B is zero in all 2 modules, which change nothing: they are not trained yet"
    pattern = "warning      alpha_pattern: 1 keys match no module: 'none'"
    for arguments in ([], ["--model", str(TIED)]):
        assert run(["inspect", str(tmp_path / "it"), *arguments]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert sum(line.startswith(idle) for line in lines) == sum(line == pattern for line in lines) == 1
        targeted = [line for line in lines if "targeted layers" in line]
        assert len(targeted) == bool(arguments)
        assert all("brings weights for 2 of " in line and "v_proj" in line for line in targeted)
