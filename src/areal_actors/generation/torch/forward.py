"""The forms in which the engine runs a model: ``LlamaForward``, or ``CachedModel`` of ``rows``.

``create_forward`` chooses. Llama, Mistral, Qwen2 and Qwen3 take ``LlamaForward``, the lean path, which computes
them without the overhead of a module per operation; everything else takes ``CachedModel``. When an engine
opens, either is compared with a plain forward pass of the model, and a path that differs is not used: a wrong
log-probability would corrupt training silently.

In the lean path, activations are [N, features], as in the modules. With [features, N] products of the stored weights
are as fast for 16, 32 or 48 tokens, but take 1.6 to 5 times as long for other numbers below 48 (MKL, AVX2), which most
decode steps of agents have, and 6 times as long in bfloat16. Projections that read the same input are one matrix.
Weights are copied into those matrices and the model's own are dropped; ``parameters`` are views by the names of its
state dict.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from attrs import define, frozen
from torch.nn.functional import linear, silu

from areal_actors.domain import Snapshot
from areal_actors.errors import ArealError, ModelError
from areal_actors.generation.torch.attention import DecodeLayout, KeyValues, Span, StepAttention, plan_alone
from areal_actors.generation.torch.rows import CachedModel, Rows, join_rows
from areal_actors.lib.checkpoint_tensors import LazyTensors, read_checkpoint
from areal_actors.lib.telemetry import get_logger
from areal_actors.models import model_shape, require_fixed_rotation

_log = get_logger(__name__)

PROBE_LENGTH = 12
TOLERANCE = 2e-3
"""Largest accepted difference of log-probabilities; rounding errors are far below it, mistakes far above."""


@frozen(eq=False)
class FlatBatch:
    """Tokens of one step: ``ids`` and ``positions`` int64 [N]; logits are computed for columns ``wanted`` int64 [M]."""

    ids: torch.Tensor
    positions: torch.Tensor
    wanted: torch.Tensor


def create_forward(model: Any, *, max_length: int | None = None) -> Forward:
    """Return the fastest path that computes the same as ``model``, a transformers causal LM, and take the model over.

    Sequences have up to ``max_length`` tokens; ``None`` means as many as the model has positions.

    Raises:
        ConfigError: tokens of sequences of this length depend on other sequences in a step.
        ModelError: the model cannot be sampled token by token.
    """
    max_length = max_length or model_shape(model.config).max_positions
    # Verify in float32, on a copy if needed: in bfloat16, rounding alone moves single log-probabilities by more than
    # some mistakes would.
    is_single = model.get_input_embeddings().weight.dtype is torch.float32
    # The copy is freed when the choice returns: the second forward must not be built next to it.
    single = model if is_single else copy.deepcopy(model).float()
    try:
        return _choose_path(single, max_length)(model)
    except ArealError:
        raise
    except Exception as error:
        # Models of transformers fail in many ways on a plain pass over a few tokens.
        raise ModelError(
            f"{type(model).__name__} cannot be run by the embedded engine: a pass over a few tokens failed with "
            f"{type(error).__name__}: {error}. Serve it with an inference server instead."
        ) from error


def _choose_path(model: Any, max_length: int | None) -> Callable[[Any], Forward]:
    embedding = model.get_input_embeddings().weight
    device = embedding.device
    # Two short sequences; a generator of our own, so that the caller's random numbers do not change.
    ids = torch.randint(len(embedding), (2, PROBE_LENGTH), generator=torch.Generator().manual_seed(0)).to(device)
    probe = _Probe(ids, torch.log_softmax(model(input_ids=ids, use_cache=False).logits.float(), -1))
    reason = f"the lean path computes {', '.join(sorted(_ARCHITECTURES))} with usual settings"
    if LlamaForward.accepts(model):
        deviation = _try_slots(LlamaForward.of(model), probe)
        if deviation <= TOLERANCE:
            _log.debug("lean_path_is_used", deviation=deviation, allowed=TOLERANCE)
            return LlamaForward.of
        reason = f"the lean path's log-probabilities differ by {deviation:.2g}, of {TOLERANCE:g} allowed"
    # The lean path has fixed frequencies.
    require_fixed_rotation(model.config, max_length=max_length)
    deviation = _try_rows(CachedModel(model), probe, _extend_one_by_one)
    # NaN is too large as well.
    if not deviation <= TOLERANCE:
        raise ModelError(
            f"{type(model).__name__} cannot be run by the embedded engine: its log-probabilities differ by "
            f"{deviation:.2g} from the model's own. Serve it with an inference server instead."
        )
    lacking: list[str] = []
    effects = ["a step takes longer than by the lean path"]
    for name, (trial, effect) in _ABILITIES.items():
        rows = CachedModel(model, lacking)
        if not (getattr(rows, name) and _holds(rows, probe, trial)):
            lacking.append(name)
            effects.append(effect)
    _log.info("modules_are_used", effect="; ".join(effects), reason=reason)
    return partial(CachedModel, lacking=lacking)


@frozen(eq=False)
class _Probe:
    """Sequences ``ids`` int64 [2, PROBE_LENGTH], and the model's own ``logprobs`` [2, PROBE_LENGTH, V] of them."""

    ids: torch.Tensor
    logprobs: torch.Tensor

    def differ(self, logits: torch.Tensor, parts: Sequence[tuple[int, int, int]]) -> float:
        """Return the largest difference of ``logits`` [N, V] at the given parts: row, start and stop."""
        expected = torch.cat([self.logprobs[row, start:stop] for row, start, stop in parts])
        return float((torch.log_softmax(logits, -1) - expected).abs().max().nan_to_num(torch.inf))


