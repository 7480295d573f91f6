"""The list of settings, generated from the classes: as dotted paths, and as YAML with explanations."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args, get_origin

import attrs

from areal_actors.config.documents import format_yaml, plain
from areal_actors.config.structure import default_of, describe_type, settings_of
from areal_actors.lib.settings import is_common

_WIDTH = 118


def paths_of(cls: type, *, above: str = "") -> dict[str, Any]:
    """Return every setting below ``cls`` by its dotted path, with its type; sections come before their settings."""
    found: dict[str, Any] = {}
    for name, setting in settings_of(cls).items():
        found[above + name] = setting.type
        for section in sections_of(setting.type):
            found |= paths_of(section, above=f"{above}{name}.")
    return found


def sections_of(kind: Any) -> list[type]:
    """Return the settings classes among the members of the type ``kind``.

    Those of a mapping are not: their paths contain names that the user chose.
    """
    if get_origin(kind) is Mapping:
        return []
    members = get_args(kind) if get_origin(kind) is not None else (kind,)
    return [member for member in members if attrs.has(member)]


def format_reference(cls: type, *, is_short: bool = False) -> str:
    """Return the settings of ``cls`` as commented YAML: type, default and purpose of each.

    A short reference has only the settings that most runs need.
    """
    return "\n".join(_lines(cls, indent="", is_short=is_short)).strip("\n") + "\n"


def num_common(cls: type) -> int:
    """Return the number of settings below ``cls`` that most runs need."""
    settings = settings_of(cls).values()
    return sum(is_common(one) + sum(map(num_common, sections_of(one.type))) for one in settings)


def _lines(cls: type, *, indent: str, is_short: bool) -> Iterator[str]:
    explanations = _explanations(cls)
    for name, setting in settings_of(cls, with_plugins=False).items():
        if is_short and not is_common(setting) and not any(map(num_common, sections_of(setting.type))):
            continue
        # A kind that also takes text is described by its own words, which explain the section's settings, too.
        takes_text = any(getattr(member, "__supertype__", member) is str for member in get_args(setting.type))
        sections = sections_of(setting.type)
        if sections and not takes_text:
            # All of its settings, commented out if the section is absent by default.
            is_left_out, inner = setting.default is None, f"{indent}  "
            yield ""
            yield f"{indent}{name}:" + (" null" if is_left_out else "")
            (section,) = sections
            text = _words(inspect.getdoc(section) or "")
            purpose = _comment(text.partition(". ")[0] if is_short else text, inner)
            body = _lines(section, indent=inner, is_short=is_short)
            lines = [*purpose, *([""] if _explanations(section) else []), *body]
            yield from ("#" + line if is_left_out and line else line for line in lines)
            continue
        if name in explanations:
            yield from _comment(explanations[name], indent)
        if setting.default is attrs.NOTHING:
            yield f"{indent}{name}:  # required: {describe_type(setting.type)}"
            continue
        value = default_of(setting)
        value = value.value if isinstance(value, Enum) else value
        # The default directory is below the working directory, whose path differs from machine to machine.
        value = "runs" if isinstance(value, Path) else value
        # A list on one line; YAML writes lists below their key.
        written = f"[{', '.join(map(_inline, value))}]" if isinstance(value, tuple) else _inline(value)
        yield f"{indent}{name}: {written}  # {describe_type(setting.type)}"


def _inline(value: object) -> str:
    return format_yaml(plain(value)).removesuffix("\n").removesuffix("\n...")


def _explanations(cls: type) -> dict[str, str]:
    """Return the docstrings below the fields of a class, by field.

    Python drops them, so they are read from the source.
    """
    found: dict[str, str] = {}
    for base in filter(attrs.has, cls.__mro__):
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for statement, following in pairwise(body.body):
            match statement, following:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found.setdefault(name, _words(text))
    return found


def _words(text: str) -> str:
    return " ".join(text.replace("``", "").split())


def _comment(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
