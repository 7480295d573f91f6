"""Safe conversion of text to ids and back: the tokenizer of one model behind a few plain functions.

*Injection.* A conversation is rendered to one text, in which a user's ``<|im_end|>`` would look like the template's
own. Therefore ``guard`` puts a break after the first character of every special token that is spelled out in foreign
text, and ``encode`` tokenises the text between breaks separately, so that it becomes ordinary characters. The break is
a lone surrogate, which valid text cannot contain (lone surrogates in foreign text are replaced first).

*Streams.* A character may be spread over several tokens. A detokenizer takes ids as they come and returns only whole
characters.

*Long texts.* A prompt of 94,000 tokens takes 100 to 400 ms. Within ``deferring_long_texts``, ``encode`` raises
``LongText`` instead, with which an event loop tokenises the text in a thread; the tokenizer releases the GIL.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, MutableMapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Protocol

import numpy as np
from attrs import Factory, field, frozen
from tokenizers import Tokenizer, decoders

from areal_actors.domain import Ints

_BREAK = "\udc00"
_SURROGATE = re.compile("[\ud800-\udfff]")
_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")
_MAX_HELD_TOKENS = 8
"""Limit of held-back tokens: a character has at most four bytes, so that more tokens cannot complete it."""
_LONG = 16_384
"""Characters that take some milliseconds to tokenise."""

EncodedTexts = MutableMapping[Hashable, list[int]]

_deferred: ContextVar[EncodedTexts | None] = ContextVar("deferred", default=None)


class LongText(Exception):
    """Raised within ``deferring_long_texts`` for a text that takes long. ``key`` is its key in the texts to pass there.

    ``encode`` returns its ids, and may be called in any thread.
    """

    def __init__(self, key: Hashable, encode: Callable[[], list[int]]) -> None:
        super().__init__("a long text")
        self.key = key
        self.encode = encode


class deferring_long_texts:  # noqa: N801 - as a function with ``contextmanager``, but four times as fast
    """Raise ``LongText`` for each long text that is to be tokenised in the block and is not in ``encoded``."""

    __slots__ = ("_encoded", "_token")

    def __init__(self, encoded: EncodedTexts) -> None:
        self._encoded = encoded

    def __enter__(self) -> None:
        self._token = _deferred.set(self._encoded)

    def __exit__(self, *_: object) -> None:
        _deferred.reset(self._token)


def _encode_or_defer(key: Hashable, num_characters: int, encode: Callable[[], list[int]]) -> list[int]:
    encoded = _deferred.get() if num_characters >= _LONG else None
    if encoded is None:
        return encode()
    if key not in encoded:
        raise LongText(key, encode)
    return encoded[key]


class Detokenizer(Protocol):
    """Incremental conversion of the ids of one answer to text."""

    def feed(self, token_ids: Iterable[int]) -> str:
        """Return the whole characters that these ids complete."""
        ...

    def finish(self) -> str:
        """Return what was held back."""
        ...


class _ByteDetokenizer:
    """Detokenizer for byte-level tokenizers: every token is a run of bytes, and UTF-8 is decoded incrementally."""

    def __init__(self, bytes_of: Mapping[int, bytes]) -> None:
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_ids: Iterable[int]) -> str:
        return self._decoder.decode(b"".join(map(self._bytes_of.__getitem__, token_ids)))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _WindowDetokenizer:
    """Detokenizer for all other tokenizers: decodes each token together with the group before it.

    The text of a token is the difference to the text of the preceding group alone.

    Decoders of the SentencePiece kind drop the space in front of their first token and join bytes to characters, so a
    token cannot be decoded without its neighbours.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._said: list[int] = []
        self._held: list[int] = []

    def feed(self, token_ids: Iterable[int]) -> str:
        said: list[str] = []
        for token_id in token_ids:
            self._held.append(token_id)
            text = self._decode([*self._said, *self._held])
            # The decoder replaces an incomplete character; wait for the rest of it, up to the limit.
            if not text.endswith(_REPLACEMENT) or len(self._held) >= _MAX_HELD_TOKENS:
                said.append(self._say(text))
        return "".join(said)

    def finish(self) -> str:
        return self._say(self._decode([*self._said, *self._held])) if self._held else ""

    def _say(self, text: str) -> str:
        before = self._decode(self._said)
        self._said, self._held = self._held, []
        return text[len(before) :]


class _BytesOfTokens(dict[int, bytes]):
    """A cache of the bytes of each token, computed on first use. Ids from ``size`` on have none."""

    def __init__(self, look_up: Callable[[int], bytes], *, size: int) -> None:
        super().__init__()
        self._look_up = look_up
        self._size = size

    def __missing__(self, token_id: int) -> bytes:
        if not 0 <= token_id < self._size:
            return b""
        value = self[token_id] = self._look_up(token_id)
        return value


