"""Read a model folder and its tokenizer, with progress on stderr."""

import contextlib
import json
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from jlora._threads import elapsed
from jlora.cli.text import size
from jlora.errors import LoRAError, printable
from jlora.models import Decoder, LoadProgress, Quantize, from_pretrained

# The largest tokenizers in use have about 35 MB.
_MAX_TOKENIZER_BYTES = 2**28


def load_model(folder: Path, dtype: str, mesh: Mesh | None = None, quantize: Quantize | None = None) -> Decoder:
    """Return the model of a Hugging Face checkpoint folder, on a mesh if one is given.

    A terminal shows a bar. Otherwise a line is printed for each of several shards. `quantize` is that of
    `jlora.models.from_pretrained`.

    Raises:
      LoRAError: A file is missing or malformed, or uses an unserved feature. The message names it.
    """
    shards = [file.stat().st_size for file in folder.glob("*.safetensors")]
    bar = sys.stderr.isatty()
    lines = len(shards) > 1 and not bar
    printed = 0

    def show(step: LoadProgress) -> None:
        nonlocal printed
        if bar:
            share = step.parameters / step.num_parameters
            print(f"\r[{'#' * int(30 * share):<30}] {share:4.0%}", end="", file=sys.stderr, flush=True)
        elif lines and step.files > printed:
            printed = step.files
            print(f"  shard {step.files} of {step.num_files}", file=sys.stderr, flush=True)

    with progress(f"reading model {folder} ({size(sum(shards))})", end="\n" if bar or lines else ""):
        return from_pretrained(folder, dtype=dtype, mesh=mesh, quantize=quantize, progress=show)


def load_tokenizer(file: Path) -> Any:
    """Return a `tokenizers.Tokenizer`. Raise `LoRAError` if package or file is missing or the file is malformed."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise LoRAError('tokenizers is not installed: pip install "jlora[demo]"') from None
    if not file.is_file():
        raise LoRAError(f"{file} does not exist; the model folder needs a tokenizer in tokenizers format")
    if file.stat().st_size > _MAX_TOKENIZER_BYTES:
        raise LoRAError(f"{file} has {size(file.stat().st_size)}; expected at most {size(_MAX_TOKENIZER_BYTES)}")
    with native_errors(f"{file} is not a tokenizer"):
        tokenizer = Tokenizer.from_buffer(file.read_bytes())
        tokenizer.no_padding()  # either may be saved with it, and would change a prompt without a word
        tokenizer.no_truncation()
        return tokenizer


def check_last_token(folder: Path, tokenizer: Any) -> None:
    """Raise `LoRAError` if the tokenizer lacks the last token that `add_eos_token` requires, as embeddings need it."""
    file = folder / "tokenizer_config.json"
    last, plain = (tokenizer.encode("a", add_special_tokens=special).ids[-1:] for special in (True, False))
    if last == plain and file.is_file() and json.loads(file.read_text("utf-8")).get("add_eos_token"):
        raise LoRAError(
            f"{file}: add_eos_token is true, and tokenizer.json adds no token at the end of a text; save the tokenizer "
            "again with transformers"
        )


@contextlib.contextmanager
def native_errors(problem: str) -> Generator[None, None, None]:
    """Convert errors of tokenizers to `LoRAError`. It raises plain Exception, and BaseException for a Rust panic."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise LoRAError(f"{problem}: {error}") from error


@contextlib.contextmanager
def progress(what: str, *, end: str = "") -> Generator[None, None, None]:
    """Print `what ...` and `end` on stderr, and the elapsed seconds at the end, and every 10 seconds if `end` is ""."""
    print(f"{printable(what)} ...", end=end, file=sys.stderr, flush=True)
    started = time.perf_counter()
    try:
        with (
            contextlib.nullcontext()
            if end
            else elapsed(lambda seconds: print(f" {seconds:.0f} s ...", end="", file=sys.stderr, flush=True))
        ):
            yield
    finally:
        print(f" {time.perf_counter() - started:.1f} s", file=sys.stderr)
