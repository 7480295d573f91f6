"""The check before an update: groups that cannot be what the engine sampled stop the run, by name.

Errors of a single token are rejected at once (``check_groups``): ids that the model does not have, columns of different
lengths, impossible log-probabilities, versions that were never published. Errors that only show in many tokens are
judged on the rows of a step (``CaptureWatch``): tokens that the current weights sampled must have the log-probabilities
that the training pass itself computes for them, so the check costs no extra pass. Plain log-probabilities are compared,
those of the softmax at temperature 1: truncation, penalties and grammars change the sampling distribution, but not
these. A forced token, whose log-probability is 0, therefore causes no false alarm. If the engine does not report them
(servers at another temperature), those at the temperature of the turn are compared, unless something else changed the
logits. ``capture_noise.py`` describes which differences rounding explains; it depends on the data types and on the
entropy of the step.

Rows without plain log-probabilities (of workflows that build tensors themselves), tokens for which the engine reported
neither, and tokens of older weights cannot be recomputed; of the last, whole answers with a single repeated
log-probability are bad.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from operator import itemgetter
from typing import Any

import numpy as np
from attrs import define, field, frozen

from areal_actors.domain import LOGPROB_SLACK, CaptureFault, Floats, Group, Trajectory
from areal_actors.errors import CaptureViolation
from areal_actors.training.batch import TrainingRow
from areal_actors.training.capture_noise import Comparison, NoiseModel
from areal_actors.training.config import CaptureConfig

__all__ = ["CaptureGate", "CaptureWatch"]

_MIN_TOKENS = 4
"""Shorter answers may have equal log-probabilities by accident, or by rounding."""
_MAX_EXCESS_OF_CONSTANTS = 0.3
"""Equal values of different tokens count as rounding only if the trainer computes nearly equal ones, such as 0."""
_MAX_EVIDENCE = 64
"""Maximum number of rows that are kept as evidence for people to inspect."""


@frozen(kw_only=True)
class CaptureGate:
    """Checks of the rows of a step.

    ``noise`` knows the model and the data types; the other fields are as configured.
    """

    noise: NoiseModel
    tolerance: float | None
    max_bad_fraction: float

    @classmethod
    def create(cls, config: CaptureConfig, *, vocab_size: int, engine_dtype: str, trainer_dtype: str) -> CaptureGate:
        """Return the gate that ``config`` describes."""
        noise = NoiseModel(vocab_size=vocab_size, engine_dtype=engine_dtype, trainer_dtype=trainer_dtype)
        return cls(noise=noise, tolerance=config.tolerance, max_bad_fraction=config.max_bad_fraction)

    def excesses(self, rows: Sequence[Comparison]) -> list[float]:
        """Return each row's difference as a share of what is allowed: more than 1 is too much."""
        # A fixed bound of 0.1 nats stopped honest rows in bfloat16 at steps 3 to 6, and passed rows with a lost token
        # under nearly uniform weights. A calibration by a second pass in float32 would cost that pass, and ages as the
        # weights move.
        if self.tolerance is None:
            return self.noise.excesses(rows)
        return [row.mean_gap / self.tolerance for row in rows]

    def explain(self, rows: Sequence[Comparison]) -> str:
        """Describe why ``rows`` probably differ, with the data types and the settings that matter."""
        noise = self.noise
        return (
            f"The engine computes in {noise.engine_dtype}, the trainer in {noise.trainer_dtype}. "
            f"Likely cause: {noise.likely_cause(rows)}. Check the engine, its weights and what stands between it and "
            "the sessions; if they are right, set trainer.capture.tolerance (nats per token), or engine.dtype and "
            "trainer.dtype to float32."
        )

    def check_groups(self, groups: Sequence[Group], *, version: int, max_staleness: int | None = None) -> None:
        """Raise ``CaptureViolation`` for impossible values in groups that train ``version``, before anything else."""
        for group in groups:
            for episode in group.episodes:
                if episode.num_empty_turns:
                    raise _violation(
                        CaptureFault.EMPTY_CAPTURE,
                        f"{episode.num_empty_turns} of {episode.num_turns} answers of session {episode.session} were "
                        "completed without a single token.",
                        episode.trajectories,
                        version,
                    )
                for index, row in enumerate(episode.trajectories if episode.failure is None else ()):
                    for kind, what in self._complaints(row, version):
                        where = f"Row {index} of session {row.session} ({row.num_tokens} tokens)"
                        raise _violation(kind, f"{where} {what}.", [row], version)
            age = version - group.head_version
            if max_staleness is not None and group.head_version >= 0 and age > max_staleness:
                rows = [row for episode in group.episodes for row in episode.trajectories]
                raise _violation(
                    CaptureFault.TOO_STALE,
                    f"Group {group.id} was sampled {age} versions before version {version}, and {max_staleness} are "
                    "allowed.",
                    rows,
                    version,
                )

    def _complaints(self, row: Trajectory, version: int) -> Iterator[tuple[CaptureFault, str]]:
        columns = (row.input_ids, row.loss_mask, row.logprobs, row.versions, row.returns, row.turns)
        optional = [column for column in (row.raw_logprobs, row.predecessors) if column is not None]
        lengths = sorted({len(column) for column in (*columns, *optional)})
        if len(lengths) > 1:
            yield CaptureFault.MISSING_TOKENS, f"has columns of {lengths} tokens"
            return
        ids, trained = row.input_ids, row.loss_mask == 1
        if len(ids) and (ids.min() < 0 or ids.max() >= self.noise.vocab_size):
            wrong = int(ids[(ids < 0) | (ids >= self.noise.vocab_size)][0])
            yield (
                CaptureFault.UNKNOWN_IDS,
                f"has the token id {wrong}, and the model's are below {self.noise.vocab_size}",
            )
        for name, column in (("logprobs", row.logprobs), ("raw_logprobs", row.raw_logprobs)):
            values = np.zeros(0) if column is None else column[trained]
            is_unknown = np.isnan(values) if name == "raw_logprobs" else np.zeros(len(values), bool)
            wrong_values = values[(~np.isfinite(values) & ~is_unknown) | (values > LOGPROB_SLACK)]
            if len(wrong_values):
                yield CaptureFault.IMPOSSIBLE_LOGPROBS, f"has {wrong_values[0]} among its {name}"
        versions = row.versions[trained]
        if len(versions) and (versions.min() < 0 or versions.max() > version):
            wrong = int(versions.min() if versions.min() < 0 else versions.max())
            yield CaptureFault.WRONG_VERSION, f"has a token of version {wrong}, and {version} is the newest"

    def watch(self, *, version: int) -> CaptureWatch:
        """Return a comparison of the rows of a step that trains ``version``."""
        return CaptureWatch(gate=self, version=version)


