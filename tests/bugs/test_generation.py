"""Bugs from a package: some of its tests fail and others pass, the same ones for the same seed."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from attrs import evolve

from areal_actors.bugs import (
    Bug,
    BugConfig,
    Counts,
    FixFunction,
    Level,
    create_messages,
    find_modules,
    open_bugs,
    read_bug,
    write_task,
    write_tasks,
)
from areal_actors.bugs.mutations import Module
from areal_actors.bugs.tasks import splice
from areal_actors.datasets import load_task
from areal_actors.errors import ConfigError, DatasetError, EpisodeError, SandboxError
from areal_actors.sandbox import SandboxConfig, SandboxKind, create_sandbox
from areal_actors.workflows import CommandAgent, CommandConfig, PoolConfig
from areal_actors.workflows.task_directories import grade_solution

pytestmark = pytest.mark.anyio

PLAIN = SandboxConfig(environment=("PYTHONPATH",))
BOXED = SandboxConfig(backend=SandboxKind.BUBBLEWRAP)
EXAMPLES = Path(__file__).parents[2] / "examples"
NOWHERE = {"base_url": "http://127.0.0.1:1/s/v1", "api_key": "key"}


async def generate(
    name: str, config: BugConfig, *, num: int = 100, sandbox: SandboxConfig = PLAIN
) -> tuple[list[Bug], Counts]:
    """Some bugs of a package, and what became of the mutants."""
    counts, found = Counts(), []
    async with open_bugs(find_modules(name), config, sandbox, counts=counts) as bugs:
        async for bug in bugs:
            found.append(bug)
            if len(found) == num:
                break
    return found, counts


@pytest.fixture
def seen(installed, monkeypatch):
    """The package can be imported in child processes, too."""
    monkeypatch.setenv("PYTHONPATH", str(installed))


def test_tested_modules_are_found(installed):
    """Those with a file of tests or doctests, in packages and in the standard library."""
    (grid,) = find_modules("tiny_shapes")
    assert ("tiny_shapes.grid", "tiny_shapes/grid.py") == (grid.name, grid.path)
    assert ("tiny_shapes.tests.test_grid", "doctest") == grid.tests
    (textwrap,) = find_modules("textwrap")
    assert ("textwrap.py", "test.test_textwrap") == (textwrap.path, textwrap.tests[0])
    for name, reason in (
        ("no_such_package", "no module no_such_package"),
        ("_heapq", "no module _heapq with Python source"),
    ):
        with pytest.raises(DatasetError, match=reason):
            find_modules(name)
    with pytest.raises(DatasetError, match=r"No tests of sniffio\._version are installed"):
        find_modules("sniffio._version")


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_bug_fails_some_tests_and_not_others(seen):
    """Of those that pass without it; a function that no test calls has none, and equal seeds give equal bugs."""
    found, counts = await generate("tiny_shapes", BugConfig(max_per_function=1, num_workers=3), num=4)
    again, _ = await generate("tiny_shapes", BugConfig(max_per_function=1, num_workers=1), num=4)

    assert [(one.function, one.source) for one in found] == [(one.function, one.source) for one in again]
    assert {"area", "clamp", "Path.add", "Path.length", "Path.__init__"} >= {one.function for one in found}
    assert 4 == len({one.function for one in found})
    assert all(one.failing and one.passing and not set(one.failing) & set(one.passing) for one in found)
    assert all("test_that_fails" not in name for one in found for name in (*one.failing, *one.passing))
    assert counts.tried == counts.qualified + counts.survived + counts.broke_all
    assert counts.qualified >= 4


@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_a_mutant_that_ends_its_box_is_no_bug(installed, seen):
    """It exceeds a limit of the sandbox; another box takes the place of that one."""
    require_bubblewrap()
    (installed / "greedy.py").write_text(GREEDY)
    (installed / "tests").mkdir()
    (installed / "tests" / "test_greedy.py").write_text(GREEDY_TESTS)
    config = evolve(BOXED, memory_mib=128, readable=(installed,), environment=("PYTHONPATH",))
    found, counts = await generate("greedy", BugConfig(num_workers=1, max_per_function=9), sandbox=config)

    # The mutants that start two and three children, and the one that returns nothing.
    assert 2 == counts.broke_all
    assert {"start", "other"} == {bug.function for bug in found}


@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_several_mutations_are_several_bugs(seen):
    """Each is noticed alone, so that repairing one of them is not enough."""
    found, _ = await generate("tiny_shapes", BugConfig(num_mutations=2, num_workers=2), num=2)
    assert found
    assert all(len(set(one.lines)) == len(one.kinds) == 2 for one in found)


GREEDY = """import subprocess
import sys


