"""Commands as agents: a problem in, a reward out, by its last line or over HTTP; what it leaves running is ended."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import psutil
import pytest

from areal_actors.errors import EpisodeError
from areal_actors.workflows import CommandAgent, CommandConfig, PoolConfig

pytestmark = pytest.mark.anyio

LINK = {"base_url": "http://127.0.0.1:1/s/v1", "api_key": "key"}


@asynccontextmanager
async def open_agent(*words: str, logs: Path | None = None, workers: int = 4) -> AsyncIterator[CommandAgent]:
    """A command as an agent; what hangs fails."""
    with anyio.fail_after(60):
        async with CommandAgent.open(CommandConfig(command=words), PoolConfig(num_workers=workers, logs=logs)) as agent:
            yield agent


def shell(script: str) -> tuple[str, str, str]:
    return ("sh", "-c", script)


OUTPUTS = [
    ("echo 0.25", 0.25),
    ("echo talk; echo; echo 1; echo; echo '  '", 1.0),
    ("printf 3", 3.0),
    ("echo nan", math.nan),
    ("""echo '{"chatcmpl-1": 0.5, "chatcmpl-2": true}'""", {"chatcmpl-1": 0.5, "chatcmpl-2": 1.0}),
    ("echo all is well", {}),
    ("true", {}),
    ("yes | head -c 3000000; echo; echo 2", 2.0),
]


@pytest.mark.parametrize(("script", "expected"), OUTPUTS, ids=[script[:16] for script, _ in OUTPUTS])
async def test_command_reward_is_its_last_line(script: str, expected: object):
    """A number, or an object of numbers; whatever else is talk, and leaves the reward to HTTP."""
    async with open_agent(*shell(script)) as agent:
        result = await agent.run({}, **LINK)

    assert (expected == result) or (math.isnan(expected) and math.isnan(result))


async def test_command_finds_its_problem_and_its_link():
    """The problem on stdin and in a file, the link in the four variables; ours are still there."""
    variables = "$OPENAI_BASE_URL $OPENAI_API_KEY $ANTHROPIC_BASE_URL $ANTHROPIC_API_KEY"
    script = f'echo "{{\\"{variables} $(cat) $(cat $AREAL_PROBLEM) ${{PATH:+path}}\\": 1}}" | tr -d "\\n"'
    async with open_agent(*shell(script)) as agent:
        (words,) = await agent.run([1, 2], **LINK)

    assert "http://127.0.0.1:1/s/v1 key http://127.0.0.1:1/s key [1, 2] [1, 2] path" == words


async def test_command_need_not_read_its_problem():
    """However large it is."""
    async with open_agent(*shell("echo 1")) as agent:
        assert 1.0 == await agent.run({"text": "x" * 5_000_000}, **LINK)


FAILURES = [
    (shell("echo 1; echo broken >&2; exit 3"), r"sh failed. It exited with status 3. The end of its stderr:\nbroken"),
    (shell("kill -9 $$"), "sh failed. It was killed by signal 9"),
    (("/nowhere/to/be/found",), "found failed. It exited with status 127(.|\n)*not found"),
    (shell("""echo '{"a": null}'"""), "sh.run returned None of type NoneType"),
]


@pytest.mark.parametrize(("words", "complaint"), FAILURES, ids=lambda value: str(value)[:24])
async def test_command_failure_is_described(words: tuple[str, ...], complaint: str):
    """Its number does not count then."""
    async with open_agent(*words) as agent:
        with pytest.raises(EpisodeError, match=complaint):
            await agent.run({}, **LINK)


async def test_command_daemons_are_ended():
    """It holds its stdout open, and the episode does not wait for it."""
    async with open_agent(*shell('sleep 600 & echo "{\\"$!\\": 1}"')) as agent:
        (pid,) = await agent.run({}, **LINK)

    wait(lambda: is_gone(int(pid)))  # it was killed, and dies when the kernel has time for that


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def test_cancelled_command_is_gone_with_its_children(tmp_path: Path):
    """Even one that is deaf."""
    note = tmp_path / "pids"
    script = f'trap "" TERM; sleep 600 & echo "$$ $!" > {note}; wait; sleep 600'
    async with open_agent(*shell(script)) as agent, anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: agent.run({}, **LINK))
        while not (note.exists() and note.read_text().endswith("\n")):  # noqa: ASYNC110 - of another process
            await anyio.sleep(0.005)
        tasks.cancel_scope.cancel()

    wait(lambda: all(is_gone(int(pid)) for pid in note.read_text().split()))


PARENT = """
import anyio, sys
from areal_actors.workflows import CommandAgent, CommandConfig

async def main(note, backend):
    command = ("sh", "-c", f'trap "" TERM; sleep 600 & echo "$$ $!" > {note}; wait; sleep 600')
    async with CommandAgent.open(CommandConfig(command=command)) as agent:
        await agent.run({}, base_url="u/v1", api_key="k")

anyio.run(main, *sys.argv[1:], backend=sys.argv[-1])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no kernel ends a command whose run was killed")
def test_killing_the_parent_leaves_no_command(tmp_path: Path, anyio_backend: str):
    """With kill -9, and a command that is deaf."""
    note = tmp_path / "pids"
    with subprocess.Popen([sys.executable, "-c", PARENT, str(note), anyio_backend]) as parent:
        try:
            wait(lambda: note.exists() and note.read_text().endswith("\n"))
        finally:
            parent.kill()
    pids = [int(pid) for pid in note.read_text().split()]

    wait(lambda: all(is_gone(pid) for pid in pids))


def wait(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


async def test_episodes_of_commands_are_bounded_and_not_mixed(tmp_path: Path):
    """At most two run at once; each has its own problem and link; what they say is logged."""
    results: dict[int, object] = {}
    script = "import json, os, sys; print(len(os.listdir(os.path.dirname(os.environ['AREAL_PROBLEM'])))); "
    script += "print(json.dumps({os.environ['OPENAI_API_KEY'] + str(json.load(sys.stdin)['n']): 1}))"

    async def play(number: int) -> None:
        results[number] = await agent.run({"n": number}, base_url="u/v1", api_key=f"k{number}-")

    async with (
        open_agent(sys.executable, "-c", script, logs=tmp_path, workers=2) as agent,
        anyio.create_task_group() as tasks,
    ):
        for number in range(8):
            tasks.start_soon(play, number)
    lines = "".join((tmp_path / f"{number}.log").read_text() for number in range(2)).splitlines()

    assert {number: {f"k{number}-{number}": 1.0} for number in range(8)} == results
    assert {"1", "2"} >= {line for line in lines if len(line) == 1}
    assert 16 == len(lines)
    assert os.environ.get("OPENAI_API_KEY", "") != "k1-"
