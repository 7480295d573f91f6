"""The training loop: lease, step, publish, report and evaluate, checkpoint.

::

    LeaseGroups ─▶ train_step (thread) ─▶ PublishWeights ─▶ AcknowledgeLease ─▶ VersionAdvanced
                                                                 │
                        checkpoint, if due ◀─ StepFinished ◀─ Evaluate, if due

Every run executes this function, whether its roles share a process or are placed on a cluster: the trainer's actor
calls it, and each operation is a method of that actor (``training.actor``). To try another order of a step, copy the
function, and pass yours to ``TrainerActor`` in ``openers``.

Agents keep running throughout. ``batch.max_staleness`` limits how old a group may be.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from anyio import current_time

from areal_actors.messages import StepFinished
from areal_actors.training.metrics import mean_reward, step_metrics, supervised_metrics

if TYPE_CHECKING:
    # torch takes seconds to import, and the controller of placed roles does not need it.
    from areal_actors.training.actor import TrainerActor


async def train(trainer: TrainerActor) -> bool:
    """Train until the plan is carried out or a stop is requested; return whether the plan is carried out.

    ``trainer.version`` is the number of steps that the weights have had, which a resumed run continues from.
    """
    plan = trainer.plan
    await trainer.join_gang()
    await trainer.publish()
    await trainer.finish_publication()
    await trainer.measure_speed()
    await trainer.evaluate_first()

    is_finished = trainer.version >= plan.total_steps
    while not is_finished and not trainer.is_stopping:
        is_warm = trainer.version < plan.num_warm_steps
        started = current_time()

        # Lease. The exporter keeps the groups until they are acknowledged: a trainer that dies loses none.
        batch = trainer.take_conversations() if is_warm else await trainer.lease()
        if batch is None:  # a stop was requested while groups were awaited
            break
        batch = await trainer.add_teacher_scores(batch)
        leased = current_time()

        # Step. Rows, loss, gradients and the optimiser, on a thread and on all ranks: the version advances by one.
        statistics, rows = await trainer.step(batch)
        is_last_warm = is_warm and trainer.version == plan.num_warm_steps

        # Publish. The speed first: engines may not answer while they load.
        speed = await trainer.measure_speed()
        # Nothing samples between two warm steps, unless they are evaluated.
        if not is_warm or is_last_warm or trainer.is_evaluation_due(is_last=False):
            await trainer.publish()
        trained = current_time()

        # Acknowledge. Only now: until the step is complete, a resumed run has to be given the same groups.
        if not is_warm:
            await trainer.acknowledge(batch)
        await trainer.advance_version()

        # Report and evaluate.
        reward = None if is_warm else mean_reward(statistics, batch)
        is_finished = trainer.is_finished(reward)
        metrics = supervised_metrics(statistics, batch) if is_warm else step_metrics(statistics, batch)
        metrics |= {"reward": reward, "rollout_seconds": leased - started, "train_seconds": trained - leased}
        metrics |= speed | {"eval_reward": None}
        step = StepFinished(step=trainer.version, phase=trainer.phase, metrics=metrics)
        is_evaluated = is_last_warm or trainer.is_evaluation_due(is_last=is_finished)
        await trainer.report(step, batch, rows, is_evaluated=is_evaluated)

        # Checkpoint. After the report, since a resumed run does not report its last step again.
        if trainer.version % plan.checkpoint.every_steps == 0:
            await trainer.save()

    await trainer.save(is_last=True)
    await trainer.finish_publication()
    return is_finished
