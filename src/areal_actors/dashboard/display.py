"""Display of a run in progress: a live panel at a terminal, one line per step elsewhere, or nothing.

``RunState`` holds what is displayed: one frozen value, updated by each event. Displays run on a worker thread, and
their errors never end a run.
"""

from __future__ import annotations

import re
import sys
import textwrap
import time
from collections.abc import Callable, Mapping
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING, TextIO

from attrs import evolve, field, frozen

from areal_actors.dashboard.reporter import Listener
from areal_actors.dashboard.verdict import NUM_JUDGED_STEPS, find_verdict
from areal_actors.kernel import Message
from areal_actors.messages import EpisodeFinished, EvaluationFinished, PhaseChanged, Progress, StepFinished

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


class PlainDisplay(Listener):
    """One line for each step, phase and evaluation: for log files and pipes."""

    name = "the plain display"

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


Metrics = Mapping[str, float | int | str | None]
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
    rewards: tuple[float, ...] = ()
    steps: tuple[Metrics, ...] = ()
    """The metrics of the first and of the latest steps with rewards, in order, as many as a verdict needs."""
    evaluations: tuple[EvaluationFinished, ...] = ()
    step_times: tuple[float, ...] = ()
    num_episodes: int = 0
    num_failed: int = 0
    last_failure: str | None = None
    num_by_failure: Mapping[str, int] = field(factory=dict)
    """How often each kind of failure happened; kinds differ in more than numbers."""

    def after(self, news: Message[Progress, None], now: float) -> RunState:
        """Return the state after the event ``news`` at time ``now``. Events that are not displayed change nothing."""
        match news:
            case PhaseChanged():
                return evolve(self, phase=f"{news.phase}: {news.detail}" if news.detail else news.phase)
            case EpisodeFinished():
                failure = news.episode.failure
                if failure is None:
                    return evolve(self, num_episodes=self.num_episodes + 1)
                kind = kind_of(failure)
                # Messages that name random ids would otherwise be kept without end.
                if kind not in self.num_by_failure and len(self.num_by_failure) >= _MAX_KINDS:
                    kind = ""
                return evolve(
                    self,
                    num_episodes=self.num_episodes + 1,
                    num_failed=self.num_failed + 1,
                    last_failure=failure,
                    num_by_failure={**self.num_by_failure, kind: self.num_by_failure.get(kind, 0) + 1},
                )
            case EvaluationFinished():
                return evolve(self, evaluations=(*self.evaluations, news), phase="training")
            case StepFinished():
                rewards, steps, reward = self.rewards, self.steps, news.metrics.get("reward")
                if reward is not None:
                    rewards, steps = (*rewards, float(reward)), (*steps, {**news.metrics, "phase": news.phase})
                if len(steps) > 2 * NUM_JUDGED_STEPS:
                    steps = (*steps[:NUM_JUDGED_STEPS], *steps[-NUM_JUDGED_STEPS:])
                return evolve(
                    self,
                    step=news.step,
                    phase="training",
                    metrics=dict(news.metrics),
                    steps=steps,
                    rewards=rewards,
                    step_times=(*self.step_times, now)[-_NUM_TIMES - 1 :],
                )
        return self

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
    def verdict(self) -> str | None:
        """Why the run does not learn, in one sentence."""
        return find_verdict(self.steps)

    def seconds_left(self, now: float) -> float | None:
        """Return the time of the remaining steps at the recent pace; ``None`` before two steps have ended."""
        if len(self.step_times) < 2:  # noqa: PLR2004 - a difference needs two
            return None
        pace = (self.step_times[-1] - self.step_times[0]) / (len(self.step_times) - 1)
        return max(0.0, (self.total_steps - self.step) * pace - (now - self.step_times[-1]))


def kind_of(text: str) -> str:
    """Return ``text`` with its numbers masked, so that messages which differ in numbers alone are equal."""
    return re.sub(r"\d+", "#", text)


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


def format_seconds(seconds: float | None) -> str:
    """Format a duration: ``42 s``, ``4:05`` or ``1:02:03``; a dash if it is unknown."""
    if seconds is None:
        return "-"
    whole = round(seconds)
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{rest:02}"
    return f"{minutes}:{rest:02}" if minutes else f"{rest} s"


_FOLLOWED = {
    "reward": "reward {:.3f}",
    "eval_reward": "eval {:.3f}",
    "loss": "loss {:+.4f}",
    "kl": "kl {:.4f}",
    "entropy": "entropy {:.3f}",
    "staleness_mean": "staleness {:.1f}",
    "staleness_max": "max {:.0f}",
    "tokens_per_second": "{:.0f} tokens/s",
}


def format_metrics(metrics: Mapping[str, float | int | None]) -> str:
    """Return a line with the few numbers of a step that people follow."""
    return "  ".join(form.format(metrics[key]) for key, form in _FOLLOWED.items() if metrics.get(key) is not None)
