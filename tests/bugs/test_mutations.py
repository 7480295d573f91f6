"""Mutations: each is a small edit that parses, and changes what the function does and nothing else."""

from __future__ import annotations

import ast
import inspect
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_actors.bugs.mutations import Module, apply

STRING = Module(inspect.getsource(string))
MUTATIONS = {function: STRING.mutations(function) for function in STRING.functions}


@given(data=st.data())
def test_a_mutation_changes_its_function_only(data):
    """The source still parses, and every other function is what it was."""
    function = data.draw(st.sampled_from([function for function, found in MUTATIONS.items() if found]))
    mutation = data.draw(st.sampled_from(MUTATIONS[function]))
    mutated = Module(apply(STRING.source, [mutation]))

    assert ast.dump(STRING.tree) != ast.dump(mutated.tree)
    assert function.line <= mutation.line <= function.end_line
    texts = {one.name: STRING.text(one) for one in STRING.functions}
    changed = {one.name for one in mutated.functions if mutated.text(one) != texts[one.name]}
    assert {function.name} >= changed


LINES = {
    "a < b": {"a <= b", "a > b"},
    "a <= b <= c": {"a < b <= c", "a <= b < c"},
    "a in b": {"a not in b"},
    "a not  in b": {"a in b"},
    "a is not None": {"a is None"},
    "(a) + (b)": {"(a) - (b)"},
    "a // b": {"a / b"},
    "a and b or c": {"a or b or c", "a and b and c"},
    "not a": {"a"},
    "a[1:]": {"a[2:]", "a[0:]"},
    "True": {"False"},
    "f(a, b)": {"f(b, a)"},
    "f(a, a)": set(),
    "range(a)": {"range(a - 1)"},
    "range(a, b)": {"range(a, b - 1)", "range(b, a)"},
    "len(a)": {"len(a) - 1"},
    "max(a)": {"min(a)"},
    "a.startswith(b)": {"a.endswith(b)"},
    "a if b else c": {"c if b else a"},
    "'é' + a": {"'é' - a"},
    "f'{a + b}'": set(),
    "'1 < 2'": set(),
    "a": set(),
}


@pytest.mark.parametrize(("expression", "expected"), LINES.items(), ids=LINES)
def test_expressions(expression, expected):
    """Each operator, at its place only; parts of texts are left alone."""
    module = Module(f"def f(a, b, c):\n    x = {expression}\n")
    (function,) = module.functions
    mutated = {apply(module.source, [one]).split("x = ")[1].strip() for one in module.mutations(function)}

    assert expected == mutated


STATEMENTS = {
    "return a": {"return None"},
    "return": set(),
    "f(a)": {"pass"},
    "raise a": {"pass"},
    "a += b": {"a -= b", "pass"},
    "while a: break": {"while a: continue"},
    "if a: return": {"if not (a): return", "pass"},
}


@pytest.mark.parametrize(("statement", "expected"), STATEMENTS.items(), ids=STATEMENTS)
def test_statements(statement, expected):
    """Removed, reversed, or replaced."""
    module = Module(f'def f(a, b):\n    """Say 1 < 2."""\n    {statement}\n')
    (function,) = module.functions
    mutated = {apply(module.source, [one]).split('"""\n')[1].strip() for one in module.mutations(function)}

    assert expected == mutated


def test_functions_are_those_of_the_module_and_its_classes():
    """Not those in others, nor ones that are only a docstring; lines of code are without the docstring."""
    method = '    @property\n    def c(self):\n        """Doc."""\n        def d(): pass\n        return d\n'
    source = f'def a():\n    """Doc."""\n\nclass B:\n{method}'
    (function,) = Module(source).functions

    assert ("B.c", 6, 9, (8, 9)) == (function.name, function.line, function.end_line, function.code_lines)
    assert "    def c(self):\n" == Module(source).text(function).splitlines(keepends=True)[0]
