"""`jlora serve` up to the start of the server: its arguments, its checks, its log and its memory budget."""

import asyncio
import functools
import importlib.util
import json
import logging
import re
import shutil
from dataclasses import replace
from types import SimpleNamespace

import httpx
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
from jlora.models import from_pretrained, generate, quantized_config
from jlora.models.config import read_config
from jlora.serve import SamplingParams
from jlora.serve.engine.steps import Steps
from jlora.serve.http.app import build_app
from tests.cli.test_commands import error_of
from tests.models import checkpoints, goldens
from tests.models.test_checkpoint import edit, multimodal
from tests.serve.client import ask
from tests.serve.embedding import tokenizer, write_modules

MODEL = str(DEMO / "model")
SORT = str(DEMO / "adapters" / "sort")


# --- arguments --------------------------------------------------------------------------------------------------------


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


def test_command_line_of_vllm(served):
    """The options of vLLM's documentation of LoRA and two others, on the demo's mixture of experts over two devices."""
    shift = str(MIXTURE.folder / "adapters" / "shift")
    module = json.dumps({"name": "chat", "path": shift, "base_model_name": "base"})
    options = (
        "--max-loras 4 --max-lora-rank 64 --max-cpu-loras 32 --dtype bfloat16 --lora-dtype auto "
        "--tensor-parallel-size 2 --enable-expert-parallel --fully-sharded-loras --activated-loras --dora-loras "
        "--host 0.0.0.0 "
        "--served-model-name llama base --max-num-seqs 32 --max-model-len 48 --api-key one two "
        "--gpu-memory-utilization 0.8 --uvicorn-log-level info"
    )
    model = str(MIXTURE.folder / "model")
    found = served("--enable-lora", "--lora-modules", f"sql={shift}", module, *options.split(), model=model)
    service, config = found.service, found.service.manager.config
    assert {name: (lora.path, lora.parent) for name, lora in service.engine.list_loras().items()} == {
        "sql": (shift, None),
        "chat": (shift, "base"),
    }
    assert (config.max_loras, config.max_lora_rank, config.max_cpu_loras) == (4, 64, 32)
    assert config.activated
    assert config.dora
    assert (service.names, service.max_model_len) == (("llama", "base"), 48)
    assert [service.keys.admit(f"Bearer {key}", admin=False) for key in ("one", "two", "")] == [True, True, False]
    assert found.log_level == "info"


