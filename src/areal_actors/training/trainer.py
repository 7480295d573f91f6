"""The trainer: groups in, an update of the weights out. It owns the model, the optimiser and the version.

One step: penalties in the reward, advantages, rows, then for each update the forward passes, the objective, the
backward passes and AdamW. Everything blocks; an actor runs it on a thread. Rewards, staleness limits and publication
of weights are decided elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attrs import evolve, frozen
from torch import Tensor

from areal_actors.domain import Floats, Group, Trajectory, unfold, unfold_group
from areal_actors.errors import CaptureViolation, ConfigError, TrainingDiverged
from areal_actors.training.advantages import GroupAdvantages, compute_advantages
from areal_actors.training.batch import Batch, TrainingRow
from areal_actors.training.capture import CaptureGate, CaptureWatch
from areal_actors.training.checkpoints import Checkpoint, find_latest, save_checkpoint
from areal_actors.training.config import Aggregation, KlPlace, Layout, TrainerConfig
from areal_actors.training.forward import TokenScores, score_pack
from areal_actors.training.generators import generator_states, set_generator_states
from areal_actors.training.memory import release_free_memory
from areal_actors.training.objective import Objective, TokenSums, create_objective
from areal_actors.training.optimizer import Optimizer
from areal_actors.training.packing import Pack, pack_flat, pack_tree
from areal_actors.training.penalties import estimate_kl, penalise_kl, penalise_overlong
from areal_actors.training.precision import compute_dtype
from areal_actors.training.statistics import StepStatistics, describe_data
from areal_actors.training.support import require_plain_head, require_tree_support
from areal_actors.training.terms import Terms
from areal_actors.training.tree_attention import use_tree_attention
from areal_actors.training.weights import distinct_tensors, load_weights

__all__ = ["PolicyTrainer"]


@frozen(kw_only=True)
class _Update:
    """What one update did."""

    loss: float
    sums: TokenSums
    grad_norm: float
    num_skipped: int
    num_packed: int


class PolicyTrainer:
    """Trains a transformers causal language model from groups of episodes.

    The model is taken over: its weights become float32, and it stays in evaluation mode, since a ratio of probabilities
    under two different dropout masks means nothing. ``reference`` is a frozen model for KL penalties. ``objective``
    replaces the one that ``config`` describes.

    Raises ``ConfigError`` if the layout does not fit the model or a KL penalty lacks its reference, and
    ``ModelError`` if the model changes its logits after its head.
    """

    def __init__(
        self,
        model: Any,
        config: TrainerConfig | None = None,
        *,
        reference: Any | None = None,
        objective: Objective | None = None,
    ) -> None:
        self.config = config or TrainerConfig()
        self.model = model.float().eval()
        self.version = 0
        self._reference = reference.eval() if reference is not None else None
        self._objective = objective or create_objective(self.config.objective)
        self._dtype = compute_dtype(self.config.dtype, model.device)
        self.expect_engine(dtype="float32")
        self._check()
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._optimizer = Optimizer(trained, self.config.optimizer)

    def expect_engine(self, *, dtype: str) -> None:
        """Say what the engine computes in, which bounds how far its log-probabilities may be from the trainer's."""
        self.gate = CaptureGate.create(
            self.config.capture,
            vocab_size=self.model.config.vocab_size,
            is_float32=dtype == "float32" and self._dtype is torch.float32,
        )

    # ------------------------------------------------------------------------------------------------ training

    def train_step(self, groups: Sequence[Group], *, max_staleness: int | None = None) -> StepStatistics:
        """Update the weights from ``groups`` and advance ``version`` by one.

        Groups older than ``max_staleness`` versions are not to be there.

        Raises ``TrainingDiverged`` if a loss or gradient is not finite: the update at fault was not made, and the
        version stays. Raises ``CaptureViolation`` or ``ExportError`` for rows that cannot be true, before anything
        changed.
        """
        started = time.perf_counter()
        if self.config.capture.enabled:
            self.gate.check_groups(groups, version=self.version, max_staleness=max_staleness)
        groups, rows, num_zero_variance = self._prepare(groups)
        watch = self._watch(rows, groups)
        data = describe_data(groups, rows, version=self.version, num_zero_variance_groups=num_zero_variance)
        batches = [self._batch(chosen) for chosen in self._updates(self._with_baselines(rows, watch))]
        rate = self._optimizer.learning_rate
        done = [self._update(batch, watch if index == 0 else None) for index, batch in enumerate(batches)]
        self._optimizer.zero_grad()
        release_free_memory()
        self.version += 1
        return StepStatistics.create(
            sum((update.sums for update in done), TokenSums()),
            version=self.version,
            data=data,
            losses=[update.loss for update in done],
            grad_norms=[update.grad_norm for update in done],
            learning_rate=rate,
            num_skipped_rows=sum(update.num_skipped for update in done),
            num_packed_tokens=sum(update.num_packed for update in done),
            seconds=time.perf_counter() - started,
        )

    def _update(self, batch: Batch, watch: CaptureWatch | None) -> _Update:
        """One update of the weights; with a ``watch`` only of rows that are what they say.

        Only the first update of a step is watched: after it, no row is of the present weights any more.
        """
        packs, num_skipped = self._packs(batch)
        loss, sums = self._accumulate(batch, packs, watch)
        self._judge(watch)
        return _Update(
            loss=loss,
            sums=sums,
            grad_norm=self._optimizer.step(),
            num_skipped=num_skipped,
            num_packed=sum(pack.num_tokens for pack in packs),
        )

    def _watch(self, rows: Sequence[TrainingRow], groups: Sequence[Group]) -> CaptureWatch | None:
        """Compare what the present weights can have sampled: of restored sessions, others of that number may have."""
        if not self.config.capture.enabled:
            return None
        restored = {episode.session for group in groups for episode in group.episodes if episode.is_restored}
        watch = self.gate.watch(version=self.version)
        watch.expect([row for row in rows if row.trajectory.session not in restored])
        return watch

    def _judge(self, watch: CaptureWatch | None) -> None:
        if watch is None:
            return
        try:
            watch.judge()
        except CaptureViolation:
            self._optimizer.zero_grad()
            raise

    def logprobs(self, trajectories: Sequence[Trajectory], *, is_raw: bool = False) -> list[Floats]:
        """Log-probabilities of the trained tokens under the present weights, float32 [T] for each row, 0 off the mask.

        Where the rows were sampled by these weights, they equal ``Trajectory.logprobs`` but for rounding. With
        ``is_raw`` they are those at temperature 1, and equal ``Trajectory.raw_logprobs``.
        """
        branches = [unfold(row) for row in trajectories]
        rows = [
            TrainingRow(trajectory=branch.row, advantages=np.zeros(branch.row.num_tokens))
            for found in branches
            for branch in found
        ]
        scored = iter(self._score_rows(self.model, rows, is_raw=is_raw))
        result = [np.zeros(row.num_tokens, dtype=np.float32) for row in trajectories]
        for values, found in zip(result, branches, strict=True):
            for branch in found:  # a token is scored in one branch, and 0 in the others
                values[branch.places] += next(scored)
        return result

    def state_dict(self) -> dict[str, Tensor]:
        """All weights by name, shared with the model: they change with the next ``train_step``."""
        return dict(self.model.state_dict())

    # --------------------------------------------------------------------------------------------- checkpoints

    def save(self, directory: Path, *, counters: Mapping[str, Any] | None = None, num_kept: int = 2) -> Checkpoint:
        """Write a checkpoint below ``directory``, with the caller's JSON ``counters``, and keep the last ``num_kept``.

        Raises ``CheckpointError`` if it cannot be written; older ones are untouched then.
        """
        own = {"num_updates": self._optimizer.num_updates, "caller": dict(counters or {})}
        parts = {
            "model": distinct_tensors(self.model),
            "optimizer": self._optimizer.state_dict(),
            "rng": generator_states(),
        }
        return save_checkpoint(directory, step=self.version, parts=parts, counters=own, num_kept=num_kept)

    def restore(self, directory: Path) -> Mapping[str, Any] | None:
        """Go on from the latest complete checkpoint below ``directory``, exactly; returns its caller's counters.

        Returns ``None`` and changes nothing if there is none. Raises ``CheckpointError`` if it does not fit the model.
        """
        checkpoint = find_latest(directory)
        if checkpoint is None:
            return None
        load_weights(self.model, checkpoint)
        self._optimizer.load_state_dict(checkpoint.load("optimizer"), num_updates=checkpoint.counters["num_updates"])
        set_generator_states(checkpoint.load("rng"))
        self.version = checkpoint.step
        counters: Mapping[str, Any] = checkpoint.counters["caller"]
        return counters

    # -------------------------------------------------------------------------------------------- from groups

    def _prepare(self, groups: Sequence[Group]) -> tuple[Sequence[Group], list[TrainingRow], int]:
        """Penalised groups, their rows, and how many groups had no variance."""
        groups = penalise_overlong([unfold_group(group) for group in groups], self.config.objective.overlong)
        kl = self.config.objective.kl
        if kl.coefficient and kl.place is KlPlace.REWARD:
            groups = penalise_kl(groups, self._reference_distances(groups), coefficient=kl.coefficient)
        advantages = compute_advantages(groups, self.config.advantages)
        num_zero = sum(found.has_zero_variance for found in advantages)
        return groups, self._rows(groups, advantages), num_zero

    def _rows(self, groups: Sequence[Group], advantages: Sequence[GroupAdvantages]) -> list[TrainingRow]:
        rows: list[TrainingRow] = []
        num_episodes = 0
        for index, (group, found) in enumerate(zip(groups, advantages, strict=True)):
            if found.has_zero_variance and self.config.advantages.drop_zero_variance:
                continue
            values = iter(found.rows)
            for episode in group.episodes:
                if episode.failure is not None:
                    continue
                for trajectory in episode.trajectories:
                    row = TrainingRow(trajectory=trajectory, advantages=next(values), episode=num_episodes, group=index)
                    rows.append(row)
                num_episodes += 1
        return [row for row in rows if row.trajectory.num_trained_tokens]

    def _reference_distances(self, groups: Sequence[Group]) -> dict[int, Floats]:
        """KL estimates between the present weights and the reference, by ``id`` of the trajectory."""
        trajectories = [row for group in groups for episode in group.episodes for row in episode.trajectories]
        rows = [TrainingRow(trajectory=row, advantages=np.zeros(row.num_tokens)) for row in trajectories]
        policy, reference = self._score_rows(self.model, rows), self._score_rows(self._reference, rows)
        estimator = self.config.objective.kl.estimator
        return {
            id(row): estimate_kl(torch.tensor(now), torch.tensor(then), estimator).numpy()
            for row, now, then in zip(trajectories, policy, reference, strict=True)
        }

    # ---------------------------------------------------------------------------------------------- from rows

    def _with_baselines(self, rows: list[TrainingRow], watch: CaptureWatch | None) -> list[TrainingRow]:
        """Rows with the log-probabilities that their loss compares with, unless its own forward pass gives them."""
        if self._reference is not None:
            scored = self._score_rows(self._reference, rows)
            rows = [evolve(row, reference=found) for row, found in zip(rows, scored, strict=True)]
        if not self.config.objective.is_decoupled:
            return [evolve(row, proximal=self._centre(row.trajectory)) for row in rows]
        if self.config.num_epochs * self.config.num_minibatches == 1:
            return rows  # one update: the weights before it are those of its own forward pass
        scored = self._score_rows(self.model, rows, watch)
        return [evolve(row, proximal=found) for row, found in zip(rows, scored, strict=True)]

    def _centre(self, row: Trajectory) -> Floats:
        """What a clip around the behaviour policy is around: the distribution that the trainer computes, then.

        Of a forced or truncated token, the probability that it was sampled with is another function: the ratio to it
        begins below the clip, whatever the weights, and would be clipped for what nobody changed.
        """
        return row.logprobs if row.raw_logprobs is None or self.config.temperature != 1.0 else row.raw_logprobs

    def _updates(self, rows: list[TrainingRow]) -> Iterator[list[TrainingRow]]:
        """The rows of each update: groups dealt out evenly, in an order drawn from seed, version and epoch only."""
        members: dict[int, list[TrainingRow]] = {}
        for row in rows:
            members.setdefault(row.group, []).append(row)
        groups = list(members.values())
        count = max(1, min(self.config.num_minibatches, len(groups)))
        for epoch in range(self.config.num_epochs):
            order = np.arange(len(groups))
            if count > 1:
                order = np.random.default_rng((self.config.seed, self.version, epoch)).permutation(len(groups))
            for part in np.array_split(order, count):
                yield [row for index in part for row in groups[index]]

    def _batch(self, rows: Sequence[TrainingRow]) -> Batch:
        aggregation: Aggregation = self.config.objective.aggregation
        return Batch.create(rows, aggregation=aggregation, fixed_length=self.config.objective.fixed_length)

    def _packs(self, batch: Batch) -> tuple[list[Pack], int]:
        """The forward passes of an update, and how many rows it does without."""
        skips = self.config.skips_inert_rows and not self._objective.needs_every_row
        chosen = [index for index, row in enumerate(batch.rows) if not (skips and row.is_inert)]
        return self._pack(batch.rows, chosen), len(batch.rows) - len(chosen)

    def _pack(self, rows: Sequence[TrainingRow], chosen: Sequence[int]) -> list[Pack]:
        pack = pack_tree if self.config.layout is Layout.TREE else pack_flat
        return pack(rows, chosen, max_tokens=self.config.max_packed_tokens)

    # ----------------------------------------------------------------------------------------- forward, backward

    def _accumulate(self, batch: Batch, packs: Sequence[Pack], watch: CaptureWatch | None) -> tuple[float, TokenSums]:
        """Gradients of the whole update, pass by pass; returns its loss and sums."""
        self._optimizer.zero_grad()
        total, sums = 0.0, TokenSums()
        for pack in packs:
            scores = self._score(self.model, pack)
            result = self._objective(scores, self._terms(batch, pack, scores))
            loss = float(result.loss.detach())
            if not np.isfinite(loss):
                self._optimizer.zero_grad()
                raise TrainingDiverged(f"The loss of step {self.version + 1} is {loss}; the weights were not changed.")
            torch.autograd.backward(result.loss)
            total, sums = total + loss, sums + result.sums
            if watch is not None:
                watch.note(batch.rows, pack.rows, scores.raw_logprobs.cpu().numpy())
        return total, sums

    def _terms(self, batch: Batch, pack: Pack, scores: TokenScores) -> Terms:
        tokens = batch.tokens_of(pack.rows)
        counts = [int(batch.offsets[row + 1] - batch.offsets[row]) for row in pack.rows]

        def pick(values: Floats) -> Tensor:
            return torch.from_numpy(values[tokens]).to(self.model.device)

        return Terms(
            advantages=pick(batch.advantages),
            weights=pick(batch.weights),
            behaviour=pick(batch.behaviour),
            proximal=scores.logprobs.detach() if batch.proximal is None else pick(batch.proximal),
            reference=None if batch.reference is None else pick(batch.reference),
            rows=torch.from_numpy(np.repeat(np.arange(len(counts)), counts)).to(self.model.device),
            num_rows=len(counts),
        )

    def _score(self, model: Any, pack: Pack) -> TokenScores:
        if pack.input_ids.max() >= self.model.config.vocab_size or pack.input_ids.min() < 0:
            raise CaptureViolation(
                f"A row has the token id {pack.input_ids.max()}, beyond the model's {self.model.config.vocab_size} "
                "ids: engine and trainer do not hold the same model."
            )
        with self._precision():
            return score_pack(model, pack, temperature=self.config.temperature)

    @torch.no_grad()
    def _score_rows(
        self, model: Any, rows: Sequence[TrainingRow], watch: CaptureWatch | None = None, *, is_raw: bool = False
    ) -> list[Floats]:
        """Log-probabilities float32 [T] of each row's trained tokens under ``model``; ``is_raw``: at temperature 1."""
        result: list[Floats] = [np.zeros(row.trajectory.num_tokens, dtype=np.float32) for row in rows]
        trained = [index for index, row in enumerate(rows) if row.trajectory.num_trained_tokens]
        for pack in self._pack(rows, trained):
            scores = self._score(model, pack)
            values = (scores.raw_logprobs if is_raw else scores.logprobs).cpu().numpy()
            if watch is not None:
                watch.note(rows, pack.rows, scores.raw_logprobs.cpu().numpy())
            bounds = np.cumsum([len(rows[index].positions) for index in pack.rows])[:-1]
            for index, part in zip(pack.rows, np.split(values, bounds), strict=True):
                result[index][rows[index].positions] = part
        return result

    def _precision(self) -> AbstractContextManager[Any]:
        if self._dtype is torch.float32:
            return nullcontext()
        return torch.autocast(self.model.device.type, dtype=self._dtype)

    # ------------------------------------------------------------------------------------------------- checks

    def _check(self) -> None:
        if self.config.objective.kl.coefficient and self._reference is None:
            raise ConfigError(
                "objective.kl.coefficient: a KL penalty needs a reference model; give one, or set it to 0"
            )
        for model in filter(None, (self.model, self._reference)):
            require_plain_head(model)
            if self.config.layout is Layout.TREE:
                use_tree_attention(model)
                require_tree_support(model)
