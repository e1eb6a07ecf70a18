"""Every example runs."""

import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jlora.adapters import Adapter
from jlora.models import from_pretrained, generation

EXAMPLES = Path(__file__).parent.parent / "examples"
RIGHT = {"(base)": "planet", "sort": "aelnpt", "reverse": "tenalp", "swap": "lpnate", "shift": "qmbofu"}


@pytest.fixture
def run(monkeypatch):
    """`run(name, *arguments)` runs an example as a script."""

    def run_script(name: str, *arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        # The defaults of JAX, which optax needs.
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")

    return run_script


@pytest.mark.slow
def test_own_model(run, capsys):
    run("own_model.py")
    change = {line.split()[0]: float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()}
    assert change["legal"] > 0.01
    assert change["medical"] > 0.01
    assert change["base"] == pytest.approx(0, abs=1e-5)


@pytest.mark.slow
def test_speculative(run, capsys):
    run("speculative.py")
    printed = dict(re.findall(r"^(\S+) +\w+=(\w+)", text := capsys.readouterr().out, re.MULTILINE))
    assert printed == {"(base)": "planet", "sort": "abde", "reverse": "evilo", "swap": "itegr", "shift": "dsbc"}
    assert int(re.search(r"^\(base\).* (\d+) steps", text, re.MULTILINE)[1]) < 8


@pytest.mark.mesh
def test_serve_tp(run, capsys):
    answers, held = {}, {}
    for devices in (1, 8):
        before = generation.compiled_variants()
        run("serve_tp.py", "--devices", str(devices))
        assert generation.compiled_variants() == before + 1  # both batches, so all swaps
        printed = capsys.readouterr().out
        answers[devices] = re.findall(r"^(\S+) +planet=(\w+)$", printed, re.MULTILINE)
        found = re.findall(r"^cpu:\d: ([\d,]+) bytes of the base model, ([\d,]+) of slots$", printed, re.MULTILINE)
        held[devices] = [tuple(int(number.replace(",", "")) for number in line) for line in found]
        assert "4 adapters brought into 2 slots" in printed
    assert answers[8] == answers[1]
    assert {name for name, _ in answers[8]} == RIGHT.keys()
    assert all(RIGHT[name] == word for name, word in answers[8])
    (base, slots), parts = held[1][0], held[8]
    assert len(parts) == 8
    assert len({*parts}) == 1
    # Kernels and the tables are cut into four, with copies of two key heads; of slots one factor of each layer.
    assert base / 4 < parts[0][0] < base / 3.5
    assert slots / 4 < parts[0][1] < slots / 1.5


@pytest.mark.mesh
def test_serve_multihost():
    command = [sys.executable, str(EXAMPLES / "serve_multihost.py")]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
    answers = re.findall(r"^(\S+) +planet=(\w+)$", printed, re.MULTILINE)
    assert [name for name, _ in answers] == ["sort", "(base)", "reverse", "sort", "swap", "shift", "(base)", "swap"]
    assert all(RIGHT[name] == word for name, word in answers)
    errors = sorted(re.findall(r"^process (\d): AdapterNotFoundError: (.*) \(process 1\)$", printed, re.MULTILINE))
    assert [process for process, _ in errors] == ["0", "1"]
    assert errors[0][1] == errors[1][1]
    assert "2 processes, mesh: {'data': 2, 'tensor': 4}" in printed
    assert "4 adapters brought into 2 slots" in printed


@pytest.mark.slow
@pytest.mark.usefixtures("quickly_compiled")
def test_train_demo_writes_the_shipped_files(run, tmp_path):
    run("train_demo.py", "--moe", "--out", str(tmp_path), "--base-steps", "2", "--steps", "2")
    shipped = Path(__file__).parent.parent / "jlora" / "demo" / "moe"
    assert (tmp_path / "prompts.json").read_text() == (shipped / "prompts.json").read_text()
    assert (tmp_path / "model" / "tokenizer.json").read_text() == (shipped / "model" / "tokenizer.json").read_text()
    assert from_pretrained(tmp_path / "model").config == from_pretrained(shipped / "model").config
    for folder in (shipped / "adapters").iterdir():
        trained, kept = (Adapter.from_pretrained(path) for path in (tmp_path / "adapters" / folder.name, folder))
        shapes = [{n: (m.a.shape, m.b.shape, m.scaling) for n, m in each.modules.items()} for each in (trained, kept)]
        assert shapes[0] == shapes[1]
        assert any(m.b.any() for m in trained.modules.values())  # PEFT starts with B zero: two steps must have moved it


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.usefixtures("quickly_compiled")
def test_train_demo_continues_from_a_checkpoint(run, tmp_path):
    """A run that is cut short has the adapters of one that is not."""
    arguments = ("--base-steps", "2", "--steps", "3", "--checkpoints", str(tmp_path / "checkpoints"))
    run("train_demo.py", *arguments, "--out", str(tmp_path))
    weights = [folder / "adapter_model.safetensors" for folder in sorted((tmp_path / "adapters").iterdir())]
    want = [file.read_bytes() for file in weights]
    shutil.rmtree(tmp_path / "checkpoints" / "3")
    run("train_demo.py", *arguments, "--out", str(tmp_path))
    assert [file.read_bytes() for file in weights] == want


@pytest.mark.slow
@pytest.mark.nightly
def test_grpo_raises_both_rewards(run, capsys):
    run("grpo.py", "--rounds", "30")
    first, *_, last = re.findall(r"'vowels': ([\d.]+), 'late': ([\d.]+)", capsys.readouterr().out)
    assert max(map(float, first)) < 0.6
    assert min(map(float, last)) > 0.85


def test_all_examples_are_run_here():
    text = Path(__file__).read_text()
    assert all(f'"{file.name}"' in text for file in EXAMPLES.glob("*.py"))