def test_a_quantized_model_is_served(served, capsys):
    found = served("--quantization", "int8", "--lora-modules", f"sort={SORT}", *SMALL)
    assert found.service.engine.list_loras().keys() == {"sort"}
    assert re.search(r"weights \d+\.\d KiB", capsys.readouterr().err)  # 1.7 MiB otherwise


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--lora-modules", "sort"], "NAME=PATH"),
        (["--lora-modules", "=x"], "NAME=PATH"),
        (["--lora-modules", "x="], "NAME=PATH"),
        (["--lora-modules", "{"], "is not JSON"),
        (["--lora-modules", '{"name": "x"}'], "NAME=PATH"),
        (["--lora-modules", '{"name": 3, "path": "y"}'], "NAME=PATH"),
        (["--lora-modules", '{"name": "x", "path": "y", "rank": 3}'], "'rank'"),
        (["--lora-modules", '{"name": "x", "path": "y", "base_model_name": 3}'], "base_model_name must be a string"),
        (
            ["--served-model-name", "one", "--lora-modules", '{"name": "x", "path": "y", "base_model_name": "z"}'],
            "'x' has base_model_name 'z', and the model that is served is 'one'",
        ),
        (["--lora-modules", "x=no/such/folder"], "'no/such/folder' does not exist"),
        (["--lora-modules", f"sort={SORT}", "--max-lora-rank", "2"], "max_lora_rank"),
        (["--tensor-parallel-size", "3"], "num_attention_heads (4) must be a multiple"),
        (["--tensor-parallel-size", "3"], "on this machine --tensor-parallel-size can be 1, 2, 4"),
        (["--lora-modules", "x=a", "x=b"], "twice"),
        (["--lora-modules", "x\ny=a"], "do not print"),
        (["--served-model-name", "x", "--lora-modules", "x=a"], "base model"),
        (["--served-model-name", "x", "x"], "twice"),
        (["--saved-heads", "embed_tokens=32"], "'model.embed_tokens': it is an embedding"),
        (["--saved-heads", "score"], "expected NAME=NUMBER, got 'score'"),
        (["--saved-heads", "score=0"], "from 1 to"),
        (["--saved-heads", "score=2"], "saved_heads names 'score'"),
        (["--lora-root", "no/such/folder"], "no/such/folder"),
        (["--lora-resolver", "folder"], "--lora-root"),
        (["--lora-resolver", "hub"], "--lora-hub-repos"),
        (["--lora-resolver", "disk"], "package.module:function"),
        (["--lora-resolver", "os:"], "package.module:function"),
        (["--lora-resolver", "no_such_package.x:y"], "no_such_package"),
        (["--lora-resolver", "os:no_such_function"], "no_such_function"),
        (["--lora-resolver", "os:sep"], "cannot be called"),
        (["--max-model-len", "65"], "64 positions"),
        (["--max-loras", "4", "--max-cpu-loras", "2"], "max_cpu_loras"),
        (["--tensor-parallel-size", "1000"], "devices"),
        (["--enable-expert-parallel"], "no experts"),
        (["--expert-parallel-size", "2"], "--expert-parallel-size: the model has no experts"),
        (["--enable-expert-parallel", "--expert-parallel-size", "2"], "leave it out beside --expert-parallel-size"),
        (
            ["--data-parallel-size", "4", "--tensor-parallel-size", "4"],
            "--data-parallel-size 4 --tensor-parallel-size 4 needs 16 devices: there are 8 in all",
        ),
        (
            ["--data-parallel-size", "2", "--tensor-parallel-size", "3"],
            "on this machine --tensor-parallel-size can be 1, 2, 4",
        ),
        (
            ["--data-parallel-size", "4", "--max-num-seqs", "6"],
            "--max-num-seqs 6 must be a multiple of --data-parallel-size 4",
        ),
        (["--target-modules", "q_prj"], "target_modules ['q_prj'] match no layer"),
        (["--exclude-modules", "vision"], "exclude_modules ['vision'] match no layer"),
        (["--skip-modules", "vision", "("], "--skip-modules: '(' is not a regular expression"),
        (["--name-map", "{"], "--name-map '{' is not JSON"),
        (["--name-map", "[]"], '--name-map: expected {"regex": "replacement", ...}, got'),
        (["--name-map", '{"a": 3}'], '--name-map: expected {"regex": "replacement", ...}, got'),
        (["--name-map", '{"(": "a"}'], "--name-map: '(' is not a regular expression"),
        (["--name-map", r'{"a": "\\1"}'], r"name_map: 'a' -> '\\1' is not a regular expression"),
        (["--expert-slots", "per_expert=9"], "expert_slots must be None or a mapping of"),
        (["--expert-slots", "each=1"], "expert_slots must be None or a mapping of"),
        (["--chat-template", "no/such/file"], "no/such/file"),
        (["--api-key", ""], "an empty key"),
        (["--api-key", "one", ""], "an empty key"),
        (["--api-key", "one", "--admin-api-key", ""], "an empty key"),
        (["--max-num-seqs", "65536", "--gpu-memory-utilization", "0.000001"], "does not fit"),
        (["--host", "203.0.113.1"], "--host 203.0.113.1 --port 8000: "),
        (["--port", "65536"], "65535"),
        (["--dtype", "int8"], "int8"),
        (["--request-timeout", "0"], "seconds"),
        (["--gpu-memory-utilization", "1.5"], "at most 1"),
        (["--speculative-config", "x"], "unrecognized arguments: --speculative-config x; see jlora serve --help"),
    ],
)
def test_wrong_options_are_refused_before_the_model_is_read(capsys, unread_model, options, words):
    status, line = error_of(capsys, ["serve", unread_model, *options])
    assert status in (1, 2)
    assert words in line


