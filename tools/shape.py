"""Measure how hard the source is to read: file hops, single-use code, import cycles and language. ``nox -s shape``.

Each figure has a goal. The first two are traced: a real server on a real socket answers one chat completion and takes
one reward, and every function of the project that runs meanwhile is counted, on any thread. A second table has the
share of each package; ``--package NAME`` prints one package alone, with its examples, without the traced run.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Self

import anyio
import click
from attrs import asdict, frozen
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
PACKAGE = SOURCE / "areal_actors"

_VAGUE = re.compile(r"(?:\b|_)(nobodys?|whoever|somebody)(?:\b|_)", re.IGNORECASE)
_WHAT = re.compile(r'^\s*"""What ', re.MULTILINE)
_COMMENT = re.compile(r"^\s*#", re.MULTILINE)


@frozen(kw_only=True)
class Figure:
    """One measured property; ``goal`` is what it is to stay within, ``is_met`` whether it does."""

    name: str
    value: float
    goal: str
    is_met: bool
    examples: tuple[str, ...] = ()


@frozen
class Source:
    """The parsed modules of the package, by file."""

    texts: dict[Path, str]
    trees: dict[Path, ast.Module]

    @classmethod
    def read(cls) -> Source:
        """Parse every module of the package."""
        texts = {path: path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}
        return cls(texts, {path: ast.parse(text) for path, text in texts.items()})

    @property
    def num_lines(self) -> int:
        """Lines of all modules."""
        return sum(text.count("\n") for text in self.texts.values())


# ------------------------------------------------------------------------------------------------------ static


def module_of(path: Path) -> str:
    """Return the dotted name of the module in ``path``."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def find_imports(source: Source) -> dict[str, set[str]]:
    """Return for each module those that it imports, wherever in the file it does so, also for type checkers alone."""
    modules = {module_of(path) for path in source.trees}
    return {
        (own := module_of(path)): {name for node in ast.walk(tree) for name in _imported(node, modules) if name != own}
        for path, tree in source.trees.items()
    }


def _imported(node: ast.AST, modules: set[str]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name in modules)
    elif isinstance(node, ast.ImportFrom) and node.module is not None:
        for alias in node.names:
            submodule = f"{node.module}.{alias.name}"
            if submodule in modules:
                yield submodule
            elif node.module in modules:
                yield node.module


def find_single_importer_files(source: Source) -> list[Path]:
    """Return the files that exactly one other module imports, which stands in the same folder."""
    importers: dict[str, set[str]] = defaultdict(set)
    for module, imported in find_imports(source).items():
        for name in imported:
            importers[name].add(module)
    result = []
    for path in source.trees:
        module = module_of(path)
        if path.name != "__init__.py" and len(importers[module]) == 1:
            (importer,) = importers[module]
            if importer.rpartition(".")[0] == module.rpartition(".")[0]:
                result.append(path)
    return result


def find_cycles(source: Source) -> list[list[str]]:
    """Return the groups of modules that import one another: strongly connected components of two or more."""
    # A package's __init__ imports its modules, and they import their siblings through it: no cycle between files.
    modules = {module_of(path) for path in source.trees if path.name != "__init__.py"}
    graph = {module: found & modules for module, found in find_imports(source).items() if module in modules}
    order: list[str] = []
    seen: set[str] = set()
    for module in graph:
        _visit(module, graph, seen, order.append)
    reverse: dict[str, set[str]] = defaultdict(set)
    for module, imported in graph.items():
        for name in imported:
            reverse[name].add(module)
    seen, cycles = set(), []
    for module in reversed(order):
        members: list[str] = []
        _visit(module, reverse, seen, members.append)
        if len(members) > 1:
            cycles.append(sorted(members))
    return cycles


def _visit(module: str, graph: dict[str, set[str]], seen: set[str], finish: Callable[[str], Any]) -> None:
    """Walk depth first without recursion; ``finish`` is called when all successors are done."""
    stack = [(module, False)]
    while stack:
        name, is_done = stack.pop()
        if is_done:
            finish(name)
        elif name not in seen:
            seen.add(name)
            stack.append((name, True))
            stack.extend((other, False) for other in sorted(graph.get(name, ())) if other not in seen)


def find_single_use(source: Source) -> tuple[int, list[tuple[Path, str]]]:
    """Return the number of functions, and those that are private and referenced once in their file."""
    num_functions, single = 0, []
    for path, tree in source.trees.items():
        references: Counter[str] = Counter()
        names = []
        for node in ast.walk(tree):
            if isinstance(node, ast.Name):
                references[node.id] += 1
            elif isinstance(node, ast.Attribute):
                references[node.attr] += 1
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                names.append(node.name)
        num_functions += len(names)
        # ``_repr_html_`` (IPython), ``_missing_`` (enum) and their like are called by name from libraries.
        private = [name for name in names if name.startswith("_") and not name.endswith("_")]
        single += [(path, name) for name in private if references[name] <= 1]
    return num_functions, single


@frozen(kw_only=True)
class Share:
    """The part of one package in the figures of the whole source."""

    package: str
    num_files: int
    num_lines: int
    num_functions: int
    num_comments: int
    single_importer: tuple[str, ...]
    single_use: tuple[str, ...]

    @property
    def single_use_percent(self) -> float:
        """Private functions referenced once, in percent of the package's functions."""
        return 100 * len(self.single_use) / max(self.num_functions, 1)

    @property
    def comment_percent(self) -> float:
        """Whole-line comments, in percent of the package's lines."""
        return 100 * self.num_comments / max(self.num_lines, 1)


