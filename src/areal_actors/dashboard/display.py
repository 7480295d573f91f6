"""Display of a run in progress: a live panel at a terminal, one line per step elsewhere, or nothing.

``RunState`` holds what is displayed: one frozen value, updated by each event. Displays run on a worker thread, and
their errors never end a run.
"""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Callable, Mapping
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TextIO

from attrs import evolve, field, frozen

from areal_actors.dashboard.reporter import Listener
from areal_actors.dashboard.verdict import append_step, find_note, find_verdict
from areal_actors.kernel import Message
from areal_actors.lib.telemetry import kind_of
from areal_actors.messages import (
    EpisodeFinished,
    EvaluationFinished,
    GroupsTrained,
    PhaseChanged,
    Progress,
    ServiceOpened,
    SessionsCounted,
    StepFinished,
)

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

Clock = Callable[[], float]


class DisplayStyle(StrEnum):
    """How a run is displayed."""

    AUTO = "auto"
    """rich at a terminal, plain elsewhere."""
    RICH = "rich"
    PLAIN = "plain"
    NONE = "none"

    def resolve(self, stream: TextIO) -> DisplayStyle:
        """Return the style on ``stream``."""
        if self is not DisplayStyle.AUTO:
            return self
        return DisplayStyle.RICH if stream.isatty() else DisplayStyle.PLAIN


def create_display(
    style: DisplayStyle, state: RunState, *, stream: TextIO | None = None, clock: Clock = time.monotonic
) -> PlainDisplay | RichDisplay | None:
    """Return a display of ``style`` on ``stream`` (default: standard error); ``None`` for ``none``."""
    target: TextIO = sys.stderr if stream is None else stream
    style = style.resolve(target)
    if style is DisplayStyle.NONE:
        return None
    if style is DisplayStyle.PLAIN:
        return PlainDisplay(state, stream=target, clock=clock)
    from rich.console import Console

    return RichDisplay(state, console=Console(file=target), clock=clock)


class PlainDisplay(Listener):
    """One line for each step, phase and evaluation: for log files and pipes."""

    name = "the plain display"

    def __init__(self, state: RunState, *, stream: TextIO, clock: Clock = time.monotonic) -> None:
        self._state = state
        self._stream = stream
        self._clock = clock
        self._verdict: str | None = None
        self._note: str | None = None

    def open(self) -> None:
        """Print the title and the number of steps."""
        self._state = evolve(self._state, started_at=self._clock())
        steps = self._state.total_steps
        self._print(f"{self._state.title}: {steps} step{'s' if steps != 1 else ''}")
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
        if self._note is None and (note := self._state.note) is not None:
            self._print(f"Note: {note}")
            self._note = note

    def close(self) -> None:
        """Print why the run did not learn, if it did not."""
        if self._verdict is not None:
            self._print(f"This run did not learn: {self._verdict}")

    def _line(self, news: Message[Progress, None], now: float) -> str | None:
        state = self._state
        match news:
            case StepFinished():
                numbers = format_metrics(state.metrics)
                return f"step {state.step}/{state.total_steps}  {numbers}  {state.format_time(now)}"
            case EvaluationFinished():
                failed = f", {news.num_failed} failed" if news.num_failed else ""
                return (
                    f"evaluation of version {news.version}: {news.reward:.3f} "
                    f"({news.num_episodes} episodes{failed}, {format_seconds(news.seconds)})"
                )
            case PhaseChanged():
                return state.phase
            case ServiceOpened():
                return f"serving at {news.url}"
        return None

    def _print(self, line: str) -> None:
        # A terminal's encoding may lack characters of a failure, or the bars of a sparkline.
        encoding = self._stream.encoding or "utf-8"
        self._stream.write(line.encode(encoding, "replace").decode(encoding) + "\n")
        self._stream.flush()


