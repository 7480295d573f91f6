"""Messages to generation actors, and to the replica set that distributes requests over them."""

from __future__ import annotations

from enum import StrEnum

from attrs import frozen

from areal_actors.domain import Chunk, EngineInfo, EngineRequest, EngineStatistics, PauseMode, Snapshot
from areal_actors.kernel import Message, Ref, StreamMessage


class Generation:
    """Address of an actor that generates: the owner of one engine, or a replica set in front of several such actors."""


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
    """The engine's info, counters and version now; of a replica set, those of its ``num_engines`` engines."""

    info: EngineInfo
    statistics: EngineStatistics
    version: int
    num_engines: int = 1


@frozen(kw_only=True)
class DescribeEngine(Message[Generation, EngineView]):
    """Return the engine's info and state."""


class Replicas:
    """Address of the replica set, for the code that starts and stops replicas."""


class ReplicaState(StrEnum):
    """State of a replica as its set sees it."""

    JOINING = "joining"
    """It gets no requests: it is being given the weights and the pause of all replicas, or failed to take them.

    The set retries until it succeeds.
    """
    SERVING = "serving"
    """It gets requests."""
    GONE = "gone"
    """It has died. The component that restarts it adds it again."""


@frozen(kw_only=True)
class AddReplica(Message[Replicas, None]):
    """Add ``ref`` as the replica ``name``, which serves once it has the published weights.

    It replaces one of the same name. Replies at once; ``DescribeReplicas`` shows when it serves.
    """

    name: str
    ref: Ref[Generation]


@frozen(kw_only=True)
class ReplicaView:
    """One replica as its set sees it. ``error`` is the reason why it does not serve, or last did not."""

    name: str
    state: ReplicaState
    version: int | None = None
    num_running: int = 0
    error: str | None = None


@frozen(kw_only=True)
class DescribeReplicas(Message[Replicas, tuple[ReplicaView, ...]]):
    """Return all replicas, in the order in which they were added."""
