"""Count how large the project is, and print a Markdown table with the goals. ``python -m tools.numbers``.

Lines of code are neither blank nor comment nor docstring, and neither import nor ``__all__``: the figure of the goal.
Docstrings and comments are shown as shares of them, beside lines that are too long or hold several statements, because
code could otherwise be made shorter by making it harder to read.

Two rows are traced in a run of the ``tiny`` model (``--untraced`` leaves them out):

* *Named forms* are attrs classes of the project, outside of ``kernel``, ``lib`` and an engine's own step. A class
  counts if an instance that carries a completion is made between the first request and the end of the training step.
  An instance carries one if it holds token ids (a sequence or an array of integers) or messages, at most three levels
  down.
* *Rooms entered again* are returns to a file of ``proxy/`` that had been left. The walk is the sequence of files in
  which functions are entered, from the endpoint of the chat completion until the message ``Complete`` is made. Its
  returns are its stays less its files.

The files of a recipe are the distinct source files that its paragraph in CONTRIBUTING.md tells to write or to change,
outside of ``tests/``, ``docs/`` and ``tools/``. Files between parentheses are to be read.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tempfile
import threading
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import anyio
import attrs
import click
from attrs import define, field, frozen

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "areal_actors"

_CARRIERS = (
    *("proxy", "domain", "messages", "cache", "conversation", "rendering", "sessions", "journal", "generation"),
    *("rollouts", "training", "interchange", "run"),
)
"""Packages whose classes may be forms of a completion."""
_ENDPOINT = "CompletionEndpoint.__call__"
KINDS = ("scheduler", "inference server", "dialect", "estimator")
"""Of recipes."""
_SOURCE_FILE = re.compile(r"`((?!tests/|docs/|tools/)[\w<>]+/[\w./<>-]+\.(?:py|toml))`")
_NONE = "-"
_SHOWN = re.compile(r"^[#\s]*\w+:.*  # ", re.MULTILINE)
_VAGUE = re.compile(r"(?:\b|_)(nobodys?|whoever|somebody)(?:\b|_)", re.IGNORECASE)


@frozen(kw_only=True)
class Counts:
    """Figures of a set of Python files; they can be added."""

    files: int = 0
    lines: int = 0
    code: int = 0
    imports: int = 0
    """Lines of import statements and of ``__all__``."""
    docstrings: int = 0
    comments: int = 0
    functions: int = 0
    anys: int = 0
    exported: int = 0
    """Names in ``__all__`` of modules that are no package's ``__init__``."""
    long_lines: int = 0
    shared_lines: int = 0
    """Lines on which two statements begin."""
    vague: int = 0

    def __add__(self, other: Counts) -> Counts:
        mine, others = attrs.asdict(self), attrs.asdict(other)
        return Counts(**{name: mine[name] + others[name] for name in mine})


def count_files(paths: Iterable[Path]) -> Counts:
    """Return the figures of all files together."""
    return sum((count_text(path.read_text(encoding="utf-8"), path.name) for path in paths), Counts())


def count_text(text: str, name: str = "module.py") -> Counts:
    """Return the figures of one file."""
    tree = ast.parse(text)
    lines = text.splitlines()
    docstrings, imports = set(_docstring_lines(tree)), set(_import_lines(tree))
    comments = {
        token.start[0]
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT and not token.line[: token.start[1]].strip()
    }
    blank = {number for number, line in enumerate(lines, start=1) if not line.strip()} - docstrings
    nodes = list(ast.walk(tree))
    starts = [node.lineno for node in nodes if isinstance(node, ast.stmt) and not _is_ellipsis(node)]
    return Counts(
        files=1,
        lines=len(lines),
        code=len(lines) - len(docstrings | imports | comments | blank),
        imports=len(imports - blank - comments),
        docstrings=len(docstrings),
        comments=len(comments - imports),
        functions=sum(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for node in nodes),
        anys=sum(isinstance(node, ast.Name) and node.id == "Any" for node in nodes),
        exported=0 if name == "__init__.py" else sum(map(_num_exported, tree.body)),
        long_lines=sum(len(line) > 120 and "noqa" not in line for line in lines),
        shared_lines=len(starts) - len(set(starts)),
        vague=len(_VAGUE.findall(text)),
    )


