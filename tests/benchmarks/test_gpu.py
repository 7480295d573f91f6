"""The GPU benchmark without a GPU: its command on the CPU, what it counts, its pages, and what it says is missing."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from attrs import evolve
from benchmarks.gpu import __main__ as command
from benchmarks.gpu.cells import Context
from benchmarks.gpu.groups import create_branching
from benchmarks.gpu.models import SHAPES, create_model, train_flops
from benchmarks.gpu.pages import (
    HARDWARE_PAGE,
    format_hardware,
    format_page,
    machine_name,
    merge,
    read_reports,
    read_tests,
)
from benchmarks.gpu.profiling import format_kernels
from benchmarks.harness import Result, Skipped
from benchmarks.machine import ROOT, describe_machine
from benchmarks.report import Report, compare
from hypothesis import given
from hypothesis import strategies as st

from areal_actors.training.batch import TrainingRow
from areal_actors.training.packing import pack_flat, pack_tree, visible

GPU = {"gpu": "NVIDIA H100 80GB HBM3", "gpu_memory_gib": 79.1, "torch": "2.11.0+cu130", "date": "2026-11-22T17:00:00"}
RATIO = "1.5b, batch 32, ratio to transformers"
FIGURE = Result(benchmark="gpu engine", name=RATIO, value=6.0, unit="ratio", gate=5.0, higher_is_better=True)


@pytest.fixture
def context(tmp_path: Path) -> Context:
    return Context(
        section="trainer",
        device="cpu",
        model="tiny",
        is_quick=True,
        has_profile=False,
        deadline=time.time() + 600,
        path=tmp_path / "trainer.jsonl",
        out=tmp_path,
    )


def entries(context: Context) -> list[dict]:
    return [json.loads(line) for line in context.path.read_text(encoding="utf-8").splitlines()]


def test_the_command_runs_on_a_cpu(tmp_path):
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


def test_engine_and_trainer_need_few_packages():
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


def test_missing_packages_are_listed(monkeypatch, capsys):
    """All of them, in the line that installs them."""
    monkeypatch.setitem(command.REQUIRED, "no_such_module", "no-such-package")

    assert command.main([]) == 2
    assert "pip install no-such-package" in capsys.readouterr().err


def test_a_machine_without_cuda_is_told(monkeypatch, capsys):
    """Nothing is written, and the line names what can be tried."""
    monkeypatch.setattr(command, "_has_cuda", lambda: False)

    assert command.main([]) == 2
    assert "--device cpu --quick" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--only", "engin"], ["--model", "7b"], ["keep"]])
def test_a_wrong_argument_is_refused(arguments, capsys):
    """A section or a model that there is not, or no report to keep."""
    with pytest.raises(SystemExit) as stopped:
        command.main(arguments)
    assert stopped.value.code == 2
    assert capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------------- cells


def test_a_cell_that_fails_or_does_not_fit_is_recorded(context):
    """The cells after it run, and those that must not begin say why."""
    with context.cell("broken"):
        raise ValueError("no such kernel")
    with context.cell("large"):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 12.00 GiB. GPU 0 has a total capacity of …")
    with context.cell("absent"):
        raise Skipped("this version has no such setting")
    with context.cell("sound") as cell:
        cell.add("step", 0.5, "s", gate=0.1)
    context.deadline = 0
    assert not context.may_begin("late")
    found = {
        key: entry for entry in entries(context) for key in entry if key in {"failure", "misfit", "skip", "result"}
    }

    assert "no such kernel" in found["failure"]["reason"]
    assert "does not fit" in found["misfit"]["reason"]
    assert found["skip"] == {"skip": "late", "reason": "the time was used up"}
    assert found["result"]["result"]["gate"] is None  # goals are those of a GPU


def test_a_section_that_dies_is_started_again_after_its_cell(tmp_path, monkeypatch):
    """The cells before it keep their figures, the one it died of is a failure, and the ones after it run."""
    run = command._Run(command._parse(["--device", "cpu", "--quick", "--out", str(tmp_path)]))
    skips = []

    def execute(work, deadline):
        (options,) = work.args
        path, skipped = options.path, options.skip
        skips.append(skipped)
        path.write_text('{"begun": "a"}\n{"done": "a"}\n{"begun": "b"}\n{"trunc' if not skipped else "")
        return -9 if not skipped else 0

    monkeypatch.setattr(run, "_execute", execute)
    run._measure("trainer", "tiny")

    assert skips == [[], ["a", "b"]]
    assert ["gpu trainer, tiny, in 'b'"] == list(run._failures)


# ------------------------------------------------------------------------------------------------- what is counted


@given(num_tokens=st.integers(200, 1500), prompt=st.integers(1, 150))
def test_tokens_and_pairs_are_those_that_the_layouts_compute(num_tokens: int, prompt: int):
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


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_are_counted(name: str):
    """Against the modules of transformers, without their norms and biases."""
    shape = SHAPES[name]
    model = create_model(shape, "meta")
    matrices = sum(p.numel() for p in model.model.layers.parameters() if p.ndim > 1)

    assert matrices == shape.num_body_parameters
    assert model.get_output_embeddings().weight.numel() == shape.num_head_parameters


def test_operations_are_those_that_torch_counts():
    """Of a plain step on one row, forward and backward, with the head for every token."""
    from torch.utils.flop_counter import FlopCounterMode

    shape = SHAPES["tiny"]
    model = create_model(shape, "cpu", dtype=torch.float32)
    ids = torch.arange(64)[None]
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, use_cache=False).logits.sum().backward()
    matrices = train_flops(shape, num_tokens=64, num_trained=64, num_pairs=0, is_full=True)
    counted = counter.get_flop_counts()["Global"]
    products = sum(count for operation, count in counted.items() if "mm" in str(operation))

    assert products == pytest.approx(matrices, rel=0.01)


# ------------------------------------------------------------------------------------------------------------- pages


def test_the_page_of_hardware_shows_the_results():
    """Nothing on it was written by hand."""
    text = format_hardware(read_reports())
    assert text == HARDWARE_PAGE.read_text(encoding="utf-8"), "run `python -m benchmarks.gpu page`"


def test_every_page_of_a_gpu_shows_its_report():
    """Each is what its report says."""
    for name, report in read_reports().items():
        if report.facts.get("gpu"):
            page = (ROOT / "benchmarks" / "results" / name).with_suffix(".md")
            assert page.read_text(encoding="utf-8") == format_page(report), name


def test_a_gpu_is_listed_with_its_figures():
    """Its name, what ran, goals that were reached, failures; without one, the page says so."""
    facts = describe_machine() | GPU
    report = Report(
        results=(FIGURE,), facts=facts, failures={"gpu trainer": "CUDA error"}, skips={"gpu weights": "late"}
    )
    page, hardware = format_page(report), format_hardware({"a.json": report})

    assert machine_name(facts) == "nvidia-h100-80gb-hbm3"
    assert f"| {RATIO} | 6.00 | ratio | ≥ 5.00 | yes |" in page
    assert "CUDA error" in page
    assert "late" in page
    assert "NVIDIA H100 80GB HBM3" in hardware
    assert "| Engine | ratio to transformers (ratio; goal ≥ 5.00) |" in hardware
    assert "| 1.5b, batch 32 | 6.00 |" in hardware
    assert "Failed: gpu trainer" in hardware
    assert "Nothing has been measured on a GPU" in format_hardware({})


def test_reports_of_one_machine_are_merged():
    """The last figure counts, what is measured later is not skipped any more, and each run keeps its date."""
    facts = describe_machine() | GPU
    old = Report(results=(FIGURE,), facts=facts, skips={"gpu trainer, 4b, full": "late", "gpu weights": "late"})
    step = Result(benchmark="gpu trainer", name="4b, full, step", value=1.0, unit="s")
    new = Report(results=(evolve(FIGURE, value=7.0), step), facts=facts | {"date": "2026-11-23T00:00:00"})
    found = merge([old, new], revisions=["abc", "def"])

    assert [7.0, 1.0] == [result.value for result in found.results]
    assert ["gpu weights"] == list(found.skips)
    assert ["2026-11-22", "2026-11-23"] == [run["date"][:10] for run in found.facts["runs"]]
    assert "2026-11-23T00:00, def: engine, trainer" in format_page(found)
    again = merge([found, evolve(new, facts=facts | {"date": "2026-11-24T00:00:00"})], revisions=["", "ghi"])
    assert ["abc", "def", "ghi"] == [run["revision"] for run in again.facts["runs"]]
    with pytest.raises(ValueError, match="2 machines"):
        merge([old, evolve(new, facts=facts | {"gpu": "another"})])


def test_the_results_of_pytest_are_read():
    """Passed, failed and skipped tests, and the message of each failure."""
    cases = '<testcase name="a"/><testcase name="b"><failure message="1 != 2"/></testcase>'
    cases += '<testcase name="c"><skipped/></testcase><testcase name="d"/>'
    text = f'<testsuites><testsuite tests="4" skipped="1">{cases}</testsuite></testsuites>'
    results, failures = read_tests(text)

    assert [2, 1, 1] == [result.value for result in results]
    assert {"gpu tests, b": "1 != 2"} == failures


def test_kernels_are_summed_by_name():
    """Time and launches per step, longest first, with the share of the time in which any ran."""
    events = [
        {"cat": "kernel", "name": name, "ts": start, "dur": duration}
        for name, start, duration in (("gemm", 0, 300), ("gemm", 400, 300), ("norm", 900, 100))
    ]
    table = format_kernels(events, num_steps=2)

    assert "70% busy" in table
    assert table.index("gemm") < table.index("norm")
    assert "nothing was recorded" == format_kernels([], num_steps=1)
