"""Self-play: the model plays both sides of a game of TextArena, as an environment of verifiers with two seats.

Each seat is a role, so that ``rollout.train_roles: [first]`` trains one of the two. It needs textarena 0.7.4.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import AsyncExitStack

import textarena
import verifiers.v1 as vf


class GameConfig(vf.TasksetConfig):
    """Options of the taskset."""

    game: str = "Nim-v0"
    size: int = 64
    first_seed: int = 0


class GameData(vf.TaskData):
    """The seed of one game. The prompt is left out: each side is told what it sees."""

    game: str
    seed: int


class GameTask(vf.Task[GameData]):
    """Win a game."""


class GameTaskset(vf.Taskset[GameTask, GameConfig]):
    """Games of one kind with different seeds."""

    def load(self) -> Iterator[GameTask]:
        """Yield one task for each seed."""
        for seed in range(self.config.first_seed, self.config.first_seed + self.config.size):
            yield GameTask(GameData(game=self.config.game, seed=seed), self.config.task)


class SelfPlayConfig(vf.EnvConfig):
    """The seats."""

    first: vf.AgentConfig = vf.AgentConfig()
    second: vf.AgentConfig = vf.AgentConfig()


class SelfPlay(vf.Env[SelfPlayConfig]):
    """One game: the side to move is told what happened since its last move, and its answer is its move."""

    async def run(self, task: GameTask, agents: vf.Agents) -> None:
        """Play to the end, and record the outcome of each side."""
        random.seed(task.data.seed)  # games draw from Python's generator while they are set up
        game = textarena.make(env_id=task.data.game)
        game.reset(num_players=2, seed=task.data.seed)
        async with AsyncExitStack() as stack:
            seats = [await stack.enter_async_context(seat.interaction(task)) for seat in (agents.first, agents.second)]
            told, is_over = ["", ""], False
            while not is_over:
                side, seen = game.get_observation()
                # An observation is the whole history, of which the conversation has all but the end.
                news, told[side] = str(seen).removeprefix(told[side]), str(seen)
                segment = await seats[side].turn(news)
                if segment.terminated:
                    break
                is_over, _ = game.step(segment.last_reply)
        for side, seat in enumerate(seats):
            seat.trace.record_reward("outcome", float((game.state.rewards or {}).get(side, 0.0)))
