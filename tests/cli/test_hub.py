"""Models from a local hub: the files that are downloaded, the cache, and the errors, each of one line."""

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest

from jlora import Adapter
from jlora.cli.demo import DEMO
from jlora.cli.loading import load_model
from jlora.models import read_weight
from tests.serve.fake_hub import COMMIT, FakeHub

SORT = str(DEMO / "adapters" / "sort")
# Runs several commands in one process, since the client reads its settings when it is imported.
COMMANDS = """
import json, sys
from jlora.cli.commands import run
for command in json.loads(sys.argv[1]):
    print(run(command), flush=True)
"""
POOLING = ("modules.json", "1_Pooling/config.json", "sentence_bert_config.json", "config_sentence_transformers.json")
READ = {"config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", *POOLING}
SHARDS = {"model.safetensors.index.json", "part-0.safetensors", "part-1.safetensors"}
INSPECT = ["inspect", SORT, "--model", "team/demo"]


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """Repositories with a model in one file, in two shards, gated, pickled, and of another architecture."""
    root = tmp_path_factory.mktemp("repos")
    repos = {name: root / name for name in ("demo", "sharded", "gated", "pickled", "other")}
    for folder in repos.values():
        shutil.copytree(DEMO / "model", folder)
        (folder / "consolidated.safetensors").write_bytes(b"a second copy of the weights")
        (folder / "pytorch_model.bin").write_bytes(b"a third copy")
        (folder / "README.md").write_text("words")
        (folder / "chat_template.jinja").write_text("{{ messages }}")
        (folder / "tokenizer_config.json").write_text("{}")
        (folder / "1_Pooling").mkdir()
        for file in POOLING:
            (folder / file).write_text("[]" if file == "modules.json" else "{}")
        (folder / "onnx").mkdir()
        (folder / "onnx" / "model.safetensors").write_bytes(b"another format")
    split(repos["sharded"])
    (repos["pickled"] / "model.safetensors").unlink()
    config = json.loads((repos["other"] / "config.json").read_text())
    (repos["other"] / "config.json").write_text(json.dumps(config | {"model_type": "mamba"}))
    made = FakeHub(repos)
    made.gated.add("gated")
    yield made
    made.close()


