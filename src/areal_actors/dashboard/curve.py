"""The learning curve of a run as a picture: reward per step, and the evaluations on held-out problems."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from attrs import frozen

from areal_actors.dashboard.files import RunDirectory
from areal_actors.dashboard.records import read_records

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["LearningCurve", "draw_curve", "read_curve", "write_curve"]

_REWARD_COLOR = "#3b7dd8"
_EVAL_COLOR = "#d8663b"
_STYLE: Any = {
    "svg.hashsalt": "areal_actors",  # the same run gives the same bytes
    "svg.fonttype": "none",  # text stays text: small, and sharp
    "font.family": "sans-serif",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "text.color": "#333333",
    "axes.labelcolor": "#333333",
    "xtick.color": "#666666",
    "ytick.color": "#666666",
}


@frozen(kw_only=True)
class LearningCurve:
    """Points of the picture: ``(step, reward)`` pairs."""

    title: str = ""
    rewards: tuple[tuple[int, float], ...] = ()
    evaluations: tuple[tuple[int, float], ...] = ()


def read_curve(directory: RunDirectory) -> LearningCurve:
    """Return the curve of the records in ``metrics.jsonl``. Raises ``OSError``."""
    records = list(read_records(directory.metrics))

    def points(key: str) -> tuple[tuple[int, float], ...]:
        return tuple((int(r["step"]), float(r[key])) for r in records if r.get(key) is not None and "step" in r)

    title = f"{directory.path.parent.name} / {directory.path.name}"
    return LearningCurve(title=title, rewards=points("reward"), evaluations=points("eval_reward"))


def write_curve(directory: RunDirectory) -> None:
    """Write ``curve.svg`` and ``curve.png`` of a run. Raises ``OSError``."""
    curve = read_curve(directory)
    directory.curve_svg.write_bytes(draw_curve(curve, form="svg"))
    directory.curve_png.write_bytes(draw_curve(curve, form="png"))


def draw_curve(curve: LearningCurve, *, form: str) -> bytes:
    """Return the picture as ``svg`` or ``png``. Needs no display, and does not change matplotlib's global state."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    buffer = io.BytesIO()
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(7.2, 3.6), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        # Without the backslash, matplotlib reads a formula of TeX between two dollar signs.
        axes.set_title(curve.title.replace("$", r"\$"), fontsize=11, loc="left")
        axes.set_xlabel("step")
        axes.set_ylabel("mean reward")
        axes.grid(axis="y", color="#dddddd", linewidth=0.6)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        _plot_line(axes, curve.rewards, label="training", color=_REWARD_COLOR, marker="", linewidth=1.8)
        _plot_line(axes, curve.evaluations, label="held out", color=_EVAL_COLOR, marker="o", linewidth=1.0)
        if curve.rewards or curve.evaluations:
            axes.legend(frameon=False, loc="lower right")
        # Neither form has the time of its making, so that the same run gives the same bytes.
        metadata: dict[str, Any] = {"Date": None} if form == "svg" else {"Software": None}
        figure.savefig(buffer, format=form, dpi=144, metadata=metadata)
    return buffer.getvalue()


def _plot_line(axes: Axes, points: Sequence[tuple[int, float]], **style: Any) -> None:
    if points:
        axes.plot([step for step, _ in points], [value for _, value in points], markersize=5, **style)
