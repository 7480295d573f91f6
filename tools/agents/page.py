"""The results of the agents' runs: a file that the runs write, and the page of the documentation made from it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from tools.agents.running import Program
from tools.agents.training import TITLES, load_training
from tools.clients.running import PROTOCOLS

__all__ = ["PAGE", "RESULTS", "format_page", "load_results", "save_results"]

RESULTS = Path(__file__).with_name("results.json")
PAGE = Path(__file__).parents[2] / "docs" / "results" / "installed_agents.md"

_NONE = "·"
_HEAD = """\
# Coding agents and JavaScript SDKs

Programs that people install run against the proxy without a change. `examples/agents` has a recipe for each: the
pinned version, the command, and where the base URL and the key go. A recipe is also a
[command](../guides/agents.md#run-a-command) of a run:

```yaml
rollout:
  workflow: {command: [bash, examples/agents/claude_code.sh, "Make the tests pass."]}
  openai: {sandbox: bubblewrap}
```

`nox -s agents` installs all of them, runs each once, and writes this page; `nox -s agents -- codex` runs one. Each
run has an empty home, no telemetry, and no way to other machines. The proxy, its sessions and rows are real; a script
in the place of the model calls the agent's tools: it writes a file, reads it, edits it three times, has a tool fail,
calls two tools at once and starts a sub-agent where there is one; coding agents also read a picture. The first
request is refused once with 429, and one answer is interrupted by SIGINT while it is streamed. Agents that can
continue and compact do both. Then the last answer is rewarded with 1.

An agent works if its files are right, every trained token has the return 1 (also those of sub-agents, of side calls
and before a compaction), every follow-up has its true parent, every sampled token is in the exported rows exactly
once, with the engine's own ids and log-probabilities, and interrupted answers are not trained.

"""
_TRAINING = """\

## Train an agent on a CPU

Two of them are trained by the public commands, as they are installed, with the random model `tiny`.
`examples/agents/mini_swe_agent.yaml` runs mini-swe-agent in child processes, and each command of the model in
bubblewrap. The model is shown 128 solved problems (`phases: [sft, rl]`), and then rewarded with the share of digits in
what its command prints. `examples/agents/openai_agents_digits.yaml` starts an agent of `@openai/agents` for each
episode. It asks for a tool call (`tool_choice: required`), which a grammar enforces, so that nothing has to be shown:
the reward is the share of digits in the argument. `nox -s train-agents` repeats the runs; these are the mean rewards of
steps of RL. A step of `@openai/agents` has 16 episodes, so that single steps vary.

"""
_COLUMNS = (
    *(
        "Agent",
        "Installed",
        "Protocol",
        "Turns",
        "Sub-agent",
        "Compaction",
        "Linked",
        "Forks",
        "Seconds",
        "Last run",
        "",
    ),
)
_LEGEND = """\

*Turns* are completed answers of the main thread, *Linked* counts follow-ups in all threads whose parent is the
answer that they continue. *Forks* do not extend the tokens of their parent: rewards reach it, and its tokens are
encoded again ([fork reasons](../concepts/tokens.md#why-an-answer-forks)). Seconds are those of all starts of the
agent, on two cores.
*Last run* is the day of the run that the row shows, and the version of `areal_actors`; a row without it shows a run
from before days were recorded: the agent worked, and whether it still does (`?`) the next run will show.

"""


def load_results(path: Path = RESULTS) -> dict[str, Any]:
    """Return the results so far, by agent."""
    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return results


def save_results(results: Mapping[str, Any], programs: Iterable[Program]) -> None:
    """Write the results, in the order of the programs, and the page."""
    ordered = {one.name: results[one.name] for one in programs if one.name in results}
    RESULTS.write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    PAGE.write_text(format_page(ordered), encoding="utf-8")


def format_page(results: Mapping[str, Any]) -> str:
    """Return the page."""
    table = _format_table(_COLUMNS, [_row(one) for one in results.values()])
    sections = (
        _format_settings(results),
        _format_failures(results),
        _format_notes(results),
        _format_training(),
    )
    return _HEAD + table + _LEGEND + "".join(sections)


def _row(one: Mapping[str, Any]) -> list[str]:
    report = one["report"] or {}
    forks = [f"{number} `{reason}`" for reason, number in report.get("forks", {}).items()]
    return [
        one["title"],
        "<br>".join(f"`{package}`" for package in one["packages"]),
        PROTOCOLS[one["protocol"]],
        str(report.get("turns", _NONE)),
        str(report.get("sub_turns") or _NONE),
        str(report.get("summaries") or _NONE),
        f"{report['linked']} of {report['follow_ups']}" if report else _NONE,
        "<br>".join(forks) or "none",
        f"{one['seconds']:g}",
        f"{one['date']}, {one['version']}" if "date" in one else "not repeated",
        "✗" if one["faults"] else "✓" if "date" in one else "?",
    ]


def _format_settings(results: Mapping[str, Any]) -> str:
    rows = [[one["title"], f"`{one['recipe']}`", one["credentials"]] for one in results.values()]
    return f"## Base URL and key\n\n{_format_table(('Agent', 'Recipe', 'Base URL and key'), rows)}\n"


def _format_failures(results: Mapping[str, Any]) -> str:
    failures = [
        f"* {one['title']}: `{' '.join(fault.replace('`', ' ').split())[:300]}`\n"
        for one in results.values()
        for fault in one["faults"]
    ]
    return f"## What fails\n\n{''.join(failures)}\n" if failures else ""


def _format_notes(results: Mapping[str, Any]) -> str:
    notes = [f"* {one['title']}: {one['note']}\n" for one in results.values() if one["note"]]
    return f"## Notes\n\n{''.join(notes)}" if notes else ""


def _format_training() -> str:
    rows = []
    for name, runs in load_training().items():
        for seed, run in sorted(runs.items()):
            first, *_, last = run["rewards"]
            shown = (f"{reward:.2f}" for reward in (first, last, mean(run["rewards"][-5:])))
            rows.append((TITLES[name], seed, *shown, str(len(run["rewards"])), str(run["seconds"])))
    return _TRAINING + _format_table(
        ("Agent", "Seed", "First step", "Last step", "Last five", "Steps", "Seconds"), rows
    )


def _format_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
