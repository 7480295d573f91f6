"""The agents that are installed play their episodes; and the page is what the results give.

``nox -s agents`` installs and runs all of them.
"""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest
from tools.agents.judge import judge
from tools.agents.play import Call, Cue, Kind, Script, Turn, read_cue
from tools.agents.running import load_programs, run_agent

from areal_actors.cache import export_trajectories
from areal_actors.domain import (
    ChatMessage,
    Completion,
    Episode,
    FinishReason,
    Interaction,
    InteractionId,
    InteractionStatus,
    SessionId,
    SessionRecord,
)
from areal_actors_testing.exactness import Recorded

PROGRAMS = load_programs()
ENVIRONMENTS = Path(__file__).parents[2] / ".nox" / ".cache" / "agents"


@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_the_installed_agents_work(name):
    """A real agent, from its recipe: its files, its links, its returns and its tokens are as they should be."""
    program = PROGRAMS[name]
    executables = program.find(ENVIRONMENTS)
    if executables is None:
        pytest.skip(f"needs {program.title}: nox -s agents -- {name}")

    verdict = anyio.run(run_agent, program, executables)

    assert not verdict.faults


# ------------------------------------------------------------------------------------------- the script and the judge

SCRIPT = Script(main=(Turn((Call("shell", {}),)), Turn(text="done")), sub=(Turn(),), summary="summarise")
TOOLS = '<|im_start|>system\n<tools>\n{"name": "shell"}\n</tools><|im_end|>\n'


def prompt(*turns: tuple[str, str], tools: str = TOOLS) -> str:
    """A rendered prompt."""
    return (
        tools + "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns) + "<|im_start|>assistant\n"
    )


def test_a_prompt_tells_which_turn_it_asks_for():
    """The labels of the prompt count, and those of sub-agents only within a sub-agent."""
    task, first = ("user", "[[main:0]] go"), ("assistant", "[[main:1]] Next. [[sub:0]]")

    assert read_cue(prompt(task), SCRIPT).label == "[[main:1]]"
    assert read_cue(prompt(task, first), SCRIPT) == Cue(kind=Kind.TURN, number=2, echoes=("[[main:1]]",))
    assert read_cue(prompt(("user", "[[sub:0]] count")), SCRIPT).thread == "sub"
    assert read_cue(prompt(task, first, ("user", "summarise this")), SCRIPT).label == "[[summary:1]]"
    assert read_cue(prompt(task, tools=""), SCRIPT).kind is Kind.SIDE
    compacted = read_cue(prompt(("user", "[[summary:7]] so far")), SCRIPT)
    assert (compacted.label, compacted.summary, compacted.echoes) == ("[[main:8]]", "[[summary:7]]", ())


def turn(name: str, order: int, **fields) -> Interaction:
    """A completed turn of one token."""
    completion = Completion(
        token_ids=[order], logprobs=[-0.5], raw_logprobs=[-0.5], versions=[0], finish=FinishReason.STOP
    )
    defaults = {
        "status": InteractionStatus.COMPLETED,
        "completed_order": order,
        "completion": completion,
        "output": ChatMessage(role="assistant", content=name),
    }
    return Interaction(id=InteractionId(name), order=order, prompt_suffix=[9], num_prompt_tokens=1, **defaults | fields)


def report_of(*turns: Interaction, **cues: Cue):
    """The report of a session with these turns, which the engine has sampled as they are stored."""
    record = SessionRecord(id=SessionId("s"), interactions=turns)
    rows = export_trajectories(record, discount=1.0, style="individual")
    log = {
        one.id: Recorded(prompt=[9], token_ids=one.completion.token_ids, logprobs=[-0.5], versions=[0]) for one in turns
    }
    exported = Episode(session=record.id, member=0, trajectories=rows.trajectories, untrained=rows.untrained)
    return judge(record, exported, cues, log)


def test_the_judge_does_not_take_links_on_trust():
    """A follow-up without its parent is missed, one below another answer is wrong, and returns are the smallest."""
    cues = {
        "a": Cue(kind=Kind.TURN, number=1),
        "b": Cue(kind=Kind.TURN, number=2, echoes=("[[main:1]]",)),
        "c": Cue(kind=Kind.TURN, number=3, echoes=("[[main:1]]", "[[main:2]]")),
    }
    report = report_of(turn("a", 0), turn("b", 1), turn("c", 2, parent="a", num_kept=0, reward=1.0), **cues)

    assert (report.turns, report.follow_ups, report.linked, report.wrong) == (3, 2, 0, 1)
    assert report.misses == ("[[main:2]] after [[main:1]]: no reason", "[[main:3]] after [[main:2]]: no reason")
    assert report.returns == {"main": 0.0}


def test_a_compaction_begins_another_conversation():
    """Its summary ends the one before, even if the agent keeps the last answer beside the summary and continues it."""
    cues = {
        "a": Cue(kind=Kind.TURN, number=1),
        "s": Cue(kind=Kind.SUMMARY, number=1, echoes=("[[main:1]]",)),
        "b": Cue(kind=Kind.TURN, number=2, echoes=("[[main:1]]",), summary="[[summary:1]]"),
    }
    for parent in (None, "a"):
        report = report_of(turn("a", 0), turn("s", 1, parent="a"), turn("b", 2, parent=parent), **cues)

        assert (report.follow_ups, report.linked, report.summaries, report.wrong) == (1, 1, 1, 0)
        assert not report.faults
