"""Measure the device at hand in about ten minutes, and write one JSON file and one report with plots.

    python -m benchmarks.bench --out FOLDER [--minutes 10] [--only NAME ..]

Runs `kernels`, `decode_step`, `swap` and `prepare`, each in a process of its own, with few rows and few layers. A CPU
has fewer rows, a small model and no `swap`. On a TPU, `tpu_cycles` counts the cycles of the same kernels from the
compiler's schedule, and the report has measured and simulated times side by side. A run that fails, or that the minutes
do not cover, is named in the report, and the others count. FOLDER gets bench.json, report.md and bench.png. Extra
`bench`.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

CPU = {
    "prepare": [],
    "kernels": ["--wall", "--projection", "o", "--rank", "16", "--tokens", "1", "8", "64", "--layers", "2"],
    "decode_step": ["--model", "small", "--batches", "8", "32", "--rounds", "3"],
}
ACCELERATOR = {
    "prepare": [],
    "kernels": ["--wall", "--rank", "16", "--layers", "16"],
    "decode_step": ["--layers", "4", "--batches", "8", "64", "--rounds", "3"],
    "swap": ["--layers", "4", "--seconds", "5"],
}
TPU = {
    "prepare": [],
    "kernels": ACCELERATOR["kernels"],
    "tpu_cycles": ["--measured", "FOLDER/kernels.json"],
} | ACCELERATOR
# For each kind of rows, the columns of its table.
PROJECTION = ("projection", "rank", "tokens", "adapters", "wall_us", "spread_us", "error")
CYCLES = ("projection", "rank", "tokens", "adapters", "measured_us", "simulated_us", "floor_us")
STEP = ("step", "batch", "adapters", "base_ms", "ms", "overhead")
MACHINE = (
    "import json; from benchmarks.timing import machine; import jax;"
    "print(json.dumps({**machine(), 'platform': jax.default_backend(), 'devices': jax.device_count()}))"
)


def machine() -> dict[str, str]:
    """Return the device and the versions, from a process that frees the device at its end."""
    printed = subprocess.run([sys.executable, "-c", MACHINE], capture_output=True, text=True, check=True).stdout
    return json.loads(printed.splitlines()[-1])


def measure(runs: dict[str, list[str]], minutes: float) -> tuple[dict[str, dict], dict[str, str]]:
    """Run the benchmarks one after the other; return the figures by name, and the reasons of those without."""
    figures, failed, end = {}, {}, time.monotonic() + 60 * minutes
    with tempfile.TemporaryDirectory() as folder:
        for name, arguments in runs.items():
            out = Path(folder) / f"{name}.json"
            arguments = [argument.replace("FOLDER", folder) for argument in arguments]
            command = [sys.executable, "-m", f"benchmarks.{name}", *arguments, "--out", str(out)]
            print(f"{name}: {' '.join(command[1:-2])}", flush=True)
            try:
                subprocess.run(command, check=True, timeout=max(1.0, end - time.monotonic()))
            except subprocess.CalledProcessError as error:
                failed[name] = f"exit code {error.returncode}"
            except subprocess.TimeoutExpired:
                failed[name] = f"not finished within {minutes:g} minutes in all"
            if out.exists():  # each row is written as it is measured
                figures[name] = {"arguments": arguments, **json.loads(out.read_text())}
    return figures, failed


def table(rows: Iterable[dict], columns: Iterable[str]) -> list[str]:
    """Return the lines of a Markdown table, with numbers of four digits."""
    columns = tuple(columns)
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for row in rows:
        cells = (row.get(column, "") for column in columns)
        lines.append(f"| {' | '.join(format(c, '.4g') if isinstance(c, float) else str(c) for c in cells)} |")
    return lines


def leaves(figures: dict, prefix: str = "") -> Iterable[dict]:
    """Yield {"figure", "value"} for each number of a nested dictionary."""
    for name, value in figures.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{name}: ")
        elif isinstance(value, int | float):
            yield {"figure": f"{prefix}{name}", "value": value}


def report(about: dict, figures: dict[str, dict], failed: dict[str, str]) -> str:
    """Return the report in Markdown."""
    lines = ["# jlora on this device", "", *table([about], about), ""]
    for name, found in figures.items():
        lines += [f"## {name}", "", f"`python -m {' '.join([f'benchmarks.{name}', *found['arguments']])}`", ""]
        if name == "kernels":
            lines += table(found["rows"], PROJECTION)
        elif name == "tpu_cycles":
            lines += table(found["rows"], CYCLES)
        elif name == "decode_step":
            lines += [f"{found['about']['model']}, rank {found['about']['rank']}", "", *table(found["rows"], STEP)]
        else:
            lines += table(leaves(found), ("figure", "value"))
        lines += [""]
    if "kernels" in figures or "decode_step" in figures:
        lines += ["![Times of projections, and overheads of decode steps](bench.png)", ""]
    lines += [f"- {name} is incomplete: {reason}" for name, reason in failed.items()]
    return "\n".join(lines).rstrip() + "\n"


def plot(about: dict, figures: dict[str, dict], path: Path) -> None:
    """Draw the wall times of projections and the overheads of decode steps."""
    from benchmarks.plot import draw_overheads, draw_projections, panels  # the only part that needs matplotlib

    figure, left, right = panels(f"{about['device']}, bf16, JAX {about['jax']}, {about['date']}")
    if "kernels" in figures:
        draw_projections(left, figures["kernels"]["rows"], lambda row: row["wall_us"], "microseconds of a layer")
        left.set_yscale("log")
    if "decode_step" in figures:
        draw_overheads(right, figures["decode_step"]["rows"], figures["decode_step"]["about"]["model"])
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--only", nargs="+", choices=TPU)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    about = machine()
    runs = {"cpu": CPU, "tpu": TPU}.get(about["platform"], ACCELERATOR)
    figures, failed = measure({name: runs[name] for name in args.only or runs}, args.minutes)
    document = {"about": about, "failed": failed, "figures": figures}
    (args.out / "bench.json").write_text(json.dumps(document, indent=1) + "\n")
    (args.out / "report.md").write_text(report(about, figures, failed))
    if "kernels" in figures or "decode_step" in figures:
        plot(about, figures, args.out / "bench.png")
    print(f"Written to {args.out}: report.md, bench.json")
    if failed:
        sys.exit(f"incomplete: {failed}")


if __name__ == "__main__":
    main()
