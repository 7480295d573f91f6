"""Grammars in the Lark dialect of llguidance, as text. Pure; who compiles it is ``engines/torch/constraint``.

The library's lexer takes each *terminal* to be as long as possible, and never thinks better of it. Free text would
swallow the beginning of the tag that ends it, so a text and what follows it literally are one terminal. What is
optional is never part of one: where it is left out, something that begins alike may follow. That becomes rules, as JSON
does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby

from attrs import define, field

from areal_actors.domain import Exactly, FreeText, Grammar, InOrder, JsonText, MatchingRegex, OneOf, Repeated
from areal_actors.errors import InvalidRequest

__all__ = ["format_lark"]

WHITE_SPACE = r"[ ]|\n[ ]{0,32}"
"""What may stand between the tokens of JSON: nothing, a space, or a new line and its indentation.

JSON allows more, without bound, and a weak model under a grammar finds no end of it.
"""

_ANYTHING = "/(?s:.*)/"


def format_lark(grammar: Grammar, *, tokens: Mapping[str, int]) -> str:
    """``grammar`` as a Lark text whose rule is ``start``.

    ``tokens`` are the texts and ids of added tokens (``<tool_call>``); where such a text must be written, the token is.

    Raises ``InvalidRequest`` for a schema that is no JSON, or is nested too deeply.
    """
    try:
        text = _Translation(tokens=tokens).translate(grammar)
        text.encode()  # half a character that a client escaped would be found too late
    except (RecursionError, ValueError, TypeError) as error:
        raise InvalidRequest(f"The form that the answer must have cannot be written down: {error}.") from error
    return text


@define(kw_only=True)
class _Translation:
    """One grammar on its way; ``_terminals`` are names by definition."""

    tokens: Mapping[str, int]
    _terminals: dict[str, str] = field(factory=dict, init=False)
    _markers: re.Pattern[str] | None = field(init=False)

    def __attrs_post_init__(self) -> None:
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
                return " ".join(self._write(text))
            case FreeText() | MatchingRegex():
                return self._name((grammar,))
            case JsonText():
                return f"%json {_format_schema(grammar)}"
            case InOrder(parts=parts):
                return " ".join(self._sequence(self._flatten(parts))) or '""'
            case OneOf(parts=parts):
                return f"({' | '.join(map(self._rule, parts))})"
            case Repeated():
                return _repeat(grammar, self._rule(grammar.part), self._rule(Exactly(text=grammar.separator)))

    def _sequence(self, parts: Iterable[Grammar]) -> Iterator[str]:
        """Neighbouring texts are one terminal where they are not all literal."""
        for is_text, run in groupby(parts, key=self._is_text):
            group = tuple(run)
            if is_text and not all(isinstance(part, Exactly) for part in group):
                yield self._name(group)
            else:
                yield from map(self._rule, group)

    def _is_text(self, part: Grammar) -> bool:
        """Whether it is made of bytes alone, neither of rules nor of added tokens."""
        return isinstance(part, FreeText | MatchingRegex) or (
            isinstance(part, Exactly) and part.text not in self.tokens
        )

    def _flatten(self, parts: Sequence[Grammar]) -> Iterator[Grammar]:
        """The parts of parts, texts cut at the added tokens: what is left of them goes with its neighbours."""
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

    def _write(self, text: str) -> Iterator[str]:
        if not text:
            yield '""'
        for piece in self._cut(text):
            yield f"<[{self.tokens[piece]}]>" if piece in self.tokens else _quote(piece)

    def _name(self, texts: Iterable[Grammar]) -> str:
        """The name of the terminal for these texts, one after another."""
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
            return _format_free_text(excluding)
        case _:
            raise TypeError(f"{type(part).__name__} is no text")


def _format_free_text(excluding: Sequence[str]) -> str:
    without = [f"~/(?s:.*){_escape(_literally(text))}(?s:.*)/" for text in excluding]
    return f"({' & '.join((_ANYTHING, *without))})" if without else _ANYTHING


def _format_schema(json_text: JsonText) -> str:
    """The schema, its own options for the library replaced by ours."""
    options = {"whitespace_pattern": WHITE_SPACE, "lenient": not json_text.is_strict}
    return json.dumps({**json_text.schema, "x-guidance": options}, allow_nan=False, ensure_ascii=False)


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _literally(text: str) -> str:
    """A regular expression for ``text``, in words that Rust's expressions share with Python's."""
    return re.sub(r"[^0-9A-Za-z\u0080-\U0010ffff]", lambda match: f"\\x{{{ord(match[0]):x}}}", text)


def _escape(pattern: str) -> str:
    """``pattern`` between slashes: what would end it is escaped, unless it is already."""
    return re.sub(r"\\.|[/\n\r]", lambda match: _ESCAPES.get(match[0], match[0]), pattern, flags=re.DOTALL)


_ESCAPES = {"/": r"\/", "\n": r"\n", "\r": r"\r", "\\\n": r"\n", "\\\r": r"\r"}
