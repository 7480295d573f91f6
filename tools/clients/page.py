"""The results of the client runs: a file that the runs write, and the page of the documentation made from it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.clients.judge import ERRORS
from tools.clients.running import PROTOCOLS, SCENARIOS, Environment

__all__ = ["PAGE", "RESULTS", "format_page", "load_results", "save_results"]

RESULTS = Path(__file__).with_name("results.json")
PAGE = Path(__file__).parents[2] / "docs" / "results" / "clients.md"

_NONE = "·"
_MARKS = {"works": "✓", "fails": "✗", "not applicable": _NONE}
_MANY = "twenty_at_once"
_HEAD = """\
# Clients

Real clients, each in a separate environment with the versions named below, are run against the proxy: on a socket,
with real sessions and a real chat template, while a script in the place of the model says what clients stumble over
(thinking, text next to tool calls, odd spacing and escapes in arguments, line breaks at the beginning, many alphabets).
Tools are run by the client's own loop where it has one, and follow-up turns come from its own memory.
`nox -s clients` runs all of them and writes this page; `nox -s clients -- langchain` runs one.

✓ works, ✗ does not, · the client has no such thing.

"""
_PARENTS = """\
## Parents

A request that continues an earlier answer is linked to it, however the client words what it sends back: rewards flow
along these links, and exact tokens are reused. Whose turn a request truly continues is read off labels in its text.

"""
_ERRORS = """\
## Errors

What the client raises (or reports) for a wrong key, for a parameter that cannot be honoured, for a session that has no
room, and for a conversation that is longer than the model's context.

"""


def load_results(path: Path = RESULTS) -> dict[str, Any]:
    """What the runs so far have shown, by client."""
    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return results


def save_results(results: Mapping[str, Any], environments: Iterable[Environment]) -> None:
    """Write the results, in the order of the environments, and the page."""
    ordered = {one.name: results[one.name] for one in environments if one.name in results}
    RESULTS.write_text(_format_results(ordered), encoding="utf-8")
    PAGE.write_text(format_page(ordered), encoding="utf-8")


def _format_results(results: Mapping[str, Any]) -> str:
    """JSON with one scenario a line, so that a run changes the lines of what has changed."""
    text = json.dumps(results, indent=1, ensure_ascii=False)
    return re.sub(r"\n {4}([}\]])", r" \1", re.sub(r"\n {5,}", " ", text)) + "\n"


def format_page(results: Mapping[str, Any]) -> str:
    """The page."""
    sections = [_format_protocol(results, protocol) for protocol in PROTOCOLS if _of(results, protocol)]
    return _HEAD + "".join(sections) + _PARENTS + _format_parents(results) + _ERRORS + _format_errors(results)


def _of(results: Mapping[str, Any], protocol: str) -> dict[str, Mapping[str, Any]]:
    """What each client did in one protocol, by its title."""
    return {r["title"]: r["protocols"][protocol] for r in results.values() if protocol in r["protocols"]}


def _format_protocol(results: Mapping[str, Any], protocol: str) -> str:
    clients = _of(results, protocol)
    shown = [name for name in SCENARIOS if name not in ERRORS and any(_is_played(c, name) for c in clients.values())]
    versions = {r["title"]: r["packages"] for r in results.values()}
    rows = [
        [title, "<br>".join(f"`{package}`" for package in versions[title]), *(_mark(played, name) for name in shown)]
        for title, played in clients.items()
    ]
    table = _format_table(["Client", "Installed", *(SCENARIOS[name] for name in shown)], rows)
    return f"## {PROTOCOLS[protocol]}\n\n{table}\n{_format_faults(clients, shown)}"


def _is_played(played: Mapping[str, Any], scenario: str) -> bool:
    return played.get(scenario, {}).get("outcome") in ("works", "fails")


def _mark(played: Mapping[str, Any], scenario: str) -> str:
    return _MARKS[played[scenario]["outcome"]] if scenario in played else _NONE


def _format_faults(clients: Mapping[str, Mapping[str, Any]], shown: Sequence[str]) -> str:
    faults = [
        f"* {title}, {SCENARIOS[name]}: {_plain(played[name]['why'])}\n"
        for title, played in clients.items()
        for name in shown
        if played.get(name, {}).get("outcome") == "fails"
    ]
    return "".join(faults) + ("\n" if faults else "")


def _plain(text: str) -> str:
    """Text of an exception, on one line and harmless in Markdown."""
    return f"`{' '.join(text.replace('`', ' ').split())[:200]}`"


# ------------------------------------------------------------------------------------------------------ parents


def _links(results: Mapping[str, Any]) -> Iterator[tuple[str, str, str, Mapping[str, Any]]]:
    """Client, protocol, scenario and links, wherever there was a follow-up turn."""
    for client in results.values():
        for protocol, played in client["protocols"].items():
            for scenario, verdict in played.items():
                if "links" in verdict:
                    yield client["title"], protocol, scenario, verdict["links"]


def _format_parents(results: Mapping[str, Any]) -> str:
    totals: dict[str, dict[str, list[int]]] = {}
    for title, protocol, _, links in _links(results):
        counts = totals.setdefault(title, {}).setdefault(protocol, [0, 0, 0])
        for at, name in enumerate(("linked", "follow_ups", "wrong")):
            counts[at] += links[name]
    linked, turns, wrong = (sum(c[at] for t in totals.values() for c in t.values()) for at in range(3))
    share = f"{100 * linked / turns:.1f} %" if turns else "none"
    summary = (
        f"**{linked} of {turns} follow-up turns ({share}) are linked to their true parent, {wrong} to a wrong one.** "
        f"Without the many plain turns of “{SCENARIOS[_MANY]}”, it is {_count(results, 'linked')} of "
        f"{_count(results, 'follow_ups')}."
    )
    rows = [
        [title, *("{} of {}".format(*by_protocol[p][:2]) if p in by_protocol else _NONE for p in PROTOCOLS)]
        for title, by_protocol in totals.items()
    ]
    return f"{summary}\n\n{_format_table(['Client', *PROTOCOLS.values()], rows)}\n{_format_misses(results)}"


def _count(results: Mapping[str, Any], name: str) -> int:
    return sum(links[name] for _, _, scenario, links in _links(results) if scenario != _MANY)


def _format_misses(results: Mapping[str, Any]) -> str:
    """One line for the misses of one client that have the same reason."""
    misses: dict[tuple[str, str, str], int] = {}
    for title, protocol, _, links in _links(results):
        for miss in links["misses"]:
            key = title, PROTOCOLS[protocol], miss["reason"]
            misses[key] = misses.get(key, 0) + 1
    notes = {r["title"]: r["note"] for r in results.values()}
    if not misses:
        return ""
    lines = [
        f"* {title}, {protocol}: {number} ({reason}). {notes[title]}".rstrip()
        for (title, protocol, reason), number in misses.items()
    ]
    return "Not linked:\n\n" + "\n".join(lines) + "\n\n"


# ------------------------------------------------------------------------------------------------------- errors


def _format_errors(results: Mapping[str, Any]) -> str:
    rows = [
        [f"{client['title']}, {PROTOCOLS[protocol]}", *(_error(played.get(name)) for name in ERRORS)]
        for client in results.values()
        for protocol, played in client["protocols"].items()
    ]
    return _format_table(["Client", *(SCENARIOS[name] for name in ERRORS)], rows)


def _error(verdict: Mapping[str, Any] | None) -> str:
    if verdict is None or verdict["outcome"] == "not applicable":
        return _NONE
    return f"`{verdict['why']}`" if verdict["outcome"] == "works" else f"✗ {_plain(verdict['why'])}"


def _format_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
