"""Draw the figure of docs/performance.md from the measured results.

    python -m benchmarks.plot

Left is the share of the roofline floor that each measured projection reaches, by tokens. Right is the cost of adapters
for a whole decode step, by the number of different adapters in the batch.
"""

import json
from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

HERE = Path(__file__).parent
COLORS = {"qkv": "tab:blue", "o": "tab:orange", "gate_up": "tab:green", "down": "tab:red"}


def panels(suptitle: str) -> tuple[Figure, Axes, Axes]:
    """Return a figure with two panels side by side."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6))
    figure.suptitle(suptitle, fontsize=9)
    return figure, left, right


def draw_projections(axes: Axes, rows: list[dict], value: Callable[[dict], float], label: str) -> None:
    """Draw a value of each row of `benchmarks.kernels`, by tokens."""
    for name, color in COLORS.items():
        for rank, marker in ((16, "o"), (64, "s")):
            if found := [r for r in rows if r["projection"] == name and r["rank"] == rank]:
                x, y = [r["tokens"] for r in found], [value(r) for r in found]
                axes.scatter(x, y, s=18, marker=marker, color=color, label=f"{name}, rank {rank}")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("tokens")
    axes.set_ylabel(label)
    axes.legend(fontsize=6, ncols=2)


def draw_overheads(axes: Axes, rows: list[dict], title: str) -> None:
    """Draw the overhead of decode steps of `benchmarks.decode_step`, by adapters."""
    decode = [r for r in rows if r["step"] == "decode" and r["adapters"] != "base only"]
    for size in sorted({r["batch"] for r in decode} - {1}):
        found = sorted((r for r in decode if r["batch"] == size), key=lambda r: r["adapters"])
        axes.plot([r["adapters"] for r in found], [100 * r["overhead"] for r in found], "o-", label=f"batch {size}")
    axes.set_xlabel("different adapters in the batch")
    axes.set_ylabel("% over the unwrapped model")
    axes.set_ylim(bottom=0)
    axes.set_title(title)
    axes.legend(fontsize=7)


def main() -> None:
    kernels = json.loads((HERE / "results" / "kernels_h200.json").read_text())
    steps = json.loads((HERE / "results" / "decode_step_h100.json").read_text())
    figure, left, right = panels(f"bf16, JAX {kernels['jax']}")
    draw_projections(left, kernels["rows"], lambda row: 100 * row["of_floor"], "% of the roofline floor")
    left.set_ylim(0, 100)
    left.set_title(f"one projection, 1 to 32 adapters, {kernels['device']}", fontsize=9)
    draw_overheads(right, steps["models"]["llama-3-8b"]["rows"], "decode step, Llama-3-8B shape, NVIDIA H100")
    right.title.set_fontsize(9)
    figure.tight_layout()
    figure.savefig(HERE / "results" / "figures.png", dpi=110)


if __name__ == "__main__":
    main()
