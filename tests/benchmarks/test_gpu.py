"""The GPU benchmark without a GPU: its command on the CPU, the tokens that it counts, and its pages."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
from benchmarks.gpu.groups import create_branching
from benchmarks.machine import ROOT
from benchmarks.report import Report, compare
from hypothesis import given
from hypothesis import strategies as st
from tests.training.masks import visible

from areal_actors.training.batch import TrainingRow
from areal_actors.training.packing import pack_flat, pack_tree


def test_gpu_benchmark_runs_on_a_cpu(tmp_path):
    """A section with a tiny model: figures, their goals left out, a report that can be compared, a page."""
    arguments = ["--device", "cpu", "--quick", "--only", "weights", "--out", str(tmp_path)]
    # In a new process: it forks, which one that has used torch's threads must not.
    done = subprocess.run([sys.executable, "-m", "benchmarks.gpu", *arguments], check=False, cwd=ROOT)
    report = Report.load(tmp_path / "report.json")
    figures = {result.name: result.value for result in report.results}

    assert done.returncode == 0
    assert {} == dict(report.failures)
    assert figures["tiny, gap, tree, capture gate"] == 1
    assert figures["tiny, gap, flat, mean difference"] < 0.1
    assert all(change.verdict == "" for change in compare(report, report))
    assert "tiny, gap, tree, mean difference" in (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "capture gate" in (tmp_path / "log").read_text(encoding="utf-8")


def test_gpu_benchmark_needs_few_packages():
    """A machine with torch and transformers needs only these packages more, installed or on its path."""
    script = (
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name in {'structlog', 'cattrs', 'msgspec', 'starlette', 'httpx', 'rich', 'click', 'trio'}:\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        "sys.modules['transformers'] = None\n"  # its own imports are not ours
        "import areal_actors.generation.torch.engine, areal_actors.training.config, areal_actors.training.gang\n"
        "import benchmarks.report, benchmarks.gpu.__main__, benchmarks.gpu.pages\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)


@given(num_tokens=st.integers(200, 1500), prompt=st.integers(1, 150))
def test_gpu_benchmark_counts_the_tokens_that_layouts_compute(num_tokens: int, prompt: int):
    """Against the packs of the trainer, where each row computes all but its last token if that is sampled."""
    work = create_branching(num_tokens, prompt=prompt, vocab_size=1 << 20)
    rows = [TrainingRow(trajectory=row, advantages=np.ones(row.num_tokens)) for row in work.group.rows]
    everything = list(range(len(rows)))
    (tree,) = pack_tree(rows, everything, max_tokens=1 << 20)
    flat = pack_flat(rows, everything, max_tokens=1 << 20)
    assert tree.segments is not None

    # Nothing depends on the last token of a row, which is not computed.
    assert tree.num_tokens == work.num_tree_tokens - 8
    assert sum(pack.num_tokens for pack in flat) == work.num_row_tokens - 8
    assert visible(tree.segments).sum() <= work.num_tree_pairs
    assert work.num_tree_tokens <= num_tokens < work.num_tree_tokens + 12
    assert work.num_row_trained == sum(len(row.positions) for row in rows)
    assert work.num_tree_trained == len(set(zip(tree.sources.tolist(), tree.targets.tolist(), strict=True)))
