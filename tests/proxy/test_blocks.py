"""Content and tools that the model cannot use."""

from __future__ import annotations

from base64 import b64encode
from contextlib import suppress

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_actors.errors import InvalidRequest, UnsupportedParameter
from areal_actors.proxy import ProxyConfig
from areal_actors.proxy.dialects.blocks import UnsupportedBlocks, replace_blocks
from areal_actors.proxy.dialects.chat.answer import ChatDialect
from areal_actors.proxy.dialects.messages.answer import MessagesDialect
from areal_actors.proxy.dialects.responses.answer import ResponsesDialect
from areal_actors_testing.serving import open_scripted_proxy

PNG = b64encode(
    b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + (640).to_bytes(4, "big") + (480).to_bytes(4, "big") + b"\0" * 9
).decode()
ANTHROPIC_IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}
CHAT_IMAGE = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}
RESPONSES_IMAGE = {"type": "input_image", "image_url": f"data:image/png;base64,{PNG}"}
SEEN = "[image/png: an image, which this model cannot see]"
REFERENCE = {"type": "tool_reference", "tool_name": "WebFetch"}
TOLERANT = UnsupportedBlocks.PLACEHOLDER

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "content", "source", "image_url", "output", "x"]), inner, max_size=3)
    ),
    max_leaves=12,
)


REFUSING = UnsupportedBlocks.REFUSE


def ask(dialect, block, policy=REFUSING):
    """The messages of a request with a text and ``block``, as the dialect reads them under ``policy``."""
    if isinstance(dialect, ResponsesDialect):
        item = {"role": "user", "content": [{"type": "input_text", "text": "look"}, block]}
        return parse(dialect, {"input": [item]}, policy).messages
    message = {"role": "user", "content": [{"type": "text", "text": "look"}, block]}
    return parse(dialect, {"messages": [message]}, policy).messages


def parse(dialect, body, policy=REFUSING):
    """A request as the dialect reads it under ``policy``."""
    return dialect.parse(replace_blocks(body, policy)).request


CASES = [(ChatDialect, CHAT_IMAGE), (MessagesDialect, ANTHROPIC_IMAGE), (ResponsesDialect, RESPONSES_IMAGE)]


@pytest.mark.parametrize(("dialect", "image"), CASES)
def test_images_are_refused_or_described(dialect, image):
    """By default with 400; or as a placeholder with type and size."""
    with pytest.raises(UnsupportedParameter):
        ask(dialect(), image)

    assert ask(dialect(), image, TOLERANT)[0].content == f"look\n{SEEN}"


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"type": "document", "title": "a.pdf", "source": {"media_type": "application/pdf"}}, "application/pdf, a.pdf"),
        ({"type": "image", "source": {"type": "url", "url": "https://x/y.png"}}, "https://x/y.png"),
        ({"type": "image", "source": {"media_type": "image/png", "data": "###"}}, "[image/png: an image"),
        (REFERENCE, "[Tool WebFetch is available.]"),
    ],
)
def test_placeholder_describes_the_image(block, words):
    """Media type, name and URL, where the block has them."""
    assert words in ask(MessagesDialect(), block, TOLERANT)[0].content


def test_tool_reference_is_described():
    """Claude Code's tool search answers with references: within a result, their names are the result."""
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [REFERENCE]}
    body = {"messages": [{"role": "user", "content": "hi"}, {"role": "user", "content": [result]}]}

    assert parse(MessagesDialect(), body).messages[-1].content == "[Tool WebFetch is available.]"


def test_images_in_results_are_replaced():
    """An agent that reads a picture sends it in a tool's result."""
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [ANTHROPIC_IMAGE]}
    body = {"messages": [{"role": "user", "content": "hi"}, {"role": "user", "content": [result]}]}
    output = {"type": "function_call_output", "call_id": "c", "output": [RESPONSES_IMAGE]}

    assert parse(MessagesDialect(), body, TOLERANT).messages[-1].content == SEEN
    assert parse(ResponsesDialect(), {"input": [output]}, TOLERANT).messages[-1].content == SEEN


@given(st.dictionaries(st.sampled_from(["messages", "input", "tools", "x"]), json_values, max_size=4))
def test_blocks_of_any_json_are_accepted(body):
    """Malformed bodies pass unchanged in shape: the dialect refuses them by name. Malformed images are refused here."""
    with suppress(InvalidRequest):
        assert replace_blocks(body, TOLERANT).keys() == body.keys()