@frozen(kw_only=True, eq=False)
class Vocabulary:
    """A fast tokenizer, its special tokens, and conversion in both directions."""

    backend: Tokenizer
    special: Mapping[int, str]
    """Text of each special token by id."""
    size: int
    _foreign: re.Pattern[str] | None = field(alias="foreign")
    _foreign_start: re.Pattern[str] | None = field(alias="foreign_start")
    _bytes_of: Mapping[int, bytes] = field(
        init=False, default=Factory(lambda self: _BytesOfTokens(self._look_up_bytes, size=self.size), takes_self=True)
    )

    @staticmethod
    def create(backend: Tokenizer, *, special: Mapping[int, str]) -> Vocabulary:
        """Wrap ``backend``, and switch off truncation and padding, which some tokenizer files switch on."""
        backend.no_truncation()
        backend.no_padding()
        # ``guard`` puts its break after the first character, so it cannot split a token of one character. Longest
        # first, because the alternatives of a regular expression are tried in order.
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
        """Return foreign text in a form in which ``encode`` recognises no special token."""
        if not text.isascii():
            try:
                text.encode()  # finds a lone surrogate in a fifth of the time of the pattern
            except UnicodeEncodeError:
                text = _SURROGATE.sub(_REPLACEMENT, text)
        # The plain pattern is fast if there is no match; the other pattern also finds overlapping tokens.
        if self._foreign is None or self._foreign_start is None or self._foreign.search(text) is None:
            return text
        return self._foreign_start.sub(rf"\1{_BREAK}", text)

    def encode(self, text: str) -> list[int]:
        """Return the ids of rendered text. Special tokens are recognised, except in guarded text; none is added."""
        return _encode_or_defer(text, len(text), partial(self._encode_pieces, text))

    def _encode_pieces(self, text: str) -> list[int]:
        if _BREAK not in text:
            return self._encode(text)
        return [token_id for piece in text.split(_BREAK) for token_id in self._encode(piece)]

    def encode_raw(self, text: str, *, is_start: bool) -> list[int]:
        """Return the ids of a text that was not rendered, with special tokens recognised.

        With ``is_start``, the tokens that the tokenizer puts before every text come first, unless the text spells them
        out itself. Tokens that it would append are left out, because the text continues.
        """
        return _encode_or_defer((text, is_start), len(text), partial(self._encode_raw, text, is_start=is_start))

    def _encode_raw(self, text: str, *, is_start: bool) -> list[int]:
        text = _SURROGATE.sub(_REPLACEMENT, text)
        ids = self._encode(text)
        if not is_start:
            return ids
        whole: list[int] = self.backend.encode(text, add_special_tokens=True).ids
        num_added = next((n for n in range(len(whole) - len(ids) + 1) if whole[n : n + len(ids)] == ids), 0)
        return ids if ids[:num_added] == whole[:num_added] else whole[:num_added] + ids

    def _encode(self, text: str) -> list[int]:
        # The template has written the special tokens already. A batch of one is 15 to 30 % faster than ``encode``,
        # which computes the place of each token in the text.
        ids: list[int] = self.backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def decode(self, token_ids: Ints | Sequence[int]) -> str:
        """Return the text of ids, special tokens included; ids outside the vocabulary are skipped."""
        detokenizer = self.open_detokenizer()
        return detokenizer.feed(as_list(token_ids)) + detokenizer.finish()

    def token_bytes(self, token_ids: Ints | Sequence[int], *, is_start: bool = True) -> list[bytes]:
        """Return the bytes of each token of an answer; see ``Renderer.token_bytes``."""
        ids = as_list(token_ids)
        pieces = [self._bytes_of[token_id] for token_id in ids]
        if is_start and ids and not isinstance(self.backend.decoder, decoders.ByteLevel):
            # Decoders of the SentencePiece kind drop the space in front of the first token.
            alone = self._decode(ids[:1])
            pieces[0] = pieces[0] if _REPLACEMENT in alone else alone.encode()
        return pieces

    def open_detokenizer(self) -> Detokenizer:
        """Return a detokenizer for one answer."""
        if isinstance(self.backend.decoder, decoders.ByteLevel):
            return _ByteDetokenizer(self._bytes_of)
        return _WindowDetokenizer(self._decode)

    def _decode(self, token_ids: Sequence[int]) -> str:
        text: str = self.backend.decode([i for i in token_ids if 0 <= i < self.size], skip_special_tokens=False)
        return text

    def _look_up_bytes(self, token_id: int) -> bytes:
        token = self.backend.id_to_token(token_id)
        if token is None:
            return b""
        if not isinstance(self.backend.decoder, decoders.ByteLevel):
            if _BYTE_TOKEN.fullmatch(token) and self._decode([token_id]) != token:
                return bytes([int(token[3:5], 16)])
            return self._decode_after(token_id).encode()
        # Added tokens are stored as plain text, not in the byte-level alphabet.
        if token_id in self.special or not all(char in _BYTE_OF for char in token):
            return token.encode()
        return bytes(_BYTE_OF[char] for char in token)

    def _decode_after(self, token_id: int) -> str:
        # The token is decoded twice in a row because the decoder drops the space of the first token.
        return self._decode([token_id, token_id])[len(self._decode([token_id])) :]


def as_list(token_ids: Ints | Sequence[int]) -> list[int]:
    """Return ids as plain ints, which are faster to look up than NumPy's."""
    return token_ids.tolist() if isinstance(token_ids, np.ndarray) else list(map(int, token_ids))


_PRINTABLE = frozenset({*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)})
# The byte-level alphabet: printable Latin-1 characters represent themselves, the other bytes are numbered from 256.
_BYTE_OF: Mapping[str, int] = {chr(byte): byte for byte in sorted(_PRINTABLE)} | {
    chr(256 + n): byte for n, byte in enumerate(byte for byte in range(256) if byte not in _PRINTABLE)
}
