"""The Python blocks of each page of the docs run, in order and in one namespace, as a reader would paste them."""

import ast
import pkgutil
import re
from pathlib import Path
from types import ModuleType

import jax
import pytest

import jlora
import jlora.adapters
import jlora.errors
import jlora.integrations.linen
import jlora.integrations.qwix
import jlora.integrations.tunix
import jlora.integrations.vllm_jax
import jlora.models
import jlora.ops
import jlora.serve

DOCS = Path(__file__).parent.parent / "docs"

# Models in several styles, each compiled and checked.
LONG = {"adapters.md", "mesh.md", "models.md", "serve.md", "training.md", "vision.md"}
# Without Python, or run by other tests: tests/test_readme.py, tests/serve/http/test_kubernetes.py (manifests).
OTHERS = {"faq.md", "glossary.md", "how_it_works.md", "install.md", "kubernetes.md", "loop.md", "performance.md"}
OTHERS |= {"tinker.md", "upstream.md", "vllm.md", "migrate.md", "stability.md"}
PAGES = [
    pytest.param(path.name, marks=[pytest.mark.slow] * (path.name in LONG))
    for path in sorted(DOCS.glob("*.md"))
    if path.name not in OTHERS
]


@pytest.mark.filterwarnings("ignore::DeprecationWarning:qwix")  # of names of Flax
@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("page", PAGES)
def test_python_blocks_run(page):
    blocks = re.findall(r"^```python\n(.*?)^```$", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)
    assert blocks
    namespace = {}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # the defaults of JAX
        for block in blocks:
            exec(compile(block, page, "exec"), namespace)


PAGES_OF_THE_REPOSITORY = [DOCS, DOCS.parent / "examples", DOCS.parent / "benchmarks"]
TEXTS = {path: path.read_text() for folder in PAGES_OF_THE_REPOSITORY for path in folder.rglob("*.md")}
TEXTS |= {path: path.read_text() for path in DOCS.parent.glob("*.md")}


def test_pages_install_from_a_checkout():
    """jlora is not on PyPI yet. install.md says so, and alone names an extra of an installed jlora."""
    found = [(p, line) for p in TEXTS for line in re.findall(r"pip install .*", TEXTS[p]) if p.name != "install.md"]
    assert [(path, line) for path, line in found if re.search(r"(?<!/)\bjlora\b", line.partition("`")[0])] == []


def test_every_column_of_a_table_has_a_heading():
    heads = [
        (path.name, line) for path in TEXTS for line in re.findall(r"^(\|.*)\n\|(?: *:?-+:? *\|)+$", TEXTS[path], re.M)
    ]
    assert len(heads) > 50
    assert [one for one in heads if "" in (cell.strip() for cell in one[1].strip("|").split("|"))] == []


@pytest.mark.parametrize("name", re.findall(r"`(jlora\.[\w.]+)`", (DOCS / "glossary.md").read_text()))
def test_glossary_names_exist(name):
    owner, _, last = name.rpartition(".")
    found = pkgutil.resolve_name(owner)
    assert hasattr(found, last) or last in getattr(found, "__dataclass_fields__", ())


def public_names() -> set[str]:
    """Return the full names that users import, of the modules that have public names."""
    errors = {name for name in vars(jlora.errors) if name.endswith("Error")}
    assert errors <= set(jlora.__all__)
    names = {f"jlora.{name}" for name in jlora.__all__}
    for module in (jlora.models, jlora.ops, jlora.serve):
        public = [
            name for name, value in vars(module).items() if not (name.startswith("_") or isinstance(value, ModuleType))
        ]
        assert public
        names |= {f"{module.__name__}.{name}" for name in public}
    for module in (jlora.integrations.qwix, jlora.integrations.tunix, jlora.integrations.vllm_jax):
        own = {name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__}
        names |= {f"{module.__name__}.{name}" for name in own if not name.startswith("_")}
    return names | {
        f"jlora.integrations.linen.{name}" for name in jlora.integrations.linen.__all__ if name not in jlora.__all__
    }


def test_reference_has_each_public_name_once():
    pages = [path.read_text() for path in sorted((DOCS / "reference").glob("*.md"))]
    found = [name for page in pages for name in re.findall(r"^::: (\S+)$", page, re.MULTILINE)]
    assert sorted(found) == sorted(public_names())


def test_stability_lists_each_public_name_once():
    text = (DOCS / "stability.md").read_text()
    rows = re.findall(r"^\| `(jlora[\w.]*)` \| (?:stable|provisional) \| (.*) \|$", text, re.MULTILINE)
    found = [f"{module}.{name}" for module, names in rows for name in re.findall(r"`(\w+)`", names)]
    adapters = {f"jlora.adapters.{name}" for name in jlora.adapters.__all__ if name not in jlora.__all__}
    assert sorted(found) == sorted(public_names() | adapters)


def test_contributing_names_each_make_target():
    root = DOCS.parent
    (phony,) = re.findall(r"^\.PHONY: (.*)$", (root / "Makefile").read_text(), re.MULTILINE)
    targets = set(phony.split()) - {"same-python"}
    assert len(targets) <= 12
    assert set(re.findall(r"`make ([\w-]+)`", (root / "CONTRIBUTING.md").read_text())) == targets


def walk_steps() -> list[tuple[str, str]]:
    """Return (file, qualified name) of each call in the tables of how_it_works.md."""
    rows = re.findall(r"^\| `(jlora/\S+\.py)` \| (.*?) \| .*\|$", (DOCS / "how_it_works.md").read_text(), re.MULTILINE)
    return [(path, name) for path, calls in rows for name in re.findall(r"`([\w.]+)\(", calls)]


@pytest.mark.parametrize(("path", "name"), walk_steps())
def test_walks_name_functions_of_their_files(path, name):
    body = ast.parse((DOCS.parent / path).read_text()).body
    for part in name.split("."):
        found = next(node for node in body if getattr(node, "name", None) == part)
        body = found.body
