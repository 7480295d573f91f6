"""Sessions: who may use them, when they end, and that strangers get nowhere."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_actors.cache import SessionSettings, SessionStore
from areal_actors.domain import ChatMessage, Credential, SessionId
from areal_actors.errors import Conflict, InvalidRequest, NotFound, SessionEnded, Unauthorized


def new_store(**settings: float) -> SessionStore:
    """An empty store whose tokens can be read."""
    numbers = count()
    return SessionStore(token_factory=lambda: f"{next(numbers):04x}", settings=SessionSettings(**settings))


@pytest.fixture
def store() -> SessionStore:
    """An empty store with readable tokens."""
    return new_store(grace_seconds=60, idle_seconds=600)


def test_a_session_keeps_a_readable_prefix_of_its_task(store: SessionStore) -> None:
    """People find their episode in the logs; the rest of the id cannot be guessed."""
    assert store.create("task-0-0", now=0).id == "task-0-0-0001"
    assert store.create(now=0).id == "session-0004"


@given(st.text())
def test_ids_fit_into_urls(task: str) -> None:
    """Whatever the task is called, the id is a path segment of bounded length."""
    session_id = new_store().create(task, now=0).id

    assert set(session_id) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
    assert session_id[0] not in "-."
    assert len(session_id) <= 64


def test_the_key_is_not_kept(store: SessionStore) -> None:
    """Neither the session nor what is printed of it holds the key."""
    issued = store.create("t", now=0)

    assert issued.key not in repr(issued)
    assert issued.key not in repr(store.get(issued.id))


class TestResolving:
    def test_a_key_opens_its_session(self, store: SessionStore) -> None:
        """A key alone is enough."""
        one, two = store.create("a", now=0), store.create("b", now=0)

        assert one.id == store.resolve(Credential(key=one.key)).id
        assert two.id == store.resolve(Credential(key=two.key)).id

    @pytest.mark.parametrize("key", [None, "DUMMY", "", "own"])
    def test_a_session_url_is_a_capability(self, store: SessionStore, key: str | None) -> None:
        """Any key or none is accepted on it."""
        issued = store.create("a", now=0)
        credential = Credential(session=issued.id, key=issued.key if key == "own" else key)

        assert issued.id == store.resolve(credential).id

    def test_the_key_of_another_session_is_refused_on_a_session_url(self, store: SessionStore) -> None:
        """A client that mixes up two sessions gets an error instead of training the wrong one."""
        one, two = store.create("a", now=0), store.create("b", now=0)

        with pytest.raises(Unauthorized, match="belongs to another session"):
            store.resolve(Credential(session=one.id, key=two.key))

    def test_an_id_from_elsewhere_needs_the_key_that_owns_it(self, store: SessionStore) -> None:
        """A session id in a query or body is not a capability."""
        one, two = store.create("a", now=0), store.create("b", now=0)

        assert one.id == store.resolve(Credential(session=one.id, key=one.key), is_capability=False).id
        for key in (None, "DUMMY", two.key):
            with pytest.raises(Unauthorized):
                store.resolve(Credential(session=one.id, key=key), is_capability=False)

    def test_strangers_learn_nothing(self, store: SessionStore) -> None:
        """Without a key that opens something, known and unknown ids answer alike."""
        known = store.create("a", now=0).id
        messages = set()
        for session in (known, SessionId("a-ffff")):
            with pytest.raises(Unauthorized) as caught:
                store.resolve(Credential(session=session, key="guess-guess"), is_capability=False)
            messages.add(str(caught.value))

        assert len(messages) == 1

    def test_unknown_sessions_and_keys_are_named_errors(self, store: SessionStore) -> None:
        """404 for the URL, 401 for the key, and the key is not repeated."""
        with pytest.raises(NotFound, match="no session a-9; start one"):
            store.resolve(Credential(session=SessionId("a-9")))
        with pytest.raises(Unauthorized) as caught:
            store.resolve(Credential(key="sk-secret-guess"))
        with pytest.raises(Unauthorized):
            store.resolve(Credential())

        assert "guess" not in str(caught.value)

    def test_a_digest_is_no_key(self, store: SessionStore) -> None:
        """What is stored does not open what it guards."""
        issued = store.create("a", now=0)

        with pytest.raises(Unauthorized):
            store.resolve(Credential(key=store.get(issued.id).key_digest.hex()))


class TestKeysOfCallers:
    def test_a_caller_may_bring_a_key(self, store: SessionStore) -> None:
        """It opens the session that was started with it."""
        issued = store.create("a", now=0, key="my-own-key")

        assert issued.key == "my-own-key"
        assert issued.id == store.resolve(Credential(key="my-own-key")).id

    def test_a_key_belongs_to_one_live_session(self, store: SessionStore) -> None:
        """Two live sessions with one key could not be told apart."""
        first = store.create("a", now=0, key="my-own-key")
        with pytest.raises(Conflict, match=f"session {first.id}, which is live"):
            store.create("b", now=0, key="my-own-key")

        store.end(first.id, now=1)
        second = store.create("b", now=2, key="my-own-key")

        assert second.id == store.resolve(Credential(key="my-own-key")).id
        assert store.acknowledge(first.id)
        assert second.id == store.resolve(Credential(key="my-own-key")).id

    @pytest.mark.parametrize("is_capability", [True, False])
    def test_a_key_opens_its_earlier_session_by_name(self, store: SessionStore, *, is_capability: bool) -> None:
        """A client with one key for all its sessions may reward the one that has just ended while the next is live."""
        first = store.create("a", now=0, key="my-own-key")
        store.end(first.id, now=1)
        second = store.create("b", now=2, key="my-own-key")
        by_name = [Credential(session=each.id, key="my-own-key") for each in (first, second)]

        found = [store.for_reward(each, now=3, is_capability=is_capability).id for each in by_name]
        assert [first.id, second.id] == found

    @pytest.mark.parametrize("key", ["", "short"])
    def test_a_key_must_be_a_secret(self, store: SessionStore, key: str) -> None:
        """A key that anybody would try is refused."""
        with pytest.raises(InvalidRequest, match="at least 8 characters"):
            store.create("a", now=0, key=key)


class TestEnding:
    def test_completions_come_too_late_after_the_end(self, store: SessionStore) -> None:
        """The message says what happened, when, and what to do."""
        issued = store.create("a", now=0)
        assert store.for_completion(Credential(key=issued.key), now=5).last_used_at == 5
        store.end(issued.id, now=10)

        message = f"Session {issued.id} ended 40 s ago; start a new one before sending completions."
        with pytest.raises(SessionEnded) as caught:
            store.for_completion(Credential(key=issued.key), now=50)
        assert message == str(caught.value)

    def test_rewards_are_taken_during_the_grace_period(self, store: SessionStore) -> None:
        """A judge may need a moment longer than the agent."""
        issued = store.create("a", now=0)
        session = store.end(issued.id, now=10)

        assert session is store.for_reward(Credential(key=issued.key), now=69.9)
        assert not store.is_settled(session, now=69.9)
        assert store.is_settled(session, now=70)
        with pytest.raises(SessionEnded, match="ended 60 s ago and takes rewards for 60 s only"):
            store.for_reward(Credential(key=issued.key), now=70)

    def test_ending_twice_keeps_the_first_end(self, store: SessionStore) -> None:
        """A retried request to end does not lengthen the grace period."""
        issued = store.create("a", now=0)
        store.end(issued.id, now=10)

        assert store.end(issued.id, now=50).ended_at == 10
        assert store.get(issued.id).snapshot().is_ended

    def test_unknown_sessions_cannot_be_ended(self, store: SessionStore) -> None:
        """404 by name."""
        with pytest.raises(NotFound, match="no session x"):
            store.end(SessionId("x"), now=0)


class TestForgetting:
    def test_an_acknowledged_session_is_forgotten(self, store: SessionStore) -> None:
        """Its memory is free, its id unknown and its key opens nothing; acknowledging again is harmless."""
        issued = store.create("a", now=0)
        store.end(issued.id, now=1)

        assert store.acknowledge(issued.id)
        assert not store.acknowledge(issued.id)
        assert len(store) == 0
        with pytest.raises(NotFound):
            store.get(issued.id)
        with pytest.raises(Unauthorized):
            store.resolve(Credential(key=issued.key))

    def test_a_live_session_is_not_forgotten(self, store: SessionStore) -> None:
        """Nothing is lost by acknowledging too early."""
        issued = store.create("a", now=0)
        with pytest.raises(Conflict, match="is live"):
            store.acknowledge(issued.id)

        assert store.num_live == 1


class TestExpiring:
    def test_idle_sessions_are_ended_and_kept(self, store: SessionStore) -> None:
        """A crashed agent does not hold its session for ever, and what it said can still be exported."""
        idle, used = store.create("a", now=0), store.create("b", now=0)
        store.for_completion(Credential(key=used.key), now=500)

        assert store.expire(now=600) == (idle.id,)
        assert store.expire(now=600) == ()
        assert [s.id for s in store if s.is_ended] == [idle.id]
        assert (len(store), store.num_live) == (2, 1)

    def test_a_session_that_waits_for_an_answer_is_not_idle(
        self, store: SessionStore, new_talk: Callable[..., Any]
    ) -> None:
        """A slow generation is work, not silence."""
        session = store.get(store.create("a", now=0).id)
        talk = new_talk()
        talk.tree = session.tree
        talk.begin("1", [ChatMessage(role="user", content="hi")])

        assert store.expire(now=10_000) == ()
        talk.finish("1", ChatMessage(role="assistant", content="yo"))
        assert store.expire(now=10_000) == (session.id,)


def test_a_token_factory_that_repeats_itself_is_found_out() -> None:
    """Two sessions never share an id."""
    store = SessionStore(token_factory=lambda: "same")
    store.create("a", now=0, key="first-key")

    with pytest.raises(Conflict, match="not random"):
        store.create("a", now=0, key="second-key")


def test_settings_are_checked() -> None:
    """Times that cannot be meant are refused."""
    with pytest.raises(ValueError, match="grace_seconds"):
        SessionSettings(grace_seconds=-1)
    with pytest.raises(ValueError, match="idle_seconds"):
        SessionSettings(idle_seconds=0)
