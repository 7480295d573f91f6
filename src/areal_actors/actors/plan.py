"""What a trainer is asked to do: how many steps of how much, when to evaluate, to save and to stop.

Read by the configuration, which must be quick to say what is wrong with it: nothing here imports torch.
"""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import ge, gt, le, optional

__all__ = ["CheckpointConfig", "EvaluationConfig", "StopConfig", "TrainingPlan"]


@frozen(kw_only=True)
class CheckpointConfig:
    """How often a checkpoint is written, and how many are kept. One is written at the end in any case."""

    every_steps: int = field(default=10, validator=ge(1))
    keep: int = field(default=1, validator=ge(1))


@frozen(kw_only=True)
class EvaluationConfig:
    """How often the held-out problems are run, besides before the first and after the last step. 0: only then."""

    every_steps: int = field(default=0, validator=ge(0))


@frozen(kw_only=True)
class StopConfig:
    """When training is good enough to stop early: the reward's moving average reaches ``reward``.

    The average is exponential with weight ``smoothing`` on the past, corrected for its start (as in Adam, arXiv
    1412.6980).
    """

    reward: float | None = None
    smoothing: float = field(default=0.5, validator=[ge(0.0), le(0.99)])
    min_steps: int = field(default=1, validator=ge(1))


@frozen(kw_only=True)
class TrainingPlan:
    """What the trainer actor was asked to do."""

    total_steps: int = field(validator=ge(1))
    batch_size: int = field(validator=ge(1))
    max_staleness: int = field(default=0, validator=ge(0))
    evaluation: EvaluationConfig = field(factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(factory=CheckpointConfig)
    stop: StopConfig = field(factory=StopConfig)
    max_step_seconds: float | None = field(default=None, validator=optional(gt(0)))
    """A step that waits longer than this for its groups stops the run with an error. ``None``: no bound."""
