"""Agents: any object with ``async def run(self, data, **extra_kwargs)`` that returns a reward.

The agent does not depend on training. It gets a base URL, a key and an HTTP client, talks to the model as to any other,
and returns a number for its last completion or a ``dict`` of numbers by completion id. Return values are checked here;
``rollouts/runner.py`` opens, rewards and exports the episode. Agents that run in processes of their own machine limit
are ``pool`` and ``commands``.
"""

from __future__ import annotations

import asyncio
import os
import threading
import traceback
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable
from urllib.parse import urlsplit

import anyio
import httpx
from attrs import field, frozen

import areal_actors
from areal_actors.domain import InteractionId
from areal_actors.errors import ArealError, EpisodeError

_PACKAGE = Path(areal_actors.__file__).parent
_MAX_TRACEBACK = 8000

T = TypeVar("T")


@runtime_checkable
class Agent(Protocol):
    """A user's agent. ``data`` is one problem; ``extra_kwargs`` hold ``base_url``, ``api_key`` and ``http_client``."""

    async def run(self, data: Any, **extra_kwargs: Any) -> Any:
        """Run one episode and return its reward."""
        ...


@frozen(kw_only=True)
class Injected:
    """The arguments that an episode passes to its agent. ``base_url`` ends in ``/v1``."""

    base_url: str
    api_key: str = field(repr=False)
    http_client: httpx.AsyncClient = field(repr=False, eq=False)


@frozen(kw_only=True)
class Reward:
    """The parsed return value of an agent: one number for its last completion, or numbers by completion id."""

    last: float | None = None
    by_interaction: Mapping[InteractionId, float] = field(factory=dict)


async def run_agent(agent: Agent, data: object, injected: Injected) -> Reward:
    """Run one episode inline, in a separate task.

    Raises ``EpisodeError`` if the agent raises, cancels itself, or returns something that is not a reward. Cancelling
    the caller cancels the agent.
    """
    run = partial(
        agent.run, data, base_url=injected.base_url, api_key=injected.api_key, http_client=injected.http_client
    )
    return parse_result(await run_isolated(run, name=f"{type(agent).__name__}.run"), agent=type(agent).__name__)


async def run_isolated(run: Callable[[], Awaitable[T]], *, name: str) -> T:
    """Return what the user's function ``run`` returns; it runs in a separate task, which it may cancel.

    Raises ``EpisodeError`` if it raises or cancels itself; ``name`` is its name in the message.
    """
    outcome: list[T | EpisodeError] = []

    async def call() -> None:
        try:
            outcome.append(await run())
        except BaseException as error:
            if not is_failure(error):
                raise
            outcome.append(error if isinstance(error, EpisodeError) else failure_of(name, error))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call)
    # On asyncio, a task can be cancelled by an object that it awaits; it ends without an error then.
    if not outcome:
        raise EpisodeError(f"{name} was cancelled, by itself or by something that it awaited.")
    if isinstance(outcome[0], EpisodeError):
        raise outcome[0]
    return outcome[0]


def is_failure(error: BaseException) -> bool:
    """Return whether ``error``, caught around a call of an agent's code, fails its episode and nothing else.

    ``SystemExit`` does as well. Cancellations do not, and neither does ``KeyboardInterrupt``: those end the run.
    """
    if isinstance(error, BaseExceptionGroup):
        return all(map(is_failure, error.exceptions))
    # A class of the agent's own below BaseException fails the episode, too. So does GeneratorExit: a coroutine that is
    # closed may end in any way but another await.
    is_cancellation = isinstance(error, asyncio.CancelledError) or type(error).__module__.startswith("trio")
    return not is_cancellation and not isinstance(error, KeyboardInterrupt)


def failure_of(name: str, error: BaseException) -> EpisodeError:
    """Convert an error of the user's function ``name`` to a failure of its episode, with the traceback in its code."""
    failure = EpisodeError(f"{name} raised {describe_error(error)}", traceback=format_agent_traceback(error))
    failure.__cause__ = error
    return failure


def format_agent_traceback(error: BaseException) -> str:
    """Format the traceback of ``error`` from the first frame of the agent's code on; at most 8,000 characters.

    The frames of this library that called the agent are left out, and so are the oldest characters of a longer one.
    """
    # The frames of this library that called the agent say nothing about its error.
    report = traceback.TracebackException.from_exception(error)
    frames = list(report.stack)
    while frames and Path(frames[0].filename).is_relative_to(_PACKAGE):
        del frames[0]
    report.stack = traceback.StackSummary.from_list(frames)
    text = "".join(report.format()).rstrip()
    return text if len(text) <= _MAX_TRACEBACK else f"…{text[-_MAX_TRACEBACK:]}"


def parse_result(result: object, *, agent: str = "agent") -> Reward:
    """Convert the return value of an agent to rewards. Raises ``EpisodeError`` for values that are not rewards."""
    if isinstance(result, Mapping):
        return Reward(by_interaction={InteractionId(str(key)): _number(value, agent) for key, value in result.items()})
    return Reward(last=_number(result, agent))


