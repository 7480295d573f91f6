"""The pages that show results: one for a run on a GPU, and one that says what has run on which hardware."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

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
HARDWARE_PAGE = _ROOT / "docs" / "results" / "hardware.md"
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
        "Measured": "; ".join(map(_format_run, facts.get("runs", [facts]))),
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


def _format_run(run: Mapping[str, Any]) -> str:
    sections = ", ".join(section.removeprefix("gpu ") for section in run.get("sections", ()))
    return f"{run['date'][:16]}, {run.get('revision') or 'no revision'}" + (f": {sections}" if sections else "")


def _row(result: Result) -> tuple[str, ...]:
    goal = "" if result.gate is None else f"{'≥' if result.higher_is_better else '≤'} {format_number(result.gate)}"
    return result.name, format_number(result.value), result.unit, goal, _MARKS[result.passed]


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def keep(paths: Sequence[Path], *, revisions: Sequence[str] | None = None) -> list[Path]:
    """Copy reports of one machine into the repository under its name; return the files that were written.

    Of figures in several reports, the last one counts. Raises ``ValueError`` for reports of several machines.
    """
    report = merge([Report.load(path) for path in paths], revisions=revisions)
    target = RESULTS / f"{machine_name(report.facts)}.json"
    report.save(target)
    return [target, *write_pages()]


def merge(reports: Sequence[Report], *, revisions: Sequence[str] | None = None) -> Report:
    """Return one report of all figures; ``runs`` of its facts say when, and of which commit, each report is.

    ``revisions`` replace the commits that the reports name, unless they are empty: a copy of a working tree may have
    none, or an older one.
    """
    names = {str(report.facts.get("gpu") or report.facts["cpu"]) for report in reports}
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
    runs: list[dict[str, Any]] = []
    for report, revision in zip(reports, revisions or [""] * len(reports), strict=True):
        own = {
            "date": report.facts["date"],
            "revision": revision or report.facts.get("revision"),
            "sections": list(dict.fromkeys(result.benchmark for result in report.results)),
        }
        # A report that was kept before already is one of several runs.
        runs += [own] if revision else report.facts.get("runs", [own])
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
    """Return the reports that are kept in the repository, by the names of their files.

    Studies keep files of other forms there, which name no machine.
    """
    paths = [path for path in sorted(RESULTS.glob("*.json")) if "facts" in json.loads(path.read_text(encoding="utf-8"))]
    return {path.name: Report.load(path) for path in paths}


_LEGEND = """\
Models have the shapes of Qwen2.5-0.5B, Qwen2.5-1.5B and Qwen3-4B, and random weights. The engine samples 128 tokens
after prompts of 128 to 512; `tokens` counts from the first submission to the last token. `transformers` is its
`generate` on the same prompts. `MFU` counts 6 operations per parameter and token (4 with LoRA), attention over visible
pairs, and nothing twice."""
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
        parts.append(_LEGEND)
        for name, report in gpu.items():
            parts += [
                f"### {report.facts['gpu']}",
                _summary(report),
                f"All figures: `{Path(name).with_suffix('.md')}`.",
            ]
    else:
        parts.append(
            "Nothing has been measured on a GPU yet. Run `nox -s gpu`, or `python -m benchmarks.gpu` on a machine\n"
            "with torch and transformers and without a network."
        )
    parts += [
        "## CPUs",
        _table(("Processor", "What ran", "Software", "Date", "Results"), map(_hardware_row, cpu.items())),
    ]
    parts.append(
        "The test suite, the examples and `nox -s train` run on CPUs on every change, in float32 and bfloat16.\n"
        "On an NVIDIA H100 (2026-11-23, 13d5721, one run) that job, `areal-actors train examples/tool_agent.yaml`,\n"
        "ended at its goal after 14 steps in 32 s, 73 s with starting: held-out reward 0.05 -> 1.00.\n"
        "SGLang and vLLM servers are tested in their CPU builds (`nox -s engines-sglang engines-vllm`)."
    )
    return "\n\n".join(parts) + "\n"


def _hardware_row(item: tuple[str, Report]) -> tuple[str, ...]:
    name, report = item
    facts = report.facts
    what = ", ".join(dict.fromkeys(result.benchmark.removeprefix("gpu ") for result in report.results))
    software = f"Python {facts['python']}, torch {facts.get('torch') or facts['packages'].get('torch', '?')}"
    return str(facts.get("gpu") or facts["cpu"]), what, software, str(facts["date"])[:10], f"`{name}`"


_SUMMARY = {
    "engine": (
        "tokens",
        "tokens while all decode",
        "transformers, tokens",
        "ratio to transformers",
        "first token, median",
    ),
    "trainer": ("step", "computed tokens", "MFU by the data sheet", "peak memory"),
    "trainer, tree over flat": ("tokens that need not be computed", "time", "time over tokens", "peak memory"),
    "weights, gap": ("mean difference", "99th percentile of differences", "largest difference", "capture gate"),
    "weights, update": ("trainer to engine", "engine's bytes"),
    "tests": ("passed", "failed", "skipped"),
}
"""Tables of the page of hardware: a row for each cell that has the figures."""
_NAMES_WITH_COMMAS = ("first token, median", "transformers, tokens")


def _summary(report: Report) -> str:
    """Return the main figures, a line for each cell, and what failed."""
    parts = []
    for title, columns in _SUMMARY.items():
        section, _, kind = title.partition(", ")
        cells: dict[str, dict[str, Result]] = {}
        for result in report.results:
            cell, _, what = result.name.rpartition(", ")
            if result.name.endswith(_NAMES_WITH_COMMAS):
                cell, _, first = cell.rpartition(", ")
                what = f"{first}, {what}"
            belongs = kind in cell if kind else "tree over flat" not in cell
            if result.benchmark == f"gpu {section}" and belongs and what in columns:
                cells.setdefault(cell, {})[what] = result
        if not cells:
            continue
        figures = [item for found in cells.values() for item in found.items()]
        found = dict(sorted(figures, key=lambda item: item[1].gate is not None))  # one with a goal, if there is one
        shown = [what for what in columns if what in found]
        header = (title.capitalize(), *(_heading(found[what], what) for what in shown))
        rows = [
            (cell, *(_mark(figures.get(what)) for what in shown))
            for cell, figures in sorted(cells.items(), key=_in_order)
        ]
        parts.append(_table(header, rows))
    runs = "; ".join(map(_format_run, report.facts.get("runs", [report.facts])))
    parts.append(f"Bold: short of the goal in the head of the column. Measured {runs}.")
    if report.failures:
        parts.append(f"Failed: {', '.join(report.failures)}.")
    return "\n\n".join(parts)


def _in_order(cell: tuple[str, object]) -> list[tuple[int, str]]:
    """Return a key that puts 4k before 16k."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", cell[0])]


def _heading(result: Result, what: str) -> str:
    goal = (
        "" if result.gate is None else f"; goal {'≥' if result.higher_is_better else '≤'} {format_number(result.gate)}"
    )
    return f"{what} ({result.unit}{goal})"


def _mark(result: Result | None) -> str:
    if result is None:
        return ""
    return f"**{format_number(result.value)}**" if result.passed is False else format_number(result.value)