def test_folder_without_a_model_is_refused(capsys, tmp_path):
    assert "config.json" in error_of(capsys, ["serve", str(tmp_path)])[1]


def test_missing_extra_is_an_error(capsys, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "uvicorn" else find(name))
    assert "jlora[serve]" in error_of(capsys, ["serve", MODEL])[1]


def test_flags_reach_the_server(served, monkeypatch, tmp_path):
    monkeypatch.setenv("JLORA_API_KEY", "user")
    monkeypatch.setenv("JLORA_ADMIN_API_KEY", "admin")
    options = (
        f"--request-timeout 7 --max-waiting 5 --drain-timeout 9 --max-num-seqs 2 --max-model-len 32 --max-cpu-loras 3 "
        f"--served-model-name one two --lora-modules mine={SORT} --lora-root {tmp_path} --lora-hub-repos a/b c/* "
        "--bitwise-base"
    )
    found = served(*SMALL, *options.split())
    service, given = found.service, found.service.engine.options
    assert (given.request_timeout, given.max_waiting, given.max_num_seqs, given.max_model_len) == (7, 5, 2, 32)
    assert (found.drain_seconds, service.names, service.max_model_len) == (9, ("one", "two"), 32)
    assert (service.manager.config.max_loras, service.manager.config.max_cpu_loras) == (2, 3)
    assert service.manager.config.bitwise_base
    assert (service.adapters.sources.root, service.adapters.sources.repos) == (tmp_path, ("a/b", "c/*"))
    assert {name: lora.path for name, lora in service.engine.list_loras().items()} == {"mine": SORT}
    # Keys from the environment, which other users of the machine cannot see.
    assert [service.keys.admit(f"Bearer {key}", admin=False) for key in ("user", "admin", "x")] == [True, True, False]
    assert [service.keys.admit(f"Bearer {key}", admin=True) for key in ("user", "admin", "x")] == [False, True, False]


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
    """An adapter of a model with a vision tower, whose text model has a prefix."""
    sort = jlora.Adapter.from_pretrained(SORT)
    modules = {f"language_model.{name}": module for name, module in sort.modules.items()}
    modules["vision.blocks.0.qkv"] = next(iter(sort.modules.values()))
    jlora.Adapter(name="sort", modules=modules).save_pretrained(tmp_path / "sort")
    targets = sorted({name.rpartition(".")[2] for name in sort.modules})
    found = served(
        *(*SMALL, "--max-num-seqs", "1", "--lora-modules", f"sort={tmp_path / 'sort'}"),
        *("--name-map", json.dumps({r"^language_model\.": ""}), "--skip-modules", "^vision"),
        *("--target-modules", *targets, "lm_head", "--exclude-modules", "lm_head"),
    ).service
    reasons = {layer.path: layer.reason for layer in found.manager.layers()}
    assert "exclude_modules" in reasons["lm_head"]
    assert "target_modules" in reasons["model.embed_tokens"]
    assert answers_of(found.engine, [("planet=", "sort"), ("planet=", None)]) == ["aelnpt", "planet"]


GEMMA_TEMPLATE = """{{ bos_token }}
{%- for message in messages -%}
    {%- set role = "model" if message.role == "assistant" else message.role -%}
    {{ "<start_of_turn>" + role + "\n" + message.content | trim }}<end_of_turn>{{ "\n" }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ "<start_of_turn>model\n" }}{%- endif -%}"""


