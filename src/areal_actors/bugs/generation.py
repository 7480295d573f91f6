"""Generation of bugs: mutate a function, keep the mutant if some tests fail and others pass.

Mutants run in boxes, several at a time. Which mutants are tried, and in which order, depends on the seed only, and they
are kept in that order, so that equal settings and packages give equal bugs.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import anyio
from attrs import define, field, frozen
from attrs.validators import ge, gt

from areal_actors.bugs import runner
from areal_actors.bugs.mutations import Function, Module, Mutation, apply
from areal_actors.bugs.sources import TestedModule
from areal_actors.errors import SandboxError, SandboxLimit
from areal_actors.sandbox import BoxRequest, Sandbox, SandboxConfig, create_sandbox

__all__ = ["Bug", "BugConfig", "Counts", "open_bugs"]

PROGRAM = Path(runner.__file__)
_FLAGS = ("-s", "-P", "-B")
_MAX_TESTS = 400
"""Tests of a module that have to go on passing."""


@frozen(kw_only=True)
class BugConfig:
    """Settings of the generation."""

    seed: int = 0
    num_mutations: int = field(default=1, validator=ge(1))
    """Mutations of one function that are one bug."""
    max_lines: int = field(default=40, validator=ge(2))
    """Lines of the longest function."""
    min_code_lines: int = field(default=1, validator=ge(1))
    """Lines of the shortest function in which statements begin, without its docstring."""
    max_per_function: int = field(default=2, validator=ge(1))
    is_one_line: bool = False
    """Whether the bug is in one line, from which the original can be guessed: nothing is removed."""
    test_seconds: float = field(default=5.0, validator=gt(0))
    """Time limit of one test; a mutant's loop may not end."""
    module_seconds: float = field(default=20.0, validator=gt(0))
    """Modules whose tests take longer are left out."""
    num_workers: int = field(default=2, validator=ge(1))
    """Mutants that are tested at the same time."""


@frozen(kw_only=True)
class Bug:
    """A mutated function, with the tests that fail and those that pass."""

    module: TestedModule
    function: str
    original: str = field(repr=False)
    """The source of the module."""
    source: str = field(repr=False)
    """The same with the bug."""
    lines: tuple[int, ...]
    """The lines of the bug, in its source."""
    kinds: tuple[str, ...]
    failing: tuple[str, ...]
    passing: tuple[str, ...]
    output: str
    """The failure of the first failing test."""
    seconds: float
    """Time limit of one test."""


@define
class Counts:
    """Numbers of mutants by outcome."""

    qualified: int = 0
    survived: int = 0
    """No test noticed."""
    broke_all: int = 0
    """No test passed, or the module could not be imported."""
    tests_run: int = 0
    skipped_modules: int = 0

    @property
    def tried(self) -> int:
        """The number of mutants."""
        return self.qualified + self.survived + self.broke_all


@asynccontextmanager
async def open_bugs(
    modules: Sequence[TestedModule], config: BugConfig, sandbox: SandboxConfig, *, counts: Counts | None = None
) -> AsyncIterator[AsyncIterator[Bug]]:
    """Yield an iterator over the bugs of the modules in turn, which ends when none of them has more.

    ``counts`` is changed while it goes on. Raises ``SandboxError`` if no box can be opened.
    """
    counts = Counts() if counts is None else counts
    backend = create_sandbox(sandbox.backend)
    async with AsyncExitStack() as stack:

        async def open_box() -> Sandbox:
            box = await stack.enter_async_context(backend.open(BoxRequest(config=sandbox)))
            await box.copy_in(PROGRAM, ".")
            return box

        boxes = _Boxes(opened=[await open_box() for _ in range(config.num_workers)], open_box=open_box)
        order = sorted(modules, key=lambda one: one.name)
        random.Random(config.seed).shuffle(order)  # noqa: S311 - not for secrets
        searches = [_Search(module, config, boxes, counts).bugs() for module in order]
        for search in searches:
            stack.push_async_callback(search.aclose)
        yield await stack.enter_async_context(aclosing(_take_turns(searches)))


