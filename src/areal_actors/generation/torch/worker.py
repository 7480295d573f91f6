"""The engine's thread and its steps: it owns the model, keys and values and every generation.

Each turn of its loop takes the commands that arrived, admits what fits, launches one step (decoding rows and a bounded
part of prompts), and reports everything to the event loop in one call. It never waits for a consumer. On a GPU, the
results of a step are read after the next one has been launched, so the device computes while tokens are delivered.
If it fails, ``report`` receives the reason once, and every waiting task gets an error.

A ``Runner`` computes the steps. ``StepRunner`` does it for the lean path; ``runners`` has the one of all other models,
``graphs`` the one that replays CUDA graphs of Llama-like models, and the choice between them.
"""

from __future__ import annotations

import heapq
import queue
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Protocol

import anyio
import numpy as np
import torch
from attrs import define, evolve, field, frozen

from areal_actors.domain import Chunk, EngineStatistics, FinishReason, PauseMode, Snapshot
from areal_actors.errors import ArealError, EngineError, ModelError, UnsupportedParameter
from areal_actors.generation.torch.attention import (
    DecodeLayout,
    KeyValues,
    SharingPlan,
    Span,
    StepAttention,
    plan_alone,
    plan_sharing,
)
from areal_actors.generation.torch.config import TorchEngineConfig
from areal_actors.generation.torch.forward import FlatBatch, Forward, LlamaForward, load_snapshot
from areal_actors.generation.torch.sampler import RowSampling, Sample, start_sampling
from areal_actors.generation.torch.scheduler import Admission, Generation, Prefill, Scheduler, Tokens
from areal_actors.lib.openmp import settle_team

CPU_PREFILL_CHUNK = 512
"""Prompt tokens between two decode steps. Products of 512 columns run a tenth faster than those of 256."""
CUDA_PREFILL_CHUNK = 8192
"""A GPU needs some thousand tokens to be busy for as long as the host takes to launch the kernels of a chunk."""

SECONDS_PER_STREAM = 2e-4
MAX_DELAY_SECONDS = 0.06
"""Tokens are delivered at most once in this time per running generation, and in this time at all. A delivery costs the
event loop some 30 µs for each stream, so that a token of each of 256 streams takes as long as computing it on a GPU."""


SWITCH_SECONDS = 5e-4
"""How long another thread may keep the interpreter's lock from this one, on a GPU."""


@define(eq=False)
class Reply:
    """The result of a command; ``done`` is set on the event loop after ``error`` has been."""

    done: anyio.Event
    error: Exception | None = None


@define(eq=False)
class Report:
    """Everything that the event loop must know after one turn of the thread's loop.

    ``chunks`` belong to a generation each; one that fails gets its error instead.
    """

    version: int
    statistics: EngineStatistics
    chunks: list[tuple[Generation, Chunk | ArealError]] = field(factory=list)
    replies: list[Reply] = field(factory=list)
    failure: BaseException | None = None
    is_last: bool = False

    @property
    def is_news(self) -> bool:
        """Return whether a task may be waiting for the report."""
        return bool(self.chunks or self.replies or self.is_last)


