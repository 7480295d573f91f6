"""Typed actors under structured concurrency, on asyncio and trio. Contains no reinforcement learning code."""

from __future__ import annotations

from areal_actors.kernel.failure import root_cause
from areal_actors.kernel.message import Address, Message, StreamMessage
from areal_actors.kernel.ref import ActorState, ActorStatistics, Down, DownReason, Ref, SystemStatistics
from areal_actors.kernel.runtime import Actor, BackgroundTasks, Context
from areal_actors.kernel.stream import Stream
from areal_actors.kernel.supervision import Escalate, Restart, Stop, Supervision
from areal_actors.kernel.system import ActorSystem
from areal_actors.lib.threads import OwnThread

__all__ = [
    "Actor",
    "ActorState",
    "ActorStatistics",
    "ActorSystem",
    "Address",
    "BackgroundTasks",
    "Context",
    "Down",
    "DownReason",
    "Escalate",
    "Message",
    "OwnThread",
    "Ref",
    "Restart",
    "Stop",
    "Stream",
    "StreamMessage",
    "Supervision",
    "SystemStatistics",
    "root_cause",
]
