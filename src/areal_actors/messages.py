"""Every message between actors, grouped by the address that it is sent to: the process graph, from top to bottom.

::

    Host ──borrows──▶ Hosting (a process for each trial, everything below in it)
      │ asks
      ▼
    Accounts
      ▲ asks
    Proxy ──asks──▶ Sessions ──asks──▶ Generation ◀──publishes── Training ──leads──▶ Ranks
      ├──borrows──▶ Models (each with Sessions and Generation of its own)
      │                ▲                                            │ ▲
      │                │ collects                             tells │ │ leases
      ├──asks──▶ Exports ◀──delivers── Rollouts ──asks──▶ Capacity ◀┘ Exports
      │            ▲                      ▲                   ▲
      │            └──delivers── Intake ──│──asks─────────────┘
      │                            ▲      │
      └──asks──────────────────────┤   Training asks (evaluation)
              Sessions tell ───────┘                       everybody ──tells──▶ Progress

What is asked is an imperative (``EndSession``); what is told is news (``VersionAdvanced``). Each message names the
type of its reply; an actor class declares the addresses whose messages it handles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

from attrs import field, frozen

from areal_actors.core import Message, Ref, StreamMessage
from areal_actors.domain import (
    Answer,
    AnswerStarted,
    Attempt,
    Chunk,
    CompletionRequest,
    Credential,
    DataPosition,
    Delta,
    EngineInfo,
    EngineRequest,
    EngineStatistics,
    Episode,
    Group,
    GroupId,
    InteractionId,
    IssuedKey,
    KeyId,
    PauseMode,
    Problem,
    Quotas,
    Role,
    SampleKey,
    ServiceView,
    SessionId,
    SessionRecord,
    Snapshot,
    TrainedModel,
    TrialId,
)

# ------------------------------------------------------------------------------------------------- capacity


class Capacity:
    """Address of the capacity granter: how many episode groups may be live."""


@frozen(kw_only=True)
class Permit:
    """The right to run one group; a lease. ``version`` is that of the newest weights when it was granted."""

    id: int
    version: int


@frozen(kw_only=True)
class CapacityView:
    """The granter's counters. ``available`` may be negative after a change of limits."""

    version: int
    running: int
    accepted: int
    reserved: int
    available: int


@frozen(kw_only=True)
class AcquirePermit(Message[Capacity, Permit]):
    """Wait until one more group may run, first come first served."""

    holder: str


@frozen(kw_only=True)
class ReservePermit(Message[Capacity, CapacityView]):
    """Put one permit aside for a session that an external agent will start (``POST /grant_capacity``).

    Raises ``CapacityExhausted`` at once when there is none.
    """


@frozen(kw_only=True)
class ClaimPermit(Message[Capacity, Permit]):
    """Take a reserved permit, or else a free one; raises ``CapacityExhausted`` at once when there is neither."""

    holder: str


@frozen(kw_only=True)
class RestorePermit(Message[Capacity, Permit]):
    """A permit for a group that an earlier process had admitted: there is no question of room."""

    holder: str


@frozen(kw_only=True)
class SettlePermit(Message[Capacity, None]):
    """The group of a permit is over: accepted as training data, or rejected and refunded. Twice is harmless."""

    permit: int
    is_accepted: bool


@frozen(kw_only=True)
class RefundGroup(Message[Capacity, None]):
    """An accepted group was dropped before it was trained (too stale): another may take its place."""


@frozen(kw_only=True)
class VersionAdvanced(Message[Capacity, None]):
    """News: a batch was consumed and new weights are served."""

    version: int


@frozen(kw_only=True)
class DescribeCapacity(Message[Capacity, CapacityView]):
    """The counters, for progress and checkpoints."""


# ------------------------------------------------------------------------------------------------- sessions


class Sessions:
    """Address of the session manager: sessions, their keys, their interaction trees, their rewards."""


@frozen(kw_only=True)
class SessionOpened:
    """A new session and the key that opens it."""

    session: SessionId
    api_key: str = field(repr=False)


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
    """Assign a reward to one interaction, or to the last completed one; replies with its id. Setting twice replaces."""

    credential: Credential
    reward: float
    interaction: InteractionId | None = None


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