def _is_ellipsis(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and node.value.value is ...


def _docstring_lines(tree: ast.Module) -> Iterator[int]:
    """Yield the lines of docstrings, those below fields included: every statement that is only a string."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield from _lines_of(node)


def _import_lines(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) or (isinstance(node, ast.stmt) and _num_exported(node)):
            yield from _lines_of(node)


def _lines_of(node: ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _num_exported(node: ast.stmt) -> int:
    """Return the number of names that a statement assigns to ``__all__``."""
    match node:
        case ast.Assign(targets=[ast.Name(id="__all__")], value=ast.List(elts=names) | ast.Tuple(elts=names)):
            return len(names)
    return 0


# ----------------------------------------------------------------------------------------------------- settings


def count_settings() -> tuple[int, int, str]:
    """Return the number of distinct names of settings, of paths, and of those that the commands print."""
    from areal_actors.config import RunConfig
    from areal_actors.config.reference import paths_of

    paths = paths_of(RunConfig)
    distinct = {path.rpartition(".")[2] for path in paths}
    return len(distinct), len(paths), " / ".join(_num_shown(*options) for options in ((), ("--all",)))


def _num_shown(*options: str) -> str:
    command = [sys.executable, "-m", "areal_actors", "settings", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return str(len(_SHOWN.findall(done.stdout))) if done.returncode == 0 else _NONE


# ------------------------------------------------------------------------------------------------------- traced


@define
class Trace:
    """Instances made since the first completion arrived, by class, and the last one's walk through ``proxy/``."""

    made: dict[type, list[Any]] = field(factory=lambda: defaultdict(list))
    walk: list[str] = field(factory=list)
    num_requests: int = 0

    def install(self) -> None:
        """Trace this thread and all that start later."""
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def remove(self) -> None:
        """Trace no longer."""
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        if code.co_name == "__init__" and code.co_filename.startswith("<attrs generated"):
            instance = frame.f_locals["self"]
            cls = type(instance)
            if cls.__name__ == "Complete" and self.walk:
                self.walk.append("")
            self.made[cls].append(instance)
        elif code.co_filename.startswith(str(PACKAGE / "proxy")) and frame.f_lineno == code.co_firstlineno:
            if code.co_qualname == _ENDPOINT:
                if self.num_requests == 0:
                    # What loads the model makes instances of the same classes.
                    self.made.clear()
                self.num_requests += 1
                self.walk.clear()
            if "" not in self.walk:
                self.walk.append(str(Path(code.co_filename).relative_to(PACKAGE)))

    def forms(self) -> list[str]:
        """Return the classes of which an instance made since the first completion carries token ids or messages."""
        return sorted(
            f"{cls.__module__.removeprefix('areal_actors.')}.{cls.__qualname__}"
            for cls, instances in self.made.items()
            if _is_carrier(cls) and any(carries(instance) for instance in instances[:200])
        )

    def stays(self) -> list[str]:
        """Return the files of the walk, once for each stay."""
        return [file for index, file in enumerate(self.walk) if file and (not index or self.walk[index - 1] != file)]


def _is_carrier(cls: type) -> bool:
    project, _, name = cls.__module__.partition(".")
    # A step of an engine holds a batch of rows, not a completion.
    is_step = name.startswith("generation.torch")
    return project == "areal_actors" and name.partition(".")[0] in _CARRIERS and not is_step


def carries(value: Any, depth: int = 3) -> bool:
    """Return whether ``value`` holds token ids or messages, at most ``depth`` fields or items down."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return "int" in str(value.dtype) and len(value.shape) > 0
    if depth == 0 or isinstance(value, str | bytes):
        return False
    if isinstance(value, Mapping):
        return any(carries(item, depth - 1) for item in value.values())
    if isinstance(value, list | tuple):
        are_ids = len(value) > 0 and all(type(item) is int for item in value)
        return are_ids or any(carries(item, depth - 1) for item in value[:20])
    if attrs.has(type(value)):
        fields = (getattr(value, item.name, None) for item in attrs.fields(type(value)))
        return type(value).__name__ == "ChatMessage" or any(carries(item, depth - 1) for item in fields)
    return False


def trace_forms() -> list[str]:
    """Train one step of the tiny job and return the named forms of its completions."""
    from areal_actors import load_config, train

    config = load_config(ROOT / "examples" / "tiny.yaml", ["total_steps=1", "eval_dataset=null"])
    trace = Trace()
    with tempfile.TemporaryDirectory() as directory:
        trace.install()
        try:
            train(config, run_dir=Path(directory) / "run")
        finally:
            trace.remove()
    return trace.forms()


async def trace_walk() -> list[str]:
    """Answer two chat completions and return the stays of the second one in the files of ``proxy/``."""
    import httpx

    from areal_actors import open_inference

    trace = Trace()
    body = {"model": "policy", "messages": [{"role": "user", "content": "Name a number."}], "max_tokens": 4}
    trace.install()
    try:
        async with open_inference("tiny") as inference, inference.session("numbers") as session:
            headers = {"authorization": f"Bearer {session.api_key}"}
            async with httpx.AsyncClient(headers=headers, timeout=60) as client:
                for _ in range(2):
                    (await client.post(f"{session.base_url}/chat/completions", json=body)).raise_for_status()
    finally:
        trace.remove()
    return trace.stays()


# -------------------------------------------------------------------------------------------------------- table


def count_recipes() -> dict[str, int]:
    """Return the number of source files that each recipe of CONTRIBUTING.md names."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    recipes = text.partition("\n## Recipes\n")[2].partition("\n## ")[0].split("\n* ")[1:]
    return {kind: count_recipe(recipe) for recipe in recipes for kind in KINDS if kind in recipe[:40]}


def count_recipe(recipe: str) -> int:
    """Return the number of files that a recipe names; those between parentheses are examples and interfaces."""
    steps = re.sub(r"\([^()]*\)", "", recipe).split(";")
    # Of the alternatives of a step, one is taken.
    return sum(max(len(set(_SOURCE_FILE.findall(way))) for way in re.split(r"\bor\b", step)) for step in steps)


def measure(*, is_traced: bool) -> Iterator[tuple[str, str, str]]:
    """Yield the rows of the table: what is counted, its value and its goal."""
    source = count_files(PACKAGE.rglob("*.py"))
    plugins = count_files((ROOT / "plugins").glob("*/src/**/*.py"))
    tests = count_files([*(ROOT / "tests").rglob("*.py"), *(ROOT / "plugins").glob("*/tests/**/*.py")])
    yield "lines of `src/areal_actors`", f"{source.lines:,}", "≤ 62,000"
    yield "its lines of code (no blank, comment, docstring, import or `__all__`)", f"{source.code:,}", "≤ 36,500"
    yield "the same with imports and `__all__`", f"{source.code + source.imports:,}", ""
    yield "lines of `plugins/*/src`", f"{plugins.lines:,}", "≤ 14,000"
    for path in sorted((ROOT / "plugins").glob("*/src")):
        yield f"of these `{path.parent.name}`", f"{count_files(path.rglob('*.py')).lines:,}", ""
    yield "functions", f"{source.functions:,}", "≤ 3,400"
    yield "`Any`", f"{source.anys:,}", "≤ 700"
    yield "names in `__all__` outside package `__init__`", f"{source.exported:,}", "0"
    distinct, paths, shown = count_settings()
    yield "distinct settings", str(distinct), "≤ 220"
    yield "paths of settings", str(paths), ""
    yield "settings shown by `areal-actors settings`, with `--all`", shown, "about 25"
    if is_traced:
        stays = anyio.run(trace_walk)
        yield "named forms of a completion", str(len(trace_forms())), "≤ 18"
        yield "rooms of the proxy that a chat body enters again", str(len(stays) - len(set(stays))), "≤ 2"
    recipes = count_recipes()
    for kind in KINDS:
        yield f"files to touch for a new {kind}", str(recipes.get(kind, _NONE)), "2"
    loop = PACKAGE / "run" / "loop.py"
    yield "lines of `run/loop.py`", str(count_files([loop]).lines) if loop.exists() else _NONE, "≤ 120"
    yield "lines of tests", f"{tests.lines:,}", "≤ 55,000"
    yield "nobody, whoever, somebody in `src`, in tests", f"{source.vague}, {tests.vague}", "0"
    for name, counts in (("`src`", source), ("plug-ins", plugins)):
        code = max(counts.code, 1)
        yield (
            f"docstring lines per line of code in {name}",
            f"{counts.docstrings / code:.3f}",
            "≥ 0.273" * (counts is source),
        )
        yield (
            f"comment lines per line of code in {name}",
            f"{counts.comments / code:.3f}",
            "≥ 0.039" * (counts is source),
        )
        yield (
            f"lines longer than 120 in {name}, lines of several statements",
            f"{counts.long_lines}, {counts.shared_lines}",
            "0, 0",
        )


@click.command()
@click.option("--untraced", is_flag=True, help="Leave out what needs a run of the tiny model.")
@click.option("--examples", is_flag=True, help="List the named forms and the walk of a chat body instead.")
def main(*, untraced: bool, examples: bool) -> None:
    """Print the table."""
    if examples:
        print("named forms:", *trace_forms(), "walk:", *anyio.run(trace_walk), sep="\n  ")
        return
    print("| | now | goal |\n|---|---|---|")
    for row in measure(is_traced=not untraced):
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
