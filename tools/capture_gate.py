"""How often the capture gate stops honest runs, and which faults it stops: ``python -m tools.capture_gate``.

Each run is a real engine and a real trainer of one model, several steps: sample, train, load the new weights. The jobs
are the ``tiny`` model with its logits scaled, which sets the entropy. A seed draws weights, prompts and rewards.
"""

from __future__ import annotations

import copy
import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import anyio
import click
import numpy as np
import torch
from attrs import asdict, frozen

from areal_actors.domain import (
    EngineRequest,
    Episode,
    Group,
    GroupId,
    InteractionId,
    Problem,
    SampleKey,
    Sampling,
    SessionId,
    Snapshot,
    Trajectory,
)
from areal_actors.errors import CaptureViolation
from areal_actors.generation.torch import TorchEngine, TorchEngineConfig
from areal_actors.lib.telemetry import quiet_transformers
from areal_actors.models import resolve_model
from areal_actors.training.config import OptimizerConfig, TrainerConfig
from areal_actors.training.trainer import PolicyTrainer
from areal_actors_testing.faults import Fault, FaultyEngine

__all__ = ["DTYPES", "FAULTS", "JOBS", "Run", "perform", "perform_all"]

JOBS = {"entropy 5.9": 0.3, "entropy 4": 2.8, "entropy 2": 4.0, "entropy 0.5": 8.0, "entropy 0.1": 20.0}
"""Factors of the logits. The first job has nearly uniform weights: faults make small differences there."""
CONVERGED = "entropy 0.05"
"""Members of a group answer alike, as those of a policy that has converged. In float32 only: between logits this large,
neighbouring numbers of bfloat16 are up to a nat apart, and no model is trained there."""
JOBS[CONVERGED] = 80.0
DTYPES = ("float32", "bfloat16")
FAULTS = (
    Fault.DROPPED_TOKEN,
    Fault.DUPLICATED_TOKEN,
    Fault.SHIFTED_LOGPROBS,
    Fault.ZERO_LOGPROBS,
    Fault.NAN_LOGPROB,
    Fault.RETOKENISED_IDS,
    Fault.WRONG_VERSION,
)
_OLD_TOLERANCES = {"float32": 1e-3, "bfloat16": 0.1}
"""The fixed bounds on a row's mean difference that the gate had before, for comparison."""
_NUM_GROUPS, _NUM_MEMBERS, _NUM_TOKENS = 2, 4, 12
_NUM_ALIKE = 12
"""Members of a group of the converged job."""


@frozen(kw_only=True)
class Run:
    """One run: the entropy of its first step, the step that the gate refused and why, and what a fixed bound said."""

    job: str
    dtype: str
    seed: int
    fault: str | None
    entropy: float
    mean_gap: float
    stopped_at: int | None
    kind: str | None
    is_stopped_by_fixed_bound: bool


@cache
def _load() -> Any:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = resolve_model("tiny").path
    with quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(path)


def _create_model(factor: float, seed: int) -> Any:
    """The tiny model, its weights shuffled by ``seed``, its logits multiplied by ``factor``."""
    model = copy.deepcopy(_load()[0])
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weights in model.parameters():
            if weights.dim() > 1:
                weights.copy_(weights.flatten()[torch.randperm(weights.numel(), generator=generator)].view_as(weights))
        model.get_decoder().norm.weight.mul_(factor)
    return model


async def _sample(engine: Any, prompt: np.ndarray, member: int, seed: int) -> Trajectory:
    """A row of one answer."""
    request = EngineRequest(
        id=f"{seed}-{member}-{prompt[:4]}",
        prompt=prompt,
        sampling=Sampling(max_new_tokens=_NUM_TOKENS),
        key=SampleKey(seed=seed, path=(str(member), str(engine.version))),
    )
    async with engine.generate(request) as stream:
        chunks = [chunk async for chunk in stream]
    ids, raw = (np.concatenate([getattr(chunk, name) for chunk in chunks]) for name in ("token_ids", "raw_logprobs"))
    versions = np.concatenate([np.full(len(chunk.token_ids), chunk.version) for chunk in chunks])
    before = np.zeros(len(prompt))
    reward = float((seed + member + int(ids.sum())) % 3)
    mask = np.concatenate([before, np.ones(len(ids))])
    return Trajectory(
        session=SessionId(f"{request.id}"),
        interactions=(InteractionId(f"{request.id}"),),
        input_ids=np.concatenate([prompt, ids]),
        loss_mask=mask,
        logprobs=np.concatenate([before, raw]),
        raw_logprobs=np.concatenate([before, raw]),
        versions=np.concatenate([before - 1, versions]),
        returns=mask * reward,
        turns=mask - 1,
        reward=reward,
    )


async def _sample_step(engine: Any, seed: int, num_members: int) -> list[Group]:
    rng = np.random.default_rng((seed, engine.version))
    groups = []
    for number in range(_NUM_GROUPS):
        prompt = rng.integers(3, 380, int(rng.integers(6, 24)))
        rows: list[Any] = [None] * num_members

        async def fill(member: int, prompt: np.ndarray = prompt, rows: list[Any] = rows) -> None:
            rows[member] = await _sample(engine, prompt, member, seed)

        async with anyio.create_task_group() as tasks:
            for member in range(num_members):
                tasks.start_soon(fill, member)
        episodes = tuple(
            Episode(session=row.session, member=member, reward=row.reward, trajectories=(row,), num_turns=1)
            for member, row in enumerate(rows)
        )
        groups.append(Group(id=GroupId(f"g{number}"), problem=Problem(position=number, data={}), episodes=episodes))
    return groups


