"""One command runs every benchmark in a process of its own; one that fails takes no other with it."""

from __future__ import annotations

import json

import pytest
from benchmarks.__main__ import NAMES, main
from benchmarks.harness import Result, Skipped
from benchmarks.machine import PACKAGES, ROOT, describe_machine, load_average
from benchmarks.report import Report
from click.testing import CliRunner

from benchmarks import __main__ as command

TELL = Result(benchmark="kernel", name="tell", value=1.0, unit="µs", gate=0.5)


@pytest.fixture
def without_measuring(monkeypatch):
    """Benchmarks that are over at once: ``kernel`` has a figure, ``slurm`` is skipped, every other one fails."""

    def measure(name, *, quick):
        if name == "slurm":
            raise Skipped("there is no cluster")
        if name != "kernel":
            raise RuntimeError(f"exit code 1: {name} is broken")
        return [TELL]

    monkeypatch.setattr(command, "measure_in_child", measure)


def invoke(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_every_benchmark_is_known():
    """A module next to the runner is a benchmark that it runs, one of its parts, or a study with a nox session."""
    modules = {path.stem for path in (ROOT / "benchmarks").glob("*.py")}
    parts = {"__main__", "harness", "machine", "report", "floors", "load", "moving", "null_engine"}
    studies = {"shape", "capture_gate", "recording", "sandbox", "tour"}

    assert {*NAMES, *parts, *studies} == modules


@pytest.mark.usefixtures("without_measuring")
def test_figures_are_shown_and_written(tmp_path):
    """The table has the figures and the verdicts, the file the machine as well; a missed gate is not a failure."""
    path = tmp_path / "a.json"
    result = invoke("kernel", "--json", path)
    report = Report.load(path)

    assert result.exit_code == 0
    assert "tell" in result.output
    assert "FAIL" in result.output
    assert report.results == (TELL,)
    assert {"cpu", "cores", "packages", "revision", "date", "load_before", "load_after", "quick"} <= report.facts.keys()


@pytest.mark.usefixtures("without_measuring")
def test_a_broken_benchmark_is_reported_among_the_others(tmp_path):
    """The others run, and the exit code says that one did not."""
    path = tmp_path / "a.json"
    result = invoke("proxy", "kernel", "--quick", "--json", path)

    assert result.exit_code == 1
    assert "proxy is broken" in result.output
    assert Report.load(path).results == (TELL,)


@pytest.mark.usefixtures("without_measuring")
def test_what_cannot_run_here_is_skipped_visibly(tmp_path):
    """The reason is in the table and in the file, and nothing has failed."""
    path = tmp_path / "a.json"
    result = invoke("slurm", "kernel", "--json", path)

    assert result.exit_code == 0
    assert "there is no cluster" in result.output
    assert "SKIPPED" in result.output
    assert {"slurm": "there is no cluster"} == Report.load(path).skips


def test_two_runs_are_compared(tmp_path):
    """The ratio of each figure is printed; a file of another kind is refused by name."""
    a, b, other = tmp_path / "a.json", tmp_path / "b.json", tmp_path / "other.json"
    Report(results=(TELL,)).save(a)
    Report(results=(Result(benchmark="kernel", name="tell", value=2.0, unit="µs"),)).save(b)
    other.write_text(json.dumps([1]))

    assert "worse" in invoke("compare", a, b).output
    assert "worse" not in invoke("compare", a, b, "--noise", "2").output
    assert "other.json" in invoke("compare", a, other).output


@pytest.mark.parametrize("arguments", [["nothing"], ["compare", "missing.json", "missing.json"], ["--speed"]])
def test_a_wrong_command_is_refused(arguments):
    """A name that is not a benchmark, a missing file or an unknown option is a usage error."""
    assert invoke(*arguments).exit_code == 2


def test_a_benchmark_runs_in_a_child():
    """The figures of a real benchmark come back from its process; one that is unknown fails with what it said."""
    results = command.measure_in_child("rendering", quick=True)

    assert {"rendering"} == {result.benchmark for result in results}
    with pytest.raises(RuntimeError, match="exit code 2"):
        command.measure_in_child("nothing", quick=True)


def test_a_benchmark_says_from_its_child_that_it_is_skipped(monkeypatch):
    """Where Slurm is not found, its benchmark names the command that installs it."""
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(Skipped, match="apt-get install"):
        command.measure_in_child("slurm", quick=True)


def test_the_machine_is_described():
    """The facts that a figure needs are found on this machine."""
    facts = describe_machine()

    assert facts["cores"] >= 1
    assert facts["cpu"]
    assert set(facts["packages"]) <= set(PACKAGES)
    assert all(load >= 0 for load in load_average())
