"""Which layers a forward calls, and which of them see rows that fit no layout of its batch."""

from jlora.layers.forward.context import Opened
from jlora.layers.site import ModelSites, Site


class Calls:
    """The calls of one forward.

    Attributes:
      called: the sites, in the order of their first calls.
      refused: site -> why a call of it served no adapter.
    """

    def __init__(self) -> None:
        self.called: dict[Site, None] = {}
        self.refused: dict[Site, str] = {}


class ForwardRecord(Opened):
    """All calls of the layers of one model inside, whatever their scopes; none of these checks its own.

    Attributes:
      sites: of the model.
      calls: of its layers.
    """

    def __init__(self, sites: ModelSites):
        super().__init__("manager.verify", object())  # everything is traced anew inside, so every call is seen
        self.sites = sites
        self.calls = Calls()
