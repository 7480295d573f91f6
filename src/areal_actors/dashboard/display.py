"""Display of a run in progress: a live panel at a terminal, one line per step elsewhere, or nothing.

``state`` holds what is displayed; this module writes it to the terminal. Displays run on a worker thread, and their
errors never end a run.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from enum import StrEnum
from typing import TYPE_CHECKING, TextIO

from attrs import evolve

from areal_actors.dashboard.state import RunState, format_metrics, format_seconds, kind_of, sparkline
from areal_actors.kernel import Message
from areal_actors.messages import EvaluationFinished, PhaseChanged, Progress, StepFinished

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

__all__ = ["DisplayStyle", "PlainDisplay", "RichDisplay", "create_display", "render"]

Clock = Callable[[], float]


class DisplayStyle(StrEnum):
    """How a run is displayed."""

    AUTO = "auto"
    """rich at a terminal, plain elsewhere."""
    RICH = "rich"
    PLAIN = "plain"
    NONE = "none"


def create_display(
    style: DisplayStyle, state: RunState, *, stream: TextIO | None = None, clock: Clock = time.monotonic
) -> PlainDisplay | RichDisplay | None:
    """Return a display of ``style`` on ``stream`` (default: standard error); ``None`` for ``none``."""
    target: TextIO = sys.stderr if stream is None else stream
    if style is DisplayStyle.AUTO:
        style = DisplayStyle.RICH if target.isatty() else DisplayStyle.PLAIN
    if style is DisplayStyle.NONE:
        return None
    if style is DisplayStyle.PLAIN:
        return PlainDisplay(state, stream=target, clock=clock)
    from rich.console import Console

    return RichDisplay(state, console=Console(file=target), clock=clock)


class PlainDisplay:
    """One line for each step, phase and evaluation: for log files and pipes."""

    name = "the plain display"
    is_essential = False

    def __init__(self, state: RunState, *, stream: TextIO, clock: Clock = time.monotonic) -> None:
        self._state = state
        self._stream = stream
        self._clock = clock
        self._verdict: str | None = None

    def open(self) -> None:
        """Print the title and the number of steps."""
        self._state = evolve(self._state, started_at=self._clock())
        self._print(f"{self._state.title}: {self._state.total_steps} steps")
        if self._state.page is not None:
            self._print(f"watch it at {self._state.page}")

    def on_event(self, news: Message[Progress, None]) -> None:
        """Print the events that are worth a line. Raises ``OSError``."""
        now = self._clock()
        self._state = self._state.after(news, now)
        line = self._line(news, now) or self._state.describe_failure(news)
        if line is not None:
            self._print(line)
        verdict = self._state.verdict if isinstance(news, StepFinished) else self._verdict
        # Once for each kind: the numbers in a verdict change with every step.
        if verdict is not None and (self._verdict is None or kind_of(verdict) != kind_of(self._verdict)):
            self._print(f"This run does not learn: {verdict}")
        self._verdict = verdict

    def close(self) -> None:
        """Print why the run did not learn, if it did not."""
        if self._verdict is not None:
            self._print(f"This run did not learn: {self._verdict}")

    def _line(self, news: Message[Progress, None], now: float) -> str | None:
        state = self._state
        match news:
            case StepFinished():
                left = f"left {format_seconds(state.seconds_left(now))}"
                took = format_seconds(now - state.started_at)
                return f"step {state.step}/{state.total_steps}  {format_metrics(state.metrics)}  {took}  {left}"
            case EvaluationFinished():
                failed = f", {news.num_failed} failed" if news.num_failed else ""
                return (
                    f"evaluation of version {news.version}: {news.reward:.3f} "
                    f"({news.num_episodes} episodes{failed}, {format_seconds(news.seconds)})"
                )
            case PhaseChanged():
                return state.phase
        return None

    def _print(self, line: str) -> None:
        # A terminal's encoding may lack characters of a failure, or the bars of a sparkline.
        encoding = self._stream.encoding or "utf-8"
        self._stream.write(line.encode(encoding, "replace").decode(encoding) + "\n")
        self._stream.flush()


class RichDisplay:
    """A panel that is redrawn in place; log lines scroll above it."""

    name = "the live display"
    is_essential = False

    def __init__(self, state: RunState, *, console: Console, clock: Clock = time.monotonic) -> None:
        self._state = state
        self._console = console
        self._clock = clock
        self._live: Live | None = None

    def open(self) -> None:
        """Start to draw four times a second, on a separate thread."""
        from rich.live import Live

        self._state = evolve(self._state, started_at=self._clock())
        self._live = Live(
            get_renderable=lambda: render(self._state, self._clock()), console=self._console, refresh_per_second=4
        )
        self._live.start()

    def on_event(self, news: Message[Progress, None]) -> None:
        """Update the state, which the next frame shows. A new kind of failure is printed above the panel."""
        self._state = self._state.after(news, self._clock())
        failure = self._state.describe_failure(news)
        if failure is not None:
            self._console.print(failure, markup=False, highlight=False)

    def close(self) -> None:
        """Draw the last frame and leave it on the screen."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()


def render(state: RunState, now: float) -> RenderableType:
    """Render a run as a panel."""
    from rich.panel import Panel
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2), expand=True)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(ratio=1)
    table.add_row(f"step {state.step}/{state.total_steps}", ProgressBar(total=state.total_steps, completed=state.step))
    rows = [("time", f"{format_seconds(now - state.started_at)}  left {format_seconds(state.seconds_left(now))}")]
    if state.rewards:
        rows.append(("reward", f"{state.rewards[-1]:.3f}  {sparkline(state.rewards, width=48)}"))
    if state.evaluations:
        rows.append(("eval", "  ".join(f"v{e.version} {e.reward:.3f}" for e in state.evaluations[-6:])))
    if state.metrics:
        shown = {key: value for key, value in state.metrics.items() if key not in {"reward", "eval_reward"}}
        rows.append(("step", format_metrics(shown)))
    if state.verdict is not None:
        rows.append(("verdict", f"This run does not learn: {state.verdict}"))
    if state.page is not None:
        rows.append(("page", state.page))
    failures = f", {state.num_failed} failed: {state.last_failure}" if state.num_failed else ""
    rows.append(("episodes", f"{state.num_episodes}{failures}"))
    for label, text in rows:
        # The only row that is worth several lines.
        is_verdict = label == "verdict"
        table.add_row(
            label, Text(text, overflow="ellipsis", no_wrap=not is_verdict, style="bold" if is_verdict else "")
        )
    # Text, not markup: titles and failures may contain brackets.
    return Panel(table, title=Text(state.title), subtitle=Text(state.phase), border_style="cyan")