# --------------------------------------------------------------------------------------------------- intake


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


# ----------------------------------------------------------------------------------------------- generation


class Generation:
    """Address of what generates: an actor that owns one engine, or a router that has several such actors behind it."""


@frozen(kw_only=True)
class Generate(StreamMessage[Generation, Chunk]):
    """Sample; the stream ends after the chunk with ``finish``. Leaving the stream early aborts in the engine."""

    request: EngineRequest


@frozen(kw_only=True)
class PublishWeights(Message[Generation, int]):
    """Load new weights between two tokens; replies with the version that is served from now on."""

    snapshot: Snapshot


@frozen(kw_only=True)
class PauseGeneration(Message[Generation, None]):
    """Stop sampling until ``ResumeGeneration``; requests wait, they are not refused."""

    mode: PauseMode = PauseMode.KEEP


@frozen(kw_only=True)
class ResumeGeneration(Message[Generation, None]):
    """Go on sampling."""


@frozen(kw_only=True)
class EngineView:
    """The engine's facts, its counters and its version at this moment."""

    info: EngineInfo
    statistics: EngineStatistics
    version: int


@frozen(kw_only=True)
class DescribeEngine(Message[Generation, EngineView]):
    """What the engine is and how it does."""


class Replicas:
    """Address of the router that deals generations out to replicas, for whoever starts and ends them."""


class ReplicaState(StrEnum):
    """How a replica stands with the router."""

    JOINING = "joining"
    """It gets no requests: it is being given the weights and the pause that hold for all, or has failed to take them.

    It is tried again and again.
    """
    SERVING = "serving"
    """It gets requests."""
    GONE = "gone"
    """It has died. Whoever brings it back adds it again."""


@frozen(kw_only=True)
class AddReplica(Message[Replicas, None]):
    """Have ``ref`` take its share as ``name``, once it has the published weights; it takes the place of a namesake.

    Replies at once; ``DescribeReplicas`` tells when it serves.
    """

    name: str
    ref: Ref[Generation]


@frozen(kw_only=True)
class RemoveReplica(Message[Replicas, None]):
    """Take a replica out; what runs there goes on at others. Replies when nothing runs there. Unknown ones are fine."""

    name: str


@frozen(kw_only=True)
class ReplicaView:
    """One replica as the router sees it. ``error`` says why it does not serve, or why it last did not."""

    name: str
    state: ReplicaState
    version: int | None = None
    num_running: int = 0
    error: str | None = None


@frozen(kw_only=True)
class DescribeReplicas(Message[Replicas, tuple[ReplicaView, ...]]):
    """All replicas, in the order in which they were added."""


# --------------------------------------------------------------------------------------------------- models


class Models:
    """Address of the host of trained models: what answers a request for other weights than the policy's."""


@frozen(kw_only=True)
class ModelInUse:
    """What answers in the place of the policy: sessions, the one that is open there, and the text of token ids."""

    sessions: Ref[Sessions]
    credential: Credential
    decode: Callable[[Sequence[int]], str]


@frozen(kw_only=True)
class UseModel(StreamMessage[Models, ModelInUse]):
    """Borrow the model called ``experiment/trial``: one item once it is loaded, none if there is no such model.

    It stays open until the stream is left, which may be at any time. Raises ``Unprocessable`` for weights that cannot
    be loaded, and ``Unavailable`` where no place became free in time.
    """

    name: str


@frozen(kw_only=True)
class ListModels(Message[Models, tuple[TrainedModel, ...]]):
    """All models that can be borrowed, loaded or not, by name."""


# -------------------------------------------------------------------------------------------------- exports


class Exports:
    """Address of the exporter: from ended sessions to training rows, and the queue of finished groups."""


@frozen(kw_only=True)
class ExportSession(Message[Exports, Episode]):
    """The training rows of an ended session. Asking again, also with another discount, builds them again."""

    session: SessionId
    discount: float | None = None
    style: str | None = None
    member: int = 0


@frozen(kw_only=True)
class DeliverGroup(Message[Exports, bool]):
    """A finished group. Replies whether it is accepted as training data; delivering it twice queues it once."""

    group: Group


