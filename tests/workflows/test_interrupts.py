"""``KeyboardInterrupt``: an agent's own fails its episode, and that of a Ctrl-C ends the program; in real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import anyio
import pytest

from areal_actors.errors import EpisodeError
from areal_actors.workflows import AsyncRewardWrapper
from areal_actors.workflows.agents import is_failure

PROGRAM = """
import signal, sys, time
import anyio, httpx
from areal_actors.errors import EpisodeError
from areal_actors.workflows import Injected, run_agent

class Raising:
    async def run(self, data, **extra_kwargs):
        raise KeyboardInterrupt("enough")

class Grouped:
    async def run(self, data, **extra_kwargs):
        def stop():
            raise KeyboardInterrupt("in a thread")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.sleep_forever)
            await anyio.to_thread.run_sync(stop)

class Waiting:
    async def run(self, data, **extra_kwargs):
        print("ready", flush=True)
        if data == "waits":
            await anyio.sleep_forever()
        while True:
            time.sleep(0.001)

async def main():
    async with httpx.AsyncClient() as client:
        injected = Injected(base_url="http://127.0.0.1:1/v1", api_key="key", http_client=client)
        for agent in (Raising(), Grouped()):
            try:
                await run_agent(agent, "", injected)
            except EpisodeError as error:
                print(error, flush=True)
        try:
            await run_agent(Waiting(), sys.argv[2], injected)
        except EpisodeError as error:
            print("no failure of the agent:", error, flush=True)

# A program that a shell starts in the background, as CI may start the tests, inherits that the signal is ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
anyio.run(main, backend=sys.argv[1])
"""


@pytest.mark.parametrize("what", ["waits", "computes"])
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_an_agent_that_raises_goes_on_and_a_signal_ends_the_program(backend: str, what: str) -> None:
    """Also a signal that comes while the code of the agent is what runs; asyncio ends that at the second one."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, backend, what], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "Raising.run raised KeyboardInterrupt: enough\n"
        assert child.stdout.readline() == "Grouped.run raised KeyboardInterrupt: in a thread\n"
        assert child.stdout.readline() == "ready\n"
        while child.poll() is None:
            child.send_signal(signal.SIGINT)
            try:
                child.wait(0.2)
            except subprocess.TimeoutExpired:
                continue
        rest, errors = child.communicate()

    assert rest == ""
    assert child.returncode != 0
    assert "KeyboardInterrupt" in errors


def interrupt() -> None:
    """As Ctrl-C in a program that leaves the signal to Python."""
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(1000):
        pass


def raise_it() -> None:
    raise KeyboardInterrupt


def test_a_signal_is_told_from_a_raise_without_a_handler_that_has_frames() -> None:
    """Python's own handler interrupts a function between two instructions, and only code itself is at a ``raise``."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for stop, expected in ((interrupt, False), (raise_it, True)):
            with pytest.raises(KeyboardInterrupt) as caught:
                stop()
            assert is_failure(caught.value) is expected
            assert is_failure(BaseExceptionGroup("of tasks", [ValueError(), caught.value])) is expected
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.anyio
async def test_a_reward_function_that_interrupts_itself_fails_its_call() -> None:
    """In its worker process, and not in the program that waits for the reward."""
    with pytest.raises(EpisodeError, match="raise_it raised KeyboardInterrupt"):
        await AsyncRewardWrapper(raise_it, max_workers=1)()


@pytest.mark.anyio
async def test_cancellations_are_no_failures() -> None:
    """Neither loop's."""
    seen: list[Any] = []
    with anyio.CancelScope() as scope:
        scope.cancel()
        try:
            await anyio.sleep(1)
        except BaseException as error:
            seen.append(is_failure(error))
            raise

    assert seen == [False]
