"""The models that runs have trained: find the weights of ``experiment/trial``, and list all models.

::

    <root>/<experiment>/<trial>/weights/           as transformers loads it
                                       /trained.json   step and reward, for people

This module only looks up: nothing is loaded and nothing is written. Names come from any client that may send a request,
so a name that could lead out of the root is rejected, and so is a symbolic link that does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from attrs import field, frozen

from areal_actors.domain import TrainedModel, is_model_identifier
from areal_actors.errors import ModelError

WEIGHTS_DIRECTORY = "weights"
"""Name of the directory of a run's weights. It appears only when it is complete."""

TRAINED_DOCUMENT = "trained.json"
"""Name of the file in that directory that says how the weights were trained."""

_MAX_LISTED = 8


def _absolute(path: Path) -> Path:
    return path.expanduser().absolute()


@frozen(kw_only=True)
class Catalogue:
    """The trained models below ``root``. Every call reads the current state of the disk."""

    root: Path = field(converter=_absolute)

    def get(self, name: str) -> TrainedModel | None:
        """Return the model with exactly the name ``experiment/trial``, or ``None`` if there is none."""
        if not is_model_identifier(name):
            return None
        path = self.root / name / WEIGHTS_DIRECTORY
        try:
            saved_at = path.stat().st_mtime
            # The name was checked, but a symbolic link may still lead out of the root.
            is_inside = path.resolve(strict=True).is_relative_to(self.root.resolve())
            if not is_inside or not (path / "config.json").is_file():
                return None
        except OSError:
            return None
        facts: Any = None
        # Weights from elsewhere have no such document, or another one of this name.
        with suppress(OSError, ValueError):
            facts = json.loads((path / TRAINED_DOCUMENT).read_text(encoding="utf-8"))
        facts = facts if isinstance(facts, dict) else {}
        return TrainedModel(
            name=name,
            path=path,
            saved_at=saved_at,
            step=_number(facts, "step", int),
            reward=_number(facts, "reward", float),
        )

    def find(self, name: str) -> TrainedModel:
        """Return the model ``experiment/trial``, or ``experiment`` if only one of its trials has weights.

        Raises:
            ModelError: there is no such model, or there are several; the message lists existing names.
        """
        if "/" in name:
            found = self.get(name)
            if found is None:
                raise ModelError(self._explain(name))
            return found
        # Checked before it becomes a part of a pattern: a name such as ``*`` must not find all experiments.
        is_experiment = is_model_identifier(f"{name}/trial")
        trials = sorted(self._scan(name), key=lambda model: model.name) if is_experiment else []
        if not trials:
            raise ModelError(self._explain(name))
        if len(trials) > 1:
            names = ", ".join(model.name for model in trials[:_MAX_LISTED])
            raise ModelError(f"{name} has {len(trials)} trials with weights; name one of them: {names}.")
        return trials[0]

    def list(self) -> tuple[TrainedModel, ...]:
        """Return all models, sorted by name."""
        return tuple(sorted(self._scan(), key=lambda model: model.name))

    def _scan(self, experiment: str = "*") -> Iterator[TrainedModel]:
        for path in self.root.glob(f"{experiment}/*/{WEIGHTS_DIRECTORY}"):
            found = self.get(f"{path.parent.parent.name}/{path.parent.name}")
            if found is not None:
                yield found

    def _explain(self, name: str) -> str:
        """Return why there is no model with this name."""
        shown = name if len(name) <= 100 else f"{name[:100]}…"  # noqa: PLR2004 - enough to recognise it
        if not is_model_identifier(name if "/" in name else f"{name}/trial"):
            return (
                f"{shown!r} is not the name of a trained model. They are called experiment/trial, each of letters, "
                "digits, '.', '_' and '-'."
            )
        run = self.root / name
        if "/" in name and run.is_dir():
            return (
                f"The run {name} has no weights yet, because it has not finished. "
                f"'areal-actors export {run}' makes them of its newest checkpoint."
            )
        names = [model.name for model in self.list()]
        near = get_close_matches(name, names, n=3, cutoff=0.5) or names[:_MAX_LISTED]
        hint = f"did you mean {' or '.join(near)}?" if near else "no run there has finished yet."
        return f"There is no trained model {shown!r} in {self.root}: {hint}"


def format_models(models: Sequence[TrainedModel]) -> str:
    """Return a table with one line per model: name, step, day and time of its weights (UTC), reward."""
    if not models:
        return "No run here has weights yet."
    width = max(len("model"), *(len(model.name) for model in models))
    lines = [f"{'model':{width}}  {'step':>6}  {'saved (UTC)':16}  reward"]
    for model in models:
        step = "" if model.step is None else str(model.step)
        saved = datetime.fromtimestamp(model.saved_at, UTC).strftime("%Y-%m-%d %H:%M")
        reward = "" if model.reward is None else f"{model.reward:.3f}"
        lines.append(f"{model.name:{width}}  {step:>6}  {saved}  {reward}".rstrip())
    return "\n".join(lines)


def _number(facts: Mapping[str, Any], key: str, kind: type[Any]) -> Any:
    value = facts.get(key)
    return kind(value) if isinstance(value, int | float) else None
