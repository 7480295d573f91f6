"""Translate grammars into the Lark dialect of llguidance, as text. Pure; ``generation/torch/constraint`` compiles it.

llguidance's lexer makes each *terminal* as long as possible and never backtracks. Free text would consume the beginning
of the tag that ends it, so a text and the literal that follows it form one terminal. Optional parts are never part of a
terminal, because something with the same beginning may follow when they are left out; they become rules, as JSON does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby

from attrs import define, field

from areal_actors.domain import Exactly, FreeText, Grammar, InOrder, JsonText, MatchingRegex, OneOf, Repeated
from areal_actors.errors import InvalidRequest

WHITE_SPACE = r"[ ]|\n[ ]{0,32}"
"""White space allowed between the tokens of JSON: nothing, a space, or a new line and its indentation.

JSON allows more, without bound, and a weak model under a grammar may generate white space without end.
"""

_ANYTHING = "/(?s:.*)/"


def format_lark(grammar: Grammar, *, tokens: Mapping[str, int]) -> str:
    """Return ``grammar`` as Lark text with the rule ``start``.

    ``tokens`` maps the texts of added tokens (``<tool_call>``) to their ids; where the grammar requires such a text,
    the token itself is required.

    Raises ``InvalidRequest`` for a schema that is not valid JSON, or is nested too deeply.
    """
    try:
        text = _Translation(tokens=tokens).translate(grammar)
        # Fail here, not later, on a lone surrogate that a client escaped.
        text.encode()
    except (RecursionError, ValueError, TypeError) as error:
        raise InvalidRequest(f"The form that the answer must have cannot be written down: {error}.") from error
    return text


@define(kw_only=True)
class _Translation:
    """A grammar during its translation; ``_terminals`` maps definitions to names."""

    tokens: Mapping[str, int]
    _terminals: dict[str, str] = field(factory=dict, init=False)
    _markers: re.Pattern[str] | None = field(init=False)

    def __attrs_post_init__(self) -> None:
        # Longest first: the alternatives of a regular expression are tried in order.
        texts = sorted(self.tokens, key=len, reverse=True)
        self._markers = re.compile(f"({'|'.join(map(re.escape, texts))})") if texts else None

    def translate(self, grammar: Grammar) -> str:
        start = self._rule(grammar)
        terminals = (f"{name}: {definition}" for definition, name in self._terminals.items())
        return "\n".join((f"start: {start}", *terminals, ""))

    # ---------------------------------------------------------------------------------------------- rules

    def _rule(self, grammar: Grammar) -> str:
        match grammar:
            case Exactly(text=text):
                pieces = (
                    f"<[{self.tokens[piece]}]>" if piece in self.tokens else _quote(piece) for piece in self._cut(text)
                )
                return " ".join(pieces) or '""'
            case FreeText() | MatchingRegex():
                return self._name((grammar,))
            case JsonText():
                # Our options for llguidance replace those that a client sent.
                options = {"whitespace_pattern": WHITE_SPACE, "lenient": not grammar.is_strict}
                schema = {**grammar.schema, "x-guidance": options}
                return f"%json {json.dumps(schema, allow_nan=False, ensure_ascii=False)}"
            case InOrder(parts=parts):
                texts: list[str] = []
                # Adjacent texts become one terminal, unless all of them are literals.
                for is_text, run in groupby(self._flatten(parts), key=self._is_text):
                    group = tuple(run)
                    if is_text and not all(isinstance(part, Exactly) for part in group):
                        texts.append(self._name(group))
                    else:
                        texts += map(self._rule, group)
                return " ".join(texts) or '""'
            case OneOf(parts=parts):
                return f"({' | '.join(map(self._rule, parts))})"
            case Repeated():
                return _repeat(grammar, self._rule(grammar.part), self._rule(Exactly(text=grammar.separator)))

    def _is_text(self, part: Grammar) -> bool:
        """Return whether ``part`` consists of bytes only, without rules or added tokens."""
        return isinstance(part, FreeText | MatchingRegex) or (
            isinstance(part, Exactly) and part.text not in self.tokens
        )

    def _flatten(self, parts: Sequence[Grammar]) -> Iterator[Grammar]:
        """Yield the parts of nested sequences, with literals split at added tokens.

        The remaining pieces of a literal can then be joined with their neighbours.
        """
        for part in parts:
            match part:
                case InOrder(parts=inner):
                    yield from self._flatten(inner)
                case Exactly(text=text):
                    yield from (Exactly(text=piece) for piece in self._cut(text))
                case _:
                    yield part

    def _cut(self, text: str) -> Iterator[str]:
        return filter(None, self._markers.split(text) if self._markers else [text])

    def _name(self, texts: Iterable[Grammar]) -> str:
        """Return the name of the terminal for these texts in sequence."""
        definition = " ".join(map(_format_text, texts))
        return self._terminals.setdefault(definition, f"T{len(self._terminals)}")


def _repeat(repeated: Repeated, part: str, separator: str) -> str:
    low, high = repeated.at_least, repeated.at_most
    if high == 0:
        return '""'
    rest = f"({separator} {part})" if repeated.separator else f"({part})"
    more = f"{{{max(low - 1, 0)},{'' if high is None else high - 1}}}"
    once = f"({part})" if high == 1 else f"({part} {rest}{more})"
    return once if low else f"{once}?"


def _format_text(part: Grammar) -> str:
    match part:
        case Exactly(text=text):
            return _quote(text)
        case MatchingRegex(pattern=pattern):
            return f"/{_escape(pattern)}/"
        case FreeText(excluding=excluding):
            # Hexadecimal escapes, because this syntax is the same in Rust's regular expressions and in Python's.
            special = r"[^0-9A-Za-z\u0080-\U0010ffff]"
            literals = [re.sub(special, lambda match: f"\\x{{{ord(match[0]):x}}}", text) for text in excluding]
            without = [f"~/(?s:.*){_escape(literal)}(?s:.*)/" for literal in literals]
            return f"({' & '.join((_ANYTHING, *without))})" if without else _ANYTHING
        case _:
            raise TypeError(f"{type(part).__name__} is not text")


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _escape(pattern: str) -> str:
    """Return ``pattern`` for use between slashes: characters that would end it are escaped, unless they already are."""
    return re.sub(r"\\.|[/\n\r]", lambda match: _ESCAPES.get(match[0], match[0]), pattern, flags=re.DOTALL)


_ESCAPES = {"/": r"\/", "\n": r"\n", "\r": r"\r", "\\\n": r"\n", "\\\r": r"\r"}
