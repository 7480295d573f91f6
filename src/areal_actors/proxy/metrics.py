"""The ``/metrics`` route for Prometheus; actors are asked for their numbers at each scrape.

There is no global state: every application has its own ``Meter``.
Labels name operations, statuses and actors, never a key, session or path. ``docs/metrics.md`` describes every metric.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from typing import Any, TypeVar

import anyio
from anyio import to_thread
from attrs import define, field, frozen
from prometheus_client import ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from areal_actors import __version__
from areal_actors.errors import ArealError
from areal_actors.kernel import ActorState, ActorStatistics, Message, Ref
from areal_actors.messages import (
    Accounts,
    Capacity,
    CapacityView,
    DescribeCapacity,
    DescribeEngine,
    DescribeSessions,
    EngineView,
    Exports,
    Generation,
    ListKeys,
    Sessions,
    SessionsView,
)
from areal_actors.proxy.access import Authenticator, read_key
from areal_actors.proxy.exchange import Exchange, Meter, Traffic

P = TypeVar("P")
R = TypeVar("R")

Values = float | Mapping[tuple[str, ...], float]
"""One number, or one for each combination of labels."""

ReadRun = Callable[[], Mapping[str, float | Mapping[str, float]]]
"""Returns the numbers of a run by name; those that each source of problems has are by source."""
"""Returns numbers of the run by the names of their metrics, such as ``step_reward``. Blocks."""

_PROBE_SECONDS = 0.01
"""The timer whose lateness is the lag of the event loop."""
_RUN_LABELS = {"not_learning": "cause"}
"""The label of a run's numbers by name, where it is not the source."""
_RUN_MEANINGS = {"not_learning": "1 while the verdict on the run names this cause."}
_SCRAPE_SECONDS = 2.0
"""Actors that have not answered within this time are left out, so that a busy actor does not hide the others."""


@define(kw_only=True)
class Readings:
    """The actors' answers; ``None`` for those that did not answer in time."""

    mailboxes: Mapping[str, ActorStatistics]
    engine: EngineView | None = None
    capacity: CapacityView | None = None
    sessions: SessionsView | None = None
    run: Mapping[str, float | Mapping[str, float]] = field(factory=dict)
    users: tuple[Metric, ...] = ()
    loop_lag_seconds: float = 0.0


@frozen(kw_only=True)
class MetricsEndpoint:
    """The handler of the route. It needs no key; with the admin key, the answer includes the users' numbers."""

    sessions: Ref[Sessions]
    capacity: Ref[Capacity]
    exports: Ref[Exports]
    generation: Ref[Generation] | None
    meter: Meter
    traffic: Traffic
    authenticator: Authenticator
    accounts: Ref[Accounts] | None = None
    read_run: ReadRun | None = None

    async def __call__(self, exchange: Exchange) -> None:
        """Answer in the Prometheus text format."""
        actors: dict[str, Ref[Any]] = {"sessions": self.sessions, "capacity": self.capacity, "exports": self.exports}
        if self.generation is not None:
            actors["generation"] = self.generation
        readings = Readings(mailboxes={name: ref.statistics() for name, ref in actors.items()})

        async def read_engine() -> None:
            if self.generation is not None:
                readings.engine = await try_ask(self.generation, DescribeEngine())

        async def read_capacity() -> None:
            readings.capacity = await try_ask(self.capacity, DescribeCapacity())

        async def read_sessions() -> None:
            readings.sessions = await try_ask(self.sessions, DescribeSessions())

        async def read_run() -> None:
            if self.read_run is not None:
                readings.run = await to_thread.run_sync(self.read_run)

        asked = anyio.current_time()
        await anyio.sleep(_PROBE_SECONDS)
        readings.loop_lag_seconds = max(0.0, anyio.current_time() - asked - _PROBE_SECONDS)
        async with anyio.create_task_group() as tasks:
            for read in (read_engine, read_capacity, read_sessions, read_run):
                tasks.start_soon(read)
        if self.accounts is not None and self.authenticator.is_admin(read_key(exchange.headers)):
            readings.users = await read_users(self.accounts)
        await send_families(exchange, self._families(readings))

    def _families(self, readings: Readings) -> Iterator[Metric]:
        for family in self.meter.registry.collect():
            # The time at which each series began would double their number.
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family
        yield gauge("http_requests_in_flight", "Requests that are being answered.", len(self.traffic))
        mailboxes = readings.mailboxes
        counts: Values = {(actor,): int(found.state is ActorState.RUNNING) for actor, found in mailboxes.items()}
        yield gauge("actor_up", "1 while the actor takes messages.", counts, labels=("actor",))
        for create, name, meaning, attribute in _MAILBOXES:
            counts = {(actor,): getattr(found, attribute) for actor, found in mailboxes.items()}
            yield create(name, meaning, counts, labels=("actor",))

        yield gauge("event_loop_lag_seconds", "How late a timer was at this scrape.", readings.loop_lag_seconds)
        for name, value in readings.run.items():
            meaning = _RUN_MEANINGS.get(name, "Of the run; see metrics.jsonl for those of the latest step.")
            if isinstance(value, Mapping):
                label = _RUN_LABELS.get(name, "source")
                yield gauge(name, meaning, {(each,): number for each, number in value.items()}, labels=(label,))
            else:
                yield gauge(name, meaning, value)
        yield from readings.users
        yield from process_families()
        for view, families in (
            (readings.engine, _ENGINE),
            (readings.sessions, _SESSIONS),
            (readings.capacity, _CAPACITY),
        ):
            for create, name, meaning, path in families if view is not None else ():
                yield create(name, meaning, attrgetter(path)(view))


