"""The episode of each agent: what the model says with the agent's own tools, and how often the agent is started.

All coding agents play the same episode as far as they can: write a file, read it, edit it several times, have a tool
fail, read a picture, start a sub-agent, be interrupted while an answer is streamed, continue, compact, and continue.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from attrs import evolve, field, frozen
from tools.agents.play import Call, Fault, Script, Turn

__all__ = ["EPISODES", "Episode", "Invocation"]

TASK = "[[main:0]] Write the words, and correct them."
ONE_TWO_THREE = "one\ntwo\nthree\n"
UPPER = "ONE\nTWO\nTHREE\n"
STORY = "Now I am going to count the lines. " * 4
EDITS = (("one", "ONE"), ("two", "TWO"), ("three", "THREE"))


@frozen(kw_only=True)
class Invocation:
    """One start of the agent. ``arguments`` follow the prompt; ``variables`` are added to its environment."""

    prompt: str
    arguments: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(factory=dict)
    is_interrupted: bool = False
    """Whether it receives SIGINT once an answer is held open."""


@frozen(kw_only=True)
class Episode:
    """The script of an agent, its starts, the files that it leaves, and the figures that its report must have."""

    script: Script
    invocations: tuple[Invocation, ...]
    files: Mapping[str, str] = field(factory=dict)
    expected: Mapping[str, int] = field(factory=dict)


def say(text: str, *, fault: Fault = Fault.NONE) -> Turn:
    """Return an answer without calls."""
    return Turn(text=text, fault=fault)


def call(name: str, *, fault: Fault = Fault.NONE, **arguments: Any) -> Turn:
    """Return an answer with one call."""
    return Turn((Call(name, arguments),), fault=fault)


def claude_code(work: Path) -> Episode:
    """Return the episode of Claude Code."""
    words, picture = str(work / "words.txt"), str(work / "picture.png")
    main = (
        call("Write", file_path=words, content=ONE_TWO_THREE, fault=Fault.BUSY),
        call("Read", file_path=words),
        *(call("Edit", file_path=words, old_string=old, new_string=new) for old, new in EDITS),
        call("Bash", command="ls missing-file", description="List a file"),
        Turn((Call("Bash", {"command": "cat words.txt"}), Call("Read", {"file_path": words}))),
        call("Read", file_path=picture),
        call(
            "Agent",
            description="Count words",
            prompt="[[sub:0]] Count the words.",
            subagent_type="general-purpose",
            run_in_background=False,
        ),
        Turn((Call("Bash", {"command": "wc -l words.txt"}),), text=STORY, fault=Fault.HELD),
        say("All done."),
        call("Bash", command="cat words.txt"),
        say("Finished."),
    )
    sub = (call("Bash", command="wc -w words.txt"), say("Three words."))
    return Episode(
        script=Script(main=main, sub=sub, summary="detailed summary of"),
        invocations=(
            Invocation(prompt=TASK, is_interrupted=True),
            Invocation(prompt="Go on.", arguments=("--continue",)),
            Invocation(prompt="/compact", arguments=("--continue",)),
            Invocation(prompt="Check again.", arguments=("--continue",)),
        ),
        files={"words.txt": UPPER},
        expected={"sub_turns": 2, "summaries": 1, "cancelled": 1},
    )


def codex(work: Path) -> Episode:
    """Return the episode of Codex CLI, whose sub-agents run in the background and whose compaction is automatic."""

    def run(command: str, *, fault: Fault = Fault.NONE) -> Turn:
        return call("exec_command", cmd=command, fault=fault)

    main = (
        run("printf 'one\\ntwo\\nthree\\n' > words.txt", fault=Fault.BUSY),
        run("cat words.txt"),
        *(run(f"sed -i s/{old}/{new}/ words.txt") for old, new in EDITS),
        run("ls missing-file"),
        Turn((Call("exec_command", {"cmd": "cat words.txt"}), Call("exec_command", {"cmd": "wc words.txt"}))),
        call("view_image", path=str(work / "picture.png")),
        call("multi_agent_v1__spawn_agent", message="[[sub:0]] Count the words."),
        call("multi_agent_v1__wait_agent", targets=["match:agent_id[^0-9a-f]+([0-9a-f-]{36})"], timeout_ms=20_000),
        Turn((Call("exec_command", {"cmd": "wc -l words.txt"}),), text=STORY, fault=Fault.HELD),
        say("All done."),
        run("cat words.txt"),
        say("Finished."),
    )
    sub = (run("wc -w words.txt"), say("Three words."))
    compacting = ("--continue", "-c", "model_auto_compact_token_limit=1000")
    return Episode(
        script=Script(main=main, sub=sub, summary="handoff summary"),
        invocations=(
            Invocation(prompt=TASK, is_interrupted=True),
            Invocation(prompt="Go on.", arguments=("--continue",)),
            Invocation(prompt="Check again.", arguments=compacting),
        ),
        files={"words.txt": UPPER},
        # Every answer is beyond the limit, so that both turns of the last invocation come after a compaction.
        expected={"sub_turns": 2, "summaries": 2, "cancelled": 1},
    )


def patched(*lines: str, file: str = "words.txt", is_new: bool = False) -> str:
    """Return a patch in the format of ``apply_patch``."""
    head = f"*** {'Add' if is_new else 'Update'} File: {file}"
    return "\n".join(("*** Begin Patch", head, *lines, "*** End Patch")) + "\n"


def patches(**options: Any) -> tuple[Turn, ...]:
    """Return the calls of ``apply_patch`` that write the words and correct them."""
    texts = [patched("+one", "+two", "+three", is_new=True)]
    texts += [patched("@@", f"-{old}", f"+{new}") for old, new in EDITS]
    return tuple(
        call("apply_patch", input=text, fault=Fault.NONE if number else Fault.BUSY) for number, text in enumerate(texts)
    )


def codex_gpt_5(work: Path) -> Episode:
    """Return the episode of Codex CLI under a name of OpenAI's: edits by a freeform tool, and no sub-agents."""
    episode = codex(work)
    # Without its own edits, and without the sub-agent.
    _, _, *others = episode.script.main
    main = (*patches(), *(turn for turn in others[len(EDITS) :] if not _is_of_sub_agent(turn)))
    model = ("--model", "gpt-5.5")
    return evolve(
        episode,
        script=evolve(episode.script, main=main, sub=()),
        invocations=tuple(evolve(each, arguments=(*each.arguments, *model)) for each in episode.invocations),
        expected=episode.expected | {"sub_turns": 0},
    )


