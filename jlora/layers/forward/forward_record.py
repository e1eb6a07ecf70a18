"""Record the layers that a forward calls, and those with rows that fit no layout of its batch."""

from collections.abc import Collection, Mapping, Sequence

from jlora.errors import LoRAError
from jlora.layers.forward.context import Opened
from jlora.layers.site import ModelSites, Site, is_named

_UNSERVED = (
    "`with jlora.use(batch)` ends, and {count} of the model's wrapped layers served no adapter:\n"
    "{layers}\n"
    "Weights that an adapter brings for them would do nothing. Either run `manager.verify(forward, inputs)` once, with "
    "a forward that runs all of your steps: it puts the layers that none of them serves into `manager.unserved`. Or "
    "leave them out: LoRAConfig(exclude_modules={names})"
)
_WITHOUT = ". Or say that this step does not run them: `jlora.use(batch, without={names})`"
_NOT_CALLED = "it was not called (its parameters are read directly, or the step runs only a part of the model)"
_SHOWN = 8  # maximum number of layers in a message


class Calls:
    """The calls of one forward.

    Attributes:
      called: the sites, in the order of their first calls.
      refused: site -> the reason why a call of it served no adapter.
    """

    def __init__(self) -> None:
        self.called: dict[Site, None] = {}
        self.refused: dict[Site, str] = {}


class ForwardRecord(Opened):
    """The calls of one model's layers across all scopes inside, which then do not check their own calls.

    Attributes:
      sites: the sites of the model.
      calls: the calls of its layers.
    """

    def __init__(self, sites: ModelSites):
        super().__init__("manager.verify", object())  # a unique key forces new traces, so every call is recorded
        self.sites = sites
        self.calls = Calls()


def check_all_served(calls: Calls, sites: ModelSites, unserved: Collection[Site], without: Sequence[str]) -> None:
    """Check that every layer served adapters, except those that are unserved or waived by `without`.

    Raises:
      LoRAError: a layer served no adapter; the message lists the layers.
    """
    missing: dict[str, str] = {}
    skipped: dict[str, None] = {}  # names for `without`: a row group for all of its layers
    for site in sites.sites:
        if site in unserved:
            continue
        if site in calls.refused:
            missing[site.path] = calls.refused[site]
        elif site not in calls.called and not _waived(site, without, sites.groups):
            missing[site.path] = _NOT_CALLED
            skipped.setdefault(site.space if site.space in sites.groups else site.path)
    if missing:
        raise LoRAError(_message(missing, [*skipped]))


def _waived(site: Site, without: Sequence[str], groups: Collection[str]) -> bool:
    own = "*", site.space if site.space in groups else None
    return any(name in own or is_named(name, (*site.aliases, *site.parts)) for name in without)


def _message(missing: Mapping[str, str], skipped: Sequence[str]) -> str:
    lines = [f"  {path}: {reason}" for path, reason in missing.items()][:_SHOWN]
    if len(missing) > _SHOWN:
        lines.append(f"  ... and {len(missing) - _SHOWN} more")
    message = _UNSERVED.format(count=len(missing), layers="\n".join(lines), names=[*missing][:_SHOWN])
    return message + _WITHOUT.format(names=skipped[:_SHOWN]) if skipped else message
