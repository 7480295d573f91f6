"""Messages to the owner of the published weights, from engines whose servers receive them.

One broadcast serves the servers of all engines. ::

    Generation                          Weights (next to the trainer)       servers
        ├─ DescribeWeights ────────────────▶│                                  │
        ├─ SendWeights ────────────────────▶│ waits for the other engines      │
        │◀────────────────────── GroupPlace ┤ listens                          │
        ├─ "join the group at host:port" ──────────────────────────────────────▶│    if it is a new group
        │                                   │◀───────────── meets ─────────────┤
        ├─ "receive these tensors" ─────────────────────────────────────────────▶│
        │                                   ├─────────── broadcasts ───────────▶│    once for each bucket
        │◀─────────────── end of the stream ┤                                  │
"""

from __future__ import annotations

from pathlib import Path

from attrs import frozen

from areal_actors.kernel import Message, StreamMessage


class Weights:
    """Address of the owner of the published weights, in the trainer's process, which sends them to servers."""


@frozen(kw_only=True)
class TensorBucket:
    """Tensors that are broadcast together: their names, dtypes (such as ``bfloat16``) and shapes, in their order."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]


@frozen(kw_only=True)
class DescribeWeights(Message[Weights, tuple[TensorBucket, ...]]):
    """Return the contents of a version. Raises ``EngineError`` if another version is kept.

    With the name of an ``engine``, the broadcast of this version waits a moment for its ``SendWeights``.
    """

    version: int
    engine: str = ""


@frozen(kw_only=True)
class WriteWeights(Message[Weights, Path]):
    """Write a version as a directory of safetensors, unless it exists, for a server that cannot receive broadcasts.

    Broadcasts of it no longer wait for the server of ``engine``.

    Raises ``EngineError`` if another version is kept, ``CheckpointError`` if it cannot be written.
    """

    version: int
    engine: str = ""


@frozen(kw_only=True)
class Receiver:
    """A server that receives weights."""

    name: str
    """A unique name of this incarnation of the server: one that was restarted is in no group."""
    machine: str
    """The host on which it runs, as a name or an address that other machines can resolve."""
    device: str
    """``cuda`` or ``cpu``: the device of its tensors."""
    num_ranks: int
    """The number of its processes."""


@frozen(kw_only=True)
class GroupPlace:
    """The address at which a server joins rank 0 of a group, which is the owner of the weights.

    The processes of the server take consecutive ranks from ``offset`` on.
    """

    name: str
    host: str
    port: int
    backend: str
    """``nccl`` or ``gloo``."""
    size: int
    """The number of all ranks, rank 0 included."""
    offset: int


@frozen(kw_only=True)
class SendWeights(StreamMessage[Weights, GroupPlace]):
    """Broadcast all buckets of a version to a server, together with those of other engines that ask for it.

    Yields the place of the group once, which remains open for later versions: a server that is in it already does not
    join again. The stream ends when all ranks have received everything. Leaving it earlier ends the broadcast for all
    engines. Raises ``EngineError`` if another version is kept, or if a rank did not join, was lost, or did not receive
    a bucket in time; the group is closed then.
    """

    engine: str
    """A unique name of the engine."""
    version: int
    receiver: Receiver
    timeout_seconds: float
    """Time limit for the ranks to join, and for each bucket."""
