"""Lines of a stream of server-sent events, from bytes that are cut anywhere.

A line ends with CR, LF or both, and with nothing else: in JSON, text has its line separators of Unicode (U+2028,
U+0085 and their like) as they are, at which ``str.splitlines``, and so ``httpx.Response.aiter_lines``, would cut an
event in two.
"""

from __future__ import annotations

from collections.abc import Iterator

from attrs import define, field

__all__ = ["Lines"]


@define
class Lines:
    """Bytes in, whole lines out, without their ends. What is left when the stream is over was cut off."""

    _parts: list[bytes] = field(factory=list, init=False)

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """The lines that ``chunk`` completes. Between a CR and an LF that come apart, there is an empty one."""
        for part in chunk.splitlines(keepends=True):
            self._parts.append(part)
            if part.endswith((b"\n", b"\r")):
                line = b"".join(self._parts)
                self._parts.clear()
                yield line.rstrip(b"\r\n")
