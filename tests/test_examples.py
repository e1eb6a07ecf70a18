"""Every example runs."""

import runpy
import sys
from pathlib import Path

import jax
import pytest

from jlora.adapters import Adapter
from jlora.models import from_pretrained

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(monkeypatch, name: str, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    # What a user's JAX is set to; optax needs it.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def test_own_model(monkeypatch, capsys):
    run(monkeypatch, "own_model.py")
    change = {line.split()[0]: float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()}
    assert change["legal"] > 0.01
    assert change["medical"] > 0.01
    assert change["base"] == pytest.approx(0, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [(), ("--moe",)], ids=["dense", "moe"])
def test_train_demo_writes_what_it_ships(monkeypatch, tmp_path, arguments):
    run(monkeypatch, "train_demo.py", *arguments, "--out", str(tmp_path), "--base-steps", "2", "--steps", "2")
    shipped = Path(__file__).parent.parent / "jlora" / "demo" / ("moe" if arguments else "")
    assert (tmp_path / "prompts.json").read_text() == (shipped / "prompts.json").read_text()
    assert (tmp_path / "model" / "tokenizer.json").read_text() == (shipped / "model" / "tokenizer.json").read_text()
    assert from_pretrained(tmp_path / "model").config == from_pretrained(shipped / "model").config
    for folder in (shipped / "adapters").iterdir():
        trained, kept = Adapter.from_pretrained(tmp_path / "adapters" / folder.name), Adapter.from_pretrained(folder)
        assert {name: (m.a.shape, m.b.shape, m.scaling) for name, m in trained.modules.items()} == {
            name: (m.a.shape, m.b.shape, m.scaling) for name, m in kept.modules.items()
        }
        assert any(m.b.any() for m in trained.modules.values())  # PEFT starts with B zero: two steps must have moved it


def test_all_examples_are_run_here():
    assert {file.name for file in EXAMPLES.glob("*.py")} == {"own_model.py", "train_demo.py"}