def start(count):
    words = [sys.executable, "-c", "x = bytearray(b'1') * (60 << 20); import time; time.sleep(0.4)"]
    started = [subprocess.Popen(words) for _ in range(count - 1)]
    return sum(one.wait() for one in started)


def other(value):
    return value + 1
"""
GREEDY_TESTS = """from greedy import other, start


def test_start():
    assert start(2) == 0


def test_other():
    assert other(1) == 2
"""


def require_bubblewrap() -> None:
    """Skip where boxes cannot be opened, with the install line."""
    try:
        create_sandbox(BOXED.backend).check(BOXED)
    except SandboxError as error:
        pytest.skip(str(error))


class Model:
    """A model behind an HTTP client that says what it is told to, and keeps the requests."""

    def __init__(self, answer: str) -> None:
        self.answer = answer
        self.requests: list[dict[str, Any]] = []

    @property
    def injected(self) -> dict[str, Any]:
        """The arguments of an agent."""
        return {**NOWHERE, "http_client": httpx.AsyncClient(transport=httpx.MockTransport(self._respond))}

    def _respond(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(json.loads(request.content))
        return httpx.Response(200, json={"choices": [{"message": {"content": self.answer}}]})


@pytest.mark.parametrize(("level", "anyio_backend"), [(0, "asyncio"), (1, "trio"), (2, "asyncio")])
async def test_one_answer_repairs_a_bug(tmp_path, level, anyio_backend):
    """The right letter, line or function is rewarded with 1; another one, or text, with 0."""
    level = Level(level)
    config = BugConfig(is_one_line=level.is_one_line, min_code_lines=level.min_code_lines)
    (bug,), _ = await generate("colorsys", config, num=1)
    write_task(bug, level, tmp_path / "task")
    told = read_bug(tmp_path / "task")
    original = Module(bug.original)
    function = next(one for one in original.functions if one.name == bug.function)
    right = {
        Level.CHOICE: told.get("answer"),
        Level.LINE: bug.original.splitlines()[bug.lines[0] - 1].strip(),
        Level.FUNCTION: f"Here it is:\n```python\n{original.text(function)}```\nDone.",
    }[level]
    agent = FixFunction(sandbox="none")
    problem = load_task(tmp_path / "task").problem
    for answer, reward in ((right, 1.0), ("I cannot say.", 0.0)):
        model = Model(answer)
        assert reward == await agent.run(problem, **model.injected)
        (request,) = model.requests
        assert request["messages"] == create_messages(told)
    assert bug.original not in (tmp_path / "task" / "instruction.md").read_text()


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_each_letter_is_right_equally_often(seen, tmp_path):
    """At level 0, in each set and up to each of its tasks, so that nothing is learned by the most frequent letter."""
    config = BugConfig(is_one_line=True, min_code_lines=Level.CHOICE.min_code_lines, max_per_function=9)
    found, _ = await generate("colorsys", config, num=14)

    async def repeated() -> AsyncIterator[Bug]:
        for bug in found:
            yield bug

    letters = {}
    for seed in (0, 1, 2):
        with (tmp_path / "problems.jsonl").open("w") as problems:
            assert 14 == await write_tasks(repeated(), Level.CHOICE, tmp_path, problems, num=99, seed=seed)
        told = [read_bug(task) for task in sorted(tmp_path.glob("colorsys-*"))]
        assert [one["line"] for one in told] == [one["choices"]["ABCD".index(one["answer"])] for one in told]
        assert all(len(set(one["choices"])) == 4 for one in told)
        letters[seed] = "".join(one["answer"] for one in told)
        for num in range(1, 15):
            counts = [letters[seed][:num].count(letter) for letter in "ABCD"]
            assert max(counts) - min(counts) <= 1
    assert len(set(letters.values())) == 3


def test_what_is_told_grows_less_with_the_level():
    """Letters, then a marked line, then the output of a test."""
    bug = {
        "text": "    def f(self):\n        a = 1\n        return a",
        "start": 5,
        "end": 7,
        "line": 6,
        "output": "It failed.",
        "function": "A.f",
    }
    asked = [
        create_messages({**bug, "level": level, "choices": [6, 7]}, has_examples=False)[-1]["content"]
        for level in (0, 1, 2)
    ]
    assert "A |         a = 1\nB |         return a" in asked[0]
    assert "def f(self):\n    a = 1  # <- wrong\n    return a\n```\nWrong: a = 1\nCorrect:" in asked[1]
    assert "def f(self):\n    a = 1\n    return a\n```\nA test fails:\n```\nIt failed." in asked[2]
    with pytest.raises(ValueError, match="level 3 shows no function"):
        create_messages({**bug, "level": 3})


SPLICED = {
    "a line": (1, "a = 2", "        a = 2"),
    "a line in a block": (1, "```python\na = 2\n```\nBecause.", "        a = 2"),
    "a line with its mark": (1, "    a = 2  # <- wrong\nand more", "        a = 2"),
    "a function": (2, "```\ndef f(self):\n    return 2\n```", "    def f(self):\n        return 2"),
    "a function in text": (
        2,
        "Sure.\n    @property\n    def f(self):\n        return 2",
        "    def f(self):\n        return 2",
    ),
}


@pytest.mark.parametrize(("level", "answer", "expected"), SPLICED.values(), ids=SPLICED)
def test_an_answer_is_put_in_its_place(level, answer, expected):
    """With the indentation of what it replaces."""
    source = "class A:\n    def f(self):\n        a = 1\n        return a\n\nb = 1\n"
    bug = {"level": level, "function": "A.f", "start": 2, "end": 4, "line": 3}
    before, after = (
        ("class A:\n    def f(self):\n", "        return a\n\nb = 1\n") if level == 1 else ("class A:\n", "\nb = 1\n")
    )
    assert f"{before}{expected}\n{after}" == splice(bug, source, answer)


async def test_an_agent_without_a_bug_says_so(tmp_path):
    """And one with a sandbox that does not exist."""
    with pytest.raises(EpisodeError, match="no bug that can be asked for"):
        await FixFunction(sandbox="none").run({"task_directory": str(tmp_path)}, **NOWHERE)
    with pytest.raises(ConfigError, match="bubblewrap or none"):
        FixFunction(sandbox="docker")


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_only_a_repaired_file_is_rewarded(tmp_path):
    """The installed module has the same bug in the agent's box, and no other file is graded."""
    require_bubblewrap()
    (bug,), _ = await generate("colorsys", BugConfig(num_workers=1, is_one_line=True), num=1)
    write_task(bug, Level.PACKAGE, tmp_path / "task")
    task = load_task(tmp_path / "task")
    scripts = {
        "a look at the installed module, and other files": (
            "python3 -c 'import colorsys; print(end=open(colorsys.__file__).read())' | cmp - colorsys.py && "
            "echo '{}' > tests.json && mkdir tests && echo '{\"reward\": 1}' > tests/bug.json && cp tests/* ."
        ),
        "modules of the grader": "echo 'import os; os._exit(0)' > unittest.py; cp unittest.py json.py; : > colorsys.py",
    }

    assert 1.0 == (await grade_solution(task, BOXED)).reward
    for name, script in scripts.items():
        command = CommandConfig(command=("sh", "-c", script))
        async with CommandAgent.open(command, PoolConfig(num_workers=1), sandbox=BOXED) as agent:
            assert 0.0 == await agent.run(task.problem, **NOWHERE), name


