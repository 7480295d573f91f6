"""The ``/metrics`` route for Prometheus; actors are asked for their numbers at each scrape.

There is no global state: every application has its own ``Meter``.
Labels name operations, statuses and actors, never a key, session or path. ``docs/reference/metrics.md`` describes every
metric.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Any, TypeVar

import anyio
from anyio import to_thread
from attrs import frozen
from prometheus_client import ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from areal_actors import __version__
from areal_actors.errors import ArealError
from areal_actors.kernel import ActorState, Message, Ref
from areal_actors.messages import (
    Accounts,
    Capacity,
    DescribeCapacity,
    DescribeEngine,
    DescribeSessions,
    Exports,
    Generation,
    ListKeys,
    Sessions,
)
from areal_actors.proxy.access import Authenticator, read_key
from areal_actors.proxy.exchange import Exchange, Meter, Traffic

P = TypeVar("P")
R = TypeVar("R")

Values = float | Mapping[tuple[str, ...], float]
"""One number, or one for each combination of labels."""

Table = tuple[tuple[Callable[..., Metric], str, str, str], ...]
"""Metrics of an actor: the kind, the name, the meaning, and the attribute of the actor's answer."""
ReadRun = Callable[[], Mapping[str, float | Mapping[str, float]]]
"""Returns numbers of the run by the names of their metrics, such as ``step_reward``, or by source. Blocks."""
_RUN_LABELS = {"not_learning": "cause"}
"""The label of a run's numbers by name, where it is not the source."""
_RUN_MEANINGS = {"not_learning": "1 while the verdict on the run names this cause."}
_SCRAPE_SECONDS = 2.0
"""Actors that have not answered within this time are left out, so that a busy actor does not hide the others."""


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
        families = [*self._own_families(), *_mailbox_families(actors), *process_families()]

        async def describe(ref: Ref[P], message: Message[P, R], table: Table) -> None:
            view = await try_ask(ref, message)
            if view is not None:
                families.extend(create(name, meaning, attrgetter(path)(view)) for create, name, meaning, path in table)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(describe, self.sessions, DescribeSessions(), _SESSIONS)
            tasks.start_soon(describe, self.capacity, DescribeCapacity(), _CAPACITY)
            if self.generation is not None:
                tasks.start_soon(describe, self.generation, DescribeEngine(), _ENGINE)
            if self.read_run is not None:
                families += _run_families(await to_thread.run_sync(self.read_run))
            if self.accounts is not None and self.authenticator.is_admin(read_key(exchange.headers)):
                families += await read_users(self.accounts)
        await send_families(exchange, families)

    def _own_families(self) -> Iterator[Metric]:
        for family in self.meter.registry.collect():
            # The time at which each series began would double their number.
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family
        yield gauge("http_requests_in_flight", "Requests that are being answered.", len(self.traffic))


def _mailbox_families(actors: Mapping[str, Ref[Any]]) -> Iterator[Metric]:
    mailboxes = {name: ref.statistics() for name, ref in actors.items()}
    counts: Values = {(actor,): int(found.state is ActorState.RUNNING) for actor, found in mailboxes.items()}
    yield gauge("actor_up", "1 while the actor takes messages.", counts, labels=("actor",))
    for create, name, meaning, attribute in _MAILBOXES:
        counts = {(actor,): getattr(found, attribute) for actor, found in mailboxes.items()}
        yield create(name, meaning, counts, labels=("actor",))


def _run_families(numbers: Mapping[str, float | Mapping[str, float]]) -> Iterator[Metric]:
    for name, value in numbers.items():
        meaning = _RUN_MEANINGS.get(name, "Of the run; see metrics.jsonl for those of the latest step.")
        if isinstance(value, Mapping):
            label = _RUN_LABELS.get(name, "source")
            yield gauge(name, meaning, {(each,): number for each, number in value.items()}, labels=(label,))
        else:
            yield gauge(name, meaning, value)


async def send_families(exchange: Exchange, families: Iterable[Metric]) -> None:
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

    families: Iterable[Metric]

    def collect(self) -> Iterable[Metric]:
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


_MAILBOXES: Table = (
    (gauge, "actor_queued", "Messages in its mailbox.", "num_queued"),
    (gauge, "actor_running", "Handlers that run.", "num_running"),
    (_counter, "actor_handled", "Handlers that ended.", "num_handled"),
    (_counter, "actor_failed", "Of these, those that raised.", "num_failed"),
    (_counter, "actor_cancelled", "Asks whose asker left.", "num_cancelled"),
)
_ENGINE: Table = (
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
_SESSIONS: Table = (
    (gauge, "sessions_live", "Sessions that take requests.", "num_live"),
    (gauge, "sessions_ended", "Sessions that have ended and are not forgotten.", "num_ended"),
    (gauge, "interactions_pending", "Answers that are being made.", "num_pending"),
    (_counter, "retries_recognised", "Retries that joined or repeated an earlier request.", "num_retries"),
    (gauge, "failed_journals", "1 if the journal can no longer be written.", "num_failed_journals"),
)
_CAPACITY: Table = (
    (gauge, "capacity_available", "Episode groups that may start now.", "available"),
    (gauge, "capacity_running", "Episode groups that run.", "running"),
    (gauge, "capacity_reserved", "Places that are kept for sessions to come.", "reserved"),
    (gauge, "capacity_accepted", "Episode groups that were accepted as training data.", "accepted"),
)