@frozen(kw_only=True)
class Lease:
    """Groups on loan to the trainer. ``dropped`` counts groups that had become too stale since the last lease."""

    id: int
    groups: tuple[Group, ...]
    dropped: int = 0


@frozen(kw_only=True)
class LeaseGroups(Message[Exports, Lease]):
    """Wait for ``num_groups`` groups that are at most ``max_staleness`` versions older than ``version``.

    They come in order of their problems. An unacknowledged lease is offered again, as it was.
    """

    num_groups: int
    version: int
    max_staleness: int


@frozen(kw_only=True)
class AcknowledgeLease(Message[Exports, DataPosition]):
    """The groups of a lease were trained: forget them. Replies with how far the problems have been consumed."""

    lease: int


@frozen(kw_only=True)
class SaveVersion(Message[Exports, None]):
    """The weights of ``version`` are safe on disk: what they were trained with need not be kept any longer."""

    version: int


# ------------------------------------------------------------------------------------------------- rollouts


class Rollouts:
    """Address of the rollout runner: it runs agents, in groups, each episode in a scope of its own."""


@frozen(kw_only=True)
class Evaluate(Message[Rollouts, tuple[Group, ...]]):
    """Run the agent once on every held-out problem with the weights now served, and report the episodes."""

    version: int


@frozen(kw_only=True)
class RunProblem(Message[Rollouts, Group]):
    """Run one group by hand, outside the training data and its capacity."""

    problem: Problem
    num_episodes: int = 1


# ------------------------------------------------------------------------------------------------- training


class Training:
    """Address of the trainer."""


@frozen(kw_only=True)
class RequestStop(Message[Training, None]):
    """Finish the step that is running, write a checkpoint, and stop."""

    reason: str


@frozen(kw_only=True)
class TrainingSummary:
    """How a run ended."""

    steps: int
    version: int
    is_finished: bool
    """Whether all steps were done, or training stopped early because its goal was reached."""
    stop_reason: str | None = None


@frozen(kw_only=True)
class AwaitTraining(Message[Training, TrainingSummary]):
    """Wait for the end of training."""


@frozen(kw_only=True)
class SaveWeights(Message[Training, None]):
    """Write the trained weights where people find them, once training is finished."""


class Ranks:
    """Address of a process that trains along: one rank of a gang, beside the first, which is the trainer's.

    All ranks are asked for the same, in the same order; the answer says that it is done.
    """


@frozen(kw_only=True)
class JoinGang(Message[Ranks, None]):
    """Meet the other ranks at the store that the first one has opened, and hold a part of the weights from then on.

    ``engine_dtype`` is what the engine computes in. Raises ``GangError`` if the ranks do not hold the same policy.
    """

    host: str
    port: int
    rank: int
    engine_dtype: str


@frozen(kw_only=True)
class TrainAlong(Message[Ranks, None]):
    """Take a step on ``groups``. What the first rank refuses is refused here as well, and is no error of this rank."""

    groups: tuple[Group, ...]
    max_staleness: int | None = None


@frozen(kw_only=True)
class GatherWeights(Message[Ranks, None]):
    """Give the first rank this one's part of the weights, and ``with_moments`` that of the optimiser's state."""

    with_moments: bool = False


# ------------------------------------------------------------------------------------------------- progress


class Progress:
    """Address of the reporter: metrics, dumps, display."""


@frozen(kw_only=True)
class PhaseChanged(Message[Progress, None]):
    """News: the run entered a phase that a person may wait for (loading, evaluating, saving …)."""

    phase: str
    detail: str = ""


@frozen(kw_only=True)
class EpisodeFinished(Message[Progress, None]):
    """News: an episode is over. ``is_repeated``: an earlier process, since killed, may have told of it."""

    episode: Episode
    problem: Problem
    version: int
    is_eval: bool = False
    is_repeated: bool = False


@frozen(kw_only=True)
class SessionArchived(Message[Progress, None]):
    """News: the whole tree of a session, for dumps and the run report."""

    record: SessionRecord
    episode: Episode
    problem: Problem
    is_eval: bool = False


