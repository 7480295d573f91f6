"""Prompt planning: a request's exact token ids, from the parent's ids and a rendered suffix or from a full rendering.

A turn extends its parent's exact tokens: its prompt is the parent's prompt ids, the sampled ids, and the newly rendered
suffix. Sampled tokens are never tokenised again. If the renderer cannot extend faithfully, the conversation is rendered
in full and becomes a new branch of tokens: it keeps its conversational parent, to which rewards flow, and shares tokens
only with an ancestor whose exact ids it verifiably begins with. Nothing is erased or realigned.

History is rendered from the stored messages, never from the client's echo of them. The renderer is a plug-in;
``PromptRenderer`` is its interface.

A raw prompt (a text, or ids) continues an earlier one if it begins with that one's prompt and answer, and then extends
its exact ids as well. The part of the answer that the client did not see (an end token, a stop string) must occur at
its place in the new prompt; if it does not, the client has omitted it, and the prompt is a new branch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from attrs import evolve

from areal_actors.cache.history import go_on, longest_token_ancestor
from areal_actors.cache.links import Match
from areal_actors.cache.tree import RAW_ROLE, ConversationTree, PromptPlan
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


class PromptRenderer(Protocol):
    """Renders messages to token ids, in full or incrementally."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The ids that end a turn of the model."""
        ...

    def render(
        self, messages: tuple[ChatMessage, ...], *, tools: tuple[Tool, ...], template_kwargs: Mapping[str, Any]
    ) -> Ints:
        """Return the ids of a whole prompt, int32 [T], up to the start of the model's answer."""
        ...

    def extend(
        self,
        *,
        history: tuple[ChatMessage, ...],
        new: tuple[ChatMessage, ...],
        end: int | None,
        tools: tuple[Tool, ...],
        template_kwargs: Mapping[str, Any],
    ) -> Ints | ForkReason:
        """Return the ids that follow the sampled ids of ``history``'s last message, or the reason why there are none.

        ``end`` is the last sampled id if it is a stop id; ``None`` if the answer was cut.
        """
        ...

    def begin_answer(
        self,
        messages: tuple[ChatMessage, ...],
        begun: ChatMessage,
        *,
        tools: tuple[Tool, ...],
        template_kwargs: Mapping[str, Any],
    ) -> Ints:
        """Return the ids that follow the prompt of ``messages`` up to the end of the text of ``begun``, int32 [n]."""
        ...

    def encode(self, text: str, *, is_start: bool) -> Ints:
        """Return the ids of a raw text, int32 [T].

        With ``is_start``, they include the tokens that the tokenizer adds at the start of a text.
        """
        ...

    def decode(self, token_ids: Ints) -> str:
        """Return the text of ids, including special tokens."""
        ...


def plan_prompt(tree: ConversationTree, renderer: PromptRenderer, request: CompletionRequest) -> PromptPlan:
    """Find the parent of ``request`` and the exact ids of its prompt, without changing the tree.

    Pass the plan to ``tree.begin``. Raises the renderer's errors for messages that its template refuses.
    """
    plan = _plan_prompt(tree, renderer, request)
    if request.begun is None:
        return plan
    said = [] if plan.match.parent is None else list(tree.history(plan.match.parent))
    go_on(said, plan.messages, plan.match.num_instructions, plan.match.num_kept)
    beginning = renderer.begin_answer(
        tuple(said), request.begun, tools=request.tools, template_kwargs=request.template_kwargs
    )
    ids, suffix = (as_ints(np.concatenate([part, beginning])) for part in (plan.token_ids, plan.suffix))
    return evolve(plan, token_ids=ids, suffix=suffix, beginning=beginning)