def _is_of_sub_agent(turn: Turn) -> bool:
    return any(each.name.startswith("multi_agent") for each in turn.calls)


def copilot(work: Path) -> Episode:
    """Return the episode of GitHub Copilot CLI."""
    words = str(work / "words.txt")
    edits = (
        call("create", path=words, file_text=ONE_TWO_THREE, fault=Fault.BUSY),
        call("view", path=words),
        *(call("edit", path=words, old_str=old, new_str=new) for old, new in EDITS),
    )
    return _copilot(edits)


def copilot_gpt_5(work: Path) -> Episode:
    """Return its episode under a name of OpenAI's, where it edits files with a freeform tool."""
    episode = _copilot(patches())
    model = {"COPILOT_MODEL": "gpt-5.5"}
    return evolve(episode, invocations=tuple(evolve(each, variables=model) for each in episode.invocations))


def _copilot(edits: tuple[Turn, ...]) -> Episode:
    def run(command: str) -> Call:
        return Call("bash", {"command": command, "description": "Look"})

    main = (
        *edits,
        Turn((run("ls missing-file"),)),
        Turn((run("cat words.txt"), run("wc words.txt"))),
        Turn((run("wc -l words.txt"),), text=STORY, fault=Fault.HELD),
        say("All done."),
        Turn((run("cat words.txt"),)),
        say("Finished."),
    )
    return Episode(
        script=Script(main=main),
        invocations=(
            Invocation(prompt=TASK, is_interrupted=True),
            Invocation(prompt="Go on.", arguments=("--continue",)),
            Invocation(prompt="Check again.", arguments=("--continue",)),
        ),
        files={"words.txt": UPPER},
        expected={"cancelled": 1},
    )


