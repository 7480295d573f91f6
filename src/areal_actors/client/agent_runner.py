"""``AgentRunner``: run a coroutine function over a dataset, each item in a separate session, many concurrently.

A batch has one result for each item, in the order of the items, and shows its progress: a bar at a terminal, the items
that failed, and a summary at the end.
"""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sized
from contextlib import aclosing
from functools import cached_property, partial
from inspect import isawaitable
from random import Random
from statistics import fmean
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import anyio
import httpx
from attrs import define, evolve, field, frozen

from areal_actors.cache import parse_reward
from areal_actors.client.agent_session import AgentSession
from areal_actors.client.http import RetryPolicy, lent_client
from areal_actors.domain import InteractionId, SessionId
from areal_actors.errors import ConfigError, DatasetError, EpisodeError, RewardError, Unauthorized
from areal_actors.lib.telemetry import get_logger

if TYPE_CHECKING:
    from rich.console import Console

_log = get_logger(__name__)

_CANCELLED_ITSELF = "The agent was cancelled by something of its own; catch that, or find out what it waited for."

Item = TypeVar("Item")
AgentFunction = Callable[[Any], Awaitable[Any]]


class AgentRunner:
    """Runs an agent over items, and reports every episode to the proxy with its reward.

    ::

        batch = await AgentRunner(max_concurrent=20).run(MyAgent().run, dataset)

    The agent returns a number, which finalizes its session; or a dict of numbers by completion id; or ``None``, if it
    has set rewards or finalized the session itself. Requests are attributed to sessions as described for
    ``AgentSession``.
    """

    def __init__(
        self,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        max_concurrent: int = 20,
        retries: RetryPolicy | None = None,
        task_id: str = "item",
        is_quiet: bool = False,
        stream: TextIO | None = None,
        http_client: httpx.AsyncClient | None = None,
        random: Random | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Create a runner.

        Args:
            base_url: the proxy's URL, as for ``AgentSession``.
            api_key: the key for ``start_session``, as for ``AgentSession``.
            max_concurrent: maximum number of items in progress. An item for which the server has no capacity waits for
                it.
            retries: how often, and after which waits, an item is tried again after a failed attempt; three attempts by
                default.
            task_id: the readable prefix of session ids, before the item's number.
            is_quiet: show no progress.
            stream: where progress is shown, instead of standard error.
            http_client: sends the sessions' control requests; it is not closed.
            random: source of jitter.
            environment: read when sessions start, instead of ``os.environ``.

        Raises:
            ConfigError: ``max_concurrent`` is less than 1.
        """
        if max_concurrent < 1:
            raise ConfigError(f"max_concurrent: {max_concurrent} items cannot be in work at once; give 1 or more.")
        self._max_concurrent = max_concurrent
        self._retries = retries or RetryPolicy(max_attempts=3, first_wait_seconds=1.0, max_wait_seconds=30.0)
        self._task_id = task_id
        self._is_quiet = is_quiet
        self._stream = stream
        self._http_client = http_client
        self._random = random or Random()  # noqa: S311 - jitter
        self._options: dict[str, Any] = {"base_url": base_url, "api_key": api_key, "environment": environment}

    async def run(
        self, agent: Callable[[Item], Awaitable[Any]], dataset: Iterable[Item] | AsyncIterable[Item]
    ) -> BatchResult:
        """Run ``agent`` once for each item; an item is taken from the dataset when it can start.

        An item whose attempts all failed becomes a result with an ``error``; the other items continue. The session of a
        failed attempt ends without a reward from the runner, and the next attempt uses a new session. Cancellation ends
        all open sessions.

        Raises:
            ConfigError: no proxy is configured.
            Unauthorized: the key cannot start sessions. Raised after the items in progress have finished.
            DatasetError: iterating over the dataset failed. Raised after the items in progress have finished.
        """
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

        console = Console(file=self._stream or sys.stderr, quiet=self._is_quiet)
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        # The bar is shown at a terminal only, and removed at the end.
        with Progress(*columns, console=console, transient=True, disable=self._is_quiet) as bar:
            task = bar.add_task("items", total=len(dataset) if isinstance(dataset, Sized) else None)

            def note_result(result: ItemResult) -> None:
                bar.advance(task)
                if result.error is not None:
                    failure = f"failed after {result.num_attempts} attempts: {describe(result.error)}"
                    _print(console, f"item {result.index} {failure}")

            async with lent_client(self._http_client) as http, aclosing(_iterate(dataset)) as items:
                batch = _Batch(
                    agent=agent,
                    task_id=self._task_id,
                    create_session=partial(AgentSession, http_client=http, random=self._random, **self._options),
                    note_result=note_result,
                    retries=self._retries,
                    random=self._random,
                )
                result = await batch.run(items, self._max_concurrent)
        _print(console, str(result))
        return result


def _print(console: Console, line: str) -> None:
    # Errors may hold characters that the stream cannot encode; printing them must not fail the batch.
    text = line.encode(console.encoding, "replace").decode(console.encoding)
    console.print(text, markup=False, highlight=False, soft_wrap=True)


@define(eq=False, kw_only=True)
class _Batch:
    """The state of one call of ``run``."""

    agent: AgentFunction
    task_id: str
    create_session: Callable[..., AgentSession]
    note_result: Callable[[ItemResult], None]
    retries: RetryPolicy
    random: Random
    results: dict[int, ItemResult] = field(factory=dict)
    obstacle: Exception | None = None
    """The error that makes it useless to start further items, or ``None``."""

    async def run(self, items: AsyncIterator[Any], max_concurrent: int) -> BatchResult:
        started_at = time.monotonic()
        places = anyio.Semaphore(max_concurrent)
        async with anyio.create_task_group() as tasks:
            index = 0
            while True:
                # An item is taken when there is a place for it, so that a dataset may be infinite or generated.
                await places.acquire()
                if self.obstacle is not None:
                    break
                try:
                    item = await anext(items)
                except StopAsyncIteration:
                    break
                except Exception as error:  # noqa: BLE001 - user code may raise anything
                    # Raised after the items in progress have finished; here, it would cancel them.
                    self.obstacle = DatasetError(f"The dataset failed after {index} items: {describe(error)}.")
                    self.obstacle.__cause__ = error
                    break
                tasks.start_soon(self._run_item, places, index, item)
                index += 1
        if self.obstacle is not None:
            raise self.obstacle
        ordered = tuple(self.results[index] for index in sorted(self.results))
        return BatchResult(results=ordered, seconds=time.monotonic() - started_at)

    async def _run_item(self, places: anyio.Semaphore, index: int, item: Any) -> None:
        begun = ItemResult(index=index, item=item, num_attempts=0)
        # This result remains if the agent raises the event loop's cancellation error although it was not cancelled.
        self.results[index] = evolve(begun, num_attempts=1, error=EpisodeError(_CANCELLED_ITSELF))
        try:
            result = begun
            while True:
                result = await self._attempt(evolve(result, num_attempts=result.num_attempts + 1))
                is_last = result.num_attempts >= self.retries.max_attempts
                # An EpisodeError says that the agent returned a value that is not a reward: it would fail again.
                is_certain = result.error is None or isinstance(result.error, EpisodeError)
                if is_certain or is_last or self.obstacle is not None:
                    break
                _log.info("item_retried", item=index, attempt=result.num_attempts, error=describe(result.error))
                await anyio.sleep(self.retries.wait_seconds(result.num_attempts - 1, None, self.random))
            self.results[index] = result
            self.note_result(self.results[index])
        finally:
            places.release()

    async def _attempt(self, result: ItemResult) -> ItemResult:
        """Run one attempt in a new session. A failure is returned as a result, not raised."""
        session = self.create_session(task_id=f"{self.task_id}-{result.index}")
        started: SessionId | None = None
        try:
            async with session:
                started = session.session_id
                outcome = await self._episode(session, result.item)
        except Exception as error:  # noqa: BLE001 - user code may raise anything
            # Raised before a session started, these come from the configuration and every further item would fail the
            # same way; raised later, they are the agent's own.
            if started is None and isinstance(error, (ConfigError, Unauthorized)):
                self.obstacle = self.obstacle or error
            return evolve(result, session=started, error=error, outcome=None)
        return evolve(result, session=started, error=None, outcome=outcome)

    async def _episode(self, session: AgentSession, item: Any) -> Outcome:
        name = getattr(self.agent, "__qualname__", type(self.agent).__name__)
        awaited = self.agent(item)
        if not isawaitable(awaited):
            raise EpisodeError(f"{name} returned without being awaited; give a coroutine function ('async def').")
        outcome = parse_outcome(await awaited, name=name)
        if isinstance(outcome, Mapping):
            for interaction, reward in outcome.items():
                await session.set_reward(interaction, reward)
        elif outcome is not None:
            await session.finalize(outcome)
        return outcome


async def _iterate(dataset: Iterable[Item] | AsyncIterable[Item]) -> AsyncGenerator[Item, None]:
    if isinstance(dataset, AsyncIterable):
        async for item in dataset:
            yield item
    else:
        for item in dataset:
            yield item


Outcome = float | Mapping[InteractionId, float] | None
"""The final reward, rewards by completion id, or ``None`` if the function has set rewards or finalized itself."""


@frozen(kw_only=True)
class ItemResult:
    """The result of one item. ``session`` and ``outcome`` are those of the last attempt."""

    index: int
    item: Any
    num_attempts: int
    session: SessionId | None = None
    """The session's id, or ``None`` if no session could be started."""
    outcome: Outcome = None
    error: Exception | None = None
    """The error of the last attempt, or ``None`` if it succeeded."""

    @property
    def is_failed(self) -> bool:
        """Whether every attempt failed."""
        return self.error is not None

    @property
    def reward(self) -> float | None:
        """The final reward, or the sum of the rewards by completion; ``None`` if the function returned none."""
        return sum(self.outcome.values()) if isinstance(self.outcome, Mapping) else self.outcome


@frozen(kw_only=True)
class BatchResult:
    """The results of all items, in their order."""

    results: tuple[ItemResult, ...]
    seconds: float

    @cached_property
    def failed(self) -> tuple[ItemResult, ...]:
        """The items that failed."""
        return tuple(result for result in self.results if result.is_failed)

    @property
    def rewards(self) -> tuple[float, ...]:
        """The rewards that the function returned, in order."""
        return tuple(result.reward for result in self.results if not result.is_failed and result.reward is not None)

    @property
    def num_retries(self) -> int:
        """The number of attempts beyond the first, over all items."""
        return sum(result.num_attempts - 1 for result in self.results)

    def __str__(self) -> str:
        """Summarize the batch in one line."""
        parts = [f"{len(self.results) - len(self.failed)} of {len(self.results)} items in {self.seconds:.1f} s"]
        if self.rewards:
            parts.append(f"mean reward {fmean(self.rewards):.3f}")
        if self.num_retries:
            parts.append(f"{self.num_retries} retries")
        if self.failed:
            first = self.failed[0]
            parts.append(f"{len(self.failed)} failed, first item {first.index}: {describe(first.error)}")
        return ", ".join(parts)


def describe(error: BaseException | None) -> str:
    """Return an error's type and message in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def parse_outcome(value: object, *, name: str) -> Outcome:
    """Convert the return value of the function ``name`` to an outcome.

    Raises:
        EpisodeError: it is neither a finite number, nor a dict of finite numbers by completion id, nor ``None``.
    """
    if value is None:
        return None
    try:
        if isinstance(value, Mapping):
            if wrong := [key for key in value if not isinstance(key, str)]:
                raise RewardError(  # noqa: TRY301 - converted below, as other errors of a reward are
                    f"A reward is named by the id of its completion, not by {type(wrong[0]).__name__} {wrong[0]!r}."
                )
            return {InteractionId(key): parse_reward(reward) for key, reward in value.items()}
        return parse_reward(value)
    except RewardError as error:
        raise EpisodeError(
            f"{name} returned a value that is not a reward: {error} Return a number, a dict of numbers by completion "
            "id, or None after setting rewards or finalizing by itself."
        ) from error