@define(kw_only=True)
class _Seen:
    """One row, and once it was recomputed, the compared values; ``recomputed`` float32 on the trained tokens."""

    row: Trajectory
    compared: Comparison | None = None
    recomputed: Floats | None = field(default=None, eq=False)
    is_constant: bool = False


@define(kw_only=True)
class CaptureWatch:
    """Comparison of the rows of one step with what the trainer computes for them, collected pass by pass."""

    gate: CaptureGate
    version: int
    _seen: dict[int, _Seen] = field(factory=dict, init=False)

    def expect(self, rows: Sequence[TrainingRow]) -> None:
        """Set the rows of the step, including those that no pass computes."""
        # By identity: rows are copied when baselines are added to them, and share the trajectory.
        self._seen = {id(row.trajectory): _Seen(row=row.trajectory, is_constant=_is_constant(row)) for row in rows}

    def note(self, rows: Sequence[TrainingRow], indices: Sequence[int], raw_logprobs: Floats, logprobs: Floats) -> None:
        """Add the log-probabilities [n] that a pass computed for the trained tokens of ``rows[i]``, row by row.

        ``raw_logprobs`` are the plain ones, ``logprobs`` those of the distributions that the tokens were sampled from.
        """
        bounds = np.cumsum([len(rows[index].positions) for index in indices])[:-1]
        parts = zip(indices, np.split(raw_logprobs, bounds), np.split(logprobs, bounds), strict=True)
        for index, raw, sampled in parts:
            row = rows[index]
            seen = self._seen.get(id(row.trajectory))
            if seen is None:
                continue
            reported, recomputed = row.comparable(raw, sampled)
            is_own = row.trajectory.versions[row.positions] == self.version
            # Servers at another temperature do not report plain log-probabilities.
            is_own &= ~np.isnan(reported)
            if is_own.any():
                seen.compared = Comparison(reported=reported[is_own], recomputed=recomputed[is_own])
                seen.recomputed = recomputed

    def judge(self) -> None:
        """Raise ``CaptureViolation`` if too many of the rows cannot have been sampled as recorded."""
        compared = [(seen, seen.compared) for seen in self._seen.values() if seen.compared is not None]
        alone = [seen for seen in self._seen.values() if seen.compared is None and _is_judged_alone(seen.row)]
        excesses = self.gate.excesses([comparison for _, comparison in compared]) if compared else []
        bad = [
            (seen, it, excess)
            for (seen, it), excess in zip(compared, excesses, strict=True)
            # ``not <=`` and not ``>``: an excess of nan is bad.
            if not excess <= (_MAX_EXCESS_OF_CONSTANTS if seen.is_constant else 1)
        ]
        constant = [seen for seen in alone if seen.is_constant]
        num_judged = len(compared) + len(alone)
        if len(bad) + len(constant) > self.gate.max_bad_fraction * num_judged:
            self._refuse(bad, constant, num_judged)
        if self.gate.tolerance is not None:
            return
        # A difference that all rows share shows in their sum, even if each row alone could be rounding.
        refused = {id(seen) for seen, _, _ in bad}
        together = [(seen, it) for seen, it in compared if id(seen) not in refused]
        rows = [comparison for _, comparison in together]
        what = self.gate.noise.systematic_gap(rows) if rows else None
        if what is not None:
            raise _violation(
                CaptureFault.UNEXPLAINED_LOGPROBS,
                f"{what}, over {sum(len(row.reported) for row in rows)} tokens of {len(rows)} rows. Each row alone "
                f"could be rounding. {self.gate.explain(rows)}",
                [seen.row for seen, _ in together],
                self.version,
                recomputed=[seen.recomputed for seen, _ in together],
            )

    def _refuse(self, bad: Sequence[tuple[_Seen, Comparison, float]], constant: Sequence[_Seen], num: int) -> None:
        rows = [*(seen for seen, _, _ in bad), *constant]
        kind = CaptureFault.UNEXPLAINED_LOGPROBS
        what = "do not have the log-probabilities that the trainer computes under the same weights"
        if 2 * sum(seen.is_constant for seen in rows) > len(rows):
            kind, what = CaptureFault.CONSTANT_LOGPROBS, "have one log-probability for all of their tokens"
        worst, excess = max(((seen, excess) for seen, _, excess in bad), key=itemgetter(1), default=(rows[0], 0.0))
        gap, reason = "", "Check the engine, and what stands between it and the sessions."
        if worst.compared is not None:
            size = worst.compared.mean_gap
            gap = f", off by {size:.3g} per token where {size / excess:.2g} are allowed"
            reason = self.gate.explain([comparison for _, comparison, _ in bad])
        raise _violation(
            kind,
            f"{len(rows)} of {num} rows {what}: the worst is of session {worst.row.session} "
            f"({worst.row.num_trained_tokens} trained tokens){gap}. {reason}",
            [seen.row for seen in rows],
            self.version,
            recomputed=[seen.recomputed for seen in rows],
        )


