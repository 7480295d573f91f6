"""The program that runs tests of a module whose source is given, and that grades an agent's.

It is copied to task directories, and needs only the standard library. A request on stdin says what to run; the reply on
stdout says which tests passed. ``grade`` runs itself as a child process on the agent's file, and writes the reward.
"""

from __future__ import annotations

import ast
import doctest
import importlib
import importlib.abc
import importlib.util
import inspect
import io
import json
import linecache
import os
import signal
import subprocess
import sys
import traceback
import unittest
from pathlib import Path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import CodeType, FrameType, ModuleType
    from typing import Any

_MAX_TEXT = 1500
_CHILD_SECONDS = 600
"""Time limit of all tests together; the verifier's own limit is usually less."""
_RUNNER_SECONDS = 30.0
"""In addition to the time limits of single tests."""


class _TooLong(BaseException):
    """Raised in a test that exceeds its time. Code under test that catches exceptions does not catch it."""


class _Overlay(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads one module from a text instead of its file."""

    def __init__(self, module: str, file: str, source: str) -> None:
        self._module, self._file, self._source = module, file, source
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> Any:  # noqa: ARG002
        if fullname != self._module:
            return None
        spec = importlib.util.spec_from_loader(fullname, self, origin=self._file)
        assert spec is not None
        spec.has_location = True
        return spec

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self._source, self._file, "exec"), module.__dict__)  # noqa: S102 - this is its purpose


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Import the tests with the module's source, run those that are asked for, and return the outcome of each."""
    module, seconds = request["module"], float(request["seconds"])
    sys.meta_path.insert(0, _Overlay(module, request["file"], request["source"]))
    # The runner itself may have imported it, or a package that refers to it.
    for name in [one for one in sys.modules if one == module or one.startswith(f"{module.partition('.')[0]}.")]:
        if "." in module or name == module:
            del sys.modules[name]
    _set_alarm(_RUNNER_SECONDS)
    try:
        tests = dict(_collect(module, request["tests"]))
    except BaseException as error:  # noqa: BLE001 - code of the agent, which may raise anything
        return {"error": _shorten("".join(traceback.format_exception_only(error)))}
    finally:
        _set_alarm(0)
    wanted = request.get("only") or list(tests)
    results = {}
    for name in wanted:
        if name in tests:
            calls: set[int] = set()
            _set_alarm(seconds)
            sys.setprofile(_profiler(request["file"], calls) if request.get("covers") else None)
            try:
                failure = tests[name]()
            except unittest.SkipTest:
                continue
            except BaseException as error:  # noqa: BLE001 - SystemExit and KeyboardInterrupt are failures, too
                failure = _shorten("".join(traceback.format_exception(error)))
            finally:
                sys.setprofile(None)
                _set_alarm(0)
            # One that hangs in one test hangs in many, for the whole time of each: 18 tasks of textwrap took 25 s with
            # one such mutant, and take 9 s.
            if request.get("stops_at_hang") and failure and _TooLong.__name__ in failure:
                return {"error": failure}
            results[name] = {"failure": failure, "calls": sorted(calls)}
    return {"results": results}


def _set_alarm(seconds: float) -> None:
    signal.setitimer(signal.ITIMER_REAL, seconds)


def _profiler(file: str, calls: set[int]) -> Callable[[FrameType, str, Any], None]:
    def note(frame: FrameType, event: str, _: Any) -> None:
        code: CodeType = frame.f_code
        if event == "call" and code.co_filename == file:
            calls.add(code.co_firstlineno)

    return note


# --------------------------------------------------------------------------------------------------- collection


def _collect(module: str, names: list[str]) -> Iterator[tuple[str, Callable[[], str | None]]]:
    """Yield the tests by id. Each returns the text of its failure, or ``None``."""
    for name in names:
        tested = importlib.import_module(module if name == "doctest" else name)
        if name == "doctest":
            for one in doctest.DocTestFinder().find(tested):
                if one.examples:
                    yield f"doctest {one.name}", _doctest(one)
            continue
        for case in _flatten(unittest.defaultTestLoader.loadTestsFromModule(tested)):
            if not isinstance(case, doctest.DocTestCase):
                yield case.id(), _case(case)
        for key, value in list(vars(tested).items()):
            if getattr(value, "__module__", None) == name:
                yield from _collect_plain(f"{name}.{key}", value)


def _collect_plain(name: str, value: Any) -> Iterator[tuple[str, Callable[[], str | None]]]:
    """Yield the tests in pytest's style that a name of a module is."""
    key = name.rpartition(".")[2]
    if key.startswith("test") and inspect.isfunction(value) and _is_plain(value):
        yield name, _call(value)
    elif key.startswith("Test") and inspect.isclass(value) and not issubclass(value, unittest.TestCase):
        for method, function in inspect.getmembers(value, inspect.isfunction):
            if method.startswith("test") and _is_plain(function, num_given=1):
                yield f"{name}.{method}", _method(value, method)


def _flatten(suite: Any) -> Iterator[unittest.TestCase]:
    for one in suite:
        if isinstance(one, unittest.TestSuite):
            yield from _flatten(one)
        else:
            yield one


def _is_plain(function: Any, *, num_given: int = 0) -> bool:
    """Return whether a test in pytest's style can be called: it needs no fixtures, and is not marked."""
    parameters = list(inspect.signature(function).parameters.values())[num_given:]
    return not getattr(function, "pytestmark", None) and all(one.default is not one.empty for one in parameters)


def _doctest(example: doctest.DocTest) -> Callable[[], str | None]:
    def run() -> str | None:
        written = io.StringIO()
        runner = doctest.DocTestRunner(verbose=False)
        failed, _ = runner.run(example, out=written.write, clear_globs=False)
        return _shorten(written.getvalue()) if failed else None

    return run


def _case(case: unittest.TestCase) -> Callable[[], str | None]:
    def run() -> str | None:
        result = unittest.TestResult()
        unittest.TestSuite([case]).run(result)  # with the fixtures of its class
        if result.skipped or result.expectedFailures:
            raise unittest.SkipTest(case.id())
        failed = [*result.errors, *result.failures]
        return _shorten(failed[0][1]) if failed else None if result.wasSuccessful() else "unexpected success"

    return run


def _call(function: Any) -> Callable[[], str | None]:
    def run() -> str | None:
        try:
            function()
        except unittest.SkipTest:
            raise
        except Exception as error:
            if type(error).__name__ == "Skipped":
                raise unittest.SkipTest(str(error)) from error
            return _shorten("".join(traceback.format_exception(error)))
        return None

    return run


def _method(cls: type, name: str) -> Callable[[], str | None]:
    def run() -> None:
        instance = cls()
        for prepare in ("setup_class", "setup_method"):
            if hasattr(instance, prepare):
                getattr(instance, prepare)()
        getattr(instance, name)()

    return _call(run)


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else "…" + text[-_MAX_TEXT:]


# ------------------------------------------------------------------------------------------------------ grading


# fmt: off
_REFUSED_NAMES = frozenset((
    "exec", "eval", "compile", "open", "input", "globals", "locals", "vars", "getattr",
    "setattr", "delattr", "breakpoint", "exit", "quit", "help",
))
_REFUSED_MODULES = frozenset((
    "os", "sys", "subprocess", "signal", "builtins", "importlib", "gc", "inspect", "ctypes", "threading",
    "atexit", "unittest", "doctest", "pytest", "pathlib", "io", "shutil", "tempfile",
    "socket", "multiprocessing", "traceback", "linecache", "types", "json",
))
# fmt: on


def find_forbidden(original: str, answer: str) -> str | None:
    """Return a part of the answer that could reach the program that grades it; ``None`` if there is none.

    Its tests run in one process with it, so an answer may not import what the original does not, nor use names with two
    underscores, or functions and modules of the interpreter, that the original does not use. Raises ``SyntaxError``.
    """
    known = set(_powers(ast.parse(original)))
    return next((power for power in _powers(ast.parse(answer)) if power not in known), None)


def _powers(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (f"import {one.name}" for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"from {'.' * node.level}{node.module or ''} import {one.name}" for one in node.names)
        elif isinstance(node, ast.Name) and (node.id in _REFUSED_NAMES or node.id.startswith("__")):
            yield node.id
        elif isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if owner in _REFUSED_MODULES:
                yield f"{owner}.{node.attr}"
            if (
                node.attr.startswith("__")
                or node.attr in _REFUSED_MODULES
                or node.attr.startswith(("f_", "gi_", "tb_"))
            ):
                yield f".{node.attr}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "__" in node.value:
            yield repr(node.value)


def grade_choice(bug: dict[str, Any], answer: str) -> float:
    """Return the reward of an answer that is a letter."""
    return float(answer.strip()[:1].upper() == bug["answer"])


def grade(bug: dict[str, Any], original: str, answer: str | None) -> dict[str, float]:
    """Return the reward of an answer: the share of the failing tests that pass; 0 if a passing one fails."""
    numbers = {"reward": 0.0, "fixed": 0.0, "broken": 0.0, "forbidden": 0.0}
    if answer is None:
        return numbers
    try:
        numbers["forbidden"] = float(find_forbidden(original, answer) is not None)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return numbers
    if numbers["forbidden"]:
        return numbers
    wanted = [*bug["failing"], *bug["passing"]]
    request = {key: bug[key] for key in ("module", "file", "tests", "seconds")} | {"source": answer, "only": wanted}
    results = run_child(request).get("results", {})
    passed = {name for name, result in results.items() if result["failure"] is None}
    numbers["fixed"] = sum(name in passed for name in bug["failing"]) / len(bug["failing"])
    numbers["broken"] = float(any(name not in passed for name in bug["passing"]))
    numbers["reward"] = 0.0 if numbers["broken"] else numbers["fixed"]
    return numbers


def run_child(request: dict[str, Any]) -> dict[str, Any]:
    """Run a request in a child process. A child that dies, hangs or answers something else has run no test."""
    command = [sys.executable, "-s", "-P", "-B", __file__, "run"]
    try:
        ended = subprocess.run(  # noqa: S603 - our own words
            command,
            input=json.dumps(request).encode(),
            capture_output=True,
            check=False,
            timeout=_CHILD_SECONDS,
            env={**os.environ, "PYTHONHASHSEED": "0"},
        )
        reply: dict[str, Any] = json.loads(ended.stdout)
    except (subprocess.TimeoutExpired, ValueError):
        return {}
    return reply


# --------------------------------------------------------------------------------------------------- entry points


def serve() -> None:
    """Answer the request on stdin. What tests print is discarded."""
    request = json.loads(sys.stdin.buffer.read())
    reply = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(nothing, descriptor)

    def interrupt(*_: Any) -> None:
        raise _TooLong("the test took too long")

    signal.signal(signal.SIGALRM, interrupt)
    json.dump(run(request), reply)
    reply.flush()
    os._exit(0)  # threads that tests left do not hold it up


def verify(work_directory: Path, logs: Path) -> None:
    """Grade the file that an agent left, and write reward.json."""
    here = Path(__file__).parent
    bug = json.loads((here / "bug.json").read_text(encoding="utf-8"))
    original = (here / "original.py").read_text(encoding="utf-8")
    if "answer" in bug:
        choice = _read(work_directory / "answer.txt")
        rewards = {"reward": grade_choice(bug, choice or "")}
    else:
        rewards = grade(bug, original, _read(work_directory / bug["path"]))
    (logs / "verifier" / "reward.json").write_text(json.dumps(rewards), encoding="utf-8")


def show(bug_file: Path) -> None:
    """Run the failing tests on the file here, and print what they say. For agents that can run programs."""
    bug = json.loads(bug_file.read_text(encoding="utf-8"))
    request = {key: bug[key] for key in ("module", "file", "tests", "seconds")}
    request |= {"source": Path(bug["path"]).read_text(encoding="utf-8"), "only": [*bug["failing"], *bug["passing"]]}
    reply = run_child(request)
    results = reply.get("results", {})
    failed = {name: result["failure"] for name, result in results.items() if result["failure"] is not None}
    for name, text in list(failed.items())[:5]:
        sys.stdout.write(f"FAILED {name}\n{text}\n")
    sys.stdout.write(reply.get("error") or f"{len(results) - len(failed)} passed, {len(failed)} failed\n")


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8") if path.is_file() and not path.is_symlink() else None
    except (OSError, ValueError):
        return None


if __name__ == "__main__":
    if sys.argv[1:] == ["run"]:
        serve()
    elif sys.argv[1:2] == ["grade"]:
        verify(Path.cwd(), Path(sys.argv[2]))
    else:
        show(Path(__file__).parent / "tests.json")
