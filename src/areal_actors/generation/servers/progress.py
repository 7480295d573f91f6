"""How long a server that has requests may send no token of any of them, from the speed measured so far.

A server reads prompts before it goes on sampling, so it is silent for as long as all prompts take that have no token
yet; then an event follows within the time of its tokens. Both speeds are measured, and the silence that they allow is
multiplied, because speeds vary with the load. Until both are known, and for a request under a grammar, whose
preparation takes an unknown time, only the upper limit holds.
"""

from __future__ import annotations

import math

from attrs import define, field

__all__ = ["Progress"]

_TOLERANCE = 3.0
"""Multiple of the expected silence that is allowed: a batch that grows, or other clients, slow a server down."""
_PROMPT_WEIGHT = 0.9
"""Weight of earlier prompts against the next one in the measured speed of reading."""
_FORGET_SECONDS = 300.0
"""Time constant with which the slowest token is forgotten."""


@define
class _Open:
    """A request at the server, with ``num_tokens`` that it has to read again if its keys and values are dropped."""

    num_tokens: int
    since: float
    """When it was sent, or sent its last tokens."""
    has_grammar: bool
    is_read: bool = False
    """Whether its prompt has been read, as its first token shows."""
    is_measured: bool = True
    is_awaited: bool = True
    """Whether its next tokens are awaited. A stream is read only when its consumer asks, who may be slow."""


@define
class Progress:
    """The requests at one server, and what is known of its speed. All times are in seconds of one clock.

    The server may be silent for ``limit_seconds``, or less if that is more than its speed explains, but for
    ``floor_seconds`` at least. An event of an answer has up to ``tokens_per_event`` tokens.
    """

    limit_seconds: float
    floor_seconds: float
    tokens_per_event: int = 1
    has_sampled: bool = False
    """Whether it has sent a token since it was lost last: before that, it may compile kernels for minutes."""
    _open: dict[str, _Open] = field(factory=dict, init=False)
    _silent_since: float = field(default=0.0, init=False)
    _slowest_token: float | None = field(default=None, init=False)
    _slowest_at: float = field(default=0.0, init=False)
    _read_seconds: float = field(default=0.0, init=False)
    _read_tokens: float = field(default=0.0, init=False)
    _longest_read: int = field(default=0, init=False)
    _leniency: float = field(default=1.0, init=False)

    def begin(self, request_id: str, *, num_tokens: int, has_grammar: bool, now: float) -> None:
        """Add a request with a prompt of ``num_tokens``."""
        if not self._is_awaited:
            self._silent_since = now
        self._open[request_id] = _Open(num_tokens, now, has_grammar)

    def wait(self, request_id: str, *, now: float) -> None:
        """Note that the next tokens of a request are awaited from now on."""
        if not self._is_awaited:
            self._silent_since = now
        self._open[request_id].is_awaited = True

    def note_tokens(self, request_id: str, *, num_tokens: int, num_cached: int, now: float) -> None:
        """Note that ``num_tokens`` of a request arrived, of whose prompt ``num_cached`` tokens were not computed."""
        self.has_sampled, self._silent_since = True, now
        request = self._open[request_id]
        request.is_awaited = False
        if not num_tokens:
            return
        seconds = now - request.since
        if request.is_read:
            self._measure_token(seconds / num_tokens, now)
        elif request.is_measured and not request.has_grammar:
            self._measure_prompt(seconds, request.num_tokens - num_cached)
        request.is_read, request.since = True, now
        request.num_tokens += num_tokens

    def end(self, request_id: str) -> None:
        """Remove a request."""
        self._open.pop(request_id, None)

    def restart(self, now: float) -> None:
        """Begin anew after a pause or a load: prompts and what was sampled may have to be read again."""
        self._silent_since = now
        for request in self._open.values():
            request.since = now
            request.is_read = request.is_measured = False

    def lose(self) -> None:
        """Note that the server was lost: its successor may be another process."""
        self.has_sampled = False

    def excuse(self) -> None:
        """Allow twice the silence from now on: the server samples, although it counted as stalled."""
        self._leniency *= 2

    def silent_seconds(self, now: float) -> float:
        """Return how long the server has been silent; 0 while no token is expected."""
        return now - self._silent_since if self._is_awaited and self.has_sampled else 0.0

    def allowed_seconds(self) -> float:
        """Return how long the server may be silent with the requests that it has."""
        unread = [request for request in self._open.values() if not request.is_read]
        is_unknown = self._slowest_token is None or any(request.has_grammar for request in unread)
        if is_unknown or (unread and not self._read_tokens):
            return self.limit_seconds
        assert self._slowest_token is not None
        expected = self._slowest_token * self.tokens_per_event
        expected += sum(self._expect_read(request.num_tokens) for request in unread)
        allowed = max(self.floor_seconds, _TOLERANCE * expected) * self._leniency
        return min(self.limit_seconds, allowed)

    @property
    def _is_awaited(self) -> bool:
        return any(request.is_awaited for request in self._open.values())

    def _expect_read(self, num_tokens: int) -> float:
        """Return the seconds that a prompt takes; attention makes each token of a longer one slower."""
        longer = max(1.0, num_tokens / max(self._longest_read, 1))
        return self._read_seconds / self._read_tokens * num_tokens * longer

    def _measure_token(self, seconds: float, now: float) -> None:
        forgotten = math.exp(-(now - self._slowest_at) / _FORGET_SECONDS)
        self._slowest_token = max(seconds, (self._slowest_token or 0.0) * forgotten)
        self._slowest_at = now

    def _measure_prompt(self, seconds: float, num_tokens: int) -> None:
        """Add a prompt. Short ones weigh little, because most of their time is that of the step they are in."""
        if num_tokens <= 0:
            return
        self._read_seconds = _PROMPT_WEIGHT * self._read_seconds + seconds
        self._read_tokens = _PROMPT_WEIGHT * self._read_tokens + num_tokens
        self._longest_read = max(self._longest_read, num_tokens)
