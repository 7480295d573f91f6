"""Conversations as rows: the ids that the proxy would have recorded, and mistakes that are named with their lines."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import AsyncOpenAI

from areal_actors import conversations_to_rows
from areal_actors.config import create_config, save_config
from areal_actors.dashboard import RunDirectory
from areal_actors.errors import ConfigError, DatasetError
from areal_actors.models.built_in import create_tiny_tokenizer
from areal_actors.run.conversations import SupervisedData, load_conversations, load_rollouts
from areal_actors.run.inference import InferenceConfig, open_actors
from areal_actors.testing.engines import EchoEngine, script_answers
from areal_actors_testing.families import FAMILIES

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 1 + 1?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "abcdefghi", "content": "2"},
    {"role": "assistant", "content": "It is 2."},
    {"role": "user", "content": "And 2 + 2?"},
    {"role": "assistant", "content": "4."},
]
PLAIN = [turn for turn in TURNS if turn["role"] != "tool" and not turn.get("tool_calls")]


def renderer_of(name="qwen2.5"):
    """The renderer of a family."""
    return FAMILIES[name].create_renderer()


def trained_texts(row, renderer):
    """The text of each run of trained tokens."""
    edges = np.flatnonzero(np.diff(row.loss_mask, prepend=0, append=0)).reshape(-1, 2)
    return [renderer.decode(row.input_ids[start:stop]) for start, stop in edges]


def test_conversation_trains_answers_only():
    """One row, whose text is the template's of the whole conversation; each answer ends with its end of turn."""
    renderer = renderer_of()

    (row,) = conversations_to_rows([{"messages": TURNS, "tools": TOOLS}], renderer)

    text = renderer.decode(row.input_ids)
    assert trained_texts(row, renderer) == [
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>',
        "It is 2.<|im_end|>",
        "4.<|im_end|>",
    ]
    assert text.count("<|im_start|>assistant\n") == 3
    assert '"name": "add"' in text.partition("<|im_end|>")[0]


@pytest.mark.anyio
@pytest.mark.parametrize("name", ["qwen2.5", "qwen3", "llama-3.1", "mistral-v7", "gemma-3", "gpt-oss"])
async def test_conversation_rows_equal_those_of_proxy(name):
    """An agent that holds this conversation with a model that gives these answers: same ids, same mask."""
    renderer, has_tools = renderer_of(name), name != "gemma-3"
    messages = TURNS if has_tools else [turn for turn in PLAIN if turn["role"] != "system"]
    data = {"messages": messages, "tools": TOOLS if has_tools else None}
    rows = conversations_to_rows([data], renderer)
    where = [index for index, turn in enumerate(messages) if turn["role"] == "assistant"]
    answers = [
        row.input_ids[start:stop].tolist()
        for row in rows
        for start, stop in np.flatnonzero(np.diff(row.loss_mask, prepend=0, append=0)).reshape(-1, 2)
    ]
    engine = EchoEngine(script_answers(*answers), context_length=4096)

    async with (
        open_actors(InferenceConfig(), engine=engine, renderer=renderer) as inference,
        inference.session() as session,
        AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client,
    ):
        for index in where:
            more = {"tools": TOOLS} if has_tools else {}
            completion = await client.chat.completions.create(model="any", messages=messages[:index], **more)
            assert (completion.choices[0].message.content or None) == messages[index]["content"]
        recorded = (await session.export(style="concat")).trajectories

    assert [row.input_ids.tolist() for row in rows] == [row.input_ids.tolist() for row in recorded]
    assert [row.loss_mask.tolist() for row in rows] == [row.loss_mask.tolist() for row in recorded]


def test_conversation_forms_give_equal_rows():
    """Anthropic's blocks of the same conversation."""
    anthropic = {
        "system": "Be brief.",
        "tools": [{"name": "add", "input_schema": {"type": "object", "properties": {}}}],
        "messages": [
            {"role": "user", "content": "What is 1 + 1?"},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "abcdefghi", "name": "add", "input": {"a": 1}}],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "abcdefghi", "content": "2"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "It is 2."}]},
            {"role": "user", "content": [{"type": "text", "text": "And 2 + 2?"}]},
            {"role": "assistant", "content": "4."},
        ],
    }

    first, second = conversations_to_rows([{"messages": TURNS, "tools": TOOLS}, anthropic], renderer_of())

    assert first.input_ids.tolist() == second.input_ids.tolist()
    assert first.loss_mask.tolist() == second.loss_mask.tolist()


def test_answer_with_weight_zero_is_context():
    """As in OpenAI's files: the other answers are trained."""
    renderer = renderer_of()
    messages = [turn | {"weight": 0} if turn["content"] == "It is 2." else turn for turn in PLAIN]

    (row,) = conversations_to_rows([{"messages": messages}], renderer)

    assert trained_texts(row, renderer) == ["4.<|im_end|>"]