class Worker:
    """Runs in one thread from ``run`` to its end.

    Other threads only call ``post``, and read ``num_turns`` and ``is_idle``.
    """

    def __init__(
        self,
        config: TorchEngineConfig,
        *,
        open_forward: Callable[[], Forward],
        create_runner: CreateRunner,
        context_length: int,
        report: Callable[[Report], None],
        opened: Reply,
        version: int,
    ) -> None:
        self.num_turns = 0
        """Turns of the loop that have begun."""
        self.is_idle = True
        """Whether the thread waits for a command, or has not begun its first turn."""
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._config = config
        self._open_forward = open_forward
        self._create_runner = create_runner
        self._context_length = context_length
        self._report = report
        self._opened = opened
        self._version = version
        self._scheduler = Scheduler(
            num_slots=config.max_concurrent,
            prefill_chunk=config.prefill_chunk or CPU_PREFILL_CHUNK,
            deterministic=config.deterministic,
        )
        self._generations: dict[Generation, None] = {}
        self._statistics = EngineStatistics()
        self._outgoing = Report(version, self._statistics)
        # Generations with tokens to deliver, and when that is due.
        self._undelivered: dict[Generation, None] = {}
        self._due = 0.0
        self._launched: Step | None = None
        self._pause: tuple[PauseMode, Reply] | None = None
        self._is_paused = False
        self._is_closing = False

    def run(self) -> None:
        """Run the thread until ``close`` is called or a step fails."""
        try:
            if self._config.num_threads is not None:
                torch.set_num_threads(self._config.num_threads)
            with torch.inference_mode():
                self._forward = self._open_forward()
            self._device = next(iter(self._forward.parameters.values())).device
            if self._config.prefill_chunk is None and self._device.type == "cuda":
                self._scheduler.prefill_chunk = CUDA_PREFILL_CHUNK
            with torch.inference_mode(), _own_stream(self._device):
                self._steps = self._create_runner(self._forward, self._config, context_length=self._context_length)
                self._scheduler.can_cut = self._steps.can_cut
                self._outgoing.replies.append(self._opened)
                self._flush()
                while not self._is_closing:
                    self._turn()
        except BaseException as error:  # noqa: BLE001  waiting tasks must be notified of any failure
            self._outgoing.failure = error
        self._outgoing.is_last = True
        # The event loop is closed, and no task waits.
        with suppress(RuntimeError):
            self._flush()

    def _turn(self) -> None:
        # Wait for the first command if there is no other work; then take all that are queued.
        must_wait = not self._can_step() and self._pause is None and self._launched is None
        self.num_turns += 1
        self.is_idle = must_wait
        if must_wait and self._commands.empty():
            # A trainer in this process computes now; its team spins only if this one is gone (see ``lib.openmp``).
            settle_team()
        with suppress(queue.Empty):
            while True:
                command = self._commands.get(block=must_wait)
                must_wait = self.is_idle = False
                command()
        self._settle_pause()
        if self._can_step():
            started = time.perf_counter()
            self._step()
            self._count(busy_seconds=time.perf_counter() - started)
        else:
            self._collect()
        self._settle_pause()
        self._flush()

    def _can_step(self) -> bool:
        if self._is_closing or self._is_paused:
            return False
        return bool(self._scheduler.running) or any(map(self._may_start, self._scheduler.waiting))

    def _may_start(self, generation: Generation) -> bool:
        """Return whether ``generation`` may get a slot: while a pause waits, only one that has sampled before may."""
        return self._pause is None or len(generation.output) > 0

    # ------------------------------------------------------------------------------------------ commands

    def post(self, command: Callable[[], None]) -> None:
        """Call one of the following methods between two turns. Any thread may call this."""
        self._commands.put(command)

    def submit(self, generation: Generation) -> None:
        """Begin a generation."""
        self._generations[generation] = None
        self._scheduler.add(generation)

    def abort(self, *, request_id: str) -> None:
        """End the generation with this id; unknown ids are ignored."""
        self._abort(each for each in self._generations if each.request.id == request_id)

    def pause(self, mode: PauseMode, reply: Reply) -> None:
        """Stop sampling; ``reply`` once nothing is sampled any more."""
        self._deliver_all()
        if mode is PauseMode.ABORT:
            self._abort([*self._scheduler.running, *(g for g in self._scheduler.waiting if len(g.output))])
        # A pause that was still waiting is answered, and the new one replaces it.
        self._end_pause()
        self._pause = mode, reply

    def resume(self) -> None:
        """Continue sampling."""
        self._is_paused = False
        self._end_pause()

    def load(self, snapshot: Snapshot, reply: Reply) -> None:
        """Replace the weights."""
        # Tokens of the old weights are delivered first.
        self._deliver_all()
        try:
            # The snapshot's tensors may still be computed on another stream, and may change as soon as this returns.
            self._synchronize()
            forward = self._forward
            load_snapshot(snapshot, forward.parameters, forward.aliases, forward.buffers)
            self._synchronize()
        except ModelError as error:
            reply.error = error
        else:
            self._version = snapshot.version
            # Keys and values of the old weights are invalid: everything that runs is computed again.
            for each in self._scheduler.running:
                self._steps.forget(each)
            self._scheduler.forget_all()
        self._outgoing.replies.append(reply)

    def close(self) -> None:
        """End the thread; running generations are aborted."""
        self._deliver_all()
        self._is_closing = True
        self._abort(self._generations)

    def _abort(self, generations: Iterable[Generation]) -> None:
        for generation in list(generations):
            self._finish(generation, FinishReason.ABORT)

    def _settle_pause(self) -> None:
        """Complete a pause once nothing may continue; in mode KEEP, at once."""
        if self._pause is None:
            return
        if self._pause[0] is not PauseMode.WAIT or not self._can_step():
            self._is_paused = True
            self._end_pause()

    def _end_pause(self) -> None:
        if self._pause is not None:
            self._outgoing.replies.append(self._pause[1])
            self._pause = None

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    # ---------------------------------------------------------------------------------------------- steps

    def _step(self) -> None:
        """Launch a step, then read the results of the one before it, or of the same one if nothing runs ahead."""
        # The distribution of these rows depends on a token that is still on the device.
        if self._launched is not None and any(g.needs_output for g in self._launched.order):
            self._collect()
        admissions = self._scheduler.admit(may_start=self._may_start)
        for admission in admissions:
            self._steps.admit(admission)
            generation = admission.generation
            # Counted once: a generation is admitted again after the weights changed.
            if not len(generation.output):
                self._count(prompt_tokens=generation.num_prompt, cached_tokens=generation.num_cached or 0)
        prefills = self._scheduler.plan_prefills()
        # Generations whose next-token logits were cached sample in this step; they have no token to compute yet.
        ready = [a.generation for a in admissions if a.generation in self._scheduler.decoding]
        decoding = [g for g in self._scheduler.decoding if g.length + g.ahead < g.limit]
        if ready:
            decoding = [g for g in decoding if g not in ready]
        previous, self._launched = self._launched, None
        if prefills or ready or decoding:
            step = self._steps.launch(decoding, ready, prefills)
            for generation in step.order:
                generation.ahead += 1
            prompt_logits = iter(step.prompt_logits)
            for prefill in prefills:
                self._scheduler.complete_prefill(prefill, next(prompt_logits) if prefill.is_last else None)
            if self._steps.is_ahead:
                self._launched = step
            else:
                self._read(step)
        if previous is not None:
            self._read(previous)

    def _collect(self) -> None:
        """Read the results of the step that runs, if there is one."""
        launched, self._launched = self._launched, None
        if launched is not None:
            self._read(launched)

    def _read(self, step: Step) -> None:
        generations = iter(step.order)
        num_sampled = 0
        for sample in step.samples:
            draw = sample.read()
            for token_id, logprob, raw_logprob, top, is_finite in zip(
                draw.token_ids, draw.logprobs, draw.raw_logprobs, draw.top, draw.is_finite, strict=True
            ):
                generation = next(generations)
                generation.ahead -= 1
                if generation not in self._generations:
                    # The request had ended before this token was sampled, or was aborted.
                    continue
                if not is_finite:
                    self._fail(generation, self._explain(generation))
                    continue
                num_sampled += 1
                generation.append(token_id)
                generation.outbox.add(token_id, logprob, raw_logprob, top)
                if generation.finish is not None:
                    self._finish(generation, generation.finish)
                elif generation.length == generation.num_prompt + 1:
                    self._deliver(generation)  # the first token at once
                else:
                    self._undelivered[generation] = None
        self._count(sampled_tokens=num_sampled)

    def _explain(self, generation: Generation) -> ArealError:
        """Return an error that explains why no token could be sampled."""
        if generation.constraint is not None and not generation.constraint.allowed().any():
            # The request's fault, which a client should not repeat: some forms turn out too large as they are followed.
            reason = generation.constraint.failure
            return UnsupportedParameter(f"Answers cannot be constrained to this form: {reason}.")
        return EngineError(
            f"Generation {generation.request.id}: the model's logits are not finite under version "
            f"{self._version}; the weights have diverged. Load sound weights."
        )

    def _finish(self, generation: Generation, reason: FinishReason) -> None:
        if self._release(generation):
            self._count(aborted=int(reason is FinishReason.ABORT))
            self._deliver(generation, reason)

    def _fail(self, generation: Generation, error: ArealError) -> None:
        if self._release(generation):
            if generation.outbox.ids:
                self._deliver(generation)
            self._outgoing.chunks.append((generation, error))

    def _release(self, generation: Generation) -> bool:
        """Release the slot of a generation; return whether it had one, or waited for one."""
        if generation not in self._generations:
            return False
        del self._generations[generation]
        self._scheduler.release(generation, num_ready=self._steps.release(generation))
        return True

    # -------------------------------------------------------------------------------------------- reports

    def _deliver(self, generation: Generation, finish: FinishReason | None = None) -> None:
        tokens, generation.outbox = generation.outbox, Tokens()
        self._undelivered.pop(generation, None)
        # A copy: the log has room for the longest output, and remains with the slot.
        known = None if finish is None else generation.experts.read(generation.length - 1)
        chunk = Chunk(
            token_ids=tokens.ids,
            logprobs=tokens.logprobs,
            raw_logprobs=tokens.raw_logprobs,
            version=self._version,
            finish=finish,
            top_logprobs=tuple(tokens.tops) if generation.sampling.top_logprobs else (),
            num_cached_tokens=tokens.num_cached,
            routed_experts=None if known is None else known.copy(),
        )
        self._outgoing.chunks.append((generation, chunk))

    def _deliver_all(self) -> None:
        """Read the results of the step that runs, and deliver all tokens that have been sampled."""
        self._collect()
        for generation in list(self._undelivered):
            self._deliver(generation)

    def _count(self, **increments: float) -> None:
        old = self._statistics
        self._statistics = evolve(old, **{name: getattr(old, name) + more for name, more in increments.items()})

    def _flush(self) -> None:
        if not self._can_step() or time.monotonic() >= self._due:
            for generation in list(self._undelivered):
                self._deliver(generation)
        report = self._outgoing
        if report.is_news:
            report.version = self._version
            report.statistics = evolve(
                self._statistics, running=len(self._scheduler.running), waiting=len(self._scheduler.waiting)
            )
            self._outgoing = Report(self._version, self._statistics)
            num_running = len(self._scheduler.running)
            self._due = time.monotonic() + min(MAX_DELAY_SECONDS, SECONDS_PER_STREAM * num_running)
            self._report(report)


