"""`jlora demo`, and that what it ships does what it says."""

import numpy as np
import pytest

import jlora
from jlora.cli.commands import run
from jlora.cli.demo import DEMO, demo_requests, schedule
from jlora.cli.generate import Request, answer_all
from jlora.cli.loading import load_model, load_tokenizer

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
    model, tokenizer = load_model(DEMO / "model", "float32"), load_tokenizer(DEMO / "model" / "tokenizer.json")
    manager = jlora.LoRAManager(model, jlora.LoRAConfig(max_loras=2, max_lora_rank=32, max_cpu_loras=4))
    for name in ADAPTERS:
        manager.add_adapter(jlora.LoRARequest(name, str(DEMO / "adapters" / name)))
    return manager, tokenizer


def _score(demo, requests) -> float:
    manager, tokenizer = demo
    right = 0
    for batch in schedule(requests, 40, 2):
        padded = [*batch, *[Request(None, "a=")] * (40 - len(batch))]
        answers = answer_all(manager, tokenizer, padded, max_new_tokens=10)
        right += sum(answer == r.answer for r, (answer, _) in zip(batch, answers, strict=False))
    return right / len(requests)


def test_shipped_prompts_ask_for_what_they_say():
    requests = demo_requests()
    assert {r.adapter for r in requests[:64]} == {None, *ADAPTERS}
    for r in requests:
        assert r.answer == ORACLE[r.adapter](r.prompt.removesuffix("="))


@pytest.mark.parametrize("adapter", [None, *ADAPTERS])
def test_each_adapter_answers_held_out_prompts(demo, adapter):
    requests = [r for r in demo_requests() if r.adapter == adapter]
    assert len(requests) == 40
    assert _score(demo, requests) >= 0.95


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_the_base_alone_cannot_do_it(demo, adapter):
    requests = [Request(None, r.prompt, r.answer) for r in demo_requests() if r.adapter == adapter]
    assert _score(demo, requests) < 0.05


def test_demo_data_is_small():
    assert sum(file.stat().st_size for file in DEMO.rglob("*") if file.is_file()) < 6 * 2**20


def test_demo_command(capsys):
    assert run(["demo"]) == 0
    out = capsys.readouterr().out
    assert out.count(" right\n") >= 61
    assert ", 0 compilations after warm-up" in out
    assert "evictions" in out


def test_schedule_keeps_batches_within_slots_and_loses_nobody():
    rng = np.random.default_rng(0)
    names = [None, "a", "b", "c", "d"]
    requests = [Request(names[rng.integers(5)], f"p{i}") for i in range(57)]
    batches = list(schedule(requests, 8, 2))
    assert sorted(r.prompt for batch in batches for r in batch) == sorted(r.prompt for r in requests)
    left = list(requests)
    for batch in batches:
        assert 1 <= len(batch) <= 8
        assert len({r.adapter for r in batch} - {None}) <= 2
        assert batch[0] == left[0]
        left = [r for r in left if r not in batch]
