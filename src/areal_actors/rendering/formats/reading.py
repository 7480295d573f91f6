"""Parsing of calls from text that arrives in pieces: the common part of all formats.

A format declares where its calls may begin, and reads a call with a generator, a *reading*, which pauses when it needs
more text and raises ``NoCall`` as soon as the text cannot be a call. ``CallParser`` does the rest: a call is emitted in
one piece when it is complete. Text that is not a call stays content, and another call may begin after its first tag.
White space around calls belongs to the format, elsewhere to the content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import TypeAlias, TypeVar

from attrs import evolve, field, frozen

from areal_actors.domain import Delta, TextDelta, ToolArgumentsDelta, ToolCallStarted
from areal_actors.lib.json_prefix import JsonPrefix, mend_surrogates

T = TypeVar("T")
Reading: TypeAlias = Generator[None, None, T]
"""A generator that pauses for more text and returns its result."""

ARGUMENT_KEYS = ("arguments", "parameters", "args", "input")
"""Hermes, Qwen, Mistral and OpenAI write the first, Llama and Command the second, Anthropic the last."""
_MAX_WORD = 1000
"""Limit in characters of a name or a number; longer text is neither."""
_MAX_WASTE = 1_000_000
"""Limit in characters of text read for calls that turned out not to be calls.

All text after that is content, so that the running time does not grow quadratically with the length of an answer.
"""
_SPACE = re.compile(r"\s*")
_END = re.compile(r"\s*\Z")
_NAMED = re.compile(
    r'\s*\{\s*"(?:tool_)?name"\s*:\s*(?P<name>"(?:[^"\\\x00-\x1f]|\\.)*")\s*,\s*"(?P<key>\w+)"\s*:\s*(?=\{\s*")'
)
"""Matches an object up to its arguments, if the name comes first, as all models are trained to write it.

