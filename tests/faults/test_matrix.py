"""The tables of faults are whole, name tests that exist, and are what the documentation shows."""

from __future__ import annotations

import ast

from tests.faults.page import (
    FAULTS,
    KINDS,
    NAMING,
    PAGE,
    PROCESS_FAULTS,
    ROLES,
    ROOT,
    format_page,
    load_cells,
    load_seconds,
)


def test_each_role_has_each_fault_once():
    """In the order of the page, each cell of a known kind."""
    cells = load_cells()
    expected = [(table, fault, role) for table in ROLES for fault in FAULTS[table] for role in ROLES[table]]

    assert expected == [(cell.table, cell.fault, cell.role) for cell in cells]
    assert {cell.kind for cell in cells} <= KINDS.keys()


def test_each_cell_names_a_test_that_exists():
    """The file has a function of this name, and the parameter in brackets is a word of the file."""
    missing = []
    for name in sorted({cell.text for cell in load_cells() if cell.kind in NAMING}):
        path, _, function = name.partition("::")
        function, _, parameter = function.removesuffix("]").partition("[")
        tree = ast.parse((ROOT / path).read_text("utf-8")) if (ROOT / path).exists() else ast.Module([], [])
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        words = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)} | functions
        if function not in functions or (parameter and parameter not in words):
            missing.append(name)

    assert [] == missing


def test_only_faults_of_the_table_were_measured():
    """By the names of ``tests/schedulers/slurm_local/faults.py``."""
    assert {fault for fault, _ in load_seconds()} <= set(PROCESS_FAULTS.values())


def test_the_page_is_what_the_table_gives():
    """``python -m tests.faults`` writes it."""
    assert format_page(load_cells(), load_seconds()) == PAGE.read_text(encoding="utf-8")
