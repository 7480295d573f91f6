"""Checks before the first step: custom functions, the teacher's tokenizer, and what an engine reports.

Functions and teacher are checked before the run changes anything on disk, the engine before any agent samples.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from anyio import to_thread
from attrs import frozen

from areal_actors.cache.laws import LawReport, find_broken
from areal_actors.cache.rewards import load_rule
from areal_actors.config import RunConfig
from areal_actors.domain import (
    ChatMessage,
    Chunk,
    EngineInfo,
    EngineRequest,
    Floats,
    InteractionId,
    Ints,
    SessionId,
    Trajectory,
    as_floats,
)
from areal_actors.errors import CustomFunctionError
from areal_actors.generation.capture import check_capture
from areal_actors.kernel import Ref
from areal_actors.lib.references import FunctionReference, load_function
from areal_actors.lib.telemetry import get_logger
from areal_actors.messages import DescribeEngine, Generate, Generation
from areal_actors.models import resolve_model, resolve_tokenizer
from areal_actors.rendering import Renderer
from areal_actors.run.conversations import load_vocabulary, require_contained, vocabulary_of
from areal_actors.run.job import load_rendering, open_group_teacher
from areal_actors.training.capture import Comparison
from areal_actors.training.config import Normalisation, Surrogate, TrainerConfig
from areal_actors.training.phases import PhaseName

if TYPE_CHECKING:
    from areal_actors.training.trainer import PolicyTrainer

__all__ = ["TriedFunction", "check_capture_of", "check_teacher", "log_functions", "try_functions"]

_log = get_logger(__name__)

T = TypeVar("T")


# -------------------------------------------------------------------------------------------- custom functions


@frozen(kw_only=True)
class TriedFunction:
    """A custom function that passed its check; ``detail`` is a sentence about it."""

    setting: str
    reference: FunctionReference
    detail: str


def try_functions(config: RunConfig) -> tuple[TriedFunction, ...]:
    """Import each custom function of ``config`` and try it on examples. Blocks for less than a second per function.

    Raises ``CustomFunctionError`` naming the setting, the function and the value that it returned.
    """
    return tuple(_try_all(config))


def _try_all(config: RunConfig) -> Iterator[TriedFunction]:
    setting, reference = "rollout.openai.reward_rule", config.rollout.openai.reward_rule
    rule = _explained(setting, lambda: load_rule(reference))
    # Built-in rules are tested with the library; only custom ones are tried here.
    if not isinstance(rule, str):
        report = _explained(setting, lambda: find_broken(rule))
        yield TriedFunction(setting=setting, reference=reference, detail=_describe(report))
    yield from _try_training(config.trainer)


def _try_training(config: TrainerConfig) -> Iterator[TriedFunction]:
    from areal_actors.training import custom  # imports numpy, and torch once a policy loss is tried

    setting, normalisation = "trainer.advantages.normalisation", config.advantages.normalisation
    if not isinstance(normalisation, Normalisation):
        _explained(setting, lambda: custom.try_estimator(load_function(normalisation)))
        yield TriedFunction(setting=setting, reference=normalisation, detail=_TRIED)
    setting, surrogate = "trainer.objective.surrogate", config.objective.surrogate
    if not isinstance(surrogate, Surrogate):
        _explained(setting, lambda: custom.try_surrogate(custom.load_surrogate(surrogate)))
        yield TriedFunction(setting=setting, reference=surrogate, detail=_TRIED)
    for index, reference in enumerate(config.metrics):
        setting = f"trainer.metrics[{index}]"
        _explained(setting, partial(_try_metric, reference))
        yield TriedFunction(setting=setting, reference=reference, detail=_TRIED)


def _try_metric(reference: FunctionReference) -> None:
    from areal_actors.training.custom import try_metric

    try_metric(load_function(reference))


_TRIED = "works on the examples"


def _explained(setting: str, action: Callable[[], T]) -> T:
    try:
        return action()
    except CustomFunctionError as error:
        raise CustomFunctionError(f"{setting}: {error}") from error


def _describe(report: LawReport) -> str:
    broken = f"does not keep: {', '.join(report.broken)}; " if report.broken else ""
    return f"{broken}keeps {', '.join(report.kept) or 'no law'} ({report.num_trees} trees)"


def log_functions(tried: tuple[TriedFunction, ...]) -> None:
    """Log one line per function."""
    for function in tried:
        _log.info("custom_function", setting=function.setting, function=function.reference, detail=function.detail)


# ---------------------------------------------------------------------------------------------------- teacher


async def check_teacher(config: RunConfig) -> None:
    """Check that the teacher of a distillation phase can be asked, and has the student's tokenizer.

    Raises ``ConfigError`` for another tokenizer, ``ModelError`` for a directory that cannot be read, and
    ``EngineError`` for a server that cannot be reached.
    """
    if PhaseName.DISTILLATION not in config.phases or config.distillation is None:
        return
    teacher = config.distillation.teacher
    if teacher.url is not None:
        renderer = await to_thread.run_sync(load_rendering, config)
        async with open_group_teacher(config, renderer):
            return
    assert teacher.model is not None
    await to_thread.run_sync(_check_directory, config, teacher.model)


def _check_directory(config: RunConfig, model: str) -> None:
    resolve_model(model)
    require_contained(
        vocabulary_of(load_rendering(config)),
        load_vocabulary(resolve_tokenizer(model).path),
        what=f"distillation.teacher.model: {model} has another tokenizer than the student",
    )


# ---------------------------------------------------------------------------------------------------- engine


async def check_capture_of(generation: Ref[Generation], *, policy: PolicyTrainer, renderer: Renderer) -> None:
    """Compare the log-probabilities of a few sampled tokens with those that ``policy`` computes from the same weights.

    Also tells the policy the engine's dtype. Raises ``CaptureViolation`` with the discrepancy. If ``trainer.capture``
    is disabled, only the dtype is passed on.
    """
    view = await generation.ask(DescribeEngine())
    policy.expect_engine(dtype=view.info.dtype)
    if not policy.config.capture.enabled:
        return
    prompt = renderer.render([ChatMessage(role="user", content="Count to three.")])

    async def compare(prompt: Ints, output: Ints, reported: Floats) -> str | None:
        # A forward pass would block the event loop.
        return await to_thread.run_sync(_compare, policy, prompt, output, reported)

    engine = _EngineOfActor(generation, view.info)
    await check_capture(engine, prompt=prompt, version=policy.version, compare=compare)


@frozen
class _EngineOfActor:
    """An engine reached through its generation actor."""

    generation: Ref[Generation]
    info: EngineInfo

    def generate(self, request: EngineRequest) -> AbstractAsyncContextManager[AsyncIterator[Chunk]]:
        """Stream the generation from the actor."""
        return self.generation.stream(Generate(request=request))


def _compare(policy: PolicyTrainer, prompt: Ints, output: Ints, reported: Floats) -> str | None:
    recomputed = _recompute(policy, prompt, output)
    row = Comparison(reported=reported, recomputed=recomputed)
    (excess,) = policy.gate.excesses([row])
    if excess <= 1:
        return None
    return (
        f"its log-probabilities are off by {row.mean_gap:.3g} per token from what the trainer computes for the same "
        f"tokens, and {row.mean_gap / excess:.2g} are allowed. {policy.gate.explain([row])}"
    )


def _recompute(policy: PolicyTrainer, prompt: Ints, output: Ints) -> Floats:
    is_output = np.arange(len(prompt) + len(output)) >= len(prompt)
    row = Trajectory(
        session=SessionId("self-test"),
        interactions=(InteractionId("self-test"),),
        input_ids=np.concatenate([prompt, output]),
        loss_mask=is_output,
        logprobs=np.zeros(len(is_output)),
        # -1 marks prompt tokens, which no version of the policy has sampled.
        versions=np.where(is_output, policy.version, -1),
        returns=np.zeros(len(is_output)),
        turns=np.where(is_output, 0, -1),
        reward=0.0,
    )
    (found,) = policy.logprobs([row], is_raw=True)
    return as_floats(found[len(prompt) :])
