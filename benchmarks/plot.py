"""Draw the figure of docs/performance.md from the measured results.

    python -m benchmarks.plot

Left is the share of the roofline floor that each measured projection reaches, by tokens. Right is the cost of adapters
for a whole decode step, by the number of different adapters in the batch.
"""

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
COLOURS = {"qkv": "tab:blue", "o": "tab:orange", "gate_up": "tab:green", "down": "tab:red"}


def main() -> None:
    kernels = json.loads((HERE / "results" / "kernels_h200.json").read_text())
    steps = json.loads((HERE / "results" / "decode_step_h200.json").read_text())
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6))

    for name, colour in COLOURS.items():
        for rank, marker in ((16, "o"), (64, "s")):
            rows = [r for r in kernels["rows"] if r["projection"] == name and r["rank"] == rank]
            x, y = [r["tokens"] for r in rows], [100 * r["of_floor"] for r in rows]
            left.scatter(x, y, s=18, marker=marker, color=colour, label=f"{name}, rank {rank}")
    left.set_xscale("log", base=2)
    left.set_ylim(0, 100)
    left.set_xlabel("tokens")
    left.set_ylabel("% of the roofline floor")
    left.set_title("one projection, 1 to 32 adapters")
    left.legend(fontsize=6, ncols=2)

    decode = [r for r in steps["rows"] if r["step"] == "decode" and r["adapters"] != "base only"]
    for size in sorted({r["batch"] for r in decode} - {1}):
        rows = sorted((r for r in decode if r["batch"] == size), key=lambda r: r["adapters"])
        right.plot([r["adapters"] for r in rows], [100 * r["overhead"] for r in rows], "o-", label=f"batch {size}")
    right.set_xlabel("different adapters in the batch")
    right.set_ylabel("% over the unwrapped model")
    right.set_ylim(bottom=0)
    right.set_title(f"decode step, Llama-3-8B shape, rank {steps['about']['rank']}")
    right.legend(fontsize=7)

    figure.suptitle(f"{kernels['device']}, bf16, JAX {kernels['jax']}, {kernels['date']}", fontsize=9)
    figure.tight_layout()
    figure.savefig(HERE / "results" / "h200.png", dpi=110)


if __name__ == "__main__":
    main()
