"""Agents in child processes: each answer is its own episode's, whatever dies costs one, and nothing is left behind."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest

from areal_actors.errors import EpisodeError, WorkflowError
from areal_actors.workflows import AgentPool, EpisodeContext, PoolConfig, serialize_agent
from areal_actors.workflows import context as workflow_context

pytestmark = pytest.mark.anyio

CHILDREN = Path(__file__).with_name("children.py")
LINK = {"base_url": "http://127.0.0.1:1/s/v1", "api_key": "key"}


@asynccontextmanager
async def open_pool(
    name: str, *, logs: Path | None = None, workers: int = 1, **kwargs: Any
) -> AsyncIterator[AgentPool]:
    """A pool of an agent of ``children``; what hangs fails, and what is left behind, too."""
    before = set(psutil.Process().children(recursive=True))
    with anyio.fail_after(60):
        async with AgentPool.open(
            serialize_agent(f"{CHILDREN}:{name}", kwargs), PoolConfig(num_workers=workers, logs=logs)
        ) as pool:
            yield pool
    assert set() == {child for child in psutil.Process().children(recursive=True) if child not in before}


async def until(is_true: Callable[[], bool]) -> None:
    """What happens in other processes can only be looked for."""
    with anyio.fail_after(30):
        while not is_true():  # noqa: ASYNC110 - nothing in this process tells
            await anyio.sleep(0.005)


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def test_plain_def_may_block_and_keeps_its_state():
    """It is made once, with its arguments; a worker that is warm runs the next episode, too."""
    async with open_pool("Sync", start=0.5) as pool:
        assert pool.agent_name == "Sync"
        assert [101.5, 202.5] == [await pool.run({"add": add}, **LINK) for add in (1, 2)]


async def test_agent_finds_its_link_in_its_environment():
    """And in its arguments; its stdin is empty, its context is that of the episode, and nothing of it is ours."""
    async with open_pool("Looking") as pool:
        with workflow_context.enter(EpisodeContext(task_id="7", member=3, is_eval=True)):
            result = await pool.run({}, **LINK)
    environment, given, context, stdin = result

    assert "http://127.0.0.1:1/s/v1|key|http://127.0.0.1:1/s|key" == environment
    assert "http://127.0.0.1:1/s/v1|key|AsyncClient" == given
    assert ("7/3/True", "''") == (context, stdin)
    assert result[environment] == result[given] != os.getpid()
    assert "OPENAI_API_KEY" not in os.environ or os.environ["OPENAI_API_KEY"] != "key"


async def test_twenty_episodes_on_four_workers_are_not_mixed():
    """Each answer holds the link of its own episode, at most four processes ran, and all were used again."""
    results: dict[int, Any] = {}

    async def play(number: int) -> None:
        link = {"base_url": f"http://127.0.0.1:1/s{number}/v1", "api_key": f"key-{number}"}
        with workflow_context.enter(EpisodeContext(task_id=str(number))):
            results[number] = await pool.run({}, **link)

    async with open_pool("Looking", workers=4) as pool, anyio.create_task_group() as tasks:
        for number in range(20):
            tasks.start_soon(play, number)

    for number, result in results.items():
        assert f"http://127.0.0.1:1/s{number}/v1|key-{number}|http://127.0.0.1:1/s{number}|key-{number}" in result
        assert f"{number}/0/False" in result
    assert 20 == len(results)
    assert 4 >= len({next(iter(result.values())) for result in results.values()})


FAILURES = [
    ("kill_itself", r"Doing.run lost its process. It was killed by SIGKILL.*memory.*\n.*these are my last words"),
    ("leave", r"lost its process. It exited with status 3"),
    ("crash", r"lost its process. It was killed by SIGSEGV(.|\n)*children.py"),
    ("fail", "^Doing.run raised ValueError: no such tool$"),
    ("exit", "Doing.run raised SystemExit: 4"),
    ("none", "Doing.run returned None of type NoneType"),
]


async def test_pool_process_death_fails_one_episode():
    """It is said by name how it ended, and with which words; the next episode has a process again."""
    async with open_pool("Doing") as pool:
        for deed, complaint in FAILURES:
            with pytest.raises(EpisodeError, match=complaint):
                await pool.run({"do": deed}, **LINK)
        assert 0 < await pool.run({"do": "succeed"}, **LINK)


async def test_traceback_of_a_child_names_the_line_of_the_agent():
    """It crosses the pipe with the failure, and begins in the agent's own file."""
    async with open_pool("Doing") as pool:
        with pytest.raises(EpisodeError) as caught:
            await pool.run({"do": "fail"}, **LINK)

    first, *_, last = [line.strip() for line in caught.value.traceback.splitlines()[1:]]
    assert "children.py" in first
    assert "ValueError: no such tool" == last


