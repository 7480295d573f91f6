"""Typed actors under structured concurrency, on asyncio and trio. Contains no reinforcement learning code."""

from __future__ import annotations

from areal_actors.core.failure import root_cause
from areal_actors.core.message import Address, Message, StreamMessage
from areal_actors.core.portal import Portal
from areal_actors.core.ref import Down, DownReason, Ref
from areal_actors.core.runtime import Actor, BackgroundTasks, Context
from areal_actors.core.statistics import ActorState, ActorStatistics, SystemStatistics
from areal_actors.core.supervision import Escalate, Restart, Stop, Supervision
from areal_actors.core.system import ActorSystem
from areal_actors.core.threads import OwnThread

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
    "Portal",
    "Ref",
    "Restart",
    "Stop",
    "StreamMessage",
    "Supervision",
    "SystemStatistics",
    "root_cause",
]
