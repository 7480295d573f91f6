"""The model of a service at scale: it is repeatable, its books balance, and what it says follows from its figures."""

from __future__ import annotations

import json

import anyio
import numpy as np
import pytest
from attrs import evolve
from benchmarks.simulation.__main__ import main
from benchmarks.simulation.agents import Workload
from benchmarks.simulation.engines import EngineModel, LogNormal, SimulatedEngine
from benchmarks.simulation.findings import find, format_findings, to_json
from benchmarks.simulation.meter import LOOP, Meter, Reading, Steps, virtual_run
from benchmarks.simulation.model import Measured, Scenario, run_scenario
from benchmarks.simulation.vocabulary import FIRST_WORD, create_word_renderer, words
from click.testing import CliRunner

from areal_actors.domain import EngineRequest, FinishReason, SampleKey, Sampling, Snapshot
from areal_actors.testing.virtual_time import virtual_backend

WORKLOAD = Workload(
    num_turns=LogNormal(median=2, sigma=0.3, least=1, most=3),
    opening_tokens=LogNormal(median=24, sigma=0.2, least=8, most=48),
    tool_tokens=LogNormal(median=8, sigma=0.2, least=4, most=16),
)
ENGINE = EngineModel(
    answer_tokens=LogNormal(median=24, sigma=0.5, least=8, most=64), tokens_per_chunk=16, load_seconds=0.5
)
SMALL = Scenario(
    num_sessions=8,
    num_engines=4,
    group_size=2,
    max_staleness=1,
    train_seconds=1.0,
    warm_up_seconds=5.0,
    measured_seconds=12.0,
    workload=WORKLOAD,
    engine=ENGINE,
)


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def engine_with(model: EngineModel) -> SimulatedEngine:
    return SimulatedEngine(model, name="simulated", stop_token_id=2, vocab_size=2000)


def request_of(number: int, num_prompt: int = 100, turn: int = 0) -> EngineRequest:
    return EngineRequest(
        id=f"r{number}-{turn}",
        prompt=np.zeros(num_prompt, np.int32),
        sampling=Sampling(max_new_tokens=4096),
        key=SampleKey(seed=0, path=(number, f"digest {turn}", 0, 0)),
    )


async def read(engine: SimulatedEngine, request: EngineRequest) -> list:
    async with engine.generate(request) as chunks:
        return [chunk async for chunk in chunks]


@pytest.fixture(scope="module")
def measured() -> Measured:
    """One run of the small service."""
    return run_scenario(SMALL)


@pytest.fixture(params=["asyncio", "trio"])
def virtual_time(request):
    """Both event loops, in virtual time."""
    return virtual_backend(request.param)


# ------------------------------------------------------------------------------------------------ the meter


def test_time_is_charged_to_whoever_was_entered_last():
    """What is nested is charged to itself alone, and the sum is all the time that passed."""
    clock = Clock()
    meter = Meter(clock=clock)
    meter.enter("outer")
    clock.now += 1
    meter.enter("inner")
    clock.now += 2
    meter.leave()
    clock.now += 4
    meter.leave()
    clock.now += 8
    meter.enter("outer")

    assert {"outer": 5, "inner": 2, LOOP: 8} == meter.read(0.0).cpu


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_steps_are_charged_and_results_pass(backend):
    """A coroutine behaves as without a meter: it waits, returns, raises and is cancelled."""
    meter = Meter()

    async def work(*, is_failing: bool) -> int:
        await anyio.sleep(1)
        if is_failing:
            raise ValueError("as told")
        return 42

    async def run() -> float:
        assert await Steps(work(is_failing=False), meter, "work") == 42
        with pytest.raises(ValueError, match="as told"):
            await Steps(work(is_failing=True), meter, "work")
        with anyio.move_on_after(0.5) as scope:
            await Steps(work(is_failing=False), meter, "work")
        assert scope.cancelled_caught
        return anyio.current_time()

    started = virtual_run(_now, meter=Meter(), backend=backend)
    ended = virtual_run(run, meter=meter, backend=backend)

    assert 2.5 == pytest.approx(ended - started)
    assert meter.read(0.0).cpu["work"] > 0


async def _now() -> float:
    return anyio.current_time()


def test_a_busy_process_lets_time_pass():
    """Work that occupies the process takes its time on the virtual clock; other work takes none."""
    meter = Meter(clock=Clock(), occupying=lambda label: label == "busy")

    async def run() -> float:
        started = anyio.current_time()
        meter.spend("busy", 3.0)
        meter.spend("idle", 5.0)
        return anyio.current_time() - started

    assert 3.0 == pytest.approx(virtual_run(run, meter=meter))


def test_readings_subtract():
    """What was counted between two readings is their difference, also of what was not there before."""
    before = Reading(at=1.0, cpu={"a": 1.0}, messages={("a", "b", "Ask"): 2})
    after = Reading(at=4.0, cpu={"a": 3.0, "b": 1.0}, messages={("a", "b", "Ask"): 5})

    assert Reading(at=3.0, cpu={"a": 2.0, "b": 1.0}, messages={("a", "b", "Ask"): 3}) == after.since(before)


# ------------------------------------------------------------------------------------------------ engines


def test_words_are_tokens():
    """Every id that an engine draws is a word, and text of words has as many tokens as it says."""
    vocabulary = create_word_renderer().vocabulary
    text = words(998, 4)

    assert "w998w999w000w001" == text
    assert [FIRST_WORD + 998, FIRST_WORD + 999, FIRST_WORD, FIRST_WORD + 1] == vocabulary.encode(text)
    assert text == vocabulary.decode(vocabulary.encode(text))


