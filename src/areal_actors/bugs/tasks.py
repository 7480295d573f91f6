"""Task directories of bugs, and the information given at each level of difficulty.

A directory is one in Harbor's format (``datasets/harbor.py``). Its ``tests/`` has the runner, the original, and
``bug.json``, which an agent does not see.
"""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import AsyncIterator, Mapping
from enum import IntEnum
from pathlib import Path
from textwrap import dedent, indent
from typing import Any, TextIO

from areal_actors.bugs.generation import PROGRAM, Bug
from areal_actors.bugs.mutations import Module
from areal_actors.datasets import load_task

__all__ = ["Level", "create_messages", "read_bug", "splice", "write_task", "write_tasks"]

_NUM_CHOICES = 4
_MAX_OUTPUT = 600
_MARK = "  # <- wrong"
_AGENT_SECONDS, _VERIFIER_SECONDS = 600.0, 120.0
_FENCE = re.compile(r"```[a-zA-Z]*\n(.*?)(?:```|\Z)", re.DOTALL)


class Level(IntEnum):
    """The information given about a bug; numbers grow with the difficulty."""

    CHOICE = 0
    """The function with four of its lines lettered, of which one is wrong: the answer is its letter."""
    LINE = 1
    """The function, and which line is wrong: the answer is the corrected line."""
    FUNCTION = 2
    """The function and the output of a failing test: the answer is the corrected function."""
    MODULE = 3
    """The file and the failing tests; the answer is the repaired file."""
    PACKAGE = 4
    """The output of a failing test; the answer is the repaired file."""

    @property
    def is_one_line(self) -> bool:
        """Whether its bugs have to be in one line."""
        return self <= Level.LINE

    @property
    def shows_function(self) -> bool:
        """Whether a model without tools can be asked (``create_messages``)."""
        return self <= Level.FUNCTION

    @property
    def min_code_lines(self) -> int:
        """Lines to choose from."""
        return _NUM_CHOICES if self is Level.CHOICE else 1

    @property
    def max_lines(self) -> int:
        """Lines of the longest function, unless they are given."""
        return {Level.CHOICE: 16, Level.LINE: 16, Level.FUNCTION: 30}.get(self, 80)


# -------------------------------------------------------------------------------------------------- directories


def write_task(bug: Bug, level: Level, directory: Path, *, number: int = 0, seed: int = 0) -> None:
    """Write the task directory of a bug. Replaces one that is there.

    ``number`` counts the tasks of a set: of each four in a row at level 0, each has another letter.
    """
    shutil.rmtree(directory, ignore_errors=True)
    content = _describe(bug, level, number, seed)
    files = {
        "instruction.md": _instruction(content, level),
        "task.toml": (
            'version = "1.0"\n\n[metadata]\ncategory = "debugging"\nrelocatable = true\n'
            f'level = {int(level)}\npackage = "{bug.module.version}"\nmodule = "{bug.module.name}"\n'
            f'function = "{bug.function}"\nkinds = {json.dumps(list(bug.kinds))}\n'
            f'masks = {{"{bug.module.path}" = "environment/{bug.module.path}"}}\n'
            f"\n[agent]\ntimeout_sec = {_AGENT_SECONDS}\n\n[verifier]\ntimeout_sec = {_VERIFIER_SECONDS}\n"
        ),
        "environment/Dockerfile": "FROM python:3\nWORKDIR /app\nCOPY . .\n",
        f"environment/{bug.module.path}": bug.source,
        "tests/test.sh": _TEST,
        "tests/original.py": bug.original,
        "tests/bug.json": json.dumps(content, indent=1),
        "solution/solve.sh": _SOLUTION
        if "answer" not in content
        else f"#!/bin/sh\necho {content['answer']} > answer.txt\n",
        "solution/original.py": bug.original,
        "solution/path": bug.module.path,
    }
    if level >= Level.MODULE:
        told = {name: content[name] for name in ("module", "file", "path", "tests", "seconds", "failing", "passing")}
        files["environment/tests.json"] = json.dumps(told, indent=1)
    for name, text in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        if name.endswith(".sh"):
            path.chmod(0o755)
    shutil.copyfile(PROGRAM, directory / "tests" / PROGRAM.name)
    if level >= Level.MODULE:
        shutil.copyfile(PROGRAM, directory / "environment" / "run_tests.py")


