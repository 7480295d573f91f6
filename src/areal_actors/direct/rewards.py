"""The methods that a direct client adds to its SDK: rewards, token data and training rows. None of them waits.

A client created by ``copy`` or ``with_options`` belongs to the same trajectory.
"""

from __future__ import annotations

from typing import Any

from areal_actors.direct.trajectory import DirectSession
from areal_actors.workflows.interactions import InteractionWithTokenLogpReward

__all__ = ["HasRewards"]


class HasRewards:
    """A mixin for an SDK's client. ``direct`` is its trajectory."""

    direct: DirectSession

    def set_reward(self, interaction_id: str, reward: Any) -> None:
        """Reward one answer by its id; setting it again replaces the reward.

        Raises:
            NotFound: no answer of this client has the id.
            RewardError: the reward is not a finite number.
        """
        self.direct.set_reward(interaction_id, reward)

    def set_last_reward(self, reward: Any) -> None:
        """Reward the answer that was completed last. Raises ``RewardError`` if there is none."""
        self.direct.set_reward(None, reward)

    def apply_reward_discount(self, turn_discount: float = 1.0) -> dict[str, float]:
        """Propagate rewards backwards: ``return(n) = reward(n) + turn_discount * mean(return(children))``.

        Assigned rewards do not change, so another discount can be applied later, and late rewards are included. Later
        exports and reads contain the returns.

        Returns:
            The return of every completed interaction.
        """
        return self.direct.apply_discount(turn_discount)

    def get_interaction(self, interaction_id: str) -> InteractionWithTokenLogpReward:
        """Return one answer with its tokens. Raises ``NotFound`` unless a completed answer has this id."""
        return self.direct.interaction(interaction_id)

    def get_completions(self, completion_id: str) -> InteractionWithTokenLogpReward:
        """Return one answer with its tokens; an alias of ``get_interaction``."""
        return self.direct.interaction(completion_id)

    def export_interactions(
        self, style: str = "individual", reward_discount: float | None = None
    ) -> dict[str, InteractionWithTokenLogpReward]:
        """Return the training rows in order of request, each by the id of the interaction that it ends with.

        Without ``reward_discount``, the discount of ``apply_reward_discount`` is used; without that either, every turn
        keeps its assigned reward. Nothing is consumed: exporting again returns the same rows.

        Raises:
            ExportError: there is no such style.
        """
        return self.direct.rows(style=style, discount=reward_discount)

    def export_completions(self, turn_discount: float = 1.0) -> dict[str, InteractionWithTokenLogpReward]:
        """Return one training row per answer, with rewards propagated backwards under ``turn_discount``."""
        return self.direct.rows(style="individual", discount=turn_discount)

    def remember(self, answer: Any) -> None:
        """Keep the SDK's object of a finished answer, to be read together with its tokens."""
        name = getattr(answer, "id", None)
        if isinstance(name, str):
            self.direct.completions[name] = answer
