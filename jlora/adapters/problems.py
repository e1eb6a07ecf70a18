"""Collect all problems of one adapter, so that one error can hold them."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from jlora.errors import AdapterFormatError, AdapterMismatchError, LoRAError

P = ParamSpec("P")
T = TypeVar("T")
D = TypeVar("D")


class Problems:
    """The problems of one adapter that were found so far.

    Attributes:
      found: The errors, in the order in which they were found.
    """

    def __init__(self) -> None:
        self.found: list[LoRAError] = []

    def attempt(self, default: D, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | D:
        """Return the result of a function, or the default if it refuses the adapter."""
        try:
            return function(*args, **kwargs)
        except (AdapterFormatError, AdapterMismatchError) as error:
            self.found.append(error)
            return default

    def raise_first(self) -> None:
        """Raise the first error, with the messages of all in `problems`. Do nothing if there is none."""
        if not self.found:
            return
        first = self.found[0]
        messages = [message for error in self.found for message in error.problems or (str(error),)]
        if len(messages) > 1:
            first.problems = tuple(dict.fromkeys(messages))
        raise first
