"""One structured log line for each request. A client cannot forge lines through its fields."""

import json
import logging
from typing import Any

log = logging.getLogger("jlora.serve")


def log_event(what: str, level: int = logging.INFO, **fields: Any) -> None:
    """Log `what {"name": value, ...}`. JSON escapes control and non-ASCII characters."""
    if log.isEnabledFor(level):
        log.log(level, "%s %s", what, json.dumps(fields, default=str).replace("\x7f", "\\u007f"))
