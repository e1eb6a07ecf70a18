"""The Python blocks of the README and of docs/loop.md run, in order and in one namespace, as a reader would paste them.
The list of `python -m benchmarks` is complete."""

import contextlib
import re
import subprocess
import sys
from pathlib import Path

import jax

from tests.compiled import compiled_programs

ROOT = Path(__file__).parent.parent


def run_blocks(page):
    """Run the blocks of a page. Return their namespace, and the number of programs of `forward` after each."""
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    namespace, compiled = {}, []
    with contextlib.chdir(ROOT), jax.numpy_dtype_promotion("standard"):  # the default of JAX, which optax needs
        for block in blocks:
            exec(compile(block, page, "exec"), namespace)
            compiled.append(compiled_programs(namespace["forward"]))
    return namespace, compiled


def test_python_blocks_of_readme_run():
    namespace, compiled = run_blocks("README.md")
    # Once in the first block; `verify` in the second compiles for copies of the model; then for the model on a mesh.
    assert len(compiled) == 3
    assert compiled[0] == 1
    assert compiled[2] == compiled[1] + 1
    assert namespace["mesh"].size == 4
    assert isinstance(namespace["logits"], jax.Array)


def test_python_blocks_of_loop_run():
    namespace, compiled = run_blocks("docs/loop.md")
    assert compiled == [0, 0, 1, 1, 1]  # defined, `step` of the split model, loads and swaps, training, kernels
    assert compiled_programs(namespace["step"]) == 1
    assert compiled_programs(namespace["train"]) == 1


def test_benchmarks_are_listed():
    command = [sys.executable, "-m", "benchmarks"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    folder = ROOT / "benchmarks"
    files = [path for path in folder.rglob("[!_]*.py") if "if __name__ ==" in path.read_text()]
    runnable = {".".join(path.relative_to(folder).with_suffix("").parts) for path in files}
    assert "peers.sglang_dense" in runnable
    lines = dict(line.split(maxsplit=1) for line in listed.splitlines()[2:])
    assert lines.keys() == runnable
    assert lines["swap"].startswith("Measure the cost")
