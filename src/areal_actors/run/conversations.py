"""Conversations to learn from: JSONL in OpenAI's or Anthropic's form, or the rollouts of an earlier run, as rows.

A conversation is rendered as the proxy would have: each answer is a completion of the prompt before it, in a tree of
turns, with the parsers of the proxy, the renderer of the run and the export of sessions. So what is trained is what
will be sampled: the answers with the token that ends them, and nothing of the prompts::

    {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}], "tools": [...]}
    {"system": "be brief", "messages": [{"role": "user", "content": [{"type": "text", "text": "2 + 2?"}]}, ...]}

An answer with ``"weight": 0`` is context only, as in OpenAI's files. Rollouts of a run keep the ids that were sampled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from attrs import evolve, field, frozen

from areal_actors.cache import ConversationTree, Unrewarded, export_trajectories, plan_prompt
from areal_actors.config import load_config
from areal_actors.dashboard import RunDirectory
from areal_actors.datasets import read_json_lines
from areal_actors.domain import (
    ChatMessage,
    Completion,
    CompletionRequest,
    FinishReason,
    Group,
    InteractionId,
    SessionId,
    Tool,
    Trajectory,
)
from areal_actors.errors import ArealError, ConfigError, DatasetError, ModelError
from areal_actors.models import resolve_tokenizer
from areal_actors.proxy.dialects.chat.request import parse_messages, parse_tools
from areal_actors.proxy.dialects.messages.request import parse_anthropic_conversation, parse_anthropic_tools
from areal_actors.rendering import Renderer
from areal_actors.training.phases import supervised_group

_MAX_NAMED = 3

Vocabulary = Mapping[int, str]
"""The text of each token by id, in the tokenizer's own spelling."""
_ANTHROPIC_BLOCKS = frozenset({"tool_use", "tool_result", "thinking", "redacted_thinking"})


@frozen(kw_only=True)
class SupervisedData:
    """Conversations in groups of one, and the batches that supervised steps take from them.

    Every step takes ``batch_size`` groups, in epochs, each with another permutation. A batch depends on ``seed`` and
    the number of the step only, so that a resumed run continues with the same ones.
    """

    groups: tuple[Group, ...] = field(repr=False)
    batch_size: int
    seed: int = 0

    def batch(self, step: int) -> tuple[Group, ...]:
        """Return the groups of ``step``, counted from 1 within its phase."""
        positions = range((step - 1) * self.batch_size, step * self.batch_size)
        found = [divmod(position, len(self.groups)) for position in positions]
        orders = {epoch: np.random.default_rng((self.seed, epoch)).permutation(len(self.groups)) for epoch, _ in found}
        return tuple(self.groups[orders[epoch][index]] for epoch, index in found)


def conversations_to_rows(
    conversations: Iterable[Mapping[str, Any]], renderer: Renderer, *, max_tokens: int | None = None
) -> list[Trajectory]:
    """Return the training rows of conversations in OpenAI's or Anthropic's form.

    A row is a path through the tree of turns: one for each conversation, unless the chat template rewrites history.
    Answers are trained, with the token that ends the turn; nothing sampled them, so their log-probabilities are 0.

    Raises ``DatasetError`` naming the conversations that are malformed, have no answer, or are longer than
    ``max_tokens``.
    """
    named = ((f"conversation {number}", data) for number, data in enumerate(conversations, start=1))
    return [row for group in _groups(named, renderer, max_tokens=max_tokens) for row in group.rows]


def load_conversations(path: Path, renderer: Renderer, *, max_tokens: int | None = None) -> tuple[Group, ...]:
    """Return a group for each line of a JSONL file. Blocks; raises ``DatasetError`` naming file and lines."""
    groups = _groups(read_json_lines(path), renderer, max_tokens=max_tokens)
    if not groups:
        raise DatasetError(f"{path} has no conversations.")
    return groups


def load_rollouts(
    directory: Path, renderer: Renderer, *, min_reward: float | None = None, max_tokens: int | None = None
) -> tuple[Group, ...]:
    """Return a group for each episode that a run has sampled, with the exact ids; evaluations are left out.

    ``min_reward`` keeps the episodes with an answer that returned at least this. Blocks. Raises ``DatasetError`` if the
    run kept no rollouts, its tokenizer is another one, or none of them qualifies.
    """
    run = RunDirectory(path=directory)
    if not run.rollouts.is_dir():
        raise DatasetError(
            f"{directory} has no rollouts in {run.rollouts.name}/; name the directory of a run with "
            "rollout.dump_to_file."
        )
    config = load_config(run.config)
    require_contained(
        load_vocabulary(resolve_tokenizer(config.tokenizer or config.model).path),
        vocabulary_of(renderer),
        what=f"The rollouts in {directory} were sampled with another tokenizer",
    )
    groups: list[Group] = []
    num_episodes = 0
    for path in sorted(run.rollouts.glob("*/*.jsonl"), key=lambda path: (int(path.parent.name), path.name)):
        records = [record | {"where": where} for where, record in read_json_lines(path)]
        for _, episode in groupby(sorted(records, key=_member), key=_member):
            rows = [_row_of(record) for record in episode]
            num_episodes += 1
            if min_reward is None or max(row.reward for row in rows) >= min_reward:
                groups.append(supervised_group(rows, position=len(groups)))
    if not num_episodes:
        raise DatasetError(f"{run.rollouts} has no episodes: the run ended before one was finished.")
    if not groups:
        raise DatasetError(f"None of the {num_episodes} episodes in {run.rollouts} has a reward of {min_reward:g}.")
    _require_short(groups, max_tokens)
    return tuple(groups)


