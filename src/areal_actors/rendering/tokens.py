"""Text to ids and back, safely: the tokenizer of one model behind a few plain functions.

*Injection.* A conversation is rendered to one text, in which a user's ``<|im_end|>`` would look like the template's
own. ``guard`` therefore puts a break after the first character of every special token that is spelled out in foreign
text, and ``encode`` tokenises what lies between breaks on its own, so that such text becomes ordinary characters. The
break is a lone surrogate, which no valid text contains (those of foreign text are replaced first).

*Streams.* Characters may be spread over several tokens. A detokenizer takes ids as they come and says only whole
characters.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from attrs import field, frozen
from tokenizers import Tokenizer, decoders

from areal_actors.domain import Ints

__all__ = ["Detokenizer", "Vocabulary"]

_BREAK = "\udc00"
_SURROGATE = re.compile("[\ud800-\udfff]")
_REPLACEMENT = "\ufffd"
_MAX_HELD_TOKENS = 8
"""A character has at most four bytes; whoever waits for longer waits for nothing."""


class Detokenizer(Protocol):
    """Ids in, text out, one answer long."""

    def feed(self, token_ids: Iterable[int]) -> str:
        """The whole characters that these ids complete."""
        ...

    def finish(self) -> str:
        """What was held back."""
        ...


class _ByteDetokenizer:
    """For byte-level tokenizers: every token is a run of bytes, and UTF-8 is decoded as it comes."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_ids: Iterable[int]) -> str:
        return self._decoder.decode(b"".join(map(self._bytes_of, token_ids)))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _WindowDetokenizer:
    """For all others: decode the last group of tokens again with the next one, and say what was added.

    Decoders of the SentencePiece kind drop the space in front of their first token and join bytes to characters, so a
    token cannot be decoded without its neighbours.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._said: list[int] = []
        self._held: list[int] = []

    def feed(self, token_ids: Iterable[int]) -> str:
        return "".join(self._step(token_id) for token_id in token_ids)

    def finish(self) -> str:
        return self._say() if self._held else ""

    def _step(self, token_id: int) -> str:
        self._held.append(token_id)
        is_cut = self._decode([*self._said, *self._held]).endswith(_REPLACEMENT)
        return "" if is_cut and len(self._held) < _MAX_HELD_TOKENS else self._say()

    def _say(self) -> str:
        before = self._decode(self._said)
        text = self._decode([*self._said, *self._held])
        self._said, self._held = self._held, []
        return text[len(before) :]


@frozen(kw_only=True, eq=False)
class Vocabulary:
    """A fast tokenizer, its special tokens, and the two directions."""

    backend: Tokenizer
    special: Mapping[int, str]
    """Text of each special token by id."""
    size: int
    _foreign: re.Pattern[str] | None = field(alias="foreign")
    _foreign_start: re.Pattern[str] | None = field(alias="foreign_start")
    _token_bytes: dict[int, bytes] = field(factory=dict, init=False)

    @staticmethod
    def create(backend: Tokenizer, *, special: Mapping[int, str]) -> Vocabulary:
        """Take over ``backend``: truncation and padding, which some tokenizer files switch on, are switched off."""
        backend.no_truncation()
        backend.no_padding()
        spelled = sorted((text for text in special.values() if len(text) > 1), key=len, reverse=True)
        anyone = "|".join(map(re.escape, spelled))
        return Vocabulary(
            backend=backend,
            special=special,
            size=max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1,
            foreign=re.compile(anyone) if spelled else None,
            foreign_start=re.compile(f"(?=(?:{anyone}))(.)", re.DOTALL) if spelled else None,
        )

    def guard(self, text: str) -> str:
        """Foreign text made harmless: ``encode`` will read no special token in it."""
        if not text.isascii():
            text = _SURROGATE.sub(_REPLACEMENT, text)
        # The plain pattern is quick to find nothing; the other also finds tokens that overlap.
        if self._foreign is None or self._foreign_start is None or self._foreign.search(text) is None:
            return text
        return self._foreign_start.sub(rf"\1{_BREAK}", text)

    def encode(self, text: str) -> list[int]:
        """Ids of rendered text. Special tokens are recognised, except in guarded text; none is added."""
        if _BREAK not in text:
            return self._encode(text)
        return [token_id for piece in text.split(_BREAK) for token_id in self._encode(piece)]

    def encode_raw(self, text: str, *, is_start: bool) -> list[int]:
        """Ids of a text that nobody rendered, special tokens recognised.

        With ``is_start`` what the tokenizer puts before every text comes first, unless the text spells it out itself.
        What it would put behind a text is left out: the text goes on.
        """
        text = _SURROGATE.sub(_REPLACEMENT, text)
        ids = self._encode(text)
        if not is_start:
            return ids
        whole: list[int] = self.backend.encode(text, add_special_tokens=True).ids
        num_added = next((n for n in range(len(whole) - len(ids) + 1) if whole[n : n + len(ids)] == ids), 0)
        return ids if ids[:num_added] == whole[:num_added] else whole[:num_added] + ids

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.backend.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, token_ids: Ints | Sequence[int]) -> str:
        """Text of ids, special tokens included; ids outside the vocabulary are left out."""
        detokenizer = self.open_detokenizer()
        return detokenizer.feed(int(token_id) for token_id in token_ids) + detokenizer.finish()

    def open_detokenizer(self) -> Detokenizer:
        """A detokenizer for one answer."""
        if isinstance(self.backend.decoder, decoders.ByteLevel):
            return _ByteDetokenizer(self._bytes_of)
        return _WindowDetokenizer(self._decode)

    def _decode(self, token_ids: Sequence[int]) -> str:
        text: str = self.backend.decode([i for i in token_ids if 0 <= i < self.size], skip_special_tokens=False)
        return text

    def _bytes_of(self, token_id: int) -> bytes:
        if not 0 <= token_id < self.size:
            return b""
        known = self._token_bytes.get(token_id)
        if known is None:
            known = self._token_bytes[token_id] = self._look_up(token_id)
        return known

    def _look_up(self, token_id: int) -> bytes:
        token = self.backend.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self.special or not all(char in _BYTE_OF for char in token):
            return token.encode()
        return bytes(_BYTE_OF[char] for char in token)


def _create_byte_table() -> dict[str, int]:
    """Byte of each character of the byte-level alphabet: printable Latin-1 is itself, the rest follows from 256."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    rest = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(rest)}


_BYTE_OF: Mapping[str, int] = _create_byte_table()
