"""The checked arguments of `prepare`."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from jlora.config import LoRARequest
from jlora.errors import LoRAUsageError
from jlora.layers.forward.batch_shape import BatchShape, batch_shape
from jlora.manager.leases import AdapterHandle

Name = str | LoRARequest | AdapterHandle


@dataclass(frozen=True)
class BatchArguments:
    """The checked arguments of `prepare`.

    Attributes:
      names: the adapter of each sequence; None for the base model.
      shape: shape of the batch.
    """

    names: tuple[Name | None, ...]
    shape: BatchShape

    @cached_property
    def adapters(self) -> tuple[Name, ...]:
        """The distinct adapters, in the order of their first sequences."""
        return tuple(dict.fromkeys(name for name in self.names if name is not None))

    @cached_property
    def key(self) -> Hashable:
        """A hashable key of the arguments. It refers to adapters, not to handles, so that handles can be collected."""
        # Another thread may have closed a handle. Its adapter is then None, which must not become the base model.
        names = tuple(name.packed or name if isinstance(name, AdapterHandle) else name for name in self.names)
        return names, self.shape


def read_arguments(
    names: Sequence[Name | None], token_counts: Sequence[int] | None, pad_to: int | None, length: int | None
) -> BatchArguments:
    """Check the arguments of `prepare`.

    Raises:
      LoRAUsageError: an argument has the wrong type, or arguments disagree.
    """
    # Sets have no order, generators cannot be read twice, and a string would be split into letters.
    if isinstance(names, str | bytes) or not isinstance(names, Sequence | np.ndarray):
        raise LoRAUsageError(f"prepare takes one name a sequence in a list, got {type(names).__name__} {names!r:.100}")
    for name in names:
        if not (name is None or isinstance(name, Name)):
            raise LoRAUsageError(f"prepare takes adapter names, LoRARequests, handles and None, got {name!r:.100}")
        if isinstance(name, AdapterHandle) and name.packed is None:
            raise LoRAUsageError(f"prepare: {name!r} is closed")
    return BatchArguments(tuple(names), batch_shape(len(names), token_counts, pad_to, length))
