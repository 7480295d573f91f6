"""The tree of errors: every class is documented in it and raised somewhere."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import areal_actors
from areal_actors import errors

CLASSES = {
    name
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, errors.ArealError) and value.__module__ == errors.__name__
}


def test_errors_are_in_the_tree():
    """The tree is what people read."""
    assert [] == [name for name in sorted(CLASSES) if not re.search(rf"\b{name}\b", str(errors.__doc__))]


def test_errors_are_raised():
    """A class that nothing creates is either left over, or misses its place."""
    created: set[str] = set()
    for path in Path(areal_actors.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                # Also where the class itself is passed on, as to what raises it.
                named = [node.func, *node.args, *(keyword.value for keyword in node.keywords)]
                created |= {one.id for one in named if isinstance(one, ast.Name)}
                created |= {node.func.attr} if isinstance(node.func, ast.Attribute) else set()

    assert set() == CLASSES - created
