"""Checks before the first step: custom functions, the teacher's tokenizer, and what an engine reports.

Functions and teacher are checked before the run changes anything on disk, the engine before any agent samples.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from os import PathLike
from typing import TYPE_CHECKING

import numpy as np
from anyio import to_thread
from attrs import frozen

from areal_actors.cache.export import experts_of
from areal_actors.cache.rewards import load_rule, try_rule
from areal_actors.config import RunConfig
from areal_actors.domain import (
    ChatMessage,
    Chunk,
    Completion,
    EngineInfo,
    EngineRequest,
    InteractionId,
    Ints,
    SessionId,
    Trajectory,
    as_floats,
)
from areal_actors.errors import ConfigError, CustomFunctionError
from areal_actors.generation.capture import check_capture
from areal_actors.kernel import Ref
from areal_actors.lib.openmp import settle_team
from areal_actors.lib.references import FunctionReference, load_function
from areal_actors.lib.telemetry import get_logger
from areal_actors.messages import DescribeEngine, Generate, Generation
from areal_actors.models import resolve_model, resolve_tokenizer
from areal_actors.rendering import Renderer
from areal_actors.run.conversations import load_vocabulary, require_contained, vocabulary_of
from areal_actors.run.job import load_rendering, open_group_teacher
from areal_actors.training.config import Normalisation, Surrogate
from areal_actors.training.phases import PhaseName

if TYPE_CHECKING:
    from areal_actors.training.trainer import PolicyTrainer

_log = get_logger(__name__)


def require_config(config: object) -> RunConfig:
    """Return ``config``. Raises ``ConfigError`` for anything else, such as the path of its file."""
    if isinstance(config, RunConfig):
        return config
    hint = (
        f"load_config({str(config)!r}) reads a file"
        if isinstance(config, str | PathLike)
        else "create_config(...) makes one"
    )
    raise ConfigError(f"A run takes a RunConfig, not {type(config).__name__}; {hint}.")


# -------------------------------------------------------------------------------------------- custom functions


@frozen(kw_only=True)
class TriedFunction:
    """A custom function that passed its check; ``detail`` is a sentence about it."""

    setting: str
    reference: FunctionReference
    detail: str


def try_functions(config: RunConfig) -> tuple[TriedFunction, ...]:
    """Import each custom function of ``config`` and try it on examples. Blocks for less than a second per function.

    Raises ``ConfigError`` naming the setting, the function and the value that it returned.
    """
    # Imported here: it needs numpy, and torch once a policy loss is tried.
    from areal_actors.training import custom

    tried: list[TriedFunction] = []

    def note(setting: str, reference: FunctionReference, detail: str = "works on the examples") -> None:
        tried.append(TriedFunction(setting=setting, reference=reference, detail=detail))

    setting, reference = "rollout.openai.reward_rule", config.rollout.openai.reward_rule
    with _naming(setting):
        rule = load_rule(reference)
        # Built-in rules are tested with the library; only custom ones are tried here.
        if not isinstance(rule, str):
            try_rule(rule)
            note(setting, reference)
    setting, normalisation = "trainer.advantages.normalisation", config.trainer.advantages.normalisation
    if not isinstance(normalisation, Normalisation):
        with _naming(setting):
            custom.try_estimator(load_function(normalisation))
        note(setting, normalisation)
    setting, surrogate = "trainer.objective.surrogate", config.trainer.objective.surrogate
    if not isinstance(surrogate, Surrogate):
        with _naming(setting):
            custom.try_surrogate(custom.CustomSurrogate(function=load_function(surrogate)))
        note(setting, surrogate)
    for index, metric in enumerate(config.trainer.metrics):
        with _naming(f"trainer.metrics[{index}]"):
            custom.try_metric(load_function(metric))
        note(f"trainer.metrics[{index}]", metric)
    return tuple(tried)


@contextmanager
def _naming(setting: str) -> Iterator[None]:
    """Name ``setting`` in the error of its function, which is one of the configuration: no restart helps."""
    try:
        yield
    except CustomFunctionError as error:
        raise ConfigError(f"{setting}: {error}") from error


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
    # In a thread: reading two tokenizers takes seconds.
    await to_thread.run_sync(resolve_model, teacher.model)
    renderer = await to_thread.run_sync(load_rendering, config)
    files = await to_thread.run_sync(resolve_tokenizer, teacher.model)
    require_contained(
        vocabulary_of(renderer),
        await to_thread.run_sync(load_vocabulary, files.path),
        what=f"distillation.teacher.model: {teacher.model} has another tokenizer than the student",
    )


# ---------------------------------------------------------------------------------------------------- engine

_PROMPT = ChatMessage(role="user", content="Count to three.")
"""About the shortest conversation that an agent has."""


def require_context(renderer: Renderer, max_tokens: int) -> None:
    """Raise ``ConfigError`` if ``max_tokens`` hold no conversation."""
    needed = len(renderer.render([_PROMPT])) + 1
    if needed > max_tokens:
        raise ConfigError(
            f"engine.max_length: {max_tokens} tokens for prompt and answer; {_PROMPT.content!r} with its answer takes "
            f"{needed} at least. Raise it to what your conversations need."
        )


async def check_capture_of(generation: Ref[Generation], *, policy: PolicyTrainer, renderer: Renderer) -> None:
    """Compare the log-probabilities of a few sampled tokens with those that ``policy`` computes from the same weights.

    Also tells the policy the engine's dtype. Raises ``CaptureViolation`` with the discrepancy. If ``trainer.capture``
    is disabled, only the dtype is passed on.
    """
    view = await generation.ask(DescribeEngine())
    policy.expect_engine(dtype=view.info.dtype)
    if not policy.config.capture.enabled:
        return
    require_context(renderer, view.info.context_length)
    prompt = renderer.render([_PROMPT])

    async def compare(prompt: Ints, sampled: Completion) -> str | None:
        # A forward pass would block the event loop.
        return await to_thread.run_sync(_compare, policy, prompt, sampled)

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


def _compare(policy: PolicyTrainer, prompt: Ints, sampled: Completion) -> str | None:
    """Return how the engine's log-probabilities differ from the policy's, or ``None`` if they do not. Blocks."""
    places = np.arange(len(prompt) + len(sampled.token_ids))
    is_output = places >= len(prompt)
    row = Trajectory(
        session=SessionId("self-test"),
        interactions=(InteractionId("self-test"),),
        input_ids=np.concatenate([prompt, sampled.token_ids]),
        loss_mask=is_output,
        logprobs=np.zeros(len(is_output)),
        # -1 marks prompt tokens, which no version of the policy has sampled.
        versions=np.where(is_output, policy.version, -1),
        returns=np.zeros(len(is_output)),
        turns=np.where(is_output, 0, -1),
        reward=0.0,
        # Replayed as in a step: in bfloat16, a router may choose other experts than the engine's did.
        routed_experts=experts_of([sampled], [places], len(places)),
    )
    (found,) = policy.logprobs([row], is_raw=True)
    settle_team()
    from areal_actors.training.capture import Comparison

    compared = Comparison(reported=sampled.raw_logprobs, recomputed=as_floats(found[len(prompt) :]))
    (excess,) = policy.gate.excesses([compared])
    if excess <= 1:
        return None
    gap = compared.mean_gap
    return (
        f"its log-probabilities are off by {gap:.3g} per token from what the trainer computes for the same "
        f"tokens, and {gap / excess:.2g} are allowed. {policy.gate.explain()}"
    )
