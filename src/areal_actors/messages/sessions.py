"""Messages to the session manager, and to the intake that is notified of sessions that end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import field, frozen

from areal_actors.domain import (
    Answer,
    Attempt,
    CompletionRequest,
    Credential,
    Episode,
    EpisodeLimits,
    GroupId,
    Interaction,
    InteractionId,
    KeyId,
    SampleKey,
    SessionId,
    SessionRecord,
    StreamItem,
)
from areal_actors.kernel import Message, Ref, StreamMessage


class Sessions:
    """Address of the session manager: sessions, their keys, their interaction trees, their rewards."""


@frozen(kw_only=True)
class SessionOpened:
    """A new session with its full-access key and its completion key.

    The completion key opens the session for completions only.
    """

    session: SessionId
    api_key: str = field(repr=False)
    completion_key: str = field(repr=False)
    role_keys: Mapping[str, str] = field(factory=dict, repr=False)
    """Completion keys whose requests have a role, by role."""


@frozen(kw_only=True)
class SessionClosed:
    """An ended session."""

    session: SessionId
    num_interactions: int


@frozen(kw_only=True)
class OpenSession(Message[Sessions, SessionOpened]):
    """Start a session. ``task`` becomes the readable prefix of its id; ``key`` seeds its samples.

    ``permit`` is returned when the session ends or expires, if it was claimed for this session alone. ``user_key`` is
    the key of the ``user`` who opens the session. An ``is_durable`` session survives the process if there is a journal;
    it is meant for agents that this run cannot run again.

    Raises ``Conflict`` when ``api_key`` is in use by a live session, ``QuotaExceeded`` when ``user`` has ``max_live``
    live sessions already, ``Unavailable`` when a durable session cannot be written to the journal.
    """

    task: str
    api_key: str | None = field(default=None, repr=False)
    group: GroupId | None = None
    key: SampleKey | None = None
    permit: int | None = None
    metadata: Mapping[str, Any] = field(factory=dict)
    user: str | None = None
    user_key: KeyId | None = None
    max_live: int | None = None
    is_durable: bool = False
    roles: tuple[str, ...] = ()
    """Roles to issue a completion key for."""
    max_tokens: int | None = None
    """The most tokens that an answer may have; requests for more get this many."""
    limits: EpisodeLimits = field(factory=EpisodeLimits)
    limited_roles: tuple[str, ...] | None = None
    """The roles whose requests count for ``limits``; ``None`` counts all."""
    is_trained: bool = False
    """Whether its tokens are meant to be trained, so that the run may choose their temperature."""


@frozen(kw_only=True)
class Complete(Message[Sessions, tuple[Answer, ...]]):
    """Answer a request with one ``Answer`` per choice, remembered as siblings in the session's tree.

    Raises the ``RequestError`` that the client should see. Cancelling the ask aborts the generation and keeps the
    sampled tokens as a cancelled interaction. A retry, recognised by ``attempt``, joins or repeats the first answer.
    """

    credential: Credential
    request: CompletionRequest
    attempt: Attempt | None = None
    traceparent: str | None = None
    """The span of the request, if it is traced (W3C)."""


@frozen(kw_only=True)
class StreamComplete(StreamMessage[Sessions, StreamItem]):
    """Answer a request as ``Complete`` does, with deltas while tokens are sampled.

    Each choice begins with ``AnswerStarted``, before its first delta, and ends with its ``Answer``.
    """

    credential: Credential
    request: CompletionRequest
    attempt: Attempt | None = None
    traceparent: str | None = None


@frozen(kw_only=True)
class CountTokens(Message[Sessions, int]):
    """Return the length of the prompt of ``request`` within its session, without recording or sampling anything."""

    credential: Credential
    request: CompletionRequest


@frozen(kw_only=True)
class DescribeAnswer(Message[Sessions, Interaction]):
    """Return a completed answer of the session that a credential opens for completions.

    Raises ``NotFound`` if there is none with this id.
    """

    credential: Credential
    interaction: InteractionId


@frozen(kw_only=True)
class CheckCredential(Message[Sessions, SessionId]):
    """Return the session that a credential opens for completions. Raises as ``Complete`` does if it opens none."""

    credential: Credential


@frozen(kw_only=True)
class SetReward(Message[Sessions, InteractionId]):
    """Assign a reward to one interaction, or to the last completed one; replies with its id. Setting twice replaces.

    With ``is_outcome``, a reward of the last interaction is the outcome of the whole episode, even if others have
    rewards.
    """

    credential: Credential
    reward: float
    interaction: InteractionId | None = None
    is_outcome: bool = False


@frozen(kw_only=True)
class LogNumbers(Message[Sessions, None]):
    """Log named numbers of a session, for the metrics of the step that trains it. A known name is replaced.

    Numbers are accepted as long as rewards are, and are not written to the journal. Raises ``InvalidRequest`` for a
    value that is not a number.
    """

    credential: Credential
    numbers: Mapping[str, float]


@frozen(kw_only=True)
class EndSession(Message[Sessions, SessionClosed]):
    """End a session. Completions are refused from now on; rewards are accepted during the grace period."""

    credential: Credential
    final_reward: float | None = None


@frozen(kw_only=True)
class SessionsView:
    """The session manager's counters: live and ended sessions, pending answers, recognised retries.

    ``num_failed_journals`` is 1 if the journal can no longer be written.
    """

    num_live: int
    num_ended: int
    num_pending: int
    num_retries: int = 0
    num_failed_journals: int = 0


@frozen(kw_only=True)
class DescribeSessions(Message[Sessions, SessionsView]):
    """Return the counters, for monitoring."""


@frozen(kw_only=True)
class SessionOwner:
    """The user who started a session; ``None`` if no user key was used."""

    session: SessionId
    user: str | None = None
    user_key: KeyId | None = None


@frozen(kw_only=True)
class DescribeOwner(Message[Sessions, SessionOwner]):
    """Return the owner of the session that a credential opens.

    Raises ``NotFound`` or ``Unauthorized`` if it opens none.
    """

    credential: Credential


@frozen(kw_only=True)
class CollectSession(Message[Sessions, SessionRecord]):
    """Return a copy of a session's current state. The session is kept."""

    session: SessionId