@contextmanager
def _own_stream(device: torch.device) -> Iterator[None]:
    """Run this thread's work on its own stream of a GPU: it does not wait for a trainer's in the same process."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        # The given model may still be computed on another stream.
        torch.cuda.synchronize()
        # Calls into CUDA release the interpreter's lock. The event loop would keep it for 5 ms: two steps of a model.
        interval = sys.getswitchinterval()
        sys.setswitchinterval(min(interval, SWITCH_SECONDS))
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            sys.setswitchinterval(interval)


# ----------------------------------------------------------------------------------------------------------- steps


class Runner(Protocol):
    """Computes steps. Only the engine's thread calls it.

    ``is_ahead``: ``launch`` does not wait for the result, and the next step may be launched before it is known.
    """

    is_ahead: bool

    @property
    def can_cut(self) -> bool:
        """Return whether a slot can be continued from any prefix of its tokens."""
        ...

    def admit(self, admission: Admission) -> None:
        """Copy the cached prefix into the generation's slot."""
        ...

    def release(self, generation: Generation) -> int:
        """Keep the keys and values of a generation that has ended, and return of how many tokens the slot has them."""
        ...

    def forget(self, generation: Generation) -> None:
        """Discard the keys and values of a generation that is computed again."""
        ...

    def launch(self, decoding: Sequence[Generation], ready: Sequence[Generation], prefills: Sequence[Prefill]) -> Step:
        """Start to compute a step.

        It samples a token of each ``decoding`` generation, of ``ready`` ones, whose logits are in their slots, and of
        those whose prompt is completed by ``prefills``, in an order that the runner chooses.
        """
        ...


