"""What a client is told when something fails."""

from __future__ import annotations

import pytest

from areal_actors import errors
from areal_actors.proxy.failures import describe_failure


@pytest.mark.parametrize(
    ("error", "status", "retried"),
    [
        (errors.InvalidRequest("x"), 400, None),
        (errors.ContextLengthExceeded(num_tokens=9, max_tokens=8), 400, None),
        (errors.EpisodeLimitReached("x"), 400, None),
        (errors.Unauthorized("x"), 401, None),
        (errors.NotFound("x"), 404, None),
        (errors.RequestTimeout("x"), 408, None),
        (errors.Conflict("x"), 409, "false"),
        (errors.SessionEnded("x"), 410, None),
        (errors.PayloadTooLarge("x"), 413, None),
        (errors.Unprocessable("x"), 422, None),
        (errors.CapacityExhausted("x", retry_after_seconds=2.4), 429, None),
        (errors.Unavailable("x"), 503, None),
        (errors.RewardError("x"), 400, None),
        (errors.RenderError("x"), 400, None),
        (errors.ExportError("x"), 422, None),
        (errors.ActorStopped("x"), 503, None),
        (errors.EngineError("x"), 503, "true"),
        (errors.CaptureViolation("x"), 500, "false"),
        (errors.RemoteError("sessions", "ValueError", "secret"), 500, "false"),
        (ValueError("secret"), 500, "false"),
    ],
)
def test_failure_statuses_and_retries(error, status, retried):
    """Clients retry 408, 409, 429 and 5xx; they are told not to where another attempt would end alike."""
    failure = describe_failure(error, "req_1")

    assert failure.status == status
    assert failure.headers.get("x-should-retry") == retried
    # The log keeps the traceback of an engine's failure, which the client may repeat.
    assert failure.is_unforeseen is (status == 500 or type(error) is errors.EngineError)


def test_retry_after_is_in_whole_seconds():
    """``Retry-After`` has no fractions, and is never zero."""
    assert describe_failure(errors.CapacityExhausted("x", retry_after_seconds=2.4), "r").headers == {"retry-after": "3"}
    assert describe_failure(errors.Unavailable("x"), "r").headers == {"retry-after": "1"}


def test_unforeseen_failure_hides_its_cause():
    """A stranger reads the request's id, by which the log tells the story, and no word of the exception."""
    message = describe_failure(ValueError("secret"), "req_1").message

    assert "secret" not in message
    assert "req_1" in message
