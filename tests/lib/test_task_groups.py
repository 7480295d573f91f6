"""Tasks behind blocks: they end with the block, whose error comes out as it is."""

from __future__ import annotations

import ast
from contextlib import nullcontext
from pathlib import Path

import anyio
import pytest

import areal_actors
from areal_actors.lib.task_groups import companion_task, open_tasks

pytestmark = pytest.mark.anyio

OWN = {"kernel/system.py", "lib/task_groups.py"}
"""Modules that unwrap groups themselves."""


def raw_groups(path: Path) -> list[int]:
    """The lines at which an asynchronous context manager yields within a task group of anyio."""
    lines = []
    for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(function, ast.AsyncFunctionDef):
            continue
        if not any("asynccontextmanager" in ast.unparse(decorator) for decorator in function.decorator_list):
            continue
        for node in ast.walk(function):
            is_group = isinstance(node, ast.AsyncWith) and "create_task_group" in "".join(
                ast.unparse(item.context_expr) for item in node.items
            )
            if is_group and any(isinstance(inner, ast.Yield) for inner in ast.walk(node)):
                lines.append(node.lineno)
            if isinstance(node, ast.Call) and "enter_async_context(anyio.create_task_group" in ast.unparse(node):
                lines.append(node.lineno)
    return lines


def test_context_managers_yield_in_groups_that_unwrap():
    """A block of a caller in a task group of anyio would raise an ``ExceptionGroup`` for each error."""
    root = Path(areal_actors.__file__).parent
    found = {str(path.relative_to(root)): raw_groups(path) for path in sorted(root.rglob("*.py"))}

    assert {} == {name: lines for name, lines in found.items() if lines and name not in OWN}


async def test_open_tasks_raises_the_error_of_the_block():
    """Its tasks are cancelled."""
    was_cancelled = False

    async def wait() -> None:
        nonlocal was_cancelled
        try:
            await anyio.sleep_forever()
        finally:
            was_cancelled = True

    with pytest.raises(KeyError, match="mine"):
        async with open_tasks() as tasks:
            tasks.start_soon(wait)
            await anyio.lowlevel.checkpoint()
            raise KeyError("mine")
    assert was_cancelled


async def test_open_tasks_raises_errors_of_tasks_in_a_group():
    """The block was only cancelled, and would not show the cause."""

    async def fail() -> None:
        raise KeyError("of a task")

    with pytest.raises(ExceptionGroup) as raised:
        async with open_tasks() as tasks:
            tasks.start_soon(fail)
            await anyio.sleep_forever()
    assert raised.group_contains(KeyError)


@pytest.mark.parametrize("is_failing", [False, True], ids=["returns", "raises"])
async def test_companion_task_runs_while_the_block_lasts(is_failing):
    """The block ends as it would without the companion."""
    started, cancelled = anyio.Event(), anyio.Event()

    async def wait() -> None:
        started.set()
        try:
            await anyio.sleep_forever()
        finally:
            cancelled.set()

    with anyio.fail_after(10):
        with pytest.raises(KeyError, match="mine") if is_failing else nullcontext():
            async with companion_task(wait):
                await started.wait()
                assert not cancelled.is_set()
                if is_failing:
                    raise KeyError("mine")
        await cancelled.wait()
