"""`jlora generate`: answer prompts of several adapters in one batch."""

import argparse
import contextlib
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jlora import Adapter, LoRABatch, LoRAConfig, LoRAManager
from jlora._memory import machine_bytes
from jlora.cli.loading import load_model, load_tokenizer, native_errors, progress
from jlora.cli.text import shown_lines, size, utf8
from jlora.errors import AdapterMismatchError, LoRAError, LoRAUsageError, printable
from jlora.models import (
    Decoder,
    cache_size,
    check_context,
    generate,
    model_folder,
    quantized_config,
    read_config,
)

# Largest rank that the command line makes slots for, far above any in use. The memory of slots grows with the rank,
# regardless of the adapter's size.
MAX_RANK = 512
_DEFAULT_NEW_TOKENS = 64


@dataclass(frozen=True)
class Request:
    """One prompt, its adapter (None for the base model), and the right answer if known."""

    adapter: str | None
    prompt: str
    answer: str | None = None


def run_generate(args: argparse.Namespace) -> int:
    """Answer every `--prompt` and print the answers. All arguments are checked before a model is read."""
    paths = dict(_split(text, "=", "--adapter NAME=PATH") for text in args.adapter)
    if len(paths) != len(args.adapter):
        raise LoRAUsageError("--adapter: the same name is given twice")
    prompts = [(name, utf8(text)) for name, text in (_split(text, ":", "--prompt NAME:TEXT") for text in args.prompt)]
    for name, text in prompts:
        if name and name not in paths:
            raise LoRAUsageError(f"--prompt names the adapter {name!r}, and no --adapter {name}=PATH is given")
        _check_utf8("--prompt", text)
    if args.temperature == 0 and (args.top_k is not None or args.top_p is not None):
        raise LoRAUsageError(
            "--top-k and --top-p only mean something when sampling; give --temperature above 0 as well"
        )
    loaded = []
    for name, path in paths.items():
        with progress(f"reading adapter {name}"):
            loaded.append(Adapter.from_pretrained(path, name=name))
        check_rank(loaded[-1])

    folder = model_folder(args.model, args.revision)
    requests = [Request(name or None, text) for name, text in prompts]
    config, tokenizer = read_config(folder / "config.json"), load_tokenizer(folder / "tokenizer.json")
    config = quantized_config(config, args.quantization)
    lengths = [len(prompt) for prompt in encode(tokenizer, requests)]
    limit = args.max_new_tokens
    if limit is None:
        limit = max(1, min(_DEFAULT_NEW_TOKENS, config.max_position_embeddings - max(lengths)))
    check_context(config, lengths, limit)
    model = load_model(folder, args.dtype, quantize=args.quantization)
    check_memory(model, lengths, limit)
    rank = max((adapter.rank for adapter in loaded), default=1)
    heads: dict[str, int] = {}
    for adapter in loaded:
        heads |= {name: max(outputs, heads.get(name, 0)) for name, outputs in adapter.saved_outputs.items()}
    manager = LoRAManager(model, LoRAConfig(max_loras=max(1, len(loaded)), max_lora_rank=rank, saved_heads=heads))
    for adapter in loaded:
        manager.add_adapter(adapter)
    options = {"temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p, "seed": args.seed}
    with progress("compiling and generating"), device_errors():
        answers = answer_all(manager, tokenizer, requests, max_new_tokens=limit, **options)
    for request, (text, _) in zip(requests, answers, strict=True):
        print(f"{printable(request.adapter or '(base)')}: {shown_lines(request.prompt + text, indent='    ')}")
    return 0


def check_rank(adapter: Adapter) -> None:
    """Raise `AdapterMismatchError` if the adapter's rank exceeds `MAX_RANK`."""
    if adapter.rank > MAX_RANK:
        module = max(adapter.modules, key=lambda name: adapter.modules[name].rank)
        raise AdapterMismatchError(
            f"adapter {adapter.name!r}: module {module!r} has rank {adapter.rank}; expected at most {MAX_RANK}, the "
            "largest the command line makes slots for"
        )


def answer_all(
    manager: LoRAManager, tokenizer: Any, requests: Sequence[Request], *, max_new_tokens: int, **options: Any
) -> list[tuple[str, int]]:
    """Return (decoded answer, number of tokens) for each request, computed in one batch."""
    with manager.prepare([request.adapter for request in requests]) as batch:
        outputs = complete(manager, tokenizer, requests, batch, max_new_tokens, **options)
    with native_errors("the answer cannot be decoded"):
        return [(tokenizer.decode(tokens).strip(), len(tokens)) for tokens in outputs]


def complete(
    manager: LoRAManager,
    tokenizer: Any,
    requests: Sequence[Request],
    batch: LoRABatch,
    max_new_tokens: int,
    **options: Any,
) -> list[list[int]]:
    """Return the generated tokens of each prompt, for a batch prepared for these requests."""
    model: Any = manager.model
    return generate(
        model,
        encode(tokenizer, requests),
        batch=batch,
        max_new_tokens=max_new_tokens,
        stop_tokens=model.config.eos_token_ids,
        **options,
    )


def encode(tokenizer: Any, requests: Sequence[Request]) -> list[list[int]]:
    """Return the token ids of each prompt. Raise `LoRAUsageError` if a prompt has no tokens."""
    prompts = []
    for request in requests:
        with native_errors(f"the prompt {request.prompt!r:.80} cannot be tokenized"):
            prompts.append(tokenizer.encode(request.prompt).ids)
        if not prompts[-1]:
            raise LoRAUsageError(f"the prompt {request.prompt!r:.80} has no tokens in the tokenizer of this model")
    return prompts


def _split(text: str, mark: str, usage: str) -> tuple[str, str]:
    name, found, rest = text.partition(mark)
    if not found or not rest or (mark == "=" and not name):
        base = f"; for the base model, give {':' + text!r}" if mark == ":" and not found and text else ""
        raise LoRAUsageError(f"expected {usage}, got {text!r}{base}")
    name = utf8(name)
    _check_utf8(usage, name)
    return name, rest


def _check_utf8(usage: str, text: str) -> None:
    """Raise `LoRAUsageError` if an argument is not UTF-8. Python decodes invalid bytes to lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise LoRAUsageError(f"{usage}: {text!r:.80} is not UTF-8 text: character {error.start + 1}") from None


def check_memory(model: Decoder, lengths: Sequence[int], limit: int) -> None:
    """Raise `LoRAUsageError` if the cache exceeds the machine's memory. A GPU or TPU raises an error itself."""
    config, (rows, capacity) = model.config, cache_size(lengths, limit)
    one = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * model.dtype.itemsize
    have = machine_bytes()
    if jax.default_backend() == "cpu" and one * rows * capacity > have:
        raise LoRAUsageError(
            f"--max-new-tokens {limit}: the keys and values of {rows} x {capacity} tokens would take "
            f"{size(one * rows * capacity)}, and this machine has {size(have)}"
        )


@contextlib.contextmanager
def device_errors() -> Generator[None, None, None]:
    """Convert errors of the device, such as out of memory, to `LoRAError`."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        raise LoRAError(f"the device failed: {error}") from error
