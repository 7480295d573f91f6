"""Grammars of answers, in terms that every engine can translate into its own format.

A grammar describes the text of a whole answer, up to its end-of-turn token. Engines turn it into a mask over the
vocabulary, so that all sampled tokens match; log-probabilities are those under the mask. Tool and reasoning formats
(``rendering``) and the dialects of the proxy compose grammars; ``engines`` compile them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import field, frozen


@frozen(kw_only=True)
class Exactly:
    """Exactly this text. The text of a special token (``<tool_call>``) may be sampled as that token."""

    text: str


@frozen(kw_only=True)
class JsonText:
    """A JSON value that satisfies ``schema``. Every value satisfies ``{}``.

    A keyword that an engine cannot enforce is refused with ``is_strict``, and ignored otherwise.
    """

    schema: Mapping[str, Any] = field(factory=dict)
    is_strict: bool = True


@frozen(kw_only=True)
class MatchingRegex:
    """Text that ``pattern`` matches as a whole."""

    pattern: str


@frozen(kw_only=True)
class FreeText:
    """Any text, possibly empty, that contains none of ``excluding``."""

    excluding: tuple[str, ...] = ()


@frozen(kw_only=True)
class InOrder:
    """The parts, one after the other."""

    parts: tuple[Grammar, ...]


@frozen(kw_only=True)
class OneOf:
    """One of the parts; there is at least one."""

    parts: tuple[Grammar, ...]


@frozen(kw_only=True)
class Repeated:
    """``part``, ``at_least`` to ``at_most`` times (``None``: unbounded), with ``separator`` in between."""

    part: Grammar
    at_least: int = 1
    at_most: int | None = None
    separator: str = ""


Grammar = Exactly | JsonText | MatchingRegex | FreeText | InOrder | OneOf | Repeated