def qwen_code(work: Path) -> Episode:
    """Return the episode of Qwen Code."""
    words = str(work / "words.txt")
    main = (
        call("write_file", file_path=words, content=ONE_TWO_THREE, fault=Fault.BUSY),
        call("read_file", file_path=words),
        *(call("edit", file_path=words, old_string=old, new_string=new) for old, new in EDITS),
        call("run_shell_command", command="ls missing-file", is_background=False),
        Turn((Call("read_file", {"file_path": words}), Call("run_shell_command", {"command": "wc words.txt"}))),
        call("read_file", file_path=str(work / "picture.png")),
        call(
            "agent",
            description="Count words",
            prompt="[[sub:0]] Count the words.",
            subagent_type="general-purpose",
            run_in_background=False,
        ),
        Turn((Call("run_shell_command", {"command": "wc -l words.txt"}),), text=STORY, fault=Fault.HELD),
        say("All done."),
        call("run_shell_command", command="cat words.txt"),
        say("Finished."),
    )
    sub = (call("run_shell_command", command="wc -w words.txt"), say("Three words."))
    return Episode(
        script=Script(main=main, sub=sub, summary="state_snapshot", side="managed memory index"),
        invocations=(
            Invocation(prompt=TASK, is_interrupted=True),
            Invocation(prompt="Go on.", arguments=("--continue",)),
            Invocation(prompt="/compress", arguments=("--continue",)),
            Invocation(prompt="Check again.", arguments=("--continue",)),
        ),
        files={"words.txt": UPPER},
        expected={"sub_turns": 2, "summaries": 2, "cancelled": 1},
    )


def qwen_code_acp(work: Path) -> Episode:
    """Return the episode of Qwen Code behind the Agent Client Protocol: the same, without a compression."""
    episode = qwen_code(work)
    invocations = tuple(one for one in episode.invocations if one.prompt != "/compress")
    return evolve(episode, invocations=invocations, expected={"sub_turns": 2, "cancelled": 1})


def opencode(work: Path) -> Episode:
    """Return the episode of opencode."""
    words = str(work / "words.txt")
    main = (
        call("write", filePath=words, content=ONE_TWO_THREE, fault=Fault.BUSY),
        call("read", filePath=words),
        *(call("edit", filePath=words, oldString=old, newString=new) for old, new in EDITS),
        call("bash", command="ls missing-file", description="List a file"),
        Turn((Call("read", {"filePath": words}), Call("bash", {"command": "wc words.txt", "description": "Count"}))),
        call("read", filePath=str(work / "picture.png")),
        call("task", description="Count words", prompt="[[sub:0]] Count the words.", subagent_type="general"),
        Turn((Call("bash", {"command": "wc -l words.txt", "description": "Count"}),), text=STORY, fault=Fault.HELD),
        say("All done."),
        call("bash", command="cat words.txt", description="Show"),
        say("Finished."),
    )
    sub = (call("bash", command="wc -w words.txt", description="Count"), say("Three words."))
    return Episode(
        script=Script(main=main, sub=sub, summary="summary"),
        invocations=(
            Invocation(prompt=TASK, is_interrupted=True),
            Invocation(prompt="Go on.", arguments=("--continue",)),
            Invocation(prompt="Check again.", arguments=("--continue",)),
        ),
        files={"words.txt": UPPER},
        expected={"sub_turns": 2, "cancelled": 1},
    )


def pi(work: Path) -> Episode:
    """Return the episode of pi, which has no sub-agents."""
    main = (
        call("write", path="words.txt", content=ONE_TWO_THREE, fault=Fault.BUSY),
        call("read", path="words.txt"),
        *(call("edit", path="words.txt", edits=[{"oldText": old, "newText": new}]) for old, new in EDITS),
        call("bash", command="ls missing-file"),
        Turn((Call("read", {"path": "words.txt"}), Call("bash", {"command": "wc words.txt"}))),
        call("read", path=str(work / "picture.png")),
        Turn((Call("bash", {"command": "wc -l words.txt"}),), text=STORY, fault=Fault.HELD),
        say("All done."),
        call("bash", command="cat words.txt"),
        say("Finished."),
    )
    return Episode(
        script=Script(main=main),
        invocations=(
            Invocation(prompt=TASK, is_interrupted=True),
            Invocation(prompt="Go on.", arguments=("--continue",)),
            Invocation(prompt="Check again.", arguments=("--continue",)),
        ),
        files={"words.txt": UPPER},
        expected={"cancelled": 1},
    )


