"""`import jlora` loads no other package, and its names load little more than `import flax.nnx`."""

import json
import subprocess
import sys

import pytest

SCRIPT = """
import json, os, sys
environment = dict(os.environ)
import jlora
assert not {"jax", "flax", "numpy", "jlora.manager", "jlora.models"} & set(sys.modules), "import jlora waits for them"
import flax.nnx
before = set(sys.modules)
for name in jlora.__all__:
    getattr(jlora, name)
print(json.dumps(sorted(set(sys.modules) - before | {"jlora"})))
assert jlora.models.from_pretrained is sys.modules["jlora.models"].from_pretrained
assert {*jlora.__all__, "models"} <= set(dir(jlora))
assert os.environ == environment, "a library leaves the environment alone"
"""

# Packages that the names of `jlora` may load beyond those of flax.nnx and the standard library; each takes little.
LIGHT = {"jlora", "jaxtyping", "wadler_lindig", "safetensors", "re2"}
# Parts of jlora that load when they are used.
ON_DEMAND = ("jlora.models", "jlora.cli")


def test_import_jlora_loads_little():
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    loaded = json.loads(run.stdout)
    assert "jlora" in loaded
    packages = {name.partition(".")[0] for name in loaded}
    assert packages - LIGHT - {"jax", "jaxlib", "flax"} - sys.stdlib_module_names == set()
    assert [name for name in loaded if name.startswith(ON_DEMAND)] == []


MANAGER = """
import sys

import pytest
import jlora
from flax import nnx

class Model(nnx.Module):
    def __init__(self):
        self.proj = nnx.Linear(4, 4, rngs=nnx.Rngs(0))

jlora.LoRAManager(Model(), jlora.LoRAConfig(max_loras=1, max_lora_rank=4, backend=sys.argv[1]))
print("jax.experimental.pallas.tpu" in sys.modules)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "there"), [("mosaic_tpu", True), ("auto", False)])
def test_a_manager_imports_its_kernels_and_no_others(backend, there):
    """On TPUs steps would be traced anew after the import, which the first trace made."""
    run = subprocess.run([sys.executable, "-c", MANAGER, backend], capture_output=True, text=True, check=False)
    assert run.stdout == f"{there}\n", run.stderr
