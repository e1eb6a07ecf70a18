"""List the benchmarks, with the first line of the docstring of each."""

import ast
from pathlib import Path


def summaries() -> dict[str, str]:
    """Return module name -> first docstring line, for each module that runs as a script. Imports none of them."""
    found, folder = {}, Path(__file__).parent
    for path in sorted(folder.rglob("[!_]*.py")):
        module = ast.parse(path.read_text("utf-8"))
        if any(isinstance(node, ast.If) and "__main__" in ast.unparse(node.test) for node in module.body):
            name = ".".join(path.relative_to(folder).with_suffix("").parts)
            found[name] = (ast.get_docstring(module) or "").partition("\n")[0]
    return found


if __name__ == "__main__":
    print("usage: python -m benchmarks.NAME [--help]\n")
    for name, summary in summaries().items():
        print(f"{name:20} {summary}")