async def send_families(exchange: Exchange, families: Iterator[Metric]) -> None:
    """Answer with metrics in the Prometheus text format."""
    # Always the plain text format, which every scraper reads: the library's negotiation by ``Accept`` fails on odd
    # values.
    text = generate_latest(_Collected(families))
    await exchange.send_document(200, text, content_type=CONTENT_TYPE_PLAIN_0_0_4.encode())


def process_families() -> Iterator[Metric]:
    """Yield the build, and memory, CPU time and descriptors of this process under Prometheus's usual names."""
    build: Values = {(__version__, platform.python_version()): 1}
    yield gauge("build_info", "1, with the versions as labels.", build, labels=("version", "python"))
    yield from ProcessCollector(registry=None).collect()  # empty off Linux


async def read_users(accounts: Ref[Accounts]) -> tuple[Metric, ...]:
    """Return the users' numbers of tokens; none if the accounts do not answer in time."""
    issued = await try_ask(accounts, ListKeys()) or ()
    tokens: Values = {(each.user.name,): each.num_tokens_today for each in issued}
    meaning = "Tokens sampled with a user's keys since midnight (UTC)."
    return (gauge("user_tokens_today", meaning, tokens, labels=("user",)),)


@frozen
class _Collected:
    """A registry as far as the library's encoders need one: an object with ``collect``."""

    families: Iterator[Metric]

    def collect(self) -> Iterator[Metric]:
        return self.families


async def try_ask(ref: Ref[P], message: Message[P, R]) -> R | None:
    """Return the reply, or ``None`` if it did not arrive in time or failed."""
    with anyio.move_on_after(_SCRAPE_SECONDS):
        try:
            return await ref.ask(message)
        except ArealError:
            return None
    return None


# -------------------------------------------------------------------------------------------------- the families


def _counter(name: str, meaning: str, values: Values, *, labels: tuple[str, ...] = ()) -> Metric:
    family = CounterMetricFamily(f"areal_{name}", meaning, labels=labels)
    return _filled(family, values)


def gauge(name: str, meaning: str, values: Values, *, labels: tuple[str, ...] = ()) -> Metric:
    """Return the gauge ``areal_<name>`` with a value for each combination of labels."""
    return _filled(GaugeMetricFamily(f"areal_{name}", meaning, labels=labels), values)


def _filled(family: Any, values: Values) -> Metric:
    for labels, value in values.items() if isinstance(values, Mapping) else [((), values)]:
        family.add_metric(labels, value)
    return family  # type: ignore[no-any-return]


_MAILBOXES: tuple[tuple[Callable[..., Metric], str, str, str], ...] = (
    (gauge, "actor_queued", "Messages in its mailbox.", "num_queued"),
    (gauge, "actor_running", "Handlers that run.", "num_running"),
    (_counter, "actor_handled", "Handlers that ended.", "num_handled"),
    (_counter, "actor_failed", "Of these, those that raised.", "num_failed"),
    (_counter, "actor_cancelled", "Asks whose asker left.", "num_cancelled"),
)
_ENGINE = (
    (gauge, "engine_running", "Generations that are being sampled.", "statistics.running"),
    (gauge, "engine_waiting", "Generations that wait for a place.", "statistics.waiting"),
    (gauge, "engine_replicas", "Engines that serve.", "num_engines"),
    (gauge, "engine_version", "Version of the weights that are served.", "version"),
    (_counter, "engine_prompt_tokens", "Tokens of prompts, cached ones included.", "statistics.prompt_tokens"),
    (_counter, "engine_cached_tokens", "Of these, those that were not computed again.", "statistics.cached_tokens"),
    (_counter, "engine_sampled_tokens", "Tokens that were sampled.", "statistics.sampled_tokens"),
    (_counter, "engine_aborted", "Generations that were aborted.", "statistics.aborted"),
    (_counter, "engine_busy_seconds", "Time in which something was computed.", "statistics.busy_seconds"),
)
"""Metrics of an actor: the kind, the name, the meaning, and the attribute of the actor's answer."""
_SESSIONS = (
    (gauge, "sessions_live", "Sessions that take requests.", "num_live"),
    (gauge, "sessions_ended", "Sessions that have ended and are not forgotten.", "num_ended"),
    (gauge, "interactions_pending", "Answers that are being made.", "num_pending"),
    (_counter, "retries_recognised", "Retries that joined or repeated an earlier request.", "num_retries"),
    (gauge, "failed_journals", "1 if the journal can no longer be written.", "num_failed_journals"),
)
_CAPACITY = (
    (gauge, "capacity_available", "Episode groups that may start now.", "available"),
    (gauge, "capacity_running", "Episode groups that run.", "running"),
    (gauge, "capacity_reserved", "Places that are kept for sessions to come.", "reserved"),
    (gauge, "capacity_accepted", "Episode groups that were accepted as training data.", "accepted"),
)
