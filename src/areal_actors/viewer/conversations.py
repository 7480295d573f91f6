"""Groups and conversations of a run for the page: problems with their rewards, and each answer token by token.

Two sources complete each other: ``rollout/`` has the rows of every episode as text, and ``sessions.jsonl`` a sample of
conversations with their tokens. An episode is one sample of a problem; a group holds the episodes of one problem.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

from attrs import frozen

from areal_actors.dashboard import RunDirectory
from areal_actors.dashboard.records import read_records

_MAX_GROUPS = 256
_MAX_FILES = 4096
"""Files of groups that one search reads, the newest versions first."""
_MAX_LINE = 200
MAX_CHANGING = 32
"""Versions whose groups may still be written: more than any staleness."""
_TASK = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
"""The name of a problem: of a named source it is ``source-5``. It never leaves its directory."""
_MARKUP = re.compile(r"<\|[^<>|]{1,40}\|>|</?[a-z_]{1,20}>|\[/?[A-Z_]{2,20}\]")
"""The special tokens of chat templates."""
_ROLES = frozenset({"system", "user", "human", "assistant", "model", "tool"})


class Trait(StrEnum):
    """A property by which groups are found."""

    EQUAL = "equal"
    """All episodes have the same reward, so that nothing is learned from them."""
    DIFFERENT = "different"
    FAILED = "failed"
    """A sampled episode failed."""
    UNTRAINED = "untrained"
    """A sampled episode has turns that were not trained."""


@frozen(kw_only=True)
class GroupFilter:
    """Which groups are listed: those that match all that is set."""

    kind: str = "rollout"
    """``rollout`` or ``eval-rollout``."""
    version: int | None = None
    """That under which the episodes began; all if it is ``None``."""
    query: str = ""
    """In the name of the problem, or in what the model read or wrote, in any case."""
    source: str | None = None
    """The dataset of the problem, in a run of several."""
    low: float = -math.inf
    high: float = math.inf
    """Bounds of the mean reward."""
    trait: Trait | None = None


@frozen
class _Episodes:
    """The episodes of one problem: rows of ``rollout/`` and heads of sampled conversations, by sample."""

    task: str
    version: int
    rows: Mapping[int, Sequence[Mapping[str, Any]]]
    heads: Mapping[int, Mapping[str, Any]]

    @property
    def rewards(self) -> dict[int, float]:
        # A conversation knows what the agent reported; a row of several turns has the return of its last one.
        return {
            sample: float((self.heads.get(sample) or self.rows[sample][-1]).get("reward") or 0.0)
            for sample in sorted({*self.rows, *self.heads})
        }

    @property
    def problem(self) -> str:
        """The first line of the problem."""
        for head in self.heads.values():
            if head["problem"]:
                return str(head["problem"])
        prompts = [str(row.get("prompt") or "") for rows in self.rows.values() for row in rows]
        return find_first_line(min(prompts, key=len, default=""))

    def has(self, trait: Trait | None) -> bool:
        is_equal = len(self.rewards) > 1 and len(set(self.rewards.values())) == 1
        match trait:
            case Trait.EQUAL:
                return is_equal
            case Trait.DIFFERENT:
                return not is_equal
            case Trait.FAILED:
                return any(head["failure"] for head in self.heads.values())
            case Trait.UNTRAINED:
                return any(head["has_untrained"] for head in self.heads.values())
            case None:
                return True


@frozen
class Conversations:
    """The groups and conversations in the directory of a run."""

    directory: RunDirectory

    def list_groups(self, wanted: GroupFilter) -> dict[str, Any]:
        """Return the ``groups`` that are wanted, each with the first line of its problem and the rewards by sample.

        The newest versions are first. ``is_cut`` says whether there are too many to list all.
        """
        groups: list[dict[str, Any]] = []
        for number, found in enumerate(self._find(wanted)):
            if len(groups) == _MAX_GROUPS or number == _MAX_FILES:
                return {"groups": groups, "is_cut": True}
            rewards = list(found.rewards.values())
            mean = sum(rewards) / max(len(rewards), 1)
            if wanted.low <= mean <= wanted.high and found.has(wanted.trait) and self._contains(found, wanted.query):
                facts = {"task": found.task, "version": found.version, "problem": found.problem}
                groups.append(facts | {"rewards": rewards, "mean": mean, "has_tokens": bool(found.heads)})
        return {"groups": groups, "is_cut": False}

    def read_group(self, kind: str, version: int, task: str) -> dict[str, Any] | None:
        """Return the episodes of one problem: rewards, texts, why they were not trained; ``None`` if there are none.

        Episodes with the same texts name the first of them as ``same_as``. ``session`` is the index of the
        conversation of an episode, if it was sampled.
        """
        found = next(iter(self._find(GroupFilter(kind=kind, version=version), task=task)), None)
        if found is None:
            return None
        reasons = {
            record.get("sample_idx"): record.get("reason")
            for record in (read_records(self.directory.untrained) if kind == "rollout" else ())
            if (record.get("version"), record.get("task_id")) == (version, task)
        }
        rewards = found.rewards
        mean = sum(rewards.values()) / max(len(rewards), 1)
        texts: dict[str, int] = {}
        episodes = []
        for sample, reward in rewards.items():
            head, rows = found.heads.get(sample, {}), found.rows.get(sample, ())
            text = json.dumps([[row.get("prompt"), row.get("completion")] for row in rows] or f"sample {sample}")
            episodes.append(
                {
                    "sample": sample,
                    "reward": reward,
                    "above_mean": reward - mean,
                    "same_as": same if (same := texts.setdefault(text, sample)) != sample else None,
                    "untrained": reasons.get(sample),
                    "failure": head.get("failure"),
                    "session": head.get("index"),
                    "rows": [_describe_row(row) for row in rows],
                }
            )
        return {"problem": found.problem, "mean": mean, "episodes": episodes}

    def read_session(self, index: int) -> dict[str, Any] | None:
        """Return one conversation with tokens and, if it was trained, advantages; ``None`` if there is none."""
        for place, record in enumerate(read_records(self.directory.sessions)):
            if place == index:
                return record | {"turns": list(add_advantages(self.directory, record.get("turns", ())))}
        return None

    def _find(self, wanted: GroupFilter, *, task: str | None = None) -> Iterator[_Episodes]:
        """Yield the groups of a kind, version, source and task, the newest version first."""
        root = self.directory.eval_rollouts if wanted.kind == "eval-rollout" else self.directory.rollouts
        dumped = list_versions(root)
        heads: dict[tuple[int, str], dict[int, dict[str, Any]]] = defaultdict(dict)
        for head in self._heads(is_eval=wanted.kind == "eval-rollout"):
            name = str(head["task_id"])
            heads[_began(root, dumped, name, int(head["version"])), name][head["sample_idx"]] = head
        every = {*dumped, *(version for version, _ in heads)} if wanted.version is None else {wanted.version}
        for version in sorted(every, reverse=True):
            folder = root / str(version)
            names = {path.stem for path in folder.glob("*.jsonl")} | {name for began, name in heads if began == version}
            for name in sorted(names, key=lambda name: (len(name), name)):
                is_named = task in (None, name) and _TASK.fullmatch(name)
                if not is_named or wanted.source not in (None, name.rpartition("-")[0]):
                    continue
                rows: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
                for row in read_records(folder / f"{name}.jsonl"):
                    rows[int(row.get("sample_idx") or 0)].append(row)
                yield _Episodes(name, version, rows, heads.get((version, name), {}))

    def _heads(self, *, is_eval: bool) -> Iterator[dict[str, Any]]:
        """Yield the conversations of a purpose without their turns, with their place in the file."""
        for index, record in enumerate(read_records(self.directory.sessions)):
            if bool(record.get("is_eval")) == is_eval:
                head = {key: value for key, value in record.items() if key not in ("turns", "untrained")}
                more = {"has_untrained": bool(record.get("untrained")), "problem": _problem_of(record.get("turns", ()))}
                yield head | more | {"index": index}

    def _contains(self, found: _Episodes, query: str) -> bool:
        if not query:
            return True
        texts = [
            found.task,
            *(f"{row.get('prompt')}\n{row.get('completion')}" for r in found.rows.values() for row in r),
        ]
        indices = {head["index"] for head in found.heads.values()}
        for index, record in enumerate(read_records(self.directory.sessions) if indices else ()):
            if index in indices:
                texts.append(json.dumps(record, ensure_ascii=False))
        return any(query.casefold() in text.casefold() for text in texts)


def add_advantages(directory: RunDirectory, turns: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the turns of a conversation with the ``step`` that trained them and their ``advantages``.

    The advantages are runs ``[advantage, count]`` over the sampled tokens, empty for a turn that no step has trained.
    """
    known = {
        turn: {"step": record["step"], "advantages": runs}
        for record in read_records(directory.advantages)
        for turn, runs in record["turns"].items()
    }
    for turn in turns:
        yield {**turn, "step": None, "advantages": []} | known.get(str(turn["id"]), {})


