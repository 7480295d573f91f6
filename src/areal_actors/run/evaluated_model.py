"""The model that an evaluation samples from: weights of a run, a directory, or a server behind a URL."""

from __future__ import annotations

import re
from hashlib import sha256
from pathlib import Path
from urllib.parse import urlsplit

from attrs import field, frozen

from areal_actors.client.attribution import parse_root
from areal_actors.config import RunConfig, load_config
from areal_actors.dashboard import RunDirectory
from areal_actors.errors import CheckpointError, ConfigError
from areal_actors.lib.plugins import PluginGroup, install_advice
from areal_actors.models import TRAINED_DOCUMENT, resolve_model, resolve_tokenizer
from areal_actors.run.exporting import load_trained, save_weights

_EDGE_BYTES = 1 << 20


@frozen(kw_only=True)
class EvaluatedModel:
    """A model to evaluate. Exactly one of ``name``, ``run`` and ``url`` is set."""

    label: str
    """A name for people, and for the directory of the evaluation."""
    name: str | None = None
    """A name or directory, as in ``model``."""
    run: RunDirectory | None = None
    """The run of a checkpoint, whose weights are written to a directory first."""
    step: int | None = None
    """The step of the weights of a run; ``None`` for other models."""
    trained_in: Path | None = None
    """The directory of the run whose weights these are; ``None`` for other models."""
    url: str | None = None
    """The URL of a server without ``/v1``."""
    served_name: str | None = field(default=None)
    """The name of the model at the server; ``None`` keeps the name that agents send."""

    def materialize(self, directory: Path) -> str:
        """Return the name or directory that an engine loads; writes that of a checkpoint below ``directory``. Blocks.

        Raises ``CheckpointError`` if the checkpoint cannot be read, for instance because a running job has removed it.
        """
        if self.run is None:
            assert self.name is not None
            return self.name
        from areal_actors.training.stored_checkpoints import find_checkpoint

        assert self.step is not None
        target = RunDirectory(path=directory)
        if _trained_step(target.weights) == self.step:
            return str(target.weights)
        config = load_config(self.run.config)
        checkpoint = find_checkpoint(self.run.checkpoints, self.step)
        if (damage := checkpoint.find_damage()) is not None:
            raise CheckpointError(f"{checkpoint.path} cannot be evaluated: {damage}. Name another step.")
        model, state, adapter = load_trained(config, checkpoint)
        tokenizer = resolve_tokenizer(config.tokenizer or config.model)
        save_weights(model, state, target, tokenizer=tokenizer, step=checkpoint.step, adapter=adapter)
        return str(target.weights)

    def fingerprint(self, location: str | None) -> str:
        """Return a text that differs for other weights at the same place. Blocks while files are read.

        Of each file it covers name, size, and the first and last MiB: weights of a later step differ there, and a model
        of hundreds of GiB is not read twice.
        """
        if self.url is not None:
            return f"{self.url} {self.served_name or ''}".rstrip()
        assert location is not None
        digest = sha256()
        path = resolve_model(location).path
        for file in sorted((*path.glob("*.safetensors"), *path.glob("*.json"))):
            if file.name == TRAINED_DOCUMENT:
                continue
            size = file.stat().st_size
            digest.update(f"{file.name} {size}".encode())
            with file.open("rb") as opened:
                digest.update(opened.read(_EDGE_BYTES))
                opened.seek(max(0, size - _EDGE_BYTES))
                digest.update(opened.read())
        return digest.hexdigest()


def find_model(config: RunConfig, text: str | None, *, served_name: str | None = None) -> EvaluatedModel:
    """Return the model of ``--model``: RUN, RUN@STEP, a directory, a name or a URL; by default ``config.model``.

    Raises:
        ConfigError: ``served_name`` is given without a URL, a step without a run, or a URL without its plug-in.
        CheckpointError: the run has no weights, or none of that step.
    """
    if text is not None and text.startswith(("http://", "https://")):
        if (advice := install_advice(PluginGroup.UPSTREAMS, "url")) is not None:
            raise ConfigError(f"--model {text} {advice}")
        url = parse_root(text)
        parts = urlsplit(url)
        return EvaluatedModel(
            label=_slug(f"{parts.netloc}{parts.path} {served_name or ''}"), url=url, served_name=served_name
        )
    if served_name is not None:
        raise ConfigError("--served-name is the name of the model at a server; give its URL as --model, too.")
    if text is None:
        return EvaluatedModel(label=_slug(Path(config.model).name), name=config.model)
    place, at, number = text.rpartition("@")
    is_step = bool(at) and number.isdecimal()
    directory = RunDirectory(path=Path(place if is_step else text).expanduser().absolute())
    if directory.config.is_file():
        return _find_weights(directory, step=int(number) if is_step else None)
    if is_step:
        raise ConfigError(f"--model {text}: there is no run in {directory.path}, so it has no step {number}.")
    if not directory.path.exists() and (text.count("/") > 1 or text.startswith((".", "/", "~"))):
        raise ConfigError(f"--model {text}: there is neither a run nor a model in {directory.path}.")
    # A name of a built-in model or of the hub, unless there is such a directory.
    return EvaluatedModel(label=_slug(Path(text).name), name=str(directory.path) if directory.path.is_dir() else text)


def _find_weights(directory: RunDirectory, *, step: int | None) -> EvaluatedModel:
    from areal_actors.training.stored_checkpoints import find_checkpoints, find_latest

    name = f"{directory.path.parent.name}-{directory.path.name}"
    steps = {checkpoint.step for checkpoint in find_checkpoints(directory.checkpoints)}
    exported = _trained_step(directory.weights)
    known = sorted(steps | ({exported} if exported is not None else set()))
    if not known:
        raise CheckpointError(f"The run in {directory.path} has neither weights nor a complete checkpoint yet.")
    if step is None:
        latest = find_latest(directory.checkpoints)
        chosen = max(known if latest is None else {latest.step, exported or 0})
    else:
        chosen = step
    if chosen not in known:
        raise CheckpointError(
            f"The run in {directory.path} has no weights of step {step}; it has those of {', '.join(map(str, known))}. "
            "checkpoint.keep is the number of checkpoints that a run keeps."
        )
    label = _slug(f"{name}-step-{chosen}")
    # transformers can load exported weights as they are.
    if chosen == exported:
        return EvaluatedModel(label=label, name=str(directory.weights), step=chosen, trained_in=directory.path)
    return EvaluatedModel(label=label, run=directory, step=chosen, trained_in=directory.path)


def _trained_step(weights: Path) -> int | None:
    import json

    try:
        return int(json.loads((weights / TRAINED_DOCUMENT).read_text(encoding="utf-8"))["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._") or "model"