class CreateRunner(Protocol):
    """Creates the runner of an engine, on the engine's thread."""

    def __call__(self, forward: Forward, config: TorchEngineConfig, *, context_length: int) -> Runner:
        """Return a runner of ``forward`` for sequences of up to ``context_length`` tokens."""
        ...


@frozen(eq=False)
class Step:
    """A step that has been launched.

    ``samples`` hold the tokens of ``order``, one after the other; ``prompt_logits`` float32 [V] follow the last token
    of each prompt that the step has completed.
    """

    order: Sequence[Generation]
    samples: Sequence[Sample]
    prompt_logits: Sequence[torch.Tensor]


def create_rows(generations: Sequence[Generation], uniforms: Sequence[float]) -> list[RowSampling]:
    """Return how to sample the next token of each generation. Its grammar's mask is computed here, on the CPU."""
    return [
        RowSampling(g.sampling, uniform, g.request.prompt, g.output, g.allowed)
        for g, uniform in zip(generations, uniforms, strict=True)
    ]


def finish_step(
    logits: torch.Tensor, order: Sequence[Generation], ready: Sequence[Generation], *, num_done: int
) -> Step:
    """Sample the tokens of ``order`` from ``logits`` [B, V], those of ``ready`` from the logits in their slots.

    The last ``num_done`` rows of the logits follow a prompt.
    """
    stored = [g.slot.logits[None] for g in ready if g.slot is not None and g.slot.logits is not None]
    # Copies: rows of ``logits`` would keep all of them.
    prompt_logits = [row.clone() for row in logits[len(order) - num_done :]]
    order = [*order, *ready]
    if not order:
        return Step((), (), ())
    logits = torch.cat([logits, *stored] if len(stored) < len(order) else stored)
    # Grammar masks are computed on the CPU while an accelerator still computes the logits.
    return Step(
        order, [start_sampling(logits, create_rows(order, [g.uniform() for g in order])).start_copy()], prompt_logits
    )


