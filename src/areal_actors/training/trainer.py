"""The trainer: turns groups into updates of the weights.

One step, in the order of ``train_step``::

    groups ─▶ rows (penalties, advantages, scores of teacher and reference) ─▶ the rows of each update
                                                                                      │
    version + 1 ◀─ AdamW ◀─ check of what was captured ◀─ forward, objective, backward ◀─ packs

Everything blocks; an actor runs it on a thread. Rewards, staleness limits and publication of weights are decided
elsewhere; ``policy.py`` has the state that a step changes, and how it is sharded, saved and restored. In a gang each
rank has a trainer, and all of them get the same calls.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from attrs import evolve

from areal_actors.domain import Floats, Group, Trajectory, unfold, unfold_group
from areal_actors.errors import CaptureViolation, ConfigError, ExportError, TrainingDiverged
from areal_actors.lib.references import load_function
from areal_actors.models import model_shape
from areal_actors.training.advantages import supervised_advantages
from areal_actors.training.batch import Batch, TrainingRow, create_rows, split_by_row, split_updates
from areal_actors.training.capture import CaptureGate, CaptureWatch, NoiseModel
from areal_actors.training.config import ROUNDING_NATS, Centre, KlPlace, Layout, TrainerConfig
from areal_actors.training.custom import StepInputs, estimate_advantages, load_estimator, measure
from areal_actors.training.distributions import num_greedy_tokens, withhold_greedy
from areal_actors.training.gang import guarded
from areal_actors.training.memory import release_free_memory
from areal_actors.training.objective import create_phase_objective, required_scores
from areal_actors.training.packing import Pack, pack_flat, pack_padded, pack_tree
from areal_actors.training.passes import Passes, Scorer
from areal_actors.training.phases import Phase, PhaseName
from areal_actors.training.policy import TrainedPolicy
from areal_actors.training.statistics import RowRecorder, StepStatistics, UpdateStatistics, describe_data
from areal_actors.training.surrogates import estimate_kl, kl_costs, penalise_overlong


class PolicyTrainer(TrainedPolicy):
    """Trains a transformers causal language model from groups of episodes.

    The trainer takes ownership of the model: its weights become float32, and it stays in evaluation mode, since a ratio
    of probabilities under two different dropout masks is meaningless. With ``config.lora``, it puts an adapter into the
    model and freezes the rest, which it keeps in the data type of the passes. ``reference`` is a frozen model for KL
    penalties, which it keeps in that type, too; with an adapter, it is the model at the start of the run by default, as
    ``lora.path`` says.
    ``max_length`` bounds the tokens of a row; ``None`` means
    the limit of the model. ``phases`` replace ``config`` by the settings of each phase; by default all steps are of one
    phase ``rl``. ``teacher`` is a frozen model that scores rows for a distillation phase, unless they carry the scores
    of another teacher.

    Raises ``ConfigError`` if a KL penalty lacks its reference, or phases differ in a
    setting of the whole run, and ``ModelError`` if the model changes its logits after its head.
    """

    def __init__(
        self,
        model: Any,
        config: TrainerConfig | None = None,
        *,
        reference: Any | None = None,
        max_length: int | None = None,
        phases: Sequence[Phase] = (),
        teacher: Any | None = None,
    ) -> None:
        phases = tuple(phases) or (Phase(config=config or TrainerConfig()),)
        super().__init__(model, phases, reference=reference, teacher=teacher, max_length=max_length)

    def follow(self, phase: Phase) -> None:
        """Take the settings, the objective and the custom functions of ``phase``."""
        super().follow(phase)
        self._estimator = load_estimator(self.config.advantages)
        self._metrics = tuple(map(load_function, self.config.metrics))
        self.expect_engine(dtype=self.engine_dtype)

    def expect_engine(self, *, dtype: str) -> None:
        """Set the engine's data type, which bounds how far its log-probabilities may be from the trainer's."""
        self.engine_dtype = dtype
        trainer_dtype = str(self._dtype).removeprefix("torch.")
        rounding = ROUNDING_NATS["float32" if dtype == trainer_dtype == "float32" else "bfloat16"]
        objective, is_supervised = self.config.objective, self.phase.name is PhaseName.SFT
        # Nothing sampled the rows of supervised steps, so there is no policy that a ratio could be taken to.
        self._centre = (
            Centre.POLICY if is_supervised else objective.resolve_centre(self._num_updates, rounding=rounding)
        )
        self._objective = create_phase_objective(self.phase, rounding=rounding)
        self.gate = CaptureGate(
            noise=NoiseModel(
                vocab_size=model_shape(self.model.config).vocab_size, engine_dtype=dtype, trainer_dtype=trainer_dtype
            ),
            tolerance=self.config.capture.tolerance,
            max_bad_fraction=self.config.capture.max_bad_fraction,
        )

    @property
    def _num_updates(self) -> int:
        """Maximum number of updates in a step."""
        return self.config.num_epochs * self.config.num_minibatches

    # ------------------------------------------------------------------------------------------------- one step

    @guarded
    def train_step(
        self, groups: Sequence[Group], *, max_staleness: int | None = None, recorder: RowRecorder | None = None
    ) -> StepStatistics:
        """Update the weights from ``groups`` and advance ``version`` by one.

        Groups older than ``max_staleness`` versions are a ``CaptureViolation``. A ``recorder`` gets the rows of the
        step and the log-probabilities that are computed for them.

        Raises ``TrainingDiverged`` if a loss or gradient is not finite: the failing update was not made, and the
        version stays. Raises ``CaptureViolation`` or ``ExportError`` for invalid rows, before anything changed, and
        ``CustomFunctionError`` for a custom function that fails: before anything changed, except for a policy loss that
        fails in a later update of the step (``is_within_step``).
        """
        started = time.perf_counter()
        self.enter_phase()
        self.read_moments()
        if self.config.capture.enabled:
            # First: what is impossible is refused before anything has changed.
            self.gate.check_groups(groups, version=self.version, max_staleness=max_staleness)
        self._num_updates_before = self._optimizer.num_updates
        rows, num_zero_variance, penalty = self._prepare(groups)
        # The others are only counted, in denominators.
        trained = [row for row in rows if row.trajectory.num_trained_tokens]
        custom = measure(self._metrics, StepInputs(version=self.version, groups=tuple(groups), rows=tuple(trained)))
        watch = None
        if self.config.capture.enabled:
            # Restored sessions carry version numbers of an earlier process, whose weights of that number may have been
            # others.
            restored = {episode.session for group in groups for episode in group.episodes if episode.is_restored}
            watch = CaptureWatch(gate=self.gate, version=self.version)
            watch.expect([row for row in trained if row.trajectory.session not in restored])
        if recorder is not None:
            recorder.expect(groups, trained)
        data = describe_data(
            groups,
            trained,
            version=self.version,
            num_zero_variance_groups=num_zero_variance,
            num_greedy_tokens=sum(map(num_greedy_tokens, groups)),
            penalty=penalty,
        )
        rows = self._add_baselines(rows, watch, recorder)
        objective = self.config.objective
        batches = [
            Batch.create(chosen, aggregation=objective.aggregation, fixed_length=objective.fixed_length)
            for chosen in split_updates(rows, self.config, version=self.version)
        ]
        rate = self._optimizer.learning_rate
        # Only the first update is watched: after it, no row was sampled by the current weights any more.
        done = [self._update(batch, watch if index == 0 else None, recorder) for index, batch in enumerate(batches)]
        self._optimizer.zero_grad()
        if self.model.device.type == "cpu":
            # glibc keeps freed blocks below 32 MiB; after a step they are gigabytes, which the engine could use.
            release_free_memory()
        self.version += 1
        self._num_updates_before = self._optimizer.num_updates
        return StepStatistics.create(
            done,
            version=self.version,
            data=data,
            learning_rate=rate,
            seconds=time.perf_counter() - started,
            custom=custom,
        )

    def _prepare(self, groups: Sequence[Group]) -> tuple[list[TrainingRow], int, float]:
        """Return rows with their advantages, the number of groups without variance, and the sum of all penalties."""
        unfolded = [unfold_group(group) for group in groups]
        if self.phase.name is PhaseName.SFT:
            return create_rows(unfolded, supervised_advantages(unfolded), self.config), 0, 0.0
        penalised = penalise_overlong(list(map(withhold_greedy, unfolded)), self.config.objective.overlong)
        penalty = _total_reward(groups) - _total_reward(penalised)
        advantages = estimate_advantages(penalised, self.config.advantages, self._estimator)
        num_zero = sum(found.has_zero_variance for found in advantages)
        rows = create_rows(penalised, advantages, self.config)
        for row in rows:
            is_trained = row.trajectory.num_trained_tokens > 0
            if self.config.router_replay and is_trained and row.trajectory.routed_experts is None:
                raise ExportError(
                    f"trainer.router_replay is on, but no experts were recorded for a row of session "
                    f"{row.trajectory.session}. The embedded engine records them; for rows of other engines and of "
                    "workflows that make their own, switch router_replay off."
                )
        if self.phase.name is PhaseName.DISTILLATION:
            # Under the teacher's plain softmax, whatever the student's turns were sampled with.
            teacher = self._teacher
            scored = None if teacher is None else self._score_rows(teacher, rows, is_raw=True, replays=False)
            taught = scored or [required_scores(row.trajectory) for row in rows]
            rows = [evolve(row, teacher=found) for row, found in zip(rows, taught, strict=True)]
        kl, reference = self.config.objective.kl, None
        if self._reference is not None:
            # Other weights choose other experts, as the reference did when it was trained.
            reference = self._score_rows(self._reference, rows, replays=False)
        elif self.adapter is not None and kl.coefficient > 0:
            # The model at the start of the run is the reference: no second copy of the base.
            with self.adapter.at_start():
                reference = self._score_rows(self._scorer, rows, replays=False)
        if reference is not None:
            rows = [evolve(row, reference=found) for row, found in zip(rows, reference, strict=True)]
        if not kl.coefficient or kl.place is not KlPlace.REWARD:
            return rows, num_zero, penalty
        # Subtracted after normalisation: divided by a group's deviation, it would have unit variance in a group of
        # equal rewards, whatever its coefficient.
        charged, total = [], 0.0
        for row, now in zip(rows, self._score_rows(self._scorer, rows), strict=True):
            distances = estimate_kl(torch.tensor(now), torch.tensor(row.reference), kl.resolve_estimator()).numpy()
            total += float(distances.astype(np.float64).sum())
            costs = kl_costs(row.trajectory, distances, coefficient=kl.coefficient)
            charged.append(evolve(row, advantages=row.advantages - costs))
        return charged, num_zero, penalty + kl.coefficient * total

    def _add_baselines(
        self, rows: list[TrainingRow], watch: CaptureWatch | None, recorder: RowRecorder | None
    ) -> list[TrainingRow]:
        """Return rows with the log-probabilities that their loss compares with, unless the forward pass gives them."""
        if self._centre is Centre.BEHAVIOUR:
            return [evolve(row, proximal=row.centre) for row in rows]
        if self._num_updates == 1:
            # The forward pass gives them: the weights before the only update are the policy.
            return rows
        scored = self._score_rows(self._scorer, rows, watch)
        if recorder is not None:
            for row, found in zip(rows, scored, strict=True):
                recorder.note(row, found[row.positions])
        if self._centre is Centre.POLICY:
            # These are scored for the watch alone, which has to see all rows before the weights change.
            return rows
        return [evolve(row, proximal=found) for row, found in zip(rows, scored, strict=True)]

    def _update(self, batch: Batch, watch: CaptureWatch | None, recorder: RowRecorder | None) -> UpdateStatistics:
        """Update the weights once; with a ``watch`` only if the rows pass its check."""
        # A row without any advantage has no gradient, unless the objective gives it one.
        skips = self.config.skips_inert_rows and not self._objective.needs_every_row
        chosen = [index for index, row in enumerate(batch.rows) if not (skips and row.is_inert)]
        packs = self._pack(batch.rows, chosen)
        self._optimizer.zero_grad()
        found = self._passes.accumulate(self._scorer, self._objective, batch, packs)
        # Before the optimiser: an update with nan cannot be taken back.
        if not np.isfinite(found.loss):
            self._optimizer.zero_grad()
            raise TrainingDiverged(
                f"The loss of step {self.version + 1} is {found.loss}; the weights were not changed. {_advise(batch)}"
            )
        for pack, scores in zip(packs, found.scores, strict=True):
            for index, (logprobs, raw_logprobs) in split_by_row(batch.rows, pack.rows, scores):
                if watch is not None:
                    watch.note(batch.rows[index], logprobs, raw_logprobs)
                if recorder is not None:
                    recorder.note(batch.rows[index], logprobs)
        try:
            if watch is not None:
                watch.judge()
        except CaptureViolation:
            self._optimizer.zero_grad()
            raise
        try:
            grad_norm = self._optimizer.step()
        except TrainingDiverged as error:
            raise TrainingDiverged(f"{error} {_advise(batch)}") from None
        return UpdateStatistics(
            loss=found.loss,
            sums=found.sums,
            num_outside=found.num_outside,
            grad_norm=grad_norm,
            num_skipped_rows=len(batch.rows) - len(chosen),
            num_packed_tokens=sum(pack.num_tokens for pack in packs),
        )

    # ---------------------------------------------------------------------------------------------- forward passes

    @guarded
    def logprobs(self, trajectories: Sequence[Trajectory], *, is_raw: bool = False) -> list[Floats]:
        """Return log-probabilities of the trained tokens under the current weights.

        They are float32 [T] for each row, 0 off the mask, under the distributions that the turns were sampled from: for
        rows that these weights sampled, they equal ``Trajectory.logprobs`` up to rounding, unless penalties, a bias or
        a grammar changed the logits. With ``is_raw`` they are those of the plain softmax, and equal
        ``Trajectory.raw_logprobs``.
        """
        branches = [unfold(row) for row in trajectories]
        rows = [
            TrainingRow(
                trajectory=branch.row, advantages=np.zeros(branch.row.num_tokens), temperature=self.config.temperature
            )
            for found in branches
            for branch in found
        ]
        scored = iter(self._score_rows(self._scorer, rows, is_raw=is_raw))
        result = [np.zeros(row.num_tokens, dtype=np.float32) for row in trajectories]
        for values, found in zip(result, branches, strict=True):
            # Each token is scored in one branch only, and is 0 in the others.
            for branch in found:
                values[branch.places] += next(scored)
        return result

    def _score_rows(
        self,
        scorer: Scorer,
        rows: Sequence[TrainingRow],
        watch: CaptureWatch | None = None,
        *,
        is_raw: bool = False,
        replays: bool = True,
    ) -> list[Floats]:
        """Return log-probabilities float32 [T] of each row's trained tokens by ``scorer``, plain with ``is_raw``.

        ``replays`` is false for other weights than those that are trained: they choose experts themselves.
        """
        result: list[Floats] = [np.zeros(row.trajectory.num_tokens, dtype=np.float32) for row in rows]
        chosen = [index for index, row in enumerate(rows) if row.trajectory.num_trained_tokens]
        packs = self._pack(rows, chosen, replays=replays)
        scored = self._passes.score(scorer, packs)
        for pack, scores in zip(packs, scored, strict=True):
            for index, (logprobs, raw_logprobs) in split_by_row(rows, pack.rows, scores):
                if watch is not None:
                    watch.note(rows[index], logprobs, raw_logprobs)
                result[index][rows[index].positions] = raw_logprobs if is_raw else logprobs
        return result

    def _pack(self, rows: Sequence[TrainingRow], chosen: Sequence[int], *, replays: bool = True) -> list[Pack]:
        """Return forward passes of the rows ``chosen``, with recorded experts if the run replays them.

        Models that do not attend by plan compute padded rows. Raises ``ConfigError`` for rows that are longer than the
        rotation of the model is fixed for: a workflow may make rows longer than the engine's context, on which the
        checks at the start are based.
        """
        longest = max((row.trajectory.num_tokens for row in rows), default=0)
        if self._row_limit is not None and longest > self._row_limit:
            raise ConfigError(
                f"A row has {longest} tokens, and beyond {self._row_limit} {type(self.model).__name__} rotates all "
                "rows of a pass by its longest one; leave out or shorten such rows."
            )
        create = pack_padded if not self.is_planned else pack_flat if self.layout == Layout.FLAT else pack_tree
        packs = create(rows, chosen, max_tokens=self.config.max_packed_tokens)
        return packs if replays and self.replays else [evolve(pack, routed_experts=None) for pack in packs]

    @property
    def _passes(self) -> Passes:
        return Passes(gang=self.gang, dtype=self._dtype, progress=self.progress)


_LARGE = 1e6
"""A reward or an advantage with which float32 gradients may overflow; useful ones are near 1."""


def _advise(batch: Batch) -> str:
    """Return what to do about a loss or a gradient that is not finite."""
    rewards = [row.trajectory.reward for row in batch.rows]
    largest = max((float(np.abs(row.advantages).max(initial=0.0)) for row in batch.rows), default=0.0)
    if max(*map(abs, rewards), largest) < _LARGE:
        return "Lower the learning rate, or resume from a checkpoint before the rewards or ratios went wrong."
    return (
        f"Its rewards are from {min(rewards):.3g} to {max(rewards):.3g}, and its advantages up to {largest:.3g}: scale "
        "rewards to about 1."
    )


def _total_reward(groups: Sequence[Group]) -> float:
    episodes = [episode for group in groups for episode in group.episodes]
    return float(sum(episode.reward for episode in episodes if episode.failure is None))
