"""Content that the model cannot use: refused, described in words, or left out, as ``UnsupportedBlocks`` says.

The replacement happens in the JSON body before a dialect parses it, so that all dialects share one policy, and
refusing by name is the dialects' own behaviour. Nothing else of a body is changed. What is left to the default depends
on the client, by its user agent: see ``UnsupportedBlocks.for_client``. ``client_tools`` decides about tools.
"""

from __future__ import annotations

import re
from base64 import b64decode
from collections.abc import Mapping
from enum import StrEnum
from functools import lru_cache
from typing import Any

from attrs import evolve, frozen

from areal_actors.errors import InvalidRequest
from areal_actors.proxy.dialects.fields import wrong
from areal_actors.proxy.dialects.prefixes import MessageList

__all__ = ["BlockPolicy", "ToolPolicy", "UnsupportedBlocks", "replace_blocks"]


class BlockPolicy(StrEnum):
    """How a content block that the model cannot read is handled."""

    REFUSE = "refuse"
    PLACEHOLDER = "placeholder"
    """A text in square brackets describes the block to the model."""
    DROP = "drop"


class ToolPolicy(StrEnum):
    """How a tool that the vendor's servers would run is handled."""

    REFUSE = "refuse"
    DROP = "drop"


@frozen(kw_only=True)
class UnsupportedBlocks:
    """For each kind of content and for tools: ``refuse`` with 400, ``drop``, or leave a ``placeholder`` text.

    Where nothing is set, images and files of known coding agents become placeholders; those of other clients are
    refused.
    """

    images: BlockPolicy | None = None
    """Images. The placeholder names media type, width and height, or the URL."""
    files: BlockPolicy | None = None
    """Files, documents and audio. The placeholder names media type and file name."""
    tool_references: BlockPolicy = BlockPolicy.PLACEHOLDER
    """References to tools in results of a tool search. The placeholder names the tool, which is all they say."""
    server_tools: ToolPolicy | None = None
    """Tools that the vendor's servers run, such as ``web_search``.

    Where nothing is set, they are left out if the request offers tools that its client runs as well.
    """

    @lru_cache(maxsize=64)  # noqa: B019 - the policies, few and small, live as long as the process
    def for_client(self, user_agent: str) -> UnsupportedBlocks:
        """Return the policy for a client with this ``User-Agent``, in which every kind of content is decided."""
        # A coding agent repeats its history: one picture that it reads would have every later request refused. Its
        # user did not choose the picture. Other programs can be corrected by their authors.
        is_tolerant = _CODING_AGENTS.match(user_agent) is not None
        block = BlockPolicy.PLACEHOLDER if is_tolerant else BlockPolicy.REFUSE
        return evolve(
            self,
            images=self.images or block,
            files=self.files or block,
        )


_CODING_AGENTS = re.compile(r"(claude-cli|codex|opencode|qwencode)(?![a-z0-9])", re.IGNORECASE)
"""The beginning of the ``User-Agent`` of coding agents, as they sent it (``nox -s agents``)."""

_IMAGES = frozenset({"image", "image_url", "input_image", "computer_screenshot"})
_FILES = frozenset({"document", "file", "input_file", "input_audio", "audio", "container_upload"})
_MAX_SHOWN = 200
"""Characters of a name, type or URL in a placeholder; a longer one would fill the context."""


def replace_blocks(body: Mapping[str, Any], policy: UnsupportedBlocks) -> Mapping[str, Any]:
    """Return ``body`` with the content that ``policy`` does not refuse replaced or left out.

    Raises:
        InvalidRequest: an image to be replaced is malformed; the error names the field.
    """
    changed: dict[str, Any] = {}
    for name in ("messages", "input"):
        if isinstance(messages := body.get(name), list):
            start = messages.num_known if isinstance(messages, MessageList) else 0
            replaced = [
                _replace_in_message(message, policy, f"{name}[{index}]")
                for index, message in enumerate(messages, start=start)
            ]
            changed[name] = messages.with_elements(replaced) if isinstance(messages, MessageList) else replaced
    return {**body, **changed}