def find_first_line(prompt: str) -> str:
    """Return the first line of the last message in a prompt, which a chat template has written; a guess."""
    parts = [part.strip() for part in _MARKUP.split(prompt)]
    messages = [part for part in parts if part and part.casefold() not in _ROLES]
    lines = [line.strip() for line in (messages[-1] if messages else "").splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].casefold() in _ROLES:
        del lines[0]
    return lines[0][:_MAX_LINE] if lines else ""


def list_versions(root: Path) -> list[int]:
    """Return the versions below a directory of rollouts."""
    # Of 5,000 names, pathlib makes paths in 40 ms.
    return sorted(int(name) for name in os.listdir(root) if name.isdecimal()) if root.is_dir() else []  # noqa: PTH208


def _began(root: Path, dumped: Sequence[int], task: str, sampled: int) -> int:
    """Return the version under which an episode began that ``sampled`` sampled: the latest with a file of its problem.

    Without such a file it is ``sampled`` itself.
    """
    before = [version for version in dumped if version <= sampled][-MAX_CHANGING:]
    return next((version for version in reversed(before) if (root / str(version) / f"{task}.jsonl").exists()), sampled)


def _problem_of(turns: Sequence[Mapping[str, Any]]) -> str:
    messages = turns[0].get("messages", ()) if turns else ()
    texts = [str(message.get("content") or "") for message in messages if message.get("role") == "user"]
    return next((line.strip()[:_MAX_LINE] for line in (texts[-1] if texts else "").splitlines() if line.strip()), "")


def _describe_row(row: Mapping[str, Any]) -> dict[str, Any]:
    kept = ("reward", "head_version", "tail_version", "prompt", "completion")
    trained = sum(end - start for start, end in row.get("trained") or ())
    return {name: row.get(name) for name in kept} | {"trained_tokens": trained}
