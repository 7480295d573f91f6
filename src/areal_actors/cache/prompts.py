"""Which token ids a request is answered from: the parent's exact ids with a rendered suffix, or a rendering in full.

A turn extends its parent's exact tokens: its prompt is the parent's prompt ids, the ids that were sampled, and the
newly rendered suffix; nothing that was sampled is ever tokenised again. Where the renderer cannot extend faithfully,
the conversation is rendered in full and becomes a new branch of tokens: it keeps its conversational parent, which
rewards flow to, and shares tokens only with an ancestor whose exact ids it verifiably begins with. Nothing is erased or
realigned.

History is rendered from the stored messages, never from the client's echo of them. The renderer itself is a plug;
``PromptRenderer`` says what it must do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from areal_actors.cache.history import go_on
from areal_actors.cache.links import Match
from areal_actors.cache.tokens import longest_token_ancestor
from areal_actors.cache.tree import ConversationTree, PromptPlan
from areal_actors.domain import (
    ChatMessage,
    CompletionRequest,
    ForkReason,
    Interaction,
    InteractionId,
    Ints,
    Tool,
    as_ints,
)

__all__ = ["PromptPlan", "PromptRenderer", "plan_prompt"]


class PromptRenderer(Protocol):
    """Messages to token ids, in full or incrementally."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The ids that end a turn of the model."""
        ...

    def render(
        self, messages: tuple[ChatMessage, ...], *, tools: tuple[Tool, ...], template_kwargs: Mapping[str, Any]
    ) -> Ints:
        """The ids of a whole prompt, int32 [T], up to where the model's answer begins."""
        ...

    def extend(
        self,
        *,
        history: tuple[ChatMessage, ...],
        new: tuple[ChatMessage, ...],
        is_closed: bool,
        tools: tuple[Tool, ...],
        template_kwargs: Mapping[str, Any],
    ) -> Ints | ForkReason:
        """The ids that follow the sampled ids of the last message of ``history``, or why there are none.

        ``is_closed`` tells whether the sampled ids end with a stop id.
        """
        ...


def plan_prompt(tree: ConversationTree, renderer: PromptRenderer, request: CompletionRequest) -> PromptPlan:
    """Find the parent of ``request`` and the exact ids of its prompt. Changes nothing; ``tree.begin`` takes the plan.

    Raises what the renderer raises for messages that its template refuses.
    """
    match = tree.match(request)
    if match.parent is None or match.fork_hint is not None:
        return _rendered(tree, renderer, request, match, match.fork_hint)
    suffix = renderer.extend(
        history=tree.history(match.parent),
        new=match.new_messages,
        is_closed=_is_closed(match.parent, renderer),
        tools=request.tools,
        template_kwargs=request.template_kwargs,
    )
    if isinstance(suffix, ForkReason):
        return _rendered(tree, renderer, request, match, suffix)
    ids = np.concatenate([tree.full_tokens(match.parent), suffix])
    return _plan(request, match, ids, start=len(ids) - len(suffix), token_parent=match.parent.id)


def _rendered(
    tree: ConversationTree, renderer: PromptRenderer, request: CompletionRequest, match: Match, fork: ForkReason | None
) -> PromptPlan:
    """Render in full; share tokens with the nearest ancestor whose exact ids the prompt begins with."""
    ids = as_ints(
        renderer.render(_stored_messages(tree, match), tools=request.tools, template_kwargs=request.template_kwargs)
    )
    found = None if match.parent is None else longest_token_ancestor(ids, match.parent, tree.get)
    if found is None:
        return _plan(request, match, ids, fork=fork)
    ancestor, start = found
    is_extension = ancestor is match.parent and fork is not ForkReason.NEW_SYSTEM_PROMPT
    return _plan(request, match, ids, start=start, token_parent=ancestor.id, fork=None if is_extension else fork)


def _stored_messages(tree: ConversationTree, match: Match) -> tuple[ChatMessage, ...]:
    """The request's messages, with the stored ones in the place of their echoes."""
    if match.parent is None:
        return match.new_messages
    messages = list(tree.history(match.parent))
    go_on(messages, match.new_messages, match.num_instructions)
    return tuple(messages)


def _plan(
    request: CompletionRequest,
    match: Match,
    ids: Ints,
    *,
    start: int = 0,
    token_parent: InteractionId | None = None,
    fork: ForkReason | None = None,
) -> PromptPlan:
    ids = as_ints(ids)
    return PromptPlan(
        request=request, match=match, token_ids=ids, suffix=ids[start:], token_parent=token_parent, fork=fork
    )


def _is_closed(parent: Interaction, renderer: PromptRenderer) -> bool:
    completion = parent.completion
    if completion is None or len(completion.token_ids) == 0:
        return False
    return int(completion.token_ids[-1]) in renderer.stop_token_ids
