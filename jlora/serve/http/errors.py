"""Errors as answers: status, type and body, as vLLM's server and OpenAI's clients know them."""

import math
from typing import Any

from jlora.errors import (
    AdapterFormatError,
    AdapterMismatchError,
    AdapterNotFoundError,
    LoadTimeoutError,
    LoRAError,
    LoRAUsageError,
    NoFreeSlotError,
)
from jlora.serve.engine.request import EngineBusyError, EngineClosedError, RequestTimeoutError

BAD_REQUEST, NOT_FOUND, INTERNAL = "BadRequestError", "NotFoundError", "InternalServerError"
UNAVAILABLE = "ServiceUnavailableError"
INVALID_INPUT = "InvalidUserInput"  # what vLLM's LoRA endpoints call a bad request

_RETRY = 1.0  # seconds that a client is asked to wait where nobody knows better
_LONGEST = 2000


class ApiError(Exception):
    """An answer that is an error: `{"error": {"message", "type", "param", "code"}}`.

    Attributes:
      status, kind, message: of the answer; the status is `code` in its body, and the kind `type`.
      param: the field at fault.
      retry_after: seconds, for the header of that name.
      logged: whether the log has the message already.
    """

    def __init__(
        self,
        status: int,
        kind: str,
        message: str,
        param: str | None = None,
        retry_after: float | None = None,
        logged: bool = False,
    ):
        super().__init__(message)
        self.status, self.kind, self.param, self.retry_after = status, kind, param, retry_after
        self.logged = logged
        self.message = message if len(message) <= _LONGEST else message[: _LONGEST - 4] + " ..."

    def body(self) -> dict[str, Any]:
        # What a client sent may be in it: half a surrogate pair has no UTF-8.
        message = self.message.encode("utf-8", "backslashreplace").decode()
        error = {"message": message, "type": self.kind, "param": self.param, "code": self.status}
        # What vLLM's LoRA endpoints called a bad request lay outermost once; production-stack still reads it there.
        return {"error": error, **(error if self.kind == INVALID_INPUT else {})}

    def headers(self) -> dict[str, str]:
        found = {"www-authenticate": "Bearer"} if self.status == 401 else {}
        return found if self.retry_after is None else {**found, "retry-after": str(max(1, math.ceil(self.retry_after)))}


def bad_request(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, BAD_REQUEST, message, param)


def invalid_input(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, INVALID_INPUT, message, param)


def no_such_model(name: str) -> ApiError:
    return ApiError(404, NOT_FOUND, f"The model `{name[:256]}` does not exist.", "model")


def of_generation(error: LoRAError, model: str) -> ApiError:
    """What a request for `model` is answered that ended, or could not begin, with this error."""
    if isinstance(error, EngineBusyError):
        return ApiError(429, "TooManyRequestsError", str(error), retry_after=error.retry_after)
    if isinstance(error, EngineClosedError):
        return ApiError(503, UNAVAILABLE, str(error), retry_after=_RETRY)
    if isinstance(error, RequestTimeoutError):
        return ApiError(504, "TimeoutError", str(error))
    if isinstance(error, AdapterNotFoundError):
        return no_such_model(model)
    if isinstance(error, AdapterFormatError | AdapterMismatchError):  # found, and cannot be served
        return bad_request(str(error), "model")
    if isinstance(error, NoFreeSlotError | LoadTimeoutError):
        return ApiError(503, UNAVAILABLE, str(error), retry_after=_RETRY)
    if isinstance(error, LoRAUsageError):
        return bad_request(str(error))
    return ApiError(500, INTERNAL, str(error))
