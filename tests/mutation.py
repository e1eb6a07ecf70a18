"""Mutation tests: the code gets one small fault at a time, and the tests that run the faulty line have to fail.

    python -m tests.mutation --number 160                     # by hand, and nightly
    python -m tests.mutation --killers .mutation/results.jsonl --out after.jsonl   # what died before has to die again

Faults are made in a copy of the tree. The data folder (`--data`, by default `.mutation`) holds the coverage of each
test and its duration; they are measured if the folder is empty, with the tests of `make test`. A run that was
interrupted goes on where it stopped.
"""

import argparse
import ast
import contextlib
import functools
import hashlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

PACKAGES = ("adapters", "layers", "manager", "pallas", "sharding")
SELECTION = "not parity and not slow and not mesh and not browser"
PYTEST = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider"]
FEWEST = 8  # mutants of a package, however small
MOST_TESTS, MOST_FILES = 80, 10  # of a mutant; to import a file of tests takes as long as many tests

_PAIRS = [
    *((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn)),
    *((ast.And, ast.Or), (ast.Add, ast.Sub), (ast.Mult, ast.FloorDiv), (ast.BitOr, ast.BitAnd)),
]
OPPOSITE: dict[type[ast.AST], Any] = {
    **dict(_PAIRS),
    **{second: first for first, second in _PAIRS},
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
}
# Calls whose exchanged arguments change no result, or fail in any test.
KEPT_ORDER = {"max", "min", "isinstance", "issubclass", "getattr", "setattr", "hasattr"}
KEPT_ORDER |= {"cast", "replace", "partial", "map", "next"}
LOGGERS = {"log", "_log", "logger", "logging", "warnings"}
TEXTS = {"fix", "expected", "found", "message"}  # keyword arguments of errors


@dataclass(frozen=True)
class Mutant:
    """A fault: `old`, from byte `start` of `file`, becomes `new`.

    Its id depends on the function, the line's text and the change, and not on the line's number. `lines` are those
    whose tests have to notice it.
    """

    id: str
    file: str
    line: int
    lines: tuple[int, int]
    start: int
    old: str
    new: str

    @property
    def package(self) -> str:
        return self.file.split("/")[1]


def changes(node: ast.AST) -> Iterator[tuple[ast.AST, str, ast.AST]]:
    """Yield the faults of one node: the node to be replaced, its new text, and the node whose tests count."""
    match node:
        case ast.Compare(ops=[operator], comparators=[right]) if type(operator) in OPPOSITE:
            yield node, ast.unparse(ast.Compare(node.left, [OPPOSITE[type(operator)]()], [right])), node
        case ast.BinOp(left, operator, right) if type(operator) in OPPOSITE and not (is_text(left) or is_text(right)):
            yield node, ast.unparse(ast.BinOp(left, OPPOSITE[type(operator)](), right)), node
        case ast.BoolOp(operator, values):
            yield node, ast.unparse(ast.BoolOp(OPPOSITE[type(operator)](), values)), node
        case ast.UnaryOp(ast.Not(), operand):
            yield node, ast.unparse(operand), node
        case ast.Constant(value) if type(value) is int:
            yield node, str(value + 1), node
        case ast.If(test, body, otherwise):
            yield test, "False", body[0]
            yield test, f"not ({ast.unparse(test)})", test
            if otherwise:
                yield test, "True", otherwise[0]
        case ast.IfExp(test):
            yield test, f"not ({ast.unparse(test)})", node
        case ast.comprehension(ifs=[test, *_]):
            yield test, "True", test
        case ast.Expr(ast.Call()) | ast.Break() | ast.Continue():
            yield node, "pass", node
        case ast.Call(function, [ast.expr() as first, ast.expr() as second, *rest], keywords):
            if last_name(function) not in KEPT_ORDER and not any(isinstance(a, ast.Starred) for a in node.args[:2]):
                yield node, ast.unparse(ast.Call(function, [second, first, *rest], keywords)), node
        case ast.Call(ast.Name("sorted" | "reversed" | "abs"), [only]):
            yield node, ast.unparse(only), node


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def last_name(function: ast.AST) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def is_left_out(node: ast.AST) -> bool:
    """Return True for what has no faults of interest: texts of errors, assertions, logs and representations."""
    match node:
        case ast.Raise() | ast.Assert() | ast.JoinedStr() | ast.Import() | ast.ImportFrom():
            return True
        case ast.FunctionDef(name="__repr__" | "__str__"):
            return True
        case ast.Call(function):
            root = function
            while isinstance(root, ast.Attribute | ast.Call):
                root = root.value if isinstance(root, ast.Attribute) else root.func
            return last_name(function).endswith("Error") or getattr(root, "id", "") in LOGGERS
        case ast.Expr(ast.Call() as call):
            return is_left_out(call)
        case ast.keyword(arg):
            return arg in TEXTS
        case ast.If(ast.Name("TYPE_CHECKING")):
            return True
    return False