def _is_judged_alone(row: Trajectory) -> bool:
    """Return whether all plain log-probabilities are known, and there are enough of them."""
    if row.raw_logprobs is None or row.num_trained_tokens < _MIN_TOKENS:
        return False
    return not bool(np.isnan(row.raw_logprobs[row.loss_mask == 1]).any())


def _is_constant(row: TrainingRow) -> bool:
    """Return whether different tokens all have exactly the same log-probability."""
    if not _is_judged_alone(row.trajectory):
        return False
    assert row.trajectory.raw_logprobs is not None
    values, ids = row.trajectory.raw_logprobs[row.positions], row.trajectory.input_ids[row.positions]
    return len(np.unique(values)) == 1 and len(np.unique(ids)) > 1


def _violation(
    kind: CaptureFault,
    what: str,
    rows: Sequence[Trajectory],
    version: int,
    *,
    recomputed: Sequence[Floats | None] = (),
) -> CaptureViolation:
    columns = ("input_ids", "loss_mask", "versions", "returns", "turns", "logprobs", "raw_logprobs", "predecessors")

    def plain(value: float) -> float | str:
        return value if np.isfinite(value) else str(value)  # JSON has no other numbers

    evidence: list[dict[str, Any]] = []
    for row, other in zip_longest(rows[:_MAX_EVIDENCE], recomputed[:_MAX_EVIDENCE]):
        found = {name: getattr(row, name) for name in columns} | {"recomputed": other}
        named = {"kind": str(kind), "session": row.session, "interactions": list(row.interactions), "tag": row.tag}
        lists = {name: None if column is None else list(map(plain, column.tolist())) for name, column in found.items()}
        evidence.append(named | lists)
    message = f"Step {version + 1} cannot be taken. {what} The weights were not changed."
    return CaptureViolation(message, kind=kind, evidence=evidence)
