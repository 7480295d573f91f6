"""The bytes of events, whatever text the model says in them."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from areal_actors.proxy.sse import format_event, format_named_event

SEPARATORS = "\n\r\x0b\x0c\x1c\x1d\x1e\u0085\u2028\u2029"
payloads = st.dictionaries(st.text(max_size=5), st.text(st.sampled_from([*SEPARATORS, *"aä€😀\\"])))


@given(payloads)
def test_event_is_one_line_of_bytes_and_of_text(payload: dict[str, str]) -> None:
    """Clients cut streams into lines before or after they decode them; the payload comes out whole in both."""
    for event, num_fields in ((format_event(payload), 1), (format_named_event("x", payload), 2)):
        for lines in (event.decode().splitlines(), [line.decode() for line in event.splitlines()]):
            *fields, end = lines

            assert (num_fields, "") == (len(fields), end)
            assert payload == json.loads(fields[-1].removeprefix("data: "))
