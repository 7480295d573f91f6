"""Settings of journals."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from attrs import field, frozen
from attrs.validators import ge


class JournalSync(StrEnum):
    """The failures that an acknowledged event survives."""

    NORMAL = "normal"
    """Death of the process by any signal. A power loss may lose the last moments."""
    FULL = "full"
    """Power loss as well: every commit waits for the disk."""


@frozen(kw_only=True)
class JournalConfig:
    """Persistence of a service's sessions and groups, and of the groups of a run over a dataset, across restarts."""

    enabled: bool = True
    """Whether what was finished and not trained is restored: sessions and groups of a service, groups of a dataset."""
    path: Path | None = None
    """The journal's file of a service; by default journal.sqlite in the run directory."""
    sync: JournalSync = JournalSync.NORMAL
    """normal survives kill -9; full survives power loss and waits for the disk."""
    retention_days: float = field(default=0.0, validator=ge(0))
    """How long data that is no longer needed can be read by SQL; 0 deletes it at once."""
