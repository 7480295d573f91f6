"""Files of episodes: training rows as text for people and as parquet with all numbers, failures, and evaluations.

An episode of an evaluation counts as finished once its line is in ``episodes.jsonl``. Failures and dumps are written
before it, a sampled conversation after it, so only that may be missing after a kill. A resumed evaluation runs the
other episodes, and first removes what else an interrupted process wrote of them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from attrs import evolve

from areal_actors.dashboard.files import RunDirectory
from areal_actors.dashboard.records import RecordFile, append_lines, format_record, read_records, rewrite_records
from areal_actors.dashboard.reporter import Listener
from areal_actors.domain import Ints, Outcome, unfold
from areal_actors.interchange import dump_path, dump_row, find_dumps, open_seal_key, seal_row, write_rows
from areal_actors.kernel import Message
from areal_actors.lib.telemetry import get_logger
from areal_actors.messages import EpisodeFinished, GroupsTrained, Progress, RowsTrained

_log = get_logger(__name__)

_LONGEST_STALENESS = 1_000
"""Versions after which an episode counts as not trained where groups are never too old."""

Decode = Callable[[Ints], str]
"""Converts token ids to text, including special tokens."""


class RolloutDumper(Listener):
    """Writes ``rollout/<version>/<task>.jsonl`` and the same below ``eval-rollout``.

    A version is that of the weights when the episode began. A resumed run repeats the episodes of its checkpoint's
    version and later ones, and removes their files first. Rows that an earlier process may already have written,
    completely or partly, still appear only once.
    """

    name = "trajectory dumps"

    def __init__(self, directory: RunDirectory, *, decode: Decode, resumed_step: int | None = None) -> None:
        self._directory = directory
        self._decode = decode
        self._resumed_step = resumed_step

    def open(self) -> None:
        """Remove the files of episodes that will be repeated."""
        step = self._resumed_step or 0
        # A resumed run repeats the episodes of its checkpoint's version and of later ones.
        _remove_versions(self._directory.rollouts, at_least=step)
        # The checkpoint's own weights were evaluated before it was written.
        _remove_versions(self._directory.eval_rollouts, at_least=step + (self._resumed_step is not None))

    def on_event(self, news: Message[Progress, None]) -> None:
        """Write the rows of an episode. Raises ``OSError``."""
        if not isinstance(news, EpisodeFinished):
            return
        root = self._directory.eval_rollouts if news.is_eval else self._directory.rollouts
        lines = [format_record(row) for row in dump_rows(news, self._decode)]
        if news.is_repeated:
            # Versions are not compared, because those in a file may be higher: tokens of lost versions count as the
            # version that the run continued with. A partial line at the end of a file is removed, too.
            known = [_without_versions(json.loads(line)) for line in lines]
            for written in root.glob(f"*/{news.problem.task}.jsonl"):
                rewrite_records(written, lambda record: _without_versions(record) not in known)
        path = root / str(news.version) / f"{news.problem.task}.jsonl"
        for folder in (root, path.parent):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        append_lines(path, lines)


def dump_rows(news: EpisodeFinished, decode: Decode) -> Iterator[dict[str, Any]]:
    """Yield one record per training row, or per branch of a tree. The prompt ends before the first trained token.

    ``trained`` lists the spans of trained tokens, as indices of their first token and of the one after their last.
    """
    for row in (branch.row for whole in news.episode.trajectories for branch in unfold(whole)):
        num_prompt = int(row.loss_mask.argmax()) if row.num_trained_tokens else row.num_tokens
        edges = np.flatnonzero(np.diff(row.loss_mask == 1, prepend=False, append=False))
        yield {
            "task_id": news.problem.task if news.problem.source else news.problem.position,
            "sample_idx": news.episode.member,
            "seqlen": row.num_tokens,
            "prompt_len": num_prompt,
            "head_version": row.head_version,
            "tail_version": row.tail_version,
            "reward": row.reward,
            "prompt": decode(row.input_ids[:num_prompt]),
            "completion": decode(row.input_ids[num_prompt:]),
            "token_ids": row.input_ids.tolist(),
            "trained": edges.reshape(-1, 2).tolist(),
        }


def _remove_versions(root: Path, *, at_least: int) -> None:
    for path in root.glob("*") if root.is_dir() else ():
        if path.name.isdecimal() and int(path.name) >= at_least:
            shutil.rmtree(path)


def _without_versions(record: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in ("head_version", "tail_version")}


class UntrainedWriter(Listener):
    """Writes ``untrained.jsonl``: every successful episode that no step trained, and why.

    An episode is written once it is too old to be trained, the others when the run ends. ``max_staleness`` is ``None``
    if groups are never too old. ``is_replacing`` says whether groups with equal rewards are replaced by others.
    """

    name = "untrained.jsonl"

    def __init__(
        self, path: Path, *, max_staleness: int | None, is_replacing: bool, resumed_step: int | None = None
    ) -> None:
        self._path = path
        self._max_staleness = _LONGEST_STALENESS if max_staleness is None else max_staleness
        self._is_replacing = is_replacing
        self._step = resumed_step or 0
        self._waiting: dict[str, list[dict[str, Any]]] = {}
        """The episodes of each task that may still be trained."""

    def open(self) -> None:
        """Keep what an earlier process has written, except for episodes that will be repeated or may be trained."""
        for record in read_records(self._path):
            if record["version"] < self._step and not self._is_too_old(record):
                self._waiting.setdefault(record["task_id"], []).append(record)
        rewrite_records(self._path, lambda record: record["version"] < self._step and self._is_too_old(record))

    def on_event(self, news: Message[Progress, None]) -> None:
        """Remember an episode, or forget those that a step trained. Raises ``OSError``."""
        if isinstance(news, GroupsTrained):
            self._step = news.step
            for task in news.tasks:
                # A group that was too old has been sampled again: only its newest episodes were trained.
                kept = {record["sample_idx"]: record for record in self._waiting.get(task, ())}
                rest = [record for record in self._waiting.pop(task, ()) if record is not kept[record["sample_idx"]]]
                if rest:
                    self._waiting[task] = rest
            self._write(self._is_too_old)
        elif isinstance(news, EpisodeFinished) and not news.is_eval and news.episode.failure is None:
            rows = [branch.row for whole in news.episode.trajectories for branch in unfold(whole)]
            record = {
                "task_id": news.problem.task,
                "sample_idx": news.episode.member,
                "version": news.version,
                "head_version": min((row.head_version for row in rows), default=news.version),
                "turns": news.episode.num_turns,
                "tokens": sum(row.num_trained_tokens for row in rows),
                "reward": news.episode.reward,
            }
            known = self._waiting.setdefault(news.problem.task, [])
            is_known = any(other["sample_idx"] == news.episode.member for other in known)
            if not (news.is_repeated and is_known):
                known.append(record)

    def close(self) -> None:
        """Write the other episodes, and remove the file if everything has been trained. Raises ``OSError``."""
        self._write(lambda _: True)
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            num = sum(1 for _ in file)
        if num:
            _log.info("episodes_not_trained", num=num, detail=f"{self._path.name} says why")
        else:
            self._path.unlink()

    def _is_too_old(self, record: Mapping[str, Any]) -> bool:
        # Groups are too old, or not, for the step before the last version.
        return bool(self._step - 1 - record["head_version"] > self._max_staleness)

    def _write(self, is_settled: Callable[[dict[str, Any]], bool]) -> None:
        """Append the episodes that are settled, and forget them."""
        lines: list[str] = []
        waiting: dict[str, list[dict[str, Any]]] = {}
        for name, task in self._waiting.items():
            is_equal = self._is_replacing and len(task) > 1 and len({record["reward"] for record in task}) == 1
            for record in task:
                if is_settled(record):
                    reason = "too_old" if self._is_too_old(record) else "equal_rewards" if is_equal else "run_ended"
                    lines.append(format_record({**record, "reason": reason}))
                else:
                    waiting.setdefault(name, []).append(record)
        if lines:
            append_lines(self._path, lines)
        self._waiting = waiting


class RowDumper(Listener):
    """Writes ``rows/step-<n>.parquet`` and keeps the newest ``num_kept`` files. A resumed run repeats later steps."""

    name = "row dumps"

    def __init__(
        self, directory: RunDirectory, *, decode: Decode, num_kept: int | None = None, resumed_step: int | None = None
    ) -> None:
        self._root = directory.rows
        self._decode = decode
        self._num_kept = num_kept
        self._resumed_step = resumed_step
        self._pieces: dict[int, str] = {}
        self._key_path = directory.rows_key
        self._key = b""

    def open(self) -> None:
        """Remove the files of steps that will be repeated."""
        for step, path in find_dumps(self._root).items():
            if step > (self._resumed_step or 0):
                path.unlink()

    def on_event(self, news: Message[Progress, None]) -> None:
        """Write the rows of a step. Raises ``OSError``."""
        if not isinstance(news, RowsTrained):
            return
        self._key = self._key or open_seal_key(self._key_path)
        rows = [
            dump_row(trained, self._decode, step=news.step, row=index, pieces=self._pieces)
            for index, trained in enumerate(news.rows)
        ]
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        sealed = [evolve(row, seal=seal_row(row, self._key, num_rows=len(rows))) for row in rows]
        write_rows(dump_path(self._root, news.step), sealed)
        if self._num_kept is not None:
            for path in list(find_dumps(self._root).values())[: -self._num_kept]:
                path.unlink()


class FailureWriter(Listener):
    """Writes ``failures.jsonl``: every episode that failed, was rejected or was cut short, and why."""

    name = "failures.jsonl"

    def __init__(self, path: Path, *, resumed_step: int | None = None) -> None:
        self._path = path
        self._resumed_step = resumed_step

    def open(self) -> None:
        """Remove the failures of episodes that will be repeated."""
        limit = self._resumed_step or 0
        rewrite_records(self._path, lambda record: record.get("version", 0) < limit)

    def on_event(self, news: Message[Progress, None]) -> None:
        """Write an episode that failed, was rejected or was cut short. Raises ``OSError``."""
        if not isinstance(news, EpisodeFinished) or (news.episode.failure is None and news.episode.cut_short is None):
            return
        outcome = "cut_short"
        if news.episode.failure is not None:
            outcome = "rejected" if news.episode.is_rejected else "failed"
        record = {
            "task_id": news.problem.task,
            "sample_idx": news.episode.member,
            "version": news.version,
            "is_eval": news.is_eval,
            "turns": news.episode.num_turns,
            "seconds": round(news.episode.seconds, 3),
            "outcome": outcome,
            "logged": dict(news.episode.logged),
            "limit": news.episode.limit,
            "failure": news.episode.failure or news.episode.cut_short,
            "traceback": news.episode.traceback,
        }
        if news.is_repeated:
            # The same failure may have taken another time in an earlier process.
            same = {key: value for key, value in record.items() if key != "seconds"}
            rewrite_records(self._path, lambda written: any(written.get(key) != same[key] for key in same))
        append_lines(self._path, [format_record(record)])


class EpisodeRecorder(Listener):
    """Appends to ``episodes.jsonl``, and logs each tenth of ``num_expected`` episodes."""

    name = "episodes.jsonl"
    is_essential = True

    def __init__(self, path: Path, *, num_finished: int, num_expected: int) -> None:
        self._file = RecordFile(path)
        self._num_finished = num_finished
        self._num_expected = num_expected

    def on_event(self, news: Message[Progress, None]) -> None:
        """Write an episode. Raises ``OSError``."""
        if not isinstance(news, EpisodeFinished):
            return
        problem, episode = news.problem, news.episode
        ids = sha256()
        for row in episode.trajectories:
            ids.update(row.input_ids.tobytes())
        record = {
            "set": problem.source,
            "task_id": problem.task,
            "sample_idx": episode.member,
            "reward": episode.reward,
            "failed": episode.failure is not None,
            "turns": episode.num_turns,
            "tokens": sum(row.num_trained_tokens for row in episode.trajectories) if episode.trajectories else None,
            "ids_sha256": ids.hexdigest() if episode.trajectories else None,
            "seconds": round(episode.seconds, 3),
            "logged": dict(episode.logged),
        }
        self._file.append(record)
        before, self._num_finished = self._num_finished, self._num_finished + 1
        if 10 * before // self._num_expected < 10 * self._num_finished // self._num_expected:
            _log.info("evaluated", episodes=self._num_finished, of=self._num_expected)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_outcomes(path: Path) -> tuple[Outcome, ...]:
    """Return the outcomes in ``episodes.jsonl``, sorted by set, task and sample. Raises ``OSError``."""
    found = {}
    for record in read_records(path):
        # The number apart, so that task 10 comes after task 9.
        name, _, number = record["task_id"].rpartition("-")
        found[record["set"], name, int(number), record["sample_idx"]] = Outcome(
            source=record["set"],
            task=record["task_id"],
            member=record["sample_idx"],
            reward=record["reward"] or 0.0,
            has_failed=record["failed"],
        )
    return tuple(found[key] for key in sorted(found))


def keep_finished(directory: RunDirectory) -> None:
    """Remove what an interrupted process wrote of episodes that will be run again. Raises ``OSError``."""
    # Rewritten without a partial last line, to which the next record would be appended.
    kept = rewrite_records(directory.episodes, lambda _: True)
    finished = {(record["task_id"], record["sample_idx"]) for record in kept}
    dumps = directory.eval_rollouts.glob("*/*.jsonl")
    for path in (directory.failures, directory.sessions, *dumps):
        rewrite_records(path, lambda record: (str(record["task_id"]), record["sample_idx"]) in finished)
