"""The host cache: the current content of every name, in order of use, and what is known of names that were evicted."""

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Hashable

from jlora.config import LoRARequest
from jlora.errors import NoFreeSlotError
from jlora.manager.blocks import Block
from jlora.manager.lru import LRU
from jlora.manager.packed_adapter import PackedAdapter, Shared, nbytes_together


class Registry:
    """Names, contents and generations. Every change is one assignment, so that an interrupt leaves it before or after.

    Attributes:
      contents: name -> its newest content.
      known: name -> the request it was added from, of names that were evicted since.
      last: name -> its last generation, and the key of that content.
      floor: no new content has a lower generation.
    """

    def __init__(self, max_count: int, max_bytes: int):
        self.contents: LRU[PackedAdapter] = LRU()
        self.known: dict[str, LoRARequest] = {}
        self.last: dict[str, tuple[int, Hashable]] = {}
        self.floor = 0
        # By sample, while a content has it. No WeakValueDictionary: it runs Python where a content dies, anywhere, and
        # an interrupt that comes there reaches nobody.
        self._shared: dict[bytes, weakref.ref[Shared]] = {}
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._at_most = 0  # bytes of all contents, or more: counted anew only where that is too much

    @property
    def nbytes(self) -> int:
        """Bytes of all contents; what several share counts once."""
        return nbytes_together(self.contents[name] for name in self.contents)

    def alike(self, content: PackedAdapter) -> tuple[Block, ...] | None:
        """The blocks, other than its own, that may have the same bytes; None if there are none."""
        shared = self._found(content.sample) if content.sample else None
        return None if shared is None or shared.blocks is content.blocks else shared.blocks

    def _found(self, sample: bytes) -> Shared | None:
        ref = self._shared.get(sample)
        return None if ref is None else ref()

    def generation(self, content: PackedAdapter) -> int:
        """Return the generation that a content is: the last of its name if it is the same files recalled, else the
        next."""
        last = self.last.get(content.name)
        if last is None:
            return self.floor
        recalled = content.key is not None and content.key == last[1] and not content.in_place
        return last[0] if recalled else max(last[0] + 1, self.floor)

    def put(self, content: PackedAdapter) -> None:
        """Make `content` the newest of its name."""
        self.last[content.name] = (content.generation, content.key)
        self._at_most += content.nbytes
        shared = None
        if content.sample:
            shared = self._found(content.sample)
            if shared is None or shared.blocks is not content.blocks:
                shared = Shared(content.blocks)
                self._shared[content.sample] = weakref.ref(shared)
                if len(self._shared) > 2 * len(self.contents) + 64:
                    self._shared = {sample: ref for sample, ref in self._shared.items() if ref() is not None}
        content.shared = shared
        self.contents.put(content.name, content)
        self.known.pop(content.name, None)

    def has_room(self, contents: Collection[PackedAdapter]) -> bool:
        """Whether these are not too many for an empty host cache."""
        return len(contents) <= self._max_count and nbytes_together(contents) <= self._max_bytes

    def clear(self) -> None:
        """As if there had never been an adapter."""
        for name in self.contents:
            self.contents.remove(name)
        self.known.clear()
        self.last.clear()
        self.floor = 0

    def newest(self, content: PackedAdapter) -> bool:
        return self.contents.get(content.name) is content

    def evict(self, name: str) -> None:
        """Out of the cache; what was loaded from a request stays known."""
        if (request := self.contents[name].request) is not None:
            self.known[name] = request
        else:
            self.known.pop(name, None)  # of an older content, where an interrupt left it
        self.contents.remove(name)

    def forget(self, name: str) -> bool:
        """Out of the cache and not known any more. False if it was neither. Its generations go on counting, and no
        content is one of those before."""
        if name in self.last:
            self.last[name] = (self.last[name][0], None)
        found = self.known.pop(name, None) is not None
        if name in self.contents:
            self.contents.remove(name)
            return True
        return found

    def victims_for(self, new: PackedAdapter | None, busy: Callable[[PackedAdapter], bool]) -> list[str]:
        """Names to evict, least recently used first, so that `new` has room.

        Raises:
          NoFreeSlotError: what could be evicted is not enough.
        """
        name = None if new is None else new.name
        replaced = None if name is None else self.contents.get(name)
        count = len(self.contents) + (new is not None and replaced is None) - self._max_count
        size = self._at_most + (0 if new is None else new.nbytes) - self._max_bytes
        users: Counter[int] = Counter()  # of blocks that contents may share
        if size > 0:
            self._at_most = self.nbytes
            left = [content for n in self.contents if (content := self.contents[n]) is not replaced]
            left += [] if new is None else [new]
            users.update(id(content.blocks) for content in left)
            size = nbytes_together(left) - self._max_bytes
        victims: list[str] = []
        if count > 0 or size > 0:
            for candidate in self.contents.evictable(lambda n: n == name or busy(self.contents[n])):
                if count <= 0 and size <= 0:
                    break
                victims.append(candidate)
                count -= 1
                if users:
                    victim = self.contents[candidate]
                    users[id(victim.blocks)] -= 1
                    size -= victim.ranks.nbytes if users[id(victim.blocks)] else victim.nbytes
        if count > 0:
            raise NoFreeSlotError(
                f"the host cache of {self._max_count} adapters is full, and each is pinned or held by an open batch; "
                "unpin or remove one, or raise max_cpu_loras"
            )
        if size > 0:
            raise NoFreeSlotError(
                f"adapter {name!r} needs {0 if new is None else new.nbytes} bytes of a host cache of "
                f"{self._max_bytes}, and what else is there is pinned or held by an open batch; raise max_cpu_bytes"
            )
        return victims
