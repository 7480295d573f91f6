"""Messages to what generates, and to the router that deals its requests out to replicas."""

from __future__ import annotations

from enum import StrEnum

from attrs import frozen

from areal_actors.core import Message, Ref, StreamMessage
from areal_actors.domain import Chunk, EngineInfo, EngineRequest, EngineStatistics, PauseMode, Snapshot

__all__ = [
    "AddReplica",
    "DescribeEngine",
    "DescribeReplicas",
    "EngineView",
    "Generate",
    "Generation",
    "PauseGeneration",
    "PublishWeights",
    "RemoveReplica",
    "ReplicaState",
    "ReplicaView",
    "Replicas",
    "ResumeGeneration",
]


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