@pytest.mark.parametrize(
    ("dialect", "image", "field"),
    [
        (ChatDialect, {"type": "image_url"}, "image_url"),
        (ChatDialect, {"type": "image_url", "image_url": {}}, "image_url.url"),
        (ChatDialect, {"type": "image_url", "image_url": {"url": 7}}, "image_url.url"),
        (ResponsesDialect, {"type": "input_image"}, "image_url"),
        (ResponsesDialect, {"type": "input_image", "image_url": ["https://x/y.png"]}, "image_url"),
        (ResponsesDialect, {"type": "input_image", "file_id": 7}, "file_id"),
        (MessagesDialect, {"type": "image"}, "source"),
        (MessagesDialect, {"type": "image", "source": "https://x/y.png"}, "source"),
        (MessagesDialect, {"type": "image", "source": {"type": "url"}}, "source"),
        (MessagesDialect, {"type": "image", "source": {"type": "url", "url": 7}}, "source.url"),
        (MessagesDialect, {"type": "image", "source": {"type": "base64", "data": PNG}}, "source.media_type"),
        (MessagesDialect, {"type": "image", "source": {"media_type": "image/png", "data": 7}}, "source.data"),
    ],
)
def test_malformed_image_is_refused(dialect, image, field):
    """A placeholder, or a gap, would hide the mistake from the author of the client."""
    with pytest.raises(InvalidRequest) as caught:
        ask(dialect(), image, TOLERANT)

    base = "input" if dialect is ResponsesDialect else "messages"
    assert caught.value.param == f"{base}[0].content[1].{field}"


def test_uploaded_image_is_described():
    """It has an id of the vendor's in place of data or URL."""
    image = {"type": "input_image", "file_id": "file_1"}

    assert ask(ResponsesDialect(), image, TOLERANT)[0].content == "look\n[image: an image, which this model cannot see]"


@pytest.mark.anyio
async def test_block_policy_reaches_the_routes():
    """A picture read by an agent does not end the episode."""
    config = ProxyConfig(unsupported_blocks=TOLERANT)
    body = {"max_tokens": 64, "messages": [{"role": "user", "content": [ANTHROPIC_IMAGE]}]}
    async with (
        open_scripted_proxy(config=config) as proxy,
        proxy.open_session() as session,
        httpx.AsyncClient() as http,
    ):
        answer = await http.post(f"{session.base_url}/messages", json=body)

    assert answer.status_code == 200
    assert SEEN in answer.json()["content"][0]["text"]


# ------------------------------------------------------------------------------------------------ where nothing is set

CODING_AGENTS = [
    "claude-cli/2.1.330 (external, sdk-cli)",
    "codex_exec/0.169.0 (Debian 12.0.0; x86_64) xterm (codex_exec; 0.169.0)",
    "opencode/1.18.33 ai-sdk/provider-utils/4.0.23 runtime/bun/1.3.14",
    "QwenCode/0.24.4 (linux; x64)",
]
OTHERS = ["", "OpenAI/Python 3.52.0", "GitHubCopilotChat/1", "Kilo-Code/5", "Continue/1", "cline/3", "pi/1"]
UNSET = None
QUESTION = {"role": "user", "content": "look"}
FUNCTION = {"type": "function", "id": "c", "function": {"name": "f", "arguments": "{}"}}
ACTS = [
    (
        ChatDialect,
        {"messages": [QUESTION, {"role": "assistant", "tool_calls": [FUNCTION]}]},
        {"role": "user", "content": [CHAT_IMAGE]},
    ),
    (
        ChatDialect,
        {"messages": [QUESTION, {"role": "assistant", "tool_calls": [FUNCTION]}]},
        {"role": "tool", "tool_call_id": "c", "content": [CHAT_IMAGE]},
    ),
    (
        MessagesDialect,
        {"messages": [QUESTION]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "c", "content": [ANTHROPIC_IMAGE]}, ANTHROPIC_IMAGE],
        },
    ),
    (
        ResponsesDialect,
        {"input": [QUESTION, {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}]},
        {"type": "function_call_output", "call_id": "c", "output": [RESPONSES_IMAGE]},
    ),
    (
        ResponsesDialect,
        {"input": [QUESTION, {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}]},
        {"role": "user", "content": [RESPONSES_IMAGE]},
    ),
]


@pytest.mark.parametrize(("dialect", "body", "message"), ACTS)
def test_images_after_the_first_call_are_described(dialect, body, message):
    """It repeats its history, so a picture that its tools read would have every later request refused."""
    ((name, before),) = body.items()

    assert SEEN in parse(dialect(), {name: [*before, message]}, UNSET).messages[-1].content


@pytest.mark.parametrize(("dialect", "image"), CASES)
def test_images_before_the_first_call_are_refused(dialect, image):
    """Before the first call; the author can be told, so nothing is replaced in silence."""
    with pytest.raises(UnsupportedParameter):
        ask(dialect(), image, UNSET)