async def write_tasks(
    bugs: AsyncIterator[Bug], level: Level, directory: Path, problems: TextIO, *, num: int, seed: int = 0
) -> int:
    """Write up to ``num`` task directories, and their problems as JSON lines; return how many there were.

    A problem of a level that shows the function has ``messages``, too: the question for a model without tools.
    """
    written = 0
    async for bug in bugs:
        path = directory / f"{bug.module.name}-{written:04d}"
        write_task(bug, level, path, number=written, seed=seed)
        problem = load_task(path).problem
        if level.shows_function:
            problem["messages"] = create_messages(read_bug(path))
        problems.write(json.dumps(problem) + "\n")
        written += 1
        if written == num:
            break
    return written


def read_bug(directory: Path) -> dict[str, Any]:
    """Return the description of the bug in a task directory. Raises ``OSError`` for a directory without one."""
    found: dict[str, Any] = json.loads((directory / "tests" / "bug.json").read_text(encoding="utf-8"))
    return found


_TEST = """#!/bin/sh
exec python3 -s -P -B "$(dirname "$0")/runner.py" grade "${LOGS_DIR:-/logs}"
"""
_SOLUTION = """#!/bin/sh
here=$(dirname "$0")
cp "$here/original.py" "$(cat "$here/path")"
"""


def _describe(bug: Bug, level: Level, number: int, seed: int) -> dict[str, Any]:
    """Return the description of a bug for the verifier, as JSON."""
    parsed = Module(bug.source)
    function = next(one for one in parsed.functions if one.name == bug.function)
    lines = bug.source.splitlines()
    described: dict[str, Any] = {
        "module": bug.module.name,
        "file": f"/app/{bug.module.path}",
        "path": bug.module.path,
        "tests": list(bug.module.tests),
        "seconds": bug.seconds,
        "version": bug.module.version,
        "function": bug.function,
        "kinds": list(bug.kinds),
        "level": int(level),
        "start": function.line,
        "end": function.end_line,
        "line": bug.lines[0],
        "text": "\n".join(lines[function.line - 1 : function.end_line]),
        "output": bug.output[-_MAX_OUTPUT:],
        "failing": list(bug.failing),
        "passing": list(bug.passing),
    }
    if level is Level.CHOICE:
        # In the order of the file, the last letter would seldom be right, and a policy learns the most frequent one.
        # So the letters are shuffled, and each of four tasks in a row has another right one, from a deck of the seed.
        deck = list(range(_NUM_CHOICES))
        random.Random(f"{seed} {number // _NUM_CHOICES}").shuffle(deck)  # noqa: S311 - not for secrets
        draw = random.Random(f"{seed} {bug.source}")  # noqa: S311 - not for secrets
        choices = draw.sample([line for line in function.code_lines if line != bug.lines[0]], _NUM_CHOICES - 1)
        choices.insert(deck[number % _NUM_CHOICES], bug.lines[0])
        described["choices"] = choices
        described["answer"] = chr(ord("A") + choices.index(bug.lines[0]))
    return described


def _instruction(bug: Mapping[str, Any], level: Level) -> str:
    """Return the instruction of an agent with tools."""
    if level is Level.CHOICE:
        return f"{_question(bug, level)}\n\nWrite the letter to `answer.txt` in the working directory.\n"
    told = [f"`{bug['path']}` in the working directory has a bug."]
    if level is Level.LINE:
        told.append(f"It is in line {bug['line']}, in `{bug['function']}`.")
    elif level is Level.FUNCTION:
        told.append(f"It is in `{bug['function']}`, lines {bug['start']} to {bug['end']}.")
    if level <= Level.MODULE:
        told.append(f"These tests fail: {', '.join(f'`{name}`' for name in bug['failing'][:10])}.")
    told.append(f"A test says:\n\n```\n{bug['output'].strip()}\n```\n\nRepair the file there.")
    told.append("Tests that pass must go on passing.")
    if level >= Level.MODULE:
        told.append("`python3 run_tests.py` runs the tests on your file.")
    return " ".join(told) + "\n"


# ------------------------------------------------------------------------------------------- a single question


