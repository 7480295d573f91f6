"""Objectives that imitate: the likelihood of given answers, and the reverse KL divergence to a teacher.

Both have the form of every objective (``objective.py``): log-probabilities in, a loss and sums of statistics out.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import evolve, frozen

from areal_actors.domain import Floats, Group, Trajectory, as_floats
from areal_actors.errors import ExportError
from areal_actors.training.advantages import GroupAdvantages
from areal_actors.training.forward import TokenScores
from areal_actors.training.objective import Objective, ObjectiveLoss, TokenSums, create_objective
from areal_actors.training.phases import Phase, PhaseName
from areal_actors.training.terms import Terms

__all__ = [
    "DistillationObjective",
    "LikelihoodObjective",
    "create_phase_objective",
    "required_scores",
    "supervised_advantages",
]

_MAX_NATS = 10.0
"""Bound on log teacher/student of one token. Teachers report -9999 or less for what they exclude, and a single such
token would be the whole gradient; at 10 nats the student is already 22,000 times too confident."""


@frozen(kw_only=True)
class LikelihoodObjective:
    """Implements ``Σ_t weight_t · A_t · -log π(t)``: with advantages of 1, the negative log-likelihood."""

    @property
    def needs_every_row(self) -> bool:
        """Whether rows without any advantage still have a gradient: they do not."""
        return False

    def __call__(self, scores: TokenScores, terms: Terms) -> ObjectiveLoss:
        """Return the weighted negative log-likelihood of the tokens.

        Nothing sampled these tokens, so there are no sums about a policy that did.
        """
        losses = -scores.logprobs * terms.advantages
        sums = TokenSums(num_tokens=len(losses), entropy=float(scores.entropies.detach().sum()))
        return ObjectiveLoss(loss=(losses * terms.weights).sum(), sums=sums)


@frozen(kw_only=True)
class DistillationObjective:
    """The policy gradient of the reverse KL divergence to a teacher, token by token, with rewards added.

    Token t of the student's own answers has the advantage ::

        A_t = reward_coefficient · A_t(rewards) + coefficient · (log teacher(t) - log π(t))

    whose expected gradient is that of ``-coefficient · KL(π || teacher)`` at this token (MiniLLM, arXiv:2306.08543;
    GKD, arXiv:2306.13649): each token is judged by itself, without a discount. The student's log-probabilities are
    those of the current weights and of the distribution that it sampled from; the teacher's those of its plain softmax.
    ``policy`` has the trust region, and the correction for rows of older weights.
    """

    policy: Objective
    coefficient: float = 1.0
    reward_coefficient: float = 0.0

    @property
    def needs_every_row(self) -> bool:
        """Whether rows without any advantage still have a gradient: the teacher gives them one."""
        return True

    def __call__(self, scores: TokenScores, terms: Terms) -> ObjectiveLoss:
        """Return the policy loss with the teacher's advantages, and the sum of the estimated divergence."""
        assert terms.teacher is not None, "the trainer scores every row of a distillation phase"
        gaps = (terms.teacher - scores.logprobs.detach()).clamp(-_MAX_NATS, _MAX_NATS)
        advantages = self.reward_coefficient * terms.advantages + self.coefficient * gaps
        found = self.policy(scores, evolve(terms, advantages=advantages))
        return evolve(found, sums=evolve(found.sums, teacher_kl=-float(gaps.sum()), num_taught=float(len(gaps))))


def create_phase_objective(phase: Phase) -> Objective:
    """Return the objective of the steps of ``phase``."""
    if phase.name is PhaseName.SFT:
        return LikelihoodObjective()
    policy = create_objective(
        phase.config.objective, num_updates=phase.config.num_epochs * phase.config.num_minibatches
    )
    if phase.name is PhaseName.RL:
        return policy
    return DistillationObjective(
        policy=policy, coefficient=phase.teacher_coefficient, reward_coefficient=phase.reward_coefficient
    )


def required_scores(row: Trajectory) -> Floats:
    """Return the teacher's log-probabilities float32 [T] of a row. Raises ``ExportError`` if no teacher scored it."""
    if row.teacher_logprobs is None:
        raise ExportError(
            f"No teacher has scored a row of session {row.session}, and a distillation phase needs the scores of all "
            "rows; give the trainer a teacher, or rows with teacher_logprobs."
        )
    return row.teacher_logprobs


def supervised_advantages(groups: Sequence[Group]) -> tuple[GroupAdvantages, ...]:
    """Return advantages of 1 for every trained token, under which the likelihood of all is raised alike."""
    return tuple(
        GroupAdvantages(rows=tuple(as_floats(row.loss_mask == 1) for row in group.rows), has_zero_variance=False)
        for group in groups
    )
