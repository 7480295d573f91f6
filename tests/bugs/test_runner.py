"""The runner: it runs a module's tests on a source, and grades an answer that cannot reach it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from areal_actors.bugs import runner

from .conftest import SHAPES

PREFIX = "tiny_shapes.tests.test_grid"


def ask(installed: Any, source: str, **request: Any) -> dict[str, Any]:
    """Run tests on a source in a process, as a box does."""
    given = {
        "module": "tiny_shapes.grid",
        "file": "/app/tiny_shapes/grid.py",
        "tests": [PREFIX, "doctest"],
        "seconds": 5.0,
        "source": source,
        **request,
    }
    command = [sys.executable, "-s", "-P", "-B", runner.__file__, "run"]
    ended = subprocess.run(
        command, input=json.dumps(given).encode(), capture_output=True, check=True, env={"PYTHONPATH": str(installed)}
    )
    reply: dict[str, Any] = json.loads(ended.stdout)
    return reply


def test_tests_of_all_kinds_are_run(installed):
    """Of unittest, in pytest's style without fixtures, and doctests; skipped ones have no outcome."""
    results = ask(installed, SHAPES)["results"]
    passed = {name.removeprefix(PREFIX) for name, result in results.items() if result["failure"] is None}

    assert {
        ".AreaTest.test_area",
        ".AreaTest.test_negative",
        ".test_clamp",
        ".TestPath.test_length",
        ".TestPath.test_of_a_point",
        "doctest tiny_shapes.grid.area",
    } == passed
    assert {f"{PREFIX}.test_that_fails"} == {name for name, result in results.items() if result["failure"]}


def test_a_bug_fails_the_tests_that_see_it(installed):
    """The rest passes. The failure shows the line of the source that was given."""
    reply = ask(installed, SHAPES.replace("width * height", "width + height"))
    failed = {name for name, result in reply["results"].items() if result["failure"]}
    assert {f"{PREFIX}.AreaTest.test_area", "doctest tiny_shapes.grid.area", f"{PREFIX}.test_that_fails"} == failed
    reply = ask(
        installed, SHAPES.replace("return width * height", "return 1 / 0"), only=[f"{PREFIX}.AreaTest.test_area"]
    )
    assert "return 1 / 0" in reply["results"][f"{PREFIX}.AreaTest.test_area"]["failure"]


def test_calls_of_functions_are_noted(installed):
    """By the first line of each, which is that of its decorator."""
    results = ask(installed, SHAPES, covers=True)["results"]
    lines = SHAPES.splitlines()
    called = [lines[line - 1].strip() for line in results[f"{PREFIX}.TestPath.test_length"]["calls"]]

    assert ["def __init__(self):", "def add(self, x, y):", "@property"] == called


HOSTILE = {
    "no syntax": ("def", "error"),
    "an import that fails": ("import nothing_of_that_name", "error"),
    "an end at once": ("raise SystemExit(0)", "error"),
    "no end": ("while True: pass", None),
}


@pytest.mark.parametrize(("source", "answer"), HOSTILE.values(), ids=HOSTILE)
def test_a_module_that_cannot_be_imported_has_no_results(installed, source, answer, monkeypatch):
    """Whatever it raises; one that does not end is stopped (by its caller, unless the runner's alarm is first)."""
    if answer is None:
        source = f"import signal; signal.setitimer(signal.ITIMER_REAL, 0.2)\n{source}"
    assert ["error"] == list(ask(installed, source))


def test_a_test_that_does_not_end_fails(installed):
    """After its time limit, also if the code catches exceptions; the others are run."""
    loop = SHAPES.replace(
        "    best = max(value, low)\n",
        "    while True:\n        try:\n            value += 1\n        except Exception: pass\n",
    )
    results = ask(installed, loop, seconds=0.2, only=[f"{PREFIX}.test_clamp", f"{PREFIX}.TestPath.test_length"])[
        "results"
    ]
    assert "took too long" in results[f"{PREFIX}.test_clamp"]["failure"]
    assert results[f"{PREFIX}.TestPath.test_length"]["failure"] is None
    assert "took too long" in ask(installed, loop, seconds=0.2, stops_at_hang=True)["error"]


POWERS = {
    "import os": "import os",
    "from unittest import TestCase": "from unittest import TestCase",
    "def f(x): return x.__class__": ".__class__",
    "def f(x): return eval(x)": "eval",
    "def f(x): return getattr(x, 'a')": "getattr",
    "def f(x): return re.sys": ".sys",
    "def f(x): return re['__dict__']": "'__dict__'",
    "def f(x): return x.gi_frame": ".gi_frame",
    "def f(): return __builtins__": "__builtins__",
    "import re\ndef f(x): return re.sub(x, x, x)": None,
    "import re\nclass A:\n    def __init__(self): self.x = max(1, 2)": None,
}


@pytest.mark.parametrize(("answer", "found"), POWERS.items(), ids=POWERS)
def test_an_answer_gets_no_new_powers(answer, found):
    """Only what the original has: its imports, and no way to the interpreter or the runner."""
    original = "import re\ndef f(x): return re.compile(x)\n"
    assert found == runner.find_forbidden(original, answer)
    assert runner.find_forbidden(original + answer, answer) is None


BUG = {
    "module": "tiny_shapes.grid",
    "file": "/app/tiny_shapes/grid.py",
    "tests": [PREFIX],
    "seconds": 5.0,
    "failing": [f"{PREFIX}.AreaTest.test_area", f"{PREFIX}.test_clamp"],
    "passing": [f"{PREFIX}.AreaTest.test_negative", f"{PREFIX}.TestPath.test_length"],
}
ANSWERS = {
    "a repair": (SHAPES, 1.0),
    "half of it": (SHAPES.replace("min(best, high)", "max(best, high)"), 0.5),
    "a repair that breaks": (SHAPES.replace("abs(a - c)", "abs(a + c + 1)"), 0.0),
    "nothing": (None, 0.0),
    "no syntax": ("def", 0.0),
    "an end": ("import os; os._exit(0)", 0.0),
    "a forged report": ("import sys; print('{\"results\": {}}'); sys.exit()", 0.0),
    "a patch of the tests": (SHAPES + "\nimport unittest\nunittest.TestCase.assertEqual = print\n", 0.0),
}


@pytest.mark.parametrize(("answer", "reward"), ANSWERS.values(), ids=ANSWERS)
def test_the_reward_is_the_share_of_failing_tests_that_pass(installed, monkeypatch, answer, reward):
    """And 0 if a passing one fails, or if the answer does what the original does not."""
    monkeypatch.setenv("PYTHONPATH", str(installed))
    assert reward == runner.grade(BUG, SHAPES, answer)["reward"]
