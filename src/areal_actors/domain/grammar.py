"""Grammars: what an answer must look like, in words that every engine can translate into its own.

A grammar describes the text of a whole answer, up to its end-of-turn token. Engines turn it into a mask over the
vocabulary, so that whatever is sampled matches; the log-probabilities are those under the mask. Tool and reasoning
formats (``rendering``) and the dialects of the proxy compose grammars, ``engines`` compile them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import field, frozen

__all__ = ["Exactly", "FreeText", "Grammar", "InOrder", "JsonText", "MatchingRegex", "OneOf", "Repeated"]


@frozen(kw_only=True)
class Exactly:
    """This text and no other. The text of a special token (``<tool_call>``) may be sampled as that token."""

    text: str


@frozen(kw_only=True)
class JsonText:
    """A JSON value that satisfies ``schema``. ``{}`` is satisfied by every value.

    A keyword that an engine cannot hold is refused where ``is_strict``, and ignored otherwise.
    """

    schema: Mapping[str, Any] = field(factory=dict)
    is_strict: bool = True


@frozen(kw_only=True)
class MatchingRegex:
    """Text that ``pattern`` matches as a whole."""

    pattern: str


@frozen(kw_only=True)
class FreeText:
    """Any text, also none, in which none of ``excluding`` occurs."""

    excluding: tuple[str, ...] = ()


@frozen(kw_only=True)
class InOrder:
    """One part after the other."""

    parts: tuple[Grammar, ...]


@frozen(kw_only=True)
class OneOf:
    """One of several parts; there is at least one."""

    parts: tuple[Grammar, ...]


@frozen(kw_only=True)
class Repeated:
    """``part``, ``at_least`` to ``at_most`` times (``None``: without bound), with ``separator`` between two of them."""

    part: Grammar
    at_least: int = 1
    at_most: int | None = None
    separator: str = ""


Grammar = Exactly | JsonText | MatchingRegex | FreeText | InOrder | OneOf | Repeated
