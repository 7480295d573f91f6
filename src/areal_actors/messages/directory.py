"""Messages to the directory at home: what workers are to be, and how they fare."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import field, frozen

from areal_actors.core import Message
from areal_actors.domain import DataPosition, Role
from areal_actors.messages.serving import Endpoint

__all__ = [
    "AwaitEndpoint",
    "AwaitGang",
    "AwaitLapse",
    "AwaitReady",
    "AwaitWeights",
    "Directory",
    "DismissWorker",
    "EndpointChanged",
    "ExpectWorker",
    "FetchOrder",
    "KeepLease",
    "Order",
    "Report",
    "ReportFailure",
    "ReportGang",
    "ReportReady",
    "TakeFailure",
    "WeightsPublished",
]


class Directory:
    """Address of the directory at home: what each worker of a run is to be, and where its actors live at present.

    A worker is known by its name and by its life, which counts its successors. What an earlier life says is refused.
    """


@frozen(kw_only=True)
class Order:
    """What a worker is to be: a role of a run, which goes on from ``checkpoint`` with the problems after ``start``.

    ``attempt`` counts how often the run has begun anew. ``at_home`` are the roles that live at home. ``listen`` is an
    address for the worker's own actors; without one, it is any port of the interface by which it reaches home.
    ``endpoint`` is what a proxy is to be, as far as that is known, and ``doorway`` the path of a unix socket where it
    is handed the socket that it listens at; ``admin_key`` opens one that listens by itself. ``has_intake`` and the like
    tell which actors there are in the run: an intake is what makes it a service. ``is_replaced_alone`` tells whether
    the worker may start again while the others go on; if not, its end is the end of the attempt.
    """

    role: Role
    config: Path
    directory: Path
    lease_seconds: float
    attempt: int = 1
    at_home: tuple[Role, ...] = ()
    has_intake: bool = False
    has_accounts: bool = True
    has_rollouts: bool = True
    checkpoint: int | None = None
    start: DataPosition = field(factory=DataPosition)
    listen: str | None = None
    endpoint: Endpoint | None = field(default=None, repr=False)
    admin_key: str | None = field(default=None, repr=False)
    doorway: Path | None = None
    is_replaced_alone: bool = False

    @property
    def version(self) -> int:
        """That of the weights to begin with."""
        return self.checkpoint or 0


@frozen(kw_only=True)
class Report:
    """What a worker says when it serves: where, and, if it is a proxy, to whom agents talk."""

    address: str
    endpoint: Endpoint | None = field(default=None, repr=False)


@frozen(kw_only=True)
class ExpectWorker(Message[Directory, None]):
    """A worker is about to be started; from now on, its earlier lives are over."""

    worker: str
    life: int
    order: Order


@frozen(kw_only=True)
class FetchOrder(Message[Directory, Order]):
    """What to be. Raises ``Conflict`` for a life that is over, ``NotFound`` for a worker that nobody expects.

    Another process of the worker's gang, of some ``rank``, is told the same; that it asks is no sign of life of the
    worker.
    """

    worker: str
    life: int
    rank: int = 0


@frozen(kw_only=True)
class ReportReady(Message[Directory, None]):
    """The actors of a worker can be reached. Twice is fine; raises as ``FetchOrder`` does."""

    worker: str
    life: int
    report: Report


@frozen(kw_only=True)
class ReportGang(Message[Directory, None]):
    """The other processes of a worker's gang can join it at ``address``. Raises as ``FetchOrder`` does."""

    worker: str
    life: int
    address: str


@frozen(kw_only=True)
class AwaitGang(Message[Directory, str]):
    """Wait until that can be done, and say where. Raises as ``FetchOrder`` does, also while it waits."""

    worker: str
    life: int


@frozen(kw_only=True)
class ReportFailure(Message[Directory, None]):
    """A worker ends, and why: ``error`` is that error as it travels. The first one counts. Raises as ``FetchOrder``."""

    worker: str
    life: int
    error: Mapping[str, Any]


@frozen(kw_only=True)
class KeepLease(Message[Directory, None]):
    """A sign of life. A worker that is refused, or that reaches nobody for the length of its lease, ends itself."""

    worker: str
    life: int


@frozen(kw_only=True)
class AwaitReady(Message[Directory, Report]):
    """Wait until this life of a worker, or a later one, serves."""

    worker: str
    life: int = 0


@frozen(kw_only=True)
class AwaitLapse(Message[Directory, str]):
    """Wait until a worker has given no sign of life for the length of its lease, and say so."""

    worker: str
    life: int


@frozen(kw_only=True)
class TakeFailure(Message[Directory, Mapping[str, Any] | None]):
    """What this life of a worker has said of its end, if it could."""

    worker: str
    life: int


@frozen(kw_only=True)
class DismissWorker(Message[Directory, None]):
    """This life of a worker is over, and nobody finds it any more."""

    worker: str
    life: int


@frozen(kw_only=True)
class AwaitEndpoint(Message[Directory, Endpoint]):
    """Wait until a proxy serves, and say where."""


@frozen(kw_only=True)
class EndpointChanged(Message[Directory, None]):
    """News: agents are answered at another address from now on."""

    endpoint: Endpoint


@frozen(kw_only=True)
class WeightsPublished(Message[Directory, None]):
    """News of the trainer: the engines have the weights that ``attempt`` begins with."""

    attempt: int


@frozen(kw_only=True)
class AwaitWeights(Message[Directory, None]):
    """Wait for that: before it, engines may have those of an earlier attempt."""

    attempt: int
