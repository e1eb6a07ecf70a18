"""Count what XLA does around the TPU kernels of a decode step, without a TPU.

    python -m benchmarks.tpu_step [--chips v6e tpu7x] [--out FILE]

Compiles decode steps of Llama-3-8B's shapes for one device: two layers with and without adapters, and one layer with
them. The rows of the table are read from the compiled programs:

- operations: Those that XLA starts, by the file of jlora/pallas that they come from. What makes the plan and the
  schedule of the kernels belongs to a step: it has as many operations with two layers as with one.
- ahead: Bytes of parameters that are copied to VMEM before the operation that reads them, in copies of a MiB or more.
  They are the weights of the base model, which otherwise wait for the kernels.
- outputs: Kernels whose result stays in VMEM.
- vmem: The most VMEM that an operation keeps for itself.

Nothing of this ran on a TPU. Needs the `libtpu` wheel (group `test`), and takes a few minutes a chip.
"""

import argparse
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import jax

from benchmarks import aot, tpu_cycles
from benchmarks.timing import write_rows

BYTES = {"bf16": 2, "f32": 4, "s32": 4, "u32": 4, "s8": 1, "u8": 1, "pred": 1}
NO_WORK = ("parameter", "constant", "bitcast", "get-tuple-element", "tuple")
LARGE = 1 << 20  # bytes


def text_of(chip: str, layers: int, *, adapters: bool) -> str:
    """Compile a decode step and return the text of the program."""
    case = aot.Case(chip, "llama-3-8b", "decoder", {"data": 1}, "decode")
    model = aot.model_of(case, aot.SHAPES[case.model][0](layers))
    return aot.compile_step(case, model, aot.wrapped_of(case, model) if adapters else None).as_text()


def sources(text: str) -> dict[str, str]:
    """Return the file of jlora/pallas of each stack frame that has one, by the frame's number in a program's text."""

    def table(name: str) -> dict[str, str]:
        lines = text.partition(f"\n{name}\n")[2].partition("\n\n")[0].splitlines()
        return dict(line.split(" ", 1) for line in lines)

    files, places, frames = table("FileNames"), table("FileLocations"), table("StackFrames")
    found = {}
    for frame in frames:
        at, seen = frame, set()
        while at in frames and at not in seen:
            seen.add(at)
            file = files[re.search(r"file_name_id=(\d+)", places[re.search(r"location_id=(\d+)", frames[at])[1]])[1]]
            if "jlora/pallas/" in file:
                found[frame] = file.strip('"').rpartition("jlora/pallas/")[2]
                break
            at = (re.search(r"parent_frame_id=(\d+)", frames[at]) or [at, at])[1]
    return found


def figures(text: str) -> dict[str, Any]:
    """Read the row of a program."""
    files, entry = sources(text), text[text.index("\nENTRY") :]
    operations: Counter[str] = Counter()
    ahead: list[int] = []
    outputs: list[bool] = []
    named = re.findall(r"\n  (?:ROOT )?%([\w.-]+) = (.*?) ([\w-]+)\((.*)", entry)
    same = {name: re.match(r"%([\w.-]+)", rest)[1] for name, _, op, rest in named if op == "bitcast"}
    parameters = {name for name, _, op, _ in named if op == "parameter"}

    def source(name: str) -> str:
        return source(same[name]) if name in same else name

    for name, result, op, rest in named:
        frame = re.search(r"stack_frame_id=(\d+)", rest)
        if op not in NO_WORK and frame is not None and frame[1] in files:
            operations[files[frame[1]]] += 1
        copied = re.search(r"(\w+)\[([\d,]*)\]\{[^}]*S\(1\)[^}]*\}", result)
        if op in ("copy-start", "slice-start") and copied is not None:
            size = BYTES[copied[1]] * math.prod(map(int, filter(None, copied[2].split(","))))
            if size >= LARGE and source(re.match(r"%([\w.-]+)", rest)[1]) in parameters:
                ahead.append(size)
        if "jlora" in name and op == "custom-call":
            outputs.append("S(1)" in result)
    vmem = re.findall(r'used_scoped_memory_configs":\[\{"memory_space":"1","offset":"0","size":"(\d+)"', entry)
    return {
        "operations": dict(operations),
        "ahead_bytes": sum(ahead),
        "ahead_copies": len(ahead),
        "kernels": len(outputs),
        "outputs_in_vmem": sum(outputs),
        "vmem_bytes": max(map(int, vmem), default=0),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--chips", nargs="+", choices=aot.TOPOLOGIES, default=["v6e", "tpu7x"])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    aot.as_on_tpu()
    rows = []
    for chip in args.chips:
        for layers, adapters in ((1, True), (2, True), (2, False)):
            found = figures(text_of(chip, layers, adapters=adapters))
            rows.append(row := {"chip": chip, "layers": layers, "adapters": adapters, **found})
            print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
            if args.out is not None:
                write_rows(args.out, tpu_cycles.about(), rows)


if __name__ == "__main__":
    main()
