"""Random histories of a replica set: replicas come, die, fail and return, weights are published, generations run.

* Each generation ends once; its tokens are contiguous; its length is what was asked for.
* The version of each token had been published (or was the first one) when it was sampled, and versions do not fall.
* A generation that began after a publication was answered has no older token.
* A session whose replica serves all the while is asked at one engine only.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.stacks.replica_stack import START, CountingEngine, Reading, ReplicaStack, open_replica_stack, request

from areal_actors.domain import FinishReason, PauseMode
from areal_actors.errors import ArealError, EngineError
from areal_actors.generation.replicas import ReplicaSetConfig
from areal_actors.messages import PauseGeneration, ResumeGeneration
from areal_actors.testing import virtual_backend

NAMES = st.sampled_from("abc")
STEPS = st.one_of(
    st.tuples(st.just("add"), NAMES),
    st.tuples(st.just("add"), NAMES),
    st.tuples(st.just("kill"), NAMES),
    st.tuples(st.just("fail"), NAMES),
    st.tuples(st.just("refuse"), NAMES),
    st.tuples(st.just("block"), NAMES),
    st.tuples(st.just("unblock"), NAMES),
    st.tuples(st.just("publish"), st.sampled_from(["lent", "disk"])),
    st.tuples(st.just("pause"), st.sampled_from([PauseMode.KEEP])),
    st.tuples(st.just("resume"), st.none()),
    st.tuples(st.just("begin"), st.tuples(st.integers(1, 12), st.sampled_from(["", "x", "y"]))),
    st.tuples(st.just("begin"), st.tuples(st.integers(1, 12), st.sampled_from(["", "x", "y"]))),
    st.tuples(st.just("sample"), st.integers(1, 6)),
    st.tuples(st.just("sample"), st.integers(1, 6)),
    st.tuples(st.just("wait"), st.integers(1, 40)),
)


class History:
    """The steps so far, and the checks of their results."""

    def __init__(self, stack: ReplicaStack, tasks) -> None:
        self.stack, self.tasks = stack, tasks
        self.version = self.next_version = 0
        self.published = {0}
        self.readings: list[tuple[Reading, int]] = []
        self.engines: list[CountingEngine] = []

    async def do(self, what: str, argument) -> None:
        await getattr(self, what)(argument)
        await anyio.wait_all_tasks_blocked()
        self.check()

    async def add(self, name: str) -> None:
        self.engines.append(await self.stack.add(name, CountingEngine(is_gated=True)))

    async def kill(self, name: str) -> None:
        if name in self.stack.refs:
            await self.stack.kill(name)

    async def fail(self, name: str) -> None:
        if name in self.stack.engines:
            self.stack.engines[name].fail(RuntimeError("broken"))

    async def refuse(self, name: str) -> None:
        if name in self.stack.engines:
            self.stack.engines[name].refuses.add(self.next_version + 1)

    async def block(self, name: str) -> None:
        """Have loads wait."""
        if name in self.stack.engines:
            self.stack.engines[name].gate = anyio.Event()

    async def unblock(self, name: str) -> None:
        if name in self.stack.engines:
            self.stack.engines[name].gate.set()

    async def publish(self, how: str) -> None:
        self.next_version += 1
        self.published.add(self.next_version)
        self.tasks.start_soon(self._publish, self.next_version, how)

    async def _publish(self, version: int, how: str) -> None:
        with suppress(EngineError):
            await self.stack.publish(version, is_lent=how == "lent")
            self.version = version

    async def pause(self, mode: PauseMode) -> None:
        await self.stack.router.ask(PauseGeneration(mode=mode))

    async def resume(self, _: None) -> None:
        await self.stack.router.ask(ResumeGeneration())

    async def begin(self, what: tuple[int, str]) -> None:
        num_tokens, key = what
        reading = Reading(self.stack, request(num_tokens, key=key))
        self.readings.append((reading, self.version))
        self.tasks.start_soon(reading.run)

    async def sample(self, num_tokens: int) -> None:
        for engine in self.engines:
            engine.release(num_tokens)

    async def wait(self, seconds: int) -> None:
        await anyio.sleep(seconds)

    def check(self) -> None:
        for reading, promised in self.readings:
            assert [START + 1 + number for number in range(len(reading.ids))] == reading.ids
            assert reading.versions == sorted(reading.versions)
            assert set(reading.versions) <= self.published
            assert all(version >= promised for version in reading.versions)
            finishes = [chunk.finish for chunk in reading.chunks if chunk.finish is not None]
            assert len(finishes) <= 1

    async def end(self) -> None:
        """Let everything continue: all generations that can end do."""
        for engine in self.engines:
            engine.gate.set()
        await self.resume(None)
        await self.add("d")
        await self.publish("disk")
        await self.sample(1_000)
        await anyio.sleep(600)
        self.check()
        for reading, _ in self.readings:
            assert reading.is_over
            if reading.error is None:
                assert FinishReason.LENGTH is reading.chunks[-1].finish
                assert reading.asked.sampling.max_new_tokens == len(reading.ids)
            else:
                assert isinstance(reading.error, ArealError)
                assert all(chunk.finish is None for chunk in reading.chunks)


async def play(steps: list[tuple[str, object]]) -> None:
    async with (
        open_replica_stack(config=ReplicaSetConfig(wait_seconds=100, load_seconds=30)) as stack,
        anyio.create_task_group() as tasks,
    ):
        history = History(stack, tasks)
        for what, argument in steps:
            await history.do(what, argument)
        await history.end()
        for engine in history.engines:
            assert 0 == engine.statistics().running == engine.statistics().waiting


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@settings(max_examples=40)
@given(steps=st.lists(STEPS, max_size=30))
def test_answers_are_whole_or_fail_once(backend: str, steps: list[tuple[str, object]]):
    """Whatever happens to the replicas."""
    name, options = virtual_backend(backend)
    anyio.run(partial(play, steps), backend=name, backend_options=options)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@settings(max_examples=20)
@given(others=st.lists(st.tuples(st.sampled_from("bc"), st.sampled_from(["add", "kill", "begin"])), max_size=12))
def test_session_stays_while_its_replica_serves(backend: str, others: list[tuple[str, str]]):
    """Whatever becomes of the other replicas, and however many sessions there are."""

    async def stay() -> None:
        async with open_replica_stack("a") as stack:
            await stack.generate(request(key="mine"))
            for name, what in others:
                if what == "add":
                    await stack.add(name)
                elif what == "kill" and name in stack.refs:
                    await stack.kill(name)
                else:
                    await stack.generate(request())
                await stack.generate(request(key="mine"))
            seen = [asked.routing_key for asked in stack.engines["a"].requests]

        assert 1 + len(others) == seen.count("mine")

    name, options = virtual_backend(backend)
    anyio.run(stay, backend=name, backend_options=options)