def _try_slots(forward: LlamaForward, probe: _Probe) -> float:
    """Return the largest difference over prefill, chunked prefill, and decoding of both sequences in one batch."""
    kv = KeyValues()
    half, length = PROBE_LENGTH // 2, PROBE_LENGTH
    worst = 0.0

    def compare(parts: Sequence[tuple[int, int, int]], decode: DecodeLayout | None) -> None:
        nonlocal worst
        ids = torch.cat([probe.ids[row, start:stop] for row, start, stop in parts])
        positions = torch.cat([torch.arange(start, stop, device=probe.ids.device) for _, start, stop in parts])
        offsets = [sum(stop - start for _, start, stop in parts[:i]) for i in range(len(parts))]
        spans = [] if decode else [Span(*part, offset) for part, offset in zip(parts, offsets, strict=True)]
        batch = FlatBatch(ids, positions, torch.arange(len(ids), device=ids.device))
        worst = max(worst, probe.differ(forward.run(batch, StepAttention(kv, decode, spans)), parts))

    # Prefill row 0, prefill row 1 in two chunks, then decode both rows together.
    compare([(0, 0, half), (1, 0, 2)], None)
    compare([(1, 2, half)], None)
    for at in range(half, length):
        layout = DecodeLayout(
            plan=plan_alone([row[:half].cpu().numpy() for row in probe.ids]),
            slots=(0, 1),
            tails=torch.tensor([0, 1], device=probe.ids.device),
            num_tails=2,
            bases=torch.full((2,), half, device=probe.ids.device),
            num_rows=2,
            is_alone=False,
            columns=torch.full((2,), at - half, device=probe.ids.device),
        )
        compare([(0, at, at + 1), (1, at, at + 1)], layout)
    return worst


Extend = Callable[[Rows, list[int], int], Rows]
"""Append so many of their next tokens to rows, which are these rows of a probe."""
Trial = Callable[[Rows, Extend], object]
"""Extends rows, beginning with one that has no tokens."""


def _try_rows(forward: CachedModel, probe: _Probe, trial: Trial) -> float:
    """Return the largest difference in all that ``trial`` computes."""
    worst = 0.0

    def extend(rows: Rows, members: list[int], num_new: int) -> Rows:
        nonlocal worst
        parts = [(row, start, start + num_new) for row, start in zip(members, rows.lengths, strict=True)]
        ids = torch.stack([probe.ids[row, start:stop] for row, start, stop in parts])
        logits, rows = forward.extend(rows, ids, num_logits=num_new)
        worst = max(worst, probe.differ(logits.flatten(0, 1), parts))
        return rows

    trial(forward.create_rows(), extend)
    return worst


def _holds(forward: CachedModel, probe: _Probe, trial: Trial) -> bool:
    try:
        return _try_rows(forward, probe, trial) <= TOLERANCE
    except Exception:  # noqa: BLE001 - models fail in many ways on what they do not support
        return False


