"""Commands in boxes: they reach the model and nothing else, and a grader in a second box rewards what they leave."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from tests.plugins import needs_plugin

from areal_actors.errors import EpisodeError, SandboxError
from areal_actors.lib.plugins import PluginGroup
from areal_actors.sandbox import SandboxConfig, create_sandbox
from areal_actors.workflows import CommandAgent, CommandConfig, EpisodeContext, PoolConfig
from areal_actors.workflows import context as workflow_context

pytestmark = pytest.mark.anyio

NOWHERE = {"base_url": "http://127.0.0.1:1/s/v1", "api_key": "key"}
ISOLATED = [pytest.param("bubblewrap", marks=needs_plugin(PluginGroup.SANDBOXES, "bubblewrap"))]
KINDS = ["none", *ISOLATED]


@asynccontextmanager
async def open_agent(
    kind: str, script: str, *, grader: tuple[str, ...] = (), files: Path | None = None, **limits: Any
) -> AsyncIterator[CommandAgent]:
    """A shell script as an agent in a box; what hangs fails."""
    config = SandboxConfig(backend=kind, **limits)
    try:
        create_sandbox(kind).check(config)
    except SandboxError as error:
        pytest.skip(str(error))
    command = CommandConfig(command=("sh", "-c", script), grader=grader, files=files)
    with anyio.fail_after(60):
        async with CommandAgent.open(command, PoolConfig(num_workers=2), sandbox=config) as agent:
            yield agent


@pytest.fixture
def write(tmp_path: Path):
    """Writes a file of the host, and returns its path."""

    def write(name: str, text: str) -> str:
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


CALL = "import os, urllib.request as u; print(len(u.urlopen(os.environ['OPENAI_BASE_URL'] + '/models').read()))"


@pytest.mark.parametrize("kind", ISOLATED)
async def test_model_is_reached_from_inside(kind):
    """By the URL in the environment, with the path of the session; the reward is the last line."""
    requests: list[bytes] = []

    async def serve(stream: Any) -> None:
        async with stream:
            requests.append(await stream.receive())
            await stream.send(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nConnection: close\r\n\r\nabc")

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as model, anyio.create_task_group() as tasks:
        tasks.start_soon(model.serve, serve)
        port = model.extra(anyio.abc.SocketAttribute.local_port)
        async with open_agent(kind, f'"{sys.executable}" -c "{CALL}"') as agent:
            assert 3.0 == await agent.run({}, base_url=f"http://127.0.0.1:{port}/session/v1", api_key="key")
        tasks.cancel_scope.cancel()

    assert requests[0].startswith(b"GET /session/v1/models ")


@pytest.mark.parametrize("kind", KINDS)
async def test_boxed_command_finds_its_problem_its_files_and_its_key(kind, tmp_path):
    """The problem on stdin and in a file, given files in the working directory, and one key."""
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "data.txt").write_text("data")
    script = 'echo "{\\"$OPENAI_API_KEY $ANTHROPIC_API_KEY $(cat) $(cat $AREAL_PROBLEM) $(cat data.txt)\\": 1}"'
    async with open_agent(kind, script, files=tmp_path / "given") as agent:
        (words,) = await agent.run([1, 2], **NOWHERE)

    assert words == "key key [1, 2] [1, 2] data"


GRADES = [
    ("exit 0", 1.0),
    ("exit 1", 0.0),
    ("echo talk; echo 0.25", 0.25),
    ("echo 0.5; exit 1", 0.5),
    ("kill -9 $$", 0.0),
]


@pytest.mark.parametrize("anyio_backend", ["trio"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("script", "reward"), GRADES, ids=[script for script, _ in GRADES])
async def test_grader_rewards_by_its_last_line_or_its_status(kind, script, reward):
    """Whatever the agent printed."""
    async with open_agent(kind, "echo 1000", grader=("sh", "-c", script)) as agent:
        assert reward == await agent.run({}, **NOWHERE)


@pytest.mark.parametrize("kind", KINDS)
async def test_grader_sees_the_problem_and_the_files_that_the_agent_left(kind, write):
    """Its own files are at their paths in its box only."""
    grade = write("grade.sh", 'test "$(cat answer.txt)" = 42 && grep -q question "$AREAL_PROBLEM" && grep -q question')
    script = f"echo 42 > answer.txt; test ! -e {grade} || test {kind} = none"
    async with open_agent(kind, script, grader=("sh", grade)) as agent:
        assert 1.0 == await agent.run({"question": "6 * 7"}, **NOWHERE)


@pytest.mark.parametrize("limit", ["max_turns", None])
@pytest.mark.parametrize("kind", KINDS)
async def test_agent_that_fails_at_its_limit_is_graded(kind, limit):
    """Many agents end with an error when the model refuses to go on; without a limit, an error fails the episode."""

    async def find_limit() -> str | None:
        return limit

    script = "echo half > result; echo refused >&2; exit 3"
    with workflow_context.enter(EpisodeContext(), find_limit=find_limit):
        async with open_agent(kind, script, grader=("grep", "-q", "half", "result")) as agent:
            if limit is None:
                with pytest.raises(EpisodeError, match="refused"):
                    await agent.run({}, **NOWHERE)
            else:
                assert 1.0 == await agent.run({}, **NOWHERE)


@pytest.mark.parametrize("kind", KINDS)
async def test_grader_that_cannot_be_started_fails_the_episode(kind):
    """It is not the agent's fault."""
    async with open_agent(kind, "true", grader=("no-such-grader",)) as agent:
        with pytest.raises(EpisodeError, match="The grader no-such-grader cannot be started"):
            await agent.run({}, **NOWHERE)


