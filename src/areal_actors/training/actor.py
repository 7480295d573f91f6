"""The trainer actor: the operations of the training loop on the policy, the exporter and the engines.

``run.loop`` has the loop itself: the order in which these operations are called.

Engines that are lent the weights have loaded them when ``publish`` returns. If they load a copy from disk, the next
step begins meanwhile; VersionAdvanced, evaluations and the next publication wait for them.

If several processes train, this one leads them (``gang_actors``). The computation of a step is in ``trainer``. A
checkpoint holds the weights, the optimizer, the position in the data and this actor's counters, so that a resumed run
continues where it stopped.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import anyio
from anyio import to_thread
from attrs import asdict, evolve, frozen

from areal_actors.domain import Group
from areal_actors.errors import CaptureViolation, CustomFunctionError, ExportError, TrainingDiverged, TrainingStalled
from areal_actors.kernel import Actor, BackgroundTasks, Context, OwnThread, Ref
from areal_actors.lib.telemetry import get_logger
from areal_actors.messages import (
    AcknowledgeLease,
    AwaitTraining,
    Capacity,
    DescribeEngine,
    DiscardLease,
    Evaluate,
    EvaluationFinished,
    Exports,
    GangMembers,
    Generation,
    GroupsTrained,
    Lease,
    LeaseGroups,
    PhaseChanged,
    Progress,
    PublishWeights,
    RequestStop,
    Rollouts,
    RowsTrained,
    SaveVersion,
    SaveWeights,
    StepFinished,
    Training,
    TrainingSummary,
    VersionAdvanced,
)
from areal_actors.training.config import TrainingPlan
from areal_actors.training.gang_actors import GangPolicy
from areal_actors.training.metrics import describe_evaluation, describe_untrained
from areal_actors.training.phases import GroupTeacher
from areal_actors.training.publication import MemoryPublisher, Publisher
from areal_actors.training.statistics import RowRecorder, StepStatistics
from areal_actors.training.stored_checkpoints import parse_position
from areal_actors.training.trainer import PolicyTrainer

_log = get_logger(__name__)

R = TypeVar("R")


@frozen(kw_only=True)
class TrainingPeers:
    """The actors that the trainer sends messages to.

    Without ``rollouts`` there is no evaluation: agents run elsewhere.
    """

    exports: Ref[Exports]
    generation: Ref[Generation]
    capacity: Ref[Capacity]
    rollouts: Ref[Rollouts] | None = None
    progress: Ref[Progress] | None = None


class TrainerActor(Actor[Training]):
    """Owns the policy and its optimizer, and runs ``loop`` (``run.loop.train``), which calls its operations.

    ``counters`` are those of the checkpoint that a resumed run starts from. Rows that fail the capture checks are
    written below ``captures``. ``publisher`` makes snapshots of the weights; by default they are lent to an engine in
    this process. ``members`` train along, from the first step on. ``save_weights`` writes the trained weights; it may
    block. ``supervised`` returns the conversations that a warm step trains on, by its number. ``teacher`` scores the
    rows of distillation steps that were delivered without scores.
    """

    def __init__(
        self,
        *,
        policy: PolicyTrainer,
        peers: TrainingPeers,
        plan: TrainingPlan,
        loop: Callable[[TrainerActor], Awaitable[bool]],
        checkpoints: Path,
        counters: Mapping[str, Any] | None = None,
        captures: Path | None = None,
        publisher: Publisher | None = None,
        members: GangMembers | None = None,
        save_weights: Callable[[], object] | None = None,
        supervised: Callable[[int], Sequence[Group]] | None = None,
        teacher: GroupTeacher | None = None,
    ) -> None:
        self._policy = policy
        self._publisher = publisher or MemoryPublisher()
        self._members = members or GangMembers()
        self._peers = peers
        self.plan = plan
        self._loop = loop
        self._checkpoints = checkpoints
        self._captures = captures
        self._save_weights = save_weights
        self._supervised = supervised
        self._teacher = teacher
        self._is_resumed = counters is not None
        self._has_checked_tokens = False
        self._average = _MovingAverage(plan.stop.smoothing, **(counters or {}).get("average", {}))
        self._position = parse_position(counters)
        self._stop_reason: str | None = None
        self._stopping = anyio.Event()
        self._ended = anyio.Event()
        self._summary: TrainingSummary | None = None
        self._measured = (0.0, 0)
        # The run resumed from the checkpoint of this version, which an interrupted start does not write again.
        self._saved_version: int | None = policy.version if self._is_resumed else None
        self._thread: OwnThread
        self._led: GangPolicy
        self._tasks: BackgroundTasks
        self._published = anyio.Event()
        """Set while the engines have the version that was published last."""
        self._published.set()
        self._written = anyio.Event()
        """Set while no checkpoint is being written in the background."""
        self._written.set()

    @asynccontextmanager
    async def lifespan(self, context: Context) -> AsyncIterator[None]:
        """Train while the actor runs."""
        async with OwnThread.open() as self._thread:
            self._led = GangPolicy(self._policy, self._thread, self._members)
            self._tasks = context.tasks
            context.tasks.start_soon(self._train)
            yield
            # Queued on the thread that trains, so that it does not happen within a step.
            self._thread.post(self._policy.gang.close)

    @RequestStop.handler
    async def request_stop(self, message: RequestStop) -> None:
        """Store the reason. The loop stops between two steps, or while it waits for groups."""
        self._stop_reason = self._stop_reason or message.reason
        self._stopping.set()

    @AwaitTraining.handler(concurrency=64)
    async def await_training(self, message: AwaitTraining) -> TrainingSummary:  # noqa: ARG002
        """Wait for the end of training, and return the summary."""
        await self._ended.wait()
        assert self._summary is not None
        return self._summary

    @SaveWeights.handler
    async def save_weights(self, message: SaveWeights) -> None:  # noqa: ARG002
        """Write the weights, on the thread that trains."""
        if self._save_weights is not None:
            await self._thread.run(self._save_weights)

    async def _train(self) -> None:
        is_finished = await self._loop(self)
        self._summary = TrainingSummary(
            steps=self.version, version=self.version, is_finished=is_finished, stop_reason=self._stop_reason
        )
        self._ended.set()

    # ----------------------------------------------------------------------------- operations of the training loop

    @property
    def version(self) -> int:
        """The number of steps that the weights have had."""
        return self._policy.version

    @property
    def phase(self) -> str:
        """The name of the phase of the last step."""
        return self._policy.phase.name

    @property
    def is_stopping(self) -> bool:
        """Whether a stop was requested."""
        return self._stopping.is_set()

    async def join_gang(self) -> None:
        """Form the gang, before the first publication, which gathers the weights from all ranks."""
        await self._led.join()

    def take_conversations(self) -> Lease:
        """Return the conversations of the next warm step, in the form of a batch of groups."""
        assert self._supervised is not None, "a plan with warm steps comes with conversations"
        step = self.version + 1
        return Lease(id=-step, groups=tuple(self._supervised(step)), max_staleness=None)

    async def lease(self) -> Lease | None:
        """Return the next batch, or ``None`` if a stop was requested first.

        Raises ``TrainingStalled`` after ``plan.max_step_seconds``.
        """
        wanted = LeaseGroups(
            num_groups=self.plan.batch_size, version=self.version, max_staleness=self.plan.max_staleness
        )
        with anyio.move_on_after(self.plan.max_step_seconds):
            return await self._unless_stopping(lambda: self._peers.exports.ask(wanted))
        raise TrainingStalled(
            f"Step {self.version + 1} waited {self.plan.max_step_seconds:g} s for its {self.plan.batch_size} "
            "groups. See failures.jsonl for what failed, or raise rollout.max_step_seconds if episodes need more time."
        )

    async def add_teacher_scores(self, batch: Lease) -> Lease:
        """Return the batch with the scores of a teacher's server, in a distillation phase, on rows that lack them."""
        if self._teacher is None:
            return batch
        taught = [await self._teacher.teach(group, version=self.version) for group in batch.groups]
        return evolve(batch, groups=tuple(taught))

    async def step(self, batch: Lease) -> tuple[StepStatistics, RowRecorder | None]:
        """Update the weights; return the statistics, and the rows if they are reported.

        An error about the rows that ends the run leaves a checkpoint, and the rows for inspection.
        """
        recorder = RowRecorder() if self._peers.progress is not None else None
        try:
            statistics = await self._led.train_step(batch.groups, max_staleness=batch.max_staleness, recorder=recorder)
        except (TrainingDiverged, ExportError):
            await self._discard(batch)
            raise
        except CaptureViolation as violation:
            await self._discard(batch)
            if self._captures is not None:
                path = anyio.Path(self._captures / f"step-{self.version + 1}.jsonl")
                try:
                    await path.parent.mkdir(parents=True, exist_ok=True)
                    await path.write_text("".join(f"{json.dumps(record)}\n" for record in violation.evidence), "utf-8")
                except OSError as error:
                    # The violation is raised in any case, also without its record.
                    _log.warning("evidence_not_written", path=str(path), error=str(error))
                else:
                    violation.args = (f"{violation} The rows are in {path}.",)
            await self.save(is_last=True)
            raise
        except CustomFunctionError:
            if not self._policy.is_within_step:
                await self.save(is_last=True)
            raise
        return statistics, recorder

    async def acknowledge(self, batch: Lease) -> None:
        """Have the exporter forget the groups, which are trained."""
        self._position = await self._peers.exports.ask(AcknowledgeLease(lease=batch.id))
        self._warn_of_untrained(batch)

    def _warn_of_untrained(self, lease: Lease) -> None:
        """Log in the first step if most tokens are not trained, as of agents that send temperature 0 in each request.

        They are answered, linked and rewarded, so that nothing else shows it.
        """
        if self._has_checked_tokens:
            return
        self._has_checked_tokens = True
        untrained = describe_untrained(episode for group in lease.groups for episode in group.episodes)
        if untrained is not None:
            _log.warning("tokens_not_trained", step=self.version, detail=untrained)

    async def _discard(self, lease: Lease) -> None:
        """Let a resumed run sample other groups: these would fail again. Warm steps have no groups to discard."""
        if lease.id >= 0:
            await self._peers.exports.ask(DiscardLease(lease=lease.id))

    async def _unless_stopping(self, action: Callable[[], Awaitable[R]]) -> R | None:
        """Return the result of ``action``, or cancel it and return ``None`` if a stop was requested first."""
        result: R | None = None
        async with anyio.create_task_group() as tasks:

            async def cancel() -> None:
                await self._stopping.wait()
                tasks.cancel_scope.cancel()

            tasks.start_soon(cancel)
            result = await action()
            tasks.cancel_scope.cancel()
        return result

    def is_finished(self, reward: float | None) -> bool:
        """Return whether the step with this mean reward was the last one. A step without rewards ends no run early."""
        stop = self.plan.stop
        average = None if reward is None else self._average.update(reward)
        is_good_enough = average is not None and stop.reward is not None and average >= stop.reward
        if is_good_enough and self.version >= stop.min_steps:
            self._stop_reason = f"the reward's moving average reached {stop.reward:g}"
            return True
        return self.version >= self.plan.total_steps

    async def publish(self) -> None:
        """Publish the weights. Wait until engines have loaded them if they are only lent."""
        # There is one copy, which engines may still be loading, and publications are ordered.
        await self._published.wait()
        snapshot = await self._led.publish(self._publisher)
        if snapshot.state is not None:
            await self._peers.generation.ask(PublishWeights(snapshot=snapshot))
            return
        self._published = anyio.Event()

        async def announce() -> None:
            await self._peers.generation.ask(PublishWeights(snapshot=snapshot))
            self._published.set()

        self._tasks.start_soon(announce)

    async def finish_publication(self) -> None:
        """Wait until engines have the version that was published last."""
        await self._published.wait()

    async def advance_version(self) -> None:
        """Let sessions begin that the new version samples, once engines have it."""
        advanced = VersionAdvanced(version=self.version)
        if self._published.is_set():
            await self._peers.capacity.tell(advanced)
            return

        async def advance() -> None:
            await self._published.wait()
            await self._peers.capacity.tell(advanced)

        self._tasks.start_soon(advance)

    def is_evaluation_due(self, *, is_last: bool) -> bool:
        """Return whether the weights are to be evaluated. The last ones always are."""
        every = self.plan.evaluation.every_steps
        return is_last or (every > 0 and self.version % every == 0)

    async def evaluate_first(self) -> None:
        """Evaluate the weights before the first step, unless the run is resumed."""
        if not self._is_resumed:
            await self._evaluate()

    async def report(
        self, step: StepFinished, batch: Lease, recorder: RowRecorder | None, *, is_evaluated: bool = False
    ) -> None:
        """Report the rows of a step and, with ``is_evaluated`` after an evaluation of its weights, the step itself."""
        if recorder is not None:
            await self._report_rows(batch, recorder)
        if is_evaluated and (found := await self._evaluate()) is not None:
            step = evolve(step, metrics={**step.metrics, "eval_reward": found.reward, **found.logged})
        await self._tell(step)

    async def _report_rows(self, batch: Lease, recorder: RowRecorder) -> None:
        step, every = self.version, self.plan.rows_every_steps
        if batch.id >= 0:  # not a batch to imitate
            tasks = tuple(group.problem.task for group in batch.groups)
            await self._tell(GroupsTrained(step=step, tasks=tasks, advantages=recorder.advantages()))
        if every and step % every == 0:
            await self._tell(RowsTrained(step=step, rows=recorder.rows()))

    async def _evaluate(self) -> EvaluationFinished | None:
        """Return and report the mean reward on the held-out problems. A failed episode counts as 0.

        Returns ``None`` if there are no such problems, or if a stop was requested before they were all run.
        """
        if self._peers.rollouts is None:
            return None
        version, settings, rollouts = self.version, self.plan.evaluation, self._peers.rollouts
        await self._published.wait()
        await self._tell(PhaseChanged(phase="evaluating", detail=f"version {version}"))
        started = anyio.current_time()
        wanted = Evaluate(version=version, num_samples=settings.num_samples)
        groups = await self._unless_stopping(lambda: rollouts.ask(wanted))
        if not groups:
            return None
        seconds = anyio.current_time() - started
        news = describe_evaluation(groups, version=version, seconds=seconds, solved_reward=settings.solved_reward)
        await self._tell(news)
        return news

    async def save(self, *, is_last: bool = False) -> None:
        """Write a checkpoint, or begin to, unless this version has one. The last one is complete at the return."""
        await self._written.wait()
        if self._saved_version == self.version:
            return
        phase = PhaseChanged(phase="saving a checkpoint", detail=f"step {self.version}")
        if self._peers.progress is not None:
            # Asked, not told: the reply means that all earlier news was written.
            await self._peers.progress.ask(phase)
        counters: dict[str, Any] = {"position": asdict(self._position), "average": self._average.state()}
        num_kept = self.plan.checkpoint.keep
        version = self._saved_version = self.version
        if is_last or not self.plan.checkpoint.is_async:
            await self._led.save(self._checkpoints, counters=counters, num_kept=num_kept)
            await self._peers.exports.ask(SaveVersion(version=version))
            return
        write = await self._led.begin_save(self._checkpoints, counters=counters, num_kept=num_kept)
        self._written = anyio.Event()
        self._tasks.start_soon(self._finish_save, write, version)

    async def _finish_save(self, write: Future[Any], version: int) -> None:
        """Wait for a checkpoint. An error ends the run, as that of a write in the foreground."""
        # Not abandoned if this is cancelled: a run that is interrupted ends with the write.
        await to_thread.run_sync(write.result)
        # Only now: what the exporter keeps for a resumed run depends on the checkpoint that it resumes from.
        await self._peers.exports.ask(SaveVersion(version=version))
        self._written.set()

    async def measure_speed(self) -> dict[str, float | int | None]:
        """Return the tokens sampled since the last call, with evaluations, their rate, and the number of engines."""
        view = await self._peers.generation.ask(DescribeEngine())
        now, (then, num_before) = anyio.current_time(), self._measured
        self._measured = (now, view.statistics.sampled_tokens)
        num = view.statistics.sampled_tokens - num_before
        rate = num / (now - then) if now > then else None
        return {"sampled_tokens": num, "tokens_per_second": rate, "engines": view.num_engines}

    async def _tell(self, news: StepFinished | GroupsTrained | RowsTrained | EvaluationFinished | PhaseChanged) -> None:
        if self._peers.progress is not None:
            await self._peers.progress.tell(news)


class _MovingAverage:
    """An exponential moving average without bias towards its initial value."""

    def __init__(self, smoothing: float, *, total: float = 0.0, weight: float = 0.0) -> None:
        self._smoothing = smoothing
        self._total = total
        self._weight = weight

    def update(self, value: float) -> float:
        self._total = self._smoothing * self._total + (1 - self._smoothing) * value
        self._weight = self._smoothing * self._weight + (1 - self._smoothing)
        return self._total / self._weight

    def state(self) -> dict[str, float]:
        return {"total": self._total, "weight": self._weight}