async def test_process_may_be_cancelled_while_it_starts(tmp_path: Path):
    """Nothing of it is left."""
    (tmp_path / "slow.py").write_text("import time; time.sleep(600)")
    before = set(psutil.Process().children(recursive=True))
    with anyio.move_on_after(0.2):
        async with AgentPool.open(serialize_agent(f"{tmp_path}/slow.py:Agent")):
            pass

    assert set() == set(psutil.Process().children(recursive=True)) - before


async def test_worker_that_was_killed_between_episodes_is_replaced():
    """The next episode runs in a new process."""
    async with open_pool("Doing") as pool:
        first = int(await pool.run({"do": "succeed"}, **LINK))
        os.kill(first, signal.SIGKILL)
        await until(lambda: not any(worker.is_alive for worker in pool._idle))

        assert first != await pool.run({"do": "succeed"}, **LINK)


async def test_what_one_episode_does_to_its_environment_the_next_does_not_see():
    """The process is the same, the environment is not. A reward that is not finite is judged where rewards are kept."""
    async with open_pool("Doing") as pool:
        await pool.run({"do": "pollute"}, **LINK)

        assert 0.0 == await pool.run({"do": "inspect"}, **LINK)
        assert math.isnan(await pool.run({"do": "nan"}, **LINK))


async def test_tasks_that_an_episode_leaves_are_cancelled():
    """They would ask the model in the name of the next one."""
    async with open_pool("Lingering") as pool:
        assert [1.0, 1.0] == [await pool.run({}, **LINK) for _ in range(2)]


async def test_what_an_agent_prints_is_logged_and_bounded(tmp_path: Path):
    """On whichever way it comes to stdout; it is never taken for a reply."""
    async with open_pool("Doing", logs=tmp_path) as pool:
        assert [1.0, 1.0] == [await pool.run({"do": "print_a_lot"}, **LINK) for _ in range(2)]
    files = sorted(tmp_path.iterdir())  # noqa: ASYNC240 - a directory of two

    assert ["0.log", "0.log.1"] == [file.name for file in files]
    assert all(file.stat().st_size <= 4 * 1024 * 1024 for file in files)
    assert files[0].read_text().endswith('{"last": 666, "by_interaction": {}}\nfrom a child\n')


async def test_cancelled_episode_takes_its_whole_group_along(tmp_path: Path):
    """Also what is deaf to SIGTERM, and the children of the agent; the next episode has a process."""
    note = tmp_path / "pids"
    async with open_pool("Doing") as pool:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: pool.run({"do": "hang", "path": str(note)}, **LINK))
            await until(lambda: note.exists() and note.read_text().endswith("\n"))
            tasks.cancel_scope.cancel()
        pids = [int(pid) for pid in note.read_text().split()]

        assert all(is_gone(pid) for pid in pids)
        assert 0 < await pool.run({"do": "succeed"}, **LINK)


async def test_pool_problems_are_plain_data():
    """The part that is not is named; the worker never hears of it."""
    async with open_pool("Doing") as pool:
        for data, complaint in [
            ({"do": "succeed", "score": [1, {"f": print}]}, r"data\['score'\]\[1\]\['f'\] is a builtin_function"),
            ({"do": "succeed", 3: 1}, "data has the key 3"),
            ({"do": {1, 2}}, r"data\['do'\] is a set"),
        ]:
            with pytest.raises(EpisodeError, match=complaint):
                await pool.run(data, **LINK)
        assert 0 < await pool.run({"do": "succeed"}, **LINK)


# --------------------------------------------------------------------------------------------------- beginnings


class Local:
    """An agent of this module, which pickle finds by its name."""

    def __init__(self, reward: float) -> None:
        self.reward = reward

    def run(self, data: Any, **extra_kwargs: Any) -> float:
        return self.reward


@pytest.mark.parametrize("make", [lambda: (Local(2.0), {}), lambda: (Local, {"reward": 2.0})], ids=["object", "class"])
async def test_object_and_a_class_are_handed_over(make: Callable[[], Any]):
    """An object keeps what its constructor made; a class is constructed over there."""
    with anyio.fail_after(60):
        async with AgentPool.open(serialize_agent(*make())) as pool:
            assert 2.0 == await pool.run({}, **LINK)


