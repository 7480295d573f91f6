"""A bounded mailbox as plain bookkeeping: no locks, no waiting, no event loop.

::

    control  ──────────────────────────────▶ ┐
                                              ├─▶ take()
    senders (waiting) ─▶ data (bounded) ────▶ ┘
                            ▲      │ park / unpark
                            └── lanes of concurrent handlers that are at their limit

Whoever sends offers an entry; where there is no room the sender queues, and is admitted in order as room appears, so
that no newcomer overtakes it. Parked entries still count against the bound. The control lane carries the kernel's own
news only, whose number is bounded by what an actor watches, and overtakes the data lane.

The tasks that wait for a mailbox live in ``cell`` and ``ref``; they learn of changes through callbacks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable

__all__ = ["Mailbox", "Ticket"]


class Ticket:
    """The place of a sender that waits for room. ``admitted`` is ``None`` while it waits."""

    __slots__ = ("admitted", "entry", "notify")

    def __init__(self, entry: object, notify: Callable[[bool], object] | None = None) -> None:
        self.entry = entry
        self.notify = notify
        self.admitted: bool | None = None

    def decide(self, *, admitted: bool) -> None:
        """Admit or refuse, and tell the sender."""
        self.admitted = admitted
        if self.notify is not None:
            self.notify(admitted)


class Mailbox:
    """Two lanes in, one entry out at a time; at most ``bound`` entries in the data lane, parked ones included."""

    __slots__ = ("bound", "closed", "control", "data", "num_parked", "parked", "peak", "senders", "wake")

    def __init__(self, bound: int) -> None:
        if bound < 1:
            raise ValueError(f"a mailbox of {bound} entries can hold nothing; give mailbox_size at least 1")
        self.bound = bound
        self.closed = False
        self.control: deque[object] = deque()
        self.data: deque[object] = deque()
        self.parked: dict[Hashable, deque[object]] = {}
        self.num_parked = 0
        self.peak = 0
        self.senders: deque[Ticket] = deque()
        self.wake: Callable[[], object] | None = None
        """Called once at the next arrival; set by a reader that found nothing to take."""

    def __len__(self) -> int:
        return len(self.data) + self.num_parked

    def offer(self, entry: object) -> bool:
        """Take ``entry`` in if that is possible now: open, room, and nobody waiting for that room."""
        data = self.data
        size = len(data) + self.num_parked
        if size >= self.bound or self.closed or self.senders:
            return False
        data.append(entry)
        if size >= self.peak:
            self.peak = size + 1
        wake = self.wake
        if wake is not None:
            self.wake = None
            wake()
        return True

    def queue(self, ticket: Ticket) -> None:
        """Wait for room in order; ``ticket.notify`` is called when it was admitted, or refused by closing."""
        if self.closed:
            ticket.decide(admitted=False)
        elif not self.senders and self.offer(ticket.entry):
            ticket.decide(admitted=True)
        else:
            self.senders.append(ticket)

    def push_control(self, entry: object) -> None:
        """Put news on the control lane, which is read first and has no bound of its own."""
        self.control.append(entry)
        self.arouse()

    def take(self) -> object | None:
        """The next entry, control first; ``None`` when there is nothing.

        The room that it leaves is given to a waiting sender by the next call of ``admit``, ``take`` or ``unpark``, so
        that the reader may still ``park`` the entry in its own room.
        """
        if self.control:
            return self.control.popleft()
        if self.senders:
            self.admit()
        return self.data.popleft() if self.data else None

    def admit(self) -> None:
        """Give free room to those who wait for it, in order."""
        while self.senders and len(self) < self.bound and not self.closed:
            ticket = self.senders.popleft()
            self.data.append(ticket.entry)
            self.peak = max(self.peak, len(self))
            ticket.decide(admitted=True)
        if self.data:
            self.arouse()

    def park(self, lane: Hashable, entry: object) -> None:
        """Set aside an entry whose handler is at its limit; it keeps its place among its kind and in the bound."""
        self.parked.setdefault(lane, deque()).append(entry)
        self.num_parked += 1

    def unpark(self, lane: Hashable) -> object | None:
        """The longest parked entry of ``lane``, or ``None``."""
        waiting = self.parked.get(lane)
        if not waiting:
            return None
        entry = waiting.popleft()
        self.num_parked -= 1
        self.admit()
        return entry

    def restore(self) -> None:
        """Put what is parked back in front of the data lane: a new reader starts without running handlers."""
        for waiting in self.parked.values():
            self.data.extendleft(reversed(waiting))
        self.parked.clear()
        self.num_parked = 0

    def discard(self, entry: object) -> bool:
        """Forget one entry wherever it waits (compared by identity or equality of envelopes); whether it was here."""
        return self._discard_sender(entry) or self._discard_data(entry) or self._discard_parked(entry)

    def discard_ticket(self, ticket: Ticket) -> bool:
        """Give up waiting for room; ``False`` if the entry was admitted (and stays) or refused already."""
        if ticket in self.senders:
            self.senders.remove(ticket)
            return True
        return False

    def close(self) -> None:
        """Refuse everything from now on, waiting senders included; what was accepted stays to be taken."""
        self.closed = True
        senders, self.senders = self.senders, deque()
        for ticket in senders:
            ticket.decide(admitted=False)
        self.arouse()

    def drain(self) -> tuple[object, ...]:
        """Everything that was accepted and never taken, oldest first; the mailbox is empty afterwards."""
        left = (*self.control, *(entry for waiting in self.parked.values() for entry in waiting), *self.data)
        self.control.clear()
        self.parked.clear()
        self.data.clear()
        self.num_parked = 0
        return left

    def arouse(self) -> None:
        """Call the reader's wake-up, once."""
        wake, self.wake = self.wake, None
        if wake is not None:
            wake()

    def _discard_sender(self, entry: object) -> bool:
        for ticket in self.senders:
            if ticket.entry is entry:
                self.senders.remove(ticket)
                return True
        return False

    def _discard_data(self, entry: object) -> bool:
        try:
            self.data.remove(entry)
        except ValueError:
            return False
        self.admit()
        return True

    def _discard_parked(self, entry: object) -> bool:
        for waiting in self.parked.values():
            if entry in waiting:
                waiting.remove(entry)
                self.num_parked -= 1
                self.admit()
                return True
        return False