def package_of(path: Path) -> str:
    """Return the top-level package of ``path``; modules that stand in no package are named ``.``."""
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else "."


def measure_packages(source: Source) -> list[Share]:
    """Measure each package. The importers are those of the whole source, wherever they stand."""
    paths: dict[str, list[Path]] = defaultdict(list)
    for path in source.trees:
        paths[package_of(path)].append(path)
    alone: dict[str, list[str]] = defaultdict(list)
    for path in find_single_importer_files(source):
        alone[package_of(path)].append(str(path.relative_to(PACKAGE)))
    shares = []
    for package, own in sorted(paths.items()):
        part = Source({path: source.texts[path] for path in own}, {path: source.trees[path] for path in own})
        num_functions, once = find_single_use(part)
        shares.append(
            Share(
                package=package,
                num_files=len(own),
                num_lines=part.num_lines,
                num_functions=num_functions,
                num_comments=sum(len(_COMMENT.findall(text)) for text in part.texts.values()),
                single_importer=tuple(alone[package]),
                single_use=tuple(f"{path.relative_to(PACKAGE)}: {name}" for path, name in once),
            )
        )
    return shares


# ------------------------------------------------------------------------------------------------------ traced


class Tracer:
    """Collects the functions of the package that are entered on any thread.

    It is installed before the threads of the engine begin, because a profile function reaches only later ones.
    """

    def __init__(self) -> None:
        self._entered: set[tuple[str, str]] = set()

    def __enter__(self) -> Self:
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if is_entry(frame, event):
            self._entered.add((frame.f_code.co_filename, frame.f_code.co_qualname))

    def take(self) -> Traced:
        """Return what was entered since the last time."""
        entered, self._entered = self._entered, set()
        files = sorted({str(Path(file).relative_to(PACKAGE)) for file, _ in entered})
        return Traced(files=files, num_functions=len(entered))


def is_entry(frame: FrameType, event: str) -> bool:
    """Return whether a profile event is the entry of a function of the package."""
    code = frame.f_code
    # A coroutine that continues is a "call" as well, but at a later line. Without this, each request would seem to
    # enter the coroutine that reads its connection, which was entered when the client connected.
    return event == "call" and code.co_filename.startswith(str(PACKAGE)) and frame.f_lineno == code.co_firstlineno


@frozen(kw_only=True)
class Traced:
    """What one request entered."""

    files: list[str]
    num_functions: int


async def trace_requests() -> dict[str, Traced]:
    """Trace one chat completion and one reward, each after another of its kind, so that nothing is set up meanwhile."""
    import httpx

    from areal_actors import open_inference

    traced: dict[str, Traced] = {}
    body = {"model": "policy", "messages": [{"role": "user", "content": "Name a number."}], "max_tokens": 4}
    with Tracer() as tracer:
        async with open_inference("tiny") as inference, inference.session("shape") as session:
            headers = {"authorization": f"Bearer {session.api_key}"}
            async with httpx.AsyncClient(headers=headers, timeout=60) as client:
                chat = f"{session.base_url}/chat/completions"
                reward = f"{session.base_url.removesuffix('/v1')}/rl/set_reward"
                for name, url, document in (("completion", chat, body), ("reward", reward, {"reward": 1.0})):
                    for _ in range(2):
                        tracer.take()
                        (await client.post(url, json=document)).raise_for_status()
                    traced[name] = tracer.take()
    return traced


