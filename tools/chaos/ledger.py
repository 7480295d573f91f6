"""What an agent was told, line by line in a file of its own, before it goes on: what must be true afterwards.

A line is written with one system call, so that an agent that is killed has either the whole of it or nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["Ledger", "Line", "read_ledger"]

Line = dict[str, Any]


class Ledger:
    """Appends lines, of these kinds.

    * ``session``: a session was opened (``session``, ``api_key``);
    * ``turn``: a turn was answered, a stream to its end (``session``, ``interaction``, ``asked``, ``answer``);
    * ``wanted``, ``rewarded``: a reward is about to be sent, and was acknowledged (``session``, ``reward``, and
      ``interaction``, which is null for the last reward of a session);
    * ``final``: the end of a session was acknowledged (``session``);
    * ``gone``: the service knows the session no longer (``session``, ``status``, ``doing``);
    * ``left``: the session was left alone on purpose (``session``).
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, kind: str, **what: Any) -> None:
        """Append a line; it outlives this process when this returns."""
        os.write(self._file, (json.dumps({"kind": kind, **what}) + "\n").encode())


def read_ledger(path: Path) -> Iterator[Line]:
    """The lines of a ledger, in order; none where nobody has written."""
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        yield json.loads(line)
