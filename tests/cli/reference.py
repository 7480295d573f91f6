"""Write ``docs/cli.md`` from the commands: ``python -m tests.cli.reference``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from areal_actors.cli.commands import cli

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"
_WIDTH = 100


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


def format_page() -> str:
    """Return the page: the part before the first command as it stands, and the help of every command."""
    introduction, mark, _ = PAGE.read_text(encoding="utf-8").partition("## areal-actors\n")
    assert mark, f"{PAGE} has no section for the first command"
    sections = []
    # Without the commands of plug-ins that are installed here.
    core = click.Group(commands=cli.commands, help=cli.help, params=cli.params, context_settings=cli.context_settings)
    for context in list_commands(core, _open(core, "areal-actors", None)):
        help_text = "\n".join(line.rstrip() for line in context.command.get_help(context).splitlines())
        sections.append(f"## {context.command_path}\n\n```text\n{help_text}\n```\n")
    return introduction + "\n".join(sections)


if __name__ == "__main__":
    PAGE.write_text(format_page(), encoding="utf-8")
