"""Messages to the trainer, and to the other ranks of its gang."""

from __future__ import annotations

from pathlib import Path

from attrs import field, frozen

from areal_actors.domain import Group
from areal_actors.kernel import Message, Ref


class Training:
    """Address of the trainer."""


@frozen(kw_only=True)
class RequestStop(Message[Training, None]):
    """Finish the step that is running, write a checkpoint, and stop."""

    reason: str


@frozen(kw_only=True)
class TrainingSummary:
    """The result of a run."""

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
    """Write the trained weights to their published place, once training is finished."""


class Ranks:
    """Address of a rank of a training gang other than rank 0, which is the trainer's.

    All ranks receive the same requests in the same order; a reply means that the request is done.
    """


@frozen(kw_only=True)
class GangMembers:
    """The ranks other than rank 0, which reach it at ``host``.

    ``whereabouts`` describes in words where each one runs.
    """

    ranks: tuple[Ref[Ranks], ...] = ()
    host: str = "127.0.0.1"
    whereabouts: tuple[str, ...] = field(default=())


@frozen(kw_only=True)
class JoinGang(Message[Ranks, None]):
    """Join the other ranks at the store that rank 0 has opened, and hold a part of the weights from then on.

    ``engine_dtype`` is the engine's compute dtype. Raises ``GangError`` if the ranks do not hold the same policy.
    """

    host: str
    port: int
    rank: int
    engine_dtype: str


@frozen(kw_only=True)
class TrainAlong(Message[Ranks, None]):
    """Take a step on ``groups``.

    Input that rank 0 rejects is rejected here as well, which does not count as an error of this rank.
    """

    groups: tuple[Group, ...]
    max_staleness: int | None = None


@frozen(kw_only=True)
class GatherWeights(Message[Ranks, None]):
    """Give rank 0 this rank's part of the weights, or with ``only_adapter`` its part of the adapter."""

    only_adapter: bool = False


@frozen(kw_only=True)
class SaveShards(Message[Ranks, None]):
    """Write this rank's part of a checkpoint below ``directory``; with ``is_async`` only copy it before the answer.

    An error in writing, which rank 0 reports, does not count as an error of this rank.
    """

    directory: Path
    is_async: bool = False
