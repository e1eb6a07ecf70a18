"""One structured line a request, and nothing in it that a client could forge a line with."""

import json
import logging
from typing import Any

log = logging.getLogger("jlora.serve")


def log_event(what: str, level: int = logging.INFO, **fields: Any) -> None:
    """`what {"name": value, ...}`: JSON escapes what is not ASCII, control characters among it."""
    if log.isEnabledFor(level):
        log.log(level, "%s %s", what, json.dumps(fields, default=str).replace("\x7f", "\\u007f"))
