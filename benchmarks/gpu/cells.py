"""What runs inside the process of a section: cells, each of which adds figures to a file or says why it has none.

A section is a function of ``Context``. It measures in cells (``with context.cell(name) as cell``). A cell that fails,
or does not fit into the memory of the device, is recorded as such, and the next one runs; a cell that would begin after
the time of its section is skipped. Every line is flushed, so that the figures of a process that is killed are kept.
"""

from __future__ import annotations

import gc
import json
import re
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from attrs import define, field
from benchmarks.gpu.models import SHAPES, Shape
from benchmarks.harness import Result, Skipped

__all__ = ["Cell", "Context", "peak_gib", "reset_peak", "synchronise"]

GIB = 1 << 30


@define(kw_only=True)
class Context:
    """The settings of one section, and the file that its figures go to."""

    section: str
    device: str
    model: str
    is_quick: bool
    has_profile: bool
    deadline: float
    path: Path
    out: Path
    skipped: frozenset[str] = frozenset()
    """Cells that an earlier process of this section has done, or died of."""

    @property
    def shape(self) -> Shape:
        """The shape of the model."""
        return SHAPES[self.model]

    @property
    def is_cuda(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.startswith("cuda")

    def say(self, text: str) -> None:
        """Print a line of progress."""
        print(text, flush=True)

    def profile(self, text: str) -> None:
        """Append ``text`` to the file of profiles, and print its first lines."""
        with (self.out / "profile.txt").open("a", encoding="utf-8") as file:
            file.write(text + "\n")
        self.say("\n".join(text.splitlines()[:8]))

    def write(self, **entry: Any) -> None:
        """Append an entry to the section's file."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    @contextmanager
    def cell(self, name: str) -> Iterator[Cell]:
        """Measure one cell; errors of the block end the cell only. A skipped cell raises inside of ``run_cells``."""
        cell = Cell(context=self, name=name)
        self.write(begun=name)
        started = time.perf_counter()
        try:
            yield cell
        except Skipped as reason:
            self.say(f"{name}: skipped, {reason}")
            self.write(skip=name, reason=str(reason))
        except torch.OutOfMemoryError as error:
            reason = explain_out_of_memory(error)
            self.say(f"{name}: {reason}")
            self.write(misfit=name, reason=reason)
        except Exception as error:  # noqa: BLE001  the other cells shall run
            traceback.print_exc()
            self.say(f"{name}: FAILED, {type(error).__name__}: {str(error)[:300]}")
            self.write(failure=name, reason=f"{type(error).__name__}: {str(error)[:1000]}")
        self.write(done=name, seconds=time.perf_counter() - started)
        gc.collect()
        if self.is_cuda:
            torch.cuda.empty_cache()

    def may_begin(self, name: str) -> bool:
        """Return whether there is time for the cell; record that it was skipped if there is not."""
        if name in self.skipped:
            return False
        if time.time() < self.deadline:
            return True
        self.say(f"{name}: skipped, the time of the section is used up")
        self.write(skip=name, reason="the time was used up")
        return False


@define(kw_only=True)
class Cell:
    """A part of a section with figures."""

    context: Context
    name: str
    values: dict[str, float] = field(factory=dict)

    def add(
        self,
        what: str,
        value: float,
        unit: str,
        *,
        gate: float | None = None,
        higher_is_better: bool = False,
        baseline: str | None = None,
        **detail: Any,
    ) -> float:
        """Record a figure of this cell and return it."""
        name = f"{self.context.model}, {self.name}, {what}" if self.name else what
        result = Result(
            benchmark=f"gpu {self.context.section}",
            name=name,
            value=float(value),
            unit=unit,
            gate=gate if self.context.is_cuda else None,
            higher_is_better=higher_is_better,
            baseline=baseline,
            detail=detail,
        )
        self.values[what] = result.value
        mark = {None: "", True: "  pass", False: f"  MISSED (goal {gate})"}[result.passed]
        self.context.say(f"{name}: {value:.4g} {unit}{mark}")
        self.context.write(result=result.to_json())
        return result.value


def explain_out_of_memory(error: Exception) -> str:
    """Return how much memory would have been needed at least, from what torch says."""
    text = str(error).partition("\n")[0]
    tried = re.search(r"Tried to allocate ([\d.]+) (GiB|MiB)", text)
    if tried is None or not torch.cuda.is_available():
        return f"does not fit: {text[:300]}"
    more = float(tried[1]) / (1 if tried[2] == "GiB" else 1024)
    total = torch.cuda.get_device_properties(0).total_memory / GIB
    needed = torch.cuda.max_memory_allocated() / GIB + more
    return f"does not fit: needs more than {needed:.1f} GiB (the last request was {more:.2f}) of {total:.1f} GiB"


def synchronise(device: str) -> None:
    """Wait until the device has done what it was asked for."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def reset_peak(device: str) -> None:
    """Begin to measure the peak of allocated memory."""
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()


def peak_gib(device: str) -> float | None:
    """Return the peak of allocated memory in GiB; ``None`` on a CPU."""
    return torch.cuda.max_memory_allocated() / GIB if device.startswith("cuda") else None
