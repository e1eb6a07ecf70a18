"""`jlora serve` up to the start of the server: its arguments, its checks, its log and its memory budget."""

import importlib.util
import json
import logging
import re
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

import jlora
from jlora.cli import budget as budget_module
from jlora.cli.budget import Budget, budget, stored_dtype
from jlora.cli.commands import run
from jlora.cli.demo import DEMO, MIXTURE
from jlora.config import LoRAConfig
from jlora.errors import LoRAUsageError
from jlora.manager.manager import LoRAManager
from jlora.models import from_pretrained, quantized_config
from jlora.models.config import read_config
from jlora.serve import SamplingParams
from jlora.serve.engine.steps import Steps
from tests.cli.test_commands import error_of
from tests.models import checkpoints
from tests.serve.client import ask
from tests.serve.embedding import tokenizer, write_modules

MODEL = str(DEMO / "model")
SORT = str(DEMO / "adapters" / "sort")


@pytest.fixture
def served(monkeypatch):
    """Returns a function that runs `jlora serve` with options up to the start of the server.

    It returns the service and the other arguments of the server's `serve`, which the command has no parameter to
    replace. `during` is called in place of serving, while the log of the command is set up.
    """

    def run_with(*options, model=MODEL, during=lambda: None):
        seen = {}

        def serve(service, bound, **more):
            bound.close()
            seen.update(more, service=service)
            during()
            return 0

        monkeypatch.setattr("jlora.serve.http.server.serve", serve)
        loggers = [logging.getLogger(name) for name in ("absl", "jlora", "uvicorn", "jlora.serve")]
        before = [(one.handlers[:], one.filters[:], one.propagate, one.level) for one in loggers]
        try:
            assert run(["serve", model, "--port", "0", *options]) == 0
        finally:
            for one, (one.handlers, one.filters, one.propagate, level) in zip(loggers, before, strict=True):
                one.setLevel(level)
        return SimpleNamespace(**seen)

    return run_with


SMALL = ("--max-loras", "2", "--max-lora-rank", "32")


