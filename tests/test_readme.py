"""The Python blocks of the README and of docs/loop.md run, in order and in one namespace, as a reader would paste them.
The list of `python -m benchmarks` is complete."""

import re
import subprocess
import sys
from pathlib import Path

import jax

ROOT = Path(__file__).parent.parent


def run_blocks(page):
    """Run the blocks of a page. Return their namespace, and the size of `forward`'s cache after each."""
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    namespace, compiled = {}, []
    for block in blocks:
        exec(compile(block, page, "exec"), namespace)
        compiled.append(namespace["forward"]._cache_size())
    return namespace, compiled


def test_python_blocks_of_readme_run(monkeypatch):
    monkeypatch.chdir(ROOT)
    namespace, compiled = run_blocks("README.md")
    # Once in the first block; `verify` in the second compiles for copies of the model; then for the model on a mesh.
    assert len(compiled) == 3
    assert compiled[0] == 1
    assert compiled[2] == compiled[1] + 1
    assert namespace["mesh"].size == 4
    assert isinstance(namespace["logits"], jax.Array)


def test_python_blocks_of_loop_run(monkeypatch):
    monkeypatch.chdir(ROOT)
    namespace, compiled = run_blocks("docs/loop.md")
    assert compiled == [0, 0, 1, 1]  # defined, `step` of the split model, loads and swaps, kernels
    assert namespace["step"]._cache_size() == 1


def test_benchmarks_are_listed():
    command = [sys.executable, "-m", "benchmarks"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    runnable = {path.stem for path in (ROOT / "benchmarks").glob("[!_]*.py") if "if __name__ ==" in path.read_text()}
    lines = dict(line.split(maxsplit=1) for line in listed.splitlines()[2:])
    assert lines.keys() == runnable
    assert lines["swap"].startswith("Measure the cost")
