"""What a direct client has beside its SDK: rewards, token data and training rows of its trajectory. All of it at once.

A client made by ``copy`` or ``with_options`` belongs to the same trajectory.
"""

from __future__ import annotations

from typing import Any

from areal_actors.direct.trajectory import DirectSession
from areal_actors.workflows.interactions import InteractionWithTokenLogpReward

__all__ = ["HasRewards"]


class HasRewards:
    """Mixed into an SDK's client. ``direct`` is its trajectory."""

    direct: DirectSession

    def set_reward(self, interaction_id: str, reward: Any) -> None:
        """Reward one answer by its id; setting twice replaces.

        Raises:
            NotFound: no answer of this client has the id.
            RewardError: the reward is no finite number.
        """
        self.direct.set_reward(interaction_id, reward)

    def set_last_reward(self, reward: Any) -> None:
        """Reward the answer that was completed last. Raises ``RewardError`` if there is none."""
        self.direct.set_reward(None, reward)

    def apply_reward_discount(self, turn_discount: float = 1.0) -> dict[str, float]:
        """Let rewards flow back: ``return(n) = reward(n) + turn_discount * mean(return(children))``.

        Assigned rewards stay as they are, so that another discount may be applied afterwards, and late rewards count.
        What is exported or read from now on has the returns.

        Returns:
            The return of every completed interaction.
        """
        return self.direct.apply_discount(turn_discount)

    def get_interaction(self, interaction_id: str) -> InteractionWithTokenLogpReward:
        """One answer by token. Raises ``NotFound`` for an id that no completed answer has."""
        return self.direct.interaction(interaction_id)

    def get_completions(self, completion_id: str) -> InteractionWithTokenLogpReward:
        """The same as ``get_interaction``."""
        return self.direct.interaction(completion_id)

    def export_interactions(
        self, style: str = "individual", reward_discount: float | None = None
    ) -> dict[str, InteractionWithTokenLogpReward]:
        """The training rows, each by the id of the interaction that it ends, in order of request.

        Without ``reward_discount``, that of ``apply_reward_discount`` counts; without that one either, every turn
        keeps what was assigned to it. Nothing is consumed: exporting again gives the same.

        Raises:
            ExportError: there is no such style.
        """
        return self.direct.rows(style=style, discount=reward_discount)

    def export_completions(self, turn_discount: float = 1.0) -> dict[str, InteractionWithTokenLogpReward]:
        """One training row per answer, with rewards that flow back under ``turn_discount``."""
        return self.direct.rows(style="individual", discount=turn_discount)

    def remember(self, answer: Any) -> None:
        """Keep the SDK's object of a finished answer, to be read with its tokens."""
        name = getattr(answer, "id", None)
        if isinstance(name, str):
            self.direct.completions[name] = answer
