"""HTTP errors: status, type and body, compatible with vLLM's server and OpenAI's clients."""

import math
from typing import Any

from jlora.errors import (
    AdapterAccessError,
    AdapterFormatError,
    AdapterMismatchError,
    AdapterNotFoundError,
    AdapterUnavailableError,
    LoadTimeoutError,
    LoRAError,
    LoRAUsageError,
    NoFreeSlotError,
)
from jlora.serve.engine.request import EngineBusyError, EngineClosedError, RequestTimeoutError

BAD_REQUEST, NOT_FOUND, INTERNAL = "BadRequestError", "NotFoundError", "InternalServerError"
FORBIDDEN, UNAVAILABLE = "PermissionDeniedError", "ServiceUnavailableError"
INVALID_INPUT = "InvalidUserInput"  # error type of a bad request at vLLM's LoRA endpoints

_RETRY = 1.0  # default Retry-After, in seconds
_LONGEST = 2000


class ApiError(Exception):
    """An error response: `{"error": {"message", "type", "param", "code"}}`.

    Attributes:
      status: HTTP status, and `code` in the body.
      kind: `type` in the body.
      message: `message` in the body, cut at 2,000 characters.
      param: Name of the wrong field.
      retry_after: Seconds for the Retry-After header.
      logged: True if the log has the message already.
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
        """Return the JSON body."""
        # The message may quote client input with an unpaired surrogate, which UTF-8 cannot encode.
        message = self.message.encode("utf-8", "backslashreplace").decode()
        error = {"message": message, "type": self.kind, "param": self.param, "code": self.status}
        # Older vLLM LoRA endpoints had these fields at the top level; production-stack still reads them there.
        return {"error": error, **(error if self.kind == INVALID_INPUT else {})}

    def headers(self) -> dict[str, str]:
        """Return the extra headers."""
        found = {"www-authenticate": "Bearer"} if self.status == 401 else {}
        return found if self.retry_after is None else {**found, "retry-after": str(max(1, math.ceil(self.retry_after)))}


def bad_request(message: str, param: str | None = None) -> ApiError:
    """Return a 400 error."""
    return ApiError(400, BAD_REQUEST, message, param)


def invalid_input(message: str, param: str | None = None) -> ApiError:
    """Return a 400 error with the type of vLLM's LoRA endpoints."""
    return ApiError(400, INVALID_INPUT, message, param)


def no_such_model(name: str) -> ApiError:
    """Return a 404 error for an unknown model."""
    return ApiError(404, NOT_FOUND, f"The model `{name[:256]}` does not exist.", "model")


def of_generation(error: LoRAError, model: str) -> ApiError:
    """Return the response for an engine error that refused or ended a request for `model`."""
    if isinstance(error, EngineBusyError):
        return ApiError(429, "TooManyRequestsError", str(error), retry_after=error.retry_after)
    if isinstance(error, EngineClosedError):
        return ApiError(503, UNAVAILABLE, str(error), retry_after=_RETRY)
    if isinstance(error, RequestTimeoutError):
        return ApiError(504, "TimeoutError", str(error))
    if isinstance(error, AdapterUnavailableError):  # the name may be listed, or exist on the hub
        return ApiError(503, UNAVAILABLE, str(error), retry_after=_RETRY)
    if isinstance(error, AdapterAccessError):
        return ApiError(403, FORBIDDEN, str(error), "model")
    if isinstance(error, AdapterNotFoundError):
        return no_such_model(model)
    if isinstance(error, AdapterFormatError | AdapterMismatchError):  # the adapter exists but cannot be served
        return bad_request(str(error), "model")
    if isinstance(error, NoFreeSlotError | LoadTimeoutError):
        return ApiError(503, UNAVAILABLE, str(error), retry_after=_RETRY)
    if isinstance(error, LoRAUsageError):
        return bad_request(str(error))
    return ApiError(500, INTERNAL, str(error))
