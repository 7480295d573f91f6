"""Messages to who keeps the weights that were published last, from engines whose servers receive them.

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
    """Address of who keeps the weights that were published last, beside the trainer, and gives them to servers."""


@frozen(kw_only=True)
class TensorBucket:
    """Tensors that are broadcast together: their names, dtypes (such as ``bfloat16``) and shapes, in their order."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]


@frozen(kw_only=True)
class DescribeWeights(Message[Weights, tuple[TensorBucket, ...]]):
    """What a version consists of. Raises ``EngineError`` if it is not the one that is kept."""

    version: int


@frozen(kw_only=True)
class WriteWeights(Message[Weights, Path]):
    """Write a version as a directory of safetensors, for a server that cannot be sent it, unless it is there already.

    Raises ``EngineError`` if it is not the one that is kept, and ``CheckpointError`` if it cannot be written.
    """

    version: int


@frozen(kw_only=True)
class GroupPlace:
    """Where the other ranks of a group meet the first one, which is whoever keeps the weights."""

    name: str
    host: str
    port: int
    backend: str
    """``nccl`` or ``gloo``."""


@frozen(kw_only=True)
class OpenGroup(Message[Weights, GroupPlace]):
    """Listen for the ranks of a server; they are waited for in the background.

    One that was open for the same ``server`` is closed. Raises ``EngineError`` if this machine cannot listen.
    """

    server: str
    """A name that no other server has."""
    machine: str
    """The host on which it runs, by a name or an address that others know."""
    device: str
    """``cuda`` or ``cpu``: where its tensors are."""
    num_ranks: int
    """Its processes."""
    timeout_seconds: float
    """How long they are waited for, and each bucket may take."""


@frozen(kw_only=True)
class SendBucket(Message[Weights, None]):
    """Broadcast a bucket of a version to a group; replies when all ranks have taken it.

    Being cancelled closes the group. Raises ``EngineError`` if the version is not the one that is kept, or a rank did
    not come, was lost, or did not take it in time. The group is closed then.
    """

    group: str
    version: int
    number: int
    """Counted from 0."""


@frozen(kw_only=True)
class CloseGroup(Message[Weights, None]):
    """End a group, whatever it is doing. Unknown ones are fine."""

    group: str