class StepRunner:
    """Computes steps of the lean path, on any device. Only the engine's thread calls it.

    ``is_padded`` selects how main parts are read (see ``StepAttention``); the default depends on the device.
    """

    is_ahead = False
    can_cut = True

    def __init__(self, forward: LlamaForward, config: TorchEngineConfig, *, is_padded: bool | None = None) -> None:
        self._forward = forward
        self._config = config
        self._device = next(iter(forward.parameters.values())).device
        self._is_padded = self._device.type != "cpu" if is_padded is None else is_padded
        # A multiple of any vector width, so that no row is in a kernel's remainder loop, which may round differently.
        self._num_fixed_rows = -(-config.max_concurrent // 64) * 64
        self._kv = KeyValues()
        self._free_tails = list(range(config.max_concurrent))
        self._planned: tuple[Generation, ...] = ()
        self._plan = SharingPlan((), ())

    def admit(self, admission: Admission) -> None:
        """Copy the cached prefix into the generation's slot."""
        source, slot = admission.source, admission.slot
        self._kv.reserve(slots=slot.index + 1, columns=admission.generation.base)
        if source is not None and source is not slot and admission.num_cached:
            self._kv.copy_prefix(source.index, slot.index, admission.num_cached)

    def release(self, generation: Generation) -> int:
        """Append the sampled tokens to the slot, free the tail row, and return how many tokens the slot now holds.

        The last sampled token is not among them, because its keys and values were never computed.
        """
        slot = generation.slot
        if slot is None:
            return 0
        if generation.tail_row < 0:
            return min(slot.ready, generation.length)
        num_tail = generation.length - 1 - generation.base
        self._kv.append_tail(generation.tail_row, slot.index, at=generation.base, length=num_tail)
        self.forget(generation)
        return generation.base + num_tail

    def forget(self, generation: Generation) -> None:
        """Free the tail row without keeping its contents."""
        if generation.tail_row >= 0:
            heapq.heappush(self._free_tails, generation.tail_row)
            generation.tail_row = -1
            self._planned = ()

    def launch(self, decoding: Sequence[Generation], ready: Sequence[Generation], prefills: Sequence[Prefill]) -> Step:
        """Compute a step: see ``Runner.launch``. The order is decoding, completed prefills, then ready."""
        # The sharing plan is computed again only when rows were added or removed.
        if decoding and tuple(decoding) != self._planned:
            self._planned = tuple(decoding)
            mains = [g.tokens[: g.base] for g in decoding]
            is_alone = self._config.deterministic or self._is_padded
            self._plan = plan_alone(mains) if is_alone else plan_sharing(mains)
        order = [self._planned[i] for i in self._plan.order] if decoding else []
        groups = [(order, prefills)]
        if self._config.deterministic:
            # Separate batches: a row must not depend on the prompts in its batch.
            groups = [(order, ()), ([], prefills)]
        parts = [self._compute(rows, spans) for rows, spans in groups if rows or spans]
        if not parts:
            return finish_step(torch.empty(0), (), ready, num_done=0)
        done = [p.generation for p in prefills if p.is_last]
        return finish_step(torch.cat(parts), [*order, *done], ready, num_done=len(done))

    def _compute(self, rows: Sequence[Generation], prefills: Sequence[Prefill]) -> torch.Tensor:
        layout = self._lay_out(rows) if rows else None
        num_rows = layout.num_rows if layout else 0
        ids = np.zeros(num_rows + sum(p.stop - p.start for p in prefills), dtype=np.int64)
        positions = np.zeros_like(ids)
        for place, row in enumerate(rows):
            ids[place], positions[place] = row.tokens[row.length - 1], row.length - 1
        wanted, spans, offset = list(range(num_rows)), [], num_rows
        for prefill in prefills:
            end = offset + prefill.stop - prefill.start
            ids[offset:end] = prefill.generation.tokens[prefill.start : prefill.stop]
            positions[offset:end] = np.arange(prefill.start, prefill.stop)
            assert prefill.generation.slot is not None
            spans.append(Span(prefill.generation.slot.index, prefill.start, prefill.stop, offset))
            if prefill.is_last:
                wanted.append(end - 1)
            offset = end
        batch = FlatBatch(self._tensor(ids), self._tensor(positions), self._tensor(np.array(wanted, dtype=np.int64)))
        attention = StepAttention(self._kv, layout, spans, is_padded=self._is_padded)
        logits = self._forward.run(batch, attention)
        # Rows are padded only if there are no spans.
        return logits if num_rows == len(rows) else logits[: len(rows)]

    def _lay_out(self, rows: Sequence[Generation]) -> DecodeLayout:
        for row in rows:
            if row.tail_row < 0:
                row.tail_row = heapq.heappop(self._free_tails)
        tails = np.array([row.tail_row for row in rows])
        columns = np.array([row.length - 1 - row.base for row in rows])
        self._kv.reserve_tail(rows=int(tails.max()) + 1, columns=int(columns.max()) + 1)
        return DecodeLayout(
            plan=self._plan,
            slots=tuple(row.slot.index for row in rows if row.slot is not None),
            tails=self._tensor(tails),
            num_tails=int(tails.max()) + 1,
            bases=self._tensor(np.array([row.base for row in rows])),
            num_rows=self._num_fixed_rows if self._config.deterministic else len(rows),
            is_alone=self._config.deterministic,
            columns=self._tensor(columns),
        )

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)