GOOD = {"messages": PLAIN}
MISTAKES = {
    "a line that is not JSON": ('{"messages": [', r"data.jsonl, line 2 is not JSON"),
    "a line that is not an object": ("[1]", r"data.jsonl, line 2 is a JSON list; each line is one object"),
    "no messages": ({"mesages": PLAIN}, r"line 2: messages must be a list of at least one message"),
    "an unknown role": ({"messages": [{"role": "bot", "content": "a"}]}, r"line 2: messages\[0\].role must be system"),
    "no answer": ({"messages": PLAIN[:2]}, r"line 2: it has no answer of the assistant"),
    "an answer without a question": ({"messages": [{"role": "assistant", "content": "a"}]}, r"line 2: its only answer"),
    "two answers": ({"messages": [*PLAIN, PLAIN[-1]]}, r"line 2: messages 4 and 5 are two answers in a row"),
    "an answer of nothing": (
        {"messages": [*PLAIN[:-1], {"role": "assistant", "content": None, "refusal": "no"}]},
        r"line 2: messages\[4\] is an answer without content and without tool_calls",
    ),
    "a weight": ({"messages": [*PLAIN[:-1], PLAIN[-1] | {"weight": 2}]}, r"messages\[4\].weight must be 0 or 1, not 2"),
    "only context": ({"messages": [*PLAIN[:2], PLAIN[2] | {"weight": 0}]}, r"line 2: all of its answers have weight 0"),
    "template options": (
        {"messages": PLAIN, "chat_template_kwargs": "thinking"},
        r"line 2: chat_template_kwargs must be an object, not 'thinking'",
    ),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, *PLAIN[2:]]},
        r"line 2: messages\[0\].content\[0\] is of type 'image_url'; this model reads text only",
    ),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_conversation_errors_name_lines(tmp_path, what):
    """Nothing is skipped silently."""
    line, message = MISTAKES[what]
    path = tmp_path / "data.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n{line if isinstance(line, str) else json.dumps(line)}\n")

    with pytest.raises(DatasetError, match=message):
        load_conversations(path, renderer_of())


def test_conversation_errors_name_missing_and_empty_files(tmp_path):
    """With their paths."""
    (tmp_path / "empty.jsonl").write_text("\n")

    with pytest.raises(DatasetError, match=r"none.jsonl cannot be read: No such file"):
        load_conversations(tmp_path / "none.jsonl", renderer_of())
    with pytest.raises(DatasetError, match=r"empty.jsonl has no conversations"):
        load_conversations(tmp_path / "empty.jsonl", renderer_of())


# ---------------------------------------------------------------------------------------------------- batches


@given(num=st.integers(1, 7), size=st.integers(1, 7), seed=st.integers(0, 3))
def test_supervised_epoch_has_every_conversation_once(num, size, seed):
    """In another order each time; a batch follows from its step alone."""
    groups = tuple(range(num))
    data = SupervisedData(groups=groups, batch_size=size, seed=seed)

    seen = [group for step in range(1, 3 * num + 1) for group in data.batch(step)]

    for start in range(0, len(seen) - num + 1, num):
        assert sorted(seen[start : start + num]) == list(groups)


# --------------------------------------------------------------------------------------------------- rollouts


def keep_run(path, *, records, model="tiny"):
    """A run directory with these rollouts."""
    directory = RunDirectory(path=path)
    (directory.rollouts / "3").mkdir(parents=True)
    save_config(create_config({"experiment_name": "e", "total_steps": 1, "model": model}), directory.config)
    lines = [json.dumps({"task_id": 7, "sample_idx": n, **record}) + "\n" for n, record in enumerate(records)]
    (directory.rollouts / "3" / "7.jsonl").write_text("".join(lines))
    return path


@pytest.fixture(scope="module")
def tiny():
    """The renderer of the tiny model."""
    from areal_actors.models import resolve_model
    from areal_actors.rendering import load_renderer

    return load_renderer(resolve_model("tiny").path)


def test_rollouts_keep_ids_and_are_chosen_by_reward(tmp_path, tiny):
    """The exact ids that were sampled, trained where they were."""
    records = [
        {"reward": 0.0, "token_ids": [1, 5, 6], "trained": [[1, 3]]},
        {"reward": 1.0, "token_ids": [1, 7, 8, 9, 2], "trained": [[2, 3], [4, 5]]},
    ]
    path = keep_run(tmp_path / "run", records=records)

    (good,) = load_rollouts(path, tiny, min_reward=1.0)
    both = load_rollouts(path, tiny)

    assert good.rows[0].input_ids.tolist() == [1, 7, 8, 9, 2]
    assert good.rows[0].loss_mask.tolist() == [0, 0, 1, 0, 1]
    assert len(both) == 2
    with pytest.raises(DatasetError, match=r"None of the 2 episodes in .* has a reward of 2"):
        load_rollouts(path, tiny, min_reward=2.0)


def test_rollouts_of_another_tokenizer_are_refused(tmp_path, tiny):
    """By the ids that differ; a directory without rollouts says how to get them."""
    other = create_tiny_tokenizer()
    other.add_tokens(["another"])
    other.save_pretrained(tmp_path / "model")
    records = [{"reward": 0.0, "token_ids": [1, 5], "trained": [[1, 2]]}]
    path = keep_run(tmp_path / "run", records=records, model=str(tmp_path / "model"))

    with pytest.raises(
        ConfigError, match=r"sampled with another tokenizer: 1 of 385 token ids differ \(384 is 'another'"
    ):
        load_rollouts(path, tiny)
    with pytest.raises(DatasetError, match=r"has no rollouts in rollout/; .*rollout.dump_to_file"):
        load_rollouts(tmp_path, tiny)
