"""Figures survive their file, and what changed between two runs is told from what is noise."""

from __future__ import annotations

import json

import pytest
from attrs import evolve
from benchmarks.harness import Result
from benchmarks.report import NOISE_OF_RATIOS, NOISE_OF_TIMES, Report, compare, create_changes_table, create_table
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

positive = st.floats(1e-6, 1e12)
names = st.text(max_size=8)
results = st.builds(
    Result,
    benchmark=names,
    name=names,
    value=st.floats(allow_nan=False, allow_infinity=False),
    unit=st.sampled_from(["µs", "ratio"]),
    gate=st.none() | positive,
    higher_is_better=st.booleans(),
    baseline=st.none() | names,
    detail=st.dictionaries(names, st.integers()),
)
TELL = Result(benchmark="kernel", name="tell", value=1.0, unit="µs")


def printed(table) -> str:
    console = Console(width=160)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


@given(result=results)
def test_a_figure_round_trips(result):
    """What is read back from JSON equals what was written, and so does its verdict."""
    read = Result.from_json(json.loads(json.dumps(result.to_json())))

    assert read == result
    assert read.passed == result.passed


def test_a_report_round_trips(tmp_path):
    """Figures, failures and facts are read as they were saved, in a directory that need not exist."""
    report = Report(results=(TELL,), failures={"proxy": "exit code 1"}, facts={"cores": 2})
    report.save(tmp_path / "results" / "a.json")

    assert Report.load(tmp_path / "results" / "a.json") == report


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"results": [{}], "failures": {}, "facts": {}}'])
def test_another_file_is_refused(text, tmp_path):
    """A file that is something else is an error that names it."""
    path = tmp_path / "other.json"
    path.write_text(text)

    with pytest.raises(ValueError, match=r"other\.json"):
        Report.load(path)


@given(value=positive, gate=positive)
def test_a_gate_is_respected_on_its_side(value, gate):
    """A bound is met by what is equal; which side is the good one depends on the figure."""
    cost = evolve(TELL, value=value, gate=gate)
    speed = evolve(cost, higher_is_better=True)

    assert (value <= gate) is cost.passed
    assert (value >= gate) is speed.passed
    assert evolve(cost, gate=None).passed is None


@given(value=positive, factor=st.floats(0.01, 100), higher_is_better=st.booleans())
def test_changes_mirror(value, factor, higher_is_better):
    """What is better seen from one side is worse from the other, and nothing changes compared with itself."""
    old = evolve(TELL, value=value, higher_is_better=higher_is_better)
    new = evolve(old, value=value * factor)
    mirrored = {"better": "worse", "worse": "better", "": ""}
    (there,) = compare(Report(results=(old,)), Report(results=(new,)), noise=0.2)
    (back,) = compare(Report(results=(new,)), Report(results=(old,)), noise=0.2)
    (same,) = compare(Report(results=(old,)), Report(results=(old,)), noise=0.0)

    assert mirrored[there.verdict] == back.verdict
    assert same.verdict == ""


def test_ratios_are_held_to_a_narrower_band():
    """What is measured against a baseline in the same run moves less by chance, so that less of it counts."""
    changed = 1 + (NOISE_OF_RATIOS + NOISE_OF_TIMES) / 2
    ratio = evolve(TELL, name="tell, ratio", baseline="queue")
    old = Report(results=(TELL, ratio))
    new = Report(results=tuple(evolve(result, value=changed) for result in old.results))

    assert ["", "worse"] == [change.verdict for change in compare(old, new)]


def test_what_one_run_has_alone_is_said():
    """A figure that is new or gone is not a change of speed, and hides no other."""
    old, new = evolve(TELL, name="old"), evolve(TELL, name="new")
    changes = compare(Report(results=(old, TELL)), Report(results=(TELL, new)))

    assert [("tell", ""), ("new", "new"), ("old", "gone")] == [
        ((change.new or change.old).name, change.verdict) for change in changes
    ]
    assert "gone" in printed(create_changes_table(changes))


def test_a_baseline_of_nothing_has_no_ratio():
    """A figure that was zero cannot be a divisor; it is shown without a verdict."""
    (change,) = compare(Report(results=(evolve(TELL, value=0.0),)), Report(results=(TELL,)))

    assert change.ratio is None
    assert change.verdict == ""


def test_the_table_shows_gates_and_failures():
    """A reader sees the bound beside the figure, whether it is respected, and which benchmark did not run."""
    missed = evolve(TELL, value=1234.5, gate=1000.0)
    met = evolve(TELL, name="tokens", unit="tokens/s", gate=0.5, higher_is_better=True)
    text = printed(create_table(Report(results=(missed, met), failures={"proxy": "exit code 1: no port"})))

    assert "1,234" in text
    assert "≤ 1,000" in text
    assert "FAIL" in text
    assert "≥ 0.5" in text
    assert "pass" in text
    assert "exit code 1: no port" in text
