"""What people see: the state of a run, its lines and its panel, and the picture of its learning."""

from __future__ import annotations

import io

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from areal_actors.dashboard import DisplayStyle, PlainDisplay, RichDisplay, RunState, create_display
from areal_actors.dashboard.display import render, sparkline
from areal_actors.messages import EvaluationFinished, PhaseChanged


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self):
        return True


@pytest.fixture
def heard(news):
    """Three steps of a run with a failed episode and an evaluation."""
    metrics = {"loss": -0.01, "kl": 0.002, "entropy": 1.5, "staleness_mean": 0.5, "staleness_max": 1}
    return [
        PhaseChanged(phase="evaluating", detail="version 0"),
        EvaluationFinished(version=0, reward=0.125, num_episodes=8, num_failed=1, seconds=4.0),
        news.episode(1),
        news.episode(2, failure="ToolAgent.run raised KeyError('[a]')"),
        *(news.step(step, reward=0.2 * step, tokens_per_second=900.0, **metrics) for step in (1, 2, 3)),
    ]


def ticking():
    """A clock that goes on by ten seconds each time it is read."""
    now = [0.0]

    def clock():
        now[0] += 10.0
        return now[0]

    return clock


def test_plain_display_prints_a_line_per_step(heard):
    """One for each phase, evaluation, failure and step, with the time that is left."""
    stream = io.StringIO()
    display = create_display(
        DisplayStyle.AUTO, RunState(title="tool_agent", total_steps=10), stream=stream, clock=ticking()
    )
    assert isinstance(display, PlainDisplay)
    display.open()
    for item in heard:
        display.on_event(item)
    display.close()

    step = "loss -0.01  kl 0.002  entropy 1.500  staleness 0.5  max 1  900 tokens/s"
    assert stream.getvalue().splitlines() == [
        "tool_agent: 10 steps",
        "evaluating: version 0",
        "evaluation of version 0: 0.125 (8 episodes, 1 failed, 4 s)",
        "episode failed (1 so far): ToolAgent.run raised KeyError('[a]')",
        f"step 1/10  reward 0.200  {step}  50 s",
        f"step 2/10  reward 0.400  {step}  1:00  left 1:20",
        f"step 3/10  reward 0.600  {step}  1:10  left 1:10",
    ]


def test_display_shows_a_failure_once_and_counts_it(news):
    """A failure that differs in numbers alone is the same; its 10th and 100th time have a line each."""
    stream = io.StringIO()
    display = PlainDisplay(RunState(total_steps=10), stream=stream, clock=ticking())
    traceback = 'Traceback (most recent call last):\n  File "my_agent.py", line 7, in run\nKeyError: 3'
    for number in range(100):
        finished = news.episode(number, failure=f"Agent.run raised KeyError: {number}")
        display.on_event(evolve(finished, episode=evolve(finished.episode, traceback=traceback)))
    display.on_event(news.episode(100, failure="Agent.run took longer than 60 s"))

    assert stream.getvalue().splitlines() == [
        "episode failed (1 so far): Agent.run raised KeyError: 0",
        "    Traceback (most recent call last):",
        '      File "my_agent.py", line 7, in run',
        "    KeyError: 3",
        "episodes failed (10 so far), 10 of them like this: Agent.run raised KeyError: 9",
        "episodes failed (100 so far), 100 of them like this: Agent.run raised KeyError: 99",
        "episode failed (101 so far): Agent.run took longer than 60 s",
    ]


def test_unique_failures_are_counted_together(news):
    """The number of kinds that a display remembers is bounded."""
    state = RunState(total_steps=10)
    for number in range(300):
        state = state.after(news.episode(number, failure="x" * number), 0.0)

    assert 300 == state.num_failed == sum(state.num_by_failure.values())
    assert 70 > len(state.num_by_failure)


def test_rich_display_draws_a_panel(heard):
    """Progress, rewards as bars, evaluations, the last step, failures with their reason, and the phase."""
    state = RunState(title="tool_agent [b]", total_steps=10)
    for now, item in enumerate(heard):
        state = state.after(item, float(now))
    stream = io.StringIO()

    Console(file=stream, width=100, color_system=None).print(render(state, 8.0))

    text = stream.getvalue()
    for words in (
        "tool_agent [b]",
        "step 3/10",
        "8 s  left 5 s",
        "0.600  ▂▄▅",
        "v0 0.125",
        "staleness 0.5  max 1  900 tokens/s",
        "2, 1 failed: ToolAgent.run raised KeyError('[a]')",
        "training",
    ):
        assert words in text
    assert all(len(line) <= 100 for line in text.splitlines())


def test_rich_display_leaves_its_last_frame(heard):
    """It draws on a terminal and closes cleanly, also twice."""
    stream = Terminal()
    display = create_display(DisplayStyle.AUTO, RunState(title="x", total_steps=3), stream=stream)
    assert isinstance(display, RichDisplay)
    display.open()
    for item in heard:
        display.on_event(item)
    display.close()
    display.close()

    assert "step 3/3" in stream.getvalue()


def test_plain_display_replaces_unencodable_characters(news):
    """A terminal in the C locale does not end a run."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    display = PlainDisplay(RunState(title="Übung", total_steps=1), stream=stream)

    display.open()
    display.on_event(news.episode(failure="naïve"))

    assert b"na?ve" in stream.buffer.getvalue()


@given(st.lists(st.floats(-1e6, 1e6), max_size=200), st.integers(1, 60))
def test_sparkline_fits_its_width(values, width):
    """One bar per value, or means where there are more than fit."""
    line = sparkline(tuple(values), width=width)

    assert len(line) == min(width, len(values))
    assert set(line) <= set("▁▂▃▄▅▆▇█")
