"""Training rows with what a step computed for them."""

from __future__ import annotations

from attrs import field, frozen

from areal_actors.domain.arrays import Floats, array_equality, as_floats
from areal_actors.domain.rows import Trajectory

__all__ = ["TrainedRow"]


@frozen(kw_only=True)
class TrainedRow:
    """A row of T tokens as a step trained it: one branch of a session, never a tree.

    ``advantages`` float32 [T] are 0 off the loss mask. ``trainer_logprobs`` float32 [T] are the trainer's
    log-probabilities of the trained tokens, under the distributions that they were sampled from and, unless a step
    makes several updates without scoring its rows first, the weights before the step. They are nan off the mask and in
    rows that the step skipped because they could not change the gradient. ``task`` is the position of the row's
    problem, ``member`` the index of its episode in the group, and ``episode_reward`` the reward that the agent
    reported; ``trajectory.reward`` is the return of the row's last turn.
    """

    trajectory: Trajectory
    advantages: Floats = field(converter=as_floats, eq=array_equality)
    trainer_logprobs: Floats = field(converter=as_floats, eq=array_equality)
    task: int
    member: int
    episode_reward: float
    temperature: float = 1.0
    """The temperature of turns that do not record the one they were sampled at."""