def create_messages(bug: Mapping[str, Any], *, has_examples: bool = True) -> list[dict[str, str]]:
    """Return the conversation that asks a model without tools, with solved examples at the two easiest levels.

    Without examples, a small model answers in sentences. Raises ``ValueError`` for levels that show no function.
    """
    level = Level(bug["level"])
    if not level.shows_function:
        raise ValueError(f"level {int(level)} shows no function; use a command agent, or a level up to 2")
    asked = {
        Level.CHOICE: "One line of a Python function has a bug. Reply with the letter of that line.",
        Level.LINE: "One line of a Python function has a bug. Reply with the corrected line.",
        Level.FUNCTION: "A Python function has a bug. Reply with the corrected function in a code block.",
    }[level]
    messages = [{"role": "system", "content": asked}]
    for example in _EXAMPLES if has_examples and level < Level.FUNCTION else ():
        answer = example["answer"] if level is Level.CHOICE else example["line_answer"]
        messages += [
            {"role": "user", "content": _question(example, level)},
            {"role": "assistant", "content": str(answer)},
        ]
    return [*messages, {"role": "user", "content": _question(bug, level)}]


def _question(bug: Mapping[str, Any], level: Level) -> str:
    lines = bug["text"].split("\n")
    for number in range(bug["start"], bug["end"] + 1):
        at = number - bug["start"]
        if level is Level.CHOICE:
            letter = chr(ord("A") + bug["choices"].index(number)) if number in bug["choices"] else " "
            lines[at] = f"{letter} | {lines[at]}"
        elif level is Level.LINE and number == bug["line"]:
            lines[at] += _MARK
    shown = f"```python\n{dedent(chr(10).join(lines))}\n```"
    if level is Level.FUNCTION:
        return f"{shown}\nA test fails:\n```\n{bug['output'].strip()}\n```"
    if level is Level.CHOICE:
        return f"{shown}\nWhich line is wrong?"
    return f"{shown}\nWrong: {bug['text'].split(chr(10))[bug['line'] - bug['start']].strip()}\nCorrect:"


_EXAMPLES: tuple[dict[str, Any], ...] = (
    {
        "text": "def largest(numbers):\n    best = numbers[0]\n    for number in numbers:\n"
        "        if number < best:\n            best = number\n    return best",
        "start": 1,
        "end": 6,
        "line": 4,
        "choices": [6, 2, 4, 3],
        "answer": "C",
        "line_answer": "if number > best:",
    },
    {
        "text": "def count(words, wanted):\n    total = 1\n    for word in words:\n"
        "        if word == wanted:\n            total += 1\n    return total",
        "start": 1,
        "end": 6,
        "line": 2,
        "choices": [2, 5, 3, 4],
        "answer": "A",
        "line_answer": "total = 0",
    },
    {
        "text": "def join(words, sign):\n    text = words[0]\n    for word in words[1:]:\n"
        "        text = word + sign + text\n    if not text:\n        return sign\n    return text",
        "start": 1,
        "end": 7,
        "line": 4,
        "choices": [7, 4, 2, 5],
        "answer": "B",
        "line_answer": "text = text + sign + word",
    },
    {
        "text": "def is_leap(year):\n    if year % 400 == 0:\n        return True\n    if year % 100 == 0:\n"
        "        return False\n    return year % 4 != 0",
        "start": 1,
        "end": 6,
        "line": 6,
        "choices": [4, 2, 3, 6],
        "answer": "D",
        "line_answer": "return year % 4 == 0",
    },
)


def splice(bug: Mapping[str, Any], source: str, answer: str) -> str:
    """Return the source with a model's answer in the place of the line or the function that it was asked for."""
    lines = source.split("\n")
    if bug["level"] == Level.LINE:
        at = bug["line"] - 1
        before = lines[at]
        fenced = _FENCE.search(answer)
        answered = (fenced[1] if fenced else answer).split("\n")
        line = next((one.strip() for one in answered if one.strip() and not one.startswith("```")), "")
        # A model repeats the mark that it was shown, and may quote the line.
        line = line.split(_MARK.strip())[0].strip().strip("`").strip()
        lines[at] = before[: len(before) - len(before.lstrip())] + line
        return "\n".join(lines)
    start, end = bug["start"] - 1, bug["end"]
    before = lines[start]
    # The function in the answer: that in a code block if there is one, without its decorators.
    name = bug["function"].rpartition(".")[2]
    text = next((block for block in _FENCE.findall(answer) if f"def {name}" in block), answer)
    found = re.search(rf"^[ \t]*def {re.escape(name)}\b", text, re.MULTILINE)
    code = dedent(text[found.start() :] if found else text).rstrip()
    lines[start:end] = indent(code, before[: len(before) - len(before.lstrip())]).split("\n")
    return "\n".join(lines)
