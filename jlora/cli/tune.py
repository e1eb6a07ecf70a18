"""`jlora tune`: search the tiles of the GPU kernels for a model, and keep them for later starts."""

import argparse
import sys

from jlora import LoRAConfig, Survey, TuneProgress
from jlora.cli.budget import skeleton, stored_dtype
from jlora.cli.generate import device_errors
from jlora.errors import printable
from jlora.models import config_folder, quantized_config, read_config


def run_tune(args: argparse.Namespace) -> int:
    """Search for the shapes of a model, without its weights, and print the file of the table.

    Returns:
      0 if the table has all shapes, and 1 if time ran out.
    """
    folder, _ = config_folder(args.model, args.revision)
    config = quantized_config(read_config(folder / "config.json"), args.quantization)
    lora = LoRAConfig(
        max_loras=args.max_loras,
        max_lora_rank=args.max_lora_rank,
        target_modules=args.target_modules,
        dtype=None if args.lora_dtype == "auto" else args.lora_dtype,
    )
    survey = Survey(skeleton(config, stored_dtype(folder) if args.dtype == "auto" else args.dtype, None), lora)
    experts = None if config.moe is None else config.moe.experts_per_token
    steps: list[TuneProgress] = []

    def show(step: TuneProgress) -> None:
        steps.append(step)
        print(line(step), file=sys.stderr, flush=True)

    options = {} if args.tokens is None else {"tokens": args.tokens}
    print(f"tuning {printable(args.model)} ... a line for each shape", file=sys.stderr, flush=True)
    with device_errors():
        table = survey.tune(**options, experts_per_token=experts, seconds=args.seconds, again=args.again, progress=show)
    print(f"tuned {printable(args.model)}: {printable(str(table))}")
    if steps and steps[-1].done < steps[-1].total:
        print(f"  --seconds {args.seconds:g} were not enough for all; the same command goes on", file=sys.stderr)
        return 1
    return 0


def line(step: TuneProgress) -> str:
    """Return a line of text about one shape."""
    how = " with the product" if step.together else ""
    shape = f"{step.rows} rows, {step.k} -> {step.n}, rank {step.rank}"
    return f"  {step.done} of {step.total}: {step.op} {shape}: {step.us:.1f} us{how}, {step.before_us:.1f} before"
