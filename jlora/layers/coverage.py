"""Which sites a traced forward serves. Recorded while a step is traced, read when a batch is handed to a step."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from jlora.errors import AdapterMismatchError, LoRAError
from jlora.layers.site import Site

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

    Attributes:
      sites: every site of the model.
      unserved: site -> why some function did not serve it.
      version: how often `unserved` grew.
    """

    def __init__(self) -> None:
        self.sites: tuple[Site, ...] = ()
        self.unserved: Mapping[Site, str] = {}
        self.version = 0

    def __deepcopy__(self, memo: object) -> "Coverage":
        raise LoRAError(
            "a wrapped model cannot be deep-copied: no manager would write the slots of the copy. Copy the model "
            "before it is wrapped"
        )

    def unsure(self, touched: frozenset[Site]) -> frozenset[Site]:
        """Those of the sites which some traced function did not serve."""
        return touched.intersection(self.unserved)  # `&` with the keys would be a set, which has no hash

    def finish(self, unserved: Mapping[Site, str], asked: frozenset[Site], lease: "Lease | None") -> None:
        """Record what one forward did not serve.

        Args:
          unserved: the sites that it did not serve, with the reason of each.
          asked: the sites that the batch says its adapters touch.
          lease: the batch's, where it is known; its adapters count too.

        Raises:
          AdapterMismatchError: an adapter of the batch brings weights for one of them.
        """
        touched = asked if lease is None else asked | lease.touched
        for site, reason in unserved.items():
            if site in touched:
                names = () if lease is None else lease.bringing(site)
                who = f"adapter {names[0]!r}" if names else "an adapter of this batch"
                raise AdapterMismatchError(f"{who}: brings weights for {site.path!r}, but {reason}")
        # A forward that raised is not compiled, so nothing was left out for later batches.
        if unserved.keys() - self.unserved.keys():
            self.unserved = {**unserved, **self.unserved}
            self.version += 1
