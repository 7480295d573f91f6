"""Mutations: small edits of a function's source that are likely to be bugs.

Edits replace spans of the text, so that comments and layout stay as they are. The operators are those of mutation
testing (mutmut, cosmic-ray) and of SWE-smith's procedural bugs: operators, comparisons, constants, arguments, branches.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import chain, pairwise
from typing import Any

from attrs import field, frozen

__all__ = ["Function", "Module", "Mutation", "apply"]


@frozen(kw_only=True)
class Mutation:
    """The replacement of the characters from ``start`` to ``end`` of a source."""

    start: int
    end: int
    replacement: str
    kind: str
    line: int
    """The number of its first line."""


@frozen(kw_only=True)
class Function:
    """A function or method with at least one statement besides its docstring."""

    name: str
    """Its qualified name."""
    line: int
    """The line of its ``def``, below its decorators."""
    end_line: int
    node: ast.FunctionDef = field(repr=False, eq=False)

    @property
    def code_lines(self) -> tuple[int, ...]:
        """The lines in which statements begin, without its docstring."""
        inner = (node for one in _without_docstring(self.node) for node in ast.walk(one))
        return tuple(sorted({node.lineno for node in inner if isinstance(node, ast.stmt)}))


# Edits of our own: mutmut and cosmic-ray rewrite whole packages for one process of pytest, and a single edit with its
# span is smaller than either.
_COMPARISONS: dict[type[ast.cmpop], tuple[str, tuple[str, ...]]] = {
    ast.Lt: ("<", ("<=", ">")),
    ast.LtE: ("<=", ("<",)),
    ast.Gt: (">", (">=", "<")),
    ast.GtE: (">=", (">",)),
    ast.Eq: ("==", ("!=",)),
    ast.NotEq: ("!=", ("==",)),
    ast.In: ("in", ("not in",)),
    ast.NotIn: (r"not\s+in", ("in",)),
    ast.Is: ("is", ("is not",)),
    ast.IsNot: (r"is\s+not", ("is",)),
}
_OPERATORS: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "/"),
    ast.Mod: ("%", "//"),
    ast.Pow: ("**", "*"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
    ast.BitXor: ("^", "&"),
}
_PAIRS = (
    *(("min", "max"), ("any", "all"), ("startswith", "endswith"), ("lstrip", "rstrip"), ("find", "rfind")),
    *(("upper", "lower"), ("split", "rsplit"), ("ljust", "rjust"), ("append", "extend"), ("partition", "rpartition")),
)
_SWAPPED_NAMES = {name: other for pair in _PAIRS for name, other in (pair, pair[::-1])}
_AROUND = r"[\s()\\]*"
"""What may stand between an operator and its operands. Not comments, which could contain the operator."""


class Module:
    """The source of a module, and the mutations of its functions."""

    def __init__(self, source: str) -> None:
        """Parse the source. Raises ``SyntaxError``."""
        self.source = source
        self.tree = ast.parse(source)
        self._lines = source.splitlines(keepends=True)

    @cached_property
    def functions(self) -> tuple[Function, ...]:
        """The functions and methods at the top level of the module and of its classes, in the order of the source."""
        return tuple(self._find_functions(self.tree.body, ""))

    def text(self, function: Function) -> str:
        """Return the source of a function, from its ``def`` on."""
        return "".join(self._lines[function.line - 1 : function.end_line])

    def mutations(self, function: Function) -> tuple[Mutation, ...]:
        """Return the mutations of a function that change its syntax tree, in the order of the source."""
        found = {}
        mutators = (self._mutate_operator, self._mutate_expression, self._mutate_statement)
        for node in _walk(_without_docstring(function.node)):
            for mutation in chain.from_iterable(mutate(node) for mutate in mutators):
                found[mutation.start, mutation.end, mutation.replacement] = mutation
        first, text = self._offset(function.line, 0), self.text(function)
        before = _dump(text)
        # Of the function alone: to parse the module for each mutation took 4 s for one of 2,700 lines.
        return tuple(
            one
            for _, one in sorted(found.items())
            if _dump(text[: one.start - first] + one.replacement + text[one.end - first :]) not in (None, before)
        )

    def _find_functions(self, body: list[ast.stmt], prefix: str) -> Iterator[Function]:
        for node in body:
            if isinstance(node, ast.ClassDef):
                yield from self._find_functions(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.FunctionDef) and _without_docstring(node):
                name, end = f"{prefix}{node.name}", node.end_lineno or node.lineno
                yield Function(name=name, line=node.lineno, end_line=end, node=node)

    # ------------------------------------------------------------------------------------------- positions

    def _offset(self, line: int, column: int) -> int:
        """Return the index in the text; columns count bytes of UTF-8."""
        before = self._lines[line - 1].encode()[:column].decode()
        return sum(map(len, self._lines[: line - 1])) + len(before)

    def _span(self, node: Any) -> tuple[int, int]:
        return self._offset(node.lineno, node.col_offset), self._offset(node.end_lineno, node.end_col_offset)

    def _replace(self, node: Any, text: str, kind: str) -> Mutation:
        start, end = self._span(node)
        return Mutation(start=start, end=end, replacement=text, kind=kind, line=node.lineno)

    def _text(self, node: Any) -> str:
        start, end = self._span(node)
        return self.source[start:end]

    def _between(self, left: Any, right: Any, pattern: str, texts: Iterable[str], kind: str) -> Iterator[Mutation]:
        """Yield replacements of the operator between two operands."""
        start, end = self._span(left)[1], self._span(right)[0]
        found = re.fullmatch(rf"{_AROUND}({pattern}){_AROUND}", self.source[start:end])
        if found is None:
            return
        begin = start + found.start(1)
        line = self.source.count("\n", 0, begin) + 1
        for text in texts:
            yield Mutation(start=begin, end=start + found.end(1), replacement=text, kind=kind, line=line)

    # -------------------------------------------------------------------------------------------- operators

    def _mutate_operator(self, node: ast.AST) -> Iterator[Mutation]:
        match node:
            case ast.Compare():
                for (left, right), kind in zip(pairwise([node.left, *node.comparators]), node.ops, strict=True):
                    pattern, texts = _COMPARISONS[type(kind)]
                    yield from self._between(left, right, pattern, texts, "comparison")
            case ast.BoolOp():
                word, other = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
                for left, right in pairwise(node.values):
                    yield from self._between(left, right, word, [other], "boolean")
            case ast.BinOp() if type(node.op) in _OPERATORS:
                operator, text = _OPERATORS[type(node.op)]
                yield from self._between(node.left, node.right, re.escape(operator), [text], "operator")

    def _mutate_expression(self, node: ast.AST) -> Iterator[Mutation]:
        match node:
            case ast.UnaryOp(op=ast.Not() | ast.USub()):
                yield self._replace(node, self._text(node.operand), "negation")
            case ast.Constant(value=bool()):
                yield self._replace(node, str(not node.value), "constant")
            case ast.Constant(value=int(number)) if re.fullmatch(r"\d+", self._text(node)):
                for other in (number + 1, number - 1)[: 2 if number else 1]:
                    yield self._replace(node, str(other), "constant")
            case ast.IfExp():
                text = f"{self._text(node.orelse)} if {self._text(node.test)} else {self._text(node.body)}"
                yield self._replace(node, text, "branch")
            case ast.Call():
                yield from self._mutate_call(node)

    def _mutate_call(self, node: ast.Call) -> Iterator[Mutation]:
        name = node.func
        word = name.id if isinstance(name, ast.Name) else name.attr if isinstance(name, ast.Attribute) else ""
        if word in _SWAPPED_NAMES:
            whole = self._text(name)
            yield self._replace(name, whole[: -len(word)] + _SWAPPED_NAMES[word], "name")
        if word == "range" and node.args:
            stop = node.args[min(len(node.args), 2) - 1]
            yield self._replace(stop, f"{self._text(stop)} - 1", "off by one")
        if word == "len":
            yield self._replace(node, f"{self._text(node)} - 1", "off by one")
        plain = [one for one in node.args if not isinstance(one, ast.Starred | ast.GeneratorExp)]
        if len(plain) == len(node.args):
            for left, right in pairwise(plain):
                (start, middle), (begin, end) = self._span(left), self._span(right)
                text = self._text(right) + self.source[middle:begin] + self._text(left)
                yield Mutation(start=start, end=end, replacement=text, kind="arguments", line=left.lineno)

    def _mutate_statement(self, node: ast.AST) -> Iterator[Mutation]:
        match node:
            case ast.AugAssign() if type(node.op) in _OPERATORS:
                operator, text = _OPERATORS[type(node.op)]
                pattern = re.escape(operator) + "="
                yield from self._between(node.target, node.value, pattern, [f"{text}="], "operator")
                yield self._replace(node, "pass", "removal")
            case ast.If():
                test = self._text(node.test)
                yield self._replace(node.test, f"not ({test})", "branch")
                # One that is an elif begins with that word, and cannot be replaced.
                if not node.orelse and self._text(node).startswith("if"):
                    yield self._replace(node, "pass", "removal")
            case ast.Return(value=ast.expr()):
                yield self._replace(node, "return None", "removal")
            case ast.Break():
                yield self._replace(node, "continue", "loop")
            case ast.Continue():
                yield self._replace(node, "break", "loop")
            case ast.Expr(value=ast.Call()) | ast.Raise():
                yield self._replace(node, "pass", "removal")


def apply(source: str, mutations: Iterable[Mutation]) -> str:
    """Return the source with mutations that do not overlap."""
    # From the end, so that the spans that come before keep their places.
    for mutation in sorted(mutations, key=lambda one: one.start, reverse=True):
        source = source[: mutation.start] + mutation.replacement + source[mutation.end :]
    return source


def _dump(text: str) -> str | None:
    """Return the syntax tree of a function as text; ``None`` for invalid syntax."""
    try:
        return ast.dump(ast.parse(f"if True:\n{text}" if text[0].isspace() else text))
    except (SyntaxError, ValueError, RecursionError):
        return None


def _without_docstring(node: ast.FunctionDef) -> list[ast.stmt]:
    is_documented = isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Constant)
    return node.body[1:] if is_documented else node.body


def _walk(statements: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yield nodes and their descendants, except parts of f-strings, whose positions Python 3.11 does not know."""
    for node in statements:
        if isinstance(node, ast.JoinedStr | ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            continue
        yield node
        yield from _walk(ast.iter_child_nodes(node))
