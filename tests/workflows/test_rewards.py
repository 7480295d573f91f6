"""Reward functions in processes of their own: their results, their deaths, and how a wait for them ends."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import anyio
import pytest

from areal_actors.errors import ConfigError, EpisodeError
from areal_actors.workflows import AsyncRewardWrapper

pytestmark = pytest.mark.anyio


def score(answer: str, *, truth: str) -> float:
    """Also says where it ran."""
    return float(answer == truth) + os.getpid()


def fail(kind: type[BaseException]) -> float:
    raise kind("no such field")


def die(marker: str, *, times: int) -> float:
    """Kill the process, so many times; a file counts."""
    path = Path(marker)
    count = len(path.read_text()) if path.exists() else 0
    if count < times:
        path.write_text("x" * (count + 1))
        os._exit(9)
    return 1.0


def hang(marker: str) -> float:
    Path(marker).write_text(str(os.getpid()))
    time.sleep(600)
    return 1.0


def is_gone(marker: Path) -> bool:
    """Whether the process of the marker has ended: it was killed and waited for, perhaps before it wrote the marker."""
    return not (has_begun(marker) and Path(f"/proc/{marker.read_text()}").exists())


def has_begun(marker: Path) -> bool:
    return marker.exists() and marker.read_text() != ""


async def test_reward_function_runs_in_reused_workers() -> None:
    """Two calls after each other meet the same process, which is not this one."""
    wrapped = AsyncRewardWrapper(score)
    first = await wrapped("4", truth="4")
    second = await wrapped("5", truth="4")

    assert 1.0 == first - second
    assert second != os.getpid()


async def test_reward_function_error_fails_the_episode() -> None:
    """With its own words, whatever it raises, and in a worker that goes on."""
    wrapped = AsyncRewardWrapper(fail)
    for kind in (KeyError, SystemExit, KeyboardInterrupt, GeneratorExit):
        with pytest.raises(EpisodeError, match=f"Reward function fail raised {kind.__name__}: '?no such field"):
            await wrapped(kind)


async def test_reward_worker_that_died_fails_its_call(tmp_path: Path) -> None:
    """The next call has another worker."""
    wrapped = AsyncRewardWrapper(die)

    with pytest.raises(EpisodeError, match="die killed its worker process"):
        await wrapped(str(tmp_path / "once"), times=1)
    assert 1.0 == await wrapped(str(tmp_path / "once"), times=1)


def test_script_without_a_main_guard_is_told_so(tmp_path: Path) -> None:
    """Each worker imports it, which would start workers again; with the guard it runs. Real scripts."""
    lines = "from areal_actors import AsyncRewardWrapper\nimport anyio\ndef half(x): return x / 2\n"
    lines += "async def main(): print(await AsyncRewardWrapper(half)(3))\n"
    said = []
    for guard in ("", 'if __name__ == "__main__": '):
        script = tmp_path / "script.py"
        script.write_text(f"{lines}{guard}anyio.run(main)\n")
        said.append(subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False))

    assert 'below `if __name__ == "__main__":`' in said[0].stderr
    assert "1.5" in said[1].stdout


async def test_reward_function_is_killed_after_its_timeout(tmp_path: Path) -> None:
    """The worker with it."""
    marker = tmp_path / "pid"
    with pytest.raises(EpisodeError, match="took longer than 4 s"):
        await AsyncRewardWrapper(hang, timeout_seconds=4)(str(marker))

    assert is_gone(marker)


async def test_reward_function_is_cancelled_in_its_worker(tmp_path: Path) -> None:
    """A cancelled call ends the computation in its process."""
    marker = tmp_path / "pid"
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(AsyncRewardWrapper(hang), str(marker))
        while not has_begun(marker):  # noqa: ASYNC110 - nothing tells of it but the file
            await anyio.sleep(0.01)
        tasks.cancel_scope.cancel()

    assert is_gone(marker)


def test_reward_function_that_cannot_be_pickled_is_refused() -> None:
    """Functions within functions, and settings that make no sense."""
    with pytest.raises(ConfigError, match="top level of a module"):
        AsyncRewardWrapper(lambda: 1.0)
    with pytest.raises(ConfigError, match="timeout_seconds"):
        AsyncRewardWrapper(score, timeout_seconds=0)


async def test_reward_arguments_that_cannot_be_pickled_are_named() -> None:
    """An open file, a lambda."""
    with pytest.raises(EpisodeError, match="The call of reward function fail cannot be sent"):
        await AsyncRewardWrapper(fail)(lambda: 1.0)
