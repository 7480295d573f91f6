"""From an exception to what a client reads: a status, a type, a code, and whether trying again is worth it.

Every ``RequestError`` says these itself; the others are judged here, once, for all dialects. What nobody foresaw
becomes a 500 that names the request and nothing else: its story is in the log. How a failure is worded as JSON is the
dialect's.
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
    GenerationAborted,
    InvalidRequest,
    MailboxFull,
    RenderError,
    RequestError,
    RewardError,
    Unavailable,
    Unprocessable,
    Unreachable,
)

__all__ = ["Failure", "describe_failure", "format_anthropic_failure", "format_openai_failure"]

_ABORTED = "The generation was aborted; the request may be repeated."
_BUSY = "A part of the service is starting, stopping or busy; the request may be repeated."
_MEANINGS: tuple[tuple[type[ArealError], Callable[[str], RequestError]], ...] = (
    (RewardError, partial(InvalidRequest, param="reward")),
    (RenderError, partial(InvalidRequest, param="messages")),
    (ExportError, Unprocessable),
    (GenerationAborted, lambda _: Unavailable(_ABORTED)),
    (ActorStopped, lambda _: Unavailable(_BUSY)),
    (Unreachable, lambda _: Unavailable(_BUSY)),
    (DeadlineExceeded, lambda _: Unavailable(_BUSY)),
    (MailboxFull, lambda _: Unavailable(_BUSY)),
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
_PATIENCE_SECONDS = 60.0
"""Clients wait as they are told for so long at most, and would knock in vain before a longer wait is over."""


@frozen(kw_only=True)
class Failure:
    """What a client is told. ``is_unforeseen`` failures belong in the log with their traceback."""

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
        """What tells client libraries whether, and when, to try again.

        They retry 408, 409, 429 and every 5xx unless they are told not to.
        """
        if self.status in _WORTH_RETRYING:
            seconds = self.retry_after_seconds
            if seconds is None:
                return {}
            headers = {"retry-after": str(max(1, math.ceil(seconds)))}
            return headers if seconds <= _PATIENCE_SECONDS else headers | {"x-should-retry": "false"}
        is_retried = self.status in _RETRIED_BY_CLIENTS or self.status >= 500  # noqa: PLR2004 - the server's errors
        return {"x-should-retry": "false"} if is_retried else {}


def describe_failure(error: BaseException, request_id: str) -> Failure:
    """What the client that sent ``request_id`` is told of ``error``."""
    known = _as_request_error(error)
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
    is_ours = isinstance(error, EngineError)
    message = str(error) if is_ours else f"Something unforeseen happened; the server's log tells more of {request_id}."
    code = "capture_violation" if isinstance(error, CaptureViolation) else "internal_error"
    return Failure(
        status=500, type="server_error", message=message, code=code, is_unforeseen=True, request_id=request_id
    )


def _as_request_error(error: BaseException) -> RequestError | None:
    """``error`` as one of the request's, if it is one or has a meaning for whoever asked."""
    if isinstance(error, RequestError):
        return error
    return next((say(str(error)) for kind, say in _MEANINGS if isinstance(error, kind)), None)


def format_openai_failure(failure: Failure) -> dict[str, object]:
    """The error body of OpenAI's endpoints."""
    return {
        "error": {
            "message": failure.message,
            "type": failure.type,
            "param": failure.param,
            "code": failure.code,
        }
    }


def format_anthropic_failure(failure: Failure) -> dict[str, object]:
    """The error body of Anthropic's endpoints; ``code`` and ``param`` are ours, for who knows them from OpenAI's."""
    is_servers = failure.status >= 500  # noqa: PLR2004 - the server's errors
    kind = _ANTHROPIC_TYPES.get(failure.status, "api_error" if is_servers else "invalid_request_error")
    return {
        "type": "error",
        "error": {"type": kind, "message": failure.message, "code": failure.code, "param": failure.param},
        "request_id": failure.request_id,
    }
