"""Which request is another one again: laws over any order of sendings, ends and retries."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from areal_actors.domain import Attempt, InteractionId
from areal_actors.errors import Unprocessable
from areal_actors.sessions.retries import MAX_REMEMBERED, RETRY_SECONDS, RetryCache

ANSWERS = ("any answers",)
FINGERPRINTS = st.sampled_from(["a", "b"])


class Client:
    """A short way to send: every sending begins a request of one interaction unless it is recognised."""

    def __init__(self) -> None:
        self.attempts: RetryCache[str] = RetryCache()
        self.now = 0.0
        self._names = map("answer-{}".format, count())

    def send(self, number: int = 0, *, fingerprint: str = "a", key: str | None = None, choices: int = 1):
        attempt = Attempt(fingerprint=fingerprint, number=number, idempotency_key=key)
        found = self.attempts.recognise(attempt, self.now)
        if found is not None and not found.is_cut:
            return found
        names = tuple(InteractionId(next(self._names)) for _ in range(choices))
        return self.attempts.begin(attempt, names, "work", self.now)

    def answered(self, **options):
        sending = self.send(**options)
        sending.end(ANSWERS, self.now)
        return sending

    def cut(self, **options):
        sending = self.send(**options)
        sending.end(None, self.now)
        return sending


def test_equal_requests_without_a_number_are_siblings():
    client = Client()
    sendings = [client.send(), client.answered(), client.cut(), client.send(), client.send()]

    assert 5 == len({id(sending) for sending in sendings})


def test_retry_is_recognised_while_pending_and_after_the_answer():
    client = Client()
    pending, answered = client.send(), client.answered(fingerprint="b")

    assert client.send(1) is pending
    assert client.send(1, fingerprint="b") is answered


def test_retry_takes_the_place_of_a_request_that_was_cut():
    client = Client()
    cut = client.cut()
    again = client.send(1)

    assert again is not cut
    assert client.send(2) is again


def test_retries_of_three_cut_requests_among_twenty_are_sampled():
    client = Client()
    calls = [client.send() for _ in range(20)]
    for call in calls[5:8]:
        call.end(None, client.now)
    for call in calls[8:]:
        call.end(ANSWERS, client.now)
    retries = [client.send(1) for _ in range(3)]

    assert not set(map(id, retries)) & set(map(id, calls))
    assert 3 == len(set(map(id, retries)))


def test_second_retry_is_given_the_request_of_the_first():
    client = Client()
    calls = [client.answered() for _ in range(3)]
    first = client.send(1)

    assert first is calls[-1]
    assert client.send(2) is first


@pytest.mark.parametrize("choices", [1, 3])
def test_answer_that_was_read_is_not_repeated(choices: int):
    """A named request can be repeated."""
    client = Client()
    read = client.answered(choices=choices)
    client.attempts.note_read(read.interactions[-1])
    named = client.answered(key="k")
    client.attempts.note_read(named.interactions[-1])

    assert client.send(1) is not read
    assert client.send(1, key="k") is named


def test_idempotency_key_names_one_request():
    """Another body is an error."""
    client = Client()
    first = client.send(key="k")
    with pytest.raises(Unprocessable, match="another request"):
        client.send(key="k", fingerprint="b")

    assert client.send(key="k") is client.send(2, key="k") is first
    assert client.send(key="other") is not first
    first.end(None, client.now)
    assert client.send(key="k") is not first


def test_numbered_requests_are_forgotten_after_two_minutes():
    client = Client()
    answered, named, pending = client.answered(), client.answered(key="k"), client.send(fingerprint="b")
    client.now += RETRY_SECONDS + 1

    assert client.send(1) is not answered
    assert client.send(1, fingerprint="b") is pending
    assert client.send(key="k") is named


def test_oldest_answers_are_dropped_first():
    client = Client()
    named = client.answered(key="k")
    for _ in range(2 * MAX_REMEMBERED):
        client.answered(choices=3)

    assert MAX_REMEMBERED - 3 < len(client.attempts) <= MAX_REMEMBERED
    assert client.send(key="k") is not named


def test_pending_requests_are_not_dropped():
    client = Client()
    named, numbered = client.send(key="k"), client.send(fingerprint="b")
    for _ in range(2 * MAX_REMEMBERED):
        client.answered()
        client.send()

    assert client.send(key="k") is named
    assert client.send(1, fingerprint="b") is numbered
    assert len(client.attempts) == 2 * MAX_REMEMBERED + 2


class Retrying(RuleBasedStateMachine):
    """Any order of sendings, ends, readings and retries."""

    sendings = Bundle("sendings")

    def __init__(self) -> None:
        super().__init__()
        self.client = Client()
        self.given: set[tuple[int, int]] = set()
        self.read: set[int] = set()
        self.all: list[object] = []

    @rule(target=sendings, fingerprint=FINGERPRINTS, key=st.sampled_from([None, None, "k"]), choices=st.integers(1, 3))
    def send(self, fingerprint: str, key: str | None, choices: int):
        fingerprint = "named" if key else fingerprint
        sending = self.client.send(fingerprint=fingerprint, key=key, choices=choices)

        assert key or id(sending) not in map(id, self.all), "a request without evidence was recognised"
        self.all.append(sending)
        return sending

    @rule(sending=consumes(sendings), is_answered=st.booleans())
    def end(self, sending, is_answered):
        if sending.ended_at is None:
            sending.end(ANSWERS if is_answered else None, self.client.now)

    @rule(sending=sendings)
    def read_it(self, sending):
        self.client.attempts.note_read(sending.interactions[0])
        self.read.add(id(sending))

    @rule(target=sendings, fingerprint=FINGERPRINTS, number=st.integers(1, 3))
    def retry(self, fingerprint: str, number: int):
        attempt = Attempt(fingerprint=fingerprint, number=number)
        found = self.client.attempts.recognise(attempt, self.client.now)
        if found is None or found.is_cut:
            names = (InteractionId(f"retry-{len(self.all)}"),)
            self.all.append(self.client.attempts.begin(attempt, names, "work", self.client.now))
            return self.all[-1]

        assert (fingerprint, None) == (found.fingerprint, found.key)
        assert id(found) not in self.read
        assert (id(found), number) not in self.given, "two retries of one number share a request"
        self.given.add((id(found), number))
        return found

    @rule(seconds=st.floats(0, 200))
    def wait(self, seconds: float):
        self.client.now += seconds

    @invariant()
    def is_bounded(self):
        assert len(self.client.attempts) <= MAX_REMEMBERED


TestRetrying = Retrying.TestCase
