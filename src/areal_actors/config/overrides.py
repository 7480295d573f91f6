"""Dotted overrides of the command line: ``rollout.group_size=4``, ``trainer.layout=flat``, ``stop.reward=null``.

A value is YAML, so that ``[1, 2]``, ``{mode: inline}``, ``null`` and ``"text"`` mean the same as in the file. Whether a
path exists is checked when the whole configuration is structured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen

from areal_actors.config.documents import ConfigPath, format_path, parse_yaml
from areal_actors.config.structure import Mistake, Mistakes, TypedText
from areal_actors.errors import ConfigError

__all__ = ["Override", "apply_override", "parse_override", "rename"]


@frozen(kw_only=True)
class Override:
    """One override, ``key=value``."""

    path: ConfigPath
    value: Any


def parse_override(text: str) -> Override:
    """Parse ``key.sub=value``. Raises ``Mistakes`` for text of another form."""
    key, equals, value = text.partition("=")
    path = tuple(key.strip().split("."))
    if not equals or not all(path):
        raise Mistakes([Mistake(text=f"{text!r} is no override; write key=value, as in rollout.group_size=4")])
    try:
        parsed = parse_yaml(value, source=f"{key}=")
    except ConfigError as error:
        raise Mistakes([Mistake(path=path, text=problem) for problem in error.problems]) from error
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
    here = (*above, part)
    if data is None or isinstance(data, Mapping):
        section = dict(data or {})
        return section | {part: apply_override(section.get(part), rest, value, above=here)}
    if isinstance(data, Sequence) and not isinstance(data, str):
        return _replace_item(data, path, value, above)
    text = f"cannot be set: {format_path(above)} is {data!r} and has no parts"
    raise Mistakes([Mistake(path=(*above, *path), text=text)])


def _replace_item(items: Sequence[Any], path: ConfigPath, value: Any, above: ConfigPath) -> list[Any]:
    position = str(path[0])
    if not position.isdecimal() or int(position) >= len(items):
        text = (
            f"is no item of {format_path(above)}; it has items 0 to {len(items) - 1}"
            if items
            else "is no item: the list is empty"
        )
        raise Mistakes([Mistake(path=(*above, *path), text=text)])
    index = int(position)
    changed = list(items)
    changed[index] = apply_override(changed[index], path[1:], value, above=(*above, index))
    return changed


def rename(path: ConfigPath, aliases: Mapping[ConfigPath, ConfigPath]) -> ConfigPath:
    """Return ``path`` with an alias at its beginning replaced by the canonical name."""
    for alias, name in aliases.items():
        if path[: len(alias)] == alias:
            return (*name, *path[len(alias) :])
    return path
