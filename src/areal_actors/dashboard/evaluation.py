"""The record of an evaluation: one line for each episode that is over, from which all results are computed.

An episode counts as finished once its line is in ``episodes.jsonl``. Failures and dumps are written before it, a
sampled conversation after it, so only that may be missing after a kill. A resumed evaluation runs the other episodes,
and first removes what else an interrupted process wrote of them.
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

from areal_actors.dashboard.files import RunDirectory
from areal_actors.dashboard.records import RecordFile, read_records, rewrite_records
from areal_actors.domain import Outcome
from areal_actors.kernel import Message
from areal_actors.lib.telemetry import get_logger
from areal_actors.messages import EpisodeFinished, Progress

__all__ = ["EpisodeRecorder", "keep_finished", "read_outcomes"]

_log = get_logger(__name__)


class EpisodeRecorder:
    """Appends to ``episodes.jsonl``, and logs each tenth of ``num_expected`` episodes."""

    name = "episodes.jsonl"
    is_essential = True

    def __init__(self, path: Path, *, num_finished: int, num_expected: int) -> None:
        self._file = RecordFile(path)
        self._num_finished = num_finished
        self._num_expected = num_expected

    def open(self) -> None:
        """Do nothing: the first record opens the file."""

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
