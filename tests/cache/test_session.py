"""Sessions: access by keys and URLs, and lifetimes."""

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


def test_session_id_begins_with_the_task(store: SessionStore) -> None:
    assert store.create("task-0-0", now=0).id == "task-0-0-0001"
    assert store.create(now=0).id == "session-0004"


@given(st.text())
def test_session_ids_are_url_segments_of_bounded_length(task: str) -> None:
    session_id = new_store().create(task, now=0).id

    assert set(session_id) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
    assert session_id[0] not in "-."
    assert len(session_id) <= 64


def test_session_does_not_keep_its_key(store: SessionStore) -> None:
    issued = store.create("t", now=0)

    assert issued.key not in repr(issued)
    assert issued.key not in repr(store.get(issued.id))


class TestResolving:
    @pytest.mark.parametrize("key", [None, "DUMMY", "", "own"])
    def test_session_url_accepts_any_key_or_none(self, store: SessionStore, key: str | None) -> None:
        issued = store.create("a", now=0)
        credential = Credential(session=issued.id, key=issued.key if key == "own" else key)

        assert issued.id == store.resolve(credential).id

    def test_session_url_refuses_the_key_of_another_session(self, store: SessionStore) -> None:
        one, two = store.create("a", now=0), store.create("b", now=0)

        with pytest.raises(Unauthorized, match="belongs to another session"):
            store.resolve(Credential(session=one.id, key=two.key))

    def test_session_id_in_a_body_needs_its_key(self, store: SessionStore) -> None:
        one, two = store.create("a", now=0), store.create("b", now=0)

        assert one.id == store.resolve(Credential(session=one.id, key=one.key, is_capability=False)).id
        for key in (None, "DUMMY", two.key):
            with pytest.raises(Unauthorized):
                store.resolve(Credential(session=one.id, key=key, is_capability=False))

    def test_known_and_unknown_ids_answer_alike_without_a_key(self, store: SessionStore) -> None:
        known = store.create("a", now=0).id
        messages = set()
        for session in (known, SessionId("a-ffff")):
            with pytest.raises(Unauthorized) as caught:
                store.resolve(Credential(session=session, key="guess-guess", is_capability=False))
            messages.add(str(caught.value))

        assert len(messages) == 1

    def test_unknown_session_is_404_and_unknown_key_401(self, store: SessionStore) -> None:
        """The key is not repeated."""
        with pytest.raises(NotFound, match="no session a-9; start one"):
            store.resolve(Credential(session=SessionId("a-9")))
        with pytest.raises(Unauthorized) as caught:
            store.resolve(Credential(key="sk-secret-guess"))
        with pytest.raises(Unauthorized):
            store.resolve(Credential())

        assert "guess" not in str(caught.value)


class TestKeysOfCallers:
    def test_caller_may_bring_a_key(self, store: SessionStore) -> None:
        issued = store.create("a", now=0, key="my-own-key")

        assert issued.key == "my-own-key"
        assert issued.id == store.resolve(Credential(key="my-own-key")).id

    def test_key_of_a_live_session_cannot_be_used_again(self, store: SessionStore) -> None:
        first = store.create("a", now=0, key="my-own-key")
        with pytest.raises(Conflict, match=f"session {first.id}, which is live"):
            store.create("b", now=0, key="my-own-key")

        store.end(first.id, now=1)
        second = store.create("b", now=2, key="my-own-key")

        assert second.id == store.resolve(Credential(key="my-own-key")).id
        assert store.acknowledge(first.id)
        assert second.id == store.resolve(Credential(key="my-own-key")).id

    @pytest.mark.parametrize("is_capability", [True, False])
    def test_key_opens_its_earlier_session_by_id(self, store: SessionStore, *, is_capability: bool) -> None:
        """The next session with that key is live."""
        first = store.create("a", now=0, key="my-own-key")
        store.end(first.id, now=1)
        second = store.create("b", now=2, key="my-own-key")
        by_name = [
            Credential(session=each.id, key="my-own-key", is_capability=is_capability) for each in (first, second)
        ]

        found = [store.for_reward(each, now=3).id for each in by_name]
        assert [first.id, second.id] == found

    @pytest.mark.parametrize("key", ["", "short"])
    def test_short_keys_are_refused(self, store: SessionStore, key: str) -> None:
        with pytest.raises(InvalidRequest, match="at least 8 characters"):
            store.create("a", now=0, key=key)


class TestEnding:
    def test_completions_after_the_end_are_refused(self, store: SessionStore) -> None:
        issued = store.create("a", now=0)
        assert store.for_completion(Credential(key=issued.key), now=5).last_used_at == 5
        store.end(issued.id, now=10)

        message = f"Session {issued.id} ended 40 s ago; start a new one before sending completions."
        with pytest.raises(SessionEnded) as caught:
            store.for_completion(Credential(key=issued.key), now=50)
        assert message == str(caught.value)

    def test_rewards_are_accepted_during_the_grace_period(self, store: SessionStore) -> None:
        issued = store.create("a", now=0)
        session = store.end(issued.id, now=10)

        assert session is store.for_reward(Credential(key=issued.key), now=69.9)
        assert not store.is_settled(session, now=69.9)
        assert store.is_settled(session, now=70)
        with pytest.raises(SessionEnded, match="ended 60 s ago and takes rewards for 60 s only"):
            store.for_reward(Credential(key=issued.key), now=70)


class TestForgetting:
    def test_acknowledged_session_is_forgotten(self, store: SessionStore) -> None:
        issued = store.create("a", now=0)
        store.end(issued.id, now=1)

        assert store.acknowledge(issued.id)
        assert not store.acknowledge(issued.id)
        assert len(store) == 0
        with pytest.raises(NotFound):
            store.get(issued.id)
        with pytest.raises(Unauthorized):
            store.resolve(Credential(key=issued.key))

    def test_live_session_cannot_be_acknowledged(self, store: SessionStore) -> None:
        issued = store.create("a", now=0)
        with pytest.raises(Conflict, match="is live"):
            store.acknowledge(issued.id)

        assert store.num_live == 1


class TestExpiring:
    def test_idle_sessions_are_ended_and_kept(self, store: SessionStore) -> None:
        """They can still be exported."""
        idle, used = store.create("a", now=0), store.create("b", now=0)
        store.for_completion(Credential(key=used.key), now=500)

        assert store.expire(now=600) == (idle.id,)
        assert store.expire(now=600) == ()
        assert [s.id for s in store if s.is_ended] == [idle.id]
        assert (len(store), store.num_live) == (2, 1)

    def test_session_with_a_pending_request_is_not_idle(
        self, store: SessionStore, new_talk: Callable[..., Any]
    ) -> None:
        session = store.get(store.create("a", now=0).id)
        talk = new_talk()
        talk.tree = session.tree
        talk.begin("1", [ChatMessage(role="user", content="hi")])

        assert store.expire(now=10_000) == ()
        talk.finish("1", ChatMessage(role="assistant", content="yo"))
        assert store.expire(now=10_000) == (session.id,)


def test_repeated_token_is_refused() -> None:
    """Two sessions never share an id."""
    store = SessionStore(token_factory=lambda: "same")
    store.create("a", now=0, key="first-key")

    with pytest.raises(Conflict, match="not random"):
        store.create("a", now=0, key="second-key")


def test_negative_lifetimes_are_refused() -> None:
    with pytest.raises(ValueError, match="grace_seconds"):
        SessionSettings(grace_seconds=-1)
    with pytest.raises(ValueError, match="idle_seconds"):
        SessionSettings(idle_seconds=0)
