"""Strict conversion of plain data to frozen attrs classes, reporting all mistakes at once.

``create_converter`` returns a ``cattrs`` converter whose hooks collect mistakes instead of stopping at the first: each
has the path from the structured value, the given value, the expected one, and the nearest valid word. The only coercion
is from a whole number to a number. A class is only created if all of its parts are right, but the validators of the
right parts run in any case, so that their complaints are in the same list.

``loading`` knows the origin of values (files, the command line), and ``schema`` the settings.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import attrs
import cattrs
from attrs import frozen

from areal_actors.config.documents import ConfigPath, plain
from areal_actors.errors import ArealError, ConfigError
from areal_actors.lib.plugins import PluginGroup, group_of, install_advice, load_plugin, plugin_names
from areal_actors.lib.references import FunctionReference
from areal_actors.lib.settings import is_constant
from areal_actors.lib.shown_values import show_value

_SCALARS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    Path: "a path",
    NoneType: "null",
    Any: "anything",
    FunctionReference: "a function (file.py:name)",
}
_MAX_SHOWN = 60
_TYPOGRAPHIC = "\u201c\u201d\u2018\u2019"
"""The quotes of word processors and web pages, which YAML and shells take as letters."""


_PLURALS = {
    "a whole number": "whole numbers",
    "a number": "numbers",
    "text": "texts",
    "a path": "paths",
    "a function (file.py:name)": "functions (file.py:name)",
}


def describe_type(kind: Any) -> str:
    """Describe the values of type ``kind``, in words that follow "must be"."""
    if kind in _SCALARS:
        return _SCALARS[kind]
    origin, arguments = get_origin(kind), get_args(kind)
    if _is_union(kind):
        return " or ".join(describe_type(argument) for argument in arguments)
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if hasattr(kind, "__supertype__"):
        return describe_type(kind.__supertype__)
    return _describe_class(origin or kind, arguments)


def _describe_class(cls: type, arguments: Sequence[Any]) -> str:
    if issubclass(cls, Enum):
        return f"one of {', '.join(str(member.value) for member in cls)}"
    if attrs.has(cls):
        # The same words whatever is installed, since the documentation has them.
        own = settings_of(cls, with_plugins=False)
        return f"a section ({', '.join(own)})" if own else "a section of a plug-in"
    if issubclass(cls, Mapping):
        return "a mapping"
    if not arguments:
        return "a list"
    words = describe_type(arguments[0])
    return f"a list of {_PLURALS.get(words) or words.replace('a section', 'sections', 1)}"


def _is_union(kind: Any) -> bool:
    return get_origin(kind) in (Union, UnionType)


def show(value: object) -> str:
    """Return a value as it is written in YAML, shortened."""
    return show_value(value, limit=_MAX_SHOWN, mapping="a mapping")


def hint(value: object, kind: Any) -> str:
    """Return advice for values that are nearly right."""
    if isinstance(value, str) and value.strip(_TYPOGRAPHIC) != value:
        return "; type plain quotes, or none"
    if any(_is_a(member, tuple) for member in (get_args(kind) if _is_union(kind) else (kind,))) and value:
        return f"; write [{show_value(value, limit=_MAX_SHOWN)}]" if isinstance(value, str | int | float) else ""
    if kind is str and not isinstance(value, (str, Mapping, list, NoneType)):
        return "; put quotes around it"
    if kind in (int, float) and isinstance(value, str) and re.fullmatch(r"[-+]?[0-9]+(\.[0-9]+)?", value):
        return "; leave out the quotes"
    return ""


Resolver = Callable[[str, Path], Any]
"""Converts a text to a value, given the directory that its relative paths are relative to."""


class TypedText(str):
    """Text typed on the command line: relative paths in it are relative to the working directory."""

    __slots__ = ()


@frozen(kw_only=True)
class Mistake:
    """One invalid setting at ``path``. ``unknown`` is a key that no setting has."""

    path: ConfigPath = ()
    text: str
    unknown: str | None = None

    def below(self, part: str | int) -> Mistake:
        """Return the same mistake with its path starting one level above."""
        return attrs.evolve(self, path=(part, *self.path))


class Mistakes(Exception):
    """Raised by the hooks. ``found`` has at least one mistake."""

    def __init__(self, found: Sequence[Mistake]) -> None:
        super().__init__("; ".join(mistake.text for mistake in found))
        self.found = tuple(found)


def nearest(word: str, words: Sequence[str]) -> str | None:
    """Return the valid word that was probably meant."""
    return next(iter(get_close_matches(word, words, n=1, cutoff=0.6)), None)


def create_converter(
    directory: Path, resolvers: Mapping[Any, Resolver] | None = None, *, typed_in: Path | None = None
) -> cattrs.Converter:
    """Return a converter whose relative paths are relative to ``directory`` (those of ``TypedText`` to ``typed_in``).

    ``resolvers`` resolve texts of additional types (``NewType`` of ``str``). ``structure`` raises ``Mistakes``.
    """
    converter = cattrs.Converter(detailed_validation=False)
    makers = {Path: resolve_path, **(resolvers or {})}
    # cattrs tries hooks of classes first, for subclasses too (every StrEnum is a str); then the last registered
    # function.
    for kind in (bool, int, float, str):
        converter.register_structure_hook(
            kind, lambda value, to: _structure_choice(value, to) if _is_choice(to) else _structure_scalar(value, to)
        )
    converter.register_structure_hook_func(lambda kind: kind is Any, lambda value, _: plain(value))
    converter.register_structure_hook_func(
        lambda kind: _is_a(kind, Mapping), lambda value, kind: _structure_mapping(converter, value, kind)
    )
    converter.register_structure_hook_func(
        lambda kind: _is_a(kind, tuple), lambda value, kind: _structure_list(converter, value, kind)
    )
    converter.register_structure_hook_func(_is_choice, _structure_choice)
    converter.register_structure_hook_func(_is_union, lambda value, kind: _structure_union(converter, value, kind))
    converter.register_structure_hook_func(attrs.has, lambda value, kind: _structure_class(converter, value, kind))

    def structure_text(value: object, kind: Any) -> Any:
        base = typed_in or Path.cwd() if isinstance(value, TypedText) else directory
        checked = _structure_scalar(value, str, expected=describe_type(kind))
        if checked.strip(_TYPOGRAPHIC) != checked:
            raise _wrong(value, describe_type(kind))
        return makers[kind](checked, base)

    for kind in makers:
        converter.register_structure_hook(kind, structure_text)
    converter.register_unstructure_hook(Path, str)
    converter.register_unstructure_hook_func(attrs.has, lambda value: _unstructure_class(converter, value))
    return converter


def _unstructure_class(converter: cattrs.Converter, value: object) -> dict[str, Any]:
    """Write the settings of a class, and those of plug-ins next to them."""
    own, found = settings_of(type(value), with_plugins=False), group_of(type(value))
    added = getattr(value, found[0]) if found else {}
    parts = {name: getattr(value, field.name) for name, field in own.items()} | added
    return {name: converter.unstructure(part) for name, part in parts.items()}


def resolve_path(text: str, directory: Path) -> Path:
    """Return ``text`` as an absolute path; ``~`` is the home directory.

    Raises ``Mistakes`` for an unknown user's home.
    """
    try:
        return (directory / Path(text).expanduser()).absolute()
    except RuntimeError:
        raise Mistakes([Mistake(text=f"names the home of a user who is not known here: {show(text)}")]) from None


# --------------------------------------------------------------------------------------------------- scalars


_LARGEST = 2**63 - 1
"""The largest whole number of a setting, as databases and tensors store them."""


def _structure_scalar(value: Any, kind: Any, *, expected: str | None = None) -> Any:
    # bool is a subclass of int, but not accepted as a number.
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise _wrong(value, "a number that fits into a float") from None
    # Texts typed on the command line are of a subclass of str.
    if (str if isinstance(value, str) else type(value)) is not kind:
        raise _wrong(value, expected or describe_type(kind), kind)
    if isinstance(value, int) and abs(value) > _LARGEST:
        raise _wrong(value, f"a whole number from {-_LARGEST} to {_LARGEST}")
    return kind(value)


def _wrong(value: object, expected: str, kind: Any = None) -> Mistakes:
    return Mistakes([Mistake(text=f"must be {expected}, not {show(value)}{hint(value, kind)}")])


def _is_choice(kind: Any) -> bool:
    return get_origin(kind) is Literal or (isinstance(kind, type) and issubclass(kind, Enum))


def _structure_choice(value: object, kind: Any) -> Any:
    choices = {v: v for v in get_args(kind)} if get_origin(kind) is Literal else {m.value: m for m in kind}
    for word, choice in choices.items():
        if type(word) is (str if isinstance(value, str) else type(value)) and word == value:
            return choice
    if isinstance(kind, type) and isinstance(value, str):
        with suppress(ValueError):
            # An alias of a choice, resolved by its ``_missing_``.
            return kind(str(value))
    close = nearest(value, [str(word) for word in choices]) if isinstance(value, str) else None
    meant = f"; did you mean {close}?" if close else ""
    raise Mistakes([Mistake(text=f"must be {describe_type(kind)}, not {show(value)}{meant}")])


# ------------------------------------------------------------------------------------------------ collections


def _is_a(kind: Any, base: Any) -> bool:
    origin = get_origin(kind) or kind
    return isinstance(origin, type) and issubclass(origin, base)


def _structure_mapping(converter: cattrs.Converter, value: object, kind: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise _wrong(value, describe_type(kind))
    _, inner = get_args(kind) or (str, Any)
    return _collect(converter, {str(key): (item, inner) for key, item in value.items()})


def _structure_list(converter: cattrs.Converter, value: object, kind: Any) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        raise _wrong(value, describe_type(kind), kind)
    inner = (get_args(kind) or (Any,))[0]
    return tuple(_collect(converter, {index: (item, inner) for index, item in enumerate(value)}).values())


def _collect(converter: cattrs.Converter, parts: Mapping[Any, tuple[Any, Any]]) -> dict[Any, Any]:
    """Structure each part by its kind; report the mistakes of all parts together."""
    made, found = _attempt(converter, parts)
    if found:
        raise Mistakes(found)
    return made


def _attempt(converter: cattrs.Converter, parts: Mapping[Any, tuple[Any, Any]]) -> tuple[dict[Any, Any], list[Mistake]]:
    made: dict[Any, Any] = {}
    found: list[Mistake] = []
    for part, (value, kind) in parts.items():
        try:
            made[part] = converter.structure(value, kind)
        except Mistakes as mistakes:
            found += [mistake.below(part) for mistake in mistakes.found]
    return made, found


# ---------------------------------------------------------------------------------------------------- unions


def _structure_union(converter: cattrs.Converter, value: object, kind: Any) -> Any:
    """Structure by the first member that accepts the value; mappings by the class that has their keys."""
    members = [member for member in get_args(kind) if member is not type(None)]
    if value is None and len(members) < len(get_args(kind)):
        return None
    classes = [member for member in members if attrs.has(member)]
    if isinstance(value, Mapping) and classes:
        return converter.structure(value, max(classes, key=lambda cls: _num_matching(cls, value)))
    if len(members) == 1:
        return converter.structure(value, members[0])
    for member in members:
        try:
            return converter.structure(value, member)
        except Mistakes:
            continue
    raise _wrong(value, describe_type(kind), kind)


def _num_matching(cls: type, keys: Iterable[object]) -> tuple[int, int]:
    """Return how many keys are settings of a class, or of a plug-in that adds to it; then, how many nearly are."""
    names, words = list(settings_of(cls)), list(map(str, keys))
    known = [word for word in words if word in names or _advise_plugin(cls, word) is not None]
    return len(known), sum(nearest(word, names) is not None for word in words)


# --------------------------------------------------------------------------------------------------- classes


def settings_of(cls: Any, *, with_plugins: bool = True) -> dict[str, attrs.Attribute[Any]]:
    """Return the settings of an attrs class, by their names in a file, with resolved types; with those of plug-ins."""
    own = _fields_of(cls)
    if (found := group_of(cls)) is None:
        return own
    name, group = found
    del own[name]
    return own | (_added_settings(group) if with_plugins else {})


def _fields_of(cls: Any) -> dict[str, attrs.Attribute[Any]]:
    fields = attrs.fields(attrs.resolve_types(cls))
    return {field.alias or field.name: field for field in fields if field.init and not is_constant(field)}


def _added_settings(group: PluginGroup) -> dict[str, attrs.Attribute[Any]]:
    """Return the settings that plug-ins add to a class, as if they were its fields."""
    added = {name: attrs.field(default=None, type=load_plugin(group, name) | None) for name in plugin_names(group)}
    return {field.name: field for field in attrs.fields(attrs.make_class("Added", added))}


def is_required(setting: attrs.Attribute[Any]) -> bool:
    """Return whether a setting has no default."""
    return setting.default is attrs.NOTHING


def _structure_class(converter: cattrs.Converter, value: object, cls: Any) -> Any:
    if value is None:
        # A section whose lines are all commented out is null in YAML.
        value = {}
    short_form = getattr(cls, "short_form", None)
    if short_form is not None and isinstance(value, str):
        value = {short_form: value}
    if not isinstance(value, Mapping):
        raise _wrong(value, describe_type(cls))
    settings = settings_of(cls)
    made, found = _attempt(converter, {name: (value[name], settings[name].type) for name in settings if name in value})
    for key in (str(key) for key in value if key not in settings):
        if (advice := _advise_plugin(cls, key)) is not None:
            found.append(Mistake(path=(key,), text=advice))
            continue
        close = nearest(key, list(settings))
        advice = f"did you mean {close}?" if close else f"there are {', '.join(settings)}"
        found.append(Mistake(path=(key,), text=f"is not a setting; {advice}", unknown=key))
    for name, setting in settings.items():
        if name not in value and is_required(setting):
            found.append(Mistake(path=(name,), text=f"is missing; it must be {describe_type(setting.type)}"))
    made = _gather(cls, made)
    # Validators of the right parts run even if others are wrong, so that one list has all complaints.
    found += _validate(cls, made, given=value)
    if found:
        raise Mistakes(found)
    try:
        return cls(**made)
    except (ValueError, TypeError, ArealError) as error:
        raise Mistakes([Mistake(text=text) for text in _complaints(error)]) from error


def _gather(cls: Any, made: dict[str, Any]) -> dict[str, Any]:
    """Move the settings of plug-ins into the field of the class that holds them."""
    if (found := group_of(cls)) is None:
        return made
    own = _fields_of(cls)
    added = {name: value for name, value in made.items() if name not in own and value is not None}
    return {name: value for name, value in made.items() if name in own} | {found[0]: added}


def _advise_plugin(cls: Any, key: str) -> str | None:
    """Return how to install the plug-in that adds the setting ``key`` to a class."""
    found = group_of(cls)
    return None if found is None else install_advice(found[1], key)


def _validate(cls: Any, made: Mapping[str, Any], *, given: Mapping[str, Any]) -> list[Mistake]:
    """Return the complaints of all validators of the valid parts, run on an instance that has only those."""
    partial = cls.__new__(cls)
    settings = _fields_of(cls)
    for constant in filter(is_constant, attrs.fields(cls)):
        object.__setattr__(partial, constant.name, constant.default)
    for name, setting in settings.items():
        if name in made:
            object.__setattr__(partial, setting.name, made[name])
        # A part that was given and is wrong has no default: "there is no section sft" would mislead.
        elif setting.default is not attrs.NOTHING and name not in given:
            object.__setattr__(partial, setting.name, default_of(setting, partial))
    found: list[Mistake] = []
    for name, setting in settings.items():
        if setting.validator is None or name not in made:
            continue
        try:
            setting.validator(partial, setting, getattr(partial, setting.name))
        except AttributeError:
            # It needs a part that is missing or wrong; it runs again when that is corrected.
            continue
        except (ValueError, TypeError, ArealError) as error:
            found += [Mistake(path=(name,), text=text) for text in _complaints(error, setting.name)]
    return found


def default_of(setting: attrs.Attribute[Any], instance: Any = None) -> Any:
    """Return the default of a setting; a default computed from other settings takes them from ``instance``."""
    default: Any = setting.default
    if not isinstance(default, attrs.Factory):  # type: ignore[arg-type]
        return default
    return default.factory(instance) if default.takes_self else default.factory()


_COMPARISON = re.compile(r"^(must be \S+ \S+): (.*)$", re.DOTALL)


def _complaints(error: Exception, name: str = "") -> list[str]:
    """Return the messages of a validator, without the name, since the path says it better."""
    if isinstance(error, ConfigError):
        return list(error.problems)
    match error.args:
        case (_, attrs.Attribute(), (list() | tuple() | set() | frozenset()) as options, value):
            words = [str(option) for option in options]
            close = nearest(str(value), words)
            return [
                f"must be one of {', '.join(words)}, not {show(value)}" + (f"; did you mean {close}?" if close else "")
            ]
    text = str(error.args[0] if error.args else error).removeprefix(f"'{name}' ")
    return [_COMPARISON.sub(r"\1, not \2", text)]