def _extend_one_by_one(rows: Rows, extend: Extend) -> None:
    rows = extend(rows, [0], PROBE_LENGTH // 2)
    rows = rows.take(0, rows.lengths[0])
    while rows.lengths[0] < PROBE_LENGTH:
        rows = extend(rows, [0], 1)


def _extend_in_chunks(rows: Rows, extend: Extend) -> None:
    for size in (2, 4, PROBE_LENGTH - 6):
        rows = extend(rows, [0], size)


def _extend_a_prefix(rows: Rows, extend: Extend) -> None:
    extend(extend(rows, [1], PROBE_LENGTH).take(0, 3), [1], PROBE_LENGTH - 3)


def _extend_together(rows: Rows, extend: Extend) -> None:
    half = PROBE_LENGTH // 2
    # The second row begins later, and stays when the first one leaves.
    short, long = extend(rows.take(0, 0), [1], half - 3), extend(rows, [0], half)
    both = join_rows([(long, [0]), (short, [0])])
    for _ in range(3):
        both = extend(both, [0, 1], 1)
    left = both.take(1, half)
    while left.lengths[0] < PROBE_LENGTH:
        left = extend(left, [1], 1)


_ABILITIES: dict[str, tuple[Trial, str]] = {
    "can_chunk": (_extend_in_chunks, "what continues a prompt is computed token by token"),
    "can_cut": (_extend_a_prefix, "a prompt is computed again unless it is equal to another, or continues an answer"),
    "can_pad": (_extend_together, "each generation takes a pass of its own"),
}
"""What a ``CachedModel`` can do if the trial of it is exact, and what happens otherwise."""


_ARCHITECTURES = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
_FIXED_ROTATIONS = frozenset({"default", "linear", "llama3", "yarn"})


@define(eq=False)
class LlamaLayer:
    """Weights of one layer.

    ``qkv`` [(Hq + 2 Hk) D, H], ``out`` [H, Hq D], ``gate_up`` [2 I, H], ``down`` [H, I]; biases and norms are vectors.
    """

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    out: torch.Tensor
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


@frozen(kw_only=True)
class LlamaShape:
    """All that ``LlamaForward`` has to know of a model, apart from its weights.

    ``frequencies`` are those of the rotary embedding, [head_dim / 2], and ``rope_scaling`` the factor of its sines.
    """

    vocab_size: int
    context_length: int | None
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    is_tied: bool
    has_biases: bool
    has_head_norms: bool
    rope_type: str
    rope_scaling: float
    frequencies: tuple[float, ...]

    @classmethod
    def of(cls, model: Any) -> LlamaShape:
        """Return the shape of a transformers model that ``LlamaForward`` accepts."""
        config, rotary, attention = model.config, model.model.rotary_emb, model.model.layers[0].self_attn
        sizes = model_shape(config)
        return cls(
            vocab_size=sizes.vocab_size,
            context_length=sizes.max_positions,
            num_layers=len(model.model.layers),
            num_heads=sizes.num_heads,
            num_kv_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            eps=config.rms_norm_eps,
            is_tied=model.lm_head.weight is model.model.embed_tokens.weight,
            has_biases=attention.q_proj.bias is not None,
            has_head_norms=hasattr(attention, "q_norm"),
            rope_type=str(getattr(rotary, "rope_type", "default")),
            rope_scaling=float(rotary.attention_scaling),
            frequencies=tuple(rotary.inv_freq.tolist()),
        )

    def weights(self) -> Iterator[str]:
        """Yield the names of the weights, as they are in the state dict of the model; a tied one once."""
        yield "model.embed_tokens.weight"
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}."
            yield from (f"{prefix}{name}.weight" for name in ("input_layernorm", "post_attention_layernorm"))
            yield from (f"{prefix}self_attn.{name}_proj.weight" for name in "qkvo")
            yield from (f"{prefix}self_attn.{name}_proj.bias" for name in "qkv" if self.has_biases)
            yield from (f"{prefix}self_attn.{name}_norm.weight" for name in "qk" if self.has_head_norms)
            yield from (f"{prefix}mlp.{name}_proj.weight" for name in ("gate", "up", "down"))
        yield "model.norm.weight"
        if not self.is_tied:
            yield "lm_head.weight"