def test_command_line_of_vllm(served, monkeypatch, tmp_path):
    """The options of vLLM's documentation of LoRA and others, on the demo's mixture of experts over two devices."""
    shift = str(MIXTURE.folder / "adapters" / "shift")
    module = json.dumps({"name": "chat", "path": shift, "base_model_name": "base"})
    options = (
        "--max-loras 4 --max-lora-rank 64 --max-cpu-loras 32 --dtype bfloat16 --lora-dtype auto --bitwise-base "
        "--tensor-parallel-size 2 --enable-expert-parallel --fully-sharded-loras --activated-loras "
        "--lora-variants dora "
        "--host 0.0.0.0 --served-model-name llama base --max-num-seqs 32 --max-model-len 48 --api-key one two "
        "--gpu-memory-utilization 0.8 --uvicorn-log-level info --request-timeout 7 --max-waiting 5 --drain-timeout 9 "
        f"--lora-root {tmp_path} --lora-hub-repos a/b c/*"
    )
    model = str(MIXTURE.folder / "model")
    monkeypatch.setenv("JLORA_API_KEY", "other")  # flags come first
    monkeypatch.setenv("JLORA_ADMIN_API_KEY", "admin")  # which other users of the machine cannot see
    found = served("--enable-lora", "--lora-modules", f"sql={shift}", module, *options.split(), model=model)
    service, config, given = found.service, found.service.manager.config, found.service.engine.options
    found_loras = {name: (lora.path, lora.parent) for name, lora in service.engine.list_loras().items()}
    assert found_loras == {"sql": (shift, None), "chat": (shift, "base")}
    assert (config.max_loras, config.max_lora_rank, config.max_cpu_loras) == (4, 64, 32)
    assert (config.activated, config.variants, config.bitwise_base) == (True, ("dora",), True)
    assert (given.request_timeout, given.max_waiting, given.max_num_seqs, given.max_model_len) == (7, 5, 32, 48)
    assert (service.names, service.max_model_len) == (("llama", "base"), 48)
    assert (found.drain_seconds, found.log_level) == (9, "info")
    assert (service.sources.root, service.sources.repos) == (tmp_path, ("a/b", "c/*"))
    for admin, allowed in ((False, {"one", "two", "admin"}), (True, {"admin"})):
        keys = {key for key in ("one", "two", "other", "admin") if service.keys.admit(f"Bearer {key}", admin=admin)}
        assert keys == allowed


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--lora-modules", "sort"], "NAME=PATH"),
        (["--lora-modules", "{"], "is not JSON"),
        (["--lora-modules", '{"name": "x", "path": "y", "rank": 3}'], "'rank'"),
        (["--lora-modules", '{"name": "x", "path": "y", "base_model_name": "z"}'], "'x' has base_model_name 'z'"),
        (["--lora-modules", "x=no/such/folder"], "'no/such/folder' does not exist"),
        (["--lora-modules", f"sort={SORT}", "--max-lora-rank", "2"], "max_lora_rank"),
        (["--tensor-parallel-size", "3"], "--tensor-parallel-size 3: num_attention_heads (4) must be a multiple of"),
        (["--lora-modules", "x\ny=a"], "do not print"),
        (["--served-model-name", "x", "--lora-modules", "x=a"], "base model"),
        (["--served-model-name", "x", "x"], "twice"),
        (["--saved-heads", "embed_tokens=32"], "'model.embed_tokens': it is an embedding"),
        (["--saved-heads", "score"], "expected NAME=NUMBER, got 'score'"),
        (["--lora-root", "no/such/folder"], "no/such/folder"),
        (["--lora-resolver", "folder"], "--lora-root"),
        (["--lora-resolver", "hub"], "--lora-hub-repos"),
        (["--lora-resolver", "no_such_package.x:y"], "no_such_package"),
        (["--max-model-len", "65"], "64 positions"),
        (["--enable-expert-parallel"], "no experts"),
        (["--enable-expert-parallel", "--expert-parallel-size", "2"], "leave it out beside --expert-parallel-size"),
        (["--data-parallel-size", "4", "--tensor-parallel-size", "4"], "needs 16 devices: there are 8 in all"),
        (["--data-parallel-size", "4", "--max-num-seqs", "6"], "6 must be a multiple of --data-parallel-size 4"),
        (["--lora-target-modules", "q_prj"], "target_modules ['q_prj'] match no layer"),
        (["--skip-modules", "vision", "("], "--skip-modules: '(' is not a regular expression"),
        (["--name-map", "{"], "--name-map '{' is not JSON"),
        (["--name-map", '{"a": 3}'], '--name-map: expected {"regex": "replacement", ...}, got'),
        (["--name-map", r'{"a": "\\1"}'], r"name_map: 'a' -> '\\1' is not a regular expression"),
        (["--chat-template", "no/such/file"], "no/such/file"),
        (["--api-key", "one", ""], "an empty key"),
        (["--max-num-seqs", "65536", "--gpu-memory-utilization", "0.000001"], "does not fit"),
        (["--host", "203.0.113.1"], "--host 203.0.113.1 --port 8000: "),
        (["--port", "65536"], "65535"),
        (["--gpu-memory-utilization", "1.5"], "at most 1"),
        (["--speculative-config", "x"], "unrecognized arguments: --speculative-config x; see jlora serve --help"),
    ],
)
def test_wrong_options_are_refused_before_the_model_is_read(capsys, unread_model, options, words):
    status, line = error_of(capsys, ["serve", unread_model, *options])
    assert status in (1, 2)
    assert words in line


def test_help_shows_each_default_once(capsys):
    with pytest.raises(SystemExit, match=r"^0$"):
        run(["serve", "--help"])
    flags = re.split(r"\n  (?=--)", capsys.readouterr().out)[1:]
    assert len(flags) > 40
    assert {flag.split()[0]: " ".join(flag.split()).count("(default: ") for flag in flags} == {
        flag.split()[0]: 1 for flag in flags
    }


def test_missing_extra_is_an_error(capsys, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "uvicorn" else find(name))
    assert "jlora[serve]" in error_of(capsys, ["serve", MODEL])[1]


