"""Constrain sampling to a grammar with llguidance, which determines the tokens that may follow.

``GrammarCompiler`` belongs to the event loop: it compiles a grammar to a ``Constraint`` in a worker thread, or raises
an error. From then on, the constraint belongs to the engine's thread, one for each generation. It depends only on the
sampled tokens, so that pauses, new weights and recomputation do not affect it. ``generation/lark`` translates grammars
for the library.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING

import anyio
import numpy as np
import numpy.typing as npt
from anyio import to_thread
from attrs import frozen

from areal_actors.domain import Grammar
from areal_actors.errors import InvalidRequest, UnsupportedParameter
from areal_actors.generation.lark import format_lark

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from tokenizers import Tokenizer

_MAX_KEPT = 256
"""Maximum number of compiled grammars to keep.

Agents send the same tools with every turn; compiling the grammar of five tools takes about 4 ms and 100 kB.
"""

_MAX_LARK = 2_000_000
"""Maximum length of a grammar in characters. The tools of a real agent take about ten thousand."""

_MAX_LINES = 2
_MAX_REASON = 400


class Constraint:
    """The grammar's state in one generation. ``stop_ids`` are allowed exactly where the grammar may end.

    A stop id that is an ordinary token is allowed as text as well, where the grammar has it.
    """

    def __init__(self, matcher: LLMatcher, *, end_id: int, stop_ids: frozenset[int], vocab_size: int) -> None:
        self._matcher = matcher
        self._end_id = end_id
        self._vocab_size = vocab_size
        # Ids outside the vocabulary are never sampled, and so never end anything.
        self._stop_ids = np.array([i for i in sorted(stop_ids) if 0 <= i < vocab_size], dtype=np.int64)

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Return the tokens that may follow, bool [V]; all false if no token can continue the grammar."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        mask = np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)
        if self._matcher.is_error():
            return np.zeros_like(mask)
        # llguidance marks a possible end with one token; it stands for all stop ids of the request.
        may_end = bool(mask[self._end_id])
        mask[self._end_id] = False
        if may_end:
            mask[self._stop_ids] = True
        return mask

    def append(self, token_id: int) -> None:
        """Advance by ``token_id``, which was sampled, was allowed, and is not a stop token."""
        self._matcher.consume_token(token_id)

    @property
    def has_stop(self) -> bool:
        """Return whether any token ends the generation."""
        return len(self._stop_ids) > 0

    @property
    def is_over(self) -> bool:
        """Return whether the grammar is satisfied and only a stop token can follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def failure(self) -> str:
        """Return why no token can follow although the grammar is not satisfied."""
        return _reason(self._matcher.get_error()) or "no token of the vocabulary continues it"


@frozen(eq=False)
class _Library:
    """llguidance's tokenizer for the model. ``end_id`` is the token that stands for the end in its masks."""

    tokenizer: LLTokenizer
    tokens: Mapping[str, int]
    end_id: int


class GrammarCompiler:
    """Compiles grammars for one model, and caches the results.

    ``tokenizer`` is the model's (``tokenizers.Tokenizer``), ``vocab_size`` the width of its logits. llguidance is
    loaded with the first grammar.
    """

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._load_library = cache(partial(_load_library, tokenizer, vocab_size))
        self._compile = lru_cache(_MAX_KEPT)(_compile)
        # One at a time, so that concurrent requests for the same grammar wait for the first of them.
        self._limiter = anyio.CapacityLimiter(1)

    async def compile(self, grammar: Grammar, *, stop_ids: frozenset[int]) -> Constraint:
        """Return a new constraint for one generation.

        Raises:
            InvalidRequest: the grammar is malformed (a broken schema or expression), or too large.
            UnsupportedParameter: the grammar cannot be enforced, or not with this tokenizer.
        """
        return await to_thread.run_sync(self._create, grammar, stop_ids, limiter=self._limiter)

    def _create(self, grammar: Grammar, stop_ids: frozenset[int]) -> Constraint:
        library = self._load_library()
        text = format_lark(grammar, tokens=library.tokens)
        if len(text) > _MAX_LARK:
            raise InvalidRequest(f"The form of the answer takes {len(text)} characters to say; ask for a simpler one.")
        matcher = self._compile(library.tokenizer, text).deep_copy()
        return Constraint(matcher, end_id=library.end_id, stop_ids=stop_ids, vocab_size=self._vocab_size)


def _load_library(tokenizer: Tokenizer, vocab_size: int) -> _Library:
    from llguidance import LLTokenizer

    added = tokenizer.get_added_tokens_decoder()
    special = [token_id for token_id, token in added.items() if token.special and token_id < vocab_size]
    if not special:
        raise UnsupportedParameter("Forms of answers need a tokenizer with special tokens, and the model's has none.")
    size = max(vocab_size, tokenizer.get_vocab_size(with_added_tokens=True))
    try:
        library = LLTokenizer(tokenizer.to_str(), n_vocab=size, eos_token=min(special))
    except ValueError as error:
        raise UnsupportedParameter(
            f"Forms of answers cannot be held with the tokenizer of this model: {_reason(str(error))}."
        ) from error
    return _Library(library, {token.content: token_id for token_id, token in added.items()}, min(special))


def _compile(tokenizer: LLTokenizer, text: str) -> LLMatcher:
    from llguidance import LLMatcher

    try:
        matcher = LLMatcher(tokenizer, text, log_level=0)
    except (ValueError, UnicodeError) as error:
        raise InvalidRequest(f"The form of the answer is not valid: {_reason(str(error))}.") from error
    if matcher.is_error():
        reason = _reason(matcher.get_error())
        raise UnsupportedParameter(f"Answers cannot be constrained to this form: {reason}.")
    return matcher


def _reason(text: str) -> str:
    """Return the library's error in one line.

    It leaves out positions in the Lark text, which the client never saw.
    """
    lines = [line.removeprefix("error: ") for line in text.splitlines() if re.match(r"\S", line)]
    said = ": ".join(re.sub(r"^at [\d()]+: |:$", "", line) for line in lines[:_MAX_LINES])
    return said[:_MAX_REASON].rstrip(".")