@pytest.mark.slow
def test_gemma_with_the_client_of_openai(served, tmp_path):
    """A multimodal checkpoint of Gemma 3 and an adapter trained on it, with its turns and the tokens that end them."""
    tokenizers = pytest.importorskip("tokenizers")
    openai = pytest.importorskip("openai")
    special = ["<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"]
    letters = [*special, "\n", *map(chr, range(97, 123)), *map(chr, range(65, 91)), *"012345"]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.add_special_tokens(special)
    tokenizer.decoder = tokenizers.decoders.Fuse()
    folders = {name: shutil.copytree(goldens.FOLDER / "gemma3-tied", tmp_path / name) for name in ("base", "merged")}
    multimodal(folders["base"], "language_model.model.")
    tokenizer.save(str(folders["base"] / "tokenizer.json"))
    config = {"bos_token": "<bos>", "chat_template": GEMMA_TEMPLATE}
    (folders["base"] / "tokenizer_config.json").write_text(json.dumps(config))

    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 32)).astype(np.float32), rng.normal(size=(48, 2)).astype(np.float32)
    module = jlora.ModuleLoRA(a=a, b=b, kind="linear", alpha=2.0, scaling=1.0)
    name = "layers.1.self_attn.q_proj"
    jlora.Adapter(name="own", modules={f"model.language_model.{name}": module}).save_pretrained(tmp_path / "own")
    weight = f"model.{name}.weight"
    edit(folders["merged"], lambda tensors: tensors.update({weight: tensors[weight] + b @ a}))

    turn = ["<bos>", "<start_of_turn>", *"user\nhello", "<end_of_turn>", "\n", "<start_of_turn>", *"model\n"]
    prompt = [letters.index(letter) for letter in turn]
    want = {}
    for model, folder in (("gemma", "base"), ("own", "merged")):
        (want[model],) = generate(from_pretrained(folders[folder]), [prompt], max_new_tokens=12)
    assert want["gemma"] != want["own"]
    ends = [1, want["gemma"][5]]
    (folders["base"] / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))

    options = ("--served-model-name", "gemma", "--max-num-seqs", "2", "--max-num-batched-tokens", "16")
    service = served(*SMALL, *options, "--lora-modules", f"own={tmp_path / 'own'}", model=str(folders["base"])).service
    service.engine.start()
    service.state = "serving"

    async def answers():
        http = httpx.AsyncClient(transport=httpx.ASGITransport(build_app(service)))
        async with openai.AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=http) as client:
            chat = functools.partial(client.chat.completions.create, temperature=0, max_completion_tokens=12)
            messages = [{"role": "user", "content": " hello "}]
            return await asyncio.gather(*(chat(model=model, messages=messages) for model in want))

    try:
        for model, answer in zip(want, asyncio.run(answers()), strict=True):
            length = next((i for i, token in enumerate(want[model], 1) if token in ends), 12)
            assert answer.usage.prompt_tokens == len(prompt)
            assert answer.choices[0].message.content == tokenizer.decode(want[model][:length])
            assert answer.choices[0].finish_reason == ("length" if length == 12 else "stop")
    finally:
        assert service.engine.close(60)


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


@pytest.mark.slow
def test_data_expert_and_tensor_sizes_together(served):
    """Eight devices serve the demo's mixture with the answers of one, without recompilation."""
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


def test_flags_come_before_the_environment(served, monkeypatch):
    monkeypatch.setenv("JLORA_API_KEY", "other")
    keys = served(*SMALL, "--max-num-seqs", "1", "--api-key", "a", "b").service.keys
    assert [keys.admit(f"Bearer {key}", admin=True) for key in ("a", "b", "other")] == [True, True, False]


def test_misfit_of_an_adapter_is_listed_before_the_model_is_read(capsys, unread_model, tmp_path):
    """The shapes of an adapter are in the header of its file."""
    arrays = {f"model.layers.0.mlp.{name}": (np.ones((2, 9), "f4"), np.ones((9, 2), "f4")) for name in ("x", "y")}
    jlora.Adapter.from_arrays("odd", arrays, alpha=2).save_pretrained(tmp_path / "odd")
    assert run(["serve", unread_model, "--port", "0", "--lora-modules", f"odd={tmp_path / 'odd'}"]) == 1
    first, *rest = capsys.readouterr().err.splitlines()
    assert first == f"jlora: error: adapter 'odd' ({tmp_path / 'odd'}) does not fit this model:"
    assert [line.split(":")[0] for line in rest] == ["  model.layers.0.mlp.x", "  model.layers.0.mlp.y"]


