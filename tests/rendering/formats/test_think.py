"""Thinking is told from content."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_actors.rendering.formats.think import ThinkTags
from areal_actors.rendering.parsers import join_deltas

fragments = st.sampled_from(["<think>", "</think>", "<thi", "nk>", "</", "\n", " ", "x", "é"])


def parse(*pieces, is_open=False):
    """What the pieces of an answer say."""
    parser = ThinkTags().open_parser(is_open=is_open)
    return join_deltas([delta for piece in pieces for delta in parser.feed(piece)] + list(parser.finish()))


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>\na\nb\n</think>\n\nc\n", "a\nb", "c\n"),
        ("\n <think>a</think>c", "a", "c"),
        ("<think>\n\n</think>\n\nc", "", "c"),
        ("<think>a", "a", ""),
        ("<think>", None, ""),
        ("<thin", None, "<thin"),
        ("c <think>a</think>", None, "c <think>a</think>"),
        ("a</think>c", None, "a</think>c"),
        ("<think>a</think>c<think>d</think>", "a", "c<think>d</think>"),
        ("\n\nc", None, "\n\nc"),
        ("", None, ""),
    ],
)
def test_thinking_is_what_the_tags_enclose(text, reasoning, content):
    """Only at the beginning, without the line breaks at the tags; an empty block is not the same as none."""
    answer = parse(text)

    assert (reasoning, content) == (answer.reasoning, answer.content)


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [("a\n</think>\n\nc", "a", "c"), ("</think>c", "", "c"), ("a", "a", ""), ("", None, "")],
)
def test_prompt_may_have_opened_the_thinking(text, reasoning, content):
    """The answer then begins inside it."""
    answer = parse(text, is_open=True)

    assert (reasoning, content) == (answer.reasoning, answer.content)


@given(st.lists(fragments | st.text(max_size=3), max_size=12), st.booleans())
def test_parsing_does_not_depend_on_chunks(parts, is_open):
    """However an answer is cut, the message is the same."""
    text = "".join(parts)

    assert parse(text, is_open=is_open) == parse(*parts, is_open=is_open) == parse(*text, is_open=is_open)
