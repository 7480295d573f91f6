"""Every error that leaves this library.

::

    ArealError
    ├── ConfigError
    ├── ActorError ── RemoteError · ActorStopped · Unreachable · DeadlineExceeded · DeadlockError
    │   └── ProtocolError ── EncodingError
    ├── RequestError ── Unauthorized · Forbidden · NotFound · RequestTimeout · Conflict · SessionEnded · PayloadTooLarge
    │   │               Unprocessable · CapacityExhausted · QuotaExceeded · Unavailable
    │   └── InvalidRequest ── UnsupportedParameter · ContextLengthExceeded · PreviousNotFound · EpisodeLimitReached
    ├── RewardError · ExportError · RenderError · JournalError
    ├── EngineError ── EngineInterrupted · EngineLost · CaptureViolation
    ├── EpisodeError · SandboxError ── SandboxLimit
    ├── ModelError · DatasetError · WorkflowError · CustomFunctionError · RunDirectoryError
    └── SchedulerError · CheckpointError · TrainingDiverged · GangError · TrainingStalled

A message says what happened, to what, and what to do about it. HTTP statuses are attributes, chosen so that client
libraries retry exactly what is worth retrying (408, 409, 429 and 5xx are retried by the SDKs; the rest is not).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar


class ArealError(Exception):
    """Base class of all errors that this library raises deliberately."""


class ConfigError(ArealError):
    """The configuration is invalid. ``problems`` lists every mistake, each with its path."""

    def __init__(self, problems: tuple[str, ...] | str) -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        head = "" if len(self.problems) == 1 else f"{len(self.problems)} mistakes in the configuration:\n  "
        super().__init__(head + "\n  ".join(self.problems))


# --------------------------------------------------------------------------------------------------- actors


class ActorError(ArealError):
    """An ask ended without a reply."""


class RemoteError(ActorError):
    """The handler raised an exception.

    Type name, message and traceback are transferred as text; exception objects never cross a process boundary.
    """

    def __init__(self, actor: str, type_name: str, message: str, traceback: str = "") -> None:
        super().__init__(f"{actor}: {type_name}: {message}")
        self.actor = actor
        self.type_name = type_name
        self.message = message
        self.traceback = traceback


class ActorStopped(ActorError):
    """The actor has stopped, possibly before it processed this message."""


class Unreachable(ActorError):
    """The connection to the actor is lost. ``sent`` tells whether the message may have arrived."""

    def __init__(self, message: str, *, sent: bool) -> None:
        super().__init__(message)
        self.sent = sent


class DeadlineExceeded(ActorError, TimeoutError):
    """The deadline passed while the message was queued or its handler ran."""


class DeadlockError(ActorError):
    """The ask would wait for an actor that waits for the asker."""


class ProtocolError(ActorError):
    """An actor class, a handler or a message does not fit its protocol."""


class EncodingError(ProtocolError):
    """A message or an answer has a value that cannot be sent to another process, and would have it again."""


# ------------------------------------------------------------------------------------------------- requests


class RequestError(ArealError):
    """A client's request cannot be served; its SDK reads ``status``, ``type`` and ``code``.

    ``param`` names the request field at fault, if there is one. ``code`` and ``retry_after_seconds`` are by default
    those of the class.
    """

    status: ClassVar[int] = 400
    type: ClassVar[str] = "invalid_request_error"
    code: str | None = None
    retry_after_seconds: float | None = None

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code
        if retry_after_seconds is not None:
            self.retry_after_seconds = retry_after_seconds


class InvalidRequest(RequestError):
    """The request is malformed."""


class UnsupportedParameter(InvalidRequest):
    """The field would change the answer, and is not supported here."""

    code = "unsupported_parameter"


class ContextLengthExceeded(InvalidRequest):
    """The prompt does not fit; the message is worded so that every known client recognises it."""

    code = "context_length_exceeded"

    def __init__(self, *, num_tokens: int, max_tokens: int) -> None:
        super().__init__(
            f"prompt is too long: This model's maximum context length is {max_tokens} tokens, "
            f"however the request has {num_tokens} tokens. Shorten the messages or ask for fewer new tokens.",
            param="messages",
        )
        self.num_tokens = num_tokens
        self.max_tokens = max_tokens


class PreviousNotFound(InvalidRequest):
    """A request refers to a previous answer that its session has not given; worded as by OpenAI."""

    code = "previous_response_not_found"
    field: ClassVar[str] = "previous_response_id"

    def __init__(self, interaction: str) -> None:
        super().__init__(f"Previous response with id '{interaction}' not found.", param=self.field)
        self.interaction = interaction


class EpisodeLimitReached(InvalidRequest):
    """The episode has had all the turns or tokens that its run allows."""

    code = "episode_limit_reached"


class Unauthorized(RequestError):
    """The key is missing, or does not grant access."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class Forbidden(RequestError):
    """The key grants other access to its session: a completion key cannot set rewards."""

    status = 403
    type = "permission_error"
    code = "completion_key"