def test_base_model_of_a_module_is_its_parent(served):
    modules = [
        f"a={SORT}",
        *(json.dumps({"name": n, "path": SORT, "base_model_name": b}) for n, b in (("b", "two"), ("c", MODEL))),
    ]
    names = ("--served-model-name", "one", "two", "--max-num-seqs", "1", "--max-num-batched-tokens", "32")
    service = served(*SMALL, *names, "--lora-modules", *modules).service
    service.engine.start()
    service.state = "serving"
    cards = {card["id"]: card["parent"] for card in ask(service, "GET", "/v1/models").json["data"]}
    assert service.engine.close(60)
    assert cards == {"one": None, "two": None, "a": "one", "b": "two", "c": "one"}


def test_warm_up_logs_each_compiled_shape(served, caplog):
    engine = served(*SMALL, "--max-num-seqs", "1", "--max-num-batched-tokens", "32").service.engine
    with caplog.at_level("INFO", "jlora.serve"):
        engine.start()
    assert engine.close(60)
    found = [record.getMessage() for record in caplog.records if record.getMessage().startswith("warm-up ")]
    assert found[:3] == [
        "warm-up 1 of 12: the state on the device",
        *(f"warm-up {i} of 12: prefill of 32 tokens over {extent} positions" for i, extent in ((2, 32), (3, 64))),
    ]
    assert found[7].endswith("decode of 1 rows over 64 positions")
    assert len(found) == 12


def test_a_fully_trained_lm_head(served, tmp_path, capsys):
    """The advice of the refusal serves the adapter: its answers are those of a model with that lm_head."""
    base = from_pretrained(MODEL, dtype="float32")
    own = np.roll(np.asarray(base.lm_head.kernel[...]).T, 1, axis=0)  # each token is answered by the one before it
    lora = jlora.Adapter.from_pretrained(SORT)
    replace(lora, heads={"lm_head": jlora.SavedHead(own)}).save_pretrained(tmp_path / "own")
    options = (
        *SMALL,
        "--max-num-seqs",
        "2",
        "--max-num-batched-tokens",
        "32",
        "--lora-modules",
        f"own={tmp_path / 'own'}",
    )
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


def test_help_shows_every_default(capsys):
    with pytest.raises(SystemExit):
        run(["serve", "--help"])
    entries = re.split(r"\n  (?=-)", capsys.readouterr().out)[1:]
    assert len(entries) > 30
    missing = [entry for entry in entries if "default:" not in " ".join(entry.split()) and "--help" not in entry]
    assert missing == []
    shown = " ".join(" ".join(entries).split())
    for flag, default in (
        ("--max-waiting N", "1024"),
        ("--bitwise-base", "off"),
        ("--enable-lora", "on"),
        ("--lora-modules", "none"),
    ):
        assert re.search(rf"{flag}[^(]*\(default: {default}\)", shown), flag


def test_log_lines_cannot_be_forged(served, capsys):
    served(*SMALL, during=lambda: logging.getLogger("jlora.serve").info("one\nINFO forged \x1b[31m"))
    *_, first, second = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"[-\dT:]+Z INFO jlora\.serve: one", first)
    assert second == r"    INFO forged \x1b[31m"


def test_autotuning_misses_of_tokamax_are_not_logged(served, caplog):
    def log():
        for text in ("Autotuning cache miss for %s", "another warning for %s"):
            logging.getLogger("absl").warning(text, "x")

    served(*SMALL, during=log)
    assert [record.getMessage() for record in caplog.records if record.name == "absl"] == ["another warning for x"]


# --- memory -----------------------------------------------------------------------------------------------------------


