"""Keys, sessions and credentials."""

from __future__ import annotations

import pytest

from areal_actors.domain import Credential, SessionId
from areal_actors.errors import Unauthorized
from areal_actors.proxy.access import Authenticator, create_admin_key, read_key

KEEPER = Authenticator(admin_key="sk-admin")
STRICT = Authenticator(admin_key="sk-admin", session_urls=False)


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({b"authorization": b"Bearer k"}, "k"),
        ({b"authorization": b"bearer  k "}, "k"),
        ({b"x-api-key": b"k"}, "k"),
        ({b"authorization": b"Bearer a", b"x-api-key": b"b"}, "a"),
        ({b"authorization": b"Basic xyz", b"x-api-key": b"b"}, "b"),
        ({b"authorization": b"Bearer "}, None),
        ({b"authorization": b"Bearer \xff"}, "\xff"),
        ({}, None),
    ],
)
def test_key_is_read_from_either_header(headers, expected):
    """OpenAI's clients send a bearer token, some of Anthropic's ``x-api-key``."""
    assert read_key(headers) == expected


def test_session_url_is_a_capability():
    """Who knows the URL needs no key; whatever placeholder came along is passed on for the sessions to judge."""
    credential = KEEPER.credential(key="DUMMY", in_path="s", in_request=None)

    assert credential == Credential(session=SessionId("s"), key="DUMMY", is_capability=True)
    assert KEEPER.credential(key=None, in_path="s", in_request=None).is_capability


def test_session_named_in_body_or_query_needs_its_key():
    """A name in a query or a body opens nothing by itself, nor does a URL where that is switched off."""
    for keeper, place in ((KEEPER, "in_request"), (STRICT, "in_path")):
        arguments = {"in_path": None, "in_request": None, place: "s"}

        assert not keeper.credential(key="k", **arguments).is_capability
        with pytest.raises(Unauthorized):
            keeper.credential(key=None, **arguments)


def test_admin_key_opens_every_session():
    """The controller of a run rewards and ends sessions whose keys it never saw."""
    for keeper in (KEEPER, STRICT):
        assert keeper.credential(key="sk-admin", in_path=None, in_request="s").has_control


def test_other_keys_have_no_control_of_named_sessions():
    """The sessions judge keys; a URL and placeholders are never enough to reward."""
    for keeper in (KEEPER, STRICT):
        for place in ("in_path", "in_request"):
            assert not keeper.credential(key="k", **({"in_path": None, "in_request": None} | {place: "s"})).has_control


def test_administration_needs_the_admin_key():
    """Keys of sessions, no key and keys that are not ASCII are refused alike."""
    KEEPER.require_admin("sk-admin")
    for key in ("sk-other", None, "\xff"):
        with pytest.raises(Unauthorized):
            KEEPER.require_admin(key)


def test_admin_key_is_not_in_repr():
    """A representation gives nothing away, and made keys are never the same."""
    assert "sk-admin" not in repr(KEEPER)
    assert create_admin_key() != create_admin_key()
