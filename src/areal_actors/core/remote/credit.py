"""How much may be under way to the mailboxes here: what was granted, what of it is used, what is to be given back.

The other side counts as well, and waits when it has used up its credit (``calls``). That it does so is not relied upon:
what an actor that takes nothing can be sent stays within the window.
"""

from __future__ import annotations

from areal_actors.core.remote.limits import Limits
from areal_actors.errors import ProtocolError

__all__ = ["Credit"]


class Credit:
    """That of all actors on one connection."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._used: dict[str, list[int]] = {}
        self._withheld: dict[str, list[int]] = {}

    def use(self, name: str, num_bytes: int) -> None:
        """A message to an actor has come. Raises ``ProtocolError`` if there was no credit for it."""
        used = self._used.setdefault(name, [0, 0])
        if used[0] >= self._limits.window_messages or used[1] >= self._limits.window_bytes:
            raise ProtocolError(f"a message to actor {name!r} came without credit: {used[0]} are under way")
        used[0] += 1
        used[1] += num_bytes

    def give_back(self, name: str, num_bytes: int) -> bool:
        """A message has left the way to its mailbox; whether enough has come together to tell."""
        withheld = self._withheld.setdefault(name, [0, 0])
        withheld[0] += 1
        withheld[1] += num_bytes
        return self._is_portion(withheld)

    @property
    def is_due(self) -> bool:
        """Whether enough has come together for some actor."""
        return any(map(self._is_portion, self._withheld.values()))

    def collect(self) -> list[tuple[str, int, int]]:
        """All that is to be given back: actors, messages, bytes. It may be used again from now on."""
        found = [(name, num_messages, num_bytes) for name, (num_messages, num_bytes) in self._withheld.items()]
        self._withheld.clear()
        for name, num_messages, num_bytes in found:
            used = self._used[name]
            used[0] -= num_messages
            used[1] -= num_bytes
        return found

    def _is_portion(self, withheld: list[int]) -> bool:
        return withheld[0] * 4 >= self._limits.window_messages or withheld[1] * 4 >= self._limits.window_bytes
