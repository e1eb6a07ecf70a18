"""`jlora serve` up to where it serves: its arguments, what it refuses before it allocates, and what it counts."""

import importlib.util
import json
import logging
import re
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

import jlora
from jlora.cli import budget as budget_module
from jlora.cli.budget import Budget, budget, stored_dtype
from jlora.cli.commands import _parser, run
from jlora.cli.demo import DEMO
from jlora.cli.serve import _Formatter, _is_news, _module
from jlora.config import LoRAConfig, LoRARequest
from jlora.errors import LoRAUsageError
from jlora.manager.manager import LoRAManager
from jlora.models import from_pretrained
from jlora.models.config import read_config
from jlora.serve.engine.steps import Steps
from tests.cli.test_commands import error_of
from tests.serve.client import ask

MODEL = str(DEMO / "model")
SORT = str(DEMO / "adapters" / "sort")


# --- arguments --------------------------------------------------------------------------------------------------------


def test_a_command_line_of_vllm():
    """As its documentation of LoRA writes it."""
    line = (
        "serve meta-llama/Llama-3.2-3B --enable-lora --lora-modules sql=/adapters/sql "
        '{"name":"chat","path":"/adapters/chat","base_model_name":"x"} --max-loras 4 --max-lora-rank 64 '
        "--max-cpu-loras 32 --dtype bfloat16 --lora-dtype auto --tensor-parallel-size 2 --enable-expert-parallel "
        "--fully-sharded-loras --host 0.0.0.0 --port 8001 --served-model-name llama base --max-num-seqs 32 "
        "--max-model-len 4096 --api-key one two --gpu-memory-utilization 0.8 --uvicorn-log-level info"
    )
    args = _parser().parse_args(line.split())
    assert [_module(text) for text in args.lora_modules] == [
        (LoRARequest("sql", "/adapters/sql"), None),
        (LoRARequest("chat", "/adapters/chat"), "x"),
    ]
    assert (args.max_loras, args.max_lora_rank, args.max_cpu_loras) == (4, 64, 32)
    assert (args.served_model_name, args.api_key) == (["llama", "base"], ["one", "two"])


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
            [
                "--served-model-name",
                "one",
                "two",
                "--lora-modules",
                '{"name": "x", "path": "y", "base_model_name": "z"}',
            ],
            "'x' has base_model_name 'z', and the model that is served is 'one' or 'two'",
        ),
        (["--lora-modules", "x=no/such/folder"], "'no/such/folder' does not exist"),
        (["--lora-modules", f"sort={SORT}", "--max-lora-rank", "2"], "max_lora_rank"),
        (["--tensor-parallel-size", "3"], "num_attention_heads (4) must be a multiple"),
        (["--tensor-parallel-size", "3"], "on this machine the model can be served over 1, 2, 4"),
        (["--lora-modules", "x=a", "x=b"], "twice"),
        (["--lora-modules", "x\ny=a"], "do not print"),
        (["--served-model-name", "x", "--lora-modules", "x=a"], "base model"),
        (["--served-model-name", "x", "x"], "twice"),
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
def test_what_is_wrong_is_one_line_before_a_model_is_read(capsys, monkeypatch, options, words):
    monkeypatch.setattr("jlora.cli.serve.load_model", lambda *args: pytest.fail("a model is read"))
    status, line = error_of(capsys, ["serve", MODEL, *options])
    assert status in (1, 2)
    assert words in line


def test_a_model_that_is_none(capsys, tmp_path):
    assert "config.json" in error_of(capsys, ["serve", str(tmp_path)])[1]


def test_without_the_extra(capsys, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "uvicorn" else find(name))
    assert "jlora[serve]" in error_of(capsys, ["serve", MODEL])[1]


def served(monkeypatch, *options):
    """What `jlora serve` would serve with these options, on the demo model: the service, and how it is to end."""
    seen = {}

    def serve(service, bound, **more):
        bound.close()
        seen.update(more, service=service)
        return 0

    monkeypatch.setattr("jlora.serve.http.server.serve", serve)
    monkeypatch.setattr("jlora.cli.serve._log_to_stderr", lambda: None)
    assert run(["serve", MODEL, "--port", "0", "--max-loras", "2", "--max-lora-rank", "32", *options]) == 0
    return SimpleNamespace(**seen)


