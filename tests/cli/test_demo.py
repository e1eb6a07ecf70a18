"""`jlora demo`, and the models, adapters and prompts that it ships."""

import re

import pytest

from jlora.cli.commands import run
from jlora.cli.demo import DEMO, DENSE, MIXTURE, demo_requests

ORACLE = {
    None: lambda word: word,
    "reverse": lambda word: word[::-1],
    "sort": lambda word: "".join(sorted(word)),
    "shift": lambda word: "".join(chr((ord(c) - 96) % 26 + 97) for c in word),
    "swap": lambda word: "".join(word[i : i + 2][::-1] for i in range(0, len(word), 2)),
}


DEMOS = {"dense": (DENSE, {"reverse", "shift", "sort", "swap"}), "moe": (MIXTURE, {"reverse", "shift"})}


@pytest.mark.parametrize("name", DEMOS)
def test_shipped_answers_of_prompts_are_right(name):
    shipped, adapters = DEMOS[name]
    requests = demo_requests(shipped)
    assert {path.name for path in (shipped.folder / "adapters").iterdir()} == {*adapters}
    assert {r.adapter for r in requests[:64]} == {None, *adapters}
    for r in requests:
        assert r.answer == ORACLE[r.adapter](r.prompt.removesuffix("="))


def test_demo_data_is_small():
    assert sum(file.stat().st_size for file in DEMO.rglob("*") if file.is_file()) < 6 * 2**20


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "slots"),
    [((), "4 adapters and the base over 2 slots"), (("--moe",), "2 adapters and the base over 1 slot:")],
)
def test_demo_command(capsys, arguments, slots):
    assert run(["demo", *arguments]) == 0
    out = capsys.readouterr().out
    assert slots in out
    assert out.count(" right\n") >= 61
    assert ", 0 compilations after warm-up" in out
    loads, evictions = map(int, re.search(r"(\d+) adapter loads, (\d+) evictions", out).groups())
    assert loads > evictions > 0
