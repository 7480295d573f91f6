"""A server that samples nothing is found in seconds; one that reads long prompts, or whose clients are slow, is not."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import httpx
import pytest
from attrs import define, field
from hypothesis import given
from hypothesis import strategies as st

from areal_actors.errors import EngineError
from areal_actors.generation.servers.config import ServerConfig
from areal_actors.generation.servers.progress import Progress
from areal_actors.generation.servers.server import Server
from areal_actors.lib.change_signal import ChangeSignal
from areal_actors.testing.virtual_time import virtual_backend

NEVER = 1e9


@define
class SimulatedServer:
    """Reads one prompt after the other, before it goes on sampling for all that were read; an event has 32 tokens."""

    progress: Progress
    read: float
    """Seconds per token of a prompt."""
    sample: float
    """Seconds per token of all answers, whatever their number."""
    now: float = 0.0
    unread: list[tuple[str, int, int]] = field(factory=list)
    left: dict[str, int] = field(factory=dict)
    """Tokens that each answer lacks."""
    since_event: dict[str, int] = field(factory=dict)
    excess: float = 0.0
    """The longest silence beyond what was allowed."""

    def arrive(self, name: str, prompt: int, answer: int) -> None:
        self.progress.begin(name, num_tokens=prompt, has_grammar=False, now=self.now)
        self.unread.append((name, prompt, answer))

    def step(self) -> None:
        """Read a prompt, or sample a token for each answer."""
        if self.unread:
            name, prompt, answer = self.unread.pop(0)
            self.now += self.read * prompt
            self.left[name], self.since_event[name] = answer - 1, 0
            self._send(name, 1)
            return
        self.now += self.sample
        for name in list(self.left):
            self.left[name] -= 1
            self.since_event[name] += 1
            if self.since_event[name] == 32 or self.left[name] <= 0:
                self._send(name, self.since_event[name])
                self.since_event[name] = 0

    def _send(self, name: str, num_tokens: int) -> None:
        silent, allowed = self.progress.silent_seconds(self.now), self.progress.allowed_seconds()
        self.excess = max(self.excess, silent - allowed)
        self.progress.note_tokens(name, num_tokens=num_tokens, num_cached=0, now=self.now)
        if self.left[name] <= 0:
            del self.left[name]
            self.progress.end(name)
        else:
            self.progress.wait(name, now=self.now)


ARRIVALS = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 200_000), st.integers(2, 200)), min_size=1, max_size=12
)


@given(arrivals=ARRIVALS, read=st.floats(1e-6, 1e-2), sample=st.floats(1e-3, 1.0))
def test_a_server_of_constant_speed_never_counts_as_stalled(arrivals, read, sample):
    """Whatever the lengths of its prompts, and whenever they arrive."""
    server = SimulatedServer(Progress(NEVER, 6.0, 32), read, sample)
    for number, (steps, prompt, answer) in enumerate(arrivals):
        for _ in range(steps):
            if server.unread or server.left:
                server.step()
        server.arrive(str(number), prompt, answer)
    while server.unread or server.left:
        server.step()

    assert server.excess <= 1e-6


@given(sample=st.floats(1e-3, 0.03), num=st.integers(1, 8))
def test_a_server_that_stops_sampling_may_be_silent_for_the_shortest_time(sample, num):
    """If it has read all prompts, and an event takes at most a third of that time."""
    server = SimulatedServer(Progress(120.0, 6.0, 32), 1e-4, sample)
    for number in range(num):
        server.arrive(str(number), 1000, 500)
    for _ in range(200):
        server.step()

    assert server.progress.allowed_seconds() == pytest.approx(6.0)
    assert server.progress.silent_seconds(server.now + 7.0) > 6.0


def sampled() -> Progress:
    """Two seconds for a prompt of 1,000 tokens, and a tenth of a second for each of 32 tokens."""
    progress = Progress(120.0, 6.0, 32)
    progress.begin("first", num_tokens=1000, has_grammar=False, now=0.0)
    progress.note_tokens("first", num_tokens=1, num_cached=0, now=2.0)
    progress.wait("first", now=2.0)
    progress.note_tokens("first", num_tokens=32, num_cached=0, now=5.2)
    progress.wait("first", now=5.2)
    return progress


def test_outstanding_prompts_extend_the_time():
    """By what they take at the speed measured so far; a longer prompt than those takes more for each token."""
    progress = sampled()
    event = 3 * 3.2
    assert progress.allowed_seconds() == pytest.approx(event)
    progress.begin("second", num_tokens=1000, has_grammar=False, now=6.0)
    assert progress.allowed_seconds() == pytest.approx(event + 3 * 2.0)
    progress.begin("third", num_tokens=2000, has_grammar=False, now=6.0)
    assert progress.allowed_seconds() == pytest.approx(event + 3 * 2.0 + 3 * 8.0)
    progress.begin("fourth", num_tokens=100_000, has_grammar=False, now=6.0)
    assert progress.allowed_seconds() == 120.0


def test_only_the_limit_holds_for_what_is_unknown():
    """Before the speed is measured, and for a grammar, which the server prepares first."""
    progress = Progress(120.0, 6.0, 32)
    progress.begin("first", num_tokens=10, has_grammar=False, now=0.0)
    assert (progress.silent_seconds(500.0), progress.allowed_seconds()) == (0.0, 120.0)
    progress.note_tokens("first", num_tokens=1, num_cached=0, now=1.0)
    assert progress.allowed_seconds() == 120.0

    known = sampled()
    known.begin("constrained", num_tokens=10, has_grammar=True, now=6.0)
    assert known.allowed_seconds() == 120.0
    known.end("constrained")
    assert known.allowed_seconds() < 120.0


def test_a_slow_consumer_is_no_silence():
    """Nothing is expected of a server whose tokens are not asked for."""
    progress = sampled()
    progress.note_tokens("first", num_tokens=32, num_cached=0, now=8.4)
    assert progress.silent_seconds(100.0) == 0.0

    progress.wait("first", now=100.0)
    assert progress.silent_seconds(103.0) == 3.0


def test_after_a_pause_prompts_are_read_again():
    """Keys and values may have been dropped; the time of the pause does not count."""
    progress = sampled()
    progress.restart(60.0)

    assert progress.silent_seconds(61.0) == 1.0
    assert progress.allowed_seconds() == pytest.approx(3 * (3.2 + 1.033 * 1.033 * 2.0))


def test_a_server_that_was_wrongly_suspected_gets_more_time():
    """Twice as much each time, up to the limit."""
    progress = sampled()
    usual = progress.allowed_seconds()
    progress.excuse()
    assert progress.allowed_seconds() == pytest.approx(2 * usual)
    for _ in range(5):
        progress.excuse()
    assert progress.allowed_seconds() == 120.0


# --------------------------------------------------------------------------------------------- on a virtual clock


class Dialect:
    """Answers health checks."""

    name = "simulated"

    async def is_ready(self, client: Any) -> bool:
        await anyio.lowlevel.checkpoint()
        return True


@define
class Processes:
    """Notes when a server is killed."""

    killed_at: list[float] = field(factory=list)

    def diagnose(self, url: str) -> str | None:
        return None

    def kill(self, url: str) -> None:
        self.killed_at.append(anyio.current_time())


async def never() -> None:
    await anyio.sleep_forever()


async def watch_until(condition: Callable[[Server], bool], *, num_tokens: int) -> tuple[float, Server, Processes]:
    """Let a server sample, send it a prompt of ``num_tokens`` or none, and hang; return the seconds until it holds."""
    processes = Processes()
    async with httpx.AsyncClient() as client:
        server = Server(
            url="http://server",
            dialect=Dialect(),  # type: ignore[arg-type] - what is used of it
            config=ServerConfig(),
            generating=client,
            control=client,
            processes=processes,
            changed=ChangeSignal(),
        )
        server.peers = [server]
        server.is_ready = server.has_served = True
        progress = server.progress
        begun = anyio.current_time()
        progress.begin("a", num_tokens=1000, has_grammar=False, now=begun)
        await anyio.sleep(0.1)
        progress.note_tokens("a", num_tokens=1, num_cached=0, now=anyio.current_time())
        await anyio.sleep(0.5)
        progress.note_tokens("a", num_tokens=32, num_cached=0, now=anyio.current_time())
        progress.wait("a", now=anyio.current_time())
        if num_tokens:
            progress.begin("b", num_tokens=num_tokens, has_grammar=False, now=anyio.current_time())
        hung_at = anyio.current_time()

        async def ask(answer: Callable[[], Awaitable[None]]) -> None:
            with pytest.raises(EngineError):
                await server.until_silent(answer())
            progress.end("a")
            progress.end("b")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, never)
            tasks.start_soon(server.watch, never)
            while not condition(server):
                await server.changed.wait()
            seconds = anyio.current_time() - hung_at
            tasks.cancel_scope.cancel()
    return seconds, server, processes


@pytest.mark.anyio
class TestOnAVirtualClock:
    @pytest.fixture(params=["asyncio", "trio"])
    def anyio_backend(self, request):
        return virtual_backend(request.param)

    async def test_a_server_that_samples_nothing_loses_its_requests_within_ten_seconds(self):
        """With the default settings, and a checked health every two seconds; it is killed after two minutes."""
        seconds, server, processes = await watch_until(lambda server: not server.is_ready, num_tokens=0)
        assert 6.0 <= seconds <= 10.0
        assert server.answers
        assert processes.killed_at == []

        seconds, _, processes = await watch_until(lambda server: not server.has_served, num_tokens=0)
        assert 120.0 <= seconds <= 124.0
        assert len(processes.killed_at) == 1

    async def test_a_long_prompt_gives_it_time(self):
        """Of 20,000 tokens, where 1,000 took a tenth of a second."""
        seconds, _, _ = await watch_until(lambda server: not server.is_ready, num_tokens=20_000)
        assert seconds > 20 * 0.1
        assert 120.0 <= seconds <= 124.0