def mutants_of(root: Path, file: str) -> list[Mutant]:
    """Return every mutant of a file, in the order of its lines."""
    source = (root / file).read_bytes()
    text_lines = source.splitlines(keepends=True)
    offsets = [0]
    for line in text_lines:
        offsets.append(offsets[-1] + len(line))
    made: list[Mutant] = []
    seen: Counter[str] = Counter()

    def visit(node: ast.AST, where: str, inside: bool) -> None:
        if is_left_out(node):
            return
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            where, inside = f"{where}.{node.name}", not isinstance(node, ast.ClassDef)
        for target, new, covered in changes(node):
            if isinstance(target, ast.Constant) and not inside:
                continue  # tables and limits
            at: Any = target
            start = offsets[at.lineno - 1] + at.col_offset
            old = source[start : offsets[at.end_lineno - 1] + at.end_col_offset].decode()
            if new != "pass":
                new = f"({new})"
            key = "\n".join([file, where, text_lines[at.lineno - 1].decode().strip(), old, new])
            seen[key] += 1
            name = hashlib.sha1(f"{key}\n{seen[key]}".encode()).hexdigest()[:12]
            body: Any = covered
            made.append(Mutant(name, file, at.lineno, (body.lineno, body.end_lineno), start, old, new))
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "decorator_list", "type_params"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    visit(child, where, inside)

    visit(ast.parse(source), "", inside=False)
    return made


# The data folder: which tests run a line, and how long they take.