@frozen(kw_only=True)
class ForgetSession(Message[Sessions, None]):
    """Free the memory of a session whose rows were delivered. Unknown sessions are ignored."""

    session: SessionId


class Intake:
    """Address of the intake, which makes training data from the sessions that external agents finish."""


@frozen(kw_only=True)
class WatchSessions(Message[Sessions, None]):
    """Notify ``watcher`` of every session that ends or expires from now on."""

    watcher: Ref[Intake]


# ---------------------------------------------------------------------------------------------------------- intake


@frozen(kw_only=True)
class StartSession(Message[Intake, SessionOpened]):
    """Start a session whose trajectory is to be trained.

    Sessions of the same ``group`` share a permit and are compared with one another. ``position``, ``member`` and
    ``seed`` key the session's samples like those of a dataset's group; by default they are counted. Raises
    ``CapacityExhausted`` at once if there is no room for another group, and ``Conflict`` for values that do not fit the
    group. The last five fields are as in ``OpenSession``; a group belongs to one ``user``.
    """

    task: str
    api_key: str | None = field(default=None, repr=False)
    group: str | None = None
    group_size: int | None = None
    position: int | None = None
    member: int | None = None
    seed: int | None = None
    metadata: Mapping[str, Any] = field(factory=dict)
    user: str | None = None
    user_key: KeyId | None = None
    max_live: int | None = None
    roles: tuple[str, ...] = ()


@frozen(kw_only=True)
class TrainingEnded(Message[Intake, None]):
    """News: training is over. Sessions that start from now on are answered, and forgotten when they end."""


@frozen(kw_only=True)
class SessionFinished(Message[Intake, None]):
    """News: a session ended or expired. With ``is_final``, no more rewards are expected."""

    session: SessionId
    is_final: bool = False
    is_expired: bool = False


@frozen(kw_only=True)
class TakenSession:
    """A finished session that is lent, and its rows."""

    record: SessionRecord
    episode: Episode


@frozen(kw_only=True)
class TakeSession(Message[Intake, TakenSession]):
    """Wait for the next finished session, in a service without a trainer. It is lent to ``taker``, a unique name."""

    taker: str


@frozen(kw_only=True)
class SettleTaken(Message[Intake, None]):
    """Settle the loan to ``taker``: the session is kept and may be forgotten, or goes to the next taker.

    Settling twice is harmless.
    """

    taker: str
    is_kept: bool