class NotFound(RequestError):
    """The session, interaction or route does not exist."""

    status = 404
    type = "not_found_error"
    code = "not_found"


class RequestTimeout(RequestError):
    """The client was too slow to send the announced body."""

    status = 408
    code = "request_timeout"


class Conflict(RequestError):
    """The request contradicts the current state."""

    status = 409
    code = "conflict"


class SessionEnded(RequestError):
    """The session has ended, and accepts no more completions."""

    status = 410
    code = "session_ended"


class PayloadTooLarge(RequestError):
    """The body is larger than the proxy accepts."""

    status = 413
    code = "payload_too_large"


class Unprocessable(RequestError):
    """The body is well-formed, but has the wrong shape."""

    status = 422
    code = "unprocessable"


class CapacityExhausted(RequestError):
    """There is no capacity for another session at present."""

    status = 429
    type = "rate_limit_error"
    code = "capacity_exhausted"
    retry_after_seconds = 1.0


class QuotaExceeded(RequestError):
    """A user has used up a quota; there is room again after ``retry_after_seconds``."""

    status = 429
    type = "rate_limit_error"
    code = "quota_exceeded"
    retry_after_seconds = 1.0


class Unavailable(RequestError):
    """The service is starting or stopping, or has lost its engine."""

    status = 503
    type = "server_error"
    code = "unavailable"
    retry_after_seconds = 1.0


# ----------------------------------------------------------------------------------------- sessions, tokens


class RewardError(ArealError):
    """A reward is not a finite number, or names an interaction that does not exist."""


class ExportError(ArealError):
    """Training rows cannot be built."""


class RenderError(ArealError):
    """The chat template rejects these messages."""


# -------------------------------------------------------------------------------------------------- engines


class EngineError(ArealError):
    """The engine failed to generate, to load weights, or to pause."""


class EngineInterrupted(EngineError):
    """The engine has ended a generation early on purpose; it continues after the tokens sampled so far."""


class EngineLost(EngineError):
    """The engine has lost its server, and takes no requests until the server is back with its weights."""


class CaptureViolation(EngineError):
    """The engine reported ids, log-probabilities or versions that are impossible.

    ``kind`` names the fault (``domain.CaptureFault``), ``evidence`` holds the affected rows as plain JSON.
    """

    def __init__(self, message: str, *, kind: str = "", evidence: Sequence[Mapping[str, object]] = ()) -> None:
        super().__init__(f"{kind}: {message}" if kind else message)
        self.kind = kind
        self.evidence = tuple(evidence)


# ---------------------------------------------------------------------------------------- episodes, training


class EpisodeError(ArealError):
    """One episode failed. It is recorded and rejected; the other episodes of its group continue.

    ``traceback`` is the traceback of the agent's exception as text, or empty.
    """

    def __init__(self, message: str = "", *, traceback: str = "") -> None:
        super().__init__(message)
        self.traceback = traceback


class ModelError(ArealError):
    """The model cannot be found, read or converted."""


class DatasetError(ArealError):
    """The problems cannot be found or read."""


class WorkflowError(ArealError):
    """The workflow cannot be imported, or is not a workflow."""


class CustomFunctionError(ArealError):
    """A function that the configuration names cannot be imported, raised, or returned an invalid result."""


class RunDirectoryError(ArealError):
    """The files of a run cannot be written, or a directory contains no run."""


class JournalError(ArealError):
    """Events cannot be written to the journal, or a journal cannot be read."""


class SandboxError(ArealError):
    """A sandbox cannot be opened here, has ended, or cannot give or take a file."""


class SandboxLimit(SandboxError):
    """A command in a sandbox exceeded the limit that the setting ``limit`` names."""

    def __init__(self, message: str, *, limit: str) -> None:
        super().__init__(message)
        self.limit = limit


class SchedulerError(ArealError):
    """A worker cannot be placed, or the cluster rejects a request."""


class CheckpointError(ArealError):
    """A checkpoint cannot be written, or does not fit the run."""


class TrainingDiverged(ArealError):
    """The loss or the gradient norm is not a finite number."""


class GangError(ArealError):
    """The processes that train one policy together have lost each other, or do not hold the same policy."""


class TrainingStalled(ArealError):
    """The groups of a step did not arrive within the time allowed for it."""
