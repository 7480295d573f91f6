"""The command line: run each section in a process, collect its figures, and write a report and a page after each.

Nothing but the standard library is imported before the requirements are checked, so that a machine that lacks some of
them is told which. The processes are forked after torch and transformers were imported, which takes fifteen seconds on
a slow processor, and before anything has used CUDA or started a thread.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parents[2]
REQUIRED = {
    "torch": "torch",
    "transformers": "transformers",
    "anyio": "anyio",
    "attrs": "attrs",
    "numpy": "numpy",
    "safetensors": "safetensors",
}
"""Modules without which nothing can be measured, with their packages."""
OPTIONAL = {"peft": ("peft", "training with LoRA"), "pytest": ("pytest", "the device tests")}
SECTIONS = {"machine": 60, "engine": 150, "trainer": 270, "weights": 100, "tests": 150}
"""Sections in order, each with the seconds after which it begins no further cell."""
MODELS = ("0.5b", "1.5b", "4b", "tiny")
_GRACE_SECONDS = 45
"""A section that is still in a cell so long after its time is killed."""
_NUM_ATTEMPTS = 3
"""A section whose process dies is started again for the cells after the one that it died of, so many times in all."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sections, or keep a report. Return the exit code: 1 if a section or a cell failed."""
    options = _parse(sys.argv[1:] if arguments is None else arguments)
    missing = [package for module, package in REQUIRED.items() if importlib.util.find_spec(module) is None]
    if missing:
        print(f"This machine lacks {', '.join(missing)}: pip install {' '.join(missing)}", file=sys.stderr)
        return 2
    if options.command == "keep":
        from benchmarks.gpu.pages import keep

        revisions = options.revisions.split(",") if options.revisions else None
        print("\n".join(map(str, keep(options.reports, revisions=revisions))))
        return 0
    if options.command == "page":
        from benchmarks.gpu.pages import write_pages

        print("\n".join(map(str, write_pages())))
        return 0
    if options.section:
        return _run_section(options)
    for module, (package, purpose) in OPTIONAL.items():
        if importlib.util.find_spec(module) is None:
            print(f"This machine lacks {package}, which {purpose} needs; that part is skipped.")
    if options.device.startswith("cuda") and not _has_cuda():
        print("torch sees no CUDA device. Use --device cpu --quick to try the command.", file=sys.stderr)
        return 2
    return _Run(options).perform()


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("command", nargs="?", choices=("run", "keep", "page"), default="run")
    parser.add_argument(
        "reports", nargs="*", type=Path, help="files of one machine that keep copies into the repository"
    )
    parser.add_argument("--revisions", help="commits of the reports, by comma, where they do not name the right ones")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="directory of report, page and logs")
    parser.add_argument("--minutes", type=float, default=8.0, help="no section begins after this time")
    parser.add_argument("--only", type=_names(SECTIONS), default=tuple(SECTIONS), help="sections, by comma")
    parser.add_argument("--model", type=_names(MODELS), default=None, help="0.5b, 1.5b or 4b; several by comma")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="a tiny model and short rows")
    parser.add_argument("--profile", action="store_true", help="also write tables of kernels")
    parser.add_argument("--section", help=argparse.SUPPRESS)
    parser.add_argument("--deadline", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--path", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--skip", type=json.loads, default=(), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.command == "keep" and not options.reports:
        parser.error("keep needs the path of a report")
    options.model = options.model or (("tiny",) if options.quick else ("1.5b",))
    return options


def _names(known: Any) -> Any:
    def parse(text: str) -> tuple[str, ...]:
        names = tuple(filter(None, text.split(",")))
        unknown = [name for name in names if name not in known]
        if unknown or not names:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; there are {', '.join(known)}")
        return names

    return parse


def _has_cuda() -> bool:
    """Ask the driver's library, since a process that has asked CUDA itself cannot fork."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    import torch

    return torch.cuda.is_available()


def _import_all() -> None:
    """Import what the sections need, so that none of their processes has to."""
    names = ("transformers.models.qwen2.modeling_qwen2", "transformers.models.qwen3.modeling_qwen3")
    sections = ("ceilings", "engine", "trainer", "weights")
    optional = [module for module in OPTIONAL if importlib.util.find_spec(module) is not None]
    for name in (*names, *optional, "transformers.generation", *(f"benchmarks.gpu.{section}" for section in sections)):
        importlib.import_module(name)


def _run_section(options: argparse.Namespace) -> int:
    """Run one section in its process."""
    from benchmarks.gpu.cells import Context

    context = Context(
        section=options.section,
        device=options.device,
        model=options.model[0],
        is_quick=options.quick,
        has_profile=options.profile,
        deadline=options.deadline,
        path=options.path,
        out=options.out.absolute(),
        skipped=frozenset(options.skip),
    )
    from benchmarks.gpu.ceilings import describe_device

    context.write(facts=describe_device(options.device))
    module = "ceilings" if options.section == "machine" else options.section
    importlib.import_module(f"benchmarks.gpu.{module}").run(context)
    return 0


def _start_section(options: argparse.Namespace) -> NoReturn:
    """Become a new program that runs the section."""
    values = {"section": options.section, "model": options.model[0], "device": options.device, "path": options.path}
    values |= {"deadline": options.deadline, "out": options.out.absolute(), "skip": json.dumps(options.skip)}
    arguments = [f"--{name}={value}" for name, value in values.items()]
    arguments += [f"--{name}" for name in ("quick", "profile") if getattr(options, name)]
    os.execv(sys.executable, [sys.executable, "-m", "benchmarks.gpu", *arguments])


def _try_cuda() -> int:
    import torch

    torch.zeros(1, device="cuda")
    return 0


class _Run:
    """One run of the command."""

    def __init__(self, options: argparse.Namespace) -> None:
        from benchmarks.machine import describe_machine, load_average

        self._options = options
        self._out: Path = options.out.absolute()
        self._can_fork = True
        self._parts = Path(tempfile.mkdtemp(prefix="areal-gpu-"))
        self._out.mkdir(parents=True, exist_ok=True)
        self._started = time.time()
        self._deadline = self._started + 60 * options.minutes
        self._results: list[dict[str, Any]] = []
        self._failures: dict[str, str] = {}
        self._skips: dict[str, str] = {}
        self._facts: dict[str, Any] = describe_machine() | {
            "kind": "gpu",
            "models": list(options.model),
            "quick": options.quick,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "load_before": load_average(),
            "seconds_of_sections": {},
        }

    def perform(self) -> int:
        """Run all sections for all models."""
        os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
        _import_all()
        self._say("imported torch, transformers and the library")
        if self._options.device.startswith("cuda"):
            self._can_fork = self._execute(_try_cuda, time.time() + 60) == 0
            if not self._can_fork:
                self._say("CUDA was used during an import: each section imports everything again")
        for model in self._options.model:
            for section in self._options.only:
                if section in {"machine", "tests"} and model != self._options.model[0]:
                    continue
                self._say(f"{section} {model}")
                began = time.time()
                if self._deadline - began < (1 if self._options.quick else 10):
                    self._skips[f"gpu {section} {model}"] = "the time was used up"
                elif section == "tests":
                    self._test()
                else:
                    self._measure(section, model)
                self._facts["seconds_of_sections"][f"{section} {model}"] = round(time.time() - began, 1)
                self._save()
        num_missed = sum(result["passed"] is False for result in self._results)
        self._say(f"{len(self._results)} figures, {num_missed} beyond their goals, {len(self._failures)} failures")
        self._say(f"written to {self._out / 'report.json'} and {self._out / 'report.md'}")
        return int(bool(self._failures))

    def _say(self, text: str) -> None:
        print(f"{datetime.now(UTC):%H:%M:%S} +{time.time() - self._started:5.1f} s  {text}", flush=True)

    def _measure(self, section: str, model: str) -> None:
        skipped: list[str] = []
        deadline = min(self._deadline, time.time() + SECTIONS[section] * (1 if model != "4b" else 1.5))
        for _ in range(_NUM_ATTEMPTS):
            path = self._parts / f"{section}-{model}.jsonl"
            path.unlink(missing_ok=True)
            chosen = {"section": section, "model": (model,), "deadline": deadline, "path": path, "skip": [*skipped]}
            run = _run_section if self._can_fork else _start_section
            code = self._execute(partial(run, argparse.Namespace(**vars(self._options) | chosen)), deadline)
            finished, open_cells = self._collect(path, section, model)
            if code == 0:
                return
            where = f"in {open_cells[-1]!r}" if open_cells else "outside of its cells"
            self._failures[f"gpu {section}, {model}, {where}"] = f"the process ended with {code}; see the log"
            skipped += [*finished, *open_cells]
            if not open_cells or time.time() > deadline:
                return

    def _collect(self, path: Path, section: str, model: str) -> tuple[list[str], list[str]]:
        """Read what a process wrote; return the cells that ended and those that did not."""
        begun: list[str] = []
        finished: list[str] = []
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        for line in lines:
            try:
                entry = json.loads(line)
            except ValueError:  # the process was killed while it wrote
                continue
            name = next((f"gpu {section}, {model}, {entry[kind]}" for kind in _KINDS if kind in entry), "")
            if "result" in entry:
                self._results.append(entry["result"])
            elif "facts" in entry:
                self._facts |= entry["facts"]
            elif "failure" in entry:
                self._failures[name] = entry["reason"]
            elif "skip" in entry or "misfit" in entry:
                self._skips[name] = entry["reason"]
            elif "begun" in entry:
                begun.append(entry["begun"])
            elif "done" in entry:
                finished.append(entry["done"])
        return finished, [name for name in begun if name not in finished]

    def _execute(self, work: Callable[[], int], deadline: float) -> int:
        """Do ``work`` in a process until shortly after ``deadline``, and print its lines with the time.

        Return its exit code, which is negative for a signal.
        """
        reading, writing = os.pipe()
        sys.stdout.flush()
        with warnings.catch_warnings():
            # Threads of numpy's library hold no lock while nothing is computed.
            warnings.simplefilter("ignore", DeprecationWarning)
            process = os.fork()
        if process == 0:
            _become(writing, work)
        os.close(writing)
        reader = threading.Thread(target=self._print_lines, args=[reading])
        reader.start()
        while (found := os.waitpid(process, os.WNOHANG))[0] == 0:
            if time.time() > deadline + _GRACE_SECONDS:
                _kill(process)
            time.sleep(0.02)
        _kill(process)  # with whatever it started: compilers hold the pipe open
        reader.join()
        return os.waitstatus_to_exitcode(found[1])

    def _print_lines(self, reading: int) -> None:
        with open(reading, errors="replace") as lines, (self._out / "log").open("a", encoding="utf-8") as log:
            for line in lines:
                log.write(line)
                log.flush()
                self._say(f"  {line.rstrip()}")

    def _test(self) -> None:
        """Run the device tests and record how many pass."""
        if importlib.util.find_spec("pytest") is None:
            self._skips["gpu tests"] = "pytest is not installed"
            return
        path = self._parts / "tests.xml"
        folder = ROOT / "tests" / "device"
        arguments = [str(folder), "-c", str(folder / "pytest.ini"), "--rootdir", str(ROOT), "--confcutdir", str(folder)]
        arguments += ["-q", "-rs", "--tb=short", "-p", "no:cacheprovider", f"--junitxml={path}"]
        if self._options.device.startswith("cuda"):  # without CUDA they are skipped: the suite has tests of its own
            os.environ["AREAL_TEST_DEVICE"] = self._options.device
        deadline = min(self._deadline, time.time() + SECTIONS["tests"])
        run = _run_pytest if self._can_fork else _start_pytest
        code = self._execute(partial(run, arguments), deadline)
        if not path.exists():
            self._failures["gpu tests"] = f"pytest ended with {code} and wrote no results; see the log"
            return
        from benchmarks.gpu.pages import read_tests

        results, failures = read_tests(path.read_text(encoding="utf-8"))
        self._results += [result.to_json() for result in results]
        self._failures |= failures

    def _save(self) -> None:
        from benchmarks.gpu.pages import format_page
        from benchmarks.harness import Result
        from benchmarks.report import Report

        report = Report(
            results=tuple(map(Result.from_json, self._results)),
            failures=self._failures,
            skips=self._skips,
            facts=self._facts,
        )
        report.save(self._out / "report.json")
        (self._out / "report.md").write_text(format_page(report), encoding="utf-8")


_KINDS = ("failure", "skip", "misfit")


def _become(writing: int, work: Callable[[], int]) -> NoReturn:
    """Do ``work`` as the process that was forked, with all output to ``writing``, and exit."""
    code = 1
    try:
        os.setsid()
        os.dup2(writing, 1)
        os.dup2(writing, 2)
        os.close(writing)
        code = work()
    except BaseException:  # noqa: BLE001  the parent's code must not run in this process
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run_pytest(arguments: Sequence[str]) -> int:
    import pytest

    return int(pytest.main(list(arguments)))


def _start_pytest(arguments: Sequence[str]) -> NoReturn:
    os.execv(sys.executable, [sys.executable, "-m", "pytest", *arguments])


def _kill(process: int) -> None:
    """End the process with all that it started; its session has its number."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
