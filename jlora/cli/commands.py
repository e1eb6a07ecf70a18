"""Parse the arguments of every command, run it and report its errors."""

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

import jlora
from jlora.cli.text import error_lines, one_line
from jlora.errors import LoRAError

_QUANTIZATIONS = ("int8", "fp8")


def run(argv: Sequence[str]) -> int:
    """Run one command in this process, print an error on stderr, and return the exit status.

    Args:
      argv: Command and arguments, without the program's name.

    Raises:
      BrokenPipeError: The reader of stdout has closed it.
      SystemExit: An argument is wrong (status 2, one line on stderr), or `--help` or `--version` was given.
    """
    args, unknown = _parser().parse_known_args(argv)
    if unknown:  # argparse would refer to `jlora --help`, which does not list the command's flags
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        return args.run(args)
    except BrokenPipeError:
        raise
    except (LoRAError, OSError) as error:
        return _failed(error_lines(error))
    except MemoryError as error:
        return _failed(f"not enough memory: {one_line(error)}")


def _failed(message: str) -> int:
    print(f"jlora: error: {message}", file=sys.stderr)
    return 1


class _Parser(argparse.ArgumentParser):
    """A parser that prints errors as one escaped line. argparse prints the usage first and does not escape."""

    def error(self, message: str) -> NoReturn:
        """Exit with status 2 and one line on stderr."""
        self.exit(2, f"jlora: error: {one_line(message)}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="jlora", description="Many LoRA adapters on one model, in one batch.")
    parser.add_argument("--version", action="version", version=f"jlora {jlora.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="a shipped tiny model and its adapters; needs no network")
    demo.add_argument("--moe", action="store_true", help="a mixture of experts with two adapters of its experts")
    demo.set_defaults(run=_demo, parser=demo)

    generate = commands.add_parser("generate", help="answer prompts, each with its own adapter, in one batch")
    generate.add_argument(
        "--model", required=True, type=_text, metavar="MODEL", help="checkpoint folder with tokenizer.json, or repo id"
    )
    generate.add_argument("--revision", type=_text, metavar="REV", help="branch, tag or commit of the model's repo")
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
    generate.add_argument("--quantization", choices=_QUANTIZATIONS, help="of the weights, while they are read")
    generate.set_defaults(run=_generate, parser=generate)

    inspect = commands.add_parser("inspect", help="what is in an adapter, and whether it fits a model")
    inspect.add_argument("adapter", type=_text, metavar="ADAPTER", help="PEFT folder or repo id")
    inspect.add_argument("--model", type=_text, metavar="MODEL", help="checkpoint folder or repo id that it should fit")
    inspect.add_argument("--revision", type=_text, metavar="REV", help="branch, tag or commit of the model's repo")
    inspect.add_argument(
        "--skip", type=_text, metavar="REGEX", action="append", default=[],
        help="modules that the model lacks on purpose, passed over as LoRAManager(skip=) does; may be repeated",
    )  # fmt: skip
    inspect.set_defaults(run=_inspect, parser=inspect)

    _serve_arguments(commands.add_parser("serve", help="a model and its adapters over HTTP, as OpenAI's clients ask"))
    _tinker_arguments(commands.add_parser("tinker", help="train and sample adapters, as Tinker's clients ask"))
    return parser


def _serve_arguments(serve: argparse.ArgumentParser) -> None:
    """Add the flags of `jlora serve`. A flag of vLLM's server has the same name and meaning here (docs/serve.md)."""
    most = 2**31 - 1
    dtypes = ("auto", "float32", "bfloat16", "float16")
    serve.add_argument("model", type=_text, metavar="MODEL", help="checkpoint folder with tokenizer.json, or repo id")
    serve.add_argument("--revision", type=_text, metavar="REV", help="of the model's repo (default: its main branch)")
    serve.add_argument("--served-model-name", nargs="+", type=_text, metavar="NAME", help="(default: MODEL)")
    serve.add_argument("--host", type=_text, default="127.0.0.1", help="an address of this machine; 0.0.0.0 for all")
    serve.add_argument("--port", type=_whole(0, 65535), default=8000, help="0 for any that is free")

    model = serve.add_argument_group("model")
    model.add_argument("--dtype", choices=dtypes, default="auto", help="auto: the checkpoint's; on a CPU float32")
    model.add_argument(
        "--quantization",
        "-q",
        choices=_QUANTIZATIONS,
        help="of the weights, while read (default: the model's)",
    )
    model.add_argument("--max-model-len", type=_whole(1, most), metavar="N", help="positions (default: the model's)")
    model.add_argument(
        "--max-num-seqs", type=_whole(1, 65536), metavar="N", help="sequences at a time (default: 64, or what fits)"
    )
    model.add_argument(
        "--max-num-batched-tokens", type=_whole(16, most), default=512, metavar="N", help="of a prefill step"
    )
    model.add_argument(
        "--enable-prefix-caching", action="store_true", help="copy the beginnings of prompts from rows that hold them"
    )
    devices = _whole(1, 4096)
    model.add_argument(
        "--tensor-parallel-size", "-tp", type=devices, default=1, metavar="N", help="devices that heads are split over"
    )
    model.add_argument(
        "--expert-parallel-size", type=devices, default=1, metavar="N", help="devices that experts are split over"
    )
    model.add_argument(
        "--data-parallel-size", "-dp", type=devices, default=1, metavar="N",
        help="devices that sequences are split over; a server has as many devices as the three sizes multiplied",
    )  # fmt: skip
    model.add_argument(
        "--enable-expert-parallel", "-ep", action="store_true", help="split experts, not heads, over the tensor size"
    )
    model.add_argument("--gpu-memory-utilization", type=_share, default=0.9, metavar="SHARE", help="of its memory")
    model.add_argument("--chat-template", type=_text, metavar="FILE", help="(default: the model's own)")
    model.add_argument(
        "--compilation-cache-dir", type=_text, metavar="DIR", help="makes the next start quicker (default: none)"
    )

    lora = serve.add_argument_group("adapters")
    lora.add_argument("--enable-lora", action="store_true", default=None, help="given or not (default: on)")
    lora.add_argument("--lora-modules", nargs="+", default=[], type=_text, metavar="NAME=PATH")
    lora.add_argument("--max-loras", type=_whole(1, 65536), default=8, metavar="N", help="slots")
    lora.add_argument("--max-lora-rank", type=_whole(1, 4096), default=16, metavar="R", help="of any adapter")
    lora.add_argument(
        "--max-cpu-loras", type=_whole(1, most), metavar="N", help="kept on the host (default: --max-loras)"
    )
    lora.add_argument(
        "--expert-slots", nargs="+", default=[], type=_count, metavar="KIND=N",
        help="slots that hold experts: per_expert=4 shared=2 (default: all per_expert)",
    )  # fmt: skip
    lora.add_argument(
        "--lora-target-modules", nargs="+", type=_text, metavar="NAME", help="layers with slots, q_proj (default: all)"
    )
    lora.add_argument(
        "--exclude-modules", nargs="+", type=_text, metavar="NAME", help="layers without slots (default: none)"
    )
    lora.add_argument(
        "--skip-modules", nargs="+", default=[], type=_text, metavar="REGEX",
        help="modules of adapters that the model lacks on purpose, passed over",
    )  # fmt: skip
    lora.add_argument(
        "--name-map", type=_text, metavar="JSON",
        help='{"regex": "replacement"} from names in adapters to names in the model (default: none)',
    )  # fmt: skip
    lora.add_argument(
        "--lora-dtype",
        choices=(*dtypes, "int8"),
        default="auto",
        help="auto: the model's",
    )
    lora.add_argument("--activated-loras", action="store_true", help="serve activated LoRA (aLoRA) too")
    lora.add_argument(
        "--lora-variants", nargs="+", action="extend", default=[], type=_text, metavar="NAME",
        help="variants of LoRA to serve too: dora",
    )  # fmt: skip
    lora.add_argument(
        "--saved-heads", nargs="+", action="extend", default=[], type=_count, metavar="NAME=OUTPUTS",
        help="linear layers that adapters may bring fully trained (modules_to_save), with their most outputs: score=8",
    )  # fmt: skip
    lora.add_argument("--fully-sharded-loras", action="store_true", help="split A as well as B")
    lora.add_argument("--bitwise-base", action="store_true", help="without an adapter, the bits of the model alone")
    lora.add_argument(
        "--lora-root", type=_text, metavar="DIR", help="requests may load adapters from below it (default: none)"
    )
    lora.add_argument(
        "--lora-hub-repos", nargs="+", default=[], type=_text, metavar="REPO",
        help="owner/name or owner/*: requests may load these from the Hugging Face hub",
    )  # fmt: skip
    lora.add_argument(
        "--lora-resolver", nargs="+", default=[], type=_text, metavar="WHERE",
        help="a model name that is unknown is looked for there, in this order: folder (below --lora-root), hub (in "
        "--lora-hub-repos), or your own package.module:function of the name, which returns a LoRARequest or None",
    )  # fmt: skip

    lora.add_argument(
        "--lora-state", type=_text, metavar="DIR", help="keeps the adapters for the next start (default: none)"
    )

    service = serve.add_argument_group("service")
    service.add_argument("--api-key", nargs="+", metavar="KEY", help="(default: the environment's JLORA_API_KEY)")
    service.add_argument(
        "--admin-api-key", nargs="+", metavar="KEY", help="(default: the environment's JLORA_ADMIN_API_KEY)"
    )
    service.add_argument(
        "--logprobs-mode", choices=("raw_logprobs", "processed_logprobs"), default="raw_logprobs",
        help="of the model's distribution, or of the one that tokens are drawn from",
    )  # fmt: skip
    service.add_argument(
        "--max-waiting", type=_whole(1, 10**6), default=1024, metavar="N", help="requests in the queue"
    )
    service.add_argument(
        "--max-upload-bytes", type=_whole(1, 2**40), default=2**30, metavar="N",
        help="of an adapter in the body of a request, which needs --admin-api-key",
    )  # fmt: skip
    service.add_argument("--request-timeout", type=_seconds, metavar="SECONDS", help="(default: no limit)")
    service.add_argument("--drain-timeout", type=_seconds, default=30.0, metavar="SECONDS", help="after a signal")
    service.add_argument(
        "--uvicorn-log-level", choices=("critical", "error", "warning", "info", "debug"), default="warning"
    )
    _show_defaults(serve)
    serve.set_defaults(run=_serve, parser=serve)


def _show_defaults(parser: argparse.ArgumentParser) -> None:
    """Add the default of each flag to its help. The texts of the others describe their computed defaults."""
    for action in parser._actions:
        given = "(default" in (action.help or "")
        if action.option_strings and not given and action.default not in (None, argparse.SUPPRESS):
            default = "off" if action.default is False else "none" if action.default == [] else "%(default)s"
            action.help = f"{action.help or ''} (default: {default})".strip()


def _tinker_arguments(tinker: argparse.ArgumentParser) -> None:
    """Add the flags of `jlora tinker`. Those of `jlora serve` have the same meaning."""
    most = 2**31 - 1
    add = tinker.add_argument
    add("model", type=_text, metavar="MODEL", help="checkpoint folder with tokenizer.json, or repo id")
    add("--revision", type=_text, metavar="REV", help="of the model's repo (default: its main branch)")
    add("--served-model-name", type=_text, metavar="NAME", help="clients' base_model (default: MODEL)")
    add("--host", type=_text, default="127.0.0.1", help="any but this machine's own needs a key")
    add("--port", type=_whole(0, 65535), default=8000, help="0 for any that is free")
    add("--api-key", nargs="+", metavar="KEY", help="tml-... (default: the environment's TINKER_API_KEY)")
    add("--checkpoints", type=_text, required=True, metavar="DIR", help="keeps training runs and their checkpoints")
    add("--max-checkpoint-bytes", type=_whole(1, 2**60), default=100 * 2**30, metavar="N", help="of all of them")
    add("--train-shapes", nargs="+", type=_shape, metavar="ROWSxTOKENS",
        help="steps of training, 16x128 4x512: examples are padded to a length, and a step's tokens are the most that "
        "sampling waits for (default: doubling lengths of 2,048 tokens)")  # fmt: skip
    add("--train-capacity", type=_whole(1, 4096), default=8, metavar="N", help="models in device memory")
    add("--max-models", type=_whole(1, 10**6), default=64, metavar="N", help="models in all; others are on the host")
    add("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto",
        help="auto: the checkpoint's; on a CPU float32")  # fmt: skip
    add("--quantization", "-q", choices=_QUANTIZATIONS, help="of the weights, while read (default: the model's)")
    add("--max-model-len", type=_whole(2, most), metavar="N", help="positions (default: the model's)")
    add("--max-num-seqs", type=_whole(1, 65536), metavar="N",
        help="sequences sampled at a time (default: 64, or what fits)")  # fmt: skip
    add("--max-num-batched-tokens", type=_whole(16, most), default=512, metavar="N", help="of a prefill step")
    add(
        "--gpu-memory-utilization",
        type=_share,
        default=0.5,
        metavar="SHARE",
        help="of sampling",
    )
    add("--max-loras", type=_whole(1, 65536), default=8, metavar="N", help="adapters sampled from at a time")
    add("--max-lora-rank", type=_whole(1, 4096), default=32, metavar="R", help="of any adapter")
    add("--max-cpu-loras", type=_whole(1, most), metavar="N", help="sampled from, on the host (default: --max-loras)")
    add("--compilation-cache-dir", type=_text, metavar="DIR", help="makes the next start quicker (default: none)")
    add("--max-waiting", type=_whole(1, 10**6), default=1024, metavar="N", help="samples in the queue")
    add("--max-request-bytes", type=_whole(1, 2**32), default=16 * 2**20, metavar="N")
    add("--session-timeout", type=_seconds, default=600.0, metavar="SECONDS", help="without a heartbeat")
    add("--gap-timeout", type=_seconds, default=120.0, metavar="SECONDS", help="for a request that later ones wait for")
    add("--drain-timeout", type=_seconds, default=30.0, metavar="SECONDS", help="after a signal")
    add("--uvicorn-log-level", choices=("critical", "error", "warning", "info", "debug"), default="warning")
    _show_defaults(tinker)
    tinker.set_defaults(run=_tinker, parser=tinker)


# Each command is imported when it runs, so that `--help` and wrong arguments do not import JAX.


def _demo(args: argparse.Namespace) -> int:
    from jlora.cli.demo import DENSE, MIXTURE, run_demo

    return run_demo(MIXTURE if args.moe else DENSE)


def _generate(args: argparse.Namespace) -> int:
    from jlora.cli.generate import run_generate

    return run_generate(args)


def _inspect(args: argparse.Namespace) -> int:
    from jlora.cli.inspect import run_inspect

    return run_inspect(args.adapter, args.model, args.skip, args.revision)


def _serve(args: argparse.Namespace) -> int:
    if args.max_cpu_loras is not None and args.max_cpu_loras < args.max_loras:
        args.parser.error(
            f"--max-cpu-loras {args.max_cpu_loras} is less than --max-loras {args.max_loras}: adapters in slots also "
            "stay on the host"
        )
    from jlora.cli.serve import run_serve

    return run_serve(args)


def _tinker(args: argparse.Namespace) -> int:
    from jlora.cli.tinker import run_tinker

    return run_tinker(args)


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


def _count(value: str) -> tuple[str, int]:
    name, _, count = value.rpartition("=")
    if not name:
        raise argparse.ArgumentTypeError(f"expected NAME=NUMBER, got {value!r:.200}")
    return name, _whole(1, 2**31 - 1)(count)


def _shape(value: str) -> tuple[int, int]:
    rows, _, tokens = value.partition("x")
    try:
        return _whole(1, 65536)(rows), _whole(1, 2**31 - 1)(tokens)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"expected ROWSxTOKENS, such as 16x128, got {value!r:.40}") from None


def _number(accepts: Callable[[float], bool], expected: str) -> Callable[[str], float]:
    def parse(value: str) -> float:
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not accepts(number):
            raise argparse.ArgumentTypeError(f"expected {expected}, got {value!r:.40}")
        return number

    return parse


_temperature = _number(lambda number: 0 <= number < math.inf, "a finite number of at least 0")
_share = _number(lambda number: 0 < number <= 1, "a number above 0 and at most 1")
_seconds = _number(lambda number: 0 < number <= 86400 * 365, "seconds, a number above 0")
