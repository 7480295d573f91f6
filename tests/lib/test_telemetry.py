"""Logging: what is written where, and that no secret is."""

from __future__ import annotations

import base64
import io
import json
import logging
import secrets
from pathlib import Path

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from areal_actors.domain import Episode, SessionId
from areal_actors.lib.telemetry import get_logger, kind_of, logging_to_file, logging_to_stream, redact

log = get_logger("areal_actors.tests")

FULL = Path("/dev/full")


def test_log_lines_have_events_and_facts():
    """A stream that is not a terminal gets one line without colours, event first, facts after it."""
    stream = io.StringIO()

    with logging_to_stream(stream):
        log.info("episode_failed", reason="the agent raised", member=3)

    assert stream.getvalue().count("\n") == 1
    assert "episode_failed" in stream.getvalue()
    assert "member=3" in stream.getvalue()
    assert "\x1b" not in stream.getvalue()


def test_log_file_has_json_lines(tmp_path):
    """Each line of a log file is a JSON object with event, level, logger, timestamp and the facts."""
    path = tmp_path / "logs" / "run.jsonl"

    with logging_to_file(path):
        log.warning("checkpoint_late", step=3)
        logging.getLogger("other.package").warning("hello %s", "you")

    ours, theirs = map(json.loads, path.read_text().splitlines())
    assert (
        ours["event"],
        ours["level"],
        ours["logger"],
        ours["step"],
    ) == ("checkpoint_late", "warning", "areal_actors.tests", 3)
    assert (theirs["event"], theirs["logger"]) == ("hello you", "other.package")
    assert {"timestamp"} <= ours.keys() & theirs.keys()


def test_log_has_tracebacks(tmp_path):
    """``log.exception`` keeps the traceback, in files and for people, with secrets cut out of it."""
    path, stream, key = tmp_path / "run.jsonl", io.StringIO(), f"sk-{secrets.token_urlsafe(16)}"

    with logging_to_file(path), logging_to_stream(stream):
        try:
            int(f"bad key {key}")
        except ValueError:
            log.exception("request_failed")

    for text in (path.read_text(), stream.getvalue()):
        assert "Traceback" in text
        assert "bad key sk-" in text
        assert key not in text


def test_log_scopes_restore_the_configuration():
    """Handlers and levels are restored, whatever happens inside."""
    root, ours, theirs = logging.getLogger(), logging.getLogger("areal_actors"), logging.getLogger("hypercorn")
    before = list(root.handlers), ours.level, theirs.level

    with pytest.raises(KeyError), logging_to_stream(io.StringIO(), level=logging.DEBUG):
        raise KeyError

    assert before == (list(root.handlers), ours.level, theirs.level)


def test_log_leaves_out_details_of_other_libraries():
    """Libraries below us are heard from a warning on."""
    stream = io.StringIO()

    with logging_to_stream(stream):
        logging.getLogger("httpx").info("HTTP Request: POST ...")
        logging.getLogger("hypercorn.error").warning("socket in use")

    assert "HTTP Request" not in stream.getvalue()
    assert "socket in use" in stream.getvalue()


def test_log_levels_of_stream_and_file_are_independent(tmp_path):
    """Two scopes with different levels each get what they asked for."""
    path, stream = tmp_path / "run.jsonl", io.StringIO()

    with logging_to_file(path, level=logging.DEBUG), logging_to_stream(stream, level=logging.WARNING):
        log.debug("weights_published", version=1)

    assert "weights_published" in path.read_text()
    assert stream.getvalue() == ""


@given(
    prefix=st.sampled_from(["", "train-5-0-", "task.a_b-"]),
    secret=st.binary(min_size=16, max_size=16),
    process=st.sampled_from(["", ".1", ".27"]),
)
def test_log_redacts_secrets(prefix, secret, process):
    """The random part of a session id or key never survives in a URL, a message, a header or a fact."""
    token = base64.urlsafe_b64encode(secret).rstrip(b"=").decode()
    session, stream = prefix + token + process, io.StringIO()

    with logging_to_stream(stream):
        log.warning(
            "POST %s: %s",
            f"http://127.0.0.1:8000/{session}/v1/chat/completions",
            f"Session {session} ended 40 s ago",
            session=session,
            api_key=f"sk-{token}{process}",
            headers={"Authorization": f"Bearer sk-{token}{process}"},
            urls=(f"http://127.0.0.1:8000/{session}/rl/set_reward", f"http://127.0.0.1:8000/{session}"),
        )

    assert token not in stream.getvalue()
    assert f"{prefix}{token[:4]}…" in stream.getvalue()


def test_log_keeps_ordinary_text():
    """Long names, paths and URLs without a session stay readable."""
    text = "saved runs/smollm2/a-very-long-trial-name_with_words/weights at http://localhost:6006/ (see sk-learn)"
    text += "; send the admin key as 'Authorization: Bearer <key>' or 'x-api-key'"

    assert text == redact(text)


def test_log_keeps_two_files(tmp_path):
    """The newest records, in a bounded number of bytes."""
    path = tmp_path / "log.jsonl"
    with logging_to_file(path, max_bytes=1000):
        for number in range(100):
            log.warning("counted", number=number)
    text = path.with_name("log.jsonl.1").read_text() + path.read_text()
    numbers = [json.loads(line)["number"] for line in text.splitlines()]

    assert ["log.jsonl", "log.jsonl.1"] == sorted(file.name for file in tmp_path.iterdir())
    assert list(range(numbers[0], 100)) == numbers
    assert all(file.stat().st_size <= 1000 for file in tmp_path.iterdir())


@pytest.mark.skipif(not FULL.exists(), reason="only Linux has a file that is always full")
def test_log_on_a_full_disk_loses_records_only(capsys):
    """It is said once, without a traceback for each of them, and the block ends as it would have."""
    with logging_to_file(FULL):
        log.warning("first")
        log.warning("second")

    assert [f"{FULL} cannot be written: No space left on device"] == capsys.readouterr().err.splitlines()


@given(secret=st.binary(min_size=16, max_size=16), process=st.sampled_from(["", ".1"]))
def test_failure_of_an_episode_has_no_secret_and_a_kind(secret, process):
    """Also where an agent's own exception quotes the bare id of its session; ids and keys make no other kind."""
    token = base64.urlsafe_b64encode(secret).rstrip(b"=").decode()
    session = f"train-5-0-{token}{process}"
    failure = f"KeyError: '{session}' with sk-{token}, number {secret[0]}"
    episode = Episode(session=SessionId(session), member=0, failure=failure, traceback=failure, cut_short=failure)

    assert all(token not in text for text in (episode.failure, episode.traceback, episode.cut_short))
    assert kind_of(episode.failure) == kind_of(failure) == "KeyError: '#' with #, number #"
    assert evolve(episode, member=1).failure == episode.failure