Empty arguments are not matched: the actual ones may follow under another key.
"""


class NoCall(Exception):
    """Raised if text that looked like a call is not one. Does not leave the parser."""


@frozen(kw_only=True)
class Call:
    """A call as the model wrote it; ``arguments`` is a JSON object. Most families write no ``id``."""

    name: str
    arguments: str
    id: str | None = None


def check_name(name: object) -> str:
    """Return the name of a function. Raises ``NoCall`` for a value that cannot be one."""
    if not isinstance(name, str) or not name or not name.isprintable():
        raise NoCall
    return name


def num_held_back(text: str, tags: Iterable[str]) -> int:
    """Return how many characters at the end of ``text`` may be the beginning of one of ``tags`` (0: none)."""
    # A complete tag is found by other means, hence at most one character fewer than the tag has.
    begun = (next((n for n in range(min(len(text), len(tag) - 1), 0, -1) if text.endswith(tag[:n])), 0) for tag in tags)
    return max(begun, default=0)


@frozen(kw_only=True)
class Begun:
    """A call that is being read, for a parser that emits calls before they are complete.

    Its arguments are the text from ``start``, or ``arguments`` if the model does not write them as JSON. Without a
    ``name``, the text from ``start`` is an object that has the name, followed by the arguments.
    """

    name: str | None
    start: int
    arguments: str | None = None
    id: str | None = None

    def locate(self, text: str) -> Begun | None:
        """Return the call with its name and the place of its arguments, or ``None`` if they have not arrived."""
        if self.arguments is not None:
            return self
        if self.name is not None:
            space = _SPACE.match(text, self.start)
            start = space.end() if space else self.start
            return evolve(self, start=start) if text.startswith("{", start) else None
        found = _NAMED.match(text, self.start)
        if found is None or found["key"] not in ARGUMENT_KEYS:
            return None
        try:
            return Begun(name=check_name(json.loads(found["name"])), start=found.end())
        except (NoCall, ValueError):
            return None


class Source:
    """The text of an answer as far as it has arrived, and the current reading position."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.is_over = False
        self.begun: Begun | None = None

    def grow(self, piece: str) -> None:
        """Append ``piece`` to the text."""
        # CPython extends a string in place if there is no other reference to it, so that a long call is not copied for
        # every token.
        text, self.text = self.text, ""
        text += piece
        self.text = text

    def begin_call(self, name: str, *, arguments: str | None = None, call_id: str | None = None) -> None:
        """Announce the call that is being read. Its arguments are JSON text from here on, or ``arguments`` so far."""
        self.begun = Begun(name=name, start=self.at, arguments=arguments, id=call_id)

    def begin_object(self) -> None:
        """Announce an object with a name and then, under one of ``ARGUMENT_KEYS``, the arguments of a call."""
        self.begun = Begun(name=None, start=self.at)

    def forget(self) -> None:
        """Discard the text that has been read."""
        self.text, self.at = self.text[self.at :], 0

    @property
    def is_at_end(self) -> bool:
        """True if the answer ends here, apart from white space."""
        return self.is_over and _END.match(self.text, self.at) is not None

    def skip(self, pattern: re.Pattern[str]) -> None:
        """Advance past the match of ``pattern`` in the text that has arrived; it also matches empty text."""
        found = pattern.match(self.text, self.at)
        self.at = found.end() if found else self.at

    def expect(self, *literals: str, is_tight: bool = False) -> Reading[str]:
        """Read the first of ``literals`` that is next, after white space unless ``is_tight``; return it, or ``""``.

        Nothing else is read. If one literal begins with another, the longer one must come first.
        """
        start = self.at
        while True:
            if not is_tight:
                self.skip(_SPACE)
            for literal in literals:
                if self.text.startswith(literal, self.at):
                    self.at += len(literal)
                    return literal
                # The text ends inside this literal: more text decides, also whether a later literal is next.
                if not self.is_over and literal.startswith(self.text[self.at : self.at + len(literal)]):
                    break
            else:
                self.at = start
                return ""
            yield

    def require(self, *literals: str) -> Reading[str]:
        """Read one of ``literals`` as ``expect`` does, but raise ``NoCall`` if none is next."""
        found = yield from self.expect(*literals)
        if not found:
            raise NoCall
        return found

    def sees(self, *literals: str) -> Reading[bool]:
        """Return whether one of ``literals`` is next, after white space. Reads nothing."""
        start = self.at
        found = yield from self.expect(*literals)
        self.at = start
        return bool(found)

    def match(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Read the word that ``pattern`` matches next, after white space; ``""`` if there is none.

        ``pattern`` describes a run of characters: more text of the same kind makes the word longer.
        """
        while True:
            self.skip(_SPACE)
            found = pattern.match(self.text, self.at)
            end = found.end() if found else self.at
            if end < len(self.text) or self.is_over or end - self.at > _MAX_WORD:
                break
            yield
        if end - self.at > _MAX_WORD:
            raise NoCall
        word, self.at = self.text[self.at : end], end
        return word

    def next_char(self, *, behind: re.Pattern[str] | None = None) -> Reading[str]:
        """Read the next character, or the one after the match of ``behind``; ``""`` at the end of the answer.

        ``behind`` describes a run of characters, which may be empty.
        """
        while True:
            if behind:
                self.skip(behind)
            if self.at < len(self.text):
                break
            if self.is_over:
                return ""
            yield
        self.at += 1
        return self.text[self.at - 1]

    def until(self, tag: str, *, before: tuple[str, ...] = ()) -> Reading[str]:
        """Read the text up to a ``tag`` that is followed by one of ``before`` or by the end of the answer.

        Any other ``tag`` is part of the text. Without ``before``, the first ``tag`` counts.
        """
        start = searched = self.at
        while True:
            end = self.text.find(tag, searched)
            if end < 0:
                if self.is_over:
                    raise NoCall
                # The tag may be cut at the end of the text; everything before it is not searched again.
                searched = max(searched, len(self.text) - len(tag) + 1)
                yield
                continue
            self.at = searched = end + len(tag)
            if not before or (yield from self.sees(*before)) or self.is_at_end:
                return self.text[start:end]


def read_items(source: Source, end: str, read_item: Callable[[Source], Reading[T]]) -> Reading[list[T]]:
    """Read items separated by commas, up to and including ``end``; a trailing comma is allowed."""
    items: list[T] = []
    while not (yield from source.expect(end)):
        items.append((yield from read_item(source)))
        if (yield from source.require(",", end)) == end:
            break
    return items


Reader: TypeAlias = Callable[[Source], Reading[tuple[Call, ...]]]
"""Reads from an opening on, including the opening.

If it returns no calls, the text belongs to the format and is dropped.
"""


def drop(tag: str) -> Reader:
    """Return a reader of a tag that belongs to the format and contains no call, such as the end of a list of calls."""

    def read(source: Source) -> Reading[tuple[Call, ...]]:
        yield from source.require(tag)
        return ()

    return read


@frozen(kw_only=True)
class CallSyntax:
    """The openings at which calls may begin, with the readers that continue from them.

    ``anywhere`` are tags that count everywhere. ``at_start`` counts at the beginning of an answer, and ``after_call``
    directly after a call, apart from white space.
    """

    anywhere: Mapping[str, Reader] = field(factory=dict)
    at_start: Mapping[str, Reader] = field(factory=dict)
    after_call: Mapping[str, Reader] = field(factory=dict)


class CallParser:
    """An ``AnswerParser`` that alternates between text, until a call opens, and a call, until it ends.

    With ``is_eager``, a call is emitted while it is read: its name as soon as its arguments begin, then its arguments
    as they arrive. A complete call is the same either way, and so is one that breaks off at the end of the answer: it
    has incomplete arguments. A call that turns out to be malformed after its beginning was emitted remains a call, with
    the arguments up to the fault; without ``is_eager`` its text is content.
    """

    def __init__(self, syntax: CallSyntax, call_ids: Callable[[], str]) -> None:
        self._syntax = syntax
        # ``(?!)`` matches nothing, for a format without tags.
        self._tags = re.compile("|".join(map(re.escape, syntax.anywhere)) or r"(?!)")
        self._call_ids = call_ids
        self._source = Source()
        self._opening = ""
        self._start = 0
        self._reading: Reading[tuple[Call, ...]] | None = None
        self._num_calls = 0
        self._wasted = 0
        self._is_fresh = True
        self._is_after_call = False
        self._num_before_call = 0
        self._space: list[str] = []
        self._deltas: list[Delta] = []
        self.is_eager = False
        self._started: Begun | None = None
        self._emitted = ""
        self._checked = JsonPrefix()

    def feed(self, text: str) -> tuple[Delta, ...]:
        """Return the deltas that are certain after this text."""
        self._source.grow(text)
        return self._run()

    def finish(self) -> tuple[Delta, ...]:
        """Return what was held back: an incomplete call is content."""
        self._source.is_over = True
        deltas = self._run()
        is_content = self._space and not self._is_after_call
        return (*deltas, TextDelta(text="".join(self._space))) if is_content else deltas

    def _run(self) -> tuple[Delta, ...]:
        while self._read_text() if self._reading is None else self._read_call(self._reading):
            pass
        if self._reading is None:
            self._source.forget()
        deltas, self._deltas = tuple(self._deltas), []
        return deltas

    # Each step returns whether there may be more to read.

    def _read_text(self) -> bool:
        if self._is_fresh:
            # At the beginning of an answer, and directly after a call, additional openings count.
            source = self._source
            start = source.at
            source.skip(_SPACE)
            self._say(source.text[start : source.at])
            local = self._syntax.after_call if self._is_after_call else self._syntax.at_start
            openings = {**self._syntax.anywhere, **local}
            for opening, reader in openings.items():
                if source.text.startswith(opening, source.at):
                    self._open(opening, reader)
                    return True
            rest = source.text[source.at : source.at + max(map(len, openings), default=0)]
            self._is_fresh = not source.is_over and any(opening.startswith(rest) for opening in openings)
            return not self._is_fresh
        source, has_calls = self._source, self._wasted <= _MAX_WASTE
        found = self._tags.search(source.text, source.at) if has_calls else None
        held = num_held_back(source.text[source.at :], self._syntax.anywhere) if has_calls and not source.is_over else 0
        end = found.start() if found else len(source.text) - held
        self._say(source.text[source.at : end])
        source.at = end
        if found:
            self._open(found.group(), self._syntax.anywhere[found.group()])
        return found is not None

    def _open(self, opening: str, reader: Reader) -> None:
        self._opening, self._start = opening, self._source.at
        self._source.begun = None
        self._reading = reader(self._source)

    def _read_call(self, reading: Reading[tuple[Call, ...]]) -> bool:
        try:
            next(reading)
        except StopIteration as stop:
            self._reading = None
            # Text that was quoted as a string may have any characters, and escapes any code points.
            calls = tuple(evolve(call, arguments=mend_surrogates(call.arguments)) for call in stop.value)
            if self._started is not None:
                call, *further = calls
                if call.name != self._started.name or not call.arguments.startswith(self._emitted):
                    self._break_off(self._started)
                    return True
                self._emit_arguments(call.arguments[len(self._emitted) :])
                self._started, calls = None, tuple(further)
                self._num_calls += 1
            for index, call in enumerate(calls, start=self._num_calls):
                self._deltas += (
                    ToolCallStarted(index=index, id=call.id or self._call_ids(), name=call.name),
                    ToolArgumentsDelta(index=index, text=call.arguments),
                )
            # White space between a call and a tag of the format, which is no call, belongs to the format, too.
            del self._space[len(self._space) if stop.value else self._num_before_call :]
            self._num_before_call = len(self._space)
            self._num_calls += len(calls)
            self._is_fresh = self._is_after_call = True
        except NoCall:
            self._reading = None
            if self._source.is_over:
                # The answer was cut. Its client reads the same with and without a stream.
                self._emit_begun()
            if self._started is not None:
                self._break_off(self._started)
                return True
            # The opening is content; another call may begin after it.
            self._wasted += self._source.at - self._start
            self._say(self._opening)
            self._source.at = self._start + len(self._opening)
        else:
            if self.is_eager:
                self._emit_begun()
        return self._reading is None

    def _emit_begun(self) -> None:
        """Emit what is certain of the call that is being read."""
        source = self._source
        begun = source.begun.locate(source.text) if source.begun is not None else None
        if self._started is not None and self._started.arguments is None:
            begun = self._started
        if begun is None or begun.name is None:
            return
        if self._started is None:
            self._deltas.append(
                ToolCallStarted(index=self._num_calls, id=begun.id or self._call_ids(), name=begun.name)
            )
            self._emitted, self._checked = "", JsonPrefix()
        self._started = begun
        if begun.arguments is not None:
            self._emit_arguments(begun.arguments[len(self._emitted) :])
        else:
            num_seen = len(self._emitted) + len(self._checked.pending)
            self._emit_arguments(self._checked.feed(source.text[begun.start + num_seen :]))

    def _emit_arguments(self, text: str) -> None:
        if text:
            self._deltas.append(ToolArgumentsDelta(index=self._num_calls, text=text))
            self._emitted += text

    def _break_off(self, begun: Begun) -> None:
        """End a call whose beginning was emitted and whose rest cannot be read; what follows is content."""
        if begun.arguments is None and self._source.is_over and not self._checked.is_broken:
            # The answer was cut within a number, a word or an escape.
            self._emit_arguments(self._source.text[begun.start + len(self._emitted) :])
        self._source.at = begun.start + (len(self._emitted) if begun.arguments is None else 0)
        self._num_calls += 1
        self._started = None
        # The white space before the call belongs to the format, as before a complete one.
        self._is_fresh, self._is_after_call = False, True

    def _say(self, text: str) -> None:
        """Emit content, except for the white space at its end: if a call follows, it belongs to the format."""
        certain = text.rstrip()
        if certain:
            self._deltas.append(TextDelta(text="".join((*self._space, certain))))
            self._space.clear()
            self._is_fresh = self._is_after_call = False
        if len(certain) < len(text):
            self._space.append(text[len(certain) :])
