"""Virtual time: long waits are short, and in order."""

from __future__ import annotations

import time

import anyio
import pytest

from areal_actors.testing import AutojumpLoop, virtual_backend


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest):
    """Both loops, in virtual time."""
    return virtual_backend(request.param)


@pytest.mark.anyio
async def test_a_day_passes_in_no_time():
    """The loop's clock moves, ours does not."""
    start, real_start = anyio.current_time(), time.monotonic()
    await anyio.sleep(86_400)

    assert anyio.current_time() - start == pytest.approx(86_400)
    assert time.monotonic() - real_start < 60


@pytest.mark.anyio
async def test_sleepers_wake_in_order_of_their_deadlines():
    """However they were started."""
    woken: list[int] = []

    async def sleep(seconds: int) -> None:
        await anyio.sleep(seconds)
        woken.append(seconds)

    async with anyio.create_task_group() as tasks:
        for seconds in (300, 1, 20):
            tasks.start_soon(sleep, seconds)

    assert [1, 20, 300] == woken


@pytest.mark.anyio
async def test_time_stands_still_while_there_is_work():
    """Only when every task waits for the clock does it jump."""
    start = anyio.current_time()
    for _ in range(100):
        await anyio.lowlevel.checkpoint()

    assert anyio.current_time() - start < 1


@pytest.mark.anyio
async def test_deadlines_jump_too():
    """A scope of an hour ends at once."""
    with anyio.move_on_after(3600) as scope:
        await anyio.sleep(7200)

    assert scope.cancelled_caught


def test_without_a_timer_the_asyncio_loop_really_waits():
    """A thread may wake a loop that has nothing to jump to."""

    async def wait_for_thread() -> int:
        return await anyio.to_thread.run_sync(lambda: 42)

    assert anyio.run(wait_for_thread, backend="asyncio", backend_options={"loop_factory": AutojumpLoop}) == 42


def test_an_unknown_loop_is_refused():
    """By name, with the names there are."""
    with pytest.raises(ValueError, match="no virtual time for backend 'curio'; use 'asyncio' or 'trio'"):
        virtual_backend("curio")