class RichDisplay(Listener):
    """A panel that is redrawn in place; log lines scroll above it."""

    name = "the live display"

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
        if isinstance(news, ServiceOpened):
            # Above the panel, whose lines are cut at its width: this one can be copied.
            line = f"For a program that opens sessions:\n  {news.export}"
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Draw the last frame and leave it on the screen."""
        live, self._live = self._live, None
        self._state = evolve(self._state, is_over=True)
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
    rows = [("time", state.format_time(now))]
    if state.service is not None:
        rows += [("listening", state.service.url), ("agents", state.service.export)]
    if state.rewards:
        rows.append(("reward", f"{state.rewards[-1]:.3f}  {sparkline(state.rewards, width=48)}"))
    if state.evaluations:
        rows.append(("eval", "  ".join(f"v{e.version} {e.reward:.3f}" for e in state.evaluations[-6:])))
    if state.metrics:
        shown = {key: value for key, value in state.metrics.items() if key not in {"reward", "eval_reward"}}
        rows.append(("step", format_metrics(shown)))
    if (verdict := state.verdict) is not None:
        rows.append(("verdict", f"This run {'did' if state.is_over else 'does'} not learn: {verdict}"))
    elif (note := state.note) is not None:
        rows.append(("note", note))
    if state.page is not None:
        rows.append(("page", state.page))
    failures = f", {state.num_failed} failed: {state.last_failure}" if state.num_failed else ""
    if state.service is None:
        rows.append(("episodes", f"{state.num_episodes}{failures}"))
    else:
        rows.append(("sessions", f"{state.num_live} live, {state.num_episodes} ended{failures}"))
        rows.append(("groups", f"{state.num_groups} trained"))
    for label, text in rows:
        # The rows that are worth several lines.
        is_long = label in {"agents", "note", "verdict"}
        style = "bold" if label == "verdict" else ""
        table.add_row(label, Text(text, overflow="fold" if is_long else "ellipsis", no_wrap=not is_long, style=style))
    # Text, not markup: titles and failures may contain brackets.
    return Panel(table, title=Text(state.title), subtitle=Text(state.phase), border_style="cyan")


_NUM_TIMES = 8
"""Number of steps over which the duration of a step is averaged."""
_MAX_KINDS = 64
_REPORTED_TIMES = frozenset(10**power for power in range(1, 9))
_BARS = "▁▂▃▄▅▆▇█"


@frozen(kw_only=True)
class RunState:
    """The current state of a run. ``started_at`` and ``step_times`` are seconds of the clock."""

    title: str = ""
    page: str | None = None
    """The URL of the page that shows the run in a browser, with its token."""
    total_steps: int
    started_at: float = 0.0
    step: int = 0
    phase: str = "starting"
    metrics: Mapping[str, float | int | None] = field(factory=dict)
    steps: tuple[Mapping[str, Any], ...] = ()
    """The metrics of steps with rewards, in order; see ``verdict.append_step``."""
    evaluations: tuple[EvaluationFinished, ...] = ()
    step_times: tuple[float, ...] = ()
    num_episodes: int = 0
    num_failed: int = 0
    last_failure: str | None = None
    num_by_failure: Mapping[str, int] = field(factory=dict)
    """How often each kind of failure happened; kinds differ in more than numbers."""
    service: ServiceOpened | None = None
    """Where a service listens."""
    num_live: int = 0
    """Sessions of a service that have not ended."""
    num_groups: int = 0
    """Groups that were trained."""
    is_over: bool = False

    def after(self, news: Message[Progress, None], now: float) -> RunState:
        """Return the state after the event ``news`` at time ``now``. Events that are not displayed change nothing."""
        changes: dict[str, Any] = {}
        match news:
            case PhaseChanged():
                changes = {"phase": f"{news.phase}: {news.detail}" if news.detail else news.phase}
            case EpisodeFinished():
                changes = {"num_episodes": self.num_episodes + 1, **self._count_failure(news.episode.failure)}
            case EvaluationFinished():
                changes = {"evaluations": (*self.evaluations, news), "phase": self._usual_phase}
            case ServiceOpened():
                changes = {"service": news, "phase": "serving"}
            case SessionsCounted():
                changes = {"num_live": news.num_live}
            case GroupsTrained():
                changes = {"num_groups": self.num_groups + len(news.tasks)}
            case StepFinished():
                changes = {
                    "step": news.step,
                    "phase": self._usual_phase,
                    "metrics": dict(news.metrics),
                    "steps": append_step(self.steps, {**news.metrics, "phase": news.phase}),
                    "step_times": (*self.step_times, now)[-_NUM_TIMES - 1 :],
                }
        return evolve(self, **changes)

    def _count_failure(self, failure: str | None) -> dict[str, Any]:
        if failure is None:
            return {}
        kind = kind_of(failure)
        # Messages that name random words would otherwise be kept without end.
        if kind not in self.num_by_failure and len(self.num_by_failure) >= _MAX_KINDS:
            kind = ""
        return {
            "num_failed": self.num_failed + 1,
            "last_failure": failure,
            "num_by_failure": {**self.num_by_failure, kind: self.num_by_failure.get(kind, 0) + 1},
        }

    def describe_failure(self, news: Message[Progress, None]) -> str | None:
        """Describe the failed episode ``news``, the last event of this state; ``None`` if it needs no line.

        The first failure of each kind is described with the traceback of the agent. The same failure is counted from
        then on, and told again when it has happened 10, 100, 1,000 ... times.
        """
        if not isinstance(news, EpisodeFinished) or news.episode.failure is None:
            return None
        failure, traceback = news.episode.failure, news.episode.traceback
        times = self.num_by_failure.get(kind_of(failure), self.num_by_failure.get("", 0))
        if times == 1:
            shown = f"\n{textwrap.indent(traceback, '    ')}" if traceback else ""
            return f"episode failed ({self.num_failed} so far): {failure}{shown}"
        if times in _REPORTED_TIMES:
            return f"episodes failed ({self.num_failed} so far), {times} of them like this: {failure}"
        return None

    @property
    def _usual_phase(self) -> str:
        return "training" if self.service is None else "serving"

    @property
    def rewards(self) -> tuple[float, ...]:
        """The reward of each step that has one."""
        return tuple(float(step["reward"]) for step in self.steps if step.get("reward") is not None)

    @property
    def verdict(self) -> str | None:
        """Why the run does not learn, in one sentence."""
        return find_verdict(self.steps)

    @property
    def note(self) -> str | None:
        """What to look at in a run without a verdict."""
        return find_note(self.steps)

    def format_time(self, now: float) -> str:
        """Format the time since the start, and the time left if it is known."""
        took, left = format_seconds(now - self.started_at), self.seconds_left(now)
        return took if left is None or self.step >= self.total_steps else f"{took}  left {format_seconds(left)}"

    def seconds_left(self, now: float) -> float | None:
        """Return the time of the remaining steps at the recent pace; ``None`` before two steps have ended."""
        if len(self.step_times) < 2:  # noqa: PLR2004 - a difference needs two
            return None
        pace = (self.step_times[-1] - self.step_times[0]) / (len(self.step_times) - 1)
        return max(0.0, (self.total_steps - self.step) * pace - (now - self.step_times[-1]))


def sparkline(values: tuple[float, ...], *, width: int) -> str:
    """Return ``values`` as bars at most ``width`` wide; if there are more values, each bar is a mean of several.

    The lowest bar is 0 or the smallest value, whichever is less, and the highest 1 or the largest.
    """
    if not values:
        return ""
    width = min(width, len(values))
    edges = [round(index * len(values) / width) for index in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(0.0, *means), max(1.0, *means)
    return "".join(_BARS[min(int((mean - low) / (high - low) * len(_BARS)), len(_BARS) - 1)] for mean in means)


def format_seconds(seconds: float) -> str:
    """Format a duration: ``42 s``, ``4:05`` or ``1:02:03``."""
    whole = round(seconds)
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{rest:02}"
    return f"{minutes}:{rest:02}" if minutes else f"{rest} s"


_FOLLOWED = {
    "reward": "reward {:.3f}",
    "eval_reward": "eval {:.3f}",
    "loss": "loss {:.2g}",
    "kl": "kl {:.2g}",
    "entropy": "entropy {:.3f}",
    "staleness_mean": "staleness {:.1f}",
    "staleness_max": "max {:.0f}",
    "tokens_per_second": "{:.0f} tokens/s",
}


def format_metrics(metrics: Mapping[str, float | int | None]) -> str:
    """Return a line with the few numbers of a step that people follow."""
    return "  ".join(form.format(metrics[key]) for key, form in _FOLLOWED.items() if metrics.get(key) is not None)