def cline(work: Path) -> Episode:
    """Return the episode of Cline, which continues only in a terminal: it ends with the interruption."""
    words = str(work / "words.txt")

    def run(command: str) -> Turn:
        return call("run_commands", commands=[command])

    main = (
        call("editor", path=words, new_text=ONE_TWO_THREE, fault=Fault.BUSY),
        call("read_files", files=[{"path": words}]),
        *(call("editor", path=words, old_text=old, new_text=new) for old, new in EDITS),
        run("ls missing-file"),
        Turn((Call("read_files", {"files": [{"path": words}]}), Call("run_commands", {"commands": ["wc words.txt"]}))),
        call("spawn_agent", systemPrompt="You count.", task="[[sub:0]] Count the words."),
        Turn((Call("run_commands", {"commands": ["wc -l words.txt"]}),), text=STORY, fault=Fault.HELD),
    )
    sub = (run("wc -w words.txt"), say("Three words."))
    return Episode(
        script=Script(main=main, sub=sub),
        invocations=(Invocation(prompt=TASK, is_interrupted=True),),
        files={"words.txt": UPPER},
        expected={"turns": 8, "sub_turns": 2, "cancelled": 1},
    )


def aider(_: Path) -> Episode:
    """Return the episode of aider, which has no tools: its answers are edits in text."""

    def edit(old: str, new: str, *, fault: Fault = Fault.NONE) -> Turn:
        block = f"words.txt\n```\n<<<<<<< SEARCH\n{old}=======\n{new}>>>>>>> REPLACE\n```"
        return Turn(text=f"Edit.\n\n{block}", fault=fault)

    main = (
        edit("", ONE_TWO_THREE, fault=Fault.BUSY),
        edit("one\n", "ONE\n"),  # after which its tests fail
        edit("four\n", "FOUR\n"),  # which it does not find
        edit("two\n", "TWO\n"),
        edit("three\n", "THREE\n"),
    )
    # Its tests pass until the first edit, because what it tells the model about a failure is part of the answer once
    # it is restarted. The command is in its system prompt.
    test = ("--auto-test", "--test-cmd", "! grep ONE words.txt || grep THREE words.txt", "words.txt")
    return Episode(
        script=Script(main=main, has_tools=False),
        invocations=(
            Invocation(prompt=TASK, arguments=test),
            Invocation(prompt="Go on.", arguments=("--continue", *test)),
        ),
        files={"words.txt": UPPER},
        expected={"turns": 5},
    )


def terminus(_: Path) -> Episode:
    """Return the episode of Terminus, which has no tools: its answers are keystrokes as JSON."""

    def type_in(*lines: str, fault: Fault = Fault.NONE, is_done: bool = False) -> Turn:
        commands = [{"keystrokes": f"{line}\n", "duration": 0.1} for line in lines]
        return Turn(
            text=json.dumps({"analysis": "So far.", "plan": "Next.", "commands": commands, "task_complete": is_done}),
            fault=fault,
        )

    main = (
        type_in("printf 'one\\ntwo\\nthree\\n' > words.txt", fault=Fault.BUSY),
        type_in("cat words.txt"),
        *(type_in(f"sed -i s/{old}/{new}/ words.txt") for old, new in EDITS),
        type_in("ls missing-file"),
        type_in("cat words.txt", "wc words.txt"),
        type_in(is_done=True),
        type_in(is_done=True),  # it asks whether it is sure
    )
    return Episode(
        script=Script(main=main, has_tools=False),
        invocations=(Invocation(prompt=TASK),),
        files={"words.txt": UPPER},
        expected={"turns": len(main)},
    )


