"""Imports run one way through jlora. The checker reads syntax trees; a second test proves that it can fail."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

COMMON = {"_typing", "_memory", "_threads", "_contents", "_hub", "config", "errors", "_compat", "_qwix"}
# Part of jlora -> the other parts it may import. A part is a file or folder directly under jlora/.
MAY_IMPORT = {
    "_typing": COMMON,
    "_compat": COMMON,
    "_memory": COMMON,
    "_threads": COMMON,
    "_contents": COMMON,
    "_hub": COMMON,
    "_qwix": COMMON,
    "errors": COMMON,
    "config": COMMON,
    "adapters": COMMON,
    "presets": COMMON,
    "pallas": COMMON,
    "ops": COMMON | {"pallas"},
    "sharding": COMMON,
    "layers": COMMON | {"adapters", "pallas", "sharding"},
    "verify": COMMON | {"sharding", "layers"},
    "manager": COMMON | {"adapters", "sharding", "layers", "verify"},
    "models": COMMON - {"config"} | {"pallas"},  # a model like any user's, without LoRA
    "_public": COMMON | {"adapters", "presets", "sharding", "layers", "verify", "manager"},
    "__init__": {"_public", "models", "ops"},  # all on first use
    "serve": {"__init__", "errors", "models", "ops", "_hub", "_threads"},
    "integrations": {"__init__", "serve"},  # public names only, as a user's code
    "cli": {"__init__", "errors", "models", "ops", "serve", "_threads", "_memory"},
    "__main__": {"cli"},
}
# Parts that use the library as its users do: of these packages the names alone, no module inside.
OF_PUBLIC_NAMES = {"serve": ("jlora.models",), "cli": ("jlora.models",), "integrations": ("jlora.serve",)}
# The one import that must stay inside a function: generate() opens the scope of a batch it is handed.
MAY_IMPORT_LAZILY = {"models": ("jlora.layers.forward.scope",)}

# Modules (with all below them) -> modules that they must not mention.
MAY_NOT_MENTION = {
    "jlora": ("torch", "transformers", "peft", "importlib.import_module", "builtins.__import__"),
    "jlora.adapters": ("jax", "jaxlib", "flax"),
    "jlora.layers.forward": ("jlora.layers.wrap",),  # a traced step does not depend on the search for layers
}
# Names that only one module may mention.
ONLY_IN = {
    "jax.experimental.pallas.triton": "jlora.pallas.triton.parts",
    "jax._src.pallas.triton": "jlora.pallas.triton.parts",
}


def is_within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def mentions(source: str, module: str, is_package: bool) -> Iterator[tuple[str, int, bool]]:
    """Every dotted name that a module imports or reaches through an import: (name, line, inside a function?)."""
    package = module if is_package else module.rpartition(".")[0]
    aliases = {"__import__": "builtins.__import__"}
    nodes = []

    def visit(node: ast.AST, lazy: bool):
        for child in ast.iter_child_nodes(node):
            nodes.append((child, lazy))
            visit(child, lazy or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))

    visit(ast.parse(source), lazy=False)
    for node, lazy in nodes:
        if isinstance(node, ast.Import):
            for name in node.names:
                aliases[name.asname or name.name.partition(".")[0]] = (
                    name.name if name.asname else name.name.partition(".")[0]
                )
                yield name.name, node.lineno, lazy
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            origin = ".".join([*parents, *([node.module] if node.module else [])])
            for name in node.names:
                aliases[name.asname or name.name] = f"{origin}.{name.name}"
                yield f"{origin}.{name.name}", node.lineno, lazy
    for node, lazy in nodes:  # pl.triton.CompilerParams and the like, through the aliases found above
        chain, head = [], node
        while isinstance(head, ast.Attribute):
            chain.append(head.attr)
            head = head.value
        if isinstance(head, ast.Name) and head.id in aliases and (chain or head.id == "__import__"):
            yield ".".join([aliases[head.id], *reversed(chain)]), node.lineno, lazy


def module_of(relative: Path) -> str:
    return ".".join((relative.parent if relative.name == "__init__.py" else relative.with_suffix("")).parts)


def circle(imports: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in a circle; none where there is none."""
    done: set[str] = set()

    def follow(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module not in done:
            for other in sorted(imports[module]):
                if found := follow(other, [*path, module]):
                    return found
            done.add(module)
        return []

    return next((found for module in sorted(imports) if (found := follow(module, []))), [])


def violations(root: Path) -> list[str]:
    """All breaches of the tables above in `root`/jlora, as "path:line: message"."""
    files = sorted((root / "jlora").rglob("*.py"))
    parts = {path.relative_to(root / "jlora").parts[0].removesuffix(".py") for path in files}
    modules = {module_of(path.relative_to(root)): path.relative_to(root) for path in files}
    imports: dict[str, set[str]] = {}
    found = []
    for path in files:
        relative = path.relative_to(root)
        is_package = path.name == "__init__.py"
        module = module_of(relative)
        part = relative.parts[1].removesuffix(".py")
        if part not in MAY_IMPORT:
            found.append(f"{relative}:1: {part} has no row in MAY_IMPORT")
            continue
        for name, line, lazy in mentions(path.read_text(), module, is_package):
            if is_within(name, "jlora"):
                target = name.split(".")[1] if "." in name else "__init__"
                target = target if target in parts else "__init__"  # jlora.LoRAConfig: a name of the public module
                lazily = lazy and any(is_within(name, allowed) for allowed in MAY_IMPORT_LAZILY.get(part, ()))
                if target != part and target not in MAY_IMPORT[part] and not lazily:
                    found.append(f"{relative}:{line}: {part} may not import {target} ({name})")
                for package in OF_PUBLIC_NAMES.get(part, ()):
                    if name != package and any(
                        is_within(name, other) for other in modules if other != package and is_within(other, package)
                    ):
                        found.append(f"{relative}:{line}: {part} may only import names of {package} ({name})")
                origin = name if name in modules else name.rpartition(".")[0]
                if origin in modules and origin != module:
                    imports.setdefault(module, set()).add(origin)
            for place, banned in MAY_NOT_MENTION.items():
                if is_within(module, place) and any(is_within(name, prefix) for prefix in banned):
                    found.append(f"{relative}:{line}: {place} may not mention {name}")
            for prefix, home in ONLY_IN.items():
                if is_within(name, prefix) and not is_within(module, home):
                    found.append(f"{relative}:{line}: only {home} may mention {name}")
    if round_trip := circle({module: imports.get(module, set()) for module in modules}):
        found.append(f"{modules[round_trip[0]]}:1: a circle of imports: {' -> '.join(round_trip)}")
    return found


def write_tree(root: Path, files: dict[str, str]) -> Path:
    for name, source in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return root


CLEAN = {
    "jlora/__init__.py": "def __getattr__(name):\n    from jlora import _public\n    import jlora.models, jlora.ops\n",
    "jlora/_public.py": "from jlora.config import LoRAConfig\n",
    "jlora/ops.py": "from jlora.pallas.api import add_lora\n",
    "jlora/errors.py": "class LoRAError(Exception): ...\n",
    "jlora/config.py": "from jlora.errors import LoRAError\n",
    "jlora/adapters/__init__.py": "from jlora.adapters.adapter import Adapter\n",
    "jlora/adapters/adapter.py": "import numpy as np\nfrom ..errors import LoRAError\n",
    "jlora/pallas/__init__.py": "",
    "jlora/pallas/api.py": "from jlora.pallas import xla\nfrom jlora.pallas.triton import lora\n",
    "jlora/pallas/xla.py": "import jax.experimental.pallas as pl\n",
    "jlora/pallas/triton/__init__.py": "",
    "jlora/pallas/triton/parts.py": "from jax.experimental.pallas import triton as plgpu\np = plgpu.CompilerParams()\n",
    "jlora/sharding/__init__.py": "import jax\n",
    "jlora/layers/__init__.py": "",
    "jlora/layers/scope.py": "from jlora.pallas.api import add_lora\nfrom jlora.sharding import rules\n",
    "jlora/manager/__init__.py": "from jlora.layers import scope\nfrom jlora.adapters import Adapter\n",
    "jlora/layers/forward/linear.py": "from jlora.layers import scope\n",
    "jlora/manager/host_cache.py": "from collections import OrderedDict\n",
    "jlora/models/__init__.py": "def generate():\n    from jlora.layers.forward.scope import use\n",
    "jlora/models/generation.py": "",
    "jlora/serve/__init__.py": "from jlora.serve.engine import Engine\n",
    "jlora/serve/engine.py": "import jlora\nfrom jlora.models import generate\nfrom jlora.serve.steps import Steps\n",
    "jlora/serve/steps.py": "from jlora import LoRAManager\nfrom jlora.errors import LoRAError\n",
    "jlora/cli/__init__.py": "import jlora\nfrom jlora.serve import Engine\nfrom jlora import models\njlora.use\n",
}


def test_imports_run_one_way():
    assert violations(ROOT) == []


def test_the_reference_is_independent_of_jlora():
    names = [name for name, _, _ in mentions((ROOT / "tests/oracle.py").read_text(), "tests.oracle", False)]
    assert names
    assert not [name for name in names if is_within(name, "jlora")]


def test_a_clean_tree_passes(tmp_path):
    assert violations(write_tree(tmp_path, CLEAN)) == []


@pytest.mark.parametrize(
    ("path", "source", "message"),
    [
        ("jlora/errors.py", "import jlora.manager", "errors may not import manager"),
        ("jlora/errors.py", "import jlora", "errors may not import __init__"),
        ("jlora/config.py", "from jlora import LoRARequest", "config may not import __init__"),
        ("jlora/adapters/x.py", "from jlora.pallas import plan", "adapters may not import pallas"),
        ("jlora/adapters/x.py", "from ..sharding import rules", "adapters may not import sharding"),
        ("jlora/adapters/x.py", "from jlora import layers", "adapters may not import layers"),
        ("jlora/adapters/x.py", "import jax.numpy as jnp", "jlora.adapters may not mention jax.numpy"),
        (
            "jlora/adapters/x.py",
            "def f():\n    from jax import Array",
            "x.py:2: jlora.adapters may not mention jax.Array",
        ),
        ("jlora/pallas/x.py", "from jlora import sharding", "pallas may not import sharding"),
        ("jlora/pallas/x.py", "import jlora.ops", "pallas may not import ops"),
        ("jlora/ops.py", "from jlora.layers import scope", "ops may not import layers"),
        ("jlora/pallas/x.py", "if TYPE_CHECKING:\n    import jlora.sharding.rules", "pallas may not import sharding"),
        ("jlora/sharding/x.py", "from .. import pallas", "sharding may not import pallas"),
        ("jlora/sharding/x.py", "import jlora.errors\njlora.pallas.api", "sharding may not import pallas"),
        ("jlora/layers/x.py", "from ..manager.host_cache import HostCache", "layers may not import manager"),
        ("jlora/layers/x.py", "def f():\n    import jlora.manager", "layers may not import manager"),
        ("jlora/layers/forward/x.py", "from jlora.layers.wrap import plan", "jlora.layers.forward may not mention"),
        ("jlora/verify/x.py", "from jlora.manager.host_cache import HostCache", "verify may not import manager"),
        ("jlora/manager/x.py", "from jlora.pallas.api import make_plan", "manager may not import pallas"),
        ("jlora/manager/x.py", "from jlora.models import generate", "manager may not import models"),
        ("jlora/models/x.py", "from jlora.layers.forward.scope import use", "models may not import layers"),
        ("jlora/models/x.py", "def f():\n    from jlora.layers import linear", "models may not import layers"),
        ("jlora/models/x.py", "from jlora.config import LoRAConfig", "models may not import config"),
        ("jlora/cli/__init__.py", "from jlora.pallas import plan", "cli may not import pallas"),
        ("jlora/cli/x.py", "from jlora.config import LoRAConfig", "cli may not import config"),
        ("jlora/cli/x.py", "def f():\n    from jlora.adapters import Adapter", "cli may not import adapters"),
        ("jlora/cli/x.py", "from jlora.models import generation", "cli may only import names of jlora.models"),
        ("jlora/serve/x.py", "from jlora.models.generation import run", "serve may only import names of jlora.models"),
        (
            "jlora/serve/x.py",
            "if TYPE_CHECKING:\n    from jlora.manager.host_cache import HostCache",
            "serve may not import manager",
        ),
        ("jlora/serve/x.py", "import jlora.layers.forward.scope", "serve may not import layers"),
        ("jlora/serve/x.py", "from jlora.cli.text import size", "serve may not import cli"),
        (
            "jlora/serve/steps.py",
            "if TYPE_CHECKING:\n    from jlora.serve.engine import Engine",
            "a circle of imports: jlora.serve.engine -> jlora.serve.steps -> jlora.serve.engine",
        ),
        ("jlora/__init__.py", "from jlora import cli", "__init__ may not import cli"),
        ("jlora/__init__.py", "from jlora.manager import host_cache", "__init__ may not import manager"),
        ("jlora/_public.py", "import jlora.models", "_public may not import models"),
        ("jlora/layers/x.py", "async def f():\n    import torch", "jlora may not mention torch"),
        (
            "jlora/layers/x.py",
            "import importlib\nimportlib.import_module('jlora.cli')",
            "jlora may not mention importlib",
        ),
        ("jlora/layers/x.py", "__import__('jlora.cli')", "jlora may not mention builtins.__import__"),
        (
            "jlora/pallas/x.py",
            "from jax.experimental.pallas import triton",
            "only jlora.pallas.triton.parts may mention",
        ),
        ("jlora/pallas/x.py", "import jax.experimental.pallas as pl\npl.triton.CompilerParams", "x.py:2: only jlora"),
        (
            "jlora/layers/x.py",
            "import jax.experimental.pallas.triton as t",
            "only jlora.pallas.triton.parts may mention",
        ),
        ("jlora/helpers.py", "", "helpers has no row in MAY_IMPORT"),
    ],
)
def test_the_checker_can_fail(tmp_path, path, source, message):
    found = violations(write_tree(tmp_path, CLEAN | {path: source}))
    assert found
    assert all(violation.startswith(f"{path}:") or "circle" in violation for violation in found)
    assert message in found[0]