class LlamaForward:
    """Runs a decoder with gated MLPs and rotary grouped-query attention on flat batches."""

    @staticmethod
    def accepts(model: Any) -> bool:
        """Return whether this path should compute the same as ``model``; the probe at opening makes sure."""
        config = model.config
        windows = model_shape(config).layer_types
        return (
            type(model).__name__ in _ARCHITECTURES
            and config.hidden_act == "silu"
            and not getattr(config, "mlp_bias", False)
            and getattr(model.model.layers[0].self_attn.o_proj, "bias", None) is None
            and all(kind == "full_attention" for kind in windows)
            and (type(model).__name__ != "MistralForCausalLM" or config.sliding_window is None)
            # The frequencies of the others change with the length of what they rotate.
            and str(getattr(model.model.rotary_emb, "rope_type", "default")) in _FIXED_ROTATIONS
        )

    @classmethod
    def of(cls, model: Any) -> LlamaForward:
        """Create the forward of a transformers model, and take its weights over."""
        return cls(LlamaShape.of(model), model.get_parameter)

    def __init__(self, shape: LlamaShape, read: Callable[[str], torch.Tensor]) -> None:
        """Create a forward of weights that ``read`` returns by their names; each is read once."""
        self.shape = shape
        self.head_dim, self.eps = shape.head_dim, shape.eps
        self.num_heads, self.num_kv_heads = shape.num_heads, shape.num_kv_heads
        self._read = read
        self.parameters: dict[str, torch.Tensor] = {}
        self.aliases: Mapping[str, str] = {}
        self.buffers: Mapping[str, torch.Tensor] = {}
        self.embed = self._keep("model.embed_tokens.weight")
        self._frequencies = torch.tensor(shape.frequencies, dtype=torch.float32, device=self.embed.device)
        self.layers = [self._fuse(f"model.layers.{index}.") for index in range(shape.num_layers)]
        self.norm = self._keep("model.norm.weight")
        if shape.is_tied:
            self.head = self.embed
            self.aliases = {"lm_head.weight": "model.embed_tokens.weight"}
        else:
            self.head = self._keep("lm_head.weight")
        # The weights of the model are in matrices of their own by now, and can be freed.
        del self._read

    def rotary(self, like: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines [..., head_dim] of int64 ``positions`` [...], in the dtype of ``like``."""
        angles = positions[..., None].float() * self._frequencies
        both = torch.cat((angles, angles), dim=-1)
        scaling = self.shape.rope_scaling
        return (both.cos() * scaling).to(like.dtype), (both.sin() * scaling).to(like.dtype)

    def _keep(self, name: str) -> torch.Tensor:
        self.parameters[name] = self._read(name).detach()
        return self.parameters[name]

    def _join(self, prefix: str, names: tuple[str, ...], kind: str) -> torch.Tensor:
        """Concatenate several parameters into one matrix; each name's parameter becomes a view of it."""
        parts = [self._read(f"{prefix}{name}.{kind}").detach() for name in names]
        joined = torch.cat(parts)
        views = torch.split(joined, [len(part) for part in parts])
        self.parameters.update({f"{prefix}{name}.{kind}": view for name, view in zip(names, views, strict=True)})
        return joined

    def _fuse(self, prefix: str) -> LlamaLayer:
        projections = ("q_proj", "k_proj", "v_proj")
        has_norms = self.shape.has_head_norms
        return LlamaLayer(
            input_norm=self._keep(f"{prefix}input_layernorm.weight"),
            qkv=self._join(f"{prefix}self_attn.", projections, "weight"),
            qkv_bias=self._join(f"{prefix}self_attn.", projections, "bias") if self.shape.has_biases else None,
            q_norm=self._keep(f"{prefix}self_attn.q_norm.weight") if has_norms else None,
            k_norm=self._keep(f"{prefix}self_attn.k_norm.weight") if has_norms else None,
            out=self._keep(f"{prefix}self_attn.o_proj.weight"),
            post_norm=self._keep(f"{prefix}post_attention_layernorm.weight"),
            gate_up=self._join(f"{prefix}mlp.", ("gate_proj", "up_proj"), "weight"),
            down=self._keep(f"{prefix}mlp.down_proj.weight"),
        )

    def run(self, batch: FlatBatch, attention: StepAttention) -> torch.Tensor:
        """Return logits float32 [M, V]."""
        hidden = self.embed[batch.ids]
        cos, sin = self.rotary(hidden, batch.positions[None])
        rotation = (cos[0][:, None], sin[0][:, None])
        for index, layer in enumerate(self.layers):
            attended = self._attend(index, layer, hidden, rotation, attention)
            hidden = torch.addmm(hidden, attended, layer.out.t())
            gate, up = linear(self._normalize(hidden, layer.post_norm), layer.gate_up).chunk(2, dim=-1)
            hidden = torch.addmm(hidden, silu(gate).mul_(up), layer.down.t())
        return linear(self._normalize(hidden[batch.wanted], self.norm), self.head).float()

    def _attend(
        self,
        index: int,
        layer: LlamaLayer,
        hidden: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        attention: StepAttention,
    ) -> torch.Tensor:
        """Return the attention output [N, Hq D] before its projection."""
        qkv = linear(self._normalize(hidden, layer.input_norm), layer.qkv, layer.qkv_bias)
        heads = qkv.view(len(hidden), -1, self.head_dim)
        q, k, v = torch.split(heads, [self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self._normalize(q, layer.q_norm), self._normalize(k, layer.k_norm)
            turned = _rotate(torch.cat((q, k), dim=1), *rotation)
        else:
            turned = _rotate(heads[:, : self.num_heads + self.num_kv_heads], *rotation)
        q, k = torch.split(turned.transpose(0, 1), [self.num_heads, self.num_kv_heads])
        out = attention.attend(index, q, k, v.transpose(0, 1), self.head_dim**-0.5)
        return out.transpose(0, 1).reshape(len(hidden), -1)

    def _normalize(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the RMS norm over the last dimension, computed in float32 as the models do."""
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale).to(x.dtype) * weight


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply the rotary embedding ``cos`` and ``sin`` [N, 1, D] to ``x`` [N, heads, D]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


Forward = LlamaForward | CachedModel
"""A model in the form that the engine runs, with its ``parameters`` and their ``aliases`` for new weights."""


_MAX_NAMED = 5


def _is_same(state: Mapping[str, torch.Tensor], first: str, second: str) -> bool:
    """Whether two weights of a snapshot are one tensor, or are equal."""
    if second not in state:
        return True  # that it is missing is a problem of its own
    pair = [state.like(name) if isinstance(state, LazyTensors) else state[name] for name in (first, second)]
    is_shared = pair[0] is pair[1] or (pair[0].data_ptr() == pair[1].data_ptr() != 0)
    # Without numbers, they are two because the trainer has two.
    return is_shared or (not pair[0].is_meta and torch.equal(state[first], state[second]))


def _compare(name: str, state: Mapping[str, torch.Tensor], target: torch.Tensor | None) -> str | None:
    """Return why a weight of a snapshot does not fit ``target``, if it does not."""
    # Lazy weights are computed only when they are copied.
    value = state.like(name) if isinstance(state, LazyTensors) else state[name]
    if target is None:
        return f"{name} is unknown"
    if not isinstance(value, torch.Tensor) or value.is_floating_point() < target.is_floating_point():
        return f"{name} is not a floating-point tensor"
    return None if value.shape == target.shape else f"{name} is {tuple(value.shape)}, not {tuple(target.shape)}"


def load_snapshot(
    snapshot: Snapshot,
    parameters: Mapping[str, torch.Tensor],
    aliases: Mapping[str, str],
    buffers: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> None:
    """Copy the snapshot's weights into ``parameters``, cast to their dtype and device.

    ``aliases`` may be missing from the snapshot: they are tied to parameters that it has. So may ``buffers``, which
    training does not change: those that it has are copied.

    Raises:
        ModelError: weights are missing, unknown, of another shape, or unreadable; ``parameters`` are unchanged.
    """
    if snapshot.state is not None:
        state = snapshot.state
    elif snapshot.path is not None:
        state = read_checkpoint(snapshot.path)
    else:
        raise ModelError(f"Snapshot of version {snapshot.version} has neither state nor path; give it one of them.")
    # A snapshot that does not fit must leave the old weights intact, so check all of it before the first copy.
    problems = [f"{name} is missing" for name in parameters if name not in state]
    targets = {**buffers, **parameters}
    for name in state:
        found = _compare(name, state, targets.get(aliases.get(name, name)))
        if found is None and name in aliases and not _is_same(state, name, aliases[name]):
            found = f"{name} is not {aliases[name]}, to which the engine's model ties it"
        problems += [found] if found else []
    if problems:
        shown = "; ".join(problems[:_MAX_NAMED])
        more = f"; and {len(problems) - _MAX_NAMED} more" if len(problems) > _MAX_NAMED else ""
        raise ModelError(
            f"Snapshot of version {snapshot.version} does not fit the engine's model: {shown}{more}. "
            "Publish the weights of the same architecture; the old weights stay."
        )
    with torch.no_grad():
        for name, target in targets.items():
            if name in state:
                target.copy_(state[name])
