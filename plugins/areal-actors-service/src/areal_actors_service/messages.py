"""The services of a host, one per trial, and the messages to the launcher that lends them."""

from __future__ import annotations

from enum import StrEnum
from hashlib import blake2b
from typing import Any

from attrs import Attribute, field, frozen

from areal_actors.domain import is_model_identifier
from areal_actors.kernel import Message, StreamMessage


class ServiceState(StrEnum):
    """State of a service."""

    STOPPED = "stopped"
    """It has no process; the next request starts it."""
    STARTING = "starting"
    RUNNING = "running"
    BACKING_OFF = "backing_off"
    """It has died or could not start, and is restarted after a delay."""
    STOPPING = "stopping"
    FINISHED = "finished"
    """It has trained all of its steps."""


def _check_name(trial: TrialId, _: Attribute[Any], __: str) -> None:
    if not is_model_identifier(trial.name):
        raise ValueError(f"{trial.name!r} names no trial; both parts are letters, digits, dots, dashes and underscores")


@frozen
class TrialId:
    """The name of a trial, which is trained separately in its own directory.

    Raises ``ValueError`` for names that are not allowed as directories.
    """

    experiment: str
    trial: str = field(validator=_check_name)

    @property
    def name(self) -> str:
        """``experiment/trial``, the name of its model."""
        return f"{self.experiment}/{self.trial}"

    @property
    def home(self) -> str:
        """The prefix of its sessions' ids and keys: a short digest of the name, so it never changes."""
        return blake2b(self.name.encode(), digest_size=8).hexdigest()


@frozen(kw_only=True)
class ServiceView:
    """The public view of a service. ``last_used_at`` is in seconds since 1970; ``failure`` is why it ended last."""

    trial: TrialId
    state: ServiceState
    pid: int | None = None
    url: str | None = None
    num_requests: int = 0
    """Requests in flight."""
    num_starts: int = 0
    last_used_at: float | None = None
    failure: str | None = None


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