# ------------------------------------------------------------------------------------------------------- table


def measure(source: Source) -> list[Figure]:
    """Measure the whole source, the traced figures first."""
    traced = anyio.run(trace_requests)
    text = "\n".join(source.texts.values())
    single = find_single_importer_files(source)
    cycles = find_cycles(source)
    num_functions, once = find_single_use(source)
    share = len(once) / max(num_functions, 1)
    tests = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py"))
    vague, vague_in_tests = len(_VAGUE.findall(text)), len(_VAGUE.findall(tests))
    what = len(_WHAT.findall(text))
    comments = 100 * len(_COMMENT.findall(text)) / source.num_lines
    completion, reward = traced["completion"].files, traced["reward"].files
    return [
        Figure(name="files that one chat completion enters", value=len(completion), goal="<= 30",
               is_met=len(completion) <= 30, examples=tuple(completion)),
        Figure(name="functions that it enters", value=traced["completion"].num_functions, goal="-", is_met=True),
        Figure(name="files that one set_reward enters", value=len(reward), goal="<= 10",
               is_met=len(reward) <= 10, examples=tuple(reward)),
        Figure(name="functions that it enters (reward)", value=traced["reward"].num_functions, goal="-", is_met=True),
        Figure(name="files with one importer, in their own folder", value=len(single), goal="<= 25",
               is_met=len(single) <= 25, examples=tuple(str(path.relative_to(PACKAGE)) for path in single)),
        Figure(name="private functions referenced once, % of all", value=round(100 * share, 1), goal="<= 12",
               is_met=share <= 0.12, examples=tuple(f"{path.relative_to(PACKAGE)}: {name}" for path, name in once)),
        Figure(name="import cycles", value=len(cycles), goal="0", is_met=not cycles,
               examples=tuple(" <-> ".join(names) for names in cycles)),
        Figure(name="nobody, whoever, somebody", value=vague, goal="<= 10", is_met=vague <= 10),
        Figure(name="the same in tests", value=vague_in_tests, goal="<= 10", is_met=vague_in_tests <= 10),
        Figure(name="docstrings that begin with What", value=what, goal="<= 20", is_met=what <= 20),
        Figure(name="whole-line comments, % of lines", value=round(comments, 2), goal="2 to 6",
               is_met=2 <= comments <= 6),
    ]  # fmt: skip


def print_packages(shares: list[Share], console: Console) -> None:
    """Print one line per package, the longest package first."""
    table = Table("package", "files", "lines", "single importer", "single use", "of functions", "%", "comments %")
    for share in sorted(shares, key=lambda share: -share.num_lines):
        values = (share.num_files, share.num_lines, len(share.single_importer), len(share.single_use))
        percents = (f"{share.single_use_percent:.1f}", f"{share.comment_percent:.2f}")
        table.add_row(share.package, *map(str, values), str(share.num_functions), *percents)
    console.print(table)


@click.command()
@click.option("--examples", is_flag=True, help="List the files and functions behind each figure.")
@click.option("--package", "packages", multiple=True, help="Print these packages alone, with examples, untraced.")
@click.option("--json", "path", type=click.Path(dir_okay=False, path_type=Path), help="Where the figures are written.")
def main(*, examples: bool, packages: tuple[str, ...], path: Path | None) -> None:
    """Print the figures and their goals, and the share of each package."""
    source, console = Source.read(), Console(width=120)
    shares = measure_packages(source)
    if packages:
        shares = [share for share in shares if share.package in packages]
        print_packages(shares, console)
        for share in shares:
            print(*(f"one importer, in its own folder: {name}" for name in share.single_importer), sep="\n")
            print(*(f"private and referenced once: {name}" for name in share.single_use), sep="\n")
        return
    figures = measure(source)
    table = Table("figure", "now", "goal", "")
    for figure in figures:
        table.add_row(figure.name, f"{figure.value:g}", figure.goal, "" if figure.is_met else "missed")
    console.print(table)
    print_packages(shares, console)
    if examples:
        for figure in figures:
            for example in figure.examples:
                print(f"{figure.name}: {example}")
    if path is not None:
        document = {"figures": [asdict(figure) for figure in figures], "packages": [asdict(share) for share in shares]}
        path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
