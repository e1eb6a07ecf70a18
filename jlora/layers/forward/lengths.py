"""Check that all undeclared layers of one forward see rows [B, L, features] of one L above 1.

With as many images as sequences, a tower looks like a layer of sequences, so a second length must be declared.
"""

from jlora.errors import LoRAError
from jlora.layers.site import SEQUENCES, Site, is_named

_OTHER_LENGTH = (
    "the layers of one forward see rows [{sequences}, L, features] of several L:\n"
    "{layers}\n"
    "Shapes cannot show that index b is sequence b in all of them. Declare the modules whose rows are of another "
    "kind:\n"
    "    LoRAManager(..., row_groups={alike})  # index b is sequence b everywhere: an encoder, a mixer of tokens"
)
_OF_ITEMS = "\n    LoRAManager(..., row_groups={owned})  # rows of items that sequences own: prepare(..., items=)"
_SHOWN = 8  # layers of each length in a message


class Lengths:
    """The lengths L above 1 that the undeclared layers of one forward see."""

    def __init__(self) -> None:
        self._seen: dict[Site, dict[int, None]] = {}  # in the order of the first calls
        self._last = 0

    def add(self, site: Site, length: int) -> None:
        """Record a call of a layer with rows [B, length, features]."""
        if site.space == SEQUENCES != site.row_group and length != 1:
            self._seen.setdefault(site, {})[length] = None
            self._last = length

    def check(self, sequences: int) -> None:
        """Raise `LoRAError` if there are several lengths. The message has the line that declares all of them."""
        seen = {site.path: [*lengths] for site, lengths in self._seen.items()}
        every = sorted({length for lengths in seen.values() for length in lengths})
        if len(every) < 2:
            return
        # The rows of tokens are those of a lookup, else of the last layer, as in a language model after a tower.
        lookups = (lengths for site, lengths in self._seen.items() if site.kind == "embedding" and len(lengths) == 1)
        tokens = next(iter(next(lookups, [self._last])))
        # One length stays undeclared: that of the fewest names, then that of tokens.
        covers = [_cover(seen, kept) for kept in sorted(every, key=lambda length: length != tokens)]
        alike = min(covers, key=lambda cover: (len(cover[0]), cover[1]))[0]
        message = _OTHER_LENGTH.format(
            sequences=sequences,
            layers="\n".join(f"  L = {length}: {_shown(seen, length)}" for length in every),
            alike=dict.fromkeys(alike, "sequences"),
        )
        if all(tokens not in lengths or len(lengths) == 1 for lengths in seen.values()):
            owned, _ = _cover(seen, tokens, exact=True)
            message += _OF_ITEMS.format(owned=dict.fromkeys(owned, "images"))
        raise LoRAError(message)


def _cover(seen: dict[str, list[int]], kept: int, *, exact: bool = False) -> tuple[list[str], int]:
    """Return few names that declare all layers but those that see only the length `kept`.

    Args:
      seen: path of a layer -> its lengths.
      kept: the length.
      exact: avoid names that also declare layers which see only `kept`. If False, few names are more important, such as
        "decoder" for the layers of a decoder, some of which see the rows of the encoder.

    Returns:
      The names, and how many of the layers that see only `kept` they declare too.
    """
    rest: list[str] = [path for path, lengths in seen.items() if lengths == [kept]]
    left: list[str] = [path for path, lengths in seen.items() if lengths != [kept]]
    names: list[str] = []

    def cost(name: str) -> tuple[int, ...]:
        spare, found = (sum(is_named(name, [path]) for path in paths) for paths in (rest, left))
        return spare == len(rest) > 0, spare if exact else 0, -found, spare, name.count(".")

    while left:
        names.append(min({name: None for path in left for name in _names(path)}, key=cost))
        left = [path for path in left if not is_named(names[-1], [path])]
    return names, sum(any(is_named(name, [path]) for name in names) for path in rest)


def _names(path: str) -> list[str]:
    """Return the names of the modules that contain a layer, outermost first, and those below the last number."""
    keys = path.split(".")
    after = next((i + 1 for i, key in reversed([*enumerate(keys)]) if key.isdigit()), len(keys))
    every = [keys[:end] for end in range(1, len(keys) + 1)] + [
        keys[after:end] for end in range(after + 1, len(keys) + 1)
    ]
    return [".".join(name) for name in every]


def _shown(seen: dict[str, list[int]], length: int) -> str:
    """Return the first layers that see a length, with "*" for the numbers of layers."""
    paths = (path.split(".") for path, lengths in seen.items() if length in lengths)
    names = [*dict.fromkeys(".".join("*" if key.isdigit() else key for key in path) for path in paths)]
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
