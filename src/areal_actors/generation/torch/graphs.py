"""Steps on an accelerator: one recorded CUDA graph per batch size, sampling included, one step ahead of the host.

A decode step of a small model is some hundred kernels of a few microseconds, and launching them from Python takes ten
times as long as running them. A graph launches all of them at once. It reads its inputs (slots, positions, uniform
numbers) from a buffer that is written before each replay; token ids stay on the device between two steps, so the next
step can be launched before the host has seen the ids of the last one. A row that turns out to have finished has been
computed once too often, and its token is discarded.

``SlotDecoder`` computes a Llama over slots of fixed size: the weights of ``LlamaForward``, keys and values allocated
once. Every address stays the same from step to step, and lengths are read on the device, so a decode step can be
recorded. Activations are [N, features]; the residual stream is float32, as it is in a trainer under autocast, which
costs little for the few tokens of a step and brings bfloat16 log-probabilities nearer to the trainer's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from attrs import frozen
from torch.nn.functional import embedding, linear

from areal_actors.errors import ConfigError
from areal_actors.generation.torch.attention import KeyValues, Span, StepAttention
from areal_actors.generation.torch.config import TorchEngineConfig
from areal_actors.generation.torch.forward import TOLERANCE, FlatBatch, Forward, LlamaForward
from areal_actors.generation.torch.operations import (
    Cells,
    HeadNorms,
    Operations,
    SlotCache,
    SpanLayout,
)
from areal_actors.generation.torch.runners import RowRunner
from areal_actors.generation.torch.sampler import Sample, sample_neutral, start_sampling, to_device
from areal_actors.generation.torch.scheduler import Admission, Generation, Prefill
from areal_actors.generation.torch.worker import Runner, Step, StepRunner, create_rows
from areal_actors.lib.telemetry import get_logger

_log = get_logger(__name__)

_ROUNDING = 0.25
"""Largest accepted mean difference of log-probabilities in bfloat16: rounding moves them by hundredths."""


def create_runner(forward: Forward, config: TorchEngineConfig, *, context_length: int) -> Runner:
    """Return the fastest runner for the forward and its device.

    Raises:
        ConfigError: keys and values of all slots do not fit into the device's memory.
    """
    device = next(iter(forward.parameters.values())).device
    if device.type == "cuda" and not SlotDecoder.accepts(forward):
        _log.warning(
            "cuda_graphs_unsupported",
            effect="kernels are launched one by one, which is several times slower",
            supported="Llama, Mistral, Qwen2 and Qwen3 without sliding windows",
            remedy="use an inference server",
        )
    if not isinstance(forward, LlamaForward):
        return RowRunner(forward, config)
    if device.type != "cuda" or not SlotDecoder.accepts(forward):
        return StepRunner(forward, config)
    try:
        # Here, because Triton is installed only with torch for GPUs.
        from areal_actors.generation.torch.kernels import TritonOperations
    except ImportError:
        _log.warning("triton_missing", effect="kernels are launched one by one, which is several times slower")
        return StepRunner(forward, config)
    runner = GraphRunner(forward, config, context_length=context_length, operations=TritonOperations())
    limit = TOLERANCE if forward.embed.dtype is torch.float32 else _ROUNDING
    if not (deviation := runner.deviation(forward)) <= limit:
        _log.warning("cuda_graphs_inexact", mean_deviation=float(f"{deviation:.2g}"), limit=limit)
        return StepRunner(forward, config)
    return runner


def choose_sizes(largest: int) -> tuple[int, ...]:
    """Return the batch sizes to record, ascending, up to ``largest``. A batch is padded to the next of them."""
    small = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224)
    return (*(size for size in (*small, *range(256, largest, 64)) if size < largest), largest)


@frozen(eq=False)
class _Graph:
    """A recorded step of ``size`` rows.

    ``inputs`` int64 [4, size] are slots, positions, the bits of the uniform numbers, and whether a row is greedy.
    ``results`` float64 [4, size] are those of ``sample_neutral``. ``staging`` and ``landing`` are their copies on the
    host, two of each: one is in use by the step that runs while the next one is prepared.
    """

    size: int
    inputs: torch.Tensor
    results: torch.Tensor
    staging: Sequence[torch.Tensor]
    landing: Sequence[torch.Tensor]
    replay: Callable[[], None]


class GraphRunner:
    """Computes steps of a Llama-like model. Only the engine's thread calls it.

    Recording needs CUDA; on other devices the same steps are computed without it.
    """

    is_ahead = True
    can_cut = True

    def __init__(
        self, forward: LlamaForward, config: TorchEngineConfig, *, context_length: int, operations: Operations
    ) -> None:
        self._device = forward.embed.device
        self._is_deterministic = config.deterministic
        num_slots = config.max_concurrent
        self._decoder = SlotDecoder(forward, operations, num_slots=num_slots, max_length=context_length)
        self._last_ids = torch.zeros(num_slots + 1, dtype=torch.int64, device=self._device)
        self._logits = torch.zeros((num_slots, self._decoder.vocab_size), device=self._device)
        self._side = 0
        # Recorded steps write padding only, so the slots need no initialisation.
        sizes = (num_slots,) if config.deterministic else choose_sizes(num_slots)
        pool = torch.cuda.graph_pool_handle() if self._device.type == "cuda" else None
        # The largest first: the others fit into the memory that it has left in the pool.
        self._graphs = [self._record(size, pool) for size in reversed(sizes)][::-1]

    def _record(self, size: int, pool: object) -> _Graph:
        inputs = torch.zeros((4, size), dtype=torch.int64, device=self._device)
        inputs[0] = self._decoder.padding_slot
        results = torch.zeros((4, size), dtype=torch.float64, device=self._device)

        def step() -> None:
            slots, positions, uniforms, is_greedy = inputs
            logits = self._decoder.decode(self._last_ids[slots], slots, positions)
            self._logits[:size].copy_(logits)
            results.copy_(sample_neutral(logits, uniforms.view(torch.float64), is_greedy > 0))
            self._last_ids[slots] = results[0].long()

        replay: Callable[[], None] = step
        if pool is not None:
            stream = torch.cuda.current_stream()
            # Kernels are compiled and libraries allocate their buffers in the first calls; neither can be recorded.
            for _ in range(2):
                step()
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            # "thread_local": a trainer in another thread of this process may allocate memory meanwhile.
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):  # type: ignore[arg-type]
                step()
            replay = graph.replay
        # Pinned memory is allocated once: asking for it in every step cost a third of a small model's step on an H100.
        is_pinned = self._device.type == "cuda"
        return _Graph(
            size,
            inputs,
            results,
            staging=[torch.zeros(inputs.shape, dtype=inputs.dtype, pin_memory=is_pinned) for _ in range(2)],
            landing=[torch.zeros(results.shape, dtype=results.dtype, pin_memory=is_pinned) for _ in range(2)],
            replay=replay,
        )

    def admit(self, admission: Admission) -> None:
        """Copy the cached prefix into the generation's slot."""
        source, slot = admission.source, admission.slot
        if source is not None and source is not slot and admission.num_cached:
            self._decoder.copy_prefix(source.index, slot.index, admission.num_cached)

    def release(self, generation: Generation) -> int:
        """Return how many tokens the generation's slot holds: all but the last, unless it is still in prefill."""
        slot = generation.slot
        if slot is None:
            return 0
        return slot.ready if slot.ready < generation.base else max(generation.base, generation.length - 1)

    def forget(self, generation: Generation) -> None:
        """Sampled tokens are in the slot, which the scheduler clears: nothing remains to be done."""

    def launch(self, decoding: Sequence[Generation], ready: Sequence[Generation], prefills: Sequence[Prefill]) -> Step:
        """Start a step: see ``Runner.launch``."""
        samples: list[Sample] = []
        if decoding:
            num, graph = len(decoding), next(graph for graph in self._graphs if graph.size >= len(decoding))
            uniforms = [row.uniform() for row in decoding]
            self._side = 1 - self._side
            inputs = graph.staging[self._side].numpy()
            inputs[0, num:] = self._decoder.padding_slot
            inputs[1, num:] = 0
            inputs[0, :num] = _slots(decoding)
            # ``ahead`` tokens have been sampled that the host has not seen.
            inputs[1, :num] = [row.length + row.ahead - 1 for row in decoding]
            inputs[2, :num] = np.array(uniforms).view(np.int64)
            inputs[3, :num] = [row.sampling.temperature == 0 for row in decoding]
            graph.inputs.copy_(graph.staging[self._side], non_blocking=True)
            graph.replay()
            if all(row.is_plain for row in decoding):
                samples = [Sample(graph.results, num).start_copy(graph.landing[self._side])]
            else:
                samples = self._sample(self._logits[:num], decoding, uniforms)
        done = [p.generation for p in prefills if p.is_last]
        computed = self._logits[:0]
        if prefills:
            spans, ids, wanted, offset = [], [], [], 0
            for prefill in prefills:
                assert prefill.generation.slot is not None
                spans.append(Span(prefill.generation.slot.index, prefill.start, prefill.stop, offset))
                ids.append(prefill.generation.tokens[prefill.start : prefill.stop])
                offset += prefill.stop - prefill.start
                if prefill.is_last:
                    wanted.append(offset - 1)
            computed = self._decoder.prefill(np.concatenate(ids), spans, wanted)
        if starting := [*ready, *done]:
            stored = [g.slot.logits for g in ready if g.slot is not None and g.slot.logits is not None]
            logits = torch.cat((torch.stack(stored), computed)) if stored else computed
            samples += self._sample(logits, starting, [g.uniform() for g in starting])
        # Copies, because a row would keep all others in memory.
        return Step([*decoding, *starting], samples, [row.clone() for row in computed])

    def _sample(
        self, logits: torch.Tensor, generations: Sequence[Generation], uniforms: Sequence[float]
    ) -> list[Sample]:
        """Sample outside a graph, and remember the ids for the next step."""
        rows = create_rows(generations, uniforms)
        if self._is_deterministic:
            # Each alone: how a GPU adds up a row may depend on how many there are.
            samples = [start_sampling(logits[i : i + 1], [row]) for i, row in enumerate(rows)]
        else:
            samples = [start_sampling(logits, rows)]
        at = to_device(np.array(_slots(generations)), self._device)
        self._last_ids[at] = torch.cat([each.ids for each in samples])
        return [each.start_copy() for each in samples]

    def deviation(self, forward: LlamaForward) -> float:
        """Return the mean difference of log-probabilities from ``forward``, over prompts in chunks and decode steps."""
        half, length = 5, 10
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(self._decoder.vocab_size, (2, length), generator=generator).to(self._device)
        spans = [Span(0, 0, length, 0), Span(1, 0, length, length)]
        places = torch.arange(length, device=self._device)
        batch = FlatBatch(ids.flatten(), places.repeat(2), torch.arange(2 * length, device=self._device))
        expected = torch.log_softmax(forward.run(batch, StepAttention(KeyValues(), None, spans)), -1)
        expected = expected.view(2, length, -1)
        numbers = ids.cpu().numpy()
        parts = [
            (expected[0, :half], self._decoder.prefill(numbers[0, :half], [Span(0, 0, half, 0)], range(half))),
            (expected[1, :2], self._decoder.prefill(numbers[1, :2], [Span(1, 0, 2, 0)], range(2))),
            (expected[1, 2:half], self._decoder.prefill(numbers[1, 2:half], [Span(1, 2, half, 0)], range(half - 2))),
        ]
        slots = torch.arange(2, device=self._device)
        parts += [
            (expected[:, at], self._decoder.decode(ids[:, at], slots, slots * 0 + at)) for at in range(half, length)
        ]
        differences = torch.cat([(torch.log_softmax(logits, -1) - want).abs() for want, logits in parts])
        return float(differences.mean().nan_to_num(torch.inf))