def _replace_in_message(message: Any, policy: UnsupportedBlocks, where: str) -> Any:
    # Most messages are a role and a text; only lists of blocks are rebuilt. ``output`` is a result's in Responses.
    if not isinstance(message, dict):
        return message
    lists: dict[str, list[Any]] = {}
    for name in ("content", "output"):
        blocks = message.get(name)
        if isinstance(blocks, dict) and blocks.get("type") == "computer_screenshot":
            # The result of a computer's call is a picture, not a list.
            blocks = [blocks]
        if isinstance(blocks, list):
            replaced = (_replace(block, policy, f"{where}.{name}[{index}]") for index, block in enumerate(blocks))
            lists[name] = [block for block in replaced if block is not None]
    return {**message, **lists} if lists else message


def _replace(block: Any, policy: UnsupportedBlocks, where: str) -> Any:
    """Return the block, the text in its place, or ``None`` to leave it out."""
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(kind, str):
        return block
    if kind in _IMAGES:
        handling = policy.images
    elif kind in _FILES:
        handling = policy.files
    elif kind == "tool_reference":
        handling = policy.tool_references
    else:
        # A tool result of Anthropic's is a block with blocks of its own.
        return _replace_in_message(block, policy, where)
    if handling is BlockPolicy.REFUSE or handling is None:
        return block
    if kind in _IMAGES:
        # A placeholder would hide a mistake of the client's from its author, whom a vendor's endpoint answers with 400.
        text = _describe_image(block, where)
    elif kind in _FILES:
        # ``source`` holds the data for Anthropic, an object named like the type for OpenAI.
        source = block.get("source", block.get(kind))
        source = source if isinstance(source, dict) else block
        named = block.get("title") or block.get("filename") or source.get("filename") or source.get("url")
        media = source.get("media_type") or source.get("format")
        said = [_shorten(text) for text in (media, named) if isinstance(text, str) and text]
        text = f"[{', '.join(said) or kind}: a file, which this model cannot read]"
    else:
        text = f"[Tool {_shorten(str(block.get('tool_name', '')))} is available.]"
    return None if handling is BlockPolicy.DROP else {"type": "text", "text": text}


def _describe_image(block: Mapping[str, Any], where: str) -> str:
    """Return the placeholder of an image: media type and size, or the URL.

    Raises:
        InvalidRequest: the block has neither data, URL nor file, or one of the wrong type.
    """
    media = data = url = None
    if block["type"] == "image":
        source = _read_source(block.get("source"), f"{where}.source")
        media, data, url = source.get("media_type"), source.get("data"), source.get("url")
    elif block.get("image_url") is not None or block.get("file_id") is None:
        # Chat completions have the URL in an object, Responses as text; clients of either send both forms.
        url, field = block.get("image_url"), f"{where}.image_url"
        if isinstance(url, dict):
            url, field = url.get("url"), f"{field}.url"
        if not isinstance(url, str) or not url:
            raise wrong(field, "the URL of an image", url)
    elif not isinstance(block["file_id"], str):
        raise wrong(f"{where}.file_id", "the id of a file", block["file_id"])
    if url is not None and url.startswith("data:"):
        # A data URL carries the type and the data.
        head, _, data = url.partition(",")
        media, url = head.removeprefix("data:").partition(";")[0], None
    said = [_shorten(media) if media else "image"]
    if data and (size := _png_size(data)):
        said.append(f"{size[0]}x{size[1]} pixels")
    if url is not None:
        said.append(_shorten(url))
    return f"[{', '.join(said)}: an image, which this model cannot see]"


def _read_source(source: Any, where: str) -> Mapping[str, str]:
    """Check the ``source`` of an image of Anthropic's: base64 data with its type, a URL, or an uploaded file."""
    if not isinstance(source, dict):
        raise wrong(where, "an object with the image's data or URL", source)
    present = [name for name in ("data", "url", "file_id") if source.get(name) is not None]
    if not present:
        raise InvalidRequest(f"{where} has neither data, url nor file_id; send one of them.", param=where)
    for name in (*present, *(("media_type",) if "data" in present else ())):
        if not isinstance(source.get(name), str) or not source[name]:
            raise wrong(f"{where}.{name}", "a string that is not empty", source.get(name))
    return source


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def _png_size(data: str) -> tuple[int, int] | None:
    """Return width and height from the header of a PNG, which its first 24 bytes hold."""
    try:
        head = b64decode(data[:32])
    except ValueError:
        return None
    if not head.startswith(b"\x89PNG") or len(head) < 24:  # noqa: PLR2004 - the length of the header
        return None
    return int.from_bytes(head[16:20], "big"), int.from_bytes(head[20:24], "big")