# ---------------------------------------------------------------------------------------------- conversations


@frozen(kw_only=True)
class _Conversation:
    """A parsed conversation. ``untrained`` are the indices of answers that are context only."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[Tool, ...] = ()
    template_kwargs: Mapping[str, Any] = field(factory=dict)
    untrained: frozenset[int] = frozenset()


def _groups(
    named: Iterable[tuple[str, Mapping[str, Any]]], renderer: Renderer, *, max_tokens: int | None
) -> tuple[Group, ...]:
    groups: list[Group] = []
    wrong: list[str] = []
    for where, data in named:
        try:
            rows = _rows(where, _parse(data), renderer)
        except ArealError as error:
            # Also a request that the proxy would refuse, or that the template does.
            wrong.append(f"{where}: {error}")
        else:
            groups.append(supervised_group(rows, position=len(groups)))
    if wrong:
        more = f"\n  and {len(wrong) - _MAX_NAMED} more" if len(wrong) > _MAX_NAMED else ""
        listed = "\n  ".join(wrong[:_MAX_NAMED])
        counted = "A conversation" if len(wrong) == 1 else f"{len(wrong)} conversations"
        raise DatasetError(f"{counted} cannot be trained on:\n  {listed}{more}")
    _require_short(groups, max_tokens)
    return tuple(groups)


def _parse(data: Mapping[str, Any]) -> _Conversation:
    if not isinstance(data, Mapping):
        raise DatasetError(f"it must be an object with messages, not {type(data).__name__}.")
    template_kwargs = data.get("chat_template_kwargs") or {}
    if not isinstance(template_kwargs, Mapping):
        raise DatasetError(f"chat_template_kwargs must be an object, not {template_kwargs!r}.")
    raw, tools = data.get("messages"), data.get("tools")
    contents = [message.get("content") for message in _objects(raw)]
    # Anthropic's form has these fields and blocks; plain texts are alike in both.
    is_anthropic = (
        "system" in data
        or any("input_schema" in tool for tool in _objects(tools))
        or any(block.get("type") in _ANTHROPIC_BLOCKS for content in contents for block in _objects(content))
    )
    if is_anthropic and any("weight" in message for message in _objects(raw)):
        raise DatasetError("weight is of OpenAI's form, and this conversation is in Anthropic's; all of it is trained.")
    messages = parse_anthropic_conversation(data.get("system"), raw) if is_anthropic else parse_messages(raw)
    answers = [index for index, message in enumerate(messages) if message.role == "assistant"]
    if not answers:
        raise DatasetError("it has no answer of the assistant, so there is nothing to train on.")
    for index in answers:
        if index and messages[index - 1].role == "assistant":
            raise DatasetError(f"messages {index - 1} and {index} are two answers in a row; join them.")
    if answers == [0]:
        raise DatasetError("its only answer comes before any question, so there is no prompt for it.")
    return _Conversation(
        messages=messages,
        tools=parse_anthropic_tools(tools) if is_anthropic else parse_tools(tools).tools,
        template_kwargs=template_kwargs,
        untrained=frozenset() if is_anthropic else _untrained(raw),
    )


def _objects(value: Any) -> Iterator[Mapping[str, Any]]:
    return (item for item in value if isinstance(item, Mapping)) if isinstance(value, list) else iter(())


def _untrained(raw: Any) -> frozenset[int]:
    found = set()
    for index, message in enumerate(raw):
        weight = message.get("weight", 1)
        if weight not in (0, 1):
            raise DatasetError(f"messages[{index}].weight must be 0 or 1, not {weight!r}.")
        if weight == 0:
            found.add(index)
        elif message.get("role") == "assistant" and message.get("content") is None and not message.get("tool_calls"):
            # It would be trained as an answer that ends at once.
            raise DatasetError(
                f"messages[{index}] is an answer without content and without tool_calls; leave it out, or give it "
                '"weight": 0.'
            )
    return frozenset(found)


def _rows(where: str, conversation: _Conversation, renderer: Renderer) -> tuple[Trajectory, ...]:
    """Return the rows of a conversation, each answer as a completion of the prompt before it."""
    tree = ConversationTree(SessionId(where))
    for index, answer in enumerate(conversation.messages):
        if answer.role != "assistant" or index == 0:
            continue
        request = CompletionRequest(
            messages=conversation.messages[:index],
            tools=conversation.tools,
            template_kwargs=conversation.template_kwargs,
            store=index not in conversation.untrained,
        )
        plan = plan_prompt(tree, renderer, request)
        ids = renderer.render_answer(
            request.messages, answer, tools=request.tools, template_kwargs=request.template_kwargs
        )
        name = InteractionId(f"{where}, message {index}")
        tree.begin(name, plan)
        nothing = np.zeros(len(ids))
        completion = Completion(
            token_ids=ids, logprobs=nothing, raw_logprobs=nothing, versions=nothing, finish=FinishReason.STOP
        )
        # As an agent would have received the answer, with the ids of calls that later messages refer to.
        call_ids = iter([call.id for call in answer.tool_calls])
        parsed = renderer.parse(
            ids,
            tools=request.tools,
            template_kwargs=request.template_kwargs,
            call_ids=partial(next, call_ids, ""),
        )
        tree.complete(name, completion, parsed)
    exported = export_trajectories(
        tree.snapshot(is_ended=True), discount=1.0, style="concat", unrewarded=Unrewarded.ZERO
    )
    # Nothing sampled these tokens, so the trainer must not compare their log-probabilities with its own.
    rows = tuple(evolve(row, raw_logprobs=None) for row in exported.trajectories if row.num_trained_tokens)
    if not rows:
        raise DatasetError("all of its answers have weight 0, so there is nothing to train on.")
    return rows


def _require_short(groups: Sequence[Group], max_tokens: int | None) -> None:
    longest = [(group.episodes[0].session, max(row.num_tokens for row in group.rows)) for group in groups]
    long = [f"{session} has {length}" for session, length in longest if max_tokens is not None and length > max_tokens]
    if long:
        more = f", and {len(long) - _MAX_NAMED} more" if len(long) > _MAX_NAMED else ""
        raise DatasetError(
            f"{len(long)} of {len(groups)} conversations are longer than the {max_tokens} tokens that can be sampled: "
            f"{', '.join(long[:_MAX_NAMED])}{more}. Shorten or remove them, or raise engine.max_length."
        )


# ------------------------------------------------------------------------------------------------------ files


def _member(record: Mapping[str, Any]) -> int:
    return int(record["sample_idx"])


def _row_of(record: Mapping[str, Any]) -> Trajectory:
    if "token_ids" not in record:
        raise DatasetError(f"{record['where']} has no token_ids: it was written by an older version of this library.")
    ids = record["token_ids"]
    mask = np.zeros(len(ids), np.int32)
    for start, stop in record["trained"]:
        mask[start:stop] = 1
    name = f"{record['where']}"
    return Trajectory(
        session=SessionId(name),
        interactions=(InteractionId(name),),
        input_ids=ids,
        loss_mask=mask,
        logprobs=np.zeros(len(ids)),
        versions=np.where(mask == 1, 0, -1),
        returns=mask * record["reward"],
        turns=np.where(mask == 1, 0, -1),
        reward=record["reward"],
    )


# ---------------------------------------------------------------------------------------------------- tokenizers


def vocabulary_of(renderer: Renderer) -> Vocabulary:
    """Return the vocabulary of a renderer's tokenizer."""
    return {token_id: text for text, token_id in renderer.tokenizer.get_vocab(with_added_tokens=True).items()}


def load_vocabulary(path: Path) -> Vocabulary:
    """Return the vocabulary of the model in a directory. Raises ``ModelError`` if it has no fast tokenizer."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path))
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelError(f"No tokenizer can be loaded from {path}: {error}") from error
    return {token_id: text for text, token_id in tokenizer.get_vocab().items()}


def require_contained(part: Vocabulary, whole: Vocabulary, *, what: str) -> None:
    """Raise ``ConfigError`` unless every id of ``part`` is the same token in ``whole``; ``what`` begins the message."""
    differing = [token_id for token_id, text in sorted(part.items()) if whole.get(token_id) != text]
    if differing:
        named = ", ".join(f"{i} is {part[i]!r} and {whole.get(i)!r}" for i in differing[:_MAX_NAMED])
        raise ConfigError(
            f"{what}: {len(differing)} of {len(part)} token ids differ ({named}). Token ids are compared one by one, "
            "and nothing is aligned by text; use a model with the same tokenizer."
        )
