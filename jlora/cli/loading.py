"""A model folder and its tokenizer, read with a word on stderr about what takes long."""

import contextlib
import sys
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jlora.cli.text import shown, size
from jlora.config import LoRAConfig, LoRARequest
from jlora.errors import LoRAError

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from jlora.adapters import AdapterShapes
    from jlora.models import Decoder

# The largest that are in use have about 35 MB.
_MAX_TOKENIZER_BYTES = 2**28


def load_model(folder: Path, dtype: str, mesh: "Mesh | None" = None) -> "Decoder":
    """The model of a Hugging Face checkpoint folder, on a mesh if one is given.

    Raises:
      LoRAError: a file is missing, malformed or asks for what is not served; the message names it.
    """
    from jlora.models import from_pretrained

    what = f"reading model {folder} ({size(sum(file.stat().st_size for file in folder.glob('*.safetensors')))})"

    def percent(done: int, total: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{shown(what)} ... {100 * done // total}%", end="", file=sys.stderr, flush=True)

    with progress(what):
        return from_pretrained(folder, dtype=dtype, mesh=mesh, progress=percent)


def check_adapters(requests: Sequence[LoRARequest], skeleton: "Decoder", config: LoRAConfig) -> None:
    """Check configurations and shapes of adapters against a model; no tensor is read, of them or of the model.

    Args:
      requests: which adapters; those of the hub are downloaded.
      skeleton: the model, whose parameters may be shapes alone.
      config: of its slots.

    Raises:
      LoRAError: what loading the first that does not fit would raise.
    """
    from jlora.adapters import Adapter
    from jlora.layers.wrap import survey
    from jlora.manager.fit import check_base_shapes, describe, place
    from jlora.manager.names import SiteIndex

    if not requests:
        return
    index = SiteIndex(survey(skeleton, config), ())
    for request in requests:
        where = describe(request.name, request.path)

        def check(shapes: "AdapterShapes", where: str = where) -> None:
            place(where, shapes.modules, index)
            check_base_shapes(where, shapes.base_weights, index)
            raise _Fits

        with contextlib.suppress(_Fits):
            Adapter.from_pretrained(request.path, name=request.name, check=check)


class _Fits(Exception):
    """Ends the reading of an adapter before its tensors."""


def load_tokenizer(file: Path) -> Any:
    """A `tokenizers.Tokenizer`. Raises `LoRAError` if the package or the file is missing, or the file is malformed."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise LoRAError('tokenizers is not installed: pip install "jlora[demo]"') from None
    if not file.is_file():
        raise LoRAError(f"{file} does not exist; the model folder needs a tokenizer in tokenizers format")
    if file.stat().st_size > _MAX_TOKENIZER_BYTES:
        raise LoRAError(f"{file} has {size(file.stat().st_size)}; expected at most {size(_MAX_TOKENIZER_BYTES)}")
    with native_errors(f"{file} is not a tokenizer"):
        return Tokenizer.from_buffer(file.read_bytes())


@contextlib.contextmanager
def native_errors(problem: str) -> Generator[None, None, None]:
    """Errors of the tokenizers library as `LoRAError`: it raises plain Exception, and panics as a BaseException."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise LoRAError(f"{problem}: {error}") from error


@contextlib.contextmanager
def progress(what: str) -> Generator[None, None, None]:
    """`what ...` on stderr while it runs, with the seconds it took."""
    print(f"{shown(what)} ...", end="", file=sys.stderr, flush=True)
    started = time.perf_counter()
    try:
        yield
    finally:
        print(f" {time.perf_counter() - started:.1f} s", file=sys.stderr)
