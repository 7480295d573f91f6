"""Which requests are given a session's key: the rule alone, without a network."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_actors.client.attribution import Attribution, attribute, attributed_to, origin_of, parse_root, unattributed
from areal_actors.domain import SessionId
from areal_actors.errors import ConfigError

INNER = SessionId("inner-" + "i" * 22)
OUTER = SessionId("outer-" + "o" * 22)
FOREIGN = "foreign-" + "f" * 22


def session(name=INNER, root="http://train.example:8080"):
    return Attribution.to_session(name, f"sk-{name[:5]}", root)


def sent(url, **headers):
    attribute(url, lambda: headers)
    return headers


@pytest.mark.parametrize(
    "url",
    [
        "http://train.example:8080/v1/chat/completions",
        "http://train.example:8080/v1/v1/chat/completions",
        "http://train.example:8080/chat/completions",
        "HTTP://Train.Example:8080/rl/v1/set_reward?x=1",
        "http://user:password@train.example:8080/v1/models",
        f"http://train.example:8080/{INNER}/v1/chat/completions",
    ],
)
def test_attribution_covers_requests_to_the_proxy(url):
    """However the URL is written."""
    with attributed_to(session()):
        assert {"Authorization": "Bearer sk-inner"} == sent(url)
        assert {"Authorization": "Bearer sk-inner", "x-api-key": "sk-inner"} == sent(url, **{"x-api-key": "sk-mine"})
    assert {} == sent(url)


@pytest.mark.parametrize(
    "url",
    [
        "https://train.example:8080/v1/chat/completions",
        "http://train.example/v1/chat/completions",
        "http://train.example:8081/v1/chat/completions",
        "http://train.example.evil.example:8080/v1/chat/completions",
        "http://evil.example:8080/http://train.example:8080/v1",
        "http://train.example:8080@evil.example:8080/v1",
        "http://train.example:8080/rl/v1/start_session",
        "http://train.example:8080/grant_capacity",
        "http://train.example:8080/export_trajectories",
        "http://train.example:8080/",
        f"http://train.example:8080/{FOREIGN}/v1/chat/completions",
        f"http://train.example:8080/foreign-a.{'f' * 22}/v1/chat/completions",
        "http://[broken/v1",
        "http://train.example:99999999/v1",
        "/v1/chat/completions",
    ],
)
def test_attribution_leaves_other_requests_unchanged(url):
    """Other servers, routes that no session's key opens, sessions of other programs, and what is not a URL."""
    with attributed_to(session()):
        assert {"authorization": "mine"} == sent(url, authorization="mine")


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST", "127.0.0.1", "127.0.0.2", "[::1]", "0.0.0.0", "localhost."])
def test_attribution_knows_the_names_of_loopback(host):
    """All of them are one; ports tell servers apart."""
    with attributed_to(session(root="http://127.0.0.1:8080")):
        assert {} != sent(f"http://{host}:8080/v1/models")
        assert {} == sent(f"http://{host}:8081/v1/models")


def test_attribution_knows_default_ports():
    """80 and 443, each with its scheme."""
    assert origin_of("http://a/v1") == origin_of("http://a:80/") != origin_of("https://a:80")
    assert origin_of("https://a/v1") == origin_of("https://A:443/")


def test_attribution_respects_the_path_of_the_proxy():
    """What else is served by the same host is not ours."""
    with attributed_to(session(root="https://host/train")):
        assert {} != sent("https://host/train/v1/chat/completions")
        assert {} == sent("https://host/other/v1/chat/completions")
        assert {} == sent("https://host/training/v1/chat/completions")


def test_attribution_uses_the_innermost_session_or_the_url():
    """Sessions within each other; and within none of them where a program sends its own keys."""
    url = "http://train.example:8080"
    with attributed_to(session(OUTER)):
        with attributed_to(session()):
            assert {"Authorization": "Bearer sk-inner"} == sent(f"{url}/v1/models")
            assert {"Authorization": "Bearer sk-outer"} == sent(f"{url}/{OUTER}/v1/models")
            with unattributed():
                assert {} == sent(f"{url}/v1/models")
        assert {"Authorization": "Bearer sk-outer"} == sent(f"{url}/v1/models")
        assert {} == sent(f"{url}/{INNER}/v1/models")


def test_attribution_separates_two_proxies():
    """Each proxy's requests go to its own session, however they are nested."""
    with attributed_to(session(OUTER, "http://judge.example")), attributed_to(session()):
        assert {"Authorization": "Bearer sk-outer"} == sent("http://judge.example/v1/models")
        assert {"Authorization": "Bearer sk-inner"} == sent("http://train.example:8080/v1/models")
        assert {} == sent(f"http://judge.example/{INNER}/v1/models")


@given(suffixes=st.lists(st.sampled_from(["/", "/v1", "/v1/"]), max_size=4))
def test_root_of_a_base_url_has_no_version(suffixes):
    """``/v1`` may stand at its end, or twice, or not at all."""
    assert "http://host:1/a" == parse_root("http://host:1/a" + "".join(suffixes))


@pytest.mark.parametrize("url", ["", "/v1", "localhost:8080", "ftp://host", "http://", "http://host:port"])
def test_invalid_base_url_is_refused(url):
    """By name, before anything is sent there."""
    with pytest.raises(ConfigError, match="base_url"):
        parse_root(url)