@pytest.mark.anyio
async def test_content_has_the_same_meaning_from_every_client():
    """No name of a client decides what its model reads."""
    read = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [ANTHROPIC_IMAGE]}]}
    codes = []
    async with open_scripted_proxy() as proxy, proxy.open_session() as session, httpx.AsyncClient() as http:
        url = f"{session.base_url}/messages"
        for client in (*CODING_AGENTS, *OTHERS):
            for content in ([ANTHROPIC_IMAGE], [PLAIN[0]], [read["content"][0]]):
                body = {"max_tokens": 64, "messages": [{"role": "user", "content": content}]}
                answer = await http.post(url, json=body, headers={"user-agent": client})
                counted = await http.post(f"{url}/count_tokens", json=body, headers={"user-agent": client})
                codes.append((answer.status_code, counted.status_code))

    assert codes == [(400, 400), (200, 200), (200, 200)] * len([*CODING_AGENTS, *OTHERS])


# --------------------------------------------------------------------------------------------------- text in documents

TEXT = "plum\npear \u6f22"
DATA = b64encode(TEXT.encode()).decode()
PLAIN = [
    {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": TEXT}},
    {"type": "document", "source": {"type": "content", "content": TEXT}, "citations": {"enabled": True}},
    {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": TEXT}]}},
    {"type": "document", "source": {"type": "base64", "media_type": "text/markdown", "data": DATA}},
    {"type": "search_result", "content": [{"type": "text", "text": TEXT}]},
]
DATA_URL = f"data:text/plain;charset=utf-8;base64,{DATA}"
TEXTS = [
    *((MessagesDialect, block) for block in PLAIN),
    (ChatDialect, {"type": "file", "file": {"file_data": DATA_URL}}),
    (ResponsesDialect, {"type": "input_file", "file_data": DATA_URL}),
    (ResponsesDialect, {"type": "input_file", "file_data": f"data:application/json;base64,{DATA}"}),
]


@pytest.mark.parametrize("policy", [UNSET, TOLERANT, REFUSING])
@pytest.mark.parametrize(("dialect", "block"), TEXTS)
def test_text_documents_are_read_under_every_policy(dialect, block, policy):
    """A document is a form of text, if it holds text."""
    assert ask(dialect(), block, policy)[0].content == f"look\n{TEXT}"


@pytest.mark.parametrize("block", PLAIN)
def test_text_documents_in_results_are_read(block):
    """Next to other text."""
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [block, {"type": "text", "text": "end"}]}
    body = {"messages": [{"role": "user", "content": "hi"}, {"role": "user", "content": [result]}]}

    assert parse(MessagesDialect(), body, UNSET).messages[-1].content == f"{TEXT}\nend"


def test_document_title_precedes_its_text():
    """Title, origin, context and the name of a file are for the model to read, too."""
    found = {"title": "Fruit", "source": "https://x/y", **PLAIN[4]}
    document = {**PLAIN[0], "title": "Fruit", "context": "A list."}
    file = {"type": "file", "file": {"filename": "fruit.txt", "file_data": DATA_URL}}

    assert ask(MessagesDialect(), found)[0].content == f"look\nFruit\nhttps://x/y\n{TEXT}"
    assert ask(MessagesDialect(), document)[0].content == f"look\nFruit\nA list.\n{TEXT}"
    assert ask(ChatDialect(), file)[0].content == f"look\nfruit.txt\n{TEXT}"


@pytest.mark.parametrize(
    ("dialect", "block"),
    [
        (MessagesDialect, {"type": "document", "source": {"type": "base64", "media_type": "application/pdf"}}),
        (MessagesDialect, {"type": "document", "source": {"type": "url", "url": "https://x/y.txt"}}),
        (MessagesDialect, {"type": "document", "source": {"type": "content", "content": [ANTHROPIC_IMAGE]}}),
        (
            MessagesDialect,
            {"type": "document", "source": {"type": "base64", "media_type": "text/plain", "data": "/w=="}},
        ),
        (MessagesDialect, {"type": "search_result", "content": [ANTHROPIC_IMAGE]}),
        (ChatDialect, {"type": "file", "file": {"file_data": f"data:application/pdf;base64,{DATA}"}}),
        (ChatDialect, {"type": "file", "file": {"file_id": "file_1"}}),
        (ResponsesDialect, {"type": "input_file", "file_url": "https://x/y.txt"}),
    ],
)
def test_document_without_text_is_refused(dialect, block):
    """By the name of their type."""
    with pytest.raises(UnsupportedParameter, match=block["type"]):
        ask(dialect(), block, UNSET)


@pytest.mark.parametrize(
    ("block", "field"),
    [
        ({"type": "document", "source": {"type": "text", "data": 7}}, "source.data"),
        ({"type": "document", "source": {"type": "content", "content": {}}}, "source.content"),
        ({"type": "document", "source": {"type": "content", "content": [{"type": "text"}]}}, "source.content[0].text"),
        ({"type": "search_result"}, "content"),
    ],
)
def test_malformed_document_is_refused(block, field):
    """So that the author of the client finds it."""
    with pytest.raises(InvalidRequest) as caught:
        ask(MessagesDialect(), block, UNSET)

    assert caught.value.param == f"messages[0].content[1].{field}"
