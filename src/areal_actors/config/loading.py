"""Loading of a frozen configuration from a file and overrides, and saving it to a file.

::

    YAML ─ documents ─▶ data ─ aliases ─ overrides ─▶ data ─ structure ─▶ attrs classes
                                                                 └▶ ConfigError: every mistake, with file and line

Relative paths are relative to the file that contains them; those of the command line to the working directory.

Overrides are dotted: ``rollout.group_size=4``, ``trainer.layout=flat``, ``stop.reward=null``. A value is YAML, so that
``[1, 2]``, ``{mode: inline}``, ``null`` and ``"text"`` mean the same as in the file. Whether a path exists is checked
when the whole configuration is structured.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from attrs import evolve
from cattrs import Converter

from areal_actors.config.documents import (
    ConfigPath,
    Document,
    format_path,
    format_yaml,
    parse_yaml,
    plain,
    read_document,
)
from areal_actors.config.reference import paths_of, sections_of
from areal_actors.config.schema import ModelName, RunConfig, WorkflowReference
from areal_actors.config.structure import (
    Mistake,
    Mistakes,
    Resolver,
    TypedText,
    create_converter,
    default_of,
    is_required,
    nearest,
    resolve_path,
    settings_of,
)
from areal_actors.datasets import DataPath, HubDataset, ProblemsReference
from areal_actors.errors import ConfigError
from areal_actors.lib.atomic_write import atomic_write
from areal_actors.lib.references import FunctionReference
from areal_actors.lib.telemetry import redact_settings
from areal_actors.workflows.commands import CommandWord

_OTHER_NAMES: Mapping[str, tuple[str, ...]] = {
    name: paths
    for paths, names in {
        ("model",): ("model_name", "model_path", "model_name_or_path"),
        ("total_steps",): ("max_steps", "num_steps", "num_train_epochs", "total_epochs", "total_training_steps"),
        ("batch_size",): ("train_batch_size", "per_device_train_batch_size"),
        ("dataset",): ("train_files", "train_dataset", "data"),
        ("eval_dataset",): ("valid_dataset", "val_files"),
        ("fileroot",): ("output_dir", "save_dir"),
        ("trial_name",): ("run_name",),
        ("rollout.group_size",): ("num_generations", "rollouts_per_example", "n_samples", "n", "num_rollouts"),
        ("rollout.workflow",): ("environment", "env", "reward_funcs", "reward_fn"),
        ("rollout.max_head_offpolicyness",): ("max_async_level",),
        ("rollout.limits.max_turns",): ("max_turns",),
        ("gconfig.max_new_tokens",): ("max_completion_length", "max_response_length", "max_tokens"),
        ("logging.trackers",): ("report_to", "wandb"),
        ("evaluation.every_steps",): ("eval_steps", "test_freq"),
        ("checkpoint.every_steps",): ("save_steps", "save_freq"),
        ("trainer",): ("actor",),
        ("trainer", "rollout", "engine"): ("actor_rollout_ref",),
        ("trainer.optimizer.learning_rate",): ("lr",),
        ("trainer.optimizer.num_warmup_steps",): ("warmup_steps",),
        ("trainer.dtype",): ("bf16",),
        ("trainer.activations",): ("gradient_checkpointing",),
        ("trainer.num_minibatches",): ("ppo_n_minibatches",),
        ("trainer.advantages",): ("algorithm",),
        ("trainer.advantages.normalisation",): ("scale_rewards", "adv_estimator", "adv_norm"),
        ("trainer.advantages.drop_zero_variance",): ("dynamic_sampling",),
        ("trainer.objective.kl.coefficient",): ("beta", "kl_coef", "kl_ctl", "kl_loss_coef"),
        ("trainer.objective.clip_low", "trainer.objective.clip_high"): ("eps_clip", "clip_ratio", "epsilon"),
        ("trainer.objective.clip_low",): ("epsilon_low", "clip_ratio_low"),
        ("trainer.objective.clip_high",): ("epsilon_high", "clip_ratio_high"),
        ("trainer.objective.entropy_coefficient",): ("entropy_coeff",),
        ("trainer.objective.surrogate", "trainer.objective.aggregation"): ("loss_type",),
        ("trainer.objective.aggregation",): ("loss_agg_mode",),
        ("trainer.objective.behaviour.level",): ("importance_sampling_level",),
        ("trainer.objective.behaviour.cap",): ("behav_imp_weight_cap",),
        ("trainer.objective.is_decoupled",): ("use_decoupled_loss",),
        ("trainer.objective.masks_truncated",): ("mask_truncated_completions",),
    }.items()
    for name in names
}
"""Names of settings in TRL, verl, prime-rl, verifiers and AReaL, and the paths that mean the same here."""


_ALIASES: Mapping[ConfigPath, ConfigPath] = {
    ("training",): ("trainer",),
    ("rollout", "agent"): ("rollout", "openai"),
    ("rollout", "fileroot"): ("fileroot",),
    ("rollout", "tokenizer_path"): ("tokenizer",),
}
"""Other paths of settings, as AReaL has them."""


# ----------------------------------------------------------------------------------------- texts with a meaning


def _resolve_model(text: str, directory: Path) -> ModelName:
    """Return a path if the text looks like one or such a directory exists; otherwise a name."""
    path = resolve_path(text, directory)
    # os.path takes any text; Path.is_dir raises for a name that is too long.
    is_path = text.startswith((".", "~", "/")) or os.path.isdir(path)  # noqa: PTH112
    return ModelName(str(path) if is_path else text)


def _resolve_reference(text: str, directory: Path) -> str:
    """Return a reference with the absolute path of its file; module names are unchanged."""
    file, colon, name = text.partition(":")
    return f"{resolve_path(file, directory)}:{name}" if colon and file.endswith(".py") else text


def _resolve_word(text: str, directory: Path) -> CommandWord:
    """Return the path of a file next to the configuration if there is one; any other word is unchanged."""
    path = resolve_path(text, directory)
    return CommandWord(str(path) if os.path.isfile(path) else text)  # noqa: PTH113 - os.path accepts any text


_RESOLVERS: Mapping[Any, Resolver] = {
    ModelName: _resolve_model,
    WorkflowReference: _resolve_reference,
    CommandWord: _resolve_word,
    ProblemsReference: _resolve_reference,
    FunctionReference: _resolve_reference,
    DataPath: lambda text, directory: str(resolve_path(text, directory)),
    HubDataset: lambda text, directory: str(_resolve_model(text, directory)),
}


# ---------------------------------------------------------------------------------------------------- loading


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> RunConfig:
    """Return the configuration of a YAML file, with ``key.sub=value`` overrides.

    Relative paths in the file are relative to the file, those in overrides to the working directory. Raises
    ``ConfigError`` listing every mistake, each with its line, its path and what was expected.
    """
    path = Path(path)
    return _build(read_document(path), overrides, directory=path.absolute().parent)


def create_config(settings: Mapping[str, Any], *, directory: Path | None = None) -> RunConfig:
    """Return the configuration for ``settings`` nested as in YAML. Raises like ``load_config``."""
    return _build(Document(source="settings", data=settings), directory=directory or Path.cwd())


def save_config(config: RunConfig, path: Path) -> None:
    """Write a configuration with every setting written out; ``load_config`` reads it back equal. Raises ``OSError``.

    The file is written completely or not at all; one that contains a key is readable by its owner only.
    """
    text = format_config(config)
    # A file that only its owner can read stays so.
    is_secret = redact_settings(text) != text or (path.exists() and not path.stat().st_mode & 0o077)
    atomic_write(path, text, mode=0o600 if is_secret else 0o666)


def format_config(config: RunConfig) -> str:
    """Return a configuration as YAML with every setting written out, as ``save_config`` writes it."""
    return format_yaml(plain(create_converter(Path()).unstructure(config, RunConfig)))


def read_defaults() -> dict[str, Any]:
    """Return the settings that have a default, as ``save_config`` would write them.

    A section that is absent by default has the defaults of its settings.
    """
    return _read_defaults(RunConfig, create_converter(Path()))


def _read_defaults(cls: type, converter: Converter) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, one in settings_of(cls).items():
        # A default that is computed from other settings is known for a whole configuration only.
        with suppress(AttributeError):
            value = None if is_required(one) else default_of(one)
            sections = sections_of(one.type)
            if value is None and len(sections) == 1:
                found[name] = _read_defaults(sections[0], converter)
            elif not is_required(one):
                found[name] = plain(converter.unstructure(value))
    return found


def settings_class(path: str = "") -> type:
    """Return the class of the section at the dotted ``path``; an empty one is the whole. Raises ``ConfigError``."""
    if not path:
        return RunConfig
    known = paths_of(RunConfig)
    sections = {name: found[0] for name, kind in known.items() if (found := sections_of(kind))}
    proper = format_path(_rename(tuple(path.split(".")), _ALIASES))
    if proper not in sections:
        if proper in known:
            section = proper.rpartition(".")[0] or "--all"
            raise ConfigError(f"{path} is a setting, and not a section; areal-actors settings {section} explains it")
        close = nearest(path, list(sections))
        advice = f"did you mean {close}?" if close else f"there are {', '.join(sections)}"
        raise ConfigError(f"{path} is not a section; {advice}")
    return sections[proper]


def _build(document: Document, overrides: Iterable[str] = (), *, directory: Path) -> RunConfig:
    """Return the configuration of a parsed document; its relative paths are relative to ``directory``."""
    if document.data is not None and not isinstance(document.data, Mapping):
        raise ConfigError(f"{document.source} must hold sections and settings, as in 'total_steps: 20'.")
    data, used, found = _apply_aliases(document)
    typed: dict[ConfigPath, str] = {}
    for text in overrides:
        try:
            path, value = _parse_override(text)
            data = _with(data, path, value)
            typed[path] = text
        except Mistakes as mistakes:
            found += [_format(mistake, "command line") for mistake in mistakes.found]
    config: RunConfig | None = None
    try:
        config = create_converter(directory, _RESOLVERS).structure(data, RunConfig)
    except Mistakes as mistakes:
        for mistake in mistakes.found:
            texts = [text for path, text in typed.items() if mistake.path[: len(path)] == path]
            place = f"command line, {texts[-1]}" if texts else document.locate(_rename(mistake.path, used))
            found.append(_format(_find_elsewhere(mistake), place))
    if config is None or found:
        raise ConfigError(tuple(dict.fromkeys(found)))
    return config


def _find_elsewhere(mistake: Mistake) -> Mistake:
    """Return a mistake whose unknown key is a setting of another section, or of another trainer, with advice."""
    known = paths_of(RunConfig)
    elsewhere = [path for path in known if path.rpartition(".")[2] == mistake.unknown]
    elsewhere += [path for path in _OTHER_NAMES.get(mistake.unknown or "", ()) if path in known]
    # Those in the section that was named come first.
    elsewhere.sort(key=lambda path: not path.startswith(f"{mistake.path[0]}."))
    advice = f"is not a setting; did you mean {' or '.join(elsewhere[:3])}?"
    return evolve(mistake, text=advice) if elsewhere else mistake


def _format(mistake: Mistake, place: str) -> str:
    return " ".join(filter(None, (f"{place}:", format_path(mistake.path), mistake.text)))


# -------------------------------------------------------------------------------------------- aliases and overrides


def _apply_aliases(document: Document) -> tuple[Any, dict[ConfigPath, ConfigPath], list[str]]:
    """Return the data under canonical names, the aliases used by the file, and mistakes for values given twice."""
    data: Any = plain(document.data or {})
    used: dict[ConfigPath, ConfigPath] = {}
    found: list[str] = []
    for alias, name in _ALIASES.items():
        value = _take(data, alias)
        if value is None:
            continue
        # Both names of one setting in a file: either value could be the one that was meant.
        if _take(data, name) is not None:
            text = f"is another name of {format_path(name)}, which is given too; keep one of them"
            found.append(_format(Mistake(path=alias, text=text), document.locate(alias)))
        else:
            data = _with(_without(data, alias), name, value)
            used[name] = alias
    return data, used, found


def _parse_override(text: str) -> tuple[ConfigPath, Any]:
    """Parse ``key.sub=value``. Raises ``Mistakes`` for text of another form."""
    key, equals, value = text.partition("=")
    path = tuple(key.strip().split("."))
    if not equals or not all(path):
        raise Mistakes([Mistake(text=f"{text!r} is not an override; write key=value, as in rollout.group_size=4")])
    try:
        parsed = parse_yaml(value, source="its value")
    except ConfigError as error:
        # A shell splits {a: b} at its blanks, and the parts are words of their own.
        advice = f"; quote it for the shell: '{key}={{...}}'" if value[:1] in ("{", "[") and " " not in value else ""
        raise Mistakes([Mistake(text=f"{text!r}: {problem}{advice}") for problem in error.problems]) from error
    # Marked, because paths typed on the command line are relative to the working directory, not to the file.
    return _rename(path, _ALIASES), _typed(parsed.data)


def _typed(value: object) -> Any:
    if isinstance(value, dict):
        return {key: _typed(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_typed(item) for item in value]
    return TypedText(value) if isinstance(value, str) else value


def _rename(path: ConfigPath, aliases: Mapping[ConfigPath, ConfigPath]) -> ConfigPath:
    """Return ``path`` with an alias at its beginning replaced by the canonical name."""
    for alias, name in aliases.items():
        if path[: len(alias)] == alias:
            return (*name, *path[len(alias) :])
    return path


def _take(data: object, path: ConfigPath) -> Any:
    for part in path:
        if not isinstance(data, Mapping) or part not in data:
            return None
        data = data[part]
    return data


def _with(data: object, path: ConfigPath, value: object, *, above: ConfigPath = ()) -> Any:
    """Return ``data`` with ``value`` at ``path``; missing sections are created, and nothing is changed in place.

    Raises ``Mistakes`` if the path leads through a value that has no parts.
    """
    if not path:
        return value
    part, rest = path[0], path[1:]
    if data is None or isinstance(data, Mapping):
        section = dict(data or {})
        return section | {part: _with(section.get(part), rest, value, above=(*above, part))}
    text = f"cannot be set: {format_path(above)} is {data!r} and has no parts"
    raise Mistakes([Mistake(path=(*above, *path), text=text)])


def _without(data: Mapping[Any, Any], path: ConfigPath) -> dict[Any, Any]:
    rest = dict(data)
    if len(path) == 1:
        del rest[path[0]]
    else:
        rest[path[0]] = _without(rest[path[0]], path[1:])
    return rest