def _retokenise(ids: Sequence[int]) -> list[int]:
    tokenizer = _load()[1]
    return tokenizer.encode(tokenizer.decode(ids), add_special_tokens=False) or [5]


async def perform(job: str, dtype: str, *, seed: int, fault: Fault | None = None, num_steps: int = 3) -> Run:
    """Train ``num_steps`` steps, with a ``fault`` in every answer if there is one."""
    model = _create_model(JOBS[job], seed)
    config = TorchEngineConfig(dtype=dtype, device="cpu", max_concurrent=_NUM_ALIKE, max_length=64)  # type: ignore[arg-type]
    optimizer = OptimizerConfig(learning_rate=1e-4, num_warmup_steps=0)
    trainer = PolicyTrainer(model, TrainerConfig(dtype=dtype, device="cpu", optimizer=optimizer))  # type: ignore[arg-type]
    trainer.expect_engine(dtype=dtype)
    entropy, gaps, is_stopped_before = float("nan"), [], False
    stopped_at, kind = None, None
    async with TorchEngine.open(config, model=copy.deepcopy(model)) as engine:
        spoilt = FaultyEngine(engine, fault, seed=seed, retokenise=_retokenise) if fault else engine
        for step in range(1, num_steps + 1):
            groups = await _sample_step(spoilt, seed, _NUM_ALIKE if job == CONVERGED else _NUM_MEMBERS)
            rows = [row for group in groups for episode in group.episodes for row in episode.trajectories]
            row_gaps = [_mean_gap(trainer, row) for row in rows]
            gaps += row_gaps
            is_stopped_before |= bool(np.mean([not gap <= _OLD_TOLERANCES[dtype] for gap in row_gaps]) > 0.1)
            try:
                statistics = trainer.train_step(groups)
            except CaptureViolation as violation:
                stopped_at, kind = step, str(violation.kind)
                break
            entropy = statistics.entropy if step == 1 else entropy
            await engine.load(Snapshot(version=trainer.version, state=trainer.state_dict()))
    return Run(
        job=job,
        dtype=dtype,
        seed=seed,
        fault=None if fault is None else str(fault),
        entropy=float(entropy),
        mean_gap=float(np.nan_to_num(np.mean(gaps), nan=-1.0)),
        stopped_at=stopped_at,
        kind=kind,
        is_stopped_by_fixed_bound=is_stopped_before or kind in {"impossible_logprobs", "wrong_version"},
    )


def _mean_gap(trainer: PolicyTrainer, row: Trajectory) -> float:
    assert row.raw_logprobs is not None
    if not np.isfinite(row.raw_logprobs).all():
        return float("nan")
    (found,) = trainer.logprobs([row], is_raw=True)
    return float(np.abs(found - row.raw_logprobs)[row.loss_mask == 1].mean())


def perform_all(num_runs: int, num_faulty: int, jobs: Sequence[str] = tuple(JOBS)) -> Iterator[Run]:
    """``num_runs`` honest runs of each of ``jobs`` and data type, and ``num_faulty`` of each with each fault."""
    cases = [(None, num_runs), *((fault, num_faulty) for fault in FAULTS)]
    for fault, number in cases:
        for job in jobs:
            for dtype in DTYPES[:1] if job == CONVERGED else DTYPES:
                for seed in range(number):
                    yield anyio.run(lambda j=job, d=dtype, s=seed, f=fault: perform(j, d, seed=s, fault=f))


@click.command(help=(__doc__ or "").partition("\n\n")[2])
@click.option("--runs", default=100, show_default=True, help="Honest runs of each job and data type.")
@click.option("--faulty", default=5, show_default=True, help="Runs of each job and data type with each fault.")
@click.option("--job", "jobs", multiple=True, type=click.Choice(list(JOBS)), help="Only these jobs; all by default.")
@click.option("--json", "path", type=click.Path(dir_okay=False, path_type=Path), help="Where every run is written.")
def main(runs: int, faulty: int, jobs: Sequence[str], path: Path | None) -> None:
    """Print counts by job, data type and fault."""
    torch.set_num_threads(1)
    started = time.monotonic()
    done = list(perform_all(runs, faulty, jobs or tuple(JOBS)))
    if path is not None:
        path.write_text(json.dumps([asdict(run) for run in done], indent=1) + "\n", encoding="utf-8")
    print(f"{'job':12} {'dtype':9} {'fault':18} {'runs':>4} {'stopped':>7} {'fixed bound':>11}  mean gap  kinds")
    for job, dtype, fault in dict.fromkeys((run.job, run.dtype, run.fault) for run in done):
        chosen = [run for run in done if (run.job, run.dtype, run.fault) == (job, dtype, fault)]
        stopped = [run for run in chosen if run.stopped_at is not None]
        kinds = Counter(run.kind for run in stopped)
        gap = np.mean([run.mean_gap for run in chosen])
        print(
            f"{job:12} {dtype:9} {fault or '-':18} {len(chosen):4} {len(stopped):7} "
            f"{sum(run.is_stopped_by_fixed_bound for run in chosen):11}  {gap:8.2g}  "
            + "; ".join(f"{number} {kind}" for kind, number in kinds.most_common(2))
        )
    alarms = sum(run.stopped_at is not None for run in done if run.fault is None)
    missed = sum(run.stopped_at != 1 for run in done if run.fault is not None)
    print(
        f"{alarms} false alarms, {missed} faults that did not stop the first step, {time.monotonic() - started:.0f} s"
    )
    raise SystemExit(bool(alarms or missed))


if __name__ == "__main__":
    main()
