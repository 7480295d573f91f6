"""What models say: the answers of a family in tokens that no tokenizer would choose, and plain garbage."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cache, lru_cache
from random import Random
from typing import Any

from attrs import frozen
from tools.fuzz.recording import Writing

from areal_actors.domain import EngineRequest, FinishReason
from areal_actors_testing.families import Family

__all__ = ["STOPS", "Writer", "arguments", "words"]

WORDS = (
    *("alpha", "beta", "Gamma", "delta ", "\n", "\n\n", "  ", "\t", "é漢🙂", "e\u0301", "\u2028", "\xa0", "'s", "a"),
    *('{"a": 1}', "{", "}", "[", '"', "\\", "\\u00e9", "<", ">", "</", "<think>", "</think>", "<tool_call>", "\n- "),
    *("</tool_call>", "[TOOL_CALLS]", "Observation:", "<|im_end|>", "<|eot_id|>", "</s>", "functions.look", "0.5"),
)
STOPS = ("Observation:", "漢")
"""Stop strings of some requests, which are among the words."""
ODDITIES = (
    *('"\\ud83d"', '"x\\uDE00y"', '"\\ud83d\\ude00"', '"\\ud83d\\ud83d\\ude00"', "98765432109876543210", "-0", "1E5"),
    *("NaN", "1e400", "9" * 400, "[1,]", '{"k": 1, "k": 2}', '"\\u00e9"', "[" * 99 + "]" * 99, "[" * 101 + "]" * 101),
)
"""Values in JSON that not all readers take, or that lose something in careless hands."""
_KEYS = ('"arguments"', '"parameters"', '"args"', '"input"', '"function"', '"param"')
PLAIN = 9
"""The first so many of them are harmless."""
_IDS = ("abcDEF123", "abcDEF124")
VALUES: tuple[Any, ...] = (
    *(0, 1, -3, 2.0, 0.1, 1e20, 1e-7, -0.0, 12345678901234567890123, 2**53 + 1, True, False, None, "", "x", " y "),
    *("Zürich", "漢字🙂", 'say "hi"', "a\\b", "line\nbreak", "</tool_call>", "1", [], {}, [1, [2.0, "z"]], {"k": None}),
)


def words(rng: Random, *, most: int = 6) -> str:
    """Text, half of it harmless."""
    pool = WORDS[:PLAIN] if rng.random() < 0.5 else WORDS
    joint = rng.choice((" ", " ", ""))
    return joint.join(rng.choices(pool, k=rng.randrange(1, most + 1)))


def arguments(rng: Random) -> dict[str, Any]:
    """The arguments of a call."""
    names = rng.sample(("a", "b", "ü", "city"), k=rng.randrange(3))
    return {name: rng.choice(VALUES) for name in names}


@frozen
class Spelling:
    """How else the text of each token can be spelled in tokens."""

    ids: dict[str, int]
    others: dict[int, tuple[tuple[int, ...], ...]]
    size: int

    @staticmethod
    def of(family: Family) -> Spelling:
        """The vocabulary of a family: its tokens are strings with one character per byte."""
        vocabulary = family.create_renderer().vocabulary
        ids: dict[str, int] = vocabulary.backend.get_vocab()
        others: dict[int, tuple[tuple[int, ...], ...]] = {}
        for token, token_id in ids.items():
            if token_id in vocabulary.special or len(token) < 2:
                continue
            pieces = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
            pieces.append(tuple(token))  # type: ignore[arg-type]
            known = [tuple(ids[piece] for piece in parts) for parts in pieces if all(piece in ids for piece in parts)]
            if known:
                others[token_id] = tuple(known)
        return Spelling(ids, others, vocabulary.size)


_spelling = cache(Spelling.of)
_PIECES = re.compile("( +)")


@lru_cache(maxsize=1 << 15)
def _encoded(family: Family, piece: str) -> tuple[int, ...]:
    return tuple(family.create_renderer().vocabulary.encode(piece))


class Writer:
    """Writes the answers of one session's model."""

    def __init__(self, family: Family, rng: Random, tools: Sequence[str]) -> None:
        self._family = family
        self._rng = rng
        self._tools = tools
        self._vocabulary = family.create_renderer().vocabulary
        self._spelling = _spelling(family)

    def __call__(self, request: EngineRequest) -> Writing:
        """One answer, ended as it happens to be."""
        rng = self._rng
        if rng.random() < 0.05:
            ids = rng.choices(range(self._spelling.size), k=rng.randrange(12))
        else:
            ids = self._respell(self._encode(self._text()))
            if ids and rng.random() < 0.03:
                del ids[rng.randrange(len(ids))]  # perhaps a part of a character
        return self._end(ids, request)

    def _encode(self, text: str) -> list[int]:
        """Word by word, which no tokenizer does, and which costs nothing for words that were met before."""
        ids: list[int] = []
        for piece in _PIECES.split(text):
            ids += _encoded(self._family, piece)
        return ids

    def _text(self) -> str:
        rng, family = self._rng, self._family
        calls = [(self._name(), arguments(rng)) for _ in range(self._num_calls())]
        content = words(rng) if not calls or rng.random() < 0.3 else ""
        if rng.random() < 0.03:
            content = ""
        thought = words(rng, most=4) if family.thought and rng.random() < 0.4 else ""
        text = family.write(content, calls, thought)
        if "[TOOL_CALLS][" in text and rng.random() < 0.5:
            # Models of the family write ids, and the same ones again.
            text = text.removesuffix("}]") + f', "id": "{rng.choice(_IDS)}"}}]'
        if rng.random() < 0.1:
            text = self._make_odd(text)
        if rng.random() < 0.08:
            text = self._damage(text)
        return text

    def _make_odd(self, text: str) -> str:
        """Values that strict readers refuse, arguments under another key or in a string."""
        rng = self._rng
        if rng.random() < 0.5:
            text = re.sub(
                r'(?<=[:=\n>]) ?("x"|"z"|1|true|null|True|None)(?=[],})\n<])', lambda _: rng.choice(ODDITIES), text
            )
        if rng.random() < 0.3:
            for key in _KEYS[:2]:
                text = text.replace(key, rng.choice(_KEYS))
        if rng.random() < 0.3:
            text = re.sub(r'(?<=": )\{.*\}(?=\})', lambda found: json.dumps(found[0]), text)
        return text.replace('"a"', rng.choice(('"a"', '"\\ud800"', '"\\u0061"')))

    def _num_calls(self) -> int:
        return self._rng.choice((0, 1, 1, 1, 2, 3)) if self._tools or self._rng.random() < 0.05 else 0

    def _name(self) -> str:
        return self._rng.choice(self._tools) if self._tools and self._rng.random() < 0.97 else "unheard_of"

    def _damage(self, text: str) -> str:
        rng = self._rng
        at = rng.randrange(len(text) + 1)
        return rng.choice((text[:at], text[:at] + text[at + 1 :], text[:at] + rng.choice(WORDS) + text[at:], text * 2))

    def _respell(self, ids: list[int]) -> list[int]:
        rng, others = self._rng, self._spelling.others
        share = rng.choice((0.0, 0.05, 0.3, 1.0))
        if not share:
            return ids
        spelled: list[int] = []
        for token_id in ids:
            ways = others.get(token_id)
            if ways and rng.random() < share:
                spelled += rng.choice(ways)
            else:
                spelled.append(token_id)
        return spelled

    def _end(self, ids: list[int], request: EngineRequest) -> Writing:
        """With an end token, by a stop string, by none, or cut where there is no more room."""
        rng, ends = self._rng, (*request.stop_token_ids, *request.sampling.stop_token_ids)
        if rng.random() < 0.03:
            return self._fit(ids, request, ends)
        end = ends[0] if rng.random() < 0.8 else rng.choice(ends)
        if request.sampling.stop and rng.random() < 0.5:
            ids = ids + self._vocabulary.encode(rng.choice(request.sampling.stop))
        else:
            ids = [*ids, end]
        return self._fit(ids, request, ends)

    def _fit(self, ids: list[int], request: EngineRequest, ends: Sequence[int]) -> Writing:
        """Engines sample nothing behind an end token, and no more than there is room for."""
        stop = next((at + 1 for at, token_id in enumerate(ids) if token_id in ends), len(ids))
        most = request.sampling.max_new_tokens
        if stop > most:
            return Writing(ids[:most], FinishReason.LENGTH)
        return Writing(ids[:stop])
