"""The engine's thread and its steps: it owns the model, keys and values and every generation.

Each turn of its loop takes the commands that arrived, admits what fits, computes one step (decoding rows and a bounded
part of prompts), and reports everything to the event loop in one call. It never waits for a consumer.
If it fails, ``report`` receives the reason once, and every waiting task gets an error. A ``Runner`` computes the
logits of the steps.
"""

from __future__ import annotations

import queue
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

import anyio
import torch
from attrs import define, evolve, field

from areal_actors.domain import Chunk, EngineStatistics, FinishReason, PauseMode, Snapshot
from areal_actors.errors import ArealError, EngineError, ModelError, UnsupportedParameter
from areal_actors.generation.torch.config import TorchEngineConfig
from areal_actors.generation.torch.forward import Forward, load_snapshot
from areal_actors.generation.torch.runners import CreateRunner
from areal_actors.generation.torch.sampler import RowSampling, sample
from areal_actors.generation.torch.scheduler import Generation, Scheduler, Tokens

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
                self._runner = self._create_runner(self._forward, self._config)
                self._scheduler.can_cut = self._runner.can_cut
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
        must_wait = not self._can_step() and self._pause is None
        self.num_turns += 1
        self.is_idle = must_wait
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
                self._runner.forget(each)
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
        """Compute the next token of all that decode, and a part of prompts."""
        admissions = self._scheduler.admit(may_start=self._may_start)
        for admission in admissions:
            self._runner.admit(admission)
            generation = admission.generation
            # Counted once: a generation is admitted again after the weights changed.
            if not len(generation.output):
                self._count(prompt_tokens=generation.num_prompt, cached_tokens=generation.num_cached or 0)
        prefills = self._scheduler.plan_prefills()
        # Generations whose next-token logits were cached sample in this step; they have no token to compute yet.
        ready = [a.generation for a in admissions if a.generation in self._scheduler.decoding]
        decoding = [g for g in self._scheduler.decoding if g not in ready]
        order: list[Generation] = []
        parts: list[torch.Tensor] = []
        if decoding or prefills:
            computed, logits = self._runner.compute(decoding, prefills)
            # Copies: a row would keep all others in memory.
            prompts = iter([row.clone() for row in logits[len(decoding) :]])
            for prefill in prefills:
                self._scheduler.complete_prefill(prefill, next(prompts) if prefill.is_last else None)
            if computed:
                order, parts = list(computed), [logits]
        order += ready
        parts += [g.slot.logits[None] for g in ready if g.slot is not None and g.slot.logits is not None]
        if order:
            self._sample(order, torch.cat(parts))

    def _sample(self, generations: Sequence[Generation], logits: torch.Tensor) -> None:
        """Sample a token of each generation from its row of ``logits`` [B, V]."""
        rows = [RowSampling(g.sampling, g.uniform(), g.request.prompt, g.output, g.allowed) for g in generations]
        draw, num_sampled = sample(logits, rows), 0
        for generation, token_id, logprob, raw_logprob, top, is_finite in zip(
            generations, draw.token_ids, draw.logprobs, draw.raw_logprobs, draw.top, draw.is_finite, strict=True
        ):
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
        self._scheduler.release(generation, num_ready=self._runner.release(generation))
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
        """Deliver all tokens that have been sampled."""
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
