"""Messages to the launcher of a host, which lends services."""

from __future__ import annotations

from attrs import field, frozen

from areal_actors.domain import ServiceView, TrialId
from areal_actors.kernel import Message, StreamMessage

__all__ = [
    "Hosting",
    "ListServices",
    "ServiceInUse",
    "StopServices",
    "UseService",
    "UseServiceOfSession",
]


class Hosting:
    """Address of the launcher: the services of many trials, each in a separate process."""


@frozen(kw_only=True)
class ServiceInUse:
    """A service that listens, and its administrator's key."""

    trial: TrialId
    url: str
    admin_key: str = field(repr=False)


@frozen(kw_only=True)
class UseService(StreamMessage[Hosting, ServiceInUse]):
    """Borrow the service of a trial for one request.

    The stream yields one item once the service listens, which may include its start. The service is not stopped before
    the stream is left. Raises ``Unavailable`` if it does not listen in time or there is no room for it,
    ``SessionEnded`` if its training is finished.
    """

    trial: TrialId


@frozen(kw_only=True)
class UseServiceOfSession(StreamMessage[Hosting, ServiceInUse]):
    """Borrow the service called ``home``, which has the session with this id or key.

    The stream has no item if there is no such service, or if it has no process and no such session. Raises as
    ``UseService`` does.
    """

    home: str
    name: str = field(repr=False)


@frozen(kw_only=True)
class ListServices(Message[Hosting, tuple[ServiceView, ...]]):
    """Return all services that were ever started here, by name."""


@frozen(kw_only=True)
class StopServices(Message[Hosting, None]):
    """Stop all services, each with a checkpoint, and start no more. Replies when they have ended."""
