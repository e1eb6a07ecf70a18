"""Which sites a traced forward serves. Recorded while a step is traced, read when a batch is handed to a step."""

import itertools
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

from jlora._compat import Device
from jlora.errors import AdapterMismatchError, LoRAError
from jlora.layers.site import Site
from jlora.sharding.rules import KernelSharding

if TYPE_CHECKING:
    from jlora.layers.batch import Lease

NOT_CALLED = (
    "the forward never calls that layer (its parameters are read directly, or the step runs only a part of the model), "
    "so they would do nothing. Call the layer, or, if several functions make up one forward, open "
    "`jlora.use(batch, partial=True)` in each of them"
)


class Coverage:
    """What the step functions of one wrapped model were seen to serve. One a manager; compared by identity.

    A compiled function runs no Python, so what it left out cannot be asked of it later. Therefore each site that some
    traced function did not serve is remembered here, and a batch whose adapters bring weights for such a site carries
    that in its static part (`Coverage.unsure`): a function compiled for other batches is traced once more for it, and
    checks itself. A function that serves the site is then fine, one that does not refuses the batch.

    Sites that the same functions left out are one group, and batches carry the groups that their adapters touch: how
    often a function is traced depends on what other functions leave out, not on which adapters come together. A trace
    that leaves out a part of a group splits it, under new numbers. So every traced function leaves out a group as a
    whole or not at all, and what it checked for one batch holds for all that carry the same numbers.

    Attributes:
      sites: every site of the model.
      sharding: of one of them: its mesh and its data axes are those of all; None off meshes.
      device: which somebody chose for the model off meshes, where there is one.
      unserved: site -> why some function did not serve it.
      groups: site -> the number of its group, of the same sites.
      version: how often `groups` changed.
    """

    def __init__(self) -> None:
        self.sites: tuple[Site, ...] = ()
        self.sharding: KernelSharding | None = None
        self.device: Device | None = None
        self.unserved: Mapping[Site, str] = {}
        self.groups: Mapping[Site, int] = {}
        self.version = 0
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def __deepcopy__(self, memo: object) -> "Coverage":
        raise LoRAError(
            "a wrapped model cannot be deep-copied: no manager would write the slots of the copy. Copy the model "
            "before it is wrapped"
        )

    def unsure(self, touched: frozenset[Site]) -> frozenset[int]:
        """The groups of those of the sites which some traced function did not serve."""
        groups = self.groups
        return frozenset(groups[site] for site in touched & groups.keys()) if groups else _NO_GROUPS

    def finish(self, unserved: Mapping[Site, str], asked: frozenset[int], lease: "Lease | None") -> None:
        """Record what one forward did not serve.

        Args:
          unserved: the sites that it did not serve, with the reason of each.
          asked: the groups that the batch says its adapters touch.
          lease: the batch's; None where it is not known, and every site of those groups counts as touched.

        Raises:
          AdapterMismatchError: an adapter of the batch brings weights for one of them.
        """
        with self._lock:
            touched = self._touched(asked) if lease is None else lease.touched
            for site, reason in unserved.items():
                if site in touched:
                    names = () if lease is None else lease.bringing(site)
                    who = f"adapter {names[0]!r}" if names else "an adapter of this batch"
                    raise AdapterMismatchError(f"{who}: brings weights for {site.path!r}, but {reason}")
            # A forward that raised is not compiled, so nothing was left out for later batches.
            self._record(unserved)

    def _touched(self, asked: frozenset[int]) -> frozenset[Site]:
        if not asked <= set(self.groups.values()):  # split since the batch was handed over: it may be any
            return frozenset(self.sites)
        return frozenset(site for site, group in self.groups.items() if group in asked)

    def _record(self, unserved: Mapping[Site, str]) -> None:
        split = {group for site, group in self.groups.items() if site in unserved}
        split &= {group for site, group in self.groups.items() if site not in unserved}
        new = unserved.keys() - self.groups.keys()
        if not split and not new:
            return
        groups, numbers = dict(self.groups), {}
        for site in (*self.groups, *new):
            group = groups.get(site)
            if group is None or group in split:
                key = group, site in unserved
                groups[site] = numbers[key] = numbers[key] if key in numbers else next(self._numbers)
        self.unserved = {**unserved, **self.unserved}
        self.groups = groups
        self.version += 1


_NO_GROUPS: frozenset[int] = frozenset()
