"""A thread of one's own: the same one each time, on either event loop."""

from __future__ import annotations

import threading
from itertools import count

import anyio
import anyio.lowlevel
import pytest

from areal_actors.kernel import OwnThread

pytestmark = pytest.mark.anyio


async def test_own_thread_runs_all_work_on_one_thread() -> None:
    """Whatever else uses threads meanwhile, the work stays on its own."""
    async with OwnThread.open() as thread:
        seen = {await thread.run(threading.get_ident) for _ in range(5)}
        pool = await anyio.to_thread.run_sync(threading.get_ident)

    assert 1 == len(seen)
    assert not seen & {pool, threading.get_ident()}


async def test_own_thread_raises_the_error_of_the_function() -> None:
    """An error ends the call and not the thread."""

    def fail() -> None:
        raise ValueError("no")

    async with OwnThread.open() as thread:
        with pytest.raises(ValueError, match="no"):
            await thread.run(fail)

        assert 3 == await thread.run(lambda: 3)


async def test_own_thread_runs_calls_one_after_another() -> None:
    """No two functions run at once, and each caller gets its own result."""
    running: list[int] = []
    results: dict[int, int] = {}

    def work(number: int) -> int:
        running.append(number)
        assert 1 == len(running)
        running.remove(number)
        return number * number

    async def ask(thread: OwnThread, number: int) -> None:
        results[number] = await thread.run(lambda: work(number))

    async with OwnThread.open() as thread, anyio.create_task_group() as tasks:
        for number in range(8):
            tasks.start_soon(ask, thread, number)

    assert {number: number * number for number in range(8)} == results


async def test_own_thread_waits_for_the_running_function_at_its_end() -> None:
    """Cancelling the caller drops its result; the block ends when the function has."""
    entered, leave, ended = anyio.Event(), threading.Event(), threading.Event()
    token = anyio.lowlevel.current_token()

    def work() -> None:
        anyio.from_thread.run_sync(entered.set, token=token)
        leave.wait()
        ended.set()

    async with OwnThread.open() as thread:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(thread.run, work)
            await entered.wait()
            tasks.cancel_scope.cancel()
        assert not ended.is_set()
        leave.set()

    assert ended.is_set()


async def test_own_thread_runs_posted_work_in_order() -> None:
    """Leaving the block does not drop posted work; work may post more."""
    seen: list[int] = []
    async with OwnThread.open() as thread:
        thread.post(lambda: (seen.append(1), thread.post(lambda: seen.append(3)))[0])
        await thread.run(lambda: seen.append(2))
        await thread.run(lambda: seen.append(4))
        thread.post(lambda: seen.append(5))

    assert [1, 2, 3, 4, 5] == seen


async def test_own_thread_gives_up_a_function_that_hangs() -> None:
    """The error names the line, and leaving does not wait. One that makes progress has time."""
    leave, steps = threading.Event(), count()
    try:
        with anyio.fail_after(30):
            async with OwnThread.open() as thread:
                assert 5 == await thread.run(
                    lambda: leave.wait(0.3) or 5, timeout_seconds=0.1, read_progress=lambda: next(steps)
                )
                with pytest.raises(TimeoutError, match=r"hangs in wait \(.*threading.py, line"):
                    await thread.run(leave.wait, timeout_seconds=0.1)
    finally:
        leave.set()
