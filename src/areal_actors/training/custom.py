"""Custom functions of a training step: advantages, policy losses and metrics, with checks of everything they return.

Each is named in the configuration (``references``), tried on ``example_groups`` before a run starts, and checked again
on the data of every step, before the step changes the weights. torch is imported only when a policy loss is tried.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence, Sized
from numbers import Real
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
from attrs import field, frozen

from areal_actors.domain import Episode, Group, GroupId, InteractionId, Problem, SessionId, Trajectory, as_floats
from areal_actors.lib.references import CustomFunction, load_function, shorten
from areal_actors.training.advantages import GroupAdvantages, compute_advantages, has_zero_variance
from areal_actors.training.config import AdvantageConfig, Normalisation

if TYPE_CHECKING:
    from torch import Tensor

    from areal_actors.training.batch import TrainingRow
    from areal_actors.training.surrogates import LossInputs, PolicyLoss

_MAX_METRICS = 64
_METRIC_NAME = re.compile(r"[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)*")


# ------------------------------------------------------------------------------------------------- advantages


class AdvantageEstimator(Protocol):
    """Computes the advantages of the rows of a step from its groups. A pure function."""

    def __call__(self, groups: Sequence[Group], /) -> Sequence[Sequence[npt.ArrayLike]]:
        """Return for each group, for each of its ``rows`` of T tokens: T numbers, or one number for all tokens.

        Values outside the row's ``loss_mask`` are ignored.
        """
        ...


def load_estimator(config: AdvantageConfig) -> CustomFunction | None:
    """Return the custom estimator that ``normalisation`` names, ``None`` if it names a built-in one."""
    return None if isinstance(config.normalisation, Normalisation) else load_function(config.normalisation)


def estimate_advantages(
    groups: Sequence[Group], config: AdvantageConfig, custom: CustomFunction | None
) -> tuple[GroupAdvantages, ...]:
    """Return the advantages by ``custom``, or by ``compute_advantages`` if it is ``None``.

    Raises ``CustomFunctionError`` if ``custom`` fails or returns something else than finite numbers for each row.
    """
    if custom is None:
        return compute_advantages(groups, config)
    found = custom(tuple(groups))
    _require_length(custom, found, len(groups), "groups of the step")
    return tuple(
        GroupAdvantages(
            rows=tuple(_checked_rows(custom, group, rows)), has_zero_variance=has_zero_variance(group, config)
        )
        for group, rows in zip(groups, found, strict=True)
    )


def _checked_rows(custom: CustomFunction, group: Group, found: Any) -> Iterator[npt.NDArray[np.float32]]:
    _require_length(custom, found, len(group.rows), f"rows of group {group.id}")
    for row, values in zip(group.rows, found, strict=True):
        try:
            advantages = np.broadcast_to(np.asarray(values, dtype=np.float64), (row.num_tokens,))
        except (TypeError, ValueError):
            wanted = f"give one number for each of its {row.num_tokens} tokens, or one for all"
            shape = f"shape {np.shape(values)}, " if isinstance(values, np.ndarray | list | tuple) else ""
            raise custom.complaint(
                f"returned {shape}{shorten(values)} for a row of session {row.session}; {wanted}."
            ) from None
        masked = np.where(row.loss_mask == 1, advantages, 0.0)
        # Overflow gives inf, which is reported below with its token.
        with np.errstate(over="ignore"):
            result = masked.astype(np.float32)
        if not np.isfinite(result).all():
            bad = int(np.flatnonzero(~np.isfinite(result))[0])
            raise custom.complaint(
                f"returned {masked[bad]} for token {bad} of a row of session {row.session}; advantages are finite."
            )
        yield as_floats(result)


def _require_length(custom: CustomFunction, found: Any, size: int, what: str) -> None:
    if not isinstance(found, Sized) or isinstance(found, str | bytes | Mapping):
        raise custom.complaint(
            f"returned {shorten(found)} of type {type(found).__name__}; give a list with an entry for each of the "
            f"{size} {what}."
        )
    if len(found) != size:
        raise custom.complaint(f"returned {len(found)} entries for the {size} {what}; give one for each.")


def try_estimator(custom: CustomFunction) -> None:
    """Call it with ``example_groups``. Raises ``CustomFunctionError``."""
    estimate_advantages(example_groups(), AdvantageConfig(), custom)


# ------------------------------------------------------------------------------------------------ policy loss


@frozen(kw_only=True)
class CustomSurrogate:
    """A custom policy loss; see ``surrogates.SurrogateLoss``. It may return the losses alone."""

    function: CustomFunction

    def __call__(self, logprobs: Tensor, inputs: LossInputs) -> PolicyLoss:
        """Return the losses of the tokens. Raises ``CustomFunctionError`` unless there is one finite loss for each."""
        import torch

        from areal_actors.training.surrogates import PolicyLoss

        own = (inputs.advantages, inputs.weights, inputs.behaviour, inputs.proximal, inputs.reference, inputs.rows)
        given = [logprobs, *(value for value in own if value is not None)]
        # The statistics of the step read the same tensors after the loss.
        before = [_num_changes(tensor) for tensor in given]
        found = self.function(logprobs, inputs)
        if before != [_num_changes(tensor) for tensor in given]:
            raise self.function.complaint("changed a tensor that it was given; it must not work in place.")
        if isinstance(found, torch.Tensor):
            found = PolicyLoss(losses=found, is_clipped=torch.zeros_like(found, dtype=torch.bool))
        if not isinstance(found, PolicyLoss):
            raise self.function.complaint(
                f"returned {shorten(found)} of type {type(found).__name__}; give a tensor of losses, or a PolicyLoss."
            )
        for name, tensor in (("losses", found.losses), ("is_clipped", found.is_clipped)):
            if tensor.shape != logprobs.shape:
                raise self.function.complaint(
                    f"returned {name} of shape {tuple(tensor.shape)}; give one for each of the {len(logprobs)} tokens."
                )
        if logprobs.requires_grad and not found.losses.requires_grad:
            raise self.function.complaint("returned losses without a gradient; compute them from logprobs.")
        if not bool(torch.isfinite(found.losses).all()):
            bad = int((~torch.isfinite(found.losses)).nonzero()[0])
            loss, logprob = float(found.losses.detach()[bad]), float(logprobs.detach()[bad])
            raise self.function.complaint(
                f"returned {loss} for a token with the log-probability {logprob:.4g} and the advantage "
                f"{float(inputs.advantages[bad]):.4g}; losses are finite."
            )
        return found


def try_surrogate(surrogate: CustomSurrogate) -> None:
    """Call it with tokens of two rows, on-policy and off, and with a row of one token.

    Raises ``CustomFunctionError``.
    """
    import torch

    from areal_actors.training.surrogates import LossInputs

    for rows in ([0, 0, 0, 1, 1], [0]):
        size = len(rows)
        behaviour = torch.tensor([-0.1, -1.0, -3.0, -0.5, -12.0])[:size]
        logprobs = (behaviour + torch.tensor([0.0, 0.3, -0.2, 1e-3, 5.0])[:size]).requires_grad_()
        inputs = LossInputs(
            advantages=torch.tensor([1.0, -1.0, 0.0, 2.0, -0.5])[:size],
            weights=torch.full((size,), 1 / size),
            behaviour=behaviour,
            proximal=logprobs.detach().clone(),
            rows=torch.tensor(rows),
            num_rows=max(rows) + 1,
        )
        found = surrogate(logprobs, inputs)
        (gradient,) = torch.autograd.grad(found.losses.sum(), logprobs, allow_unused=True)
        if gradient is None or not bool(torch.isfinite(gradient).all()):
            shown = None if gradient is None else gradient.tolist()
            raise surrogate.function.complaint(f"returned losses with the gradient {shown} on an example.")


def _num_changes(tensor: Tensor) -> int:
    """Return how often the tensor was changed in place, which torch counts for autograd."""
    return tensor._version  # noqa: SLF001 - the counter has no public name


# ---------------------------------------------------------------------------------------------------- metrics


@frozen(kw_only=True)
class StepInputs:
    """The inputs of a step, before it changes the weights of ``version``.

    ``groups`` are those that were rolled out, with the rewards of their agents. ``rows`` are the trained rows with
    their advantages; ``episode`` and ``group`` of a row are indices into the successful episodes and the groups.
    """

    version: int
    groups: tuple[Group, ...] = field(repr=False)
    rows: tuple[TrainingRow, ...] = field(repr=False)


class Metric(Protocol):
    """Computes named numbers from the inputs of a step."""

    def __call__(self, step: StepInputs, /) -> Mapping[str, float]:
        """Return finite numbers by name, which appear in the metrics as ``custom/<name>``.

        A name may be missing in a step.
        """
        ...


def measure(metrics: Sequence[CustomFunction], step: StepInputs) -> dict[str, float]:
    """Return the numbers of all ``metrics``. Raises ``CustomFunctionError`` for one that returns anything else."""
    result: dict[str, float] = {}
    for metric in metrics:
        found = metric(step)
        if not isinstance(found, Mapping):
            raise metric.complaint(
                f"returned {shorten(found)} of type {type(found).__name__} in step {step.version + 1}; "
                "give a mapping from names to numbers."
            )
        if len(found) > _MAX_METRICS:
            raise metric.complaint(f"returned {len(found)} numbers; give at most {_MAX_METRICS}.")
        for name, value in found.items():
            if not (isinstance(name, str) and _METRIC_NAME.fullmatch(name)):
                raise metric.complaint(f"returned a number named {name!r}; a name has letters, digits and '_.-/' only.")
            if not (isinstance(value, Real) and math.isfinite(float(value))):
                raise metric.complaint(
                    f"returned {shorten(value)} for {name!r} in step {step.version + 1}; give a finite number, or "
                    "leave the name out."
                )
            if name in result:
                raise metric.complaint(f"returned {name!r}, which another metric has returned; choose another name.")
            result[name] = float(value)
    return result


def try_metric(metric: CustomFunction) -> None:
    """Call it with a step of ``example_groups``. Raises ``CustomFunctionError``."""
    from areal_actors.training.batch import TrainingRow

    groups = example_groups()
    rows = [
        TrainingRow(trajectory=row, advantages=as_floats(row.loss_mask * 0.5), group=index)
        for index, group in enumerate(groups)
        for row in group.rows
    ]
    measure([metric], StepInputs(version=0, groups=groups, rows=tuple(rows)))


# --------------------------------------------------------------------------------------------------- examples


def example_groups() -> tuple[Group, ...]:
    """Return small groups of every kind that a step may have.

    Four single answers with different rewards; a chain of two turns in a row next to a failed episode; a branch (two
    rows) and two roots (two rows) with equal rewards; a group of one episode.
    """
    single = [_episode("single", member, float(member % 3), [[2]]) for member in range(4)]
    failed = Episode(session=SessionId("example-chain-1"), member=1, failure="an example of a failed episode")
    chain = [_episode("chain", 0, 1.0, [[2, 3]]), failed, _episode("chain", 2, -1.0, [[1, 1]])]
    forest = [_episode("branch", 0, 1.0, [[2], [3]]), _episode("roots", 1, 1.0, [[1], [4]])]
    alone = [_episode("alone", 0, 0.5, [[5]])]
    return tuple(
        Group(
            id=GroupId(f"example-{position}"),
            problem=Problem(position=position, data={"question": "example"}),
            episodes=tuple(episodes),
        )
        for position, episodes in enumerate((single, chain, forest, alone))
    )


def _episode(kind: str, member: int, reward: float, rows: Sequence[Sequence[int]]) -> Episode:
    """Return an episode whose rows have turns with these numbers of sampled tokens, each after two prompt tokens."""
    session = SessionId(f"example-{kind}-{member}")
    made = []
    for index, lengths in enumerate(rows):
        parts = [part for turn, length in enumerate(lengths) for part in ([-1, -1], [turn] * length)]
        turns = np.concatenate([np.asarray(part, dtype=np.int32) for part in parts])
        mask = (turns >= 0).astype(np.int32)
        made.append(
            Trajectory(
                session=session,
                interactions=tuple(InteractionId(f"{session}-{index}-{turn}") for turn in range(len(lengths))),
                input_ids=np.arange(len(mask)),
                loss_mask=mask,
                logprobs=-0.5 * mask,
                versions=np.where(mask == 1, 0, -1),
                returns=reward * mask,
                turns=turns,
                reward=reward,
            )
        )
    return Episode(
        session=session,
        member=member,
        reward=reward,
        trajectories=tuple(made),
        num_turns=sum(map(len, rows)),
        seconds=1.0,
    )
