"""Messages to the launcher of a host: services on loan."""

from __future__ import annotations

from attrs import field, frozen

from areal_actors.core import Message, StreamMessage
from areal_actors.domain import ServiceView, TrialId

__all__ = [
    "Hosting",
    "ListServices",
    "ServiceInUse",
    "StopServices",
    "UseService",
    "VisitSession",
]


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
