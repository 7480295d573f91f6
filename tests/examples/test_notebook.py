"""The example notebook: every cell runs in one event loop, in its order, and what it shows is a table."""

from __future__ import annotations

import ast
import inspect
import json
from pathlib import Path
from typing import Any

import anyio
import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"


async def run_cell(source: str, names: dict[str, Any]) -> Any:
    """Run a cell in a task of its own, as Jupyter does, and return the value of its last expression."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    for part, mode in ((tree, "exec"), (ast.Expression(last.value) if last else None, "eval")):
        if part is None:
            continue
        code = compile(part, str(NOTEBOOK), mode, flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        found = eval(code, names)
        if inspect.iscoroutine(found):
            found = await found
    return found if last else None


def test_every_cell_of_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """From the first to the last; contexts are left by another task than the one that entered them."""
    monkeypatch.chdir(tmp_path)
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    names: dict[str, Any] = {"__name__": "__main__"}
    shown = []

    async def main() -> None:
        for cell in cells:
            async with anyio.create_task_group() as tasks:

                async def one(source: str) -> None:
                    shown.append(await run_cell(source, names))

                tasks.start_soon(one, "".join(cell["source"]))

    anyio.run(main)

    assert str(shown[0]).startswith("http://127.0.0.1:")
    tables = [value._repr_html_() for value in shown if hasattr(value, "_repr_html_")]
    assert 5 == len(tables)
    assert "reward" in tables[0]
    assert "input_ids" in tables[1]
    assert names["summary"].reward_last > names["summary"].reward_first + 0.2
    assert "<td>running</td>" in tables[3] or names["run"].is_over
    assert "interrupted by its program" in names["run"]._repr_html_()
    assert all(cell["outputs"] == [] for cell in cells)