def _plan_prompt(tree: ConversationTree, renderer: PromptRenderer, request: CompletionRequest) -> PromptPlan:
    if request.prompt is not None:
        return _plan_text(tree, renderer, request, request.prompt)
    if request.prompt_ids:
        ids = as_ints(request.prompt_ids)
        found = tree.find_ids(ids)
        if found is None:
            return _plan(request, _match_raw(tree, request, None, renderer.decode(ids)), ids, fork=ForkReason.ROOT)
        parent, suffix = found
        return _extended(tree, request, _match_raw(tree, request, parent, renderer.decode(suffix)), parent, suffix)
    match = tree.match(request)
    base = match.base
    if base is None:
        return _rendered(tree, renderer, request, match, match.fork_hint)
    messages, completion = match.messages, base.completion
    # An answer that was cut off lacks the token that ends a turn, which the renderer must add.
    last = int(completion.token_ids[-1]) if completion is not None and len(completion.token_ids) else None
    rendered = renderer.extend(
        history=tree.history(base),
        new=messages[len(messages) - match.num_beyond :],
        end=last if last in renderer.stop_token_ids else None,
        tools=request.tools,
        template_kwargs=request.template_kwargs,
    )
    if isinstance(rendered, ForkReason):
        return _rendered(tree, renderer, request, match, match.fork_hint or rendered)
    ids = np.concatenate([tree.full_tokens(base), rendered])
    return _plan(request, match, ids, start=len(ids) - len(rendered), token_parent=base.id, fork=match.fork_hint)


def _rendered(
    tree: ConversationTree, renderer: PromptRenderer, request: CompletionRequest, match: Match, fork: ForkReason | None
) -> PromptPlan:
    """Render in full, and share tokens with the nearest ancestor whose exact ids the prompt begins with."""
    # The stored messages, not their echoes: what a client has dropped, such as reasoning, would change the tokens.
    messages = [] if match.parent is None else list(tree.history(match.parent))
    go_on(messages, match.new_messages, match.num_instructions, match.num_kept)
    ids = as_ints(renderer.render(tuple(messages), tools=request.tools, template_kwargs=request.template_kwargs))
    return _branch(tree, request, match, ids, fork)


def _branch(
    tree: ConversationTree, request: CompletionRequest, match: Match, ids: Ints, fork: ForkReason | None
) -> PromptPlan:
    found = None if match.parent is None else longest_token_ancestor(ids, match.parent, tree.get)
    if found is None:
        return _plan(request, match, ids, fork=fork)
    ancestor, start = found
    # A full rendering that begins with the parent's exact ids is an extension after all, unless the client sent other
    # words than the parent's.
    is_edited = fork is ForkReason.NEW_SYSTEM_PROMPT or match.num_kept is not None or match.is_fallback
    is_extension = ancestor is match.parent and not is_edited
    return _plan(request, match, ids, start=start, token_parent=ancestor.id, fork=None if is_extension else fork)


def _plan_text(tree: ConversationTree, renderer: PromptRenderer, request: CompletionRequest, text: str) -> PromptPlan:
    found = tree.find_text(text)
    if found is None:
        match = _match_raw(tree, request, None, text)
        return _plan(request, match, renderer.encode(text, is_start=True), fork=ForkReason.ROOT)
    parent, rest = found
    match = _match_raw(tree, request, parent, rest)
    assert parent.completion is not None
    assert parent.output is not None
    said, sampled = parent.output.content or "", renderer.decode(parent.completion.token_ids)
    # An end token or a stop string, which the client did not see, must occur at its place in the new prompt.
    unseen = sampled[len(said) :]
    if sampled.startswith(said) and rest.startswith(unseen):
        added = rest[len(unseen) :]
        last, suffix = tree.full_tokens(parent)[-1:], as_ints(renderer.encode(added, is_start=False))
        # Some tokenizers add a space before every text, and an incomplete character at the parent's end cannot be
        # decoded.
        if renderer.decode(np.concatenate([last, suffix])) == renderer.decode(last) + added:
            return _extended(tree, request, match, parent, suffix)
    ids = as_ints(renderer.encode(text, is_start=True))
    return _branch(tree, request, match, ids, ForkReason.CLIENT_EDITED_HISTORY)


def _match_raw(tree: ConversationTree, request: CompletionRequest, parent: Interaction | None, new_text: str) -> Match:
    """Return a raw prompt's position in the tree, as a conversation whose turns begin with the client's additions."""
    history = () if parent is None else tree.history(parent)
    messages = (*history, ChatMessage(role=RAW_ROLE, content=new_text))
    match = tree.match(evolve(request, messages=messages))
    return evolve(match, parent=parent, new_messages=messages[len(history) :], num_kept=None, base=None)


def _extended(
    tree: ConversationTree, request: CompletionRequest, match: Match, parent: Interaction, suffix: Ints
) -> PromptPlan:
    ids = np.concatenate([tree.full_tokens(parent), suffix])
    return _plan(request, match, ids, start=len(ids) - len(suffix), token_parent=parent.id)


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
