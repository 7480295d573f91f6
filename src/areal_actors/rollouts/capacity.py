"""The capacity granter, which alone decides how many episode groups may be live.

The arithmetic is in ``staleness.py``. A permit is a lease that its holder settles. A permit that is not settled in time
(its holder was killed) is taken back as rejected, so that a crash cannot leak capacity.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel
from attrs import field, frozen
from attrs.validators import gt

from areal_actors.errors import CapacityExhausted
from areal_actors.kernel import Actor, Context
from areal_actors.lib.telemetry import get_logger
from areal_actors.messages import (
    AcquirePermit,
    Capacity,
    CapacityView,
    ClaimPermit,
    DescribeCapacity,
    LiftStalenessLimit,
    Permit,
    RefundGroup,
    ReservePermit,
    RestorePermit,
    SettlePermit,
    VersionAdvanced,
)
from areal_actors.rollouts.staleness import CapacityState

_log = get_logger(__name__)


@frozen(kw_only=True)
class CapacityConfig:
    """Duration of permits. The limits themselves come from ``rollout`` and ``batch_size``."""

    lease_seconds: float = field(default=7200.0, validator=gt(0))
    """A permit that is not settled within this time is taken back. Must be longer than the longest episode."""


@frozen(kw_only=True)
class _Lease:
    holder: str
    expires_at: float


class CapacityGranter(Actor[Capacity]):
    """Grants permits first come, first served, within the limits of ``CapacityState``."""

    def __init__(self, state: CapacityState, *, config: CapacityConfig | None = None) -> None:
        self._state = state
        self._config = config or CapacityConfig()
        self._leases: dict[int, _Lease] = {}
        self._waiting: deque[anyio.Event] = deque()
        self._next_permit = 0
        self._clock: Callable[[], float] = anyio.current_time

    @asynccontextmanager
    async def lifespan(self, context: Context) -> AsyncIterator[None]:
        """Reclaim expired leases while the actor runs."""

        async def reclaim_expired() -> None:
            while True:
                await anyio.sleep(self._config.lease_seconds / 10)
                now = self._clock()
                for permit, lease in list(self._leases.items()):
                    if lease.expires_at <= now:
                        _log.warning("permit_expired", permit=permit, holder=lease.holder)
                        await self.settle(SettlePermit(permit=permit, is_accepted=False))

        context.tasks.start_soon(reclaim_expired)
        yield

    @AcquirePermit.handler(concurrency=100_000)
    async def acquire(self, message: AcquirePermit) -> Permit:
        """Wait in line for a permit. A caller that is cancelled leaves the line and passes its turn on."""
        # Room that callers in line have not taken yet is not free.
        if self._state.available <= len(self._waiting):
            turn = anyio.Event()
            self._waiting.append(turn)
            try:
                await turn.wait()
                # The turn may have been granted while the caller was being cancelled; its permit would then never be
                # settled.
                await anyio.lowlevel.checkpoint_if_cancelled()
            except BaseException:
                # Also on cancellation: a turn that was granted meanwhile goes to the next in line.
                self._waiting.remove(turn)
                self._wake()
                raise
            self._waiting.remove(turn)
        return self._grant(message.holder, self._state.start())

    @ReservePermit.handler
    async def reserve(self, message: ReservePermit) -> CapacityView:  # noqa: ARG002
        """Reserve one permit, or raise ``CapacityExhausted`` at once."""
        self._require_room()
        self._state = self._state.reserve()
        return self._view()

    @ClaimPermit.handler
    async def claim(self, message: ClaimPermit) -> Permit:
        """Grant a permit at once, from the reserved ones first."""
        if self._state.reserved > 0:
            return self._grant(message.holder, self._state.claim_reserved())
        self._require_room()
        return self._grant(message.holder, self._state.start())

    @RestorePermit.handler
    async def restore(self, message: RestorePermit) -> Permit:
        """Grant a permit for a group that an earlier process had admitted. The available count may become negative."""
        return self._grant(message.holder, self._state.start())

    @SettlePermit.handler
    async def settle(self, message: SettlePermit) -> None:
        """End a lease. Settling it again, or after it expired, changes nothing."""
        if self._leases.pop(message.permit, None) is not None:
            self._change(self._state.settle(is_accepted=message.is_accepted))

    @RefundGroup.handler
    async def refund(self, message: RefundGroup) -> None:  # noqa: ARG002
        """Free the place of a dropped group for another one."""
        self._change(self._state.refund())

    @VersionAdvanced.handler
    async def advance(self, message: VersionAdvanced) -> None:
        """Record that new weights are served: B (the batch size) more groups may start."""
        self._change(self._state.advance(message.version))

    @LiftStalenessLimit.handler
    async def lift_staleness_limit(self, message: LiftStalenessLimit) -> None:  # noqa: ARG002
        """Limit only the number of live groups from now on."""
        self._change(self._state.lift_staleness_limit())

    @DescribeCapacity.handler
    async def describe(self, message: DescribeCapacity) -> CapacityView:  # noqa: ARG002
        """Return the current counters."""
        return self._view()

    def _grant(self, holder: str, state: CapacityState) -> Permit:
        self._state = state
        permit = Permit(id=self._next_permit, version=state.version)
        self._next_permit += 1
        expires_at = self._clock() + self._config.lease_seconds
        self._leases[permit.id] = _Lease(holder=holder, expires_at=expires_at)
        return permit

    def _change(self, state: CapacityState) -> None:
        self._state = state
        self._wake()

    def _wake(self) -> None:
        """Wake the first callers in line while there is room.

        A woken caller keeps its place and its room until it takes them.
        """
        for turn, _ in zip(self._waiting, range(self._state.available), strict=False):
            turn.set()

    def _require_room(self) -> None:
        if self._state.available <= len(self._waiting):
            raise CapacityExhausted(
                f"No capacity for another session: {self._state.running} groups are running and "
                f"{self._state.accepted} were accepted at version {self._state.version}. "
                "Try again when one ends or new weights are published."
            )

    def _view(self) -> CapacityView:
        state = self._state
        return CapacityView(
            version=state.version,
            running=state.running,
            accepted=state.accepted,
            reserved=state.reserved,
            available=state.available,
        )
