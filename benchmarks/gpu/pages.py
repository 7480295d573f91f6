"""The pages that show results: one for a run on a GPU, and one that says what has run on which hardware."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks.harness import Result
from benchmarks.report import Report, format_number

__all__ = [
    "HARDWARE_PAGE",
    "RESULTS",
    "format_hardware",
    "format_page",
    "keep",
    "machine_name",
    "merge",
    "read_reports",
    "read_tests",
    "write_pages",
]

_ROOT = Path(__file__).parents[2]
RESULTS = _ROOT / "benchmarks" / "results"
HARDWARE_PAGE = _ROOT / "docs" / "hardware.md"
_MARKS = {None: "", True: "yes", False: "**no**"}


def read_tests(text: str) -> tuple[list[Result], dict[str, str]]:
    """Return the figures and the failures in a JUnit document of pytest."""
    suites = list(ET.fromstring(text).iter("testsuite"))
    number, skipped = (sum(int(suite.get(name, 0)) for suite in suites) for name in ("tests", "skipped"))
    failures = {}
    for case in (case for suite in suites for case in suite.iter("testcase")):
        for kind in ("failure", "error"):
            if (found := case.find(kind)) is not None:
                failures[f"gpu tests, {case.get('name')}"] = (found.get("message") or kind)[:500]
    passed = number - skipped - len(failures)
    results = [
        Result(benchmark="gpu tests", name="passed", value=passed, unit="tests", higher_is_better=True),
        Result(benchmark="gpu tests", name="failed", value=len(failures), unit="tests", gate=0),
        Result(benchmark="gpu tests", name="skipped", value=skipped, unit="tests"),
    ]
    return results, failures


def machine_name(facts: Mapping[str, object]) -> str:
    """Return the name of a machine for a file: its GPU, or its processor."""
    return re.sub(r"[^a-z0-9]+", "-", str(facts.get("gpu") or facts["cpu"]).lower()).strip("-")


def format_page(report: Report) -> str:
    """Return the page of a run: facts, figures with their goals, what did not fit or was skipped, and failures."""
    facts = report.facts
    named = {
        "GPU": facts.get("gpu", "none"),
        "GPU memory": f"{facts['gpu_memory_gib']} GiB" if "gpu_memory_gib" in facts else None,
        "Driver": facts.get("driver"),
        "CUDA": facts.get("cuda"),
        "Processor": f"{facts['cpu']}, {facts['cores']} cores",
        "Python": facts["python"],
        "Packages": ", ".join(f"{name} {version}" for name, version in facts["packages"].items()),
        "torch": facts.get("torch"),
        "Models": ", ".join(facts.get("models", ())),
        "Revision": facts.get("revision"),
        "Date": facts["date"],
    }
    parts = [
        f"# {facts.get('gpu') or facts['cpu']}",
        "Written by `python -m benchmarks.gpu`; goals are those of the project, and say nothing about correctness.",
        _table(("", ""), [(name, str(value)) for name, value in named.items() if value]),
    ]
    for benchmark in dict.fromkeys(result.benchmark for result in report.results):
        parts.append(f"## {benchmark.removeprefix('gpu ').capitalize()}")
        rows = [_row(result) for result in report.results if result.benchmark == benchmark]
        parts.append(_table(("Figure", "Value", "Unit", "Goal", "Reached"), rows))
    for title, found in (("Skipped, or without room", report.skips), ("Failed", report.failures)):
        if found:
            lines = [(name.removeprefix("gpu "), " ".join(reason.split())[:400]) for name, reason in found.items()]
            parts += [f"## {title}", _table(("What", "Why"), lines)]
    return "\n\n".join(parts) + "\n"


def _row(result: Result) -> tuple[str, ...]:
    goal = "" if result.gate is None else f"{'≥' if result.higher_is_better else '≤'} {format_number(result.gate)}"
    return result.name, format_number(result.value), result.unit, goal, _MARKS[result.passed]


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def keep(paths: Sequence[Path], *, revision: str | None = None) -> list[Path]:
    """Copy reports of one machine into the repository under its name; return the files that were written.

    Of figures in several reports, the last one counts. Raises ``ValueError`` for reports of several machines.
    """
    report = merge([Report.load(path) for path in paths], revision=revision)
    target = RESULTS / f"{machine_name(report.facts)}.json"
    report.save(target)
    return [target, *write_pages()]


def merge(reports: Sequence[Report], *, revision: str | None = None) -> Report:
    """Return one report of all figures; ``runs`` of its facts say when, and of which commit, each report is."""
    names = {machine_name(report.facts) for report in reports}
    if len(names) != 1:
        raise ValueError(
            f"The reports are of {len(names)} machines ({', '.join(sorted(names))}); keep them one by one."
        )
    results: dict[str, Result] = {}
    skips: dict[str, str] = {}
    failures: dict[str, str] = {}
    for report in reports:
        new = {f"{result.benchmark}, {result.name}": result for result in report.results}
        for kept in (skips, failures):  # what was measured later is not skipped or failed any more
            for cell in [cell for cell in kept if any(name.startswith(f"{cell}, ") for name in new)]:
                del kept[cell]
        results |= new
        skips |= report.skips
        failures |= report.failures
    runs = [
        {
            "date": report.facts["date"],
            "revision": report.facts.get("revision") or revision,
            "sections": list(dict.fromkeys(result.benchmark for result in report.results)),
        }
        for report in reports
    ]
    models = dict.fromkeys(model for report in reports for model in report.facts.get("models", ()))
    facts = {**reports[-1].facts, "models": list(models), "revision": runs[-1]["revision"], "runs": runs}
    return Report(results=tuple(results.values()), skips=skips, failures=failures, facts=facts)


def write_pages() -> list[Path]:
    """Write the page of each GPU's report, and the one of all hardware; return their paths."""
    reports = read_reports()
    pages = {
        (RESULTS / name).with_suffix(".md"): format_page(report)
        for name, report in reports.items()
        if report.facts.get("gpu")
    } | {HARDWARE_PAGE: format_hardware(reports)}
    for path, text in pages.items():
        path.write_text(text, encoding="utf-8")
    return list(pages)