def openhands(work: Path) -> Episode:
    """Return the episode of OpenHands."""
    words = str(work / "words.txt")

    def edit(command: str, *, fault: Fault = Fault.NONE, **arguments: str) -> Turn:
        return call("file_editor", command=command, path=words, fault=fault, **arguments)

    main = (
        edit("create", file_text=ONE_TWO_THREE, fault=Fault.BUSY),
        edit("view"),
        *(edit("str_replace", old_str=old, new_str=new) for old, new in EDITS),
        call("terminal", command="ls missing-file"),
        Turn((Call("file_editor", {"command": "view", "path": words}), Call("terminal", {"command": "wc words.txt"}))),
        call("file_editor", command="view", path=str(work / "picture.png")),
        call("task", description="Count words", prompt="[[sub:0]] Count the words.", subagent_type="general-purpose"),
        Turn((Call("terminal", {"command": "wc -l words.txt"}),), text=STORY, fault=Fault.HELD),
        say("All done."),
        call("terminal", command="cat words.txt"),
        say("Finished."),
    )
    sub = (call("terminal", command="wc -w words.txt"), say("Three words."))
    return Episode(
        script=Script(main=main, sub=sub, summary="summarize the events"),
        invocations=(
            Invocation(prompt=TASK, is_interrupted=True),
            Invocation(prompt="Go on.", arguments=("--continue",)),
            Invocation(prompt="Check again.", arguments=("--continue", "--condense")),
        ),
        files={"words.txt": UPPER},
        expected={"sub_turns": 2, "summaries": 1, "cancelled": 1},
    )


def mini_swe_agent(_: Path) -> Episode:
    """Return the episode of mini-swe-agent, which has one tool, streams nothing and cannot continue."""

    def run(command: str, *, fault: Fault = Fault.NONE) -> Turn:
        return call("bash", command=command, fault=fault)

    main = (
        run("printf 'one\\ntwo\\nthree\\n' > words.txt", fault=Fault.BUSY),
        run("cat words.txt"),
        *(run(f"sed -i s/{old}/{new}/ words.txt") for old, new in EDITS),
        run("ls missing-file"),
        Turn((Call("bash", {"command": "cat words.txt"}), Call("bash", {"command": "wc words.txt"}))),
        run("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
    )
    return Episode(
        script=Script(main=main),
        invocations=(Invocation(prompt=TASK),),
        files={"words.txt": UPPER},
        expected={"turns": 8},
    )


def javascript(_: Path) -> Episode:
    """Return the episode of an agent that has the tools of ``examples/agents/tools.mjs``."""
    main = (
        call("write_file", path="words.txt", content=ONE_TWO_THREE, fault=Fault.BUSY),
        call("read_file", path="words.txt"),
        *(call("edit_file", path="words.txt", old_text=old, new_text=new) for old, new in EDITS),
        call("shell", command="ls missing-file"),
        Turn((Call("read_file", {"path": "words.txt"}), Call("shell", {"command": "wc words.txt"}))),
        call("delegate", task="[[sub:0]] Count the words."),
        Turn((Call("shell", {"command": "wc -l words.txt"}),), text=STORY, fault=Fault.HELD),
        say("All done."),
    )
    sub = (call("shell", command="wc -w words.txt"), say("Three words."))
    return Episode(
        script=Script(main=main, sub=sub),
        invocations=(Invocation(prompt=TASK, is_interrupted=True),),
        files={"words.txt": UPPER},
        expected={"turns": 10, "sub_turns": 2, "cancelled": 1},
    )


EPISODES: Mapping[str, Callable[[Path], Episode]] = {
    "claude-code": claude_code,
    "codex": codex,
    "codex-gpt-5": codex_gpt_5,
    "copilot": copilot,
    "copilot-gpt-5": copilot_gpt_5,
    "opencode": opencode,
    "qwen-code": qwen_code,
    "qwen-code-acp": qwen_code_acp,
    "pi": pi,
    "cline": cline,
    "aider": aider,
    "openhands": openhands,
    "terminus": terminus,
    "mini-swe-agent": mini_swe_agent,
    "openai-js-chat": javascript,
    "openai-js-responses": javascript,
    "anthropic-js": javascript,
    "ai-sdk-openai": javascript,
    "ai-sdk-compatible": javascript,
    "ai-sdk-anthropic": javascript,
    "langchain-js": javascript,
    "openai-agents-js": javascript,
}
