"""A server of OpenEnv with a game: find a number. Started as a program, it prints its port."""

from __future__ import annotations

import socket
import sys

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    number: int


class Say(Action):
    text: str


class Heard(Observation):
    message: str = ""


class Game(Environment):
    """The seed is the number; a right guess is worth 1, a wrong one costs 0.1, and 13 breaks the game."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._number = 0

    def reset(self, seed=None, episode_id=None, **kwargs):
        self._number = seed or 0
        return Heard(message="Guess a number from 0 to 9.")

    def step(self, action, timeout_s=None, **kwargs):
        number = action.number if isinstance(action, Guess) else int("".join(filter(str.isdigit, action.text)) or -1)
        if number == 13:
            raise ZeroDivisionError("the game is broken")
        is_right = number == self._number
        hint = "higher" if number < self._number else "lower"
        return Heard(message="right" if is_right else hint, reward=1.0 if is_right else -0.1, done=is_right)

    @property
    def state(self):
        return State()


class ToolGame(MCPEnvironment):
    """The same game, played by the tool ``guess`` of an MCP server."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        self._game, self._heard = Game(), Heard()
        server = FastMCP("game")

        @server.tool()
        def guess(number: int) -> str:
            """Guess the number."""
            self._heard = self._game.step(Guess(number=number))
            return self._heard.message

        super().__init__(server)

    def reset(self, seed=None, episode_id=None, **kwargs):
        return self._game.reset(seed=seed)

    def step(self, action, timeout_s=None, **kwargs):
        return self._rewarded(super().step(action, timeout_s, **kwargs))

    async def step_async(self, action, timeout_s=None, **kwargs):
        return self._rewarded(await super().step_async(action, timeout_s, **kwargs))

    def _rewarded(self, observation):
        heard, self._heard = self._heard, Heard()
        return observation.model_copy(update={"reward": heard.reward, "done": heard.done})

    def _step_impl(self, action, timeout_s=None, **kwargs):
        raise NotImplementedError

    @property
    def state(self):
        return State()


GAMES = {
    "tools": (Game, Guess, Heard),
    "text": (Game, Say, Heard),
    "mcp": (ToolGame, CallToolAction, CallToolObservation),
}

if __name__ == "__main__":
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)  # noqa: T201 - read by the test
    app = create_fastapi_app(*GAMES[sys.argv[1]], max_concurrent_envs=64)
    uvicorn.Server(uvicorn.Config(app, log_level="error")).run([listener])