def pytest_runtest_setup(item: pytest.Item) -> None:
    """As a plugin of pytest (`measure`): count the lines that run from here on as this test's."""
    _coverage.switch_context(item.nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _durations[report.nodeid] = _durations.get(report.nodeid, 0) + report.duration


def pytest_sessionfinish() -> None:
    """Write what this worker measured."""
    _coverage.stop()
    _coverage.save()
    _measured.with_suffix(".json").write_text(json.dumps(_durations))


if "MUTATION_DATA" in os.environ:  # before jlora is imported, in each worker
    import coverage

    _measured = Path(os.environ["MUTATION_DATA"], "coverage-" + os.environ.get("PYTEST_XDIST_WORKER", "main"))
    _durations: dict[str, float] = {}
    _coverage = coverage.Coverage(data_file=str(_measured), source=["jlora"])
    _coverage.set_option("run:disable_warnings", ["no-data-collected"])  # in the process that only starts workers
    _coverage.start()


def measure(tree: Path, data: Path) -> None:
    """Run the tests of `tree` once, and write their coverage and durations into `data`."""
    data.mkdir(parents=True, exist_ok=True)
    command = [*PYTEST, "-p", "tests.mutation", "-m", SELECTION, "-n", "logical", "--dist", "worksteal"]
    paths = os.pathsep.join([str(tree), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    subprocess.run(command, cwd=tree, env=dict(os.environ, PYTHONPATH=paths, MUTATION_DATA=str(data)), check=True)


def environment(tree: Path) -> dict[str, str]:
    return dict(os.environ, PYTHONPATH=str(tree))


class Coverage:
    """The tests that run each line, and their durations in seconds, from a data folder."""

    def __init__(self, data: Path) -> None:
        import coverage

        self._tests: dict[str, dict[int, set[str]]] = {}
        self._seconds: dict[str, float] = {}
        for path in data.glob("coverage-*"):
            if path.suffix == ".json":
                for test, seconds in json.loads(path.read_text()).items():
                    self._seconds[test] = max(seconds, self._seconds.get(test, 0))
                continue
            found = coverage.CoverageData(str(path))
            found.read()
            for name in found.measured_files():
                lines = self._tests.setdefault(name[name.rindex("/jlora/") + 1 :], {})
                for line, tests in found.contexts_by_lineno(name).items():
                    lines.setdefault(line, set()).update(tests)

    def tests(self, mutant: Mutant, most: float) -> list[str]:
        """Return tests of at most `most` seconds together, the quickest first.

        The quickest case of each function precedes all other cases, and tests of the mutant's package precede others. A
        line that runs only at import has the tests of its file. A line that does not run has none.
        """
        lines = self._tests.get(mutant.file, {})
        found = set[str]().union(*(lines.get(line, ()) for line in range(mutant.lines[0], mutant.lines[1] + 1)))
        if found == {""}:
            found = set[str]().union(*lines.values())
        seen: Counter[str] = Counter()
        order: list[tuple[bool, bool, float, str]] = []
        for seconds, test in sorted((round(self._seconds.get(test, 0), 1), test) for test in found if test):
            function = test.partition("[")[0]
            order.append((seen[function] > 0, f"/{mutant.package}/" not in test, seconds, test))
            seen[function] += 1
        kept: list[str] = []
        files: set[str] = set()
        for _, _, seconds, test in sorted(order):
            file = test.partition("::")[0]
            fits = seconds < most and len(kept) < MOST_TESTS and (file in files or len(files) < MOST_FILES)
            if fits or not kept:
                most -= seconds
                kept.append(test)
                files.add(file)
        return kept


def drawn(everything: list[Mutant], covered: Coverage, number: int, seed: int) -> tuple[list[Mutant], list[Mutant]]:
    """Return `number` mutants of lines that tests run, by packages in proportion, and those passed over."""

    def place(mutant: Mutant) -> str:
        return hashlib.sha1(f"{seed} {mutant.id}".encode()).hexdigest()

    sizes = Counter(mutant.package for mutant in everything)
    room = {name: max(FEWEST, round(number * size / len(everything))) for name, size in sizes.items()}
    room[max(room, key=lambda name: room[name])] += number - sum(room.values())
    chosen: list[Mutant] = []
    uncovered: list[Mutant] = []
    for mutant in sorted(everything, key=place):
        if room[mutant.package] > 0:
            room[mutant.package] -= (found := bool(covered.tests(mutant, 1)))
            (chosen if found else uncovered).append(mutant)
    return chosen, uncovered


def rewrite(path: Path, source: bytes) -> None:
    """Write a file of the code, and drop its bytecode, which Python may take for that of the new text."""
    path.write_bytes(source)
    for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
        compiled.unlink()


def run_tests(tree: Path, tests: list[str], limit: float, *, stop: bool = True) -> tuple[str, list[str], float]:
    """Return the outcome, the tests that failed, and the seconds."""
    command = [*PYTEST, "-rfE", "--tb=no", "--timeout=200", *(["-x"] if stop else []), "-m", SELECTION, *tests]
    limits = functools.partial(resource.setrlimit, resource.RLIMIT_CPU, (round(limit), round(limit) + 5))
    start = time.monotonic()
    with tempfile.TemporaryFile("w+") as stream:
        ran = subprocess.Popen(
            command, cwd=tree, env=environment(tree), stdout=stream, stderr=stream, preexec_fn=limits,
            start_new_session=True,
        )  # fmt: skip
        ran.wait()
        seconds = time.monotonic() - start
        with contextlib.suppress(ProcessLookupError):
            os.killpg(ran.pid, signal.SIGKILL)  # processes that the tests have left
        stream.seek(0)
        printed = stream.read()
    if ran.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        return "survived (limit)", [], seconds
    failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", printed, re.MULTILINE)
    if ran.returncode == 0:
        return "survived", [], seconds
    if failed or ran.returncode < 0 or "ImportError while loading conftest" in printed:
        return "killed", failed or ["a crash"], seconds
    return f"error {ran.returncode}: {printed[-300:]}", [], seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=160, help="mutants to draw")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=60, help="processor seconds of a mutant's tests")
    parser.add_argument("--data", type=Path, default=Path(".mutation"), help="folder of coverage and durations")
    parser.add_argument("--out", type=Path, help="results, a line of JSON each (default: results.jsonl of --data)")
    parser.add_argument("--killers", type=Path, help="earlier results: run what they killed, its killing test first")
    parser.add_argument("--tree", type=Path, default=Path(__file__).parents[1], help="checkout of the code and tests")
    options = parser.parse_args()
    data, out = options.data.resolve(), (options.out or options.data / "results.jsonl").resolve()
    if not list(data.glob("coverage-*")):
        measure(options.tree.resolve(), data)
    covered = Coverage(data)
    with tempfile.TemporaryDirectory(prefix="jlora-mutants-") as temporary:
        tree = Path(temporary, "tree")
        left_out = shutil.ignore_patterns(".git", ".venv*", ".mutation*", "__pycache__", "dist", "site")
        shutil.copytree(options.tree, tree, symlinks=True, ignore=left_out)
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(data / "compiled"))  # as tests/conftest.py has it
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
        run(tree, covered, out, options)


