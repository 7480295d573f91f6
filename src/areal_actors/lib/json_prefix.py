"""Validation of a JSON object that arrives in pieces: how much of it can be passed on while the rest is missing."""

from __future__ import annotations

import re

import orjson

__all__ = ["JsonPrefix"]

_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
_WORDS = frozenset({"true", "false", "null"})
_IN_WORD = re.compile(r"[-+.\w]*")
_IN_STRING = re.compile(r'[^"\\\x00-\x1f]*')
_SPACE = " \t\n\r"
_MAX_DEPTH = 100
_ALLOWED = {
    "object": "{",
    "key": '"',
    "key or end": '"}',
    "colon": ":",
    "value": '{["',
    "value or end": '{["]',
    "comma or end": ",}]",
}
"""The characters that are not part of a word, by what is expected next."""


class JsonPrefix:
    """The longest prefix of a text that a JSON object can begin with, cut between tokens or characters of a string.

    A client that parses incrementally can read what ``feed`` returns at any time. Numbers, words and escapes are
    returned when they are complete, because ``1`` may become ``1x``.
    """

    def __init__(self) -> None:
        self.is_broken = False
        """Whether the text cannot be the beginning of one JSON object."""
        self.is_complete = False
        self._text = ""
        self._stack: list[str] = []
        self._in_string = False
        self._is_key = False
        self._expected = "object"
        """A key of ``_ALLOWED``."""

    @property
    def pending(self) -> str:
        """The text that is not yet certain."""
        return self._text

    def feed(self, text: str) -> str:
        """Return the part that is certain after this text."""
        self._text += text
        at = 0
        while not self.is_broken and at < len(self._text):
            end = self._read_string(at) if self._in_string else self._read_token(at)
            if end == at:
                break
            at = end
        certain, self._text = self._text[:at], self._text[at:]
        return certain

    def complete(self, key: str, value: str) -> str:
        """Return text that completes what was returned so far to an object, with ``key`` and ``value`` at its end.

        An unfinished string is closed, and a missing value is ``null``.
        """
        expected, text = self._expected, ""
        if self._in_string:
            expected, text = ("colon" if self._is_key else "comma or end"), '"'
        closers = [{"{": "}", "[": "]"}[opened] for opened in reversed(self._stack)]
        if expected == "key" and len(closers) > 1:
            expected, text = "colon", text + '""'
        text += {"colon": ": null", "value": "null"}.get(expected, "")
        if len(closers) > 1 or expected not in ("key", "key or end"):
            text += "".join(closers[:-1]) + ", "
        return f"{text}{orjson.dumps(key).decode()}: {orjson.dumps(value).decode()}}}"

    # Each step returns the position behind what it has accepted, or its argument if more text is needed.

    def _read_string(self, at: int) -> int:
        found = _IN_STRING.match(self._text, at)
        assert found is not None
        if found.end() > at:
            return found.end()
        char = self._text[at]
        if char == '"':
            self._in_string = False
            self._expected = "colon" if self._is_key else "comma or end"
            return at + 1
        if char != "\\":
            return self._fail(at)
        escape = self._text[at : at + 6]
        if len(escape) > 1 and escape[1] != "u":
            return at + 2 if escape[1] in '"\\/bfnrt' else self._fail(at)
        if any(digit not in "0123456789abcdefABCDEF" for digit in escape[2:]):
            return self._fail(at)
        return at + 6 if len(escape) == 6 else at  # noqa: PLR2004 - the length of \uXXXX

    def _read_token(self, at: int) -> int:
        char = self._text[at]
        if self.is_complete:
            return self._fail(at)
        if char in _SPACE and self._stack:
            return at + 1
        if char not in _ALLOWED[self._expected]:
            return self._read_word(at)
        match char:
            case "{" | "[":
                self._stack.append(char)
                self._expected = "key or end" if char == "{" else "value or end"
            case "}" | "]":
                is_closed = self._stack.pop() == {"}": "{", "]": "["}[char]
                self.is_complete = not self._stack
                self._expected = "comma or end"
                return at + 1 if is_closed else self._fail(at)
            case ",":
                self._expected = "key" if self._stack[-1] == "{" else "value"
            case ":":
                self._expected = "value"
            case _:
                self._in_string, self._is_key = True, "key" in self._expected
        return at + 1 if len(self._stack) <= _MAX_DEPTH else self._fail(at)

    def _read_word(self, at: int) -> int:
        found = _IN_WORD.match(self._text, at)
        assert found is not None
        word = found.group()
        if self._expected not in ("value", "value or end") or not word:
            return self._fail(at)
        # A word counts once something follows it, because ``1`` may become ``1x``.
        if found.end() == len(self._text):
            return at
        if word not in _WORDS and not _NUMBER.fullmatch(word):
            return self._fail(at)
        self._expected = "comma or end"
        return found.end()

    def _fail(self, at: int) -> int:
        self.is_broken = True
        return at
