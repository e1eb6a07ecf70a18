"""`import jlora` costs little more than `import flax.nnx`: checked by what it loads, not by the clock."""

import json
import subprocess
import sys

SCRIPT = """
import json, sys
import flax.nnx
before = set(sys.modules)
import jlora
print(json.dumps(sorted(set(sys.modules) - before)))
"""

# Packages that `import jlora` may load beyond those of flax.nnx and the standard library; each takes milliseconds.
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
