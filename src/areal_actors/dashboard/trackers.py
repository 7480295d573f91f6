"""Experiment trackers: TensorBoard, Weights & Biases, MLflow and trackio, fed with the numbers of ``metrics.jsonl``.

``logging.trackers`` names them, with their options::

    logging:
      trackers: [tensorboard, {wandb: {project: agents, mode: offline}}]

Each tracker runs on its own thread behind a bounded queue, because a client may wait for a server. Training never
waits for it: records that do not fit are dropped and counted, and a tracker that fails is reported once and never ends
a run. ``trackers.json`` in the run directory keeps the names that the trackers gave to the run, so that a resumed run
continues them.

The clients are called directly. ``accelerate.tracking`` has more of them, but needs accelerate's distributed state,
which joins a process group wherever ``WORLD_SIZE`` is set, and can neither hide the events that a crashed run wrote to
TensorBoard nor tell wandb and MLflow how a run ended.
"""

# pyright: reportMissingImports=false
# The clients are optional, and each is imported where its tracker is opened.

from __future__ import annotations

import json
import math
import os
import re
import secrets
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from difflib import get_close_matches
from functools import partial
from importlib.util import find_spec
from queue import Full, Queue
from typing import Any

from attrs import frozen

from areal_actors.dashboard.files import RunDirectory
from areal_actors.dashboard.records import load_object
from areal_actors.dashboard.reporter import Listener
from areal_actors.domain import EVAL_SCOPE, RunStatus
from areal_actors.errors import ConfigError
from areal_actors.kernel import Message
from areal_actors.lib.atomic_write import atomic_write
from areal_actors.lib.telemetry import get_logger
from areal_actors.messages import EvaluationFinished, Progress, RunEnded, StepFinished

_log = get_logger(__name__)

_MAX_QUEUED = 1000
_CLOSE_SECONDS = 60.0
"""How long the end of a run waits for a tracker to send what it has."""
_MAX_PARAMETER = 500
"""Length of a setting in MLflow; its servers before 2.8 accept no more."""
_EXIT_CODES = {RunStatus.FINISHED: 0, RunStatus.INTERRUPTED: 255}
"""The exit codes by which wandb tells how a run ended: it shows 255, its own code for Ctrl-C, as killed."""
_MLFLOW_STATES = {RunStatus.FINISHED: "FINISHED", RunStatus.INTERRUPTED: "KILLED"}
_SECRET = re.compile(r"(^|_)(key|keys|secret|password|token|authorization)$", re.IGNORECASE)
_names_lock = threading.Lock()
"""Held while the file of names is changed: trackers open at the same time."""


@frozen(kw_only=True)
class TrackedRun:
    """The run as trackers see it. ``resumed_step`` is the step of the checkpoint from which it continues."""

    directory: RunDirectory
    experiment: str
    trial: str
    resumed_step: int | None = None

    def settings(self) -> dict[str, Any]:
        """Return the configuration by dotted paths, without keys and passwords; empty if it cannot be read."""
        import yaml

        try:
            found = yaml.safe_load(self.directory.config.read_text(encoding="utf-8"))
        except (OSError, yaml.YAMLError):
            return {}
        return flatten_settings(found) if isinstance(found, dict) else {}

    def recall(self, tracker: str) -> dict[str, str]:
        """Return what ``remember`` stored for ``tracker``. A new run has a new directory, and so nothing stored."""
        names: dict[str, str] = load_object(self.directory.trackers).get(tracker, {})
        return names

    def remember(self, tracker: str, **names: str) -> None:
        """Store the names by which the tracker knows this run. Raises ``OSError``."""
        with _names_lock:
            path = self.directory.trackers
            atomic_write(path, json.dumps(load_object(path) | {tracker: names}))