def test_flags_reach_the_server(monkeypatch, tmp_path):
    monkeypatch.setenv("JLORA_API_KEY", "user")
    monkeypatch.setenv("JLORA_ADMIN_API_KEY", "admin")
    options = (
        f"--request-timeout 7 --max-waiting 5 --drain-timeout 9 --max-num-seqs 2 --max-model-len 32 --max-cpu-loras 3 "
        f"--served-model-name one two --lora-modules mine={SORT} --lora-root {tmp_path} --lora-hub-repos a/b c/* "
        "--bitwise-base"
    )
    found = served(monkeypatch, *options.split())
    service, given = found.service, found.service.engine.options
    assert (given.request_timeout, given.max_waiting, given.max_num_seqs, given.max_model_len) == (7, 5, 2, 32)
    assert (found.drain_seconds, service.names, service.max_model_len) == (9, ("one", "two"), 32)
    assert (service.manager.config.max_loras, service.manager.config.max_cpu_loras) == (2, 3)
    assert service.manager.config.bitwise_base
    assert (service.adapters.sources.root, service.adapters.sources.repos) == (tmp_path, ("a/b", "c/*"))
    assert {name: lora.path for name, lora in service.engine.list_loras().items()} == {"mine": SORT}
    # Keys of the environment, which no list of processes shows.
    assert [service.keys.admit(f"Bearer {key}", admin=False) for key in ("user", "admin", "x")] == [True, True, False]
    assert [service.keys.admit(f"Bearer {key}", admin=True) for key in ("user", "admin", "x")] == [False, True, False]


def test_flags_come_before_the_environment(monkeypatch):
    monkeypatch.setenv("JLORA_API_KEY", "other")
    keys = served(monkeypatch, "--max-num-seqs", "1", "--api-key", "a", "b").service.keys
    assert [keys.admit(f"Bearer {key}", admin=True) for key in ("a", "b", "other")] == [True, True, False]


def test_an_adapter_that_does_not_fit_is_said_on_several_lines_before_a_model_is_read(capsys, monkeypatch, tmp_path):
    """Its shapes are in the header, and the tensors after it are not looked at."""
    monkeypatch.setattr("jlora.cli.serve.load_model", lambda *args: pytest.fail("a model is read"))
    arrays = {f"model.layers.0.mlp.{name}": (np.ones((2, 9), "f4"), np.ones((9, 2), "f4")) for name in ("x", "y")}
    jlora.Adapter.from_arrays("odd", arrays, alpha=2).save_pretrained(tmp_path / "odd")
    assert run(["serve", MODEL, "--port", "0", "--lora-modules", f"odd={tmp_path / 'odd'}"]) == 1
    first, *rest = capsys.readouterr().err.splitlines()
    assert first == f"jlora: error: adapter 'odd' ({tmp_path / 'odd'}) does not fit this model:"
    assert [line.split(":")[0] for line in rest] == ["  model.layers.0.mlp.x", "  model.layers.0.mlp.y"]


def test_the_base_model_of_a_module_is_shown_as_its_parent(monkeypatch):
    modules = [
        f"a={SORT}",
        *(json.dumps({"name": n, "path": SORT, "base_model_name": b}) for n, b in (("b", "two"), ("c", MODEL))),
    ]
    service = served(
        monkeypatch, "--served-model-name", "one", "two", "--max-num-seqs", "1", "--lora-modules", *modules
    ).service
    service.engine.start()
    service.state = "serving"
    cards = {card["id"]: card["parent"] for card in ask(service, "GET", "/v1/models").json["data"]}
    assert service.engine.close(60)
    assert cards == {"one": None, "two": None, "a": "one", "b": "two", "c": "one"}


def test_warm_up_says_what_it_compiles(monkeypatch, caplog):
    engine = served(monkeypatch, "--max-num-seqs", "1", "--max-num-batched-tokens", "32").service.engine
    with caplog.at_level("INFO", "jlora.serve"):
        engine.start()
    assert engine.close(60)
    found = [record.getMessage() for record in caplog.records if record.getMessage().startswith("warm-up ")]
    assert found[:2] == [
        f"warm-up {i} of 12: prefill of 32 tokens over {extent} positions" for i, extent in ((2, 32), (3, 64))
    ]
    assert found[6].endswith("decode of 1 rows over 64 positions")
    assert len(found) == 11


