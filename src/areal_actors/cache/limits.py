"""Limits of an episode: how many answers the model may give, and how many tokens it may sample."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from attrs import define, field

from areal_actors.cache.roles import role_of
from areal_actors.domain import EpisodeLimits, Interaction, InteractionStatus
from areal_actors.errors import EpisodeLimitReached


def count_sampled(turns: Iterable[Interaction], roles: Collection[str] | None = None) -> tuple[int, int]:
    """Return the numbers of answers and of sampled tokens, in turns of ``roles``; ``None`` counts all.

    An answer that was cancelled or has failed does not count, because the client asks for it again; its tokens do.
    """
    counted = [turn for turn in turns if roles is None or role_of(turn) in roles]
    answers = (InteractionStatus.COMPLETED, InteractionStatus.PENDING)
    num_tokens = sum(len(turn.completion.token_ids) for turn in counted if turn.completion is not None)
    return sum(turn.status in answers for turn in counted), num_tokens


@define(kw_only=True)
class EpisodeBudget:
    """The limits of one episode, and the first of them that refused a request."""

    limits: EpisodeLimits = field(factory=EpisodeLimits)
    roles: Collection[str] | None = None
    """The roles whose requests count; ``None`` counts all."""
    reached: str | None = None
    is_limited: bool = field(init=False)
    """Whether there is a limit. Set once, because each request asks."""

    def __attrs_post_init__(self) -> None:
        self.is_limited = self.limits.max_turns is not None or self.limits.max_sampled_tokens is not None

    def admit(self, *, num_turns: int, num_tokens: int, num_choices: int = 1) -> int | None:
        """Return how many tokens each answer of a further request may have; ``None`` is without a limit.

        ``num_turns`` and ``num_tokens`` count what the episode has had. Raises ``EpisodeLimitReached``.
        """
        max_turns, max_tokens = self.limits.max_turns, self.limits.max_sampled_tokens
        if max_turns is not None and num_turns + num_choices > max_turns:
            self._refuse("max_turns", max_turns, "turns")
        if max_tokens is None:
            return None
        left = (max_tokens - num_tokens) // num_choices
        if left < 1:
            self._refuse("max_sampled_tokens", max_tokens, "sampled tokens")
        return left

    def _refuse(self, limit: str, number: int, unit: str) -> None:
        self.reached = self.reached or limit
        raise EpisodeLimitReached(
            f"The episode has reached its limit of {number} {unit} (limits.{limit}), so the model answers no further "
            "request; end with what there is."
        )
