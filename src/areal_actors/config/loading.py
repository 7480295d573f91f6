"""Loading of a frozen configuration from a file and overrides, and saving it to a file.

::

    YAML ─ documents ─▶ data ─ aliases ─ overrides ─▶ data ─ structure ─▶ attrs classes
                                                                 └▶ ConfigError: every mistake, with file and line

Relative paths are relative to the file that contains them; those of the command line to the working directory. Nothing
here depends on which settings exist.

Overrides are dotted: ``rollout.group_size=4``, ``trainer.layout=flat``, ``stop.reward=null``. A value is YAML, so that
``[1, 2]``, ``{mode: inline}``, ``null`` and ``"text"`` mean the same as in the file. Whether a path exists is checked
when the whole configuration is structured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from attrs import evolve, field, frozen

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
from areal_actors.config.structure import Mistake, Mistakes, Resolver, TypedText, create_converter, nearest
from areal_actors.errors import ConfigError
from areal_actors.lib.atomic_write import atomic_write
from areal_actors.lib.telemetry import redact_settings


@frozen(kw_only=True)
class Override:
    """One override, ``key=value``."""

    path: ConfigPath
    value: Any


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


def parse_override(text: str) -> Override:
    """Parse ``key.sub=value``. Raises ``Mistakes`` for text of another form."""
    key, equals, value = text.partition("=")
    path = tuple(key.strip().split("."))
    if not equals or not all(path):
        raise Mistakes([Mistake(text=f"{text!r} is not an override; write key=value, as in rollout.group_size=4")])
    try:
        parsed = parse_yaml(value, source="its value")
    except ConfigError as error:
        raise Mistakes([Mistake(text=f"{text!r}: {problem}") for problem in error.problems]) from error
    # Marked, because paths typed on the command line are relative to the working directory, not to the file.
    return Override(path=path, value=_typed(parsed.data))


def _typed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _typed(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_typed(item) for item in value]
    return TypedText(value) if isinstance(value, str) else value


def apply_override(data: Any, path: ConfigPath, value: Any, *, above: ConfigPath = ()) -> Any:
    """Return ``data`` with ``value`` at ``path``; missing sections are created, and nothing is changed in place.

    Raises ``Mistakes`` if the path leads through a value that has no parts.
    """
    if not path:
        return value
    part, rest = path[0], path[1:]
    if data is None or isinstance(data, Mapping):
        section = dict(data or {})
        return section | {part: apply_override(section.get(part), rest, value, above=(*above, part))}
    text = f"cannot be set: {format_path(above)} is {data!r} and has no parts"
    raise Mistakes([Mistake(path=(*above, *path), text=text)])


def rename(path: ConfigPath, aliases: Mapping[ConfigPath, ConfigPath]) -> ConfigPath:
    """Return ``path`` with an alias at its beginning replaced by the canonical name."""
    for alias, name in aliases.items():
        if path[: len(alias)] == alias:
            return (*name, *path[len(alias) :])
    return path


C = TypeVar("C")


@frozen(kw_only=True)
class Schema(Generic[C]):
    """A kind of configuration: its class, aliases of its paths, and resolvers of special texts."""

    cls: type[C]
    aliases: Mapping[str, str] = field(factory=dict)
    resolvers: Mapping[Any, Resolver] = field(factory=dict)

    def load(self, path: Path, overrides: Iterable[str] = ()) -> C:
        """Return the configuration of a YAML file with ``key.sub=value`` overrides.

        Raises ``ConfigError`` listing every mistake, each with its place, its path and what was expected.
        """
        return self.build(read_document(path), overrides, directory=path.absolute().parent)

    def build(self, document: Document, overrides: Iterable[str] = (), *, directory: Path) -> C:
        """Return the configuration of a parsed document; its relative paths are relative to ``directory``.

        Otherwise the same as ``load``.
        """
        if document.data is not None and not isinstance(document.data, Mapping):
            raise ConfigError(f"{document.source} must hold sections and settings, as in 'total_steps: 20'.")
        data, used, found = self._apply_aliases(document)
        typed: dict[ConfigPath, str] = {}
        for text in overrides:
            try:
                override = parse_override(text)
                path = rename(override.path, self._alias_paths())
                data = apply_override(data, path, override.value)
                typed[path] = text
            except Mistakes as mistakes:
                found += [_format(mistake, "command line") for mistake in mistakes.found]
        config = None
        try:
            config = create_converter(directory, self.resolvers).structure(data, self.cls)
        except Mistakes as mistakes:
            for mistake in mistakes.found:
                texts = [text for path, text in typed.items() if mistake.path[: len(path)] == path]
                place = f"command line, {texts[-1]}" if texts else document.locate(rename(mistake.path, used))
                # An unknown key may be a setting of another section, or the name that another trainer gives it.
                known = paths_of(self.cls)
                elsewhere = [path for path in known if path.rpartition(".")[2] == mistake.unknown]
                elsewhere += [path for path in _OTHER_NAMES.get(mistake.unknown or "", ()) if path in known]
                # Those in the section that was named come first.
                elsewhere.sort(key=lambda path: not path.startswith(f"{mistake.path[0]}."))
                advice = f"is not a setting; did you mean {' or '.join(elsewhere[:3])}?"
                found.append(_format(evolve(mistake, text=advice) if elsewhere else mistake, place))
        if config is None or found:
            raise ConfigError(tuple(dict.fromkeys(found)))
        return config

    def save(self, config: C, path: Path) -> None:
        """Write ``config`` with every setting written out, so that ``load`` returns an equal one. Raises ``OSError``.

        The file is written completely or not at all; one that contains a key is readable by its owner only.
        """
        text = format_yaml(plain(create_converter(path.parent).unstructure(config, self.cls)))
        # A file that only its owner can read stays so.
        is_secret = redact_settings(text) != text or (path.exists() and not path.stat().st_mode & 0o077)
        mode = 0o600 if is_secret else 0o666
        atomic_write(path, text, mode=mode)

    def section(self, path: str) -> type:
        """Return the class of the section at the dotted ``path``. Raises ``ConfigError`` naming the nearest one."""
        if not path:
            return self.cls
        sections = {name: found[0] for name, kind in paths_of(self.cls).items() if (found := sections_of(kind))}
        proper = format_path(rename(tuple(path.split(".")), self._alias_paths()))
        if proper not in sections:
            close = nearest(path, list(sections))
            advice = f"did you mean {close}?" if close else f"there are {', '.join(sections)}"
            raise ConfigError(f"{path} is not a section; {advice}")
        return sections[proper]

    # ---------------------------------------------------------------------------------------------- its steps

    def _apply_aliases(self, document: Document) -> tuple[Any, dict[ConfigPath, ConfigPath], list[str]]:
        """Return the data under canonical names, the aliases used by the file, and mistakes for values given twice."""
        data: Any = plain(document.data or {})
        used: dict[ConfigPath, ConfigPath] = {}
        found: list[str] = []
        for alias, name in self._alias_paths().items():
            value = _take(data, alias)
            if value is None:
                continue
            # Both names of one setting in a file: either value could be the one that was meant.
            if _take(data, name) is not None:
                text = f"is another name of {format_path(name)}, which is given too; keep one of them"
                found.append(_format(Mistake(path=alias, text=text), document.locate(alias)))
            else:
                data = apply_override(_without(data, alias), name, value)
                used[name] = alias
        return data, used, found

    def _alias_paths(self) -> dict[ConfigPath, ConfigPath]:
        return {tuple(alias.split(".")): tuple(name.split(".")) for alias, name in self.aliases.items()}


def _format(mistake: Mistake, place: str) -> str:
    return " ".join(filter(None, (f"{place}:", format_path(mistake.path), mistake.text)))


def _take(data: Any, path: ConfigPath) -> Any:
    for part in path:
        if not isinstance(data, Mapping) or part not in data:
            return None
        data = data[part]
    return data


def _without(data: Mapping[Any, Any], path: ConfigPath) -> dict[Any, Any]:
    rest = dict(data)
    if len(path) == 1:
        del rest[path[0]]
    else:
        rest[path[0]] = _without(rest[path[0]], path[1:])
    return rest
