"""`jlora demo`, `jlora generate`, `jlora inspect`."""

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jlora.adapters import Adapter
from jlora.config import LoRAConfig, LoRARequest
from jlora.errors import LoRAError

if TYPE_CHECKING:
    from jlora.manager.manager import LoRAManager

DEMO = Path(__file__).parent / "demo"


@dataclass(frozen=True)
class Request:
    """One prompt and the adapter that answers it; None is the base model."""

    adapter: str | None
    prompt: str
    answer: str | None = None


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. Returns the exit status; an error is one line on stderr."""
    args = _parser().parse_args(argv)
    try:
        return args.run(args)
    except (LoRAError, OSError) as error:
        print("jlora: error: " + " ".join(str(error).split()), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("jlora: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="jlora", description="Many LoRA adapters on one model, in one batch.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="the shipped tiny Llama and its four adapters; needs no network")
    demo.set_defaults(run=run_demo)

    generate = commands.add_parser("generate", help="answer prompts, each with its own adapter, in one batch")
    generate.add_argument("--model", required=True, metavar="DIR", help="Hugging Face checkpoint with tokenizer.json")
    generate.add_argument("--adapter", action="append", default=[], metavar="NAME=PATH", help="PEFT folder or repo id")
    generate.add_argument(
        "--prompt", action="append", required=True, metavar="NAME:TEXT", help="an empty NAME is the base model"
    )
    generate.add_argument("--max-new-tokens", type=int, default=64, metavar="N")
    generate.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 (the default) is greedy")
    generate.add_argument("--top-k", type=int, metavar="K")
    generate.add_argument("--top-p", type=float, metavar="P")
    generate.add_argument("--seed", type=int, default=0)
    generate.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    generate.set_defaults(run=run_generate)

    inspect = commands.add_parser("inspect", help="what is in an adapter, and whether it fits a model")
    inspect.add_argument("adapter", metavar="ADAPTER", help="PEFT folder or repo id")
    inspect.add_argument("--model", metavar="DIR", help="Hugging Face checkpoint that it should fit")
    inspect.set_defaults(run=run_inspect)
    return parser


# --- demo -------------------------------------------------------------------------------------------------------------


def run_demo(args: argparse.Namespace) -> int:
    """One batch with four adapters and the base; then 64 held-out prompts over two slots."""
    from jlora.manager.manager import LoRAManager
    from jlora.models import generation

    model, tokenizer = _load_model(DEMO / "model", "float32")
    adapters = {path.name: path for path in sorted((DEMO / "adapters").iterdir())}
    with _progress("compiling"):
        manager = LoRAManager(model, LoRAConfig(max_loras=len(adapters), max_lora_rank=32))
        for name, path in adapters.items():
            manager.add_adapter(LoRARequest(name, str(path)))
        word = "planet="
        together = [Request(None, word), *(Request(name, word) for name in adapters)]
        answers = _answer(manager, tokenizer, together, max_new_tokens=10)
    print("One batch, one prompt, five different answers:\n")
    for request, (answer, _) in zip(together, answers, strict=True):
        print(f"  {request.prompt:<12}{request.adapter or '(base)':<10}{answer}")
    manager.unwrap()

    requests = demo_requests()[:64]
    manager = LoRAManager(model, LoRAConfig(max_loras=2, max_lora_rank=32, max_cpu_loras=len(adapters)))
    for name, path in adapters.items():
        manager.add_adapter(LoRARequest(name, str(path)))
    # Batches are filled up with the longest prompt there is, so that all have one shape.
    size, filler = 16, Request(None, "abcdefgh=")
    with _progress("compiling for two slots"):
        manager.warmup(lambda batch: _run(manager, tokenizer, [filler.prompt] * size, batch, 10), num_sequences=size)
    compiled, started, tokens = generation.compiled_variants(), time.perf_counter(), 0
    answered: dict[Request, str] = {}
    for batch in schedule(requests, size, manager.config.max_loras):
        padded = [*batch, *[filler] * (size - len(batch))]
        results = _answer(manager, tokenizer, padded, max_new_tokens=10)[: len(batch)]
        answered |= {request: answer for request, (answer, _) in zip(batch, results, strict=True)}
        tokens += sum(count for _, count in results)
    seconds = time.perf_counter() - started

    print("\n64 prompts that training never saw, four adapters and the base over two slots:\n")
    print(f"  {'prompt':<12}{'adapter':<10}{'answer':<12}")
    right = 0
    for request in requests:
        good = answered[request] == request.answer
        right += good
        verdict = "right" if good else f"wrong: {request.answer}"
        print(f"  {request.prompt:<12}{request.adapter or '(base)':<10}{answered[request]:<12}{verdict}")
    stats = manager.stats()
    late = generation.compiled_variants() - compiled
    print(
        f"\n  {right} of {len(requests)} right; {stats.slot_loads} adapter loads, {stats.slot_evictions} evictions, "
        f"{stats.compilations + late - 1} compilations after warm-up, {tokens / seconds:.0f} tokens/s"
    )
    return 0 if right >= 0.95 * len(requests) else 1


def demo_requests() -> list[Request]:
    """The shipped held-out prompts with their right answers, mixed over base and adapters."""
    return [Request(**entry) for entry in json.loads((DEMO / "prompts.json").read_text())]


def schedule(requests: Sequence[Request], size: int, max_loras: int) -> Iterator[list[Request]]:
    """Cut a queue into batches of at most `size` requests that use at most `max_loras` different adapters.

    A request whose adapter does not fit waits for a later batch; the first in the queue never waits.
    """
    queue = list(requests)
    while queue:
        batch, waiting, adapters = [], [], set()
        for request in queue:
            fits = request.adapter is None or request.adapter in adapters or len(adapters) < max_loras
            if len(batch) < size and fits:
                batch.append(request)
                adapters |= {request.adapter} - {None}
            else:
                waiting.append(request)
        yield batch
        queue = waiting


# --- generate ---------------------------------------------------------------------------------------------------------


def run_generate(args: argparse.Namespace) -> int:
    from jlora.manager.manager import LoRAManager

    paths = dict(_split(text, "=", "--adapter NAME=PATH") for text in args.adapter)
    if len(paths) != len(args.adapter):
        raise LoRAError("--adapter: the same name is given twice")
    prompts = [_split(text, ":", "--prompt NAME:TEXT") for text in args.prompt]
    for name, _ in prompts:
        if name and name not in paths:
            raise LoRAError(f"--prompt names the adapter {name!r}, and no --adapter {name}=PATH is given")
    loaded = []
    for name, path in paths.items():
        with _progress(f"reading adapter {name}"):
            loaded.append(Adapter.from_pretrained(path, name=name))
    model, tokenizer = _load_model(Path(args.model), args.dtype)
    rank = max((adapter.rank for adapter in loaded), default=1)
    manager = LoRAManager(model, LoRAConfig(max_loras=max(1, len(loaded)), max_lora_rank=rank))
    for adapter in loaded:
        manager.add_adapter(adapter)
    requests = [Request(name or None, text) for name, text in prompts]
    options = {"temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p, "seed": args.seed}
    with _progress("compiling and generating"):
        answers = _answer(manager, tokenizer, requests, max_new_tokens=args.max_new_tokens, **options)
    for request, (answer, _) in zip(requests, answers, strict=True):
        print(f"{request.adapter or '(base)'}: {request.prompt}{answer}")
    return 0


def _split(text: str, mark: str, usage: str) -> tuple[str, str]:
    name, found, rest = text.partition(mark)
    if not found or not rest or (mark == "=" and not name):
        raise LoRAError(f"expected {usage}, got {text!r}")
    return name, rest


def _answer(
    manager: "LoRAManager", tokenizer: Any, requests: Sequence[Request], *, max_new_tokens: int, **options: Any
) -> list[tuple[str, int]]:
    """The decoded answer of each request, and its number of tokens; all of them in one batch."""
    with manager.prepare([request.adapter for request in requests]) as batch:
        prompts = [request.prompt for request in requests]
        outputs = _run(manager, tokenizer, prompts, batch, max_new_tokens, **options)
    return [(tokenizer.decode(tokens).strip(), len(tokens)) for tokens in outputs]


def _run(
    manager: "LoRAManager", tokenizer: Any, prompts: Sequence[str], batch: Any, max_new_tokens: int, **options: Any
) -> list[list[int]]:
    from jlora.models import generate

    model: Any = manager.model
    return generate(
        model,
        [tokenizer.encode(prompt).ids for prompt in prompts],
        batch=batch,
        max_new_tokens=max_new_tokens,
        stop_tokens=model.config.eos_token_ids,
        **options,
    )


# --- inspect ----------------------------------------------------------------------------------------------------------


def run_inspect(args: argparse.Namespace) -> int:
    """Modules, ranks and bytes of an adapter; with a model, whether it fits and what a slot costs."""
    from jlora.manager.manager import LoRAManager

    adapter = Adapter.from_pretrained(args.adapter)
    print(f"adapter      {adapter.name}")
    print(f"base model   {adapter.base_model_name or '(not said)'}")
    print(f"modules      {len(adapter.modules)}, rank up to {adapter.rank}, {_bytes(adapter.nbytes)}")
    groups: dict[tuple, int] = {}
    for name, module in adapter.modules.items():
        key = (name.rpartition(".")[2], module.kind, module.rank, module.scaling, module.a.dtype.name)
        groups[key] = groups.get(key, 0) + 1
    for (name, kind, rank, scaling, dtype), count in groups.items():
        print(f"  {count:4d} x {name:<20} {kind:<9} rank {rank:<4} scaling {scaling:<8g} {dtype}")
    if args.model is None:
        return 0
    model, _ = _load_model(Path(args.model), "float32", tokenizer=False)
    manager = LoRAManager(model, LoRAConfig(max_loras=1, max_lora_rank=adapter.rank))
    manager.add_adapter(adapter)
    print(
        f"fits         {args.model}: yes; {_bytes(manager.stats().slot_bytes)} a slot at rank {adapter.rank}, float32"
    )
    return 0


def _bytes(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"


# --- loading ----------------------------------------------------------------------------------------------------------


def _load_model(folder: Path, dtype: str, tokenizer: bool = True) -> tuple[Any, Any]:
    from jlora.models import from_pretrained

    loaded = _load_tokenizer(folder / "tokenizer.json") if tokenizer else None
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    what = f"reading model {folder} ({_bytes(size)})"

    def percent(done: int, total: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{what} ... {100 * done // total}%", end="", file=sys.stderr, flush=True)

    with _progress(what):
        return from_pretrained(folder, dtype=dtype, progress=percent), loaded


def _load_tokenizer(file: Path) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise LoRAError('tokenizers is not installed: pip install "jlora[demo]"') from None
    if not file.is_file():
        raise LoRAError(f"{file} does not exist; the model folder needs a tokenizer in tokenizers format")
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises plain Exception for a malformed file
        raise LoRAError(f"{file} is not a tokenizer: {error}") from error


@contextlib.contextmanager
def _progress(what: str) -> Iterator[None]:
    """`what ...` on stderr while it runs, with the seconds it took when it took long."""
    print(f"{what} ...", end="", file=sys.stderr, flush=True)
    started = time.perf_counter()
    try:
        yield
    finally:
        print(f" {time.perf_counter() - started:.1f} s", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