@frozen(kw_only=True)
class StepFinished(Message[Progress, None]):
    """News: a training step, as one flat record of numbers (see ``docs/metrics.md`` for every key)."""

    step: int
    metrics: Mapping[str, float | int | None]


@frozen(kw_only=True)
class EvaluationFinished(Message[Progress, None]):
    """News: the mean reward on held-out problems under ``version``."""

    version: int
    reward: float
    num_episodes: int
    num_failed: int
    seconds: float


# ------------------------------------------------------------------------------------------------- accounts


class Accounts:
    """Address of the keeper of accounts: users, their keys, what they may use and have used."""


@frozen(kw_only=True)
class CreateKey(Message[Accounts, IssuedKey]):
    """Issue a key; it is on disk when the reply comes, which alone carries its secret.

    A new ``user`` is made; of a known one, what is given here replaces what was.
    """

    user: str
    experiment: str | None = None
    trial: str | None = None
    quotas: Quotas = field(factory=Quotas)
    expires_at: float | None = None


@frozen(kw_only=True)
class ListKeys(Message[Accounts, tuple[IssuedKey, ...]]):
    """Every key that was issued, revoked ones too."""


@frozen(kw_only=True)
class RevokeKey(Message[Accounts, IssuedKey]):
    """Let a key open nothing any more; on disk when the reply comes. Twice is harmless; raises ``NotFound``."""

    key: KeyId


@frozen(kw_only=True)
class IdentifyUser(Message[Accounts, IssuedKey]):
    """Whose key this is. Raises ``Unauthorized`` unless it is valid."""

    secret: str = field(repr=False)


@frozen(kw_only=True)
class AdmitUser(Message[Accounts, IssuedKey]):
    """Let the owner of a key ask for a completion, and count it.

    Raises ``Unauthorized`` unless the key is valid, ``QuotaExceeded`` if the user has used up what was granted. Without
    ``is_counted``, validity alone is looked at.
    """

    key: KeyId
    is_counted: bool = True


@frozen(kw_only=True)
class TokensSampled(Message[Accounts, None]):
    """News: so many tokens were sampled for a user."""

    user: str
    num_tokens: int


@frozen(kw_only=True)
class HasKeys(Message[Accounts, bool]):
    """Whether any key was ever issued."""


# -------------------------------------------------------------------------------------------------- hosting


class Hosting:
    """Address of the launcher: services of many trials, each in a process of its own."""


@frozen(kw_only=True)
class ServiceInUse:
    """A service that listens, and the key that opens it."""

    trial: TrialId
    url: str
    admin_key: str = field(repr=False)


@frozen(kw_only=True)
class UseService(StreamMessage[Hosting, ServiceInUse]):
    """Borrow the service of a trial for one request: one item once it listens, which may take its start.

    It is not stopped before the stream is left. Raises ``Unavailable`` where it does not listen in time or there is no
    room for it, ``SessionEnded`` if its training is finished.
    """

    trial: TrialId


@frozen(kw_only=True)
class VisitSession(StreamMessage[Hosting, ServiceInUse]):
    """Borrow the service called ``home``, where a session lives that is named by its id or its key.

    No item if there is no such service, or if it has no process and no such session. Raises as ``UseService`` does.
    """

    home: str
    name: str = field(repr=False)


@frozen(kw_only=True)
class ListServices(Message[Hosting, tuple[ServiceView, ...]]):
    """All services that have ever been started here, by name."""


@frozen(kw_only=True)
class StopServices(Message[Hosting, None]):
    """Stop all services, each with a checkpoint, and start none any more; the reply comes when they have ended."""


# ---------------------------------------------------------------------------------------------------- proxy


class Serving:
    """Address of the HTTP proxy."""


@frozen(kw_only=True)
class Endpoint:
    """Where the proxy listens. ``base_url`` ends in ``/v1``."""

    url: str
    admin_key: str = field(repr=False)

    @property
    def base_url(self) -> str:
        """What an OpenAI SDK takes."""
        return f"{self.url}/v1"

    def session_base_url(self, session: SessionId) -> str:
        """The OpenAI base URL of one session."""
        return f"{self.url}/{session}/v1"


@frozen(kw_only=True)
class DescribeEndpoint(Message[Serving, Endpoint]):
    """The address and the admin key, once the socket is bound."""


