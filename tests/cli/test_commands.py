"""`jlora generate`, and the arguments of every command. Errors take one line, and come before the model is read."""

import json
import shutil

import pytest

import jlora
from jlora.cli import generate
from jlora.cli.commands import run
from jlora.cli.demo import DEMO

MODEL = str(DEMO / "model")


def error_of(capsys, command) -> tuple[int, str]:
    """Return the exit status and the error on stderr, with its lines joined, without lines of progress."""
    try:
        status = run(command)
    except SystemExit as end:
        status = end.code
    out, err = capsys.readouterr()
    lines = err.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("jlora: error: "))
    assert out == ""
    assert all(" ... " in line for line in lines[:start])
    assert all(line.startswith("  ") for line in lines[start + 1 :])
    assert all(line.isprintable() for line in lines)
    assert "Traceback" not in err
    return status, " ".join(line.strip() for line in lines[start:])


@pytest.mark.parametrize("options", [(), pytest.param(("--quantization", "int8"), marks=pytest.mark.slow)])
def test_generate_answers_each_prompt_with_its_adapter(capsys, options):
    adapters = [f"--adapter={name}={DEMO / 'adapters' / name}" for name in ("sort", "reverse")]
    prompts = ["--prompt=sort:hgfedc=", "--prompt=reverse:abcd=", "--prompt=:abcd="]
    command = ["generate", "--model", MODEL, *adapters, *prompts, "--max-new-tokens", "9", *options]
    assert run(command) == 0
    assert capsys.readouterr().out.splitlines() == ["sort: hgfedc=cdefgh", "reverse: abcd=dcba", "(base): abcd=abcd"]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["inspect", "no/such/folder/here"], "no/such/folder/here"),
        (["generate", "--model", "nowhere", "--prompt", ":a"], "nowhere"),
        (["generate", "--model", "nowhere", "--prompt", "x:a"], "--adapter x=PATH"),
        (["generate", "--model", "nowhere", "--adapter", "x", "--prompt", ":a"], "NAME=PATH"),
        (["generate", "--model", "m", "--adapter", "x=a", "--adapter", "x=b", "--prompt", ":a"], "twice"),
        # Python's decoding of arguments that are not UTF-8, and a surrogate that no shell can pass
        (["generate", "--model", MODEL, "--prompt", ":a\udcff"], r"'a\udcff' is not UTF-8 text: character 2"),
        (["generate", "--model", "\udcff", "--prompt", ":a"], r"model \udcff does not exist"),
        (["generate", "--model", "x\ny\x1b[31m", "--prompt", ":a"], "x y"),
        (["generate", "--model", MODEL, "--prompt", ":a", "--top-k", "3"], "--temperature above 0"),
        (["generate", "--model", MODEL, "--prompt", ":"], "NAME:TEXT"),
        (["generate", "--model", MODEL, "--prompt", "planet="], "got 'planet='; for the base model, give ':planet='"),
    ],
)
def test_errors_take_one_line(capsys, command, words):
    status, line = error_of(capsys, command)
    assert status == 1
    assert words in line


@pytest.mark.parametrize(
    ("option", "value"),
    [("--temperature", "nan"), ("--top-p", "0"), ("--dtype", "int8\n"), ("--model", ""), ("--nonsense\x1b[2J", "1")],
)
def test_wrong_arguments_end_with_status_2(capsys, option, value):
    status, line = error_of(capsys, ["generate", "--model", MODEL, "--prompt", ":a", f"{option}={value}"])
    assert status == 2
    assert option.replace("\x1b", r"\x1b") in line
    assert len(line) < 300
    for incomplete in ([], ["inspect"], ["nonsense"]):
        assert error_of(capsys, incomplete)[0] == 2
    with pytest.raises(SystemExit, match=r"^0$"):
        run(["--version"])
    assert capsys.readouterr().out == f"jlora {jlora.__version__}\n"


@pytest.mark.parametrize("tokens", [59, 10**9])
def test_tokens_beyond_the_context_are_refused_before_the_model_is_read(capsys, unread_model, tokens):
    assert "safetensors" in error_of(capsys, ["generate", "--prompt", ":a", "--model", unread_model])[1]
    command = ["generate", "--model", unread_model, "--prompt", ":abcd=", f"--max-new-tokens={tokens}"]
    status, line = error_of(capsys, command)
    assert status == 1
    assert f"max_new_tokens={tokens} and a prompt of 6 tokens" in line
    assert "max_position_embeddings=64" in line


def test_cache_larger_than_the_memory_is_refused(capsys, tmp_path):
    shutil.copytree(MODEL, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2**31 - 1}))
    command = ["generate", "--model", str(tmp_path / "model"), "--prompt", ":abcd=", "--max-new-tokens", str(2**30)]
    status, line = error_of(capsys, command)
    assert status == 1
    # 2 x 4 layers x 2 heads x 32 x 4 bytes for each of 2^30 + 8 positions
    assert "2048.0 GiB, and this machine has" in line


@pytest.mark.parametrize(
    ("file", "text", "problem"),
    [
        ("tokenizer.json", json.dumps({"model": 3}), " is not "),
        ("tokenizer.json", '{"model":' * 100_000, " is not "),
        ("config.json", '{"model_type":' * 900 + "1" + "}" * 900, ": model_type "),
        ("config.json", '{"model_type":' * 100_000 + "1" + "}" * 100_000, " is not JSON"),
        ("config.json", '{"model_type": "llama", "model_type": "llama"}', " field 'model_type' is given twice"),
    ],
)
def test_malformed_model_files_are_errors_of_one_line(capsys, tmp_path, file, text, problem):
    shutil.copytree(MODEL, tmp_path / "model")
    (tmp_path / "model" / file).write_text(text)
    status, line = error_of(capsys, ["generate", "--model", str(tmp_path / "model"), "--prompt", ":a"])
    assert status == 1
    assert f"model/{file}{problem}" in line


def test_panic_of_the_tokenizer_is_an_error(capsys, monkeypatch):
    class PanicException(BaseException):  # as Rust extensions raise it, not an Exception
        pass

    class Tokenizer:
        def encode(self, text):
            raise PanicException("index out of range")

    monkeypatch.setattr(generate, "load_tokenizer", lambda file: Tokenizer())
    assert "index out of range" in error_of(capsys, ["generate", "--model", MODEL, "--prompt", ":a"])[1]