async def _take_turns(waiting: Sequence[AsyncIterator[Bug]]) -> AsyncGenerator[Bug, None]:
    """Yield one bug of each module, then another, so that a few are not all of one module."""
    while waiting:
        remaining = []
        for bugs in waiting:
            bug = await anext(bugs, None)
            if bug is not None:
                remaining.append(bugs)
                yield bug
        waiting = remaining


@define
class _Boxes:
    """The boxes in which mutants run."""

    opened: list[Sandbox]
    open_box: Callable[[], Awaitable[Sandbox]]
    ended: set[int] = field(factory=set)
    """The numbers of boxes that ended, because a mutant exceeded a limit of the sandbox."""

    async def replace_ended(self) -> None:
        """Open others. To be called by the task that opened the boxes, which closes them, too."""
        # A box has a task group, which has to be left by the task that entered it: not by the one that tests a mutant.
        for number in sorted(self.ended):
            self.opened[number] = await self.open_box()
        self.ended.clear()


class _Search:
    """The search for bugs in one module."""

    def __init__(self, module: TestedModule, config: BugConfig, boxes: _Boxes, counts: Counts) -> None:
        self._module = module
        self._config = config
        self._boxes = boxes
        self._counts = counts
        self._tests: tuple[str, ...] = ()
        """The tests that pass without a bug, twice."""
        self._calls: dict[str, frozenset[int]] = {}
        """The first lines of the functions that each test calls."""

    async def bugs(self) -> AsyncGenerator[Bug, None]:
        """Yield the bugs that are found."""
        try:
            parsed = Module(self._module.source)
        except (SyntaxError, ValueError, OSError):
            self._counts.skipped_modules += 1
            return
        # All tests run twice without a bug: a flaky one would make every mutant look like a bug.
        with anyio.move_on_after(self._config.module_seconds):
            first = await self._run(0, parsed.source, covers=True)
            names = tuple(name for name, result in first.items() if result["failure"] is None)
            second = await self._run(0, parsed.source, only=names) if names else {}
            passing = [name for name in names if name in second and second[name]["failure"] is None]
            self._tests = tuple(passing[:_MAX_TESTS])
            self._calls = {name: frozenset(first[name]["calls"]) for name in self._tests}
        await self._boxes.replace_ended()
        if len(self._tests) < 2:  # noqa: PLR2004 - one that fails, and one that passes
            self._counts.skipped_modules += 1
            return
        candidates = self._candidates(parsed)
        found: Counter[str] = Counter()
        while batch := list(islice(candidates, len(self._boxes.opened))):
            results: dict[int, Bug] = {}
            async with anyio.create_task_group() as tasks:
                for number, (function, chosen) in enumerate(batch):
                    if found[function.name] < self._config.max_per_function:
                        tasks.start_soon(self._try, number, parsed, function, chosen, results)
            await self._boxes.replace_ended()
            # In the order of the batch, whichever mutant was tested first.
            for number, (function, _) in enumerate(batch):
                bug = results.get(number)
                if bug is not None and found[function.name] < self._config.max_per_function:
                    found[function.name] += 1
                    yield bug

    def _covering(self, function: Function) -> tuple[str, ...]:
        # Code objects know the line of the first decorator.
        first = min([function.line, *(one.lineno for one in function.node.decorator_list)])
        return tuple(name for name in self._tests if first in self._calls[name])

    def _candidates(self, parsed: Module) -> Iterator[tuple[Function, tuple[Mutation, ...]]]:
        """Yield functions with the mutations to try, in the order of the seed: one of each function, then another."""
        draw = random.Random(f"{self._config.seed} {self._module.name}")  # noqa: S311 - not for secrets
        pools = []
        for function in parsed.functions:
            is_long_enough = len(function.code_lines) >= self._config.min_code_lines
            is_short_enough = function.end_line - function.line < self._config.max_lines
            if is_long_enough and is_short_enough and self._covering(function):
                mutations = list(parsed.mutations(function))
                if self._config.is_one_line:
                    within = [one for one in mutations if "\n" not in parsed.source[one.start : one.end]]
                    mutations = [one for one in within if one.kind != "removal"]
                draw.shuffle(mutations)
                pools.append((function, mutations))
        draw.shuffle(pools)
        while pools:
            for function, mutations in pools:
                # One mutation, with others in other lines; none if there are too few.
                chosen = [mutations.pop()] if mutations else []
                for one in reversed(mutations):
                    is_apart = all(one.end < other.start or other.end < one.start for other in chosen)
                    is_apart = is_apart and all(one.line != other.line for other in chosen)
                    if is_apart and len(chosen) < self._config.num_mutations:
                        chosen.append(one)
                if len(chosen) == self._config.num_mutations:
                    yield function, tuple(chosen)
            pools = [pool for pool in pools if pool[1]]

    async def _try(
        self, box: int, parsed: Module, function: Function, chosen: tuple[Mutation, ...], bugs: dict[int, Bug]
    ) -> None:
        """Test a mutant, and add it to ``bugs`` by the number of its box if some tests fail and others pass."""
        source = apply(parsed.source, chosen)
        results = await self._run(box, source, only=self._covering(function))
        if results and all(result["failure"] is None for result in results.values()):
            self._counts.survived += 1
            return
        # Tests that do not call the function depend on it all the same, if the module calls it when it is imported.
        others = tuple(name for name in self._tests if name not in results)
        results |= await self._run(box, source, only=others) if results and others else {}
        passing = tuple(name for name in self._tests if name in results and results[name]["failure"] is None)
        failing = tuple(name for name in self._tests if name not in passing)
        if not passing:
            self._counts.broke_all += 1
            return
        # Each of several mutations has to be a bug alone, so that all of them have to be repaired.
        for one in chosen if len(chosen) > 1 else ():
            alone = await self._run(box, apply(parsed.source, [one]), only=self._covering(function))
            if all(result["failure"] is None for result in alone.values()):
                self._counts.survived += 1
                return
        self._counts.qualified += 1
        ordered = sorted(chosen, key=lambda one: one.start)
        text = next((results[name]["failure"] for name in failing if name in results), "")
        bugs[box] = Bug(
            module=self._module,
            function=function.name,
            original=parsed.source,
            source=source,
            lines=tuple(one.line for one in ordered),
            kinds=tuple(one.kind for one in ordered),
            failing=failing,
            passing=passing,
            output=text,
            seconds=self._config.test_seconds,
        )

    async def _run(self, box: int, source: str, *, only: tuple[str, ...] = (), covers: bool = False) -> dict[str, Any]:
        """Run tests on a source; return no results if it cannot be imported, or ends the process."""
        request = {
            "module": self._module.name,
            "file": f"/app/{self._module.path}",
            "tests": list(self._module.tests),
            "seconds": self._config.test_seconds,
            "source": source,
            "only": list(only),
            "covers": covers,
            "stops_at_hang": True,
        }
        self._counts.tests_run += len(only)
        opened = self._boxes.opened[box]
        try:
            ended = await opened.run(
                [sys.executable, *_FLAGS, f"{opened.work_directory}/{PROGRAM.name}", "run"],
                environment={"PYTHONHASHSEED": "0"},
                stdin=json.dumps(request).encode(),
                timeout_seconds=self._config.module_seconds,
            )
            results: dict[str, Any] = json.loads(ended.stdout).get("results", {})
        except SandboxError as error:
            if not (isinstance(error, SandboxLimit) and error.limit == "timeout_seconds"):
                self._boxes.ended.add(box)
            return {}
        except ValueError:
            return {}
        return results