def answers_of(engine, asked) -> list[str]:
    """The greedy answers to (prompt, adapter), from an engine that is started and closed here."""
    engine.start()
    try:
        greedy = SamplingParams(temperature=0)
        return [one.result(60).text for one in [engine.submit(prompt, greedy, lora=name) for prompt, name in asked]]
    finally:
        assert engine.close(60)


@pytest.mark.slow
def test_modules_of_other_names_are_mapped_skipped_and_excluded(served, tmp_path):
    sort = jlora.Adapter.from_pretrained(SORT)
    modules = {f"language_model.{name}": module for name, module in sort.modules.items()}
    modules["vision.blocks.0.qkv"] = next(iter(sort.modules.values()))
    jlora.Adapter(name="sort", modules=modules).save_pretrained(tmp_path / "sort")
    targets = sorted({name.rpartition(".")[2] for name in sort.modules})
    found = served(
        *(*SMALL, "--max-num-seqs", "1", "--lora-modules", f"sort={tmp_path / 'sort'}"),
        *("--name-map", json.dumps({r"^language_model\.": ""}), "--skip-modules", "^vision"),
        *("--lora-target-modules", *targets, "lm_head", "--exclude-modules", "lm_head"),
    ).service
    reasons = {layer.path: layer.reason for layer in found.manager.layers()}
    assert "exclude_modules" in reasons["lm_head"]
    assert "target_modules" in reasons["model.embed_tokens"]
    assert answers_of(found.engine, [("planet=", "sort"), ("planet=", None)]) == ["aelnpt", "planet"]


def test_an_embedding_checkpoint(served, tmp_path, capsys):
    """It takes no cache. What a tokenizer was saved with, padding and a maximal length, changes no text."""
    checkpoints.write(tmp_path, checkpoints.DENSE["qwen3-tied"] | {"max_position_embeddings": 4096})
    write_modules(tmp_path)
    saved = tokenizer()
    saved.enable_truncation(4)
    saved.enable_padding(length=6)
    saved.save(str(tmp_path / "tokenizer.json"))
    service = served(*SMALL, model=str(tmp_path)).service
    assert service.engine.embeds
    assert service.max_model_len == 64
    assert service.engine.encode("planet") == tokenizer().encode("planet").ids
    assert "cache 0.0 KiB" in capsys.readouterr().err
    (tmp_path / "tokenizer_config.json").write_text('{"add_eos_token": true}')
    served(*SMALL, model=str(tmp_path))  # its tokenizer adds it
    plain = json.loads((tmp_path / "tokenizer.json").read_text()) | {"post_processor": None}
    (tmp_path / "tokenizer.json").write_text(json.dumps(plain))
    capsys.readouterr()
    status, line = error_of(capsys, ["serve", str(tmp_path)])
    assert (status, "add_eos_token is true, and tokenizer.json adds no token at the end" in line) == (1, True)


def test_a_pooling_that_is_not_served_is_refused_before_the_model_is_read(capsys, tmp_path):
    model, odd = tmp_path / "model", tmp_path / "odd"
    model.mkdir()
    checkpoints.write(model, checkpoints.DENSE["qwen3-tied"])
    write_modules(model)
    (model / "model.safetensors").unlink()
    arrays = {"model.layers.0.mlp.down_proj": (np.ones((2, 48), "f4"), np.ones((32, 2), "f4"))}
    jlora.Adapter.from_arrays("odd", arrays, alpha=2).save_pretrained(odd)
    write_modules(odd, "max")
    status, line = error_of(capsys, ["serve", str(model), "--port", "0", "--lora-modules", f"odd={odd}"])
    assert status == 1
    assert re.search("adapter 'odd': .*1_Pooling/config.json: pooling_mode must be one of .* got 'max'", line)


@pytest.mark.slow
def test_data_expert_and_tensor_sizes_together(served):
    shipped = json.loads((MIXTURE.folder / "prompts.json").read_text())[:12]
    names = sorted({one["adapter"] for one in shipped} - {None})
    modules = [f"{name}={MIXTURE.folder / 'adapters' / name}" for name in names]
    sizes = [f"--{axis}-parallel-size=2" for axis in ("data", "expert", "tensor")]
    options = ("--max-loras", "3", "--expert-slots", "per_expert=2", "--max-num-seqs", "4", "--lora-modules", *modules)
    service = served(*sizes, *options, model=str(MIXTURE.folder / "model")).service
    assert service.manager.config.expert_slots == {"per_expert": 2}
    assert dict(service.manager.model.partition.mesh.shape) == {"data": 2, "expert": 2, "tensor": 2}
    answers = answers_of(service.engine, [(one["prompt"], one["adapter"]) for one in shipped])
    right = [answer == one["answer"] for answer, one in zip(answers, shipped, strict=True)]
    assert sum(right) >= 11


