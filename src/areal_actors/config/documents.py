"""YAML for configurations: plain data, with a line number for every path.

Three things differ from ``yaml.safe_load``. A key given twice in one mapping is a mistake, as is a mapping that
contains itself. ``2e-5`` is a number, as in YAML 1.2 (the 1.1 rules require ``2.0e-5`` and would read it as text). Any
text that is written is read back equal. ``structure`` interprets the data.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from attrs import field, frozen

from areal_actors.errors import ConfigError

ConfigPath = tuple[str | int, ...]
"""Keys and list positions from the top of a configuration to one of its values."""

_FLOAT = re.compile(
    r"""^[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?
    |[0-9][0-9_]*[eE][-+]?[0-9]+
    |\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?
    |\.(?:inf|Inf|INF))$|^\.(?:nan|NaN|NAN)$""",
    re.VERBOSE,
)


class _Loader(yaml.SafeLoader):
    """The safe loader, with the floats of YAML 1.2. ``problems`` are the lines and the mistakes in keys."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.problems: list[tuple[int, str]] = []

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:  # the stubs have another type than PyYAML
        """Compose a mapping, and note keys that are given twice or are no words."""
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                self.problems.append((line, "a key must be a word, not a list or a mapping."))
            elif key.value in lines and key.tag != "tag:yaml.org,2002:merge":
                before = f"{key.value} was given before, on line {lines[key.value]}; keep one of them."
                self.problems.append((line, before))
            else:
                lines[key.value] = line
        return node


class _Dumper(yaml.SafeDumper):
    """The safe dumper, which quotes text that ``_Loader`` would read as a number."""


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


@frozen(kw_only=True)
class Document:
    """The parsed content of a file. ``source`` names it in messages."""

    source: str
    data: Any
    root: yaml.Node | None = field(default=None, repr=False, eq=False)

    def locate(self, path: ConfigPath) -> str:
        """Return ``file:line`` of the value at ``path``, or of the innermost enclosing section in the file."""
        node, line = self.root, None
        for part in path:
            if isinstance(node, yaml.MappingNode):
                found = next(((key, value) for key, value in node.value if key.value == str(part)), None)
            elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
                found = node.value[part], node.value[part]
            else:
                found = None
            if found is None:
                break
            # The line of a key, not of its value: a section begins below its key.
            node, line = found[1], found[0].start_mark.line + 1
        return self.source if line is None else f"{self.source}:{line}"


def read_document(path: Path) -> Document:
    """Read a YAML file. Raises ``ConfigError`` naming the file, and the line and column if known."""
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, IsADirectoryError) as error:
        # The files in the directory, as advice for a mistyped name or a directory such as init writes.
        is_directory = isinstance(error, IsADirectoryError)
        directory = path if is_directory else path.parent
        near = sorted(other.name for other in directory.glob("*.y*ml")) if directory.is_dir() else []
        advice = f"{directory} has {', '.join(near[:8])}." if near else "check the path."
        what = f"{path} is a directory" if is_directory else f"There is no file {path}"
        raise ConfigError(f"{what}; {advice}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text ({error.reason}, byte {error.start}); save it as UTF-8") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    return parse_yaml(text, source=str(path))


def parse_yaml(text: str, *, source: str) -> Document:
    """Parse the single document in ``text``. Raises ``ConfigError`` for malformed YAML, duplicate keys and cycles."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        problems = tuple(f"{source}:{line}: {problem}" for line, problem in sorted(loader.problems))
        # Plain data, which a section that contains itself is not.
        data = None if node is None or problems else plain(loader.construct_document(node))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or " ".join(str(error).split())
        if mark is None:
            raise ConfigError(f"{source} is not valid YAML: {problem}") from error
        lines = text.splitlines()
        line = lines[mark.line].strip() if mark.line < len(lines) else ""
        place = f"the line reads: {line[:100]!r}" if line else "it is the end of the file"
        raise ConfigError(
            f"{source}:{mark.line + 1}:{mark.column + 1} is not valid YAML: {problem}; {place}"
        ) from error
    except (ValueError, RecursionError) as error:  # impossible dates, thousands of nested brackets, cycles of anchors
        reason = error if isinstance(error, ValueError) else "a section contains itself, or is nested too deeply"
        raise ConfigError(f"{source} holds a value that cannot be read: {reason}") from error
    if problems:
        raise ConfigError(problems)
    return Document(source=source, data=data, root=node)


def format_yaml(data: object) -> str:
    """Return ``data`` as YAML that ``parse_yaml`` reads back equal; keys keep their order."""
    return str(yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=False, width=100))


def format_path(path: ConfigPath) -> str:
    """Return a path in dotted form, such as ``rollout.openai.mode``."""
    return ".".join(str(part) for part in path)


def plain(value: object) -> Any:
    """Return ``value`` made of ordinary dicts, lists and strings, as ``format_yaml`` requires."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, str) else value
