"""Ids and keys name the home of their session, and whoever forwards a request finds it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_actors.cache import SessionStore
from areal_actors.cache.session import SHARD_NAME, create_token_factory, shard_of
from areal_actors_service.entry import EntryConfig, Targets

NAMES = st.from_regex(SHARD_NAME, fullmatch=True)
BACKENDS = {"a": "http://127.0.0.1:1", "b": "http://127.0.0.1:2", "c": "http://127.0.0.1:3/"}


@given(home=NAMES, task=st.text(max_size=80))
def test_targets_find_the_proxy_in_ids_and_keys(home, task):
    """Whatever the caller's task is called."""
    issued = SessionStore(token_factory=create_token_factory(home)).create(task, now=0.0)

    assert (home, home) == (shard_of(issued.id), shard_of(issued.key))


@given(st.text())
def test_targets_accept_only_names_of_proxies(text):
    """Any text may come as a key."""
    home = shard_of(text)

    assert home is None or f"{home}." in text


@given(task=st.text(max_size=80))
def test_targets_ignore_names_in_task_ids(task):
    """A task that looks like an id of another home changes nothing: the last token decides."""
    issued = SessionStore(token_factory=create_token_factory("a")).create(f"{task}-b.AAAAAAAAAAAAAAAAAAAAAA", now=0.0)

    assert "a" == shard_of(issued.id)


def test_targets_rotate_new_sessions_past_proxies_that_are_down():
    """Who could not be reached is tried last, until its time is over."""
    targets = Targets(BACKENDS, down_seconds=2.0)
    first = [targets.in_turn(0.0)[0].name for _ in range(6)]
    down = targets.home("sk-b." + "x" * 22)
    assert down is not None
    targets.note_down(down, 10.0)
    while_down = {tuple(backend.name for backend in targets.in_turn(11.0))[-1] for _ in range(3)}
    later = {targets.in_turn(12.5)[0].name for _ in range(3)}

    assert ["a", "b", "c", "a", "b", "c"] == first
    assert ({"b"}, {"a", "b", "c"}) == (while_down, later)
    assert "http://127.0.0.1:3" == [backend.url for backend in targets][-1]


@given(keys=st.lists(st.text(min_size=1), min_size=1, max_size=20))
def test_targets_send_a_plain_key_to_one_proxy(keys):
    """While the same ones are up, in whatever order they are configured."""
    targets, reversed_targets = Targets(BACKENDS), Targets(dict(reversed(BACKENDS.items())))

    for key in keys:
        assert targets.by_key(key, 0.0) == targets.by_key(key, 0.0)
        assert [b.name for b in targets.by_key(key, 0.0)] == [b.name for b in reversed_targets.by_key(key, 0.0)]


@pytest.mark.parametrize(
    "backends", [{}, {"A": "http://x"}, {"a": "x:1"}, {"a": "http://x/v1"}, {"a-b": "http://x"}, {"a": "ftp://x"}]
)
def test_targets_name_wrong_settings(backends):
    """Before anything listens."""
    with pytest.raises(ValueError, match="backends"):
        EntryConfig(backends=backends)