def read_reports() -> dict[str, Report]:
    """Return the reports that are kept in the repository, by the names of their files."""
    return {path.name: Report.load(path) for path in sorted(RESULTS.glob("*.json"))}


_HARDWARE = """\
# Hardware: what has run where

Every line is a file of results in `benchmarks/results`, written by a benchmark on that machine. What is not listed has
not been run. The page is generated from those files (`python -m benchmarks.gpu keep REPORT`), and a test compares them.
"""


def format_hardware(reports: Mapping[str, Report]) -> str:
    """Return the page of the documentation that says what has run on which hardware."""
    gpu = {name: report for name, report in reports.items() if report.facts.get("gpu")}
    cpu = {name: report for name, report in reports.items() if name not in gpu}
    parts = [_HARDWARE.rstrip(), "## GPUs"]
    if gpu:
        parts.append(_table(("GPU", "What ran", "Software", "Date", "Results"), map(_hardware_row, gpu.items())))
        for report in gpu.values():
            parts += [f"### {report.facts['gpu']}", _summary(report)]
    else:
        parts.append(
            "Nothing has been measured on a GPU yet. Run `nox -s gpu`, or `python -m benchmarks.gpu` on a machine with "
            "torch and transformers and without a network."
        )
    parts += [
        "## CPUs",
        _table(("Processor", "What ran", "Software", "Date", "Results"), map(_hardware_row, cpu.items())),
    ]
    parts.append(
        "The test suite, the examples and `nox -s train` run on CPUs, in float32 and in emulated bfloat16, on every "
        "change. SGLang and vLLM servers are tested in their CPU builds (`nox -s engines-sglang engines-vllm`)."
    )
    return "\n\n".join(parts) + "\n"


def _hardware_row(item: tuple[str, Report]) -> tuple[str, ...]:
    name, report = item
    facts = report.facts
    what = ", ".join(dict.fromkeys(result.benchmark.removeprefix("gpu ") for result in report.results))
    software = f"Python {facts['python']}, torch {facts.get('torch') or facts['packages'].get('torch', '?')}"
    return str(facts.get("gpu") or facts["cpu"]), what, software, str(facts["date"])[:10], f"`{name}`"


def _summary(report: Report) -> str:
    """Return the figures with goals, and what failed."""
    rows = [
        (result.benchmark.removeprefix("gpu "), *_row(result)) for result in report.results if result.gate is not None
    ]
    table = _table(("Section", "Figure", "Value", "Unit", "Goal", "Reached"), rows)
    failed = f"\n\n{len(report.failures)} parts failed: {', '.join(report.failures)}." if report.failures else ""
    return table + failed