def test_misfit_of_an_adapter_is_listed_before_the_model_is_read(capsys, unread_model, tmp_path):
    arrays = {f"model.layers.0.mlp.{name}": (np.ones((2, 9), "f4"), np.ones((9, 2), "f4")) for name in ("x", "y")}
    jlora.Adapter.from_arrays("odd", arrays, alpha=2).save_pretrained(tmp_path / "odd")
    assert run(["serve", unread_model, "--port", "0", "--lora-modules", f"odd={tmp_path / 'odd'}"]) == 1
    first, *rest = capsys.readouterr().err.splitlines()
    assert first == f"jlora: error: adapter 'odd' ({tmp_path / 'odd'}) does not fit this model:"
    assert [line.split(":")[0] for line in rest] == ["  model.layers.0.mlp.x", "  model.layers.0.mlp.y"]


@pytest.mark.slow
def test_a_fully_trained_lm_head(served, tmp_path, capsys):
    """The advice of the refusal serves the adapter: its answers are those of a model with that lm_head."""
    base = from_pretrained(MODEL, dtype="float32")
    own = np.roll(np.asarray(base.lm_head.kernel[...]).T, 1, axis=0)  # each token is answered by the one before it
    lora = jlora.Adapter.from_pretrained(SORT)
    replace(lora, heads={"lm_head": jlora.SavedHead(own)}).save_pretrained(tmp_path / "own")
    options = ["--max-num-seqs", "2", "--max-num-batched-tokens", "32", "--lora-modules"]
    options = (*SMALL, *options, f"own={tmp_path / 'own'}")
    assert run(["serve", MODEL, "--port", "0", *options]) == 1
    advice = re.search(r"jlora serve (--saved-heads \S+)", capsys.readouterr().err)[1]
    assert advice == "--saved-heads lm_head=32"
    service = served(*options, f"sort={SORT}", *advice.split()).service
    service.engine.start()
    service.state = "serving"
    body = {"prompt": "sort=dcba", "max_tokens": 1, "temperature": 0, "logprobs": 5}
    answers = {}
    for name in ("sort", "own", MODEL):
        (choice,) = ask(service, "POST", "/v1/completions", body | {"model": name}).json["choices"]
        answers[name] = choice["logprobs"]["top_logprobs"][0]
    assert service.engine.close(60)
    assert answers["own"].keys() != answers["sort"].keys()
    np.testing.assert_allclose([*answers["own"].values()], [*answers["sort"].values()], rtol=1e-4, atol=1e-4)
    assert answers[MODEL].keys() != answers["own"].keys()


def test_log_lines_cannot_be_forged(served, capsys, caplog):

    def log():
        for text in ("Autotuning cache miss for %s", "another warning for %s"):
            logging.getLogger("absl").warning(text, "x")
        logging.getLogger("jlora.serve").info("one\nINFO forged \x1b[31m")

    served("--quantization", "int8", *SMALL, during=log)
    assert [record.getMessage() for record in caplog.records if record.name == "absl"] == ["another warning for x"]
    printed = capsys.readouterr().err
    assert re.search(r"weights \d+\.\d KiB", printed)  # 1.7 MiB otherwise
    *_, first, second = printed.splitlines()
    assert re.fullmatch(r"[-\dT:]+Z INFO jlora\.serve: one", first)
    assert second == r"    INFO forged \x1b[31m"


