"""Measure the cost of adapters on all meshes of a host: every run of `mesh` and `processes` for four or eight devices.

    python -m benchmarks.mesh_of_a_host --devices 8 --out FOLDER [--only NAME ..] [--tiny]

The runs are the whole Llama-3-70B over "tensor"; the whole Qwen3-30B-A3B over "expert" and over both axes, with both
dispatches; the 8B shape over "data" and "tensor", with its logits against those of one device; and one process with all
devices against one process for each device. Each run is a process, one after the other, with a JSON file in the folder.
A failed run does not stop the others. It is named at the end, and its exit code is returned. `--tiny` runs small
shapes, also on virtual devices of the CPU.
"""

import argparse
import subprocess
import sys
from pathlib import Path

MODELS = {False: ("llama-3-70b", "qwen3-30b-a3b", "llama-3-8b"), True: ("tiny", "tiny-experts", "tiny")}


def runs(devices: int, *, tiny: bool) -> dict[str, list[str]]:
    """Return name -> module and arguments of each run."""
    large, experts, small = MODELS[tiny]
    half = devices // 2

    def mesh(model: str, *arguments: str) -> list[str]:
        few = ["--batch", "16", "--adapters", "4", "--rounds", "2"] if tiny else []
        return ["benchmarks.mesh", "--model", model, *few, "--mesh", *arguments]

    whole = "2" if tiny else "48"  # the default is the number that fits on one device
    alone = ["--no-single", "--no-fully", "--swap"]
    found = {"70b_tensor": mesh(large, f"tensor={devices}", *alone)}
    for dispatch in ("all_gather", "all_to_all"):
        how = [*alone, "--layers", whole, "--dispatch", dispatch]
        found[f"experts_expert_{dispatch}"] = mesh(experts, f"expert={devices}", *how)
        found[f"experts_expert_tensor_{dispatch}"] = mesh(experts, f"expert={half}", "tensor=2", *how)
    found["8b_data_tensor"] = mesh(small, "data=2", f"tensor={half}", "--check", "--swap")
    return found | {"8b_processes": ["benchmarks.processes", "--devices", str(devices), "--model", small]}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--devices", type=int, choices=[4, 8], required=True)
    parser.add_argument("--only", nargs="+", help="names of runs (each is printed as it starts)")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    wanted = runs(args.devices, tiny=args.tiny)
    if unknown := set(args.only or ()) - wanted.keys():
        parser.error(f"no such run: {', '.join(sorted(unknown))}; there are {', '.join(wanted)}")
    args.out.mkdir(parents=True, exist_ok=True)
    failed: dict[str, int] = {}
    for name in args.only or wanted:
        out = args.out / f"{name}_x{args.devices}.json"
        print(f"{name}: {' '.join(wanted[name])}", flush=True)
        if code := subprocess.run([sys.executable, "-m", *wanted[name], "--out", str(out)]).returncode:
            failed[name] = code
    if failed:
        sys.exit(f"failed: {failed}")


if __name__ == "__main__":
    main()
