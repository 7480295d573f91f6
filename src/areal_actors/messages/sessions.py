"""Messages to the session manager, and to the intake that hears of the sessions that end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import field, frozen

from areal_actors.core import Message, Ref, StreamMessage
from areal_actors.domain import (
    Answer,
    AnswerStarted,
    Attempt,
    CompletionRequest,
    Credential,
    Delta,
    Episode,
    GroupId,
    InteractionId,
    KeyId,
    SampleKey,
    SessionId,
    SessionRecord,
)

__all__ = [
    "CheckCredential",
    "CollectSession",
    "Complete",
    "CountTokens",
    "DescribeOwner",
    "DescribeSessions",
    "EndSession",
    "ForgetSession",
    "Intake",
    "LogNumbers",
    "OpenSession",
    "SessionClosed",
    "SessionFinished",
    "SessionOpened",
    "SessionOwner",
    "Sessions",
    "SessionsView",
    "SetReward",
    "SettleTaken",
    "StartSession",
    "StreamComplete",
    "TakeSession",
    "TakenSession",
    "WatchSessions",
]


class Sessions:
    """Address of the session manager: sessions, their keys, their interaction trees, their rewards."""


@frozen(kw_only=True)
class SessionOpened:
    """A new session, the key that opens it for everything, and the key that opens it for completions alone."""

    session: SessionId
    api_key: str = field(repr=False)
    completion_key: str = field(repr=False)


@frozen(kw_only=True)
class SessionClosed:
    """An ended session."""

    session: SessionId
    num_interactions: int


@frozen(kw_only=True)
class OpenSession(Message[Sessions, SessionOpened]):
    """Start a session. ``task`` becomes the readable prefix of its id; ``key`` seeds its samples.

    ``permit`` is given back when the session ends or expires, where it was claimed for this session alone. ``user_key``
    is the key of the ``user`` that opens it. ``is_durable`` has the session outlive the process, where there is a
    journal: for agents that nobody here can run again.

    Raises ``Conflict`` when ``api_key`` is in use by a live session, ``QuotaExceeded`` when ``user`` has ``max_live``
    live sessions already, ``Unavailable`` when a durable session cannot be written down.
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


@frozen(kw_only=True)
class Complete(Message[Sessions, tuple[Answer, ...]]):
    """Answer a request: one ``Answer`` per choice, remembered as siblings in the session's tree.

    Raises the ``RequestError`` that the client should read. Cancelling the ask aborts the generation and keeps what was
    sampled as a cancelled interaction. A retry, recognised by ``attempt``, joins or repeats the first answer.
    """

    credential: Credential
    request: CompletionRequest
    attempt: Attempt | None = None


@frozen(kw_only=True)
class StreamComplete(StreamMessage[Sessions, AnswerStarted | Delta | Answer]):
    """As ``Complete``, with deltas while tokens are sampled.

    Each choice begins with ``AnswerStarted``, before its first delta, and ends with its ``Answer``.
    """

    credential: Credential
    request: CompletionRequest
    attempt: Attempt | None = None


@frozen(kw_only=True)
class CountTokens(Message[Sessions, int]):
    """How many tokens the prompt of ``request`` would have, within its session; nothing is remembered or sampled."""

    credential: Credential
    request: CompletionRequest


@frozen(kw_only=True)
class CheckCredential(Message[Sessions, SessionId]):
    """Which session a credential opens for completions; raises what ``Complete`` would for one that opens none."""

    credential: Credential


@frozen(kw_only=True)
class SetReward(Message[Sessions, InteractionId]):
    """Assign a reward to one interaction, or to the last completed one; replies with its id. Setting twice replaces.

    ``is_outcome`` says that a reward of the last one is the outcome of the whole episode, whatever else has a reward.
    """

    credential: Credential
    reward: float
    interaction: InteractionId | None = None
    is_outcome: bool = False


@frozen(kw_only=True)
class LogNumbers(Message[Sessions, None]):
    """Log named numbers of a session, which stand in the metrics of the step that trains it. A known name is replaced.

    They are taken as long as rewards are, and are not in the journal. Raises ``InvalidRequest`` for what is no number.
    """

    credential: Credential
    numbers: Mapping[str, float]


@frozen(kw_only=True)
class EndSession(Message[Sessions, SessionClosed]):
    """End a session: completions come too late from now on, rewards are taken during the grace window."""

    credential: Credential
    final_reward: float | None = None


@frozen(kw_only=True)
class SessionsView:
    """The session manager's counters: live and ended sessions, answers in the making, retries that were recognised."""

    num_live: int
    num_ended: int
    num_pending: int
    num_retries: int = 0


@frozen(kw_only=True)
class DescribeSessions(Message[Sessions, SessionsView]):
    """The counters, for whoever watches the service."""


@frozen(kw_only=True)
class SessionOwner:
    """Who started a session: a user with a key, or nobody by name."""

    session: SessionId
    user: str | None = None
    user_key: KeyId | None = None


@frozen(kw_only=True)
class DescribeOwner(Message[Sessions, SessionOwner]):
    """Whose session a credential opens. Raises ``NotFound`` or ``Unauthorized`` if it opens none."""

    credential: Credential


@frozen(kw_only=True)
class CollectSession(Message[Sessions, SessionRecord]):
    """A copy of a session as it stands. It is not forgotten by being read."""

    session: SessionId


@frozen(kw_only=True)
class ForgetSession(Message[Sessions, None]):
    """Its rows were delivered: free its memory. Unknown sessions are ignored."""

    session: SessionId


class Intake:
    """Address of the intake: it makes training data of the sessions that external agents finish."""


@frozen(kw_only=True)
class WatchSessions(Message[Sessions, None]):
    """Tell ``watcher`` of every session that ends or expires from now on."""

    watcher: Ref[Intake]


# ---------------------------------------------------------------------------------------------------------- intake


@frozen(kw_only=True)
class StartSession(Message[Intake, SessionOpened]):
    """Start a session whose trajectory is to be trained.

    Sessions of the same ``group`` share a permit and are compared with one another. ``position``, ``member`` and
    ``seed`` key its samples as the members of a dataset's group are keyed; without them they are counted. Raises
    ``CapacityExhausted`` at once without room for another group, and ``Conflict`` for what does not fit its group.
    The last four are as in ``OpenSession``; groups are those of one ``user``.
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


@frozen(kw_only=True)
class SessionFinished(Message[Intake, None]):
    """News: a session ended, or was idle for too long. ``is_final``: no more rewards are awaited."""

    session: SessionId
    is_final: bool = False
    is_expired: bool = False


@frozen(kw_only=True)
class TakenSession:
    """A finished session on loan, and its rows."""

    record: SessionRecord
    episode: Episode


@frozen(kw_only=True)
class TakeSession(Message[Intake, TakenSession]):
    """Wait for the next finished session, where nobody trains on them; it is lent to ``taker``, a name of its own."""

    taker: str


@frozen(kw_only=True)
class SettleTaken(Message[Intake, None]):
    """What was lent to ``taker`` is kept and may be forgotten, or goes to the next who asks. Twice is harmless."""

    taker: str
    is_kept: bool