async def test_pool_refuses_agents_that_cannot_be_pickled():
    """Before there is a process."""

    class Inner(Local):
        pass

    with pytest.raises(WorkflowError, match=r"Inner.* cannot be handed to a child process.*file.py:Class"):
        serialize_agent(Inner(1.0))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("raise RuntimeError('no such key')", r"(?s)Traceback.*RuntimeError: no such key"),
        ("import os; os._exit(5)", "ended before it was ready. It exited with status 5"),
        ("class Agent: pass", "has no method 'run'"),
        ("Agent = 1 / 0", "ZeroDivisionError"),
    ],
    ids=["raises", "exits", "is_none", "divides"],
)
async def test_agent_that_cannot_be_made_ends_the_start(tmp_path: Path, text: str, complaint: str):
    """With the traceback of the child; no group of exceptions hides it."""
    (tmp_path / "broken.py").write_text(text)
    with pytest.raises(WorkflowError, match=complaint):
        async with AgentPool.open(serialize_agent(f"{tmp_path}/broken.py:Agent")):
            pass


async def test_import_that_takes_too_long_ends_the_start(tmp_path: Path):
    """And its process."""
    (tmp_path / "slow.py").write_text("import time; time.sleep(600)")
    config = PoolConfig(start_timeout_seconds=0.5)
    with pytest.raises(WorkflowError, match=r"not ready after 0\.5 s"):
        async with AgentPool.open(serialize_agent(f"{tmp_path}/slow.py:Agent"), config):
            pass


async def test_error_of_the_block_leaves_it_as_it_is():
    """Not wrapped, and without processes."""
    with pytest.raises(KeyError):
        async with open_pool("Doing"):
            raise KeyError("mine")


PROGRAM = """
import anyio, sys
from areal_actors.workflows import AgentPool, serialize_agent

class Agent:
    def __init__(self):
        self.value = 3.0
    def run(self, data, **extra_kwargs):
        return self.value

async def main():
    async with AgentPool.open(serialize_agent(Agent())) as pool:
        print(await pool.run({}, base_url="u/v1", api_key="k"))

GUARD
"""


@pytest.mark.parametrize("is_guarded", [True, False])
def test_agent_of_the_main_program(tmp_path: Path, *, is_guarded: bool):
    """It works as with multiprocessing; a program without a guard is told about it, once."""
    start = "anyio.run(main)"
    guard = f'if __name__ == "__main__":\n    {start}' if is_guarded else start
    (tmp_path / "program.py").write_text(PROGRAM.replace("GUARD", guard))
    ran = subprocess.run(
        [sys.executable, tmp_path / "program.py"], capture_output=True, text=True, timeout=60, check=False
    )

    if is_guarded:
        assert ("3.0\n", 0) == (ran.stdout, ran.returncode), ran.stderr
    else:
        assert 1 == ran.returncode
        assert "Put what it starts below 'if __name__ == \"__main__\":'" in ran.stderr


PARENT = """
import anyio, json, sys
from areal_actors.workflows import AgentPool, PoolConfig, serialize_agent

async def main(agent, path, backend):
    link = {"base_url": "u/v1", "api_key": "k"}
    async with AgentPool.open(serialize_agent(agent), PoolConfig(num_workers=2)) as pool:
        idle = await pool.run({"do": "succeed"}, **link)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: pool.run({"do": "hang", "path": path}, **link))
            await anyio.sleep(0)
            print(int(await pool.run({"do": "succeed"}, **link)), flush=True)

anyio.run(main, *sys.argv[1:], backend=sys.argv[-1])
"""


def test_killing_the_parent_leaves_no_process(tmp_path: Path, anyio_backend: str):
    """With kill -9: neither the worker that is idle, nor the one that is deaf, nor what that one started."""
    note = tmp_path / "pids"
    command = [sys.executable, "-c", PARENT, f"{CHILDREN}:Doing", str(note), anyio_backend]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        try:
            assert parent.stdout is not None
            idle = int(parent.stdout.readline())
            wait(lambda: note.exists() and note.read_text().endswith("\n"))
            family = psutil.Process(parent.pid).children(recursive=True)
        finally:
            parent.kill()
    pids = {idle, *(int(pid) for pid in note.read_text().split())}

    assert pids <= {process.pid for process in family}
    wait(lambda: all(is_gone(process.pid) for process in family))


def wait(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.005)
