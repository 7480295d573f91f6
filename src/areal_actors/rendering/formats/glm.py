"""The tool format of GLM-4.5 and its successors: a name, followed by keys and values in separate tags.

Text stands between the tags unchanged, every other value as JSON; the schema decides which. A value ends at a closing
tag that is followed by another key or by the end of the call. The last closing tag may be missing at the end of an
answer.
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
_KEY = "<arg_key>"
_END_KEY = "</arg_key>"
_VALUE = "<arg_value>"
_END_VALUE = "</arg_value>"
_NAME = re.compile(r"[\w.:/-]*")
_KEY_NAME = re.compile(r"[^<\n]*")


class Glm(TaggedFormat):
    """The format of GLM-4.5, also used by GLM-4.6 and 4.7, which omit the line breaks."""

    markers = (_OPEN, _CLOSE, _KEY, _END_KEY, _VALUE, _END_VALUE)
    opening = before_name = _OPEN
    after_name = "\n"
    before_key = _KEY
    between = f"{_END_KEY}\n{_VALUE}"
    after_value = f"{_END_VALUE}\n"
    closing = _CLOSE

    def matches_template(self, template: str) -> bool:
        """Return whether the template writes keys and values as tags."""
        return _OPEN in template and _KEY in template and _VALUE in template

    def read(self, source: Source, tools: Sequence[Tool]) -> Reading[tuple[Call, ...]]:
        """Read one call; see ``TaggedFormat.read``."""
        yield from source.require(_OPEN)
        name = check_name((yield from source.match(_NAME)))
        known = parameters_of(tools, name)
        values: dict[str, Any] = {}
        if (yield from source.sees(_KEY)):
            source.begin_call(name, arguments="{")
        while (yield from source.expect(_KEY)):
            key = check_name((yield from source.match(_KEY_NAME)).strip())
            yield from source.require(_END_KEY)
            yield from source.require(_VALUE)
            text = yield from source.until(_END_VALUE, before=(_KEY, _CLOSE))
            if key in values:
                raise NoCall
            values[key] = read_value(text, known.get(key))
            source.begin_call(name, arguments=encode_arguments(values)[:-1])
        if not (yield from source.expect(_CLOSE)) and not (values and source.is_at_end):
            raise NoCall
        return (Call(name=name, arguments=encode_arguments(values)),)
