"""The command line, run in this process on the shipped demo data."""

import json

import numpy as np
import pytest

import jlora
from jlora import cli

ADAPTERS = ("reverse", "shift", "sort", "swap")
ORACLE = {
    None: lambda word: word,
    "reverse": lambda word: word[::-1],
    "sort": lambda word: "".join(sorted(word)),
    "shift": lambda word: "".join(chr((ord(c) - 96) % 26 + 97) for c in word),
    "swap": lambda word: "".join(word[i : i + 2][::-1] for i in range(0, len(word), 2)),
}


@pytest.fixture(scope="module")
def demo():
    """The demo's model, wrapped with two slots, and its tokenizer."""
    model, tokenizer = cli._load_model(cli.DEMO / "model", "float32")
    manager = jlora.LoRAManager(model, jlora.LoRAConfig(max_loras=2, max_lora_rank=32, max_cpu_loras=4))
    for name in ADAPTERS:
        manager.add_adapter(jlora.LoRARequest(name, str(cli.DEMO / "adapters" / name)))
    return manager, tokenizer


def _score(demo, requests) -> float:
    manager, tokenizer = demo
    right = 0
    for batch in cli.schedule(requests, 40, 2):
        padded = [*batch, *[cli.Request(None, "a=")] * (40 - len(batch))]
        answers = cli._answer(manager, tokenizer, padded, max_new_tokens=10)
        right += sum(answer == r.answer for r, (answer, _) in zip(batch, answers, strict=False))
    return right / len(requests)


def test_shipped_prompts_ask_for_what_they_say():
    requests = cli.demo_requests()
    assert {r.adapter for r in requests[:64]} == {None, *ADAPTERS}
    for r in requests:
        assert r.answer == ORACLE[r.adapter](r.prompt.removesuffix("="))


@pytest.mark.parametrize("adapter", [None, *ADAPTERS])
def test_each_adapter_answers_held_out_prompts(demo, adapter):
    requests = [r for r in cli.demo_requests() if r.adapter == adapter]
    assert len(requests) == 40
    assert _score(demo, requests) >= 0.95


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_the_base_alone_cannot_do_it(demo, adapter):
    requests = [cli.Request(None, r.prompt, r.answer) for r in cli.demo_requests() if r.adapter == adapter]
    assert _score(demo, requests) < 0.05


def test_demo_data_is_small():
    assert sum(file.stat().st_size for file in cli.DEMO.rglob("*") if file.is_file()) < 6 * 2**20


def test_demo_command(capsys):
    assert cli.main(["demo"]) == 0
    out = capsys.readouterr().out
    assert out.count(" right\n") >= 61
    assert ", 0 compilations after warm-up" in out
    assert "evictions" in out


def test_schedule_keeps_batches_within_slots_and_loses_nobody():
    rng = np.random.default_rng(0)
    names = [None, "a", "b", "c", "d"]
    requests = [cli.Request(names[rng.integers(5)], f"p{i}") for i in range(57)]
    batches = list(cli.schedule(requests, 8, 2))
    assert sorted(r.prompt for batch in batches for r in batch) == sorted(r.prompt for r in requests)
    left = list(requests)
    for batch in batches:
        assert 1 <= len(batch) <= 8
        assert len({r.adapter for r in batch} - {None}) <= 2
        assert batch[0] == left[0]
        left = [r for r in left if r not in batch]


def test_generate_answers_each_prompt_with_its_adapter(capsys):
    adapters = [f"--adapter={name}={cli.DEMO / 'adapters' / name}" for name in ("sort", "reverse")]
    prompts = ["--prompt=sort:hgfedc=", "--prompt=reverse:abcd=", "--prompt=:abcd="]
    command = ["generate", "--model", str(cli.DEMO / "model"), *adapters, *prompts, "--max-new-tokens", "9"]
    assert cli.main(command) == 0
    assert capsys.readouterr().out.splitlines() == ["sort: hgfedc=cdefgh", "reverse: abcd=dcba", "(base): abcd=abcd"]


def test_inspect_says_what_is_in_an_adapter_and_that_it_fits(capsys):
    assert cli.main(["inspect", str(cli.DEMO / "adapters" / "swap"), "--model", str(cli.DEMO / "model")]) == 0
    out = capsys.readouterr().out
    assert "modules      16, rank up to 16" in out
    assert "4 x q_proj" in out
    assert "bfloat16" in out
    assert ": yes; " in out


def test_inspect_refuses_an_adapter_of_another_model(capsys, tmp_path):
    jlora.Adapter.from_arrays(
        "other", {"model.layers.9.mlp.up_proj": (np.ones((2, 3), np.float32), np.ones((3, 2), np.float32))}, alpha=4
    ).save_pretrained(tmp_path / "other")
    assert cli.main(["inspect", str(tmp_path / "other"), "--model", str(cli.DEMO / "model")]) == 1
    err = capsys.readouterr().err.splitlines()
    assert err[-1].startswith("jlora: error: adapter 'other'")
    assert "model.layers.9.mlp.up_proj" in err[-1]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["inspect", "no/such/folder/here"], "no/such/folder/here"),
        (["generate", "--model", "nowhere", "--prompt", ":a"], "nowhere"),
        (["generate", "--model", "nowhere", "--prompt", "x:a"], "--adapter x=PATH"),
        (["generate", "--model", "nowhere", "--prompt", "a"], "NAME:TEXT"),
        (["generate", "--model", "nowhere", "--adapter", "x", "--prompt", ":a"], "NAME=PATH"),
        (["generate", "--model", "m", "--adapter", "x=a", "--adapter", "x=b", "--prompt", ":a"], "twice"),
    ],
)
def test_errors_are_one_line(capsys, command, words):
    assert cli.main(command) == 1
    err = capsys.readouterr().err.strip().splitlines()
    assert len(err) == 1
    assert err[0].startswith("jlora: error: ")
    assert words in err[0]
    assert "Traceback" not in err[0]


def test_a_broken_tokenizer_is_an_error_of_one_line(capsys, tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": 3}))
    assert cli.main(["generate", "--model", str(tmp_path), "--prompt", ":a"]) == 1
    assert "is not a tokenizer" in capsys.readouterr().err
