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
from areal_actors.proxy.dialects.blocks import BlockPolicy, ToolPolicy, UnsupportedBlocks, replace_blocks
from areal_actors.proxy.dialects.chat.answer import ChatDialect
from areal_actors.proxy.dialects.messages.answer import MessagesDialect
from areal_actors.proxy.dialects.responses.answer import ResponsesDialect
from areal_actors.testing.serving import open_scripted_proxy

PNG = b64encode(
    b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + (640).to_bytes(4, "big") + (480).to_bytes(4, "big") + b"\0" * 9
).decode()
ANTHROPIC_IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}
CHAT_IMAGE = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}
RESPONSES_IMAGE = {"type": "input_image", "image_url": f"data:image/png;base64,{PNG}"}
SEEN = "[image/png, 640x480 pixels: an image, which this model cannot see]"
REFERENCE = {"type": "tool_reference", "tool_name": "WebFetch"}
TOLERANT = UnsupportedBlocks(images=BlockPolicy.PLACEHOLDER, files=BlockPolicy.PLACEHOLDER)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "content", "source", "image_url", "output", "x"]), inner, max_size=3)
    ),
    max_leaves=12,
)


REFUSING = UnsupportedBlocks().for_client("OpenAI/Python 3.52.0")


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
def test_images_are_refused_described_or_dropped(dialect, image):
    """By default with 400; as a placeholder with type and size; or without a trace."""
    with pytest.raises(UnsupportedParameter):
        ask(dialect(), image)

    assert ask(dialect(), image, TOLERANT)[0].content == f"look\n{SEEN}"
    dropping = UnsupportedBlocks(images=BlockPolicy.DROP)
    assert ask(dialect(), image, dropping)[0].content == "look"


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"type": "document", "title": "a.pdf", "source": {"media_type": "application/pdf"}}, "application/pdf, a.pdf"),
        ({"type": "image", "source": {"type": "url", "url": "https://x/y.png"}}, "https://x/y.png"),
        ({"type": "image", "source": {"media_type": "image/png", "data": "###"}}, "[image/png: an image"),
        (REFERENCE, "[Tool WebFetch is available.]"),
    ],
)
def test_placeholders_say_what_is_known(block, words):
    """Media type, name and URL, where the block has them."""
    assert words in ask(MessagesDialect(), block, TOLERANT)[0].content


def test_a_tool_reference_is_readable_without_a_setting():
    """Claude Code's tool search answers with references: within a result, their names are the result."""
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [REFERENCE]}
    body = {"messages": [{"role": "user", "content": "hi"}, {"role": "user", "content": [result]}]}

    assert parse(MessagesDialect(), body).messages[-1].content == "[Tool WebFetch is available.]"


def test_results_are_searched_for_images():
    """An agent that reads a picture sends it in a tool's result."""
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [ANTHROPIC_IMAGE]}
    body = {"messages": [{"role": "user", "content": "hi"}, {"role": "user", "content": [result]}]}
    output = {"type": "function_call_output", "call_id": "c", "output": [RESPONSES_IMAGE]}

    assert parse(MessagesDialect(), body, TOLERANT).messages[-1].content == SEEN
    assert parse(ResponsesDialect(), {"input": [output]}, TOLERANT).messages[-1].content == SEEN


@given(st.dictionaries(st.sampled_from(["messages", "input", "tools", "x"]), json_values, max_size=4))
def test_any_json_is_accepted(body):
    """Malformed bodies pass unchanged in shape: the dialect refuses them by name. Malformed images are refused here."""
    with suppress(InvalidRequest):
        assert replace_blocks(body, TOLERANT).keys() == body.keys()


@pytest.mark.parametrize("policy", [TOLERANT, UnsupportedBlocks(images=BlockPolicy.DROP)])
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
def test_a_malformed_image_is_refused_by_the_name_of_its_field(policy, dialect, image, field):
    """A placeholder, or a gap, would hide the mistake from the author of the client."""
    with pytest.raises(InvalidRequest) as caught:
        ask(dialect(), image, policy)

    base = "input" if dialect is ResponsesDialect else "messages"
    assert caught.value.param == f"{base}[0].content[1].{field}"


def test_an_uploaded_image_is_described():
    """It has an id of the vendor's in place of data or URL."""
    image = {"type": "input_image", "file_id": "file_1"}

    assert ask(ResponsesDialect(), image, TOLERANT)[0].content == "look\n[image: an image, which this model cannot see]"


@pytest.mark.anyio
async def test_the_setting_reaches_the_routes():
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


# ------------------------------------------------------------------------------------------------------ coding agents

CODING_AGENTS = [
    "claude-cli/2.1.330 (external, sdk-cli)",
    "codex_exec/0.169.0 (Debian 12.0.0; x86_64) xterm (codex_exec; 0.169.0)",
    "opencode/1.18.33 ai-sdk/provider-utils/4.0.23 runtime/bun/1.3.14",
    "QwenCode/0.24.4 (linux; x64)",
]


@pytest.mark.parametrize("agent", CODING_AGENTS)
def test_what_is_not_set_is_tolerant_for_coding_agents(agent):
    """They repeat their history, so a picture that they read would have every later request refused."""
    policy = UnsupportedBlocks().for_client(agent)

    assert policy == TOLERANT
    assert ask(ChatDialect(), CHAT_IMAGE, policy)[0].content == f"look\n{SEEN}"


@pytest.mark.parametrize("client", ["", "OpenAI/Python 3.52.0", "opencoder/1.0", "my-codex/2", "codexical/1"])
def test_what_is_not_set_is_refused_for_other_clients(client):
    """Their authors can be told, so nothing of theirs is replaced in silence."""
    assert UnsupportedBlocks().for_client(client) == REFUSING
    with pytest.raises(UnsupportedParameter):
        ask(ChatDialect(), CHAT_IMAGE, UnsupportedBlocks().for_client(client))


@given(st.sampled_from(BlockPolicy), st.sampled_from(ToolPolicy), st.sampled_from([*CODING_AGENTS, "OpenAI/Python"]))
def test_what_is_set_holds_for_every_client(block, tool, client):
    """The user agent decides only where the settings are silent."""
    settings = UnsupportedBlocks(images=block, files=block, server_tools=tool)

    assert settings.for_client(client) == settings


@pytest.mark.anyio
async def test_the_user_agent_of_a_request_decides():
    """The same picture is described to a coding agent's model, and refused from another client."""
    body = {"max_tokens": 64, "messages": [{"role": "user", "content": [ANTHROPIC_IMAGE]}]}
    async with open_scripted_proxy() as proxy, proxy.open_session() as session, httpx.AsyncClient() as http:
        url = f"{session.base_url}/messages"
        described = await http.post(url, json=body, headers={"user-agent": CODING_AGENTS[0]})
        counted = await http.post(f"{url}/count_tokens", json=body, headers={"user-agent": CODING_AGENTS[0]})
        refused = await http.post(url, json=body)

    assert [described.status_code, counted.status_code, refused.status_code] == [200, 200, 400]
    assert SEEN in described.json()["content"][0]["text"]
