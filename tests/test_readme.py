"""The README's Python blocks run, in order and in one namespace, as a reader would paste them."""

import contextlib
import re
from pathlib import Path

import jax

from tests.compiled import compiled_programs

ROOT = Path(__file__).parent.parent


def test_python_blocks_run():
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 6
    namespace, compiled = {}, []
    with contextlib.chdir(ROOT):
        for block in blocks:
            exec(compile(block, "README.md", "exec"), namespace)
            compiled.append(compiled_programs(namespace["forward"]))
    # Once in the first block; `verify` in the second looks at copies of the model; then for the model on a mesh alone.
    *one_device, on_mesh = compiled
    assert one_device[0] == 1
    assert len(set(one_device[1:])) == 1
    assert on_mesh == one_device[-1] + 1
    assert namespace["mesh"].size == 4
    assert compiled_programs(namespace["step"]) == 1
    assert isinstance(namespace["logits"], jax.Array)