def test_auto_dtype_is_the_stored_one(tmp_path):
    assert stored_dtype(DEMO / "model") == "bfloat16"
    (tmp_path / "config.json").write_text(json.dumps({"torch_dtype": "bfloat16", "dtype": "float16"}))
    assert stored_dtype(tmp_path) == "float16"
    (tmp_path / "config.json").write_text('{"text_config": {"dtype": "bfloat16"}}')
    assert stored_dtype(tmp_path) == "bfloat16"
    (tmp_path / "config.json").write_text("{")
    assert stored_dtype(tmp_path) == "float32"


def held(arrays, device):
    return sum(
        shard.data.nbytes
        for array in jax.tree.leaves(arrays)
        for shard in array.addressable_shards
        if shard.device == device
    )


@pytest.mark.parametrize(("tensor", "quantize"), [(1, None), pytest.param(2, "int8", marks=pytest.mark.slow)])
def test_budget_equals_the_allocated_bytes(tensor, quantize):
    """Weights, slots and cache on the first device, which holds the most."""
    mesh = None
    if tensor > 1:
        mesh = jax.make_mesh((tensor,), ("tensor",), axis_types=(AxisType.Auto,), devices=jax.devices()[:tensor])
    lora = LoRAConfig(max_loras=3, max_lora_rank=8)
    options = {"sequences": 5, "max_model_len": 48, "batched_tokens": 32, "share": 0.9}
    config = quantized_config(read_config(DEMO / "model" / "config.json"), quantize)
    found = budget(config, lora, dtype="bfloat16", mesh=mesh, **options)
    model = from_pretrained(DEMO / "model", dtype="bfloat16", mesh=mesh, quantize=quantize)
    manager = LoRAManager(model, lora)
    steps = Steps(model, manager, rows=5, max_model_len=48, chunk=32)
    before = {id(array) for array in jax.live_arrays()}
    steps.reset()
    cache = [array for array in jax.live_arrays() if id(array) not in before and array.dtype == jnp.bfloat16]
    device = jax.devices()[0]
    assert found.weights == held(nnx.state(model, nnx.Param), device)
    slots = held(manager.slots, device)
    assert 0 <= slots - found.slots <= 0.01 * slots  # the budget leaves out small state beside the slots
    assert found.cache * found.sequences == held(cache, device)


def test_default_number_of_sequences_fits(monkeypatch):
    config = read_config(DEMO / "model" / "config.json")
    lora = LoRAConfig(max_loras=2, max_lora_rank=8)
    options = {"dtype": np.float32, "mesh": None, "max_model_len": 64, "batched_tokens": 64, "share": 0.5}
    assert budget(config, lora, sequences=None, **options).sequences == 64
    # A device with room for eleven sequences.
    whole = budget(config, lora, sequences=11, **options)
    monkeypatch.setattr(budget_module, "device_bytes", lambda device: 2 * sum(whole.parts.values()) + 2)
    found = budget(config, lora, sequences=None, **options)
    assert found.sequences == 8
    found.check()
    whole.check()
    with pytest.raises(LoRAUsageError, match="does not fit"):
        budget(config, lora, sequences=12, **options).check()
    monkeypatch.setattr(budget_module, "device_bytes", lambda device: None)
    assert budget(config, lora, sequences=None, **options).sequences == 64


@pytest.mark.parametrize(
    ("weights", "slots", "cache", "flag"),
    [(200, 5, 5, "--dtype"), (50, 5, 80, "--max-num-seqs"), (50, 80, 5, "--max-loras")],
)
def test_error_names_the_flag_to_lower(weights, slots, cache, flag):
    with pytest.raises(LoRAUsageError, match=flag) as caught:
        Budget(weights, slots, 1, cache, 1, 100, 1).check()
    assert all(name in str(caught.value) for name in ("weights ", "slots ", "cache ", "steps ", "staging "))
    Budget(weights, slots, 1, cache, 1, None, 1).check()


def test_memory_below_staging_is_an_error_of_its_share():
    with pytest.raises(LoRAUsageError, match=r"raise --gpu-memory-utilization, since staging alone exceeds") as caught:
        Budget(5, 5, 100, 1, 1, 80, 1).check()
    assert "--max-lora-rank" not in str(caught.value)
    with pytest.raises(LoRAUsageError, match="lower --dtype"):  # staging is the largest, and cannot be lowered
        Budget(50, 10, 70, 1, 1, 80, 1).check()