FAILING_GRADERS = {
    "missing": (None, r"failed, so that this episode has no reward\. It exited with status 2(.|\n)*can't open file"),
    "raises": ("open('answer.txt')", r"exited with status 1(.|\n)*FileNotFoundError(.|\n)*by printing 0"),
    "does not compile": ("def", r"exited with status 1(.|\n)*SyntaxError"),
    "exits with another status": (
        "print('the last output'); exit(5)",
        r"status 5. The end of its stdout:\nthe last out",
    ),
}


@pytest.mark.parametrize("anyio_backend", ["trio"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("script", "reason"), FAILING_GRADERS.values(), ids=FAILING_GRADERS.keys())
async def test_grader_that_fails_gives_no_reward(kind, script, reason, write):
    """The episode fails, with the reason and the last output: 0 would teach the model that its answer was wrong."""
    path = "/nowhere/grade.py" if script is None else write("grade.py", script)
    async with open_agent(kind, "true", grader=(sys.executable, path)) as agent:
        with pytest.raises(EpisodeError, match=reason):
            await agent.run({}, **NOWHERE)


@pytest.mark.parametrize("anyio_backend", ["trio"])
@pytest.mark.parametrize(
    "script",
    [
        "import subprocess as s, sys; sys.exit(s.call([sys.executable, 'answer.py']))",
        "import unittest\nclass Test(unittest.TestCase):\n    def test(self): import answer\nunittest.main()",
    ],
    ids=["a program", "a test"],
)
async def test_answer_that_raises_is_rewarded_with_0(script, write):
    """The exception is the answer's, and not the grader's."""
    grade = write("grade.py", f"import sys; sys.path.insert(0, '.')\n{script}")
    async with open_agent("none", "echo 1/0 > answer.py", grader=(sys.executable, grade)) as agent:
        assert 0.0 == await agent.run({}, **NOWHERE)


@pytest.mark.parametrize("kind", KINDS)
async def test_grader_that_hangs_gives_nothing(kind):
    """It runs what the agent wrote: an agent whose work hangs is not spared its reward."""
    async with open_agent(kind, "true", grader=("sleep", "100"), timeout_seconds=0.5) as agent:
        assert 0.0 == await agent.run({}, **NOWHERE)


ATTACKS = {
    # Each leaves the answer, which it does not know, or makes the grader say that it did.
    "the file of the grader": "echo 'exit 0' > {grade} && echo won > result",
    "a link to the file of the answer": "ln -s {answer} result",
    "a link through a link": "mkdir d && ln -s . d/e && ln -s d/e/../../..{answer} result",
    "the directory of another session": "cp {other}/secret result",
    "the environment of the runner": "grep -a -h SECRET-OF-THE-RUN /proc/*/environ > result",
    "the memory of process 1": "cp /proc/1/mem result; cp /proc/1/environ result",
    "a process that waits for the grader": (
        "setsid sh -c 'while true; do cp {answer} result; done' >/dev/null 2>&1 & sleep 0.1; kill -STOP 1; rm -f result"
    ),
    "a problem that is a link": "rm $AREAL_PROBLEM; ln -s {answer} $AREAL_PROBLEM",
    "a start file of the shell": "echo 'echo won > result' > ~/.profile; echo 'echo won > result' > .bashrc",
}


@pytest.mark.parametrize("anyio_backend", ["trio"])
@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS.keys())
@pytest.mark.parametrize("kind", ISOLATED)
async def test_grading_rewards_no_attack(kind, attack, write, tmp_path, monkeypatch):
    """A grader whose answer the agent does not have finds nothing that equals it."""
    monkeypatch.setenv("AREAL_SECRET", "SECRET-OF-THE-RUN")
    answer = write("answer.txt", "the answer\n")
    grade = write("grade.sh", f"cmp -s result {answer} || grep -a -q SECRET-OF result || exit 1")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "secret").write_text("the answer\n")
    script = "(" + attack.format(grade=grade, answer=answer, other=tmp_path / "other") + ") 2>/dev/null; true"
    async with open_agent(kind, script, grader=("sh", grade, answer)) as agent:
        assert 0.0 == await agent.run({}, **NOWHERE)
    assert await anyio.Path(answer).read_text() == "the answer\n"
