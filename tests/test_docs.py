"""README and documentation are true: every Python block of them runs, every link leads somewhere.

The blocks of a page share their names, from top to bottom, and may await at the top level, as in a notebook. A block
that cannot be run says why in the line before it: ``<!-- not run: because -->``.
"""

from __future__ import annotations

import ast
import doctest
import inspect
import re
import shlex
import tomllib
from pathlib import Path

import anyio
import click
import pytest
import yaml
from attrs import frozen
from tests.plugins import skipping_without_plugin

from areal_actors import messages
from areal_actors.cli.commands import cli
from areal_actors.config import create_config, load_config

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.md")])
_FENCE = re.compile(
    r"(?P<skip><!-- not run: .+? -->\n)?^```(?P<language>\w+)(?: title=\"(?P<title>[^\"]+)\")?\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_CODE = re.compile(r"^```.*?^```$|`[^`\n]+`", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?P<target>[^)\s]+)\)")


@frozen(kw_only=True)
class Block:
    """A fenced block. ``title`` names the file that it shows."""

    language: str
    title: str | None
    text: str
    line: int
    is_run: bool


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page that name their language."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            language=match["language"],
            title=match["title"],
            text=match["text"],
            line=text.count("\n", 0, match.start("text")),
            is_run=match["skip"] is None and ">>>" not in match["text"],
        )
        for match in _FENCE.finditer(text)
    ]


def run_block(block: Block, page: Path, names: dict) -> None:
    """Run a block as the next cell of its page; its line numbers are those of the page."""
    source = "\n" * block.line + block.text
    code = compile(source, str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    if not code.co_flags & inspect.CO_COROUTINE:
        exec(code, names)
        return

    async def cell() -> None:
        await eval(code, names)

    anyio.run(cell)


def name_of(page: Path) -> str:
    """The page's path from the root, as people know it."""
    return str(page.relative_to(ROOT))


RUN = [page for page in PAGES if page.name != "README.md" and any(b.language == "python" for b in blocks(page))]


@pytest.mark.parametrize("page", RUN, ids=name_of)
def test_blocks_run(page, tmp_path, monkeypatch):
    """A reader who types the page in gets no error. What is asserted on it holds."""
    monkeypatch.chdir(tmp_path)
    names: dict = {"__name__": "__main__"}
    for block in blocks(page):
        if block.language == "python" and block.is_run:
            with skipping_without_plugin():
                run_block(block, page, names)


@pytest.mark.parametrize("page", [page for page in PAGES if ">>>" in page.read_text(encoding="utf-8")], ids=name_of)
def test_sessions_of_the_interpreter(page):
    """What the page says Python answers is what it answers."""
    results = doctest.testfile(str(page), module_relative=False, encoding="utf-8")

    assert results.attempted > 0
    assert results.failed == 0


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    """Links to files of the repository are to files that it has; a heading that is linked to exists."""
    for match in _LINK.finditer(_CODE.sub("", page.read_text(encoding="utf-8"))):
        target, _, anchor = match["target"].partition("#")
        if target.startswith(("https://", "http://")):
            continue
        path = page.parent / target if target else page

        assert path.exists(), match["target"]
        assert not anchor or anchor in anchors(path), match["target"]


def anchors(page: Path) -> set[str]:
    """The names that headings get, from their text or as ``{#name}``."""
    headings = re.findall(r"^#+ (.+?)(?: \{#(.+)\})?$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {name or re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-") for text, name in headings}


def test_pages_that_the_code_names_exist():
    """A message, a docstring or an example that names a page of the documentation names one that exists."""
    places = ("src", "plugins", "tools", "tests", "benchmarks", "examples")
    files = [path for place in places for kind in ("py", "yaml", "toml") for path in (ROOT / place).rglob(f"*.{kind}")]
    named = {(page, file.name) for file in files for page in re.findall(r"\bdocs/[\w/-]+\.md", file.read_text("utf-8"))}

    assert len(named) > 10
    assert [] == sorted((page, name) for page, name in named if not (ROOT / page).is_file())


def test_documentation_leaves_no_page_out():
    """Every page is in the navigation, but for tables of results, which another page links to."""
    listed = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    linked = {link.partition("#")[0] for page in PAGES for link in _LINK.findall(page.read_text(encoding="utf-8"))}
    pages = [str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")]

    for page in pages:
        is_linked = page.startswith("results/") and any(link.endswith(page) for link in linked)
        assert is_linked or f"- {page}\n" in listed, page


def commands(page: Path) -> list[list[str]]:
    """Return the words of every ``areal-actors`` command in the blocks of a page."""
    shells = [block.text for block in blocks(page) if block.is_run and block.language in ("bash", "console")]
    text = "\n".join(shells).replace("\\\n", " ")
    found = re.findall(r"^(?:\$ )?(?:[A-Z_]+=\S* |\S+=\$\()*areal-actors (.+?)(?=\)?$)", text, re.MULTILINE)
    return [shlex.split(line.removesuffix(")"), comments=True) for line in found]


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=name_of)
def test_commands_and_settings_exist(page):
    """Each command of a block parses, and what it changes are settings with possible values."""
    for words in commands(page):
        command, context, rest = cli, click.Context(cli, **cli.context_settings), words
        while isinstance(command, click.Group):
            with skipping_without_plugin():
                name, command, rest = command.resolve_command(context, rest)
            context = click.Context(command, parent=context, info_name=name, **command.context_settings)
        try:
            parsed = command.make_context(words[0], list(rest), parent=context.parent).params
        except click.BadParameter as error:
            if "does not exist" in str(error):  # a directory of the reader's
                continue
            raise
        if "overrides" in parsed:
            config = ROOT / parsed["config"]
            with skipping_without_plugin():
                load_config(config if config.exists() else ROOT / "examples" / "tiny.yaml", parsed["overrides"])


@pytest.mark.parametrize("page", [page for page in PAGES if "```yaml" in page.read_text(encoding="utf-8")], ids=name_of)
def test_settings_of_a_page_are_settings(page):
    """Each part of a configuration that a page shows makes one, together with what every job needs."""
    needed = {"experiment_name": "x", "model": "tiny", "total_steps": 2, "rollout": {"workflow": "agent.py:Agent"}}
    for block in blocks(page):
        # Prometheus has settings of its own.
        is_part = block.is_run and not block.text.startswith("# Scrape")
        if block.language != "yaml" or not is_part:
            continue
        shown = yaml.safe_load(block.text)
        job = {"dataset": {"jsonl": "problems.jsonl"}} | needed | shown
        if "sources" in shown:
            del job["dataset"]
        with skipping_without_plugin():
            create_config(job | {"rollout": needed["rollout"] | shown.get("rollout", {})})


