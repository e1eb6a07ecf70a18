"""`import jlora` costs nothing, and its names little more than `import flax.nnx`: checked by what is loaded, not by
the clock."""

import json
import subprocess
import sys

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
