"""Services that train on external agents, one per trial, as whoever starts them sees them."""

from __future__ import annotations

from enum import StrEnum
from hashlib import blake2b
from typing import Any

from attrs import Attribute, field, frozen

from areal_actors.domain.models import is_model_identifier


class ServiceState(StrEnum):
    """What a service is doing."""

    STOPPED = "stopped"
    """It has no process; the next request starts it."""
    STARTING = "starting"
    RUNNING = "running"
    BACKING_OFF = "backing_off"
    """It has died, or could not start, and is started again in a moment."""
    STOPPING = "stopping"
    FINISHED = "finished"
    """It has trained for as many steps as it was to."""


def _check_name(trial: TrialId, _: Attribute[Any], __: str) -> None:
    if not is_model_identifier(trial.name):
        raise ValueError(f"{trial.name!r} names no trial; both parts are letters, digits, dots, dashes and underscores")


@frozen
class TrialId:
    """What is trained on its own, in a directory of its own. Raises ``ValueError`` for names that no directory has."""

    experiment: str
    trial: str = field(validator=_check_name)

    @property
    def name(self) -> str:
        """``experiment/trial``, as its model is called."""
        return f"{self.experiment}/{self.trial}"

    @property
    def home(self) -> str:
        """What the ids and keys of its sessions begin with: short, and always the same."""
        return blake2b(self.name.encode(), digest_size=8).hexdigest()


@frozen(kw_only=True)
class ServiceView:
    """A service from outside. ``last_used_at`` is in seconds since 1970; ``failure`` is why it ended last."""

    trial: TrialId
    state: ServiceState
    pid: int | None = None
    url: str | None = None
    num_requests: int = 0
    """In flight now."""
    num_starts: int = 0
    last_used_at: float | None = None
    failure: str | None = None
