"""A rollout stack: a runner whose agents speak to the sessions without HTTP, and a notebook of all news."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx
from attrs import define, field, frozen
from tests.stacks.inference_stack import InferenceStack, open_inference_stack, say

from areal_actors.datasets import Problems
from areal_actors.domain import Answer, Problem, SessionId
from areal_actors.kernel import Actor, Message, Ref
from areal_actors.messages import (
    Directory,
    Endpoint,
    EpisodeFinished,
    EvaluationFinished,
    GroupsTrained,
    PhaseChanged,
    Progress,
    Rollouts,
    RowsTrained,
    RunEnded,
    RunProblem,
    ServiceOpened,
    SessionArchived,
    SessionsCounted,
    StepFinished,
)
from areal_actors.rollouts.runner import Peers, RolloutRunner, RolloutsConfig
from areal_actors.workflows import EpisodeContext, LimitedAgent
from areal_actors.workflows import context as workflow_context


class Notebook(Actor[Progress]):
    """Writes all news down."""

    def __init__(self) -> None:
        self.news: list[Any] = []

    async def write(self, message: Message[Progress, None]) -> None:
        self.news.append(message)

    for _news in (
        PhaseChanged,
        ServiceOpened,
        SessionsCounted,
        EpisodeFinished,
        SessionArchived,
        GroupsTrained,
        RowsTrained,
        StepFinished,
        RunEnded,
        EvaluationFinished,
    ):
        _news.handler(write)


@frozen
class Episode:
    """What an agent of these tests can do: ask the model, and know where it is."""

    inference: InferenceStack
    session: SessionId
    data: Mapping[str, Any]

    @property
    def context(self) -> EpisodeContext:
        return workflow_context.get()

    async def ask(self, text: str = "what?") -> Answer:
        (answer,) = await self.inference.complete(self.session, say(text))
        return answer


Act = Callable[[Episode], Awaitable[Any]]


@define
class Acting:
    """An agent of one function; it speaks to the sessions without HTTP, so that virtual time holds."""

    inference: InferenceStack
    act: Act

    async def run(self, data: Mapping[str, Any], **extra_kwargs: Any) -> Any:
        session = SessionId(extra_kwargs["base_url"].split("/")[-2])
        return await self.act(Episode(self.inference, session, data))


class Seated(LimitedAgent):
    """An agent of whom only so many run at once."""

    agent_name = "Seated"

    def __init__(self, agent: Acting, num_seats: int) -> None:
        self.agent = agent
        self.seats = anyio.Semaphore(num_seats)

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[Acting]:
        async with self.seats:
            yield self.agent


@define
class RolloutStack:
    """A runner, and what can be seen of it."""

    inference: InferenceStack
    runner: Ref[Rollouts]
    progress: Ref[Progress]
    notebook: Notebook = field(factory=Notebook)

    async def play(self, num_episodes: int = 1):
        """One group by hand."""
        problem = Problem(position=0, data={"question": "what?"})
        return await self.runner.ask(RunProblem(problem=problem, num_episodes=num_episodes))


@asynccontextmanager
async def open_rollout_stack(
    act: Act,
    *,
    is_producing: bool = False,
    held_out: int = 0,
    config: RolloutsConfig | None = None,
    num_seats: int | None = None,
    answer_health: Callable[[], None] = lambda: None,
    directory: Actor[Directory] | None = None,
    **options: Any,
) -> AsyncIterator[RolloutStack]:
    """Open an inference stack and a runner; ``options`` are those of the stack.

    ``num_seats`` limits the agents that run at once.

    ``answer_health`` is called where the proxy is asked whether it is there, and raises where it is not. ``directory``
    knows which proxies were lost.
    """

    def respond(_: httpx.Request) -> httpx.Response:
        answer_health()
        return httpx.Response(200)

    transport = httpx.MockTransport(respond)
    async with open_inference_stack(**options) as inference, httpx.AsyncClient(transport=transport) as http_client:
        notebook = Notebook()
        progress = await inference.system.spawn(notebook, name="progress")
        runner = RolloutRunner(
            {"": Acting(inference, act) if num_seats is None else Seated(Acting(inference, act), num_seats)},
            peers=Peers(
                sessions=inference.sessions,
                exports=inference.exports,
                capacity=inference.capacity,
                progress=progress,
                directory=None if directory is None else await inference.system.spawn(directory, name="directory"),
            ),
            endpoint=Endpoint(url="http://proxy", admin_key="key"),
            http_client=http_client,
            configs={"": config or RolloutsConfig(group_size=2, episode_timeout_seconds=60)},
            train={"": problems(1_000)} if is_producing else None,
            held_out={"": problems(held_out)} if held_out else {},
        )
        yield RolloutStack(inference, await inference.system.spawn(runner, name="rollouts"), progress, notebook)


def problems(num: int) -> Problems:
    """Problems in their order."""
    return Problems([{"question": f"what is {position}?"} for position in range(num)], is_shuffled=False)
