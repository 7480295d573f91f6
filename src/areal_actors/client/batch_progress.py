"""Progress output of a batch: a bar at a terminal, occasional lines elsewhere, and a summary at the end."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TextIO

from areal_actors.client.batches import BatchResult, ItemResult, describe

if TYPE_CHECKING:
    from rich.progress import Progress

__all__ = ["BatchProgress", "BatchSilence", "PlainBatchProgress", "RichBatchProgress", "create_batch_progress"]

_LINE_SECONDS = 10.0


class BatchProgress(Protocol):
    """Receives the progress of one batch."""

    def open(self, total: int | None) -> None:
        """Start the output; ``total`` is the number of items, if it is known."""

    def hear(self, result: ItemResult) -> None:
        """Record that an item is done, successfully or not."""

    def close(self, result: BatchResult | None) -> None:
        """Finish the output; ``result`` is ``None`` if the batch was interrupted."""


def create_batch_progress(
    *, is_quiet: bool, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
) -> BatchProgress:
    """Return a bar if ``stream`` is a terminal, else line output, or a progress without output if ``is_quiet``.

    ``stream`` is standard error by default.
    """
    if is_quiet:
        return BatchSilence()
    target = sys.stderr if stream is None else stream
    return RichBatchProgress(target) if target.isatty() else PlainBatchProgress(target, clock=clock)


class BatchSilence:
    """A progress without output."""

    def open(self, total: int | None) -> None:
        """Do nothing."""

    def hear(self, result: ItemResult) -> None:
        """Do nothing."""

    def close(self, result: BatchResult | None) -> None:
        """Do nothing."""


class PlainBatchProgress:
    """A line for every item that failed, one every ten seconds for the others, and the summary."""

    def __init__(self, stream: TextIO, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._total: int | None = None
        self._num_done = 0
        self._spoke_at = 0.0

    def open(self, total: int | None) -> None:
        """Start counting."""
        self._total = total
        self._spoke_at = self._clock()

    def hear(self, result: ItemResult) -> None:
        """Count the item, and print a line if it failed or if the last line is ten seconds old."""
        self._num_done += 1
        if result.error is not None:
            self._print(f"item {result.index} failed after {result.num_attempts} attempts: {describe(result.error)}")
        elif self._clock() - self._spoke_at >= _LINE_SECONDS:
            self._spoke_at = self._clock()
            self._print(f"{self._num_done}{'' if self._total is None else f'/{self._total}'} items")

    def close(self, result: BatchResult | None) -> None:
        """Print the summary."""
        self._print(f"{self._num_done} items done, then it stopped" if result is None else str(result))

    def _print(self, line: str) -> None:
        # Errors may hold characters that the stream cannot encode; printing them must not fail the batch.
        encoding = self._stream.encoding or "utf-8"
        self._stream.write(line.encode(encoding, "replace").decode(encoding) + "\n")
        self._stream.flush()


class RichBatchProgress:
    """A progress bar that is redrawn in place; failures scroll above it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._progress: Progress | None = None

    def open(self, total: int | None) -> None:
        """Start drawing."""
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=Console(file=self._stream))
        self._progress.add_task("items", total=total)
        self._progress.start()

    def hear(self, result: ItemResult) -> None:
        """Advance the bar."""
        assert self._progress is not None
        if result.error is not None:
            self._print(f"item {result.index} failed after {result.num_attempts} attempts: {describe(result.error)}")
        self._progress.advance(self._progress.task_ids[0])

    def close(self, result: BatchResult | None) -> None:
        """Draw the last frame, leave it visible, and print the summary."""
        assert self._progress is not None
        self._progress.stop()
        self._print("It stopped before its end." if result is None else str(result))

    def _print(self, line: str) -> None:
        assert self._progress is not None
        self._progress.console.print(line, markup=False, highlight=False)
