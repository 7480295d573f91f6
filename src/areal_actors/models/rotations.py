"""Rotary embeddings whose frequencies depend on the longest position of a pass: dynamic NTK and longrope.

transformers recomputes the frequencies of such a model when a pass has a position beyond the length that it was
trained for. All tokens of that pass are then rotated by other angles, whichever row they belong to, and keys that were
cached before are not. A token's log-probability would depend on what shares its pass, and on when it was sampled. There
is no rule for single rows that sampling could follow, since the frequencies change in the middle of a row. So rows stay
below that length, where the frequencies are constant, and longer ones are refused.

Models are tried, not recognised by names: whatever makes frequencies depend on other rows is found.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from areal_actors.errors import ConfigError
from areal_actors.models.shapes import model_shape

_NUM_TOKENS = 3
_TOLERANCE = 1e-3
_UNKNOWN_LENGTH = 1 << 20
"""Positions that a model may have if its configuration does not say how many."""


def require_fixed_rotation(model: Any, *, max_length: int | None) -> int | None:
    """Return the length in tokens up to which rows are rotated alike in every pass; ``None`` if all are.

    Rows have up to ``max_length`` tokens, and no more than the model has positions; ``None`` means any number. Raises
    ``ConfigError`` if they may be longer than that length.
    """
    limit = rotation_limit(model)
    if limit is None:
        return None
    longest = None if max_length is None else min(max_length, model_shape(model.config).max_positions or max_length)
    if longest is None or longest > limit:
        raise ConfigError(
            f"engine.max_length: beyond {limit} tokens {type(model).__name__} rotates all rows of a pass by its "
            f"longest one, so that log-probabilities depend on other rows, and rows may have "
            f"{longest or 'any number of'} tokens; set engine.max_length to {limit} or less, or take a model with a "
            "fixed rotation (default, linear, yarn, llama3)."
        )
    return limit


def rotation_limit(model: Any) -> int | None:
    """Return the length of rows up to which rotary frequencies are constant; ``None`` if they are for any length.

    The ``model`` is a causal language model of transformers, in float32. It computes a few tokens.
    """
    import torch

    rotations = [
        part
        for part in model.modules()
        if any(name.endswith("inv_freq") for name, _ in part.named_buffers(recurse=False))
    ]
    if not rotations:
        return None

    @torch.no_grad()
    def compute(last: int) -> list[Any]:
        """Return rotations and logits of a row that shares a pass with one that ends at the position ``last``."""
        own = torch.arange(_NUM_TOKENS)
        positions = torch.stack([own, own + last - (_NUM_TOKENS - 1)]).to(model.device)
        ids = own.expand(2, -1).contiguous().to(model.device)
        with _recorded(rotations) as found:
            logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        return [*(tensor.select(-3, 0) for tensor in found if tensor.ndim > 2), logits[0]]  # noqa: PLR2004

    def is_independent(length: int) -> bool:
        alone = compute(_NUM_TOKENS - 1)  # which also resets what a longer pass has left
        # Models that keep tables of angles have no others: they fail, and their rotation is fixed.
        try:
            beside = compute(length - 1)
        except IndexError:
            return True
        *angles, logits = zip(alone, beside, strict=True)
        # Weights that are no numbers are found later, by what they compute.
        is_close = torch.allclose(*logits, rtol=0, atol=_TOLERANCE, equal_nan=True)
        return is_close and all(torch.equal(*pair) for pair in angles)

    longest = 2 * (model_shape(model.config).max_positions or _UNKNOWN_LENGTH)
    try:
        if is_independent(longest):
            return None
        low, high = _NUM_TOKENS, longest
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if is_independent(middle) else (low, middle)
        return low
    finally:
        compute(_NUM_TOKENS - 1)


@contextmanager
def _recorded(modules: Sequence[Any]) -> Iterator[list[Any]]:
    """Collect the tensors that ``modules`` return during the block."""
    found: list[Any] = []

    def record(_module: Any, _args: Any, output: Any) -> None:
        found.extend(output if isinstance(output, tuple) else [output])

    hooks = [module.register_forward_hook(record) for module in modules]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
