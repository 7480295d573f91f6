"""The small profile of the client runs: the SDKs that are installed here; and the page is what the results give.

``nox -s clients`` runs all clients, each in an environment of its own.
"""

from __future__ import annotations

import importlib.util
import sys

import anyio
import pytest
from tools.clients.judge import judge, judge_links
from tools.clients.model import label_of, speak
from tools.clients.running import Environment, load_environments, run_client
from tools.clients.staging import ScriptedEngine, open_stage

from areal_actors.domain import ForkReason, Interaction, InteractionId, InteractionStatus, SessionId, SessionRecord

ENVIRONMENTS = load_environments()
HERE_INSTALLED = [
    (name, protocol)
    for name, module in (("openai-3", "openai"), ("anthropic-2", "anthropic"))
    if importlib.util.find_spec(module) is not None
    for protocol in ENVIRONMENTS[name].protocols
]
QUICK = ("three_turns", "streaming_tools", "twenty_at_once", "structured", "cancelled", "wrong_key", "overflow")


@pytest.mark.parametrize(("name", "protocol"), HERE_INSTALLED)
def test_the_installed_sdks_work(name, protocol):
    """A client in a process of its own, over a socket: its word and the session's record agree that all is well."""

    async def run():
        async with open_stage(ScriptedEngine) as stage:
            return await run_client(stage, environment, sys.executable, scenarios=QUICK)

    described = ENVIRONMENTS[name]
    environment = Environment(
        name=name, title=name, packages=(), driver=described.driver, protocols=(protocol,), note=""
    )
    verdicts = anyio.run(run)[protocol]

    assert dict.fromkeys(QUICK, "works") == {s: v.outcome for s, v in verdicts.items()}, verdicts
    assert all(v.links.linked == v.links.follow_ups and not v.links.wrong for v in verdicts.values())
    assert verdicts["twenty_at_once"].links.follow_ups == 20


# ------------------------------------------------------------------------------------------------------- the judge


def interaction(name: str, order: int, **fields) -> Interaction:
    """A completed turn."""
    fields = {"status": InteractionStatus.COMPLETED, "completed_order": order} | fields
    return Interaction(id=InteractionId(name), order=order, prompt_suffix=[1], num_prompt_tokens=1, **fields)


def test_the_judge_does_not_take_links_on_trust():
    """A turn below another conversation is wrong, one without a parent is missed; labels in the prompts tell."""
    turns = (
        interaction("a1", 0),
        interaction("b1", 1),
        interaction("a2", 2, parent="b1"),
        interaction("b2", 3, fork=ForkReason.ROOT),
        interaction("b3", 4, parent="b2"),
    )
    links = judge_links(turns, {turn.id: f"[{turn.id[0]}] hi" for turn in turns})

    assert (links.follow_ups, links.linked, links.wrong) == (3, 1, 1)
    assert [miss.turn for miss in links.misses] == [2, 2]


def test_the_judge_sees_what_a_client_does_not():
    """A lost interaction, and one that was not cancelled, are faults although the client is content."""
    record = SessionRecord(id=SessionId("s"), interactions=(interaction("a", 0),))

    assert judge("tool", {"outcome": "ok"}, record, {"a": "", "b": ""}).outcome == "fails"
    assert judge("cancelled", {"outcome": "ok"}, record, {"a": ""}).outcome == "fails"
    assert judge("wrong_key", {"outcome": "ok"}, record, {}).outcome == "fails"
    assert judge("tool", {"outcome": "ok"}, record, {"a": ""}).outcome == "works"


def test_the_model_answers_by_its_prompt_alone():
    """What it says carries the label of the question, in calls as well."""
    tools = '<|im_start|>system\n<tools>\n{"name": "weather"}\n</tools><|im_end|>\n'
    question = "<|im_start|>user\n[a7] weather?<|im_end|>\n"
    result = "<|im_start|>user\n<tool_response>\n[a7]: 21\n</tool_response><|im_end|>\n"
    header = "<|im_start|>assistant\n"

    assert label_of(speak(tools + question + header)) == "a7"
    assert "<tool_call>" in speak(tools + question + header)
    assert "<tool_call>" not in speak(question + header)
    assert speak(tools + question + result + header) == "It says: [a7]: 21."
