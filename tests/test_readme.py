"""The Python blocks of the README and of docs/loop.md run, in order and in one namespace."""

import contextlib
import queue
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

import jlora
from tests.compiled import compiled_programs

ROOT = Path(__file__).parent.parent


def run_blocks(page):
    """Run the blocks of a page. Return their namespace after each, and the programs of `step` after each."""
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    namespace, after, compiled = {}, [], []
    with contextlib.chdir(ROOT), jax.numpy_dtype_promotion("strict"):
        for block in blocks:
            exec(compile(block, page, "exec"), namespace)
            after.append(dict(namespace))
            compiled.append(compiled_programs(namespace["step"]))
    return after, compiled


@pytest.fixture(scope="module")
def readme():
    return run_blocks("README.md")


def test_python_blocks_of_readme_run(readme):
    after, compiled = readme
    # Once in the first block; `verify` in the second compiles for copies of the model; once for the model on a mesh.
    first, verified, on_mesh = compiled
    assert first == on_mesh == 1 < verified
    assert after[-1]["mesh"].size == 4
    assert isinstance(after[-1]["logits"], jax.Array)


def test_loop_of_readme_in_two_threads(readme):
    """One thread steps and one prepares. Weights change between the steps, and at last the structure."""
    ready: queue.Queue = queue.Queue(maxsize=2)
    (_, readme, _), (_, compiled, _) = readme  # of the second block, before the model on a mesh
    manager, model, step, tokens = (readme[name] for name in ("manager", "model", "step", "tokens"))
    first = {"sort": "a", "reverse": "c", None: "p"}
    shift = jlora.LoRARequest("shift", path=str(ROOT / "jlora/demo/adapters/shift"))
    rounds = [["sort", "reverse", None], ["reverse", None, "sort"]] * 10

    def prepare():
        for names in rounds:
            batch = manager.prepare(names)
            manager.remove_adapter("shift")
            manager.prepare([shift]).close()  # a write into slots that steps read
            ready.put((names, batch))

    with ThreadPoolExecutor(1) as pool:
        preparing = pool.submit(prepare)
        head, base = model.lm_head.kernel.get_value(), None
        for turn in range(len(rounds)):
            names, batch = ready.get(timeout=60)
            with batch:
                model.lm_head.kernel.set_value((1 + turn % 3) * head)
                logits = np.asarray(step(model, tokens, batch))
            assert [chr(93 + int(token)) for token in logits[:, -1].argmax(-1)] == [first[name] for name in names]
            found = logits[names.index(None)] / (1 + turn % 3)
            base = found if base is None else base
            np.testing.assert_allclose(found, base, rtol=1e-4, atol=1e-4)
        preparing.result(60)
    assert compiled_programs(step) == compiled
    model.norm_of_user = nnx.LayerNorm(4, rngs=nnx.Rngs(0))
    with manager.prepare([None] * 3) as batch, pytest.raises(jlora.LoRAUsageError, match="added: norm_of_user"):
        step(model, tokens, batch)


def test_python_blocks_of_loop_run():
    after, compiled = run_blocks("docs/loop.md")
    namespace = after[-1]
    # Defined, warm-up, split model, loads and swaps (2), a loop of its own, an adapter that is saved, kernels.
    assert compiled == [0, 1, 1, 1, 1, 1, 1, 1]
    assert compiled_programs(namespace["split_step"]) == 1
    assert compiled_programs(namespace["decode"]) == 1
    texts = {(name, "".join(chr(93 + token) for token in tokens[5:-1])) for name, tokens in namespace["finished"]}
    assert texts == {("sort", "acp"), ("reverse", "cap"), (None, "pac"), ("swap", "apc"), ("shift", "qbd")}
    assert len(namespace["finished"]) == 6
