"""The arguments of every command, and how an error ends one."""

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from jlora.cli.text import one_line
from jlora.errors import LoRAError


def run(argv: Sequence[str]) -> int:
    """Runs one command in this process. Returns its exit status; an error is one line on stderr.

    Raises:
      BrokenPipeError: the reader of stdout left.
      SystemExit: a wrong argument, status 2 and one line on stderr; or `--help`.
    """
    args = _parser().parse_args(argv)
    try:
        return args.run(args)
    except BrokenPipeError:
        raise
    except (LoRAError, OSError) as error:
        return _failed(one_line(error))
    except MemoryError as error:
        return _failed(f"not enough memory: {one_line(error)}")


def _failed(message: str) -> int:
    print(f"jlora: error: {message}", file=sys.stderr)
    return 1


class _Parser(argparse.ArgumentParser):
    """argparse's own `error` prints the usage before it, and the arguments as they are."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"jlora: error: {one_line(message)}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="jlora", description="Many LoRA adapters on one model, in one batch.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="a shipped tiny model and its adapters; needs no network")
    demo.add_argument("--moe", action="store_true", help="a mixture of experts with two adapters of its experts")
    demo.set_defaults(run=_demo)

    generate = commands.add_parser("generate", help="answer prompts, each with its own adapter, in one batch")
    generate.add_argument(
        "--model", required=True, type=_text, metavar="DIR", help="Hugging Face checkpoint with tokenizer.json"
    )
    generate.add_argument("--adapter", action="append", default=[], metavar="NAME=PATH", help="PEFT folder or repo id")
    generate.add_argument(
        "--prompt", action="append", required=True, metavar="NAME:TEXT", help="an empty NAME is the base model"
    )
    generate.add_argument(
        "--max-new-tokens",
        type=_whole(1, 2**31 - 1),
        metavar="N",
        help="at most what the model's context leaves; 64, or what it leaves, by default",
    )
    generate.add_argument(
        "--temperature", type=_temperature, default=0.0, metavar="T", help="0 (the default) is greedy"
    )
    generate.add_argument("--top-k", type=_whole(1, 2**31 - 1), metavar="K", help="with a temperature above 0")
    generate.add_argument("--top-p", type=_share, metavar="P", help="with a temperature above 0")
    generate.add_argument("--seed", type=_whole(0, 2**31 - 1), default=0)
    generate.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    generate.set_defaults(run=_generate)

    inspect = commands.add_parser("inspect", help="what is in an adapter, and whether it fits a model")
    inspect.add_argument("adapter", type=_text, metavar="ADAPTER", help="PEFT folder or repo id")
    inspect.add_argument("--model", type=_text, metavar="DIR", help="Hugging Face checkpoint that it should fit")
    inspect.add_argument(
        "--skip", type=_text, metavar="REGEX", action="append", default=[],
        help="modules that the model lacks on purpose, passed over as LoRAManager(skip=) does; may be repeated",
    )  # fmt: skip
    inspect.set_defaults(run=_inspect)
    return parser


# Each command is imported when it is chosen: `--help` and a wrong argument wait for nothing.


def _demo(args: argparse.Namespace) -> int:
    from jlora.cli.demo import DENSE, MIXTURE, run_demo

    return run_demo(MIXTURE if args.moe else DENSE)


def _generate(args: argparse.Namespace) -> int:
    from jlora.cli.generate import run_generate

    return run_generate(args)


def _inspect(args: argparse.Namespace) -> int:
    from jlora.cli.inspect import run_inspect

    return run_inspect(args.adapter, args.model, args.skip)


# --- kinds of arguments -----------------------------------------------------------------------------------------------


def _text(value: str) -> str:
    if not value or "\0" in value:
        raise argparse.ArgumentTypeError(f"expected a path, got {value!r}")
    return value


def _whole(least: int, most: int) -> Callable[[str], int]:
    def parse(value: str) -> int:
        try:
            number = int(value)
        except ValueError:
            number = None
        if number is None or not least <= number <= most:
            raise argparse.ArgumentTypeError(f"expected a whole number from {least} to {most}, got {value!r:.40}")
        return number

    return parse


def _real(value: str) -> float:
    try:
        return float(value)
    except ValueError:
        return math.nan


def _temperature(value: str) -> float:
    if not 0 <= _real(value) < math.inf:
        raise argparse.ArgumentTypeError(f"expected a finite number of at least 0, got {value!r:.40}")
    return float(value)


def _share(value: str) -> float:
    if not 0 < _real(value) <= 1:
        raise argparse.ArgumentTypeError(f"expected a number above 0 and at most 1, got {value!r:.40}")
    return float(value)
