"""Harmony: channels become reasoning, content and calls."""

from __future__ import annotations

import pytest
from hypothesis import given
from tests.rendering.conversations import TOOL
from tests.rendering.formats.laws import numbered, read, texts_and_pieces, visible

from areal_actors.domain import ReasoningDelta, TextDelta, ToolCall
from areal_actors.rendering.formats.harmony import HARMONY_CALLS, HarmonyChannels

CALLS, CHANNELS = HARMONY_CALLS, HarmonyChannels()
THOUGHT = "<|channel|>analysis<|message|>hm<|end|>"
NEXT = "<|start|>assistant"
FINAL = "<|channel|>final<|message|>"
TO_A = "<|channel|>commentary to=functions.a <|constrain|>json<|message|>"
FRAGMENTS = [
    "<|start|>",
    "<|start|>assistant",
    "<|channel|>",
    "<|message|>",
    "<|end|>",
    "<|call|>",
    "<|constrain|>",
    "analysis",
    "commentary",
    "final",
    " to=functions.a",
    "to=",
    TO_A,
    f'{TO_A}{{"b": 1}}<|call|>',
    THOUGHT + NEXT,
    '{"b": 1}',
    "<|",
    "\n",
    " ",
    "x",
    "é",
]


class Both:
    """Both parsers, one behind the other, as an answer with tools is read."""

    def __init__(self, call_ids):
        self.channels, self.calls = CHANNELS.open_parser(is_open=False), CALLS.open_parser(call_ids, [TOOL])

    def pass_on(self, deltas):
        """Content goes through the second one."""
        said = []
        for delta in deltas:
            said += self.calls.feed(delta.text) if isinstance(delta, TextDelta) else (delta,)
        return tuple(said)

    def feed(self, text):
        """What is certain."""
        return self.pass_on(self.channels.feed(text))

    def finish(self):
        """What was held back."""
        return self.pass_on(self.channels.finish()) + self.calls.finish()


def parse(*pieces):
    """What the pieces of an answer say, calls numbered."""
    return read(Both(numbered()), pieces)


def test_thinking_and_answer():
    """The analysis is reasoning, the final message is content; neither is trimmed."""
    answer = parse(f"{THOUGHT}{NEXT}{FINAL} done\n<|return|>")

    assert ("hm", " done\n", ()) == (answer.reasoning, answer.content, answer.tool_calls)


def test_call_with_a_preamble():
    """Commentary without a recipient is content; with a function as recipient, it is a call."""
    answer = parse(f'{THOUGHT}{NEXT}<|channel|>commentary<|message|>I look.<|end|>{NEXT}{TO_A}{{"b":  1}}<|call|>')

    assert ("hm", "I look.") == (answer.reasoning, answer.content)
    assert (ToolCall(id="call_0", name="a", arguments='{"b":  1}'),) == answer.tool_calls


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.a <|constrain|>json<|message|>",
        "<|channel|>commentary to=functions.a<|message|>",
        "<|channel|>commentary to=functions.a json<|message|>",
        "<|channel|>analysis to=functions.a code<|message|>",
        " to=functions.a<|channel|>commentary <|constrain|>json<|message|>",
        "<|start|>assistant to=functions.a<|channel|>commentary json<|message|>",
    ],
)
@pytest.mark.parametrize("closing", ["<|call|>", "<|end|>", ""])
def test_all_spellings_of_a_call(header, closing):
    """The recipient stands before the channel or behind it, with or without a type; the last tag may be missing."""
    answer = parse(f"{header}{{}}{closing}")

    assert (None, [("a", "{}")]) == (answer.content, [(call.name, call.arguments) for call in answer.tool_calls])


def test_text_without_a_header_is_content():
    """Also what only begins like a header."""
    for text in ("hello", "to=you", " to=you", "to the point", "<|", "<|end|>", "\n"):
        assert text == parse(text).content


@pytest.mark.parametrize(
    "text",
    [
        "<|channel|>",
        "<|channel|>final",
        "<|channel|>what<|message|>x",
        "<|channel|>final\n<|message|>x",
        "<|channel|>commentary to=python<|message|>x",
        "<|start|>user<|message|>x",
        "<|start|>assistant",
        f"{TO_A}x",
        TO_A,
        f"{TO_A}[1]",
        "<|channel|>" + "a" * 300 + "<|message|>x",
        "to=" + "a" * 300,
    ],
)
def test_malformed_message_stays_text(text):
    """Unknown channels, other recipients, broken headers and broken calls are content, tags and all."""
    assert (text, ()) == (parse(text).content, parse(text).tool_calls)


@given(texts_and_pieces(FRAGMENTS))
def test_parsing_does_not_depend_on_chunks(case):
    """However an answer is cut, the message is the same."""
    text, pieces = case

    assert parse(text) == parse(*pieces) == parse(*text)


@given(texts_and_pieces(FRAGMENTS))
def test_text_is_not_lost(case):
    """No visible character disappears: it is thought, said, or part of a call."""
    text, _ = case
    answer = parse(text)
    written = "".join(call.name + call.arguments for call in answer.tool_calls)

    assert sorted(visible(text)) == sorted(visible((answer.reasoning or "") + (answer.content or "") + written))


def test_deltas_are_emitted_as_soon_as_they_are_certain():
    """Thinking and words flow; a call is said when it is complete."""
    parser = Both(numbered())

    assert () == parser.feed("<|channel|>analysis<|mess")
    assert (ReasoningDelta(text="hm"),) == parser.feed("age|>hm<|")
    assert (TextDelta(text="done"),) == parser.feed(f"end|>{NEXT}{FINAL}done")
    assert () == parser.feed(f"<|end|>{NEXT}{TO_A}{{}}")
    assert 2 == len(parser.feed("<|call|>"))