def test_an_answer_depends_on_its_key_alone(virtual_time):
    """Lengths are the same on every engine and in any order; the last chunk ends with the stop token."""

    async def run() -> None:
        first, second = engine_with(ENGINE), engine_with(ENGINE)
        forth = [await read(first, request_of(number)) for number in range(8)]
        back = [await read(second, request_of(number)) for number in reversed(range(8))][::-1]
        lengths = [sum(len(chunk.token_ids) for chunk in chunks) for chunks in forth]

        assert lengths == [sum(len(chunk.token_ids) for chunk in chunks) for chunks in back]
        assert len(set(lengths)) > 1
        assert all(chunks[-1].finish is FinishReason.STOP and chunks[-1].token_ids[-1] == 2 for chunks in forth)

    anyio.run(run, backend=virtual_time[0], backend_options=virtual_time[1])


def test_a_full_batch_lets_others_wait(virtual_time):
    """No more run than there are places; who leaves the queue leaves its place to the next."""

    async def run() -> None:
        engine = engine_with(evolve(ENGINE, max_running=2))
        async with anyio.create_task_group() as tasks:
            for number in range(5):
                tasks.start_soon(read, engine, request_of(number))
            with anyio.move_on_after(0.01):
                await read(engine, request_of(5))
            busy = engine.statistics()
        idle = engine.statistics()

        assert (2, 3) == (busy.running, busy.waiting)
        assert (0, 0) == (idle.running, idle.waiting)

    anyio.run(run, backend=virtual_time[0], backend_options=virtual_time[1])


def test_a_conversation_finds_its_prefix(virtual_time):
    """A second turn computes only what is new, unless new weights came in between or others took the place."""

    async def run() -> None:
        engine = engine_with(evolve(ENGINE, cache_tokens=400))
        first = await read(engine, request_of(0))
        num_first = 100 + sum(len(chunk.token_ids) for chunk in first)
        second = await read(engine, request_of(0, num_first + 20, turn=1))
        await engine.load(Snapshot(version=1, path=None))
        third = await read(engine, request_of(0, 200, turn=2))
        await read(engine, request_of(1, 390))
        fourth = await read(engine, request_of(0, 250, turn=3))

        assert [0, num_first, 0, 0] == [chunks[0].num_cached_tokens for chunks in (first, second, third, fourth)]
        assert [0, 1] == [second[0].version, third[0].version]

    anyio.run(run, backend=virtual_time[0], backend_options=virtual_time[1])


# ------------------------------------------------------------------------------------------------ the model


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_small_service_trains(backend, measured):
    """Groups run, are trained and followed by others; what the agents saw is what the actors counted."""
    measured = measured if backend == "asyncio" else run_scenario(evolve(SMALL, backend=backend))
    sent = {message: num for (_, receiver, message), num in measured.reading.messages.items() if receiver == "sessions"}

    assert measured.version > 2
    assert measured.num_episodes > SMALL.num_sessions
    assert sent["Complete"] == measured.num_turns
    assert len(measured.observed.seconds) == pytest.approx(measured.num_turns, abs=2 * SMALL.num_sessions)
    assert sent["OpenSession"] == pytest.approx(measured.num_episodes, abs=2 * SMALL.num_sessions)
    assert all(measured.reading.cpu[label] > 0 for label in ("sessions", "router", "generation", "exports", "capacity"))


def test_the_model_is_repeatable(measured):
    """Without a clock that computing moves, two runs send the same messages and see the same latencies."""
    again = run_scenario(SMALL)

    assert measured.reading.messages == again.reading.messages
    assert measured.observed.seconds == again.observed.seconds


def test_one_process_takes_its_time():
    """Where computing takes time, a proxy that needs half a second for a request serves no more than two a second."""
    slow = evolve(SMALL, is_one_process=True, is_external=True, proxy=evolve(SMALL.proxy, per_request=0.5))
    measured = run_scenario(slow)

    assert measured.num_requests <= 2 * measured.reading.at + 2 * SMALL.num_sessions
    assert measured.observed.percentile(50) > 2


def test_the_first_bottleneck_is_the_heaviest_that_cannot_be_shared(measured):
    """The limit follows from the load: twice the sessions at half of a core."""
    cpu = {"sessions": 10.0, "router": 4.0, "proxy": 100.0, "generation": 50.0, "capacity": 1.0}
    reading = Reading(at=20.0, cpu=cpu, messages={})
    found = find(evolve(measured, reading=reading, num_live=100))

    assert ["sessions", "router", "capacity"] == [load.label for load in found.bottlenecks]
    assert 200.0 == pytest.approx(found.bottlenecks[0].max_sessions)
    assert "first bottleneck: sessions, one core at 200 sessions" in format_findings(
        evolve(measured, reading=reading, num_live=100)
    )
    assert to_json(measured)["sessions_live"] == measured.num_live


def test_the_command_writes_its_figures(tmp_path):
    """The printed report and the JSON come from one run."""
    path = tmp_path / "figures.json"
    arguments = ["--sessions", "8", "--engines", "2", "--group-size", "2", "--warm-up", "5", "--seconds", "5"]
    result = CliRunner().invoke(main, [*arguments, "--json", str(path)], catch_exceptions=False)
    figures = json.loads(path.read_text(encoding="utf-8"))

    assert "first bottleneck" in result.output
    assert {"facts", "actors", "one_process", "messages"} <= figures.keys()