def _slots(generations: Sequence[Generation]) -> list[int]:
    return [generation.slot.index for generation in generations if generation.slot is not None]


_GIB = 2**30
_SPARE_BYTES = _GIB // 2
"""Memory that must be left for activations and CUDA graphs."""

Attend = Callable[[torch.Tensor, SlotCache], torch.Tensor]


class SlotDecoder:
    """Computes decode steps and prompts over ``num_slots`` slots of ``max_length`` tokens, and one slot for padding.

    Raises:
        ConfigError: keys and values do not fit into the device's memory.
    """

    @staticmethod
    def accepts(forward: object) -> bool:
        """Return whether the forward can be run so: a Llama, whose rotation depends on nothing but the position."""
        return isinstance(forward, LlamaForward) and forward.head_dim % 2 == 0

    def __init__(self, forward: LlamaForward, operations: Operations, *, num_slots: int, max_length: int) -> None:
        self._operations = operations
        self._embed, self._head, self._norm = forward.embed, forward.head, forward.norm
        self._eps = forward.eps
        self._scale = forward.head_dim**-0.5
        self._layers = forward.layers
        self.device = forward.embed.device
        self.vocab_size = len(forward.head)
        self.padding_slot = num_slots
        shape = (len(self._layers), 2, num_slots + 1, forward.num_kv_heads, max_length, forward.head_dim)
        check_room(shape, forward.embed.dtype, self.device)
        self._cache = torch.zeros(shape, dtype=forward.embed.dtype, device=self.device)
        self._caches = [SlotCache(keys, values) for keys, values in self._cache]
        places = torch.arange(max_length, device=self.device)[None]
        cos, sin = forward.rotary(torch.zeros(1, dtype=torch.float32, device=self.device), places)
        half = forward.head_dim // 2
        self._rotation = (cos[0, :, :half].float().contiguous(), sin[0, :, :half].float().contiguous())

    def decode(self, ids: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return logits float32 [B, V] after one token of each row; all arguments are int64 [B]."""

        def attend(q: torch.Tensor, cache: SlotCache) -> torch.Tensor:
            return self._operations.attend_rows(q, cache, cells, self._scale)

        cells = Cells(slots, positions)
        hidden, update = self._run(ids, cells, attend)
        return self._project(self._operations.normalize(hidden, update, self._norm, self._eps))

    def prefill(self, ids: np.ndarray, spans: Sequence[Span], wanted: Sequence[int]) -> torch.Tensor:
        """Return logits float32 [M, V] after the columns ``wanted`` of ``ids`` int64 [N], which ``spans`` describe."""
        size = self._operations.tile_size
        slots, positions = (
            np.concatenate(parts)
            for parts in zip(
                *((np.full(s.stop - s.start, s.slot), np.arange(s.start, s.stop)) for s in spans), strict=True
            )
        )
        tiles = [
            (s.slot, at, s.offset + at - s.start, min(size, s.stop - at))
            for s in spans
            for at in range(s.start, s.stop, size)
        ]
        layout = SpanLayout(spans, self._tensor(np.array(tiles, dtype=np.int32)))
        cells = Cells(self._tensor(slots.astype(np.int64)), self._tensor(positions.astype(np.int64)))

        def attend(q: torch.Tensor, cache: SlotCache) -> torch.Tensor:
            return self._operations.attend_spans(q, cache, layout, self._scale)

        hidden, update = self._run(self._tensor(ids.astype(np.int64)), cells, attend)
        at = self._tensor(np.array(wanted, dtype=np.int64))
        return self._project(self._operations.normalize(hidden[at], update[at], self._norm, self._eps))

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` tokens of a slot to another."""
        self._cache[:, :, target, :, :length] = self._cache[:, :, source, :, :length]

    def _run(self, ids: torch.Tensor, cells: Cells, attend: Attend) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the residual stream float32 [N, H] and the update [N, H] that the last layer adds to it."""
        operations = self._operations
        hidden = embedding(ids, self._embed).float()
        update: torch.Tensor | None = None
        for layer, cache in zip(self._layers, self._caches, strict=True):
            qkv = linear(operations.normalize(hidden, update, layer.input_norm, self._eps), layer.qkv, layer.qkv_bias)
            norms = None
            if layer.q_norm is not None and layer.k_norm is not None:
                norms = HeadNorms(layer.q_norm, layer.k_norm, self._eps)
            q = operations.rotate(qkv, cache, self._rotation, cells, norms)
            update = linear(attend(q, cache), layer.out)
            normal = operations.normalize(hidden, update, layer.post_norm, self._eps)
            update = linear(operations.gate(linear(normal, layer.gate_up)), layer.down)
        assert update is not None
        return hidden, update

    def _project(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits in float32. In bfloat16, logits of 16 and more are multiples of 1/8."""
        if hidden.device.type == "cuda" and hidden.dtype is not torch.float32:
            return torch.mm(hidden, self._head.t(), out_dtype=torch.float32)
        return linear(hidden, self._head).float()

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return to_device(array, self.device)


def check_room(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Raise ``ConfigError`` if a cache of ``shape`` does not fit into the memory that a GPU has left."""
    if device.type != "cuda":
        return
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    needed = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if needed + _SPARE_BYTES <= free:
        return
    num_slots, max_length = shape[2] - 1, shape[4]
    fitting = max(0, free - _SPARE_BYTES) // (needed // (num_slots + 1)) - 1
    raise ConfigError(
        f"engine: keys and values of {num_slots} generations (max_concurrent) of {max_length} tokens (max_length) need "
        f"{needed / _GIB:.1f} GiB, and {device} has {free / _GIB:.1f} GiB left. "
        + (
            f"Set engine.max_concurrent to {fitting} or less, or lower engine.max_length."
            if fitting > 0
            else "Lower engine.max_length."
        )
    )
