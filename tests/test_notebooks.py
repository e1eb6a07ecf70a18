"""Every notebook runs, and equals the Python file that it is written from."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jupytext
import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.py"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_equals_its_python_file(path):
    want, found = (
        [(cell.cell_type, cell.source, cell.get("outputs", [])) for cell in jupytext.read(file).cells]
        for file in (path, path.with_suffix(".ipynb"))
    )
    assert found == want


def run(name: str, folder: Path) -> str:
    """Run a notebook's Python file in a process of its own, with `folder` for temporary files. Return its output."""
    script = [sys.executable, str(ROOT / "notebooks" / name)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}
    return subprocess.run(script, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout


def test_quick_start_runs(tmp_path):
    printed = run("quick_start.py", tmp_path)
    assert "the served logits are those of the merged model" in printed


@pytest.mark.slow
def test_train_notebook_runs(tmp_path):
    printed = run("train.py", tmp_path)
    assert "The base model copies: planet" in printed
    assert "each adapter answers as it was taught" in printed


@pytest.mark.slow
def test_tpu_notebook_runs_without_tpu(tmp_path):
    printed = run("tpu.py", tmp_path)
    assert "make test-device: not run" in printed
    assert "| figures: swap: median_us |" in printed
    (written,) = tmp_path.glob("*/bench.json")
    found = json.loads(written.read_text())
    assert found["about"]["platform"] == jax.default_backend()
    assert found["failed"] == {}
    assert found["figures"]["prepare"]["figures"]["swap"]["median_us"] > 0
