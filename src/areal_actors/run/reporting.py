"""The reporter of a run or of an evaluation: which writers and displays receive its news."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

from areal_actors.config import RunConfig
from areal_actors.dashboard import (
    FailureWriter,
    MetricsWriter,
    RolloutDumper,
    RowDumper,
    RunDirectory,
    RunState,
    SessionSampler,
    TrackedRun,
    UntrainedWriter,
    create_display,
    create_trackers,
)
from areal_actors.dashboard.dumps import Decode
from areal_actors.dashboard.metrics import read_steps
from areal_actors.dashboard.reporter import Listener, ProgressReporter
from areal_actors.dashboard.verdict import append_step
from areal_actors.rollouts.staleness import StaleGroups


def create_reporter(
    config: RunConfig,
    directory: RunDirectory,
    *,
    decode: Decode,
    resumed_step: int | None,
    page: str | None = None,
    further: Sequence[Listener] = (),
) -> ProgressReporter:
    """Create the reporter, which records and displays the progress of the run. Blocks.

    ``page`` is the URL of the page that shows it. With ``further`` listeners, the reporter is that of an evaluation
    without training, which has no steps. They come last: an episode that they have recorded is not run again.
    """
    failures = FailureWriter(directory.failures, resumed_step=resumed_step)
    sampler = SessionSampler(
        directory.sessions,
        decode=decode,
        max_sessions=config.logging.max_sessions,
        num_per_version=None if not further else config.logging.max_sessions,
        resumed_step=resumed_step,
        masks_truncated=config.trainer.objective.masks_truncated,
    )
    listeners: list[Listener] = [failures, sampler]
    if config.rollout.dump_to_file:
        listeners.append(RolloutDumper(directory, decode=decode, resumed_step=resumed_step))
    if further:
        listeners += further
    else:
        queue = config.queue
        is_aging = queue.stale_groups is not StaleGroups.TRAIN
        listeners.append(
            UntrainedWriter(
                directory.untrained,
                max_staleness=config.rollout.max_head_offpolicyness if is_aging else None,
                is_replacing=queue.max_replaced > 0,
                resumed_step=resumed_step,
            )
        )
        listeners.append(MetricsWriter(directory.metrics, resumed_step=resumed_step))
        # The steps before the checkpoint count for the verdict, here as in the summary.
        before = [step for step in read_steps(directory) if step["step"] <= (resumed_step or 0)] if resumed_step else []
        state = RunState(
            title=config.experiment_name,
            total_steps=config.total_steps,
            step=resumed_step or 0,
            page=page,
            steps=reduce(append_step, before, ()),
        )
        display = create_display(config.logging.display, state)
        if display is not None:
            listeners.append(display)
        if config.logging.row_dumps.every_steps:
            keep = config.logging.row_dumps.keep
            listeners.append(RowDumper(directory, decode=decode, num_kept=keep, resumed_step=resumed_step))
        tracked = TrackedRun(
            directory=directory,
            experiment=config.experiment_name,
            trial=config.trial_name,
            resumed_step=resumed_step,
        )
        listeners += create_trackers(config.logging.tracker_options, tracked)
    return ProgressReporter(listeners)