@contextmanager
def scripted_model(answers: list[str]) -> Iterator[tuple[str, list[str]]]:
    """A server that gives these answers in turn, and keeps the last message of each request."""
    heard: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            heard.append(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"][-1]["content"])
            body = json.dumps({"choices": [{"message": {"content": answers[len(heard) - 1]}}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1", heard
        finally:
            server.shutdown()


@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_an_agent_with_bash_repairs_a_bug(tmp_path):
    """It runs the tests, edits the file by a command, runs them again, and is done."""
    require_bubblewrap()
    (bug,), _ = await generate("colorsys", BugConfig(num_workers=1, is_one_line=True), num=1, sandbox=BOXED)
    write_task(bug, Level.MODULE, tmp_path / "task")
    number = bug.lines[0]
    line = bug.original.splitlines()[number - 1].replace("\\", "\\\\")
    answers = [
        "I look first.\n```bash\npython3 run_tests.py\n```",
        "I do not know.",
        f"```bash\nsed -i '{number}c\\{line}' colorsys.py && python3 run_tests.py\n```",
        "```bash\necho DONE\n```",
    ]
    with scripted_model(answers) as (url, heard):
        command = CommandConfig(command=("python3", str(EXAMPLES / "bash_agent.py")))
        async with CommandAgent.open(command, PoolConfig(num_workers=1), sandbox=BOXED) as agent:
            reward = await agent.run(load_task(tmp_path / "task").problem, base_url=url, api_key="key")

    assert 1.0 == reward
    assert "`colorsys.py` in the working directory has a bug." in heard[0]
    assert re.search(r"FAILED test\.test_colorsys(.|\n)* passed, [1-9]\d* failed\n\nexit status 0", heard[1])
    assert "no command" in heard[2]
    assert " passed, 0 failed" in heard[3]
