"""Content that is text in another form is read; what the model cannot use is refused, or described in words.

Documents, files and search results that hold text become text, as ``read_text`` says; for the rest,
``UnsupportedBlocks`` decides. Where it is not set, such content is refused before the first call or result of the
conversation, and described from there on. ``client_tools`` decides about tools.

The replacement happens in the JSON body before a dialect parses it, so that all dialects share one policy, and refusing
by name is the dialects' own behaviour. Nothing else of a body is changed.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from areal_actors.errors import InvalidRequest
from areal_actors.proxy.dialects.fields import wrong


class UnsupportedBlocks(StrEnum):
    """How a content block that the model cannot read is handled."""

    REFUSE = "refuse"
    PLACEHOLDER = "placeholder"
    """A text in square brackets describes the block to the model."""


_IMAGES = frozenset({"image", "image_url", "input_image"})
_FILES = frozenset({"document", "file", "input_file", "input_audio", "audio", "container_upload"})
_CALLS = ("tool_use", "tool_result", "_call", "_call_output")
"""Ends of the types of calls and results: those of functions, and of tools that OpenAI's clients run."""
_TEXTS = frozenset({"application/json", "application/xml", "application/yaml", "application/x-yaml"})
"""Media types of text, beside those that begin with ``text/``."""
_MAX_SHOWN = 200
"""Characters of a name, type or URL in a placeholder; a longer one would fill the context."""


def replace_blocks(body: Mapping[str, Any], policy: UnsupportedBlocks | None) -> Mapping[str, Any]:
    """Return ``body`` with the content that is not refused replaced by its text, or by words that describe it.

    Raises:
        InvalidRequest: an image to be replaced is malformed; the error names the field.
    """
    changed: dict[str, Any] = {}
    for name in ("messages", "input"):
        if isinstance(messages := body.get(name), list):
            # An agent repeats its history: one picture that its tools have read would have every later request refused.
            # What comes before the first call was chosen by its author, who can be told.
            is_described, replaced = policy is UnsupportedBlocks.PLACEHOLDER, list[Any]()
            for index, message in enumerate(messages):
                is_described = is_described or (policy is None and _has_call(message))
                replaced.append(_replace_in_message(message, f"{name}[{index}]", is_described=is_described))
            changed[name] = replaced
    return {**body, **changed}


def _has_call(message: Any) -> bool:
    """Return whether a message or an item is, or has, a call or a result."""
    if not isinstance(message, dict):
        return False
    if message.get("role") == "tool" or message.get("tool_calls") or _is_call(message):
        return True
    content = message.get("content")
    return isinstance(content, list) and any(isinstance(part, dict) and _is_call(part) for part in content)


def _is_call(block: Mapping[str, Any]) -> bool:
    return isinstance(kind := block.get("type"), str) and kind.endswith(_CALLS)


def _replace_in_message(message: Any, where: str, *, is_described: bool) -> Any:
    # Most messages are a role and a text; only lists of blocks are rebuilt. ``output`` is a result's in Responses.
    if not isinstance(message, dict):
        return message
    lists: dict[str, list[Any]] = {}
    for name in ("content", "output"):
        blocks = message.get(name)
        if isinstance(blocks, list):
            lists[name] = [
                _replace(block, f"{where}.{name}[{index}]", is_described=is_described)
                for index, block in enumerate(blocks)
            ]
    return {**message, **lists} if lists else message


def _replace(block: Any, where: str, *, is_described: bool) -> Any:
    """Return the block, or the text in its place."""
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(kind, str):
        return block
    text = read_text(block, where, is_described=is_described)
    if text is not None:
        return {"type": "text", "text": text}
    if kind == "tool_reference":
        # Its name is all that it says.
        return {"type": "text", "text": f"[Tool {_shorten(str(block.get('tool_name', '')))} is available.]"}
    if kind in _IMAGES | _FILES:
        return {"type": "text", "text": _describe(block, kind, where)} if is_described else block
    # A tool result of Anthropic's is a block with blocks of its own.
    return _replace_in_message(block, where, is_described=is_described)


