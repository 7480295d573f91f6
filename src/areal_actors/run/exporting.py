"""Export the weights of a run under its name, when it ends or from its checkpoint, and its rows for other trainers."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import evolve

from areal_actors.config import RunConfig, load_config
from areal_actors.dashboard import RunDirectory
from areal_actors.dashboard.records import read_records
from areal_actors.domain import TrainedModel
from areal_actors.errors import CheckpointError, ConfigError, ExportError
from areal_actors.interchange import RowExport, export_rows, find_dumps, require_format
from areal_actors.lib.telemetry import quiet_transformers
from areal_actors.models import (
    TRAINED_DOCUMENT,
    Catalogue,
    ModelFiles,
    create_empty_policy,
    load_policy,
    resolve_model,
    resolve_tokenizer,
)
from areal_actors.run.directory import find_run

if TYPE_CHECKING:
    from torch import Tensor

    from areal_actors.training.lora import Adapter
    from areal_actors.training.stored_checkpoints import Checkpoint


def save_weights(
    model: Any,
    state: Mapping[str, Tensor],
    directory: RunDirectory,
    *,
    tokenizer: ModelFiles,
    step: int,
    adapter: Adapter | None = None,
) -> None:
    """Write ``state``, the weights of ``model`` after ``step`` steps, as a directory that transformers loads.

    An ``adapter``, which is merged into them, is also written as a directory that peft loads. The directories are
    replaced atomically, so an earlier export stays until the new one is complete. Raises ``CheckpointError`` if they
    cannot be written.
    """
    from areal_actors.training.weights import export_model

    rewards = {record.get("step"): record.get("reward") for record in read_records(directory.metrics)}
    documents = {TRAINED_DOCUMENT: {"step": step, "reward": rewards.get(step)}}
    if adapter is not None:
        adapter.save(directory.adapter, documents)
    with quiet_transformers():
        export_model(model, directory.weights, state=state, tokenizer_directory=tokenizer.path, documents=documents)


def load_trained(config: RunConfig, checkpoint: Checkpoint) -> tuple[Any, Mapping[str, Tensor], Adapter | None]:
    """Return the model of a checkpoint, its weights, and its adapter if the run trains one.

    The weights stay in the files of the checkpoint until they are asked for, one at a time; an adapter is merged into
    those of its base model, which is loaded. Raises ``CheckpointError`` or ``ModelError`` for files that cannot be
    read or do not fit.
    """
    from areal_actors.training.lora import Adapter
    from areal_actors.training.weights import stored_weights

    path, lora = resolve_model(config.model).path, config.trainer.lora
    if lora is None:
        model = create_empty_policy(path)
        return model, stored_weights(model, checkpoint), None
    model = load_policy(path)
    adapter = Adapter.create(model, evolve(lora, path=None))
    adapter.load(checkpoint.path)
    return model, adapter.merge(model.state_dict()), adapter


def export_run(path: Path) -> TrainedModel:
    """Export the weights of the newest complete checkpoint of the run in ``path``, which may have stopped early.

    If the run trains an adapter, the adapter is exported, too, and the weights have it merged into them.

    Raises:
        RunDirectoryError: ``path`` holds no run.
        CheckpointError: the run has no complete checkpoint, or the exported weights are of a later step.
        ModelError: the model that the run started from cannot be found.
    """
    from areal_actors.training.stored_checkpoints import find_latest

    directory = find_run(path)
    checkpoint = find_latest(directory.checkpoints)
    if checkpoint is None:
        raise CheckpointError(f"There is no complete checkpoint in {directory.checkpoints}, so nothing to export.")
    catalogue, name = Catalogue(root=directory.path.parents[1]), f"{directory.path.parent.name}/{directory.path.name}"
    present = catalogue.get(name)
    if present is not None and (present.step or 0) > checkpoint.step:
        raise CheckpointError(
            f"{directory.weights} has the weights of step {present.step}, and the newest checkpoint is of step "
            f"{checkpoint.step}; nothing was changed."
        )
    config = load_config(directory.config)
    tokenizer = resolve_tokenizer(config.tokenizer or config.model)
    model, state, adapter = load_trained(config, checkpoint)
    save_weights(model, state, directory, tokenizer=tokenizer, step=checkpoint.step, adapter=adapter)
    return catalogue.find(name)


def export_run_rows(
    path: Path,
    form: str,
    *,
    output: Path | None = None,
    steps: range | None = None,
    replace: bool = False,
) -> RowExport:
    """Export the dumped rows of the run in ``path`` in the format ``form`` of another trainer.

    They are written to ``output``, by default ``exports/<format>`` in the run directory. ``steps`` limits which.

    Raises:
        ConfigError: the format is unknown, or pyarrow is not installed.
        RunDirectoryError: ``path`` holds no run.
        ExportError: the run has no such rows, or ``output`` has content and ``replace`` is not set.
        OSError: the files cannot be written.
    """
    require_format(form)
    directory = find_run(path)
    dumps = find_dumps(directory.rows)
    if not dumps:
        raise ExportError(
            f"The run in {path} has no rows: they are written during training with logging.row_dumps.every_steps=1."
        )
    chosen = {step: file for step, file in dumps.items() if steps is None or step in steps}
    if not chosen:
        found = list(dumps)
        raise ExportError(
            f"There are no rows of these steps; the {len(found)} dumps are of steps {found[0]} to {found[-1]}."
        )
    return export_rows(chosen, form, output or directory.exports / form, replace=replace)


def parse_steps(text: str) -> range:
    """Return the steps of ``7``, ``3:10`` (both included), ``3:`` or ``:10``. Raises ``ConfigError``."""
    first, colon, last = text.partition(":")
    try:
        start = int(first) if first else 1
        return range(start, (int(last) if last else sys.maxsize - 1) + 1) if colon else range(start, int(first) + 1)
    except ValueError:
        raise ConfigError(f"--steps must be a step or a range such as 3:10, not {text!r}") from None