ARCHITECTURE = (ROOT / "docs" / "concepts" / "architecture.md").read_text(encoding="utf-8")


def lines_of(drawing: str) -> list[str]:
    """A drawing without its margins."""
    return [line.strip() for line in drawing.splitlines() if line.strip()]


def test_architecture_draws_the_process_graph_of_the_code():
    """The first drawing is the one at the top of the messages."""
    drawn = ARCHITECTURE.split("```")[1]
    source = (messages.__doc__ or "").split("::\n")[1].split("\n\nWhat is asked")[0]

    assert lines_of(source) == lines_of(drawn)


def test_architecture_names_the_floors_that_are_enforced():
    """From top to bottom, the floors are those of the import linter, but for rooms that are not built yet."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contract = settings["tool"]["importlinter"]["contracts"][0]
    floors = [" · ".join(room for room in floor.split(" | ") if "(" not in room) for floor in contract["layers"]]
    drawn = lines_of(ARCHITECTURE.split("## Floors")[1].split("```")[1])

    assert [floor for floor in floors if floor] == [line.split("   ")[0] for line in drawn]


def test_architecture_names_files_that_exist():
    """Who follows a path of the architecture page finds a file there."""
    paths = set(re.findall(r"`((?:\w+/)*\w+\.py)`", ARCHITECTURE))

    assert len(paths) > 10
    assert [] == [path for path in paths if not (ROOT / "src" / "areal_actors" / path).is_file()]