# ------------------------------------------------------------------------------------------------- directory


class Directory:
    """Address of the directory at home: what each worker of a run is to be, and where its actors live at present.

    A worker is known by its name and by its life, which counts its successors. What an earlier life says is refused.
    """


@frozen(kw_only=True)
class Order:
    """What a worker is to be: a role of a run, which goes on from ``checkpoint`` with the problems after ``start``.

    ``attempt`` counts how often the run has begun anew. ``at_home`` are the roles that live at home. ``listen`` is an
    address for the worker's own actors; without one, it is any port of the interface by which it reaches home.
    ``endpoint`` is what a proxy is to be, as far as that is known, and ``doorway`` the path of a unix socket where it
    is handed the socket that it listens at; ``admin_key`` opens one that listens by itself. ``has_intake`` and the like
    tell which actors there are in the run: an intake is what makes it a service.
    """

    role: Role
    config: Path
    directory: Path
    lease_seconds: float
    attempt: int = 1
    at_home: tuple[Role, ...] = ()
    has_intake: bool = False
    has_accounts: bool = True
    has_rollouts: bool = True
    checkpoint: int | None = None
    start: DataPosition = field(factory=DataPosition)
    listen: str | None = None
    endpoint: Endpoint | None = field(default=None, repr=False)
    admin_key: str | None = field(default=None, repr=False)
    doorway: Path | None = None

    @property
    def version(self) -> int:
        """That of the weights to begin with."""
        return self.checkpoint or 0


@frozen(kw_only=True)
class Report:
    """What a worker says when it serves: where, and, if it is a proxy, to whom agents talk."""

    address: str
    endpoint: Endpoint | None = field(default=None, repr=False)


@frozen(kw_only=True)
class ExpectWorker(Message[Directory, None]):
    """A worker is about to be started; from now on, its earlier lives are over."""

    worker: str
    life: int
    order: Order


@frozen(kw_only=True)
class FetchOrder(Message[Directory, Order]):
    """What to be. Raises ``Conflict`` for a life that is over, ``NotFound`` for a worker that nobody expects."""

    worker: str
    life: int


@frozen(kw_only=True)
class ReportReady(Message[Directory, None]):
    """The actors of a worker can be reached. Twice is fine; raises as ``FetchOrder`` does."""

    worker: str
    life: int
    report: Report


@frozen(kw_only=True)
class ReportFailure(Message[Directory, None]):
    """A worker ends, and why: ``error`` is that error as it travels. Raises as ``FetchOrder`` does."""

    worker: str
    life: int
    error: Mapping[str, Any]


@frozen(kw_only=True)
class KeepLease(Message[Directory, None]):
    """A sign of life. A worker that is refused, or that reaches nobody for the length of its lease, ends itself."""

    worker: str
    life: int


@frozen(kw_only=True)
class AwaitReady(Message[Directory, Report]):
    """Wait until this life of a worker, or a later one, serves."""

    worker: str
    life: int = 0


@frozen(kw_only=True)
class AwaitLapse(Message[Directory, str]):
    """Wait until a worker has given no sign of life for the length of its lease, and say so."""

    worker: str
    life: int


@frozen(kw_only=True)
class TakeFailure(Message[Directory, Mapping[str, Any] | None]):
    """What this life of a worker has said of its end, if it could."""

    worker: str
    life: int


@frozen(kw_only=True)
class DismissWorker(Message[Directory, None]):
    """This life of a worker is over, and nobody finds it any more."""

    worker: str
    life: int


@frozen(kw_only=True)
class AwaitEndpoint(Message[Directory, Endpoint]):
    """Wait until a proxy serves, and say where."""


@frozen(kw_only=True)
class EndpointChanged(Message[Directory, None]):
    """News: agents are answered at another address from now on."""

    endpoint: Endpoint


@frozen(kw_only=True)
class WeightsPublished(Message[Directory, None]):
    """News of the trainer: the engines have the weights that ``attempt`` begins with."""

    attempt: int


@frozen(kw_only=True)
class AwaitWeights(Message[Directory, None]):
    """Wait for that: before it, engines may have those of an earlier attempt."""

    attempt: int
