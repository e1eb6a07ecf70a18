"""What one traced forward did with its sites, for `manager.verify`: which served LoRA, in the order of their calls."""

import contextlib
import contextvars
from collections.abc import Generator
from dataclasses import dataclass, field

import jax

from jlora.layers.site import Site

NO_LAYOUT = "its rows fit no layout of the batch"


@dataclass
class Observed:
    """Sites that served LoRA, in call order, and those that were called and served the base, with the reason."""

    served: dict[Site, None] = field(default_factory=dict[Site, None])
    unserved: dict[Site, str] = field(default_factory=dict[Site, str])


_observed: contextvars.ContextVar[Observed | None] = contextvars.ContextVar("jlora_observed", default=None)

# Whatever is traced while somebody watches is traced anew, so that every call is seen.
_trace_key = jax.make_user_context(None)


@contextlib.contextmanager
def observe() -> Generator[Observed, None, None]:
    """Watch the wrapped layers that are called inside."""
    observed = Observed()
    token = _observed.set(observed)
    try:
        with _trace_key(object()):
            yield observed
    finally:
        _observed.reset(token)


def note_served(site: Site) -> None:
    if (observed := _observed.get()) is not None:
        observed.served.setdefault(site)


def note_unserved(site: Site, reason: str) -> None:
    if (observed := _observed.get()) is not None:
        observed.unserved.setdefault(site, reason)