def run(tree: Path, covered: Coverage, out: Path, options: argparse.Namespace) -> None:
    """Run the mutants in `tree`, a copy, and write their results into `out`."""
    files = [str(path.relative_to(tree)) for name in PACKAGES for path in sorted((tree / "jlora" / name).rglob("*.py"))]
    everything = [mutant for file in files for mutant in mutants_of(tree, file)]
    killers: dict[str, str] = {}
    if options.killers:
        earlier = [json.loads(line) for line in options.killers.read_text().splitlines()]
        killers = {result["id"]: result["test"] for result in earlier if result["status"] == "killed"}
        chosen = [mutant for mutant in everything if mutant.id in killers]
        print(f"{len(killers) - len(chosen)} of {len(killers)} mutants no longer have their line")
    else:
        chosen, uncovered = drawn(everything, covered, options.number, options.seed)
        for mutant in uncovered:
            print(f"not covered: {mutant.file}:{mutant.line}: {mutant.old} -> {mutant.new}")
    command = [*PYTEST, "--collect-only", "-m", SELECTION]
    listed = subprocess.run(command, cwd=tree, env=environment(tree), capture_output=True, text=True)
    existing = {line for line in listed.stdout.splitlines() if "::" in line}
    if not existing:
        raise RuntimeError(f"pytest lists no tests: {listed.stdout[-2000:]}{listed.stderr[-2000:]}")
    results = {r["id"]: r for r in map(json.loads, out.read_text().splitlines())} if out.exists() else {}
    for number, mutant in enumerate(chosen):
        if mutant.id in results:
            continue
        found = [killers.get(mutant.id, ""), *covered.tests(mutant, options.limit)]
        tests = [test for test in dict.fromkeys(found) if test in existing]
        if tests:
            path = tree / mutant.file
            source = path.read_bytes()
            end = mutant.start + len(mutant.old.encode())
            rewrite(path, source[: mutant.start] + mutant.new.encode() + source[end:])
            status, failed, seconds = run_tests(tree, tests, options.limit)
            rewrite(path, source)
        else:
            status, failed, seconds = "not covered", [], 0
        result = {**asdict(mutant), "status": status, "test": (failed or [""])[0], "seconds": round(seconds, 1)}
        results[mutant.id] = result
        with out.open("a") as stream:
            stream.write(json.dumps(result) + "\n")
        print(f"{number + 1}/{len(chosen)} {mutant.file}:{mutant.line} {status} {result['test']}", flush=True)
    report([results[mutant.id] for mutant in chosen])
    # A killing test that fails without its mutant proves nothing.
    tests = sorted({results[m.id]["test"] for m in chosen if results[m.id]["status"] == "killed"} & existing)
    if tests:
        status, failed, _ = run_tests(tree, tests, 3600, stop=False)
        print(f"The killing tests without mutants: {status.replace('survived', 'passed')}", *failed, sep="\n")


def report(results: list[dict[str, Any]]) -> None:
    """Print a table by packages, and the survivors."""
    for package in (*PACKAGES, ""):
        counts = Counter(r["status"] for r in results if r["file"].startswith(f"jlora/{package}"))
        print(f"{package or 'all':10}", ", ".join(f"{count} {status}" for status, count in sorted(counts.items())))
    for result in results:
        if result["status"] != "killed":
            print(f"{result['status']}: {result['file']}:{result['line']}: {result['old']} -> {result['new']}")


if __name__ == "__main__":
    main()
