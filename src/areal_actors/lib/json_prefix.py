"""Validation of a JSON object that arrives in pieces: how much of it can be passed on while the rest is missing.

What passes is JSON for the strictest readers: half of a surrogate pair, which many of them refuse, is replaced, and a
number that overflows to infinity is a fault.
"""

from __future__ import annotations

import math
import re

from areal_actors.lib.exact_json import dump_json, replace_surrogates

MAX_DEPTH = 100
"""Objects and lists within each other. Some readers refuse more than 128, and messages add a few."""
MAX_DIGITS = 1000
"""Characters of a number, so that a long one is not read again with every piece."""
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_WORDS = frozenset({"true", "false", "null"})
_IN_WORD = re.compile(r"[-+.\w]*")
_IN_STRING = re.compile(r'[^"\\\x00-\x1f]*')
_SPACE = " \t\n\r"
_ESCAPE_LENGTH = 6
_SURROGATE_ESCAPE = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u(?P<lone>[dD][89a-fA-F][0-9a-fA-F]{2})|\\."
)
"""Matches a whole pair, half of one, or any other escape."""
_LOW_SURROGATE = ("\\", "u", "dD", "cdefCDEF", "0123456789abcdefABCDEF", "0123456789abcdefABCDEF")
"""The characters that each place of the escape of a pair's second half can have."""
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
    returned when they are complete, because ``1`` may become ``1x``. The result of ``feed`` is as long as the text that
    it stands for; half of a surrogate pair is replaced in it.
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
        return mend_surrogates(certain)

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
        return f"{text}{dump_json(key).decode()}: {dump_json(value).decode()}}}"

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
        return at if len(escape) < _ESCAPE_LENGTH else self._find_pair(at)

    def _find_pair(self, at: int) -> int:
        r"""Return the position behind a whole ``\uXXXX``, and behind the next one if both are one character."""
        if self._text[at + 2] not in "dD" or self._text[at + 3] not in "89abAB":
            return at + _ESCAPE_LENGTH
        # The first half of a pair: what follows decides whether it is whole, and may be missing.
        second = self._text[at + 6 : at + 12]
        if any(char not in allowed for char, allowed in zip(second, _LOW_SURROGATE, strict=False)):
            return at + _ESCAPE_LENGTH
        return at + 12 if len(second) == len(_LOW_SURROGATE) else at

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
        return at + 1 if len(self._stack) <= MAX_DEPTH else self._fail(at)

    def _read_word(self, at: int) -> int:
        found = _IN_WORD.match(self._text, at)
        assert found is not None
        word = found.group()
        if self._expected not in ("value", "value or end") or not word:
            return self._fail(at)
        # A word counts once something follows it, because ``1`` may become ``1x``.
        if found.end() == len(self._text):
            return at if len(word) <= MAX_DIGITS else self._fail(at)
        if word not in _WORDS and not _is_number(word):
            return self._fail(at)
        self._expected = "comma or end"
        return found.end()

    def _fail(self, at: int) -> int:
        self.is_broken = True
        return at


def _is_number(word: str) -> bool:
    return _NUMBER.fullmatch(word) is not None and len(word) <= MAX_DIGITS and math.isfinite(float(word))


def mend_surrogates(text: str) -> str:
    """Return JSON, or the beginning of it, with U+FFFD in the place of every half of a surrogate pair.

    The result has the same length. Escapes become escapes.
    """
    if "\\u" in text:
        text = _SURROGATE_ESCAPE.sub(lambda found: "\\ufffd" if found["lone"] else found[0], text)
    return replace_surrogates(text)
