"""Child processes: how they are ended when they cannot end themselves."""

from __future__ import annotations

import os
import signal
import sys

import anyio
import pytest

from areal_actors.lib.child_process import BoundedLog, Child

WAITS = [sys.executable, "-c", "import sys; print('up', flush=True); sys.stdin.read()"]


@pytest.mark.anyio
@pytest.mark.skipif(sys.platform != "linux", reason="the state of a process is read from /proc")
@pytest.mark.parametrize("is_stopped", [False, True])
async def test_child_stopped_by_a_signal_is_killed(is_stopped):
    """It would neither exit nor close its connections. A process that only waits is left alone."""
    child = await Child.start(lambda _: WAITS, log=BoundedLog())
    try:
        assert child.process.stdout is not None
        await child.process.stdout.receive()
        if is_stopped:
            os.kill(child.process.pid, signal.SIGSTOP)
        with anyio.move_on_after(30 if is_stopped else 0.2):
            await child.kill_when_stopped(seconds=0.05)
        was_alive = child.is_alive and not is_stopped
    finally:
        await child.kill(grace_seconds=0)

    assert was_alive is not is_stopped
    assert not is_stopped or -signal.SIGKILL == child.process.returncode
    assert ("SIGSTOP" in child.describe_end()) is is_stopped
