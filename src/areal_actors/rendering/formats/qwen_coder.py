"""The tool format of Qwen3-Coder: nested tags, one for the function and one for each parameter.

Values stand between line breaks, without quotes or escapes; the schema says which of them are text. A value ends at a
closing tag that is followed by another parameter or by the end of the function, so that code which contains such tags
can be passed. The last closing tag may be missing at the end of an answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from areal_actors.domain import Tool
from areal_actors.rendering.formats.json_calls import encode_arguments
from areal_actors.rendering.formats.reading import Call, NoCall, Reading, Source, check_name
from areal_actors.rendering.formats.schemas import TaggedFormat, parameters_of, read_value

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"
_FUNCTION = "<function="
_END_FUNCTION = "</function>"
_PARAMETER = "<parameter="
_END_PARAMETER = "</parameter>"
_NAME = re.compile(r"[^<>\n]*")


class QwenCoder(TaggedFormat):
    """The format of Qwen3-Coder, also used by Qwen3.5 and the Nemotron family."""

    markers = (_OPEN, _CLOSE)
    opening = _OPEN
    before_name = f"{_OPEN}\n{_FUNCTION}"
    after_name = between = ">\n"
    before_key = _PARAMETER
    after_value = f"\n{_END_PARAMETER}\n"
    closing = f"{_END_FUNCTION}\n{_CLOSE}"

    def matches_template(self, template: str) -> bool:
        """Return whether the template writes functions and parameters as tags that contain a name."""
        return _OPEN in template and _FUNCTION in template and _PARAMETER in template

    def read(self, source: Source, tools: Sequence[Tool]) -> Reading[tuple[Call, ...]]:
        """Read one call; see ``TaggedFormat.read``."""
        yield from source.require(_OPEN)
        yield from source.require(_FUNCTION)
        name = yield from _read_name(source)
        known = parameters_of(tools, name)
        values: dict[str, Any] = {}
        if (yield from source.sees(_PARAMETER)):
            source.begin_call(name, arguments="{")
        while (yield from source.require(_PARAMETER, _END_FUNCTION)) == _PARAMETER:
            key = yield from _read_name(source)
            text = yield from source.until(_END_PARAMETER, before=(_PARAMETER, _END_FUNCTION))
            if key in values:
                raise NoCall
            values[key] = read_value(text.removeprefix("\n").removesuffix("\n"), known.get(key))
            source.begin_call(name, arguments=encode_arguments(values)[:-1])
        if not (yield from source.expect(_CLOSE)) and not source.is_at_end:
            raise NoCall
        return (Call(name=name, arguments=encode_arguments(values)),)


def _read_name(source: Source) -> Reading[str]:
    name = yield from source.match(_NAME)
    yield from source.require(">")
    return check_name(name.strip())