def test_auto_dtype_is_the_stored_one(tmp_path):
    assert stored_dtype(DEMO / "model") == "bfloat16"
    (tmp_path / "config.json").write_text(json.dumps({"torch_dtype": "bfloat16", "dtype": "float16"}))
    assert stored_dtype(tmp_path) == "float16"
    (tmp_path / "config.json").write_text('{"text_config": {"dtype": "bfloat16"}}')
    assert stored_dtype(tmp_path) == "bfloat16"
    for text in ('{"torch_dtype": "int8"}', "[]", "{"):
        (tmp_path / "config.json").write_text(text)
        assert stored_dtype(tmp_path) == "float32"


def held(arrays, device):
    return sum(
        shard.data.nbytes
        for array in jax.tree.leaves(arrays)
        for shard in array.addressable_shards
        if shard.device == device
    )


@pytest.mark.parametrize(
    ("tensor", "quantize"),
    [
        (1, None),
        (1, "int8"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, None), (4, None), (2, "fp8"))),
    ],
)
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


@pytest.mark.slow
def test_budget_of_llama_3_8b():
    """64 sequences of 8,192 tokens of Llama-3-8B: 2 x 32 layers x 8 heads x 128 x 2 bytes a token."""
    raw = {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
    }
    config = config_of(raw)
    lora = LoRAConfig(max_loras=1, max_lora_rank=16)
    options = {"dtype": "bfloat16", "mesh": None, "max_model_len": 8192, "batched_tokens": 512, "share": 0.9}
    found = budget(config, lora, sequences=64, **options)
    assert found.rows["cache"] == 64 * 8192 * 2 * 32 * 8 * 128 * 2 == 68_719_476_736
    assert abs(found.weights - 16.06e9) < 0.01e9
    # A and B of all seven projections at rank 16, and of the embedding and the head.
    per_layer = 16 * ((4096 + 6144) + (4096 + 4096) + (4096 + 28672) + (14336 + 4096)) + 16 * 4096 * 3
    assert abs(found.slots - 2 * (32 * per_layer + 2 * 16 * (4096 + 128256))) < 0.02 * found.slots


def config_of(raw):
    from pathlib import Path
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(raw))
        return read_config(Path(folder) / "config.json")


def test_default_number_of_sequences_fits(monkeypatch):
    config = read_config(DEMO / "model" / "config.json")
    lora = LoRAConfig(max_loras=2, max_lora_rank=8)
    options = {"dtype": np.float32, "mesh": None, "max_model_len": 64, "batched_tokens": 64, "share": 0.5}
    assert budget(config, lora, sequences=None, **options).sequences == 64
    # A device with room for eleven sequences.
    whole = budget(config, lora, sequences=11, **options)
    monkeypatch.setattr(budget_module, "device_bytes", lambda device: 2 * sum(whole.rows.values()) + 2)
    found = budget(config, lora, sequences=None, **options)
    assert found.sequences == 8
    found.check()
    whole.check()
    with pytest.raises(LoRAUsageError, match="does not fit"):
        budget(config, lora, sequences=12, **options).check()
    monkeypatch.setattr(budget_module, "device_bytes", lambda device: None)
    assert budget(config, lora, sequences=None, **options).sequences == 64


@pytest.mark.parametrize(
    ("rows", "flag"),
    [
        ({"weights": 200, "slots": 5, "cache": 5}, "--dtype"),
        ({"weights": 50, "slots": 5, "cache": 80}, "--max-num-seqs"),
        ({"weights": 50, "slots": 80, "cache": 5}, "--max-loras"),
    ],
)
def test_error_names_the_flag_to_lower(rows, flag):
    found = Budget(rows["weights"], rows["slots"], 1, rows["cache"], 1, 100, 1)
    with pytest.raises(LoRAUsageError, match=flag) as caught:
        found.check()
    assert all(
        f"{name} " in str(caught.value) for name in ("weights", "slots", "cache", "steps", "staging", "there is")
    )
    Budget(rows["weights"], rows["slots"], 1, rows["cache"], 1, None, 1).check()