def flatten_settings(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings by dotted paths, with keys and passwords hidden."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        name = f"{prefix}{key}"
        if _SECRET.search(str(key)) and isinstance(value, str | list):
            flat[name] = "***"
        elif isinstance(value, Mapping) and value:
            flat |= flatten_settings(value, f"{name}.")
        elif isinstance(value, list):
            # Items may be sections with secrets of their own; a tracker stores the list as text.
            flat[name] = str([flatten_settings(item) if isinstance(item, Mapping) else item for item in value])
        else:
            flat[name] = value
    return flat


# ----------------------------------------------------------------------------------------------------- trackers


@frozen(kw_only=True)
class Tracker:
    """An open tracker. All calls come from one thread and may block; errors are reported and counted."""

    log: Callable[[dict[str, float], int], object]
    """Records numbers of a step. Several records may have the same step."""
    finish: Callable[[RunStatus], object]
    """Sends everything, and ends the run as its status says."""


def _open_tensorboard(run: TrackedRun, options: Mapping[str, Any]) -> Tracker:
    """Write event files in the run directory; options are those of ``tensorboardX.SummaryWriter``.

    Events that a crashed run wrote after its checkpoint are hidden.
    """
    from tensorboardX import SummaryWriter

    purge_step = None if run.resumed_step is None else run.resumed_step + 1
    own = {"logdir": str(run.directory.tensorboard), "purge_step": purge_step, "flush_secs": 10}
    writer = SummaryWriter(**{**own, **options})
    if purge_step is None and (settings := run.settings()):
        writer.add_text("config", f"```json\n{json.dumps(settings, indent=2)}\n```")

    def log(values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return Tracker(log=log, finish=lambda _: writer.close())


def _open_wandb(run: TrackedRun, options: Mapping[str, Any]) -> Tracker:
    """Open a run of Weights & Biases; options are those of ``wandb.init``.

    The project is the experiment, the run the trial. Offline (``mode: offline`` or ``WANDB_MODE=offline``), files for
    ``wandb sync`` are written below ``wandb/`` in the run directory. wandb merges records of one step, and ignores
    steps that it has left behind.
    """
    import wandb

    mode = options.get("mode") or os.environ.get("WANDB_MODE") or "online"
    # wandb would ask at the terminal, and the run would wait.
    if mode == "online" and not wandb.api.api_key:
        raise ConfigError("wandb has no API key: log in with 'wandb login' or WANDB_API_KEY, or set WANDB_MODE=offline")
    identity = run.recall("wandb").get("id") or secrets.token_hex(4)
    own: dict[str, Any] = {"project": run.experiment, "name": run.trial, "id": identity, "resume": "allow"}
    # The output of the run stays its own; a second reader of the terminal would garble the display.
    quiet = wandb.Settings(console="off", silent=True)
    own |= {"dir": str(run.directory.path), "config": run.settings(), "settings": quiet}
    opened = wandb.init(**{**own, **options})
    run.remember("wandb", id=identity)
    return Tracker(
        log=lambda values, step: opened.log(values, step=step),
        finish=lambda status: opened.finish(exit_code=_EXIT_CODES.get(status, 1)),
    )


def _open_mlflow(run: TrackedRun, options: Mapping[str, Any]) -> Tracker:
    """Open a run of MLflow. Options: ``tracking_uri``, ``experiment_name``, ``run_name`` and ``tags``.

    Without a ``tracking_uri`` or ``MLFLOW_TRACKING_URI``, it is stored in ``mlflow.db`` in the run directory.
    Characters that MLflow does not allow in names become underscores.
    """
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param

    local = f"sqlite:///{run.directory.path / 'mlflow.db'}"
    uri = options.get("tracking_uri") or os.environ.get("MLFLOW_TRACKING_URI") or local
    client, known = MlflowClient(tracking_uri=uri), run.recall("mlflow")
    if known.get("tracking_uri") == uri:
        number = known["run_id"]
        client.update_run(number, status="RUNNING")
    else:
        name = options.get("experiment_name") or run.experiment
        experiment = client.get_experiment_by_name(name)
        # A server decides where its artifacts are.
        place = (run.directory.path / "mlartifacts").as_uri() if uri == local else None
        number = client.create_run(
            experiment.experiment_id if experiment else client.create_experiment(name, artifact_location=place),
            run_name=options.get("run_name") or run.trial,
            tags={"areal_actors.run_directory": str(run.directory.path), **options.get("tags", {})},
        ).info.run_id
        run.remember("mlflow", run_id=number, tracking_uri=uri)
        found = [Param(name, str(value)[:_MAX_PARAMETER]) for name, value in run.settings().items()]
        # MLflow takes at most 100 parameters in one request.
        for start in range(0, len(found), 100):
            client.log_batch(number, params=found[start : start + 100])

    def log(values: dict[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        found = [Metric(re.sub(r"[^\w\-. /]", "_", name), value, now, step) for name, value in values.items()]
        client.log_batch(number, metrics=found)

    return Tracker(log=log, finish=lambda status: client.set_terminated(number, _MLFLOW_STATES.get(status, "FAILED")))


def _open_trackio(run: TrackedRun, options: Mapping[str, Any]) -> Tracker:
    """Open a run of trackio; options are those of ``trackio.init``. ``TRACKIO_DIR`` says where it is stored.

    The project is the experiment, the run the trial; ``trackio show`` displays it.
    """
    import trackio

    resume = "allow" if run.recall("trackio") else "never"
    own = {"project": run.experiment, "name": run.trial, "config": run.settings(), "resume": resume, "embed": False}
    # Standard output belongs to the command.
    with redirect_stdout(sys.stderr):
        opened: Any = trackio.init(**{**own, **options})
    run.remember("trackio", name=run.trial)

    def finish(_: RunStatus) -> None:
        with redirect_stdout(sys.stderr):
            opened.finish()

    return Tracker(log=lambda values, step: opened.log(values, step=step), finish=finish)


@frozen
class _Kind:
    open: Callable[[TrackedRun, Mapping[str, Any]], Tracker]
    package: str


TRACKERS = {
    "tensorboard": _Kind(_open_tensorboard, "tensorboardX"),
    "wandb": _Kind(_open_wandb, "wandb"),
    "mlflow": _Kind(_open_mlflow, "mlflow"),
    "trackio": _Kind(_open_trackio, "trackio"),
}
"""Trackers by name: how each is opened, and the package that it needs."""


# ----------------------------------------------------------------------------------------------------- settings


def parse_trackers(entries: Sequence[str | Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return the options of each tracker by name. An entry is a name, or ``{name: options}``.

    Raises ``ValueError`` for a name that does not exist, or that occurs twice.
    """
    found: dict[str, Mapping[str, Any]] = {}
    for entry in entries:
        pairs = {entry: {}} if isinstance(entry, str) else entry
        # An empty mapping would count as no tracker at all.
        if not pairs:
            raise ValueError(f"has an entry without a name; name one of {', '.join(TRACKERS)}, or use [] for none")
        for name, options in pairs.items():
            if name not in TRACKERS:
                near = get_close_matches(str(name), TRACKERS, n=1, cutoff=0.5)
                meant = f"; did you mean {near[0]}?" if near else ""
                raise ValueError(f"must name trackers ({', '.join(TRACKERS)}), not {name!r}{meant}")
            if name in found:
                raise ValueError(f"names {name} twice")
            if not isinstance(options or {}, Mapping):
                raise ValueError(f"must give the options of {name} as a mapping, not {options!r}")  # noqa: TRY004 - validators raise ValueError
            found[name] = dict(options or {})
    return found


def require_trackers(names: Sequence[str]) -> None:
    """Raise ``ConfigError`` if the package of a tracker is not installed, with the line that installs it."""
    missing = []
    for name in names:
        package = TRACKERS[name].package
        spec = find_spec(package)
        # A directory of that name, such as the one in which wandb keeps its runs, is a package without a file.
        if spec is None or spec.origin is None:
            missing.append(f"logging.trackers: {package} is not installed: pip install 'areal_actors[{name}]'")
    if missing:
        raise ConfigError(tuple(missing))


def create_trackers(trackers: Mapping[str, Mapping[str, Any]], run: TrackedRun) -> list[TrackerWriter]:
    """Return the writers of the trackers, with their options by name."""
    return [TrackerWriter(name, partial(TRACKERS[name].open, run, options)) for name, options in trackers.items()]


# ------------------------------------------------------------------------------------------------------- writer


class TrackerWriter(Listener):
    """A listener that passes the numbers of a run to a tracker, on a thread.

    ``num_lost`` counts the records that the tracker did not take.
    """

    def __init__(
        self, name: str, open_tracker: Callable[[], Tracker], *, close_seconds: float = _CLOSE_SECONDS
    ) -> None:
        self.name = name
        self.num_lost = 0
        self._open_tracker = open_tracker
        self._close_seconds = close_seconds
        self._queue: Queue[tuple[int, dict[str, float]] | None] = Queue(_MAX_QUEUED)
        self._thread: threading.Thread | None = None
        self._has_warned = False
        # A run that ends without a word has failed.
        self._status = RunStatus.FAILED

    def open(self) -> None:
        """Start the thread. The tracker opens on it."""
        # A daemon: a client that waits for its server does not hold up the end of the process.
        self._thread = threading.Thread(target=self._run, name=f"tracker {self.name}", daemon=True)
        self._thread.start()

    def on_event(self, news: Message[Progress, None]) -> None:
        """Queue the numbers of a step or of an evaluation. Never waits."""
        match news:
            case RunEnded():
                self._status = news.status
            case StepFinished():
                # The event of an evaluation already contained its numbers.
                of_eval = {"eval_reward", *(key for key in news.metrics if key.startswith((f"{EVAL_SCOPE}/", "eval/")))}
                self._put(news.step, {key: value for key, value in news.metrics.items() if key not in of_eval})
            case EvaluationFinished():
                self._put(news.version, {"eval_reward": news.reward, "eval_seconds": news.seconds, **news.logged})

    def close(self) -> None:
        """Wait until the tracker has everything, for a limited time. Warns with the number of lost records."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        deadline = time.monotonic() + self._close_seconds
        with suppress(Full):
            self._queue.put(None, timeout=self._close_seconds)
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            self.num_lost += self._queue.qsize()
            self._warn(f"it did not finish within {self._close_seconds:g} s")
        if self.num_lost:
            _log.warning("tracker_lost_records", tracker=self.name, records=self.num_lost)

    def _put(self, step: int, metrics: Mapping[str, float | int | None]) -> None:
        numbers = {key: float(value) for key, value in metrics.items() if value is not None and math.isfinite(value)}
        try:
            self._queue.put_nowait((step, numbers))
        except Full:
            self.num_lost += 1
            self._warn(f"it is {_MAX_QUEUED} records behind")

    def _run(self) -> None:
        opened: list[Tracker] = []
        self._attempt(lambda: opened.append(self._open_tracker()))
        while (record := self._queue.get()) is not None:
            step, metrics = record
            if not (opened and self._attempt(lambda: opened[0].log(metrics, step))):  # noqa: B023 - called at once
                self.num_lost += 1
        if opened:
            self._attempt(lambda: opened[0].finish(self._status))

    def _attempt(self, action: Callable[[], object]) -> bool:
        """Call ``action``; return whether it succeeded."""
        try:
            action()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - no error of a tracker ends a run
            self._warn(f"{type(error).__name__}: {error}")
            return False
        return True

    def _warn(self, reason: str) -> None:
        """Log a warning, once."""
        if not self._has_warned:
            self._has_warned = True
            _log.warning("tracker_failed", tracker=self.name, reason=reason)
