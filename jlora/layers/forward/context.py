"""The open scopes of the running code: one context variable, and one trace key for JAX."""

import contextlib
import contextvars
from collections.abc import Generator, Hashable, Iterator

import jax
import jax.core
import jax.numpy as jnp
from jax import lax

from jlora.errors import LoRAError

_ORDER = (
    "{what} was closed out of order: something that was opened inside it, or in another context, is still open. Code "
    "that yields inside it takes turns with other code; open it around each step, and close it before the yield"
)


def tracing() -> bool:
    """Return True while jit (or scan, remat, ...) is tracing. Eager grad and vmap are not."""
    return isinstance(lax.full((), 0, jnp.int32), jax.core.Tracer)


class Opened:
    """An open scope, row map or record of calls, with a link to the one around it.

    Attributes:
      what: name of the call that opened it, for messages.
      key: JAX reuses functions traced inside only under an equal key.
      outer: the enclosing one, or None.
      closed: True once it has ended.
    """

    def __init__(self, what: str, key: Hashable):
        self.what = what
        self.key = key
        self.outer: Opened | None = None
        self.closed = False


_innermost: contextvars.ContextVar[Opened | None] = contextvars.ContextVar("jlora_opened", default=None)

# Functions traced inside depend on the open scopes, so JAX must not reuse their traces in others.
_trace_key = jax.make_user_context(None)


def around() -> Iterator[Opened]:
    """Yield every scope, row map and record that is open here, innermost first."""
    opened = _innermost.get()
    while opened is not None:
        if not opened.closed:
            yield opened
        opened = opened.outer


@contextlib.contextmanager
def opening(opened: Opened) -> Generator[None, None, None]:
    """Open `opened` for the code inside.

    Raises:
      LoRAError: on exit, if one that was opened inside is still open.
    """
    opened.outer = next(around(), None)
    _innermost.set(opened)
    _set_trace_key()
    try:
        yield
    finally:
        opened.closed = True
        in_order = _innermost.get() is opened
        if in_order:
            _innermost.set(next(around(), None))
        _set_trace_key()
        if not in_order:
            raise LoRAError(_ORDER.format(what=opened.what))


def _set_trace_key() -> None:
    # Entered but never exited. An exit would restore the previous key, which is stale if scopes close out of order.
    _trace_key(tuple(each.key for each in around()) or None).__enter__()
