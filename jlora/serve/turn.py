"""What a turn of the dispatching thread begins with.

Where several processes serve one model, all of them begin with the same, and so do the same: one of them takes the
requests and decides, and tells the others (`jlora.serve.peers`).
"""

import json
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from jlora.config import LoRARequest
from jlora.errors import LoRAError, error_of
from jlora.serve.generation import Answer
from jlora.serve.request import SamplingParams
from jlora.serve.sequence import Sequence
from jlora.serve.text import Decoding

Over = Literal["done", "abort", "late"]  # by a stop string, by its consumer, by its deadline


@dataclass(frozen=True)
class Order:
    """Something to do about an adapter.

    Attributes:
      kind: "fail": its waiting requests end, with `error`. "load": read it, apart. "admit": it has been read by all,
        and becomes an adapter. "drop": forget what was read of it. "remove", "pin", "unpin".
      name: of the adapter.
      number: of the load, or of the call that waits for the order; 0 for none.
      request: what to load.
      error: why it failed; for "drop", too.
    """

    kind: Literal["fail", "load", "admit", "drop", "remove", "pin", "unpin"]
    name: str
    number: int = 0
    request: LoRARequest | None = None
    error: LoRAError | None = None


@dataclass(frozen=True)
class Turn:
    """What has happened since the last one.

    Attributes:
      arrived: new requests, in their order.
      over: sequences that have to end, by number, and why.
      looked: whether it is time to look at all that wait.
      orders: what to do about adapters, in this order.
      stop: whether it is the last.
    """

    arrived: tuple[Sequence, ...] = ()
    over: tuple[tuple[int, Over], ...] = ()
    looked: bool = False
    orders: tuple[Order, ...] = ()
    stop: bool = False


_NOTHING = Turn()
_OF_STEPS = ("temperature", "top_p", "top_k", "logprobs")  # what steps need of `SamplingParams`


def why_over(sequence: Sequence, now: float) -> Over | None:
    """Why a sequence has to end, if it has to."""
    if sequence.ended:
        return "done"
    if sequence.cancelled:
        return "abort"
    return "late" if sequence.deadline is not None and now >= sequence.deadline else None


def written(turn: Turn) -> bytes:
    """A turn as one line."""
    if turn == _NOTHING:
        return b"{}\n"
    said: dict[str, Any] = {
        "arrived": [_of_sequence(one) for one in turn.arrived],
        "over": turn.over,
        "looked": turn.looked,
        "orders": [_of_order(one) for one in turn.orders],
        "stop": turn.stop,
    }
    return json.dumps({name: value for name, value in said.items() if value}).encode() + b"\n"


def read(line: bytes) -> Turn:
    """What `written` made."""
    said = json.loads(line)
    return Turn(
        arrived=tuple(_sequence(one) for one in said.get("arrived", ())),
        over=tuple((number, why) for number, why in said.get("over", ())),
        looked=said.get("looked", False),
        orders=tuple(_order(one) for one in said.get("orders", ())),
        stop=said.get("stop", False),
    )


def _of_sequence(one: Sequence) -> dict[str, Any]:
    return {
        "number": one.number,
        "prompt": list(one.prompt),
        "params": {name: getattr(one.params, name) for name in _OF_STEPS},
        "seed": one.seed,
        "limit": one.limit,
        "stops": sorted(one.stops),
        "lora": one.lora,
    }


def _sequence(said: dict[str, Any]) -> Sequence:
    """As far as steps need it. Nobody hears its answer here, and its end is told."""
    return Sequence(
        number=said["number"],
        prompt=said["prompt"],
        params=SamplingParams(**said["params"]),
        seed=said["seed"],
        limit=said["limit"],
        stops=frozenset(said["stops"]),
        lora=said["lora"],
        request=None,
        deadline=None,
        answer=Answer(len(said["prompt"]), lambda: None),
        decoding=Decoding(None, ()),
    )


def _of_order(one: Order) -> dict[str, Any]:
    error = None if one.error is None else (type(one.error).__name__, str(one.error))
    return {**asdict(replace(one, error=None)), "error": error}


def _order(said: dict[str, Any]) -> Order:
    request = said["request"] and LoRARequest(**said["request"])
    return Order(said["kind"], said["name"], said["number"], request, said["error"] and error_of(*said["error"]))
