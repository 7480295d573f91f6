"""Write the reference pages that follow from the code: ``python -m tests.cli.reference``.

These are the commands, the settings and the fields of requests. Each page keeps the text before the mark in ``PAGES``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import click
from attrs import Factory, frozen, mutable

from areal_actors.cli.commands import cli
from areal_actors.config import RunConfig, format_reference
from areal_actors.proxy.dialects import ROUTES

_REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
_WIDTH = 100
_TITLES = {"chat/completions": "Chat completions"}
_SETTING = re.compile(r"(?P<indent> *)(?P<name>\w+):(?: (?P<value>[^ #].*?))?(?:  # (?P<kind>.*))?$")


@frozen(kw_only=True)
class Page:
    """A page whose part from ``mark`` on is generated."""

    mark: str
    format: Callable[[], str]

    def write(self, path: Path) -> str:
        """Return the text of the page at ``path`` with its generated part written again."""
        introduction, found, _ = path.read_text(encoding="utf-8").partition(self.mark)
        assert found, f"{path} has no {self.mark!r}"
        return introduction + self.format()


def list_commands(command: click.Command, context: click.Context) -> Iterator[click.Context]:
    """Yield the contexts of a command and of everything below it, in the order of the names."""
    yield context
    if isinstance(command, click.Group):
        for name in sorted(command.commands):
            below = command.commands[name]
            yield from list_commands(below, _open(below, name, context))


def _open(command: click.Command, name: str, parent: click.Context | None) -> click.Context:
    sizes = {"terminal_width": _WIDTH, "max_content_width": _WIDTH}
    return click.Context(command, info_name=name, parent=parent, **{**command.context_settings, **sizes})


def format_commands() -> str:
    """Return the help of every command."""
    sections = []
    # Without the commands of plug-ins that are installed here.
    core = click.Group(commands=cli.commands, help=cli.help, params=cli.params, context_settings=cli.context_settings)
    for context in list_commands(core, _open(core, "areal-actors", None)):
        help_text = "\n".join(line.rstrip() for line in context.command.get_help(context).splitlines())
        sections.append(f"## {context.command_path}\n\n```text\n{help_text}\n```\n")
    return "\n".join(sections)


@mutable(kw_only=True)
class Section:
    """A section of the settings: its purpose, and a row of a table for each of its settings."""

    indent: int
    path: str
    purpose: list[str] = Factory(list)
    rows: list[str] = Factory(list)


def list_sections(reference: str) -> Iterator[Section]:
    """Yield the sections of ``format_reference``, in its order; the first one has the settings outside of sections."""
    above = [Section(indent=-1, path="")]
    sections, comment, is_opening = [above[0]], list[str](), False
    for raw in reference.splitlines():
        line = re.sub(r"^#+(?=  )", "", raw)  # a section that is left out by default is commented out
        if line.lstrip().startswith("# "):
            (above[-1].purpose if is_opening else comment).append(line.strip(" #"))
            continue
        is_opening = False
        if (match := _SETTING.match(line)) is None:
            continue
        while above[-1].indent >= len(match["indent"]):
            above.pop()
        path = f"{above[-1].path}.{match['name']}".lstrip(".")
        if match["kind"] is None:
            above.append(Section(indent=len(match["indent"]), path=path))
            sections.append(above[-1])
            is_opening = True
        else:
            words = (f"`{match['name']}`", match["value"] and f"`{match['value']}`", match["kind"], " ".join(comment))
            above[-1].rows.append(f"| {' | '.join(_escape(word or '') for word in words)} |")
        comment = []
    yield from sections


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def format_settings() -> str:
    """Return a heading and a table for each section, whose anchor is the path of the section."""
    texts = []
    for section in list_sections(format_reference(RunConfig)):
        heading = f"### {section.path} {{#{section.path}}}" if section.path else "## Every setting"
        parts = [heading, " ".join(section.purpose)]
        if section.rows:
            parts.append("\n".join(["| Setting | Default | Value | Purpose |", "|---|---|---|---|", *section.rows]))
        texts += [part for part in parts if part]
    return "\n\n".join(texts) + "\n"


def format_fields() -> str:
    """Return a table of the fields of each route."""
    tables = []
    for route in ROUTES:
        rows = [f"| `{each.name}` | {each.support} | {_escape(each.note)} |" for each in route.fields.fields]
        title = _TITLES.get(route.operation, route.operation.capitalize())
        tables.append("\n".join([f"## {title}\n", "| Parameter | | |", "|---|---|---|", *rows]))
    return "\n\n".join(tables) + "\n"


PAGES = {
    _REFERENCE / "commands.md": Page(mark="## areal-actors\n", format=format_commands),
    _REFERENCE / "settings.md": Page(mark="## Every setting\n", format=format_settings),
    _REFERENCE / "fields.md": Page(mark="## Chat completions\n", format=format_fields),
}

if __name__ == "__main__":
    for path, page in PAGES.items():
        path.write_text(page.write(path), encoding="utf-8")
