"""Messages to generation actors, and to the router that distributes requests over replicas."""

from __future__ import annotations

from enum import StrEnum

from attrs import frozen

from areal_actors.domain import Chunk, EngineInfo, EngineRequest, EngineStatistics, PauseMode, Snapshot
from areal_actors.kernel import Message, Ref, StreamMessage

__all__ = [
    "AddReplica",
    "AttemptEnd",
    "DescribeEngine",
    "DescribeReplicas",
    "EngineView",
    "Generate",
    "Generation",
    "HoldPlaces",
    "LeavePlace",
    "MovedPlace",
    "PauseGeneration",
    "Place",
    "PublishWeights",
    "RemoveReplica",
    "ReplicaState",
    "ReplicaView",
    "Replicas",
    "ReservePlace",
    "ResumeGeneration",
]


class Generation:
    """Address of an actor that generates: the owner of one engine, or a router in front of several such actors."""


@frozen(kw_only=True)
class Generate(StreamMessage[Generation, Chunk]):
    """Sample. The stream ends after the chunk with ``finish``; leaving it early aborts the generation in the engine."""

    request: EngineRequest


@frozen(kw_only=True)
class PublishWeights(Message[Generation, int]):
    """Load new weights between two tokens. Replies with the version that is served from now on."""

    snapshot: Snapshot


@frozen(kw_only=True)
class PauseGeneration(Message[Generation, None]):
    """Stop sampling until ``ResumeGeneration``. Requests wait and are not refused."""

    mode: PauseMode = PauseMode.KEEP


@frozen(kw_only=True)
class ResumeGeneration(Message[Generation, None]):
    """Continue sampling."""


@frozen(kw_only=True)
class EngineView:
    """The engine's info, counters and version at this moment; of a router, those of its ``num_engines`` engines."""

    info: EngineInfo
    statistics: EngineStatistics
    version: int
    num_engines: int = 1


@frozen(kw_only=True)
class DescribeEngine(Message[Generation, EngineView]):
    """Return the engine's info and state."""


class Replicas:
    """Address of the router in front of the replicas, for the code that starts and stops them.

    Processes that stream from the replicas without passing through the router reserve a place there for each attempt.
    """


class ReplicaState(StrEnum):
    """State of a replica as the router sees it."""

    JOINING = "joining"
    """It gets no requests: it is being given the weights and the pause of all replicas, or failed to take them.

    The router retries until it succeeds.
    """
    SERVING = "serving"
    """It gets requests."""
    GONE = "gone"
    """It has died. The component that restarts it adds it again."""


@frozen(kw_only=True)
class AddReplica(Message[Replicas, None]):
    """Add ``ref`` as the replica ``name``, which serves once it has the published weights.

    It replaces one of the same name. Other processes reach it at ``address``, as of ``kernel.remote.listen``, if they
    have no ref.

    Replies at once; ``DescribeReplicas`` shows when it serves.
    """

    name: str
    ref: Ref[Generation]
    address: str | None = None


@frozen(kw_only=True)
class RemoveReplica(Message[Replicas, None]):
    """Remove a replica. Its generations continue on other replicas.

    Replies when nothing runs there any more. Unknown names are ignored.
    """

    name: str


@frozen(kw_only=True)
class ReplicaView:
    """One replica as the router sees it. ``error`` is the reason why it does not serve, or last did not."""

    name: str
    state: ReplicaState
    version: int | None = None
    num_running: int = 0
    error: str | None = None


@frozen(kw_only=True)
class DescribeReplicas(Message[Replicas, tuple[ReplicaView, ...]]):
    """Return all replicas, in the order in which they were added."""


# ------------------------------------------------------------------------------------------- streams past the router


@frozen(kw_only=True)
class Place:
    """A place at a replica for one attempt of a generation."""

    replica: str
    address: str
    """Where the replica's process listens."""
    version: int
    """The version of its weights: a chunk with an older one comes from an earlier incarnation of it."""
    context_length: int


@frozen(kw_only=True)
class MovedPlace:
    """A place whose generation has to continue elsewhere; ``number`` is the one that its holder gave it."""

    number: int
    reason: str


@frozen(kw_only=True)
class HoldPlaces(StreamMessage[Replicas, MovedPlace | None]):
    """Hold the places that ``ReservePlace`` reserves for ``holder``, until this stream is left.

    Yields ``None`` when places can be reserved, and then those that have moved. ``holder`` is a name that no other
    process has. One stream for all generations of a process: a stream for each one took as much of its time as ten
    chunks.
    """

    holder: str


@frozen(kw_only=True)
class ReservePlace(Message[Replicas, Place | None]):
    """Reserve a place for the next attempt of a generation, which the sender streams from the replica itself.

    The place is taken until ``LeavePlace`` with its ``number``, which the sender chooses anew for each place and also
    sends if it does not wait for the answer. ``version`` is the newest version that has sampled the generation so far,
    ``failed_at`` names the replicas that have failed it, ``num_failures`` counts the attempts since the last new token.
    Replies with ``None`` if the stream of ``holder`` has ended.

    Raises:
        Unavailable: no replica that may serve the request came in time.
        EngineError: other processes cannot reach the replicas.
    """

    holder: str = ""
    number: int = 0
    routing_key: str = ""
    version: int = 0
    failed_at: tuple[str, ...] = ()
    num_failures: int = 0


class AttemptEnd(StrEnum):
    """How an attempt of a generation ended at a replica."""

    FINISHED = "finished"
    FAILED = "failed"
    UNREACHABLE = "unreachable"
    """The replica is gone, or cannot be reached by the process that streams from it."""
    LOST = "lost"
    """The replica has lost its engine, and did not begin."""
    LEFT = "left"
    """The generation was moved, or its reader has left, which says nothing about the replica."""


@frozen(kw_only=True)
class LeavePlace(Message[Replicas, None]):
    """Give back a place, and report how the attempt ended. Sent when the replica's stream has been left."""

    holder: str
    number: int
    end: AttemptEnd = AttemptEnd.LEFT
    reason: str = ""