def test_help_shows_every_default(capsys):
    with pytest.raises(SystemExit):
        run(["serve", "--help"])
    entries = re.split(r"\n  (?=-)", capsys.readouterr().out)[1:]
    assert len(entries) > 30
    missing = [entry for entry in entries if "default:" not in " ".join(entry.split()) and "--help" not in entry]
    assert missing == []
    shown = " ".join(" ".join(entries).split())
    for flag, default in (("--max-waiting N", "1024"), ("--bitwise-base", "off"), ("--lora-modules", "none")):
        assert re.search(rf"{flag}[^(]*\(default: {default}\)", shown), flag


def test_autotuning_misses_of_tokamax_are_not_logged():
    for text, seen in (("Autotuning cache miss for %s", False), ("another %s", True)):
        record = logging.LogRecord("absl", logging.WARNING, "", 0, text, ("x",), None)
        assert _is_news(record) == seen


def test_log_lines_cannot_be_forged():
    record = logging.LogRecord("x", logging.INFO, "", 0, "one\nINFO forged \x1b[31m", (), None)
    lines = _Formatter("%(levelname)s %(message)s").format(record).split("\n")
    assert lines == ["INFO one", r"    INFO forged \x1b[31m"]


# --- memory -----------------------------------------------------------------------------------------------------------


def test_auto_dtype(tmp_path):
    assert stored_dtype(DEMO / "model") == "bfloat16"
    (tmp_path / "config.json").write_text(json.dumps({"torch_dtype": "bfloat16", "dtype": "float16"}))
    assert stored_dtype(tmp_path) == "float16"
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


@pytest.mark.parametrize("tensor", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))])
def test_what_is_counted_is_what_is_allocated(tensor):
    """Of weights, slots and cache, on the device that holds most."""
    mesh = None
    if tensor > 1:
        mesh = jax.make_mesh((tensor,), ("tensor",), axis_types=(AxisType.Auto,), devices=jax.devices()[:tensor])
    lora = LoRAConfig(max_loras=3, max_lora_rank=8)
    options = {"sequences": 5, "max_model_len": 48, "batched_tokens": 32, "share": 0.9}
    found = budget(read_config(DEMO / "model" / "config.json"), lora, dtype="bfloat16", mesh=mesh, **options)
    model = from_pretrained(DEMO / "model", dtype="bfloat16", mesh=mesh)
    manager = LoRAManager(model, lora)
    steps = Steps(model, manager, rows=5, max_model_len=48, chunk=32)
    steps.reset()
    device = jax.devices()[0]
    assert found.weights == held(nnx.state(model, nnx.Param), device)
    slots = held(manager.slots, device)
    assert 0 <= slots - found.slots <= 0.01 * slots  # what one layer carries beside its slots is not counted
    assert found.cache * found.sequences == held(steps._state[0], device)


@pytest.mark.slow
def test_a_known_shape():
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
    config = _config(raw)
    lora = LoRAConfig(max_loras=1, max_lora_rank=16)
    options = {"dtype": "bfloat16", "mesh": None, "max_model_len": 8192, "batched_tokens": 512, "share": 0.9}
    found = budget(config, lora, sequences=64, **options)
    assert found.rows["cache"] == 64 * 8192 * 2 * 32 * 8 * 128 * 2 == 68_719_476_736
    assert abs(found.weights - 16.06e9) < 0.01e9
    # A, B of all seven projections at rank 16, and of the embedding and the head, which may have LoRA too.
    per_layer = 16 * ((4096 + 6144) + (4096 + 4096) + (4096 + 28672) + (14336 + 4096)) + 16 * 4096 * 3
    assert abs(found.slots - 2 * (32 * per_layer + 2 * 16 * (4096 + 128256))) < 0.02 * found.slots


def _config(raw):
    from pathlib import Path
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(raw))
        return read_config(Path(folder) / "config.json")


def test_the_default_number_of_sequences_fits(monkeypatch):
    config = read_config(DEMO / "model" / "config.json")
    lora = LoRAConfig(max_loras=2, max_lora_rank=8)
    options = {"dtype": np.float32, "mesh": None, "max_model_len": 64, "batched_tokens": 64, "share": 0.5}
    assert budget(config, lora, sequences=None, **options).sequences == 64
    # A device with room for eleven of them.
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
def test_the_flag_to_lower(rows, flag):
    found = Budget(rows["weights"], rows["slots"], 1, rows["cache"], 1, 100, 1)
    with pytest.raises(LoRAUsageError, match=flag) as caught:
        found.check()
    assert all(
        f"{name} " in str(caught.value) for name in ("weights", "slots", "cache", "steps", "staging", "there is")
    )
    Budget(rows["weights"], rows["slots"], 1, rows["cache"], 1, None, 1).check()