def _number(value: object, agent: str) -> float:
    """Convert a number, or a numpy or torch scalar, to a float. The store of rewards checks that it is finite."""
    # A scalar of numpy or torch, without importing either.
    item = getattr(value, "item", None)
    try:
        scalar = item() if callable(item) else value
        if isinstance(scalar, bool | int | float):
            return float(scalar)
    except (ValueError, RuntimeError, TypeError, OverflowError) as error:
        raise EpisodeError(f"{agent}.run returned a {type(value).__name__} that is not a reward: {error}") from error
    raise EpisodeError(
        f"{agent}.run returned {_shorten(value)} of type {type(value).__name__}; "
        "return a number, or a dict from completion ids to numbers."
    )


def describe_error(error: BaseException) -> str:
    """Describe an exception in one line; an exception group by its first cause."""
    # The first cause says more than the name of a group.
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    try:
        text = _shorten(str(error), limit=300)
    except Exception as broken:  # noqa: BLE001 - the ``__str__`` of an agent's exception may raise anything
        text = f"its text cannot be read, since __str__ raised {type(broken).__name__}"
    is_ours = isinstance(error, ArealError)
    return text if is_ours and text else f"{type(error).__name__}: {text}".removesuffix(": ")


def _shorten(value: object, *, limit: int = 80) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


class LimitedAgent(ABC):
    """An agent of which a limited number of episodes run at once, such as one that runs in processes.

    Each episode first acquires a runner, and its time limit starts from then on.
    """

    @property
    @abstractmethod
    def agent_name(self) -> str:
        """Name of the agent in messages."""

    @abstractmethod
    def acquire(self) -> AbstractAsyncContextManager[Agent]:
        """Wait for a free runner and yield it for one episode. Leaving the block releases it."""

    async def run(self, data: Any, **extra_kwargs: Any) -> Any:
        """Run one episode, including the wait for a runner, and return its reward. Raises ``EpisodeError``."""
        async with self.acquire() as agent:
            return await agent.run(data, **extra_kwargs)


def name_of(agent: object) -> str:
    """Return the name of an agent or a workflow for messages."""
    return agent.agent_name if isinstance(agent, LimitedAgent) else type(agent).__name__


def acquire_agent(agent: Agent | LimitedAgent) -> AbstractAsyncContextManager[Agent]:
    """Acquire a runner of an agent whose episodes are limited; other agents are returned at once."""
    return agent.acquire() if isinstance(agent, LimitedAgent) else nullcontext(agent)


PLACEHOLDER = "not-needed-on-the-url-of-a-session"
"""A key without any rights: other services reject a request with it."""

_NAMES = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY")

_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_DIRECT_NAMES = ("NO_PROXY", "no_proxy")

_users: Counter[str] = Counter()
_direct: list[tuple[str, ...]] = []
"""The hosts of the blocks of ``direct_connections`` that are open."""
_undirected: dict[str, str | None] = {}
"""The variables before the first of these blocks."""
_lock = threading.Lock()


def proxy_variables(environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return the variables that send requests of HTTP clients to a proxy, as in the networks of many companies."""
    names = {"http_proxy", "https_proxy", "all_proxy"}
    return tuple(sorted(name for name, value in environment.items() if name.lower() in names and value))


@contextmanager
def direct_connections(*hosts: str) -> Iterator[None]:
    """Have HTTP clients reach loopback and ``hosts`` (or URLs) directly, past a proxy of the environment.

    This holds within the block, for this process and for all that it starts. Without such a proxy, nothing is changed.
    """
    if not proxy_variables():
        yield
        return
    with _lock:
        if not _direct:
            _undirected.update({name: os.environ.get(name) for name in _DIRECT_NAMES})
        hosts = tuple(urlsplit(host).hostname or host for host in hosts)
        _direct.append(hosts)
        _write_direct()
    try:
        yield
    finally:
        with _lock:
            _direct.remove(hosts)
            _write_direct()


def _write_direct() -> None:
    """Set the variables for all open blocks: runs of one process overlap. Without one, they are as they were."""
    known = next(filter(None, _undirected.values()), "")
    wanted = [*known.split(","), *_LOOPBACK, *(host for hosts in _direct for host in hosts)]
    for name in _DIRECT_NAMES:
        value = ",".join(dict.fromkeys(filter(None, wanted))) if _direct else _undirected[name]
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextmanager
def placeholder_keys(environment: MutableMapping[str, str] = os.environ) -> Iterator[None]:
    """Set a placeholder in each variable that is not set, until the last such block of the process is left.

    An inline agent gets a base URL that authorises its session by itself, so any key or none is accepted there.
    OpenAI's SDK still requires one and looks for it in the environment. A key that is set there is not changed.
    """
    with _lock:
        ours = [name for name in _NAMES if environment.get(name, PLACEHOLDER) == PLACEHOLDER]
        for name in ours:
            environment[name] = PLACEHOLDER
        # Counted, because runs of one process overlap: the last one that leaves removes the key.
        _users.update(ours)
    try:
        yield
    finally:
        with _lock:
            _users.subtract(ours)
            for name in ours:
                if not _users[name] and environment.get(name) == PLACEHOLDER:
                    del environment[name]
