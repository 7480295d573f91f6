"""What the tests of the cache share: a renderer that can be read with bare eyes, and completions made of text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from attrs import define

from areal_actors.cache import ConversationTree, plan_prompt
from areal_actors.domain import (
    ChatMessage,
    Completion,
    CompletionRequest,
    FinishReason,
    ForkReason,
    Interaction,
    InteractionId,
    Ints,
    SessionId,
    Tool,
    as_ints,
)

STOP = 3


@define
class ToyRenderer:
    """Tokens are code points; a turn reads ``<role>text`` and ends with id 3. ``rewrites`` makes every turn a fork."""

    rewrites: bool = False
    keeps_reasoning: bool = True
    stop_token_ids: tuple[int, ...] = (STOP,)
    num_rendered: int = 0

    def text(self, message: ChatMessage) -> list[int]:
        """The ids of one closed turn."""
        calls = "".join(f"[{call.name}{call.arguments}]" for call in message.tool_calls)
        reasoning = f"({message.reasoning})" if message.reasoning and self.keeps_reasoning else ""
        self.num_rendered += 1
        return [*map(ord, f"<{message.role}>{reasoning}{message.content or ''}{calls}"), STOP]

    def render(
        self, messages: Sequence[ChatMessage], *, tools: Sequence[Tool], template_kwargs: Mapping[str, Any]
    ) -> Ints:
        """The whole prompt; tools come first."""
        head = "".join(f"{{{tool.name}}}" for tool in tools)
        ids = [ord(c) for c in head]
        for message in messages:
            ids += self.text(message)
        return as_ints([*ids, *map(ord, "<assistant>")])

    def extend(
        self,
        *,
        history: Sequence[ChatMessage],
        new: Sequence[ChatMessage],
        end: int | None,
        tools: Sequence[Tool],
        template_kwargs: Mapping[str, Any],
    ) -> Ints | ForkReason:
        """The rest of the prompt."""
        if self.rewrites:
            return ForkReason.TEMPLATE_REWROTE_HISTORY
        ids = [STOP] if end is None else []
        for message in new:
            ids += self.text(message)
        return as_ints([*ids, *map(ord, "<assistant>")])

    def encode(self, text: str, *, is_start: bool) -> Ints:
        """The ids of a raw text; the beginning of a text is marked."""
        return as_ints([*([1] if is_start else []), *map(ord, text)])

    def decode(self, token_ids: Ints) -> str:
        """The text of ids; the mark of the beginning has none."""
        return "".join(chr(i) for i in token_ids if i != 1)


@define
class Talk:
    """A tree and what a proxy does with it: plan, begin, sample, complete."""

    tree: ConversationTree
    renderer: ToyRenderer

    def completion(self, message: ChatMessage, *, version: int = 0, is_closed: bool = True) -> Completion:
        """What an engine would have sampled for ``message``."""
        header = len("<assistant>")
        ids = self.renderer.text(message)[header:]
        ids = ids if is_closed else ids[:-1]
        logprobs = -np.arange(1, len(ids) + 1, dtype=np.float32) / 7
        return Completion(
            token_ids=ids,
            logprobs=logprobs,
            raw_logprobs=logprobs,
            versions=np.full(len(ids), version),
            finish=FinishReason.STOP if is_closed else FinishReason.LENGTH,
        )

    def begin(self, name: str, messages: Sequence[ChatMessage], **request: Any) -> Interaction:
        """Ask."""
        asked = CompletionRequest(messages=tuple(messages), **request)
        return self.tree.begin(InteractionId(name), plan_prompt(self.tree, self.renderer, asked))

    def finish(self, name: str, output: ChatMessage, **options: Any) -> Interaction:
        """Answer."""
        return self.tree.complete(InteractionId(name), self.completion(output, **options), output)

    def turn(
        self, name: str, messages: Sequence[ChatMessage], answer: ChatMessage | str, **request: Any
    ) -> Interaction:
        """Ask and answer."""
        output = ChatMessage(role="assistant", content=answer) if isinstance(answer, str) else answer
        self.begin(name, messages, **request)
        return self.finish(name, output)


@pytest.fixture(scope="session")
def new_talk() -> Callable[..., Talk]:
    """Makes an empty tree with a toy renderer."""

    def make(**options: Any) -> Talk:
        return Talk(ConversationTree(SessionId("s")), ToyRenderer(**options))

    return make


@pytest.fixture
def talk(new_talk: Callable[..., Talk]) -> Talk:
    """An empty tree with a toy renderer."""
    return new_talk()
