"""Messages to generation actors, and to the replica set that distributes requests over them."""

from __future__ import annotations

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


@frozen(kw_only=True)
class AddReplica(Message[Replicas, None]):
    """Add ``ref`` as the replica ``name``, which serves once it has the published weights.

    It replaces one of the same name. Replies at once; ``DescribeEngine`` counts the engines that serve.
    """

    name: str
    ref: Ref[Generation]