def _describe(block: Mapping[str, Any], kind: str, where: str) -> str:
    """Return the placeholder of an image or a file. Raises as ``_describe_image``."""
    if kind in _IMAGES:
        # A placeholder would hide a mistake of the client's from its author, whom a vendor's endpoint answers with 400.
        return _describe_image(block, where)
    # ``source`` holds the data for Anthropic, an object named like the type for OpenAI.
    source = block.get("source", block.get(kind))
    source = source if isinstance(source, dict) else block
    named = block.get("title") or block.get("filename") or source.get("filename") or source.get("url")
    media = source.get("media_type") or source.get("format")
    said = [_shorten(text) for text in (media, named) if isinstance(text, str) and text]
    return f"[{', '.join(said) or kind}: a file, which this model cannot read]"


def read_text(block: Mapping[str, Any], where: str, *, is_described: bool) -> str | None:
    """Return the text that a document, a file or a search result holds; ``None`` for any other block.

    Title, origin and context come first, each on a line.

    Raises:
        InvalidRequest: the text is malformed; the error names the field.
    """
    kind, source = block.get("type"), block.get("source")
    text: Any
    if kind == "search_result":
        text = _read_parts(block.get("content"), f"{where}.content", is_described=is_described)
    elif kind == "document" and isinstance(source, dict) and source.get("type") == "content":
        text = _read_parts(source.get("content"), f"{where}.source.content", is_described=is_described)
    elif kind == "document" and isinstance(source, dict) and source.get("type") == "text":
        text = source.get("data")
        if not isinstance(text, str):
            raise wrong(f"{where}.source.data", "a string", text)
    elif kind == "document" and isinstance(source, dict):
        text = _decode(source.get("media_type"), source.get("data"))
    elif kind in ("file", "input_file"):
        file = block.get("file") if kind == "file" else block
        head, _, data = str(file.get("file_data") if isinstance(file, dict) else "").partition(",")
        text = _decode(head.removeprefix("data:").removesuffix(";base64"), data) if head.endswith(";base64") else None
        block = file if isinstance(file, dict) else block
    else:
        return None
    if text is None:
        return None
    said = (block.get(name) for name in ("title", "filename", "source", "context"))
    return "\n".join([*(word for word in said if isinstance(word, str) and word), text])


def _read_parts(content: Any, where: str, *, is_described: bool) -> str | None:
    """Return the text of a document's parts; ``None`` if one of them is refused."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong(where, "a string or a list of blocks", content)
    texts: list[str] = []
    for index, block in enumerate(content):
        at = f"{where}[{index}]"
        part = _replace(block, at, is_described=is_described)
        if not isinstance(part, dict) or part.get("type") != "text":
            return None
        if not isinstance(part.get("text"), str):
            raise wrong(f"{at}.text", "a string", part.get("text"))
        texts.append(part["text"])
    return "\n".join(texts)


def _decode(media: Any, data: Any) -> str | None:
    """Return the text in base64 data; ``None`` if its type is not one of text."""
    named = media.partition(";")[0].strip().lower() if isinstance(media, str) else ""
    if not isinstance(data, str) or not (named.startswith("text/") or named in _TEXTS):
        return None
    try:
        return b64decode(data, validate=True).decode()
    except ValueError:
        return None


def _describe_image(block: Mapping[str, Any], where: str) -> str:
    """Return the placeholder of an image: media type or URL.

    Raises:
        InvalidRequest: the block has neither data, URL nor file, or one of the wrong type.
    """
    if block["type"] == "image":
        source = _read_source(block.get("source"), f"{where}.source")
        media, url = source.get("media_type"), source.get("url")
    elif block.get("image_url") is not None or block.get("file_id") is None:
        # Chat completions have the URL in an object, Responses as text; clients of either send both forms.
        media, url, field = None, block.get("image_url"), f"{where}.image_url"
        if isinstance(url, dict):
            url, field = url.get("url"), f"{field}.url"
        if not isinstance(url, str) or not url:
            raise wrong(field, "the URL of an image", url)
    elif isinstance(block["file_id"], str):
        media = url = None
    else:
        raise wrong(f"{where}.file_id", "the id of a file", block["file_id"])
    if url is not None and url.startswith("data:"):
        # A data URL carries the type and the data.
        media, url = url.removeprefix("data:").partition(",")[0].partition(";")[0], None
    said = [_shorten(text) for text in (media or "image", url) if text]
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
