"""Mapping of exceptions to what a client receives: a status, a type, a code, and advice on whether to retry.

A ``RequestError`` carries these itself; all other exceptions are mapped here, once for all dialects. An unexpected
exception becomes a 500 that names only the request; its traceback is in the log. The dialect formats a failure as JSON.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from attrs import frozen

from areal_actors.errors import (
    ActorStopped,
    ArealError,
    CaptureViolation,
    DeadlineExceeded,
    EngineError,
    ExportError,
    InvalidRequest,
    PreviousNotFound,
    RenderError,
    RequestError,
    RewardError,
    Unavailable,
    Unprocessable,
    Unreachable,
)

_BUSY = "A part of the service is starting, stopping or busy; the request may be repeated."
_MEANINGS: tuple[tuple[type[ArealError], Callable[[str], RequestError]], ...] = (
    (RewardError, partial(InvalidRequest, param="reward")),
    (RenderError, partial(InvalidRequest, param="messages")),
    (ExportError, Unprocessable),
    (ActorStopped, lambda _: Unavailable(_BUSY)),
    (Unreachable, lambda _: Unavailable(_BUSY)),
    (DeadlineExceeded, lambda _: Unavailable(_BUSY)),
)
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_RETRIED_BY_CLIENTS = frozenset({408, 409, 429})
_WORTH_RETRYING = frozenset({408, 429, 503})
PATIENCE_SECONDS = 60.0
"""The longest ``retry-after`` that clients obey; told to wait longer, they would retry too early and in vain."""


@frozen(kw_only=True)
class Failure:
    """An error as it is reported to a client. ``is_unforeseen`` failures are logged with their traceback."""

    status: int
    type: str
    message: str
    code: str | None = None
    param: str | None = None
    retry_after_seconds: float | None = None
    is_unforeseen: bool = False
    request_id: str | None = None

    @property
    def headers(self) -> dict[str, str]:
        """The headers that tell client libraries whether and when to retry.

        They retry 408, 409, 429 and every 5xx unless ``x-should-retry`` is ``false``.
        """
        if self.status in _WORTH_RETRYING:
            seconds = self.retry_after_seconds
            if seconds is None:
                return {"x-should-retry": "true"} if self.status == 503 else {}  # noqa: PLR2004 - unavailable
            headers = {"retry-after": str(max(1, math.ceil(seconds)))}
            return headers if seconds <= PATIENCE_SECONDS else headers | {"x-should-retry": "false"}
        is_retried = self.status in _RETRIED_BY_CLIENTS or self.status >= 500  # noqa: PLR2004 - the server's errors
        return {"x-should-retry": "false"} if is_retried else {}


def describe_failure(error: BaseException, request_id: str) -> Failure:
    """Return the failure to report for ``error`` to the client that sent ``request_id``."""
    known = error if isinstance(error, RequestError) else None
    if known is None:
        known = next((say(str(error)) for kind, say in _MEANINGS if isinstance(error, kind)), None)
    if known is not None:
        return Failure(
            status=known.status,
            type=known.type,
            message=known.message,
            code=known.code,
            param=known.param,
            retry_after_seconds=known.retry_after_seconds,
            request_id=request_id,
        )
    # The message of an ``EngineError`` says what is wrong with the engine; other unexpected messages stay in the log.
    status, message, code = 500, f"Something unforeseen happened; the server's log tells more of {request_id}.", None
    if isinstance(error, CaptureViolation):
        # The engine reports impossible values. A repetition would be sampled by the same engine.
        message, code = str(error), "capture_violation"
    elif isinstance(error, EngineError):
        # An inference server that is down or restarts answers again later, and another replica may answer at once.
        status, message, code = 503, str(error), "engine_error"
    return Failure(
        status=status,
        type="server_error",
        message=message,
        code=code or "internal_error",
        is_unforeseen=True,
        request_id=request_id,
    )


def format_openai_failure(failure: Failure) -> dict[str, object]:
    """Return the error body of OpenAI's endpoints."""
    return {
        "error": {
            "message": failure.message,
            "type": failure.type,
            "param": failure.param,
            "code": failure.code,
        }
    }


def format_anthropic_failure(failure: Failure) -> dict[str, object]:
    """Return the error body of Anthropic's endpoints.

    ``code`` and ``param`` are additions, for clients that know them from OpenAI's errors.
    """
    is_servers = failure.status >= 500  # noqa: PLR2004 - the server's errors
    kind = _ANTHROPIC_TYPES.get(failure.status, "api_error" if is_servers else "invalid_request_error")
    error: dict[str, object] = {
        "type": kind,
        "message": failure.message,
        "code": failure.code,
        "param": failure.param,
    }
    if failure.code == PreviousNotFound.code:
        # Anthropic's SDK then starts another thread with the whole history.
        error["details"] = {"error_code": "thread_not_found"}
    return {"type": "error", "error": error, "request_id": failure.request_id}
