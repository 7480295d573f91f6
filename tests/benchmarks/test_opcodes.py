"""The work per request, in instructions of the interpreter, is what it was."""

from __future__ import annotations

import sys

import pytest
from benchmarks.machine import ROOT
from benchmarks.report import Report, compare

from benchmarks import opcodes

BASELINE = ROOT / "benchmarks" / "results" / "opcodes-python3.11.json"
NOISE = 0.05
"""Ten runs of one revision differ by less than half a percent, on a busy machine as on a quiet one."""


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="instructions of other versions cannot be compared")
def test_a_request_takes_no_more_instructions_than_in_the_committed_baseline():
    """If a change is worth its cost: ``python -m benchmarks opcodes --quick --json`` with the path of the baseline."""
    changes = compare(Report.load(BASELINE), Report(results=tuple(opcodes.run(quick=True))), noise=NOISE)
    ratios = {change.new.name: change for change in changes if change.new is not None and change.new.baseline}

    assert len(ratios) == 4
    assert {name: change.ratio for name, change in ratios.items() if change.verdict == "worse"} == {}
