"""`jlora demo`, and the models, adapters and prompts that it ships."""

import functools
import re

import numpy as np
import pytest

import jlora
from jlora.adapters import Adapter
from jlora.cli.commands import run
from jlora.cli.demo import DEMO, DENSE, MIXTURE, demo_requests, schedule
from jlora.cli.generate import Request, answer_all
from jlora.cli.loading import load_model, load_tokenizer

ORACLE = {
    None: lambda word: word,
    "reverse": lambda word: word[::-1],
    "sort": lambda word: "".join(sorted(word)),
    "shift": lambda word: "".join(chr((ord(c) - 96) % 26 + 97) for c in word),
    "swap": lambda word: "".join(word[i : i + 2][::-1] for i in range(0, len(word), 2)),
}


# Adapters of each demo -> True if one tensor of the file holds all experts of a parameter; None without experts.
DEMOS = {
    "dense": (DENSE, dict.fromkeys(("reverse", "shift", "sort", "swap"))),
    "moe": (MIXTURE, {"reverse": True, "shift": False}),
}
EACH = [
    pytest.param(name, adapter, marks=pytest.mark.slow)
    for name, (_, adapters) in DEMOS.items()
    for adapter in (None, *adapters)
]


@pytest.fixture(scope="module")
def demos():
    """Returns the manager, with two slots, and the tokenizer of a demo, made at the first call."""

    @functools.cache
    def make(name):
        shipped, adapters = DEMOS[name]
        folder = shipped.folder
        model, tokenizer = load_model(folder / "model", "float32"), load_tokenizer(folder / "model" / "tokenizer.json")
        manager = jlora.LoRAManager(model, jlora.LoRAConfig(max_loras=2, max_lora_rank=shipped.rank, max_cpu_loras=4))
        for adapter, stacked in adapters.items():
            path = str(folder / "adapters" / adapter)
            manager.add_adapter(jlora.LoRARequest(adapter, path, is_3d_lora_weight=stacked))
        return manager, tokenizer

    return make


def _score(demo, requests) -> float:
    manager, tokenizer = demo
    right = 0
    for batch in schedule(requests, 40, 2):
        padded = [*batch, *[Request(None, "a=")] * (40 - len(batch))]
        answers = answer_all(manager, tokenizer, padded, max_new_tokens=10)
        right += sum(answer == r.answer for r, (answer, _) in zip(batch, answers, strict=False))
    return right / len(requests)


@pytest.mark.parametrize("name", DEMOS)
def test_shipped_answers_of_prompts_are_right(name):
    shipped, adapters = DEMOS[name]
    requests = demo_requests(shipped)
    assert {path.name for path in (shipped.folder / "adapters").iterdir()} == {*adapters}
    assert {r.adapter for r in requests[:64]} == {None, *adapters}
    for r in requests:
        assert r.answer == ORACLE[r.adapter](r.prompt.removesuffix("="))


@pytest.mark.parametrize(("name", "adapter"), EACH)
def test_each_adapter_answers_held_out_prompts(demos, name, adapter):
    requests = [r for r in demo_requests(DEMOS[name][0]) if r.adapter == adapter]
    assert len(requests) == 40
    assert _score(demos(name), requests) >= 0.95


@pytest.mark.parametrize(("name", "adapter"), [case for case in EACH if case.values[1] is not None])
def test_base_alone_fails_at_the_adapters_tasks(demos, name, adapter):
    requests = [Request(None, r.prompt, r.answer) for r in demo_requests(DEMOS[name][0]) if r.adapter == adapter]
    assert _score(demos(name), requests) < 0.05


def test_demo_data_is_small():
    assert sum(file.stat().st_size for file in DEMO.rglob("*") if file.is_file()) < 6 * 2**20


def test_adapters_of_the_mixture_change_only_its_experts():
    layers, experts = range(3), range(8)
    found = {name: {*Adapter.from_pretrained(MIXTURE.folder / "adapters" / name).modules} for name in DEMOS["moe"][1]}
    parts = ("gate_proj", "up_proj", "down_proj")
    assert found["shift"] == {
        f"model.layers.{i}.mlp.experts.{e}.{part}" for i in layers for e in experts for part in parts
    }
    assert found["reverse"] == {
        f"model.layers.{i}.mlp.experts.{part}" for i in layers for part in ("gate_up_proj", "down_proj")
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "slots"),
    [
        pytest.param((), "4 adapters and the base over 2 slots", id="dense"),
        pytest.param(("--moe",), "2 adapters and the base over 1 slot:", id="moe"),
    ],
)
def test_demo_command(capsys, arguments, slots):
    assert run(["demo", *arguments]) == 0
    out = capsys.readouterr().out
    assert slots in out
    assert out.count(" right\n") >= 61
    assert ", 0 compilations after warm-up" in out
    loads, evictions = map(int, re.search(r"(\d+) adapter loads, (\d+) evictions", out).groups())
    assert loads > evictions > 0


def test_schedule_keeps_batches_within_slots_and_loses_no_request():
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
