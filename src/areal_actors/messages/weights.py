"""Messages to the owner of the published weights, from engines whose servers receive them.

::

    Generation                          Weights (beside the trainer)        server
        ├─ DescribeWeights ────────────────▶│                                  │
        ├─ OpenGroup ──────────────────────▶│ listens                          │
        ├─ "join the group at host:port" ──────────────────────────────────────▶│
        │                                   │◀───────────── meets ─────────────┤
        ├─ "receive these tensors" ─────────────────────────────────────────────▶│
        ├─ SendBucket ─────────────────────▶│─────────── broadcasts ───────────▶│    once for each bucket
        └─ CloseGroup, if something failed ▶│
"""

from __future__ import annotations

from pathlib import Path

from attrs import frozen

from areal_actors.core import Message

__all__ = [
    "CloseGroup",
    "DescribeWeights",
    "GroupPlace",
    "OpenGroup",
    "SendBucket",
    "TensorBucket",
    "Weights",
    "WriteWeights",
]


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
    """Return the contents of a version. Raises ``EngineError`` if another version is kept."""

    version: int


@frozen(kw_only=True)
class WriteWeights(Message[Weights, Path]):
    """Write a version as a directory of safetensors, unless it exists, for a server that cannot receive broadcasts.

    Raises ``EngineError`` if another version is kept, ``CheckpointError`` if it cannot be written.
    """

    version: int


@frozen(kw_only=True)
class GroupPlace:
    """The address at which the other ranks of a group join rank 0, which is the owner of the weights."""

    name: str
    host: str
    port: int
    backend: str
    """``nccl`` or ``gloo``."""


@frozen(kw_only=True)
class OpenGroup(Message[Weights, GroupPlace]):
    """Listen for the ranks of a server, which join in the background.

    A group that is open for the same ``server`` is closed. Raises ``EngineError`` if this machine cannot listen.
    """

    server: str
    """A unique name of the server."""
    machine: str
    """The host on which it runs, as a name or an address that other machines can resolve."""
    device: str
    """``cuda`` or ``cpu``: the device of its tensors."""
    num_ranks: int
    """The number of its processes."""
    timeout_seconds: float
    """Time limit for the ranks to join, and for each bucket."""


@frozen(kw_only=True)
class SendBucket(Message[Weights, None]):
    """Broadcast a bucket of a version to a group. Replies when all ranks have received it.

    Cancellation closes the group. Raises ``EngineError``, and closes the group, if another version is kept, or if a
    rank did not join, was lost, or did not receive the bucket in time.
    """

    group: str
    version: int
    number: int
    """Counted from 0."""


@frozen(kw_only=True)
class CloseGroup(Message[Weights, None]):
    """End a group in any state. Unknown groups are ignored."""

    group: str
