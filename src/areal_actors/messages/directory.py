"""Messages to the directory in the controller process: the workers' orders and their state."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import field, frozen

from areal_actors.domain import DataPosition, Role
from areal_actors.kernel import Message
from areal_actors.messages.serving import Endpoint


class Directory:
    """Address of the directory in the controller process: each worker's spec, and the present address of its actors.

    A worker is identified by its name and by the number of its ``incarnation``. Messages from an earlier
    incarnation are refused.
    """


@frozen(kw_only=True)
class RoleSpec:
    """Instructions for a worker: its role in a run that resumes from ``checkpoint`` with the problems after ``start``.

    ``attempt`` counts how often the run has started over. ``local_roles`` lists the roles that run in the controller
    process. A worker that serves hangs if it is silent for ``hang_seconds``; ``None`` leaves that to the lease.
    ``listen`` is an address for the worker's own actors; by default it is any port of the interface through
    which it reaches the controller. ``admin_key`` is the administrator's key for a proxy. ``has_intake`` and the like
    say which actors the run has: one with an intake is a service.
    ``is_replaced_alone`` says whether the worker may be restarted while the others continue; otherwise its end ends the
    attempt. ``has_begun`` says whether an earlier process has begun the run, so that its settings have been tried.
    """

    role: Role
    config: Path
    directory: Path
    lease_seconds: float
    hang_seconds: float | None = None
    attempt: int = 1
    local_roles: tuple[Role, ...] = ()
    has_intake: bool = False
    has_accounts: bool = False
    has_rollouts: bool = True
    checkpoint: int | None = None
    start: DataPosition = field(factory=DataPosition)
    listen: str | None = None
    admin_key: str | None = field(default=None, repr=False)
    is_replaced_alone: bool = False
    has_begun: bool = False

    @property
    def version(self) -> int:
        """The version of the weights to start with."""
        return self.checkpoint or 0


@frozen(kw_only=True)
class Report:
    """A worker's report that it serves: its address and, for a proxy, the endpoint for agents."""

    address: str
    endpoint: Endpoint | None = field(default=None, repr=False)


@frozen(kw_only=True)
class ExpectWorker(Message[Directory, None]):
    """Announce a worker that is about to be started. Its earlier incarnations are refused from now on."""

    worker: str
    incarnation: int
    spec: RoleSpec


@frozen(kw_only=True)
class FetchRoleSpec(Message[Directory, RoleSpec]):
    """Return the spec of a worker.

    Raises ``Conflict`` for an incarnation that is over, ``NotFound`` for a worker that is not expected. Another process
    of the worker's gang, with a ``rank``, receives the same spec; its request does not renew the worker's lease.
    """

    worker: str
    incarnation: int
    rank: int = 0


@frozen(kw_only=True)
class ReportReady(Message[Directory, None]):
    """Report that the actors of a worker can be reached. Reporting twice is harmless.

    Raises as ``FetchRoleSpec`` does.
    """

    worker: str
    incarnation: int
    report: Report


@frozen(kw_only=True)
class ReportGang(Message[Directory, None]):
    """Report the ``address`` at which the other processes of a worker's gang can join.

    Raises as ``FetchRoleSpec`` does.
    """

    worker: str
    incarnation: int
    address: str


@frozen(kw_only=True)
class AwaitGang(Message[Directory, str]):
    """Wait for ``ReportGang`` and return its address. Raises as ``FetchRoleSpec`` does, also while waiting."""

    worker: str
    incarnation: int


@frozen(kw_only=True)
class ReportFailure(Message[Directory, None]):
    """Report why a worker ends: ``error`` is the error in its wire format.

    The first report counts. Raises as ``FetchRoleSpec`` does.
    """

    worker: str
    incarnation: int
    error: Mapping[str, Any]


@frozen(kw_only=True)
class KeepLease(Message[Directory, None]):
    """Renew a worker's lease.

    A worker that is refused, or cannot reach the directory for the length of its lease, exits.
    """

    worker: str
    incarnation: int


@frozen(kw_only=True)
class AwaitReady(Message[Directory, Report]):
    """Wait until this incarnation of a worker, or a later one, serves."""

    worker: str
    incarnation: int = 0


@frozen(kw_only=True)
class AwaitLapse(Message[Directory, str]):
    """Wait until a worker has been silent for the length of its lease, and return the reason as text."""

    worker: str
    incarnation: int


@frozen(kw_only=True)
class DismissWorker(Message[Directory, Mapping[str, Any] | None]):
    """End this incarnation of a worker, so that it is no longer found; return the error that it reported, if any."""

    worker: str
    incarnation: int


@frozen(kw_only=True)
class AwaitEndpoint(Message[Directory, Endpoint]):
    """Wait until a proxy serves, and return its endpoint."""


@frozen(kw_only=True)
class EndpointChanged(Message[Directory, None]):
    """News: the proxy in the controller process listens at another address from now on, or at none.

    With ``is_forwarded``, the controller forwards connections from there to proxies in workers.
    """

    endpoint: Endpoint | None
    is_forwarded: bool = False


@frozen(kw_only=True)
class AwaitProxies(Message[Directory, tuple[str, ...]]):
    """Wait until the URLs of the proxies that serve in workers differ from ``known``, and return them."""

    known: tuple[str, ...] = ()


@frozen(kw_only=True)
class CountLostProxies(Message[Directory, int]):
    """Return how many proxies have ended after they served."""


@frozen(kw_only=True)
class WeightsPublished(Message[Directory, None]):
    """News from the trainer: the engines have the weights that ``attempt`` starts with."""

    attempt: int


@frozen(kw_only=True)
class AwaitWeights(Message[Directory, None]):
    """Wait until the engines have the weights of an attempt; before that, they may have those of an earlier one."""

    attempt: int
