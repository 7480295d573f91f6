"""DeepSeek's tool formats: calls between special tokens, with and without fences."""

from __future__ import annotations

import pytest
from tests.rendering.formats.laws import parse

from areal_actors.rendering.parsers import TOOL_FORMATS

FENCED, BARE = TOOL_FORMATS["deepseek-v3"], TOOL_FORMATS["deepseek-v3.1"]
BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END, SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"


def named(answer):
    """Names and arguments of the calls."""
    return [(call.name, call.arguments) for call in answer.tool_calls]


@pytest.mark.parametrize("form", [FENCED, BARE])
def test_either_form_is_read(form):
    """With a type and a fence, or with nothing but the arguments; several calls, with text in front."""
    first = f'Hm.\n{BEGIN}{CALL}function{SEP}a\n```json\n{{"b":  1}}\n```{CALL_END}'
    fenced = f"{first}\n{CALL}function{SEP}c\n```json\n{{}}\n```"
    bare = f'Hm.{BEGIN}{CALL}a{SEP}{{"b":  1}}{CALL_END}{CALL}c{SEP}{{}}'

    for text in (fenced, bare):
        answer = parse(form, f"{text}{CALL_END}{END}")
        assert ("Hm.", [("a", '{"b":  1}'), ("c", "{}")]) == (answer.content, named(answer))


def test_tags_may_be_missing():
    """The outer ones everywhere, the last closing one at the end of the answer."""
    assert [("a", "{}")] == named(parse(BARE, f"{CALL}a{SEP}{{}}{CALL_END}"))
    assert [("a", "{}")] == named(parse(BARE, f"{BEGIN}{CALL}a{SEP}{{}}"))


@pytest.mark.parametrize(
    "body",
    [
        "",
        BEGIN,
        END,
        CALL,
        f"{BEGIN}x{CALL}",
        f"{CALL}a{CALL_END}",
        f"{CALL}a{SEP}{CALL_END}",
        f"{CALL}{SEP}{{}}{CALL_END}",
        f"{CALL}a{SEP}[1]{CALL_END}",
        f"{CALL}a{SEP}{{{CALL_END}",
        f"{CALL}function{SEP}a\n```json\n[]\n```{CALL_END}",
        f"{CALL}a b{SEP}{{}}{CALL_END}",
        f"{CALL}a{SEP}{'[' * 100_000}{CALL_END}",
    ],
)
def test_malformed_call_stays_text(body):
    """Broken JSON, missing names and stray tags are content."""
    text = f"so: {body} ok"

    assert (text, ()) == (parse(FENCED, text).content, parse(FENCED, text).tool_calls)
