"""Messages to the trainer, and to the ranks that train along with it."""

from __future__ import annotations

from attrs import frozen

from areal_actors.core import Message
from areal_actors.domain import Group

__all__ = [
    "AwaitTraining",
    "GatherWeights",
    "JoinGang",
    "Ranks",
    "RequestStop",
    "SaveWeights",
    "TrainAlong",
    "Training",
    "TrainingSummary",
]


class Training:
    """Address of the trainer."""


@frozen(kw_only=True)
class RequestStop(Message[Training, None]):
    """Finish the step that is running, write a checkpoint, and stop."""

    reason: str


@frozen(kw_only=True)
class TrainingSummary:
    """How a run ended."""

    steps: int
    version: int
    is_finished: bool
    """Whether all steps were done, or training stopped early because its goal was reached."""
    stop_reason: str | None = None


@frozen(kw_only=True)
class AwaitTraining(Message[Training, TrainingSummary]):
    """Wait for the end of training."""


@frozen(kw_only=True)
class SaveWeights(Message[Training, None]):
    """Write the trained weights where people find them, once training is finished."""


class Ranks:
    """Address of a process that trains along: one rank of a gang, beside the first, which is the trainer's.

    All ranks are asked for the same, in the same order; the answer says that it is done.
    """


@frozen(kw_only=True)
class JoinGang(Message[Ranks, None]):
    """Meet the other ranks at the store that the first one has opened, and hold a part of the weights from then on.

    ``engine_dtype`` is what the engine computes in. Raises ``GangError`` if the ranks do not hold the same policy.
    """

    host: str
    port: int
    rank: int
    engine_dtype: str


@frozen(kw_only=True)
class TrainAlong(Message[Ranks, None]):
    """Take a step on ``groups``. What the first rank refuses is refused here as well, and is no error of this rank."""

    groups: tuple[Group, ...]
    max_staleness: int | None = None


@frozen(kw_only=True)
class GatherWeights(Message[Ranks, None]):
    """Give the first rank this one's part of the weights, and ``with_moments`` that of the optimiser's state."""

    with_moments: bool = False
