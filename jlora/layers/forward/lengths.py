"""Check that all undeclared layers of one forward see rows [B, L, features] of one L above 1.

With as many images as sequences, a tower looks like a layer of sequences, so a second length must be declared.
"""

from collections.abc import Iterable

from jlora.errors import LoRAError
from jlora.layers.site import SEQUENCES, Site

_OTHER_LENGTH = """the layers of one forward see rows [{sequences}, L, features] of several L:
{layers}
Shapes cannot show that index b is sequence b in all of them. Declare the modules of all L but one:
    LoRAManager(..., row_groups={{"NAME": "sequences"}})  # index b is sequence b: an encoder, a mixer of tokens
    LoRAManager(..., row_groups={{"NAME": "images"}})  # rows of items that sequences own: prepare(..., items=)
NAME is a module, such as the one that holds an encoder, or a layer."""
_SHOWN = 8  # layers of each length in a message


class Lengths:
    """The lengths L above 1 that the undeclared layers of one forward see."""

    def __init__(self) -> None:
        self._seen: dict[int, dict[str, None]] = {}  # length -> paths, in the order of the first calls

    def add(self, site: Site, length: int) -> None:
        """Record a call of a layer with rows [B, length, features]."""
        if site.space == SEQUENCES != site.row_group and length != 1:
            self._seen.setdefault(length, {})[site.path] = None

    def check(self, sequences: int) -> None:
        """Raise `LoRAError` if there are several lengths. The message lists the layers of each."""
        if len(self._seen) > 1:
            layers = "\n".join(f"  L = {length}: {_shown(paths)}" for length, paths in sorted(self._seen.items()))
            raise LoRAError(_OTHER_LENGTH.format(sequences=sequences, layers=layers))


def _shown(paths: Iterable[str]) -> str:
    """Return the first paths, with "*" for the numbers of layers."""
    keys = (path.split(".") for path in paths)
    names = [*dict.fromkeys(".".join("*" if key.isdigit() else key for key in path) for path in keys)]
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
