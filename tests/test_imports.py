"""Imports run one way through jlora. The checker reads syntax trees; a second test proves that it can fail."""

import ast
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

HELPERS = {"_disk", "_json", "_typing", "_memory", "_threads", "_interrupts", "_contents", "_hub", "_compat", "_qwix"}
COMMON = HELPERS | {"config", "errors"}
# Part of jlora -> the other parts it may import. A part is a file or folder directly under jlora/.
MAY_IMPORT = {
    **dict.fromkeys(HELPERS, COMMON),
    "errors": COMMON,
    "config": COMMON,
    "adapters": COMMON,
    "presets": COMMON | {"layers"},
    "pallas": COMMON,
    "ops": COMMON | {"pallas"},
    "sharding": COMMON,
    "layers": COMMON | {"adapters", "pallas", "sharding"},
    "slots": COMMON | {"adapters", "pallas", "sharding", "layers"},
    "fit": COMMON | {"adapters", "layers", "slots"},
    "verify": COMMON | {"adapters", "sharding", "layers", "slots"},
    "training": COMMON | {"adapters", "sharding", "layers", "slots"},
    "manager": COMMON | {"adapters", "sharding", "layers", "slots", "fit", "verify", "training"},
    "models": COMMON - {"config"} | {"pallas"},  # a model like any user's, without LoRA
    "_public": COMMON | {"adapters", "presets", "sharding", "layers", "fit", "verify", "training", "manager"},
    "__init__": {"_public", "integrations", "models", "ops"},  # all on first use
    "serve": {"__init__", "errors", "models", "ops", "_disk", "_hub", "_json", "_threads"},
    "integrations": {"__init__", "serve", "_typing", "adapters", "errors", "layers"},
    "tinker": {"__init__", "errors", "serve", "training", "_disk"},
    "cli": {"__init__", "errors", "models", "ops", "serve", "tinker", "_threads", "_memory"},
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
    "jlora.slots": ("jlora.config.LoRARequest", "jlora.layers.forward.lease"),  # layout and values, without life cycles
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


def test_imports_run_one_way():
    assert violations(ROOT) == []


def test_the_reference_is_independent_of_jlora():
    names = [name for name, _, _ in mentions((ROOT / "tests/oracle.py").read_text(), "tests.oracle", False)]
    assert names
    assert not [name for name in names if is_within(name, "jlora")]


def needs_parity(source: str) -> bool:
    """Return whether a test module imports PyTorch, transformers or PEFT at its top without the mark `parity`.

    `make test` collects such a module where these packages are not installed, and fails.
    """
    heads = [node for node in ast.parse(source).body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [node.module or "" if isinstance(node, ast.ImportFrom) else node.names[0].name for node in heads]
    imports = any(is_within(name, package) for name in names for package in ("torch", "transformers", "peft"))
    return imports and not re.search(r"^pytestmark = .*\bmark\.parity\b", source, re.MULTILINE)


def test_only_parity_tests_import_torch():
    modules = list((ROOT / "tests").rglob("test_*.py"))
    assert not [str(path) for path in modules if needs_parity(path.read_text("utf-8"))]
    assert needs_parity("import pytest\nfrom peft import LoraConfig")
    assert not needs_parity("import torch\n\npytestmark = pytest.mark.parity")


# File of jlora/ -> source that breaks a rule, and the message
WRONG = {
    "errors/x.py": ("import jlora.manager", "errors may not import manager"),
    "adapters/x.py": ("from ..sharding import rules", "adapters may not import sharding"),
    "adapters/y.py": ("def f():\n    from jax import Array", "y.py:2: jlora.adapters may not mention jax.Array"),
    "pallas/x.py": ("if TYPE_CHECKING:\n    import jlora.sharding.rules", "pallas may not import sharding"),
    "pallas/y.py": ("from jax.experimental.pallas import triton", "only jlora.pallas.triton.parts may mention"),
    "pallas/z.py": ("import jax.experimental.pallas as pl\npl.triton.CompilerParams", "z.py:2: only jlora.pallas"),
    "layers/forward/x.py": ("from jlora.layers.wrap import make_sites", "jlora.layers.forward may not mention"),
    "slots/x.py": ("import jlora.config as c\nc.LoRARequest", "x.py:2: jlora.slots may not mention"),
    "models/x.py": ("from jlora.layers.forward.scope import use", "models may not import layers"),
    "cli/x.py": ("from jlora.models import generation", "cli may only import names of jlora.models"),
    "serve/trip.py": ("if TYPE_CHECKING:\n    from jlora.serve.round import x", "a circle of imports: jlora.serve."),
    "serve/round.py": ("from jlora.serve.trip import y\nimport jlora.cli", "serve may not import cli"),
    "layers/x.py": ("async def f():\n    import torch", "jlora may not mention torch"),
    "layers/z.py": ("__import__('jlora.cli')", "jlora may not mention builtins.__import__"),
    "helpers.py": ("", "helpers has no row in MAY_IMPORT"),
}


def test_the_checker_can_fail(tmp_path):
    """In a copy of the package with these files, it finds exactly these."""
    shutil.copytree(ROOT / "jlora", tmp_path / "jlora", ignore=shutil.ignore_patterns("demo", "__pycache__"))
    (tmp_path / "jlora" / "errors").mkdir()
    for path, (source, _) in WRONG.items():
        (tmp_path / "jlora" / path).write_text(source)
    found = violations(tmp_path)
    missed = {path: message for path, (_, message) in WRONG.items() if not any(message in one for one in found)}
    assert missed == {}
    assert {one.partition(":")[0].removeprefix("jlora/") for one in found} <= WRONG.keys()