def split(folder):
    """Store the model's weights as two shards with an index."""
    from safetensors.numpy import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    where = {name: f"part-{int('layers.1' in name)}.safetensors" for name in tensors}
    for file in set(where.values()):
        save_file({name: tensor for name, tensor in tensors.items() if where[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    (folder / "model.safetensors").unlink()


def jlora(home, *commands, hub=None, **environment):
    """Run commands in one process. Returns their exit statuses, all of stdout, and the errors and lines on stderr."""
    settings = {"HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "HF_HUB_ETAG_TIMEOUT": "2"}
    settings |= {"HF_ENDPOINT": "http://127.0.0.1:9" if hub is None else hub.url} | environment
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    command = [sys.executable, "-c", COMMANDS, json.dumps(commands)]
    done = subprocess.run(command, env=inherited | settings, capture_output=True, text=True, timeout=300)
    assert "Traceback" not in done.stderr
    statuses = [int(line) for line in done.stdout.splitlines() if line.isdecimal()]
    assert len(statuses) == len(commands), done.stderr
    return statuses, done.stdout, done.stderr


def errors_of(err):
    return [line.removeprefix("jlora: error: ") for line in err.splitlines() if line.startswith("jlora: error: ")]


def files_of(home, name):
    folder = home / "hub" / f"models--team--{name}" / "snapshots" / COMMIT
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def home(hub, tmp_path_factory):
    """Hugging Face's folder after two models have been used: first without their weights, as the configuration has all
    shapes, and then with them."""
    found, sharded = tmp_path_factory.mktemp("home"), ("--model", "team/sharded", "--revision", "v1")
    statuses, out, _ = jlora(found, INSPECT, ["inspect", SORT, *sharded], hub=hub)
    assert (statuses, "fits         team/demo: yes" in out) == ([0, 0], True)
    assert files_of(found, "demo") == READ
    assert files_of(found, "sharded") == READ | {"model.safetensors.index.json"}
    made = adapter_with_base_weights(tmp_path_factory.mktemp("adapter"))
    assert jlora(found, ["inspect", made, "--model", "team/demo"], ["inspect", made, *sharded], hub=hub)[0] == [0, 0]
    return found


def adapter_with_base_weights(folder):
    """Write an adapter that has the model's embedding saved beside it, and return its folder as text."""
    sort, table = Adapter.from_pretrained(SORT), read_weight(DEMO / "model", "model.embed_tokens")
    replace(sort, base_weights={"model.embed_tokens": table}).save_pretrained(folder)
    return str(folder)


def test_only_files_that_are_read_are_downloaded(home):
    assert files_of(home, "demo") == READ | {"model.safetensors"}
    assert files_of(home, "sharded") == READ | SHARDS
    assert jlora(home, INSPECT)[0] == [0]  # the hub does not respond, and all is cached


@pytest.mark.slow
def test_cached_model_generates_offline(hub, home):
    before = len(hub.requested)
    command = ["generate", "--model", "team/sharded", "--revision", "v1", "--max-new-tokens", "9"]
    command += [f"--adapter=sort={SORT}", "--prompt=sort:hgfedc="]
    statuses, out, err = jlora(home, command, hub=hub, HF_HUB_OFFLINE="1")
    assert (statuses, len(hub.requested)) == ([0], before)
    assert "sort: hgfedc=cdefgh" in out
    # One line for each shard, since stderr is no terminal.
    lines = err.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("reading model"))
    assert lines[first + 1 : first + 3] == ["  shard 1 of 2", "  shard 2 of 2"]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_terminal_shows_a_bar():
    with contextlib.redirect_stderr(Terminal()) as shown:
        load_model(DEMO / "model", "float32")
    first, *bars = shown.getvalue().replace("\n", "\r").split("\r")
    assert first.startswith(f"reading model {DEMO / 'model'} (")
    shares = [int(bar[32:].strip().partition("%")[0]) for bar in bars if bar.startswith("[")]
    assert shares == sorted(shares)
    assert shares[-1] == 100
    assert bars[-2].startswith("[" + "#" * 30 + "] 100%")


@pytest.mark.slow
def test_errors_take_one_line(hub, tmp_path):
    names = {
        "team/unknown": "the Hugging Face hub has no such repository",
        "team/gated": f"the repository is gated: accept its terms at {hub.url}/team/gated",
        "team/other": "model_type must be one of",
        "./team/demo": "model ./team/demo does not exist",
    }
    commands = [["inspect", SORT, "--model", name] for name in names]
    names["team/pickled"] = "Pickle files (.bin, .pt) are never opened"
    names["team/demo"] = "the repository has no revision 'v9'"
    commands += [["generate", "--model", "team/pickled", "--prompt", ":x"]]
    statuses, _, err = jlora(tmp_path, *commands, ["serve", "team/demo", "--revision", "v9"], hub=hub)
    assert statuses == [1] * 6
    found = errors_of(err)
    for line, words in zip(found, names.values(), strict=True):
        assert words in line
    assert not files_of(tmp_path, "other") & {"model.safetensors"}  # refused before the download of its weights
    assert jlora(tmp_path, commands[1], hub=hub, HF_TOKEN="secret")[0] == [0]


@pytest.mark.slow
def test_errors_without_a_network(tmp_path):
    statuses, _, err = jlora(tmp_path, INSPECT)
    assert statuses == [1]
    (line,) = errors_of(err)
    assert "could not be fetched from the Hugging Face hub: Connect" in line
    statuses, _, err = jlora(tmp_path, INSPECT, HF_HUB_OFFLINE="1")
    assert statuses == [1]
    (line,) = errors_of(err)
    assert line.startswith("model team/demo: there is no local folder of this name, and it is not complete in Hugging")
    assert str(tmp_path / "hub") in line
