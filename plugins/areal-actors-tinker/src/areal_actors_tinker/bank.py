"""The bank of adapters: one base model in memory, and any number of low-rank adapters that are trained on it.

Every method blocks, and one thread calls them. Only one adapter is active at a time, so the data of an operation see
the base weights and their own adapter: N training clients compute what N separate trainers would, and hold the base
once. The passes are the trainer's own (``areal_actors.training``): rows are packed without padding, and only the head's
scores of targets are kept.

::

    base W, frozen ─┬─ adapter run-a:  A, B, gradients, moments        W + (alpha / rank) B A
                    ├─ adapter run-b
                    └─ (none)                                          the base itself
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attrs import define, field, frozen
from torch import Tensor

from areal_actors.domain import Floats, Ints
from areal_actors.errors import CheckpointError, InvalidRequest, TrainingDiverged
from areal_actors.models import model_shape
from areal_actors.training.config import LoraConfig, TrainerConfig
from areal_actors.training.directories import write_tensors
from areal_actors.training.forward import score_pack
from areal_actors.training.lora import find_adapted, load_adapter_tensors, write_adapter
from areal_actors.training.model_checks import require_supported
from areal_actors.training.packing import Pack, Segment
from areal_actors_tinker.losses import TARGETS, find_loss, require_inputs
from areal_actors_tinker.wire import Datum, PromptScores

ALPHA = 32
"""Tinker's scale of an adapter, whatever its rank."""
MAX_ADAPTERS = 256
_MOMENTS = "optimizer.safetensors"
_PARTS = ("exp_avg", "exp_avg_sq")
"""The moments, as torch's AdamW calls them."""
_DESCRIPTION = "tinker.json"
_PREFIX = "base_model.model."


@frozen(kw_only=True)
class AdapterSettings:
    """What is adapted: the rank, and which kinds of layers. The output head is never adapted."""

    rank: int
    adapts_attention: bool = True
    adapts_mlp: bool = True
    seed: int = 0


@frozen(kw_only=True)
class AdamSettings:
    """The settings of one AdamW step. ``grad_clip_norm`` 0 does not clip."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


@define(kw_only=True, eq=False)
class _Adapter:
    settings: AdapterSettings
    parameters: dict[str, torch.nn.Parameter]
    """The factors by peft's names for files, such as ``…q_proj.lora_A.weight``."""
    optimizer: torch.optim.AdamW = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.reset_optimizer()

    def reset_optimizer(self) -> None:
        """Forget the moments; each step brings settings of its own."""
        self.optimizer = torch.optim.AdamW(self.parameters.values())

    @property
    def num_steps(self) -> int:
        """How many steps the moments have seen."""
        return max((int(state["step"]) for state in self.optimizer.state.values()), default=0)


class AdapterBank:
    """Trains adapters of ``model``, a transformers causal language model that nothing else uses.

    ``max_packed_tokens`` bounds the tokens of one forward pass; a longer datum gets a pass to itself.

    Raises ``ModelError`` for a model whose packed rows are not scored exactly.
    """

    def __init__(self, model: Any, *, max_packed_tokens: int = 4096) -> None:
        # Evaluation mode, also in training: dropout would make every ratio of probabilities random.
        self.model = model.float().eval().requires_grad_(requires_grad=False)
        self._max_packed_tokens = max_packed_tokens
        self._adapters: dict[str, _Adapter] = {}
        self._row_limit = require_supported(self.model, [TrainerConfig()], max_length=None)
        # Before an adapter is in the model: later its factors are linear modules, too.
        self._shapes = find_adapted(self.model, LoraConfig(rank=1, alpha=ALPHA))

    @property
    def vocab_size(self) -> int:
        """The number of token ids."""
        return int(self.model.get_input_embeddings().num_embeddings)

    @property
    def max_length(self) -> int:
        """The most tokens of one datum."""
        limits = [limit for limit in (self._row_limit, model_shape(self.model.config).max_positions) if limit]
        return min(limits, default=1 << 30)

    # ------------------------------------------------------------------------------------------------- adapters

    def create(self, name: str, settings: AdapterSettings) -> None:
        """Add an adapter that changes nothing yet. Raises ``InvalidRequest`` for settings that the model has not."""
        import peft
        from peft.tuners.lora.layer import LoraLayer

        if len(self._adapters) >= MAX_ADAPTERS:
            raise InvalidRequest(f"{MAX_ADAPTERS} models are being trained; unload one first.")
        targets = self._targets(settings)
        if not targets:
            raise InvalidRequest("Neither attention nor MLP layers are to be trained; train one of them.")
        limit = min(min(self._shapes[target]) for target in targets)
        if not 1 <= settings.rank <= limit:
            raise InvalidRequest(
                f"A rank of {settings.rank} does not fit the model's layers; choose one from 1 to {limit}.",
                param="rank",
            )
        config = peft.LoraConfig(
            r=settings.rank, lora_alpha=ALPHA, target_modules=targets, task_type="CAUSAL_LM", inference_mode=False
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            peft.inject_adapter_in_model(config, self.model, adapter_name=_module_name(name))
        # peft's record of what it has injected. The bank has its own, and peft warns of a second adapter.
        self.model.__dict__.pop("peft_config", None)
        self.model.eval()
        parameters: dict[str, torch.nn.Parameter] = {}
        for place, module in self.model.named_modules():
            if isinstance(module, LoraLayer) and _module_name(name) in module.lora_A:
                for factor in ("lora_A", "lora_B"):
                    weight = getattr(module, factor)[_module_name(name)].weight
                    parameters[f"{_PREFIX}{place}.{factor}.weight"] = weight
        self._adapters[name] = _Adapter(settings=settings, parameters=parameters)

    def _targets(self, settings: AdapterSettings) -> list[str]:
        """Return the modules to adapt, each by its whole name."""
        is_mlp = {name: ".mlp." in name or ".experts." in name or "feed_forward" in name for name in self._shapes}
        return [name for name, found in is_mlp.items() if (settings.adapts_mlp if found else settings.adapts_attention)]

    def remove(self, name: str) -> None:
        """Remove an adapter with its gradients and moments; an unknown one is ignored."""
        from peft.tuners.lora.layer import LoraLayer

        if self._adapters.pop(name, None) is not None:
            for module in self.model.modules():
                if isinstance(module, LoraLayer):
                    module.set_adapter([])  # or peft would make another one active, and say so
                    module.delete_adapter(_module_name(name))

    def settings_of(self, name: str) -> AdapterSettings:
        """Return the settings of an adapter. Raises ``InvalidRequest`` for an unknown one."""
        return self._find(name).settings

    def _find(self, name: str) -> _Adapter:
        found = self._adapters.get(name)
        if found is None:
            raise InvalidRequest(f"There is no model {name!r}; create it first.", param="model_id")
        return found

    @contextmanager
    def _active(self, name: str | None) -> Iterator[None]:
        """Compute with one adapter, or as the base."""
        from peft.tuners.lora.layer import LoraLayer

        layers = [module for module in self.model.modules() if isinstance(module, LoraLayer)]
        for layer in layers:
            module = _module_name(name or "")
            has_it = name is not None and module in layer.lora_A
            layer.enable_adapters(enabled=has_it)
            if has_it:
                layer.set_adapter([module])
        try:
            yield
        finally:
            for layer in layers:
                layer.enable_adapters(enabled=False)

    # -------------------------------------------------------------------------------------------------- training

    def run_pass(
        self,
        name: str,
        data: Sequence[Datum],
        *,
        loss: str,
        settings: Mapping[str, float | str],
        is_forward_only: bool = False,
    ) -> tuple[list[Floats], dict[str, float]]:
        """Score the targets of ``data``, and unless ``is_forward_only`` add the gradient of the loss.

        Returns the log-probabilities of the targets, float32 [N] or [N, K] for each datum, and ``loss:sum``. Gradients
        add up until the next step. Nothing is added if a datum is refused, or if the loss is not finite.

        Raises ``InvalidRequest`` for an unknown loss and data that it cannot take, ``TrainingDiverged`` for a loss that
        is not finite.
        """
        adapter = self._find(name)
        formula, chosen = find_loss(loss, settings)
        self._require_data(loss, formula.inputs, data)
        before = {key: None if p.grad is None else p.grad.clone() for key, p in adapter.parameters.items()}
        found: list[Floats] = [np.zeros(0, dtype=np.float32)] * len(data)
        total = 0.0
        try:
            with self._active(name), torch.set_grad_enabled(not is_forward_only):
                for chosen_data in self._split(data):
                    scores = self._score([data[index] for index in chosen_data])
                    losses = []
                    for index, logprobs in zip(chosen_data, scores, strict=True):
                        inputs = {key: torch.from_numpy(np.array(value)) for key, value in data[index].inputs.items()}
                        floats = {key: value.float() for key, value in inputs.items() if key != TARGETS}
                        losses.append(formula.formula(logprobs, floats, chosen))
                        found[index] = logprobs.detach().numpy()
                    part = torch.stack(losses).sum()
                    total += _finite(part, loss)
                    if part.requires_grad:
                        part.backward()  # type: ignore[no-untyped-call] # torch does not annotate it
        except BaseException:
            for key, parameter in adapter.parameters.items():
                parameter.grad = before[key]
            raise
        return found, {"loss:sum": total}

    def _require_data(self, loss: str, inputs: Sequence[str], data: Sequence[Datum]) -> None:
        if not data:
            raise InvalidRequest("There are no data; send at least one.", param="data")
        for index, datum in enumerate(data):
            require_inputs(loss, (TARGETS, *inputs), datum.inputs, index)
            self.require_tokens(datum.tokens, f"Datum {index}")
            shape = datum.inputs[TARGETS].shape
            if not 1 <= len(shape) <= 2 or shape[0] != len(datum.tokens):  # noqa: PLR2004 - [N] or [N, K]
                raise InvalidRequest(
                    f"target_tokens of datum {index} have the shape {list(shape)}, and the model reads "
                    f"{len(datum.tokens)} tokens; there is one target, or a row of them, for each.",
                    param="data",
                )
            self.require_ids(datum.inputs[TARGETS], f"target_tokens of datum {index}")
            for name in inputs:
                if datum.inputs[name].shape != shape:
                    raise InvalidRequest(
                        f"{name} of datum {index} has the shape {list(datum.inputs[name].shape)}, and target_tokens "
                        f"{list(shape)}.",
                        param="data",
                    )
                if not np.isfinite(datum.inputs[name]).all():
                    raise InvalidRequest(f"{name} of datum {index} has a value that is not finite.", param="data")

    def require_tokens(self, tokens: Ints, place: str) -> None:
        """Raise ``InvalidRequest`` for tokens that the model cannot read."""
        if not len(tokens):
            raise InvalidRequest(f"{place} has no tokens.", param="data")
        if len(tokens) > self.max_length:
            raise InvalidRequest(f"{place} has {len(tokens)} tokens; the model reads {self.max_length}.", param="data")
        self.require_ids(tokens, place)

    def require_ids(self, ids: np.typing.NDArray[Any], place: str) -> None:
        """Raise ``InvalidRequest`` for ids outside the vocabulary."""
        wrong = ids[(ids < 0) | (ids >= self.vocab_size)]
        if wrong.size:
            raise InvalidRequest(
                f"{place} has the token id {wrong.flat[0]}, outside the vocabulary of {self.vocab_size}.", param="data"
            )

    def _split(self, data: Sequence[Datum]) -> list[list[int]]:
        """Return the indices of the data of each pass, in order."""
        passes: list[list[int]] = []
        size = 0
        for index, datum in enumerate(data):
            if not passes or size + len(datum.tokens) > self._max_packed_tokens:
                passes.append([])
                size = 0
            passes[-1].append(index)
            size += len(datum.tokens)
        return passes

    def _score(self, data: Sequence[Datum]) -> list[Tensor]:
        """Return the log-probabilities of the targets of ``data``, float32 [N] or [N, K] each."""
        shapes = [datum.inputs[TARGETS].shape for datum in data]
        flat = score_pack(self.model, _pack([datum.tokens for datum in data], [d.inputs[TARGETS] for d in data]))
        parts = torch.split(flat.logprobs.cpu(), [math.prod(shape) for shape in shapes])
        return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]

    def step(self, name: str, settings: AdamSettings) -> dict[str, float]:
        """Update an adapter with AdamW from the gradients since its last step, and forget them.

        Without a gradient nothing moves but by decay and earlier moments. Raises ``TrainingDiverged`` if a gradient is
        not finite: weights and moments are then unchanged, and the gradients forgotten.
        """
        adapter = self._find(name)
        parameters = list(adapter.parameters.values())
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        try:
            limit = settings.grad_clip_norm if settings.grad_clip_norm > 0 else math.inf
            norm = torch.nn.utils.clip_grad_norm_(parameters, limit)
            if not torch.isfinite(norm):
                raise TrainingDiverged(f"The gradient has the norm {float(norm)}; the weights were not changed.")
            adapter.optimizer.param_groups[0].update(
                lr=settings.learning_rate,
                betas=(settings.beta1, settings.beta2),
                eps=settings.eps,
                weight_decay=settings.weight_decay,
            )
            adapter.optimizer.step()
        finally:
            adapter.optimizer.zero_grad()
        return {"grad_norm": float(norm), "unclipped_grad_l2:mean": float(norm)}

    # --------------------------------------------------------------------------------------------------- prompts

    def score_prompt(
        self, directory: Path | None, tokens: Ints, *, top: int = 0, targets: Ints | None = None
    ) -> PromptScores:
        """Score the tokens of a prompt under the weights in ``directory``, or of the base.

        ``top`` asks for the most probable tokens at each position, ``targets`` int32 [T - 1, K] for the
        log-probabilities of these tokens; -1 in it asks for nothing.
        """
        self.require_tokens(tokens, "The prompt")
        with self._loaded(directory) as name, self._active(name), torch.no_grad():
            if not top and targets is None:
                found = score_pack(self.model, _pack([tokens[:-1]], [tokens[1:]])) if len(tokens) > 1 else None
                own = np.zeros(0, dtype=np.float32) if found is None else found.logprobs.numpy()
                return PromptScores(logprobs=np.concatenate([[np.nan], own]).astype(np.float32))
            ids = torch.from_numpy(tokens.astype(np.int64))
            logprobs = self.model(input_ids=ids[None], use_cache=False).logits[0].float().log_softmax(-1)[:-1]
        own = logprobs.gather(-1, ids[1:, None])[:, 0].numpy()
        best = None
        if top:
            values, places = logprobs.topk(min(top, logprobs.shape[-1]), dim=-1)
            none = np.zeros((1, values.shape[1]))
            best = (
                np.concatenate([none, places.numpy()]).astype(np.int32),
                np.concatenate([none - 99999.0, values.numpy()]).astype(np.float32),
            )
        named = None
        if targets is not None:
            if targets.ndim != 2 or len(targets) != len(tokens) - 1:  # noqa: PLR2004 - positions and alternatives
                raise InvalidRequest(
                    f"target_prompt_logprobs has the shape {list(targets.shape)}; it needs {len(tokens) - 1} rows.",
                    param="target_prompt_logprobs",
                )
            self.require_ids(targets[targets >= 0], "target_prompt_logprobs")
            chosen = logprobs.gather(-1, torch.from_numpy(targets.clip(0).astype(np.int64))).numpy()
            named = np.where(targets >= 0, chosen, 0.0).astype(np.float32)
        scores = np.concatenate([[np.nan], own]).astype(np.float32)
        return PromptScores(logprobs=scores, top=best, targets=named)

    @contextmanager
    def _loaded(self, directory: Path | None) -> Iterator[str | None]:
        """Have the adapter in ``directory`` for a block, under a name of its own."""
        if directory is None:
            yield None
            return
        name = "prompt"
        self.create(name, read_settings(directory))
        try:
            self._copy(self._find(name), load_adapter_tensors(directory), directory)
            yield name
        finally:
            self.remove(name)

    # -------------------------------------------------------------------------------------------------- weights

    def save(self, name: str, directory: Path, *, has_moments: bool) -> None:
        """Write an adapter as a directory that peft loads, with its moments if it is to be trained on.

        Raises ``CheckpointError`` if it cannot be written.
        """
        adapter = self._find(name)
        settings = adapter.settings
        targets = sorted({key.removeprefix(_PREFIX).rpartition(".lora_")[0] for key in adapter.parameters})
        documents: dict[str, dict[str, Any]] = {
            "adapter_config.json": {
                "peft_type": "LORA",
                "task_type": "CAUSAL_LM",
                "base_model_name_or_path": str(self.model.config.name_or_path),
                "r": settings.rank,
                "lora_alpha": ALPHA,
                "lora_dropout": 0.0,
                "bias": "none",
                "target_modules": targets,
                "inference_mode": True,
            },
            _DESCRIPTION: {
                "rank": settings.rank,
                "adapts_attention": settings.adapts_attention,
                "adapts_mlp": settings.adapts_mlp,
                "num_steps": adapter.num_steps if has_moments else None,
            },
        }
        tensors = {key: parameter.detach().cpu().contiguous() for key, parameter in adapter.parameters.items()}
        write_adapter(directory, tensors, documents)
        if has_moments:
            moments = {
                f"{part}/{key}": adapter.optimizer.state[parameter][part].cpu()
                for key, parameter in adapter.parameters.items()
                if parameter in adapter.optimizer.state
                for part in _PARTS
            }
            write_tensors(directory / _MOMENTS, moments)

    def load(self, name: str, directory: Path, *, has_moments: bool) -> None:
        """Load an adapter, whose gradients are forgotten; with ``has_moments`` its optimiser continues.

        Raises ``CheckpointError`` if the files do not fit this adapter.
        """
        from safetensors.torch import load_file

        adapter = self._find(name)
        self._copy(adapter, load_adapter_tensors(directory), directory)
        adapter.reset_optimizer()
        if not has_moments:
            return
        num_steps = _read(directory)["num_steps"]
        if num_steps is None or not (directory / _MOMENTS).is_file():
            raise CheckpointError(f"{directory} has no state of an optimiser; load the weights alone.")
        stored = load_file(directory / _MOMENTS)
        for key, parameter in adapter.parameters.items():
            if f"{_PARTS[0]}/{key}" in stored:
                moments = {part: stored[f"{part}/{key}"] for part in _PARTS}
                adapter.optimizer.state[parameter] = {"step": torch.tensor(float(num_steps)), **moments}

    def _copy(self, adapter: _Adapter, tensors: Mapping[str, Tensor], directory: Path) -> None:
        own = adapter.parameters
        misfits = sorted(own.keys() ^ tensors.keys())
        misfits += [key for key in own.keys() & tensors.keys() if own[key].shape != tensors[key].shape]
        if misfits:
            raise CheckpointError(
                f"The adapter in {directory.name} does not fit the model: {misfits[0]} differs. "
                "Its rank or its layers are others; create a client from the checkpoint instead."
            )
        with torch.no_grad():
            for key, parameter in own.items():
                parameter.copy_(tensors[key])
                parameter.grad = None

    def merged(self, directory: Path) -> dict[str, Tensor]:
        """Return the weights of the plain model with the adapter in ``directory``, in new memory where they differ.

        Raises ``CheckpointError`` if it is of another model.
        """
        factors, settings = load_adapter_tensors(directory), read_settings(directory)
        state = {key.replace(".base_layer", ""): w for key, w in self.model.state_dict().items() if ".lora_" not in key}
        for key in sorted(factors):
            if ".lora_A." not in key:
                continue
            target = f"{key.removeprefix(_PREFIX).rpartition('.lora_A.')[0]}.weight"
            if target not in state:
                raise CheckpointError(f"The adapter in {directory} changes {target}, which the model has not.")
            state[target] = torch.addmm(
                state[target], factors[key.replace(".lora_A.", ".lora_B.")], factors[key], alpha=ALPHA / settings.rank
            )
        return state

    def export(self, adapter: Path, directory: Path, *, files: Path) -> None:
        """Write the merged weights of the adapter in ``adapter`` as a model of transformers.

        ``files`` is the directory of the base model, whose tokenizer is copied. Raises ``CheckpointError``.
        """
        from transformers import AutoModelForCausalLM

        from areal_actors.training.weights import export_model

        # A model without weights, since the one in memory has the layers of adapters in it.
        with torch.device("meta"):
            plain: Any = AutoModelForCausalLM.from_config(self.model.config)
        export_model(plain, directory, state=self.merged(adapter), tokenizer_directory=files)


def _finite(total: Tensor, loss: str) -> float:
    """Return a loss as a number. Raises ``TrainingDiverged`` if it is none."""
    value = float(total.detach())
    if not math.isfinite(value):
        raise TrainingDiverged(f"The loss {loss} is {value}; the data was not used.")
    return value


def read_settings(directory: Path) -> AdapterSettings:
    """Return the settings of the adapter in ``directory``. Raises ``CheckpointError``."""
    found = _read(directory)
    return AdapterSettings(
        rank=found["rank"], adapts_attention=found["adapts_attention"], adapts_mlp=found["adapts_mlp"]
    )


def _read(directory: Path) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads((directory / _DESCRIPTION).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{directory} is no checkpoint of this server: {error}.") from error
    return document


def _module_name(name: str) -> str:
    """Return the key of an adapter in peft's dictionaries of modules, which admit no dot."""
    return name.replace(".", "_")


def _pack(sequences: Sequence[Ints], targets: Sequence[np.typing.NDArray[Any]]) -> Pack:
    """Return a pass over ``sequences`` one after another, none of which attends to another.

    ``targets`` are scored where they stand: [N] or [N, K] for each sequence of N tokens.
    """
    starts = np.cumsum([0, *map(len, sequences)])
    nothing = np.zeros(0, dtype=np.int64)
    sources = [
        np.repeat(np.arange(start, start + len(sequence)), target.size // len(sequence))
        for start, sequence, target in zip(starts, sequences, targets, strict=False)
    ]
    return Pack(
        input_ids=np.concatenate(sequences).astype(np.int64)[None],
        position_ids=np.concatenate([np.arange(len(sequence)) for sequence in sequences])[None],
        segments=tuple(
            Segment(start=int(start), stop=int(start) + len(sequence), ancestors=nothing)
            for start, sequence in zip(starts, sequences, strict=False)
        ),
        rows=tuple(range(len(sequences))),
        sources=np.concatenate(sources),
        targets=np.concatenate([target.reshape(-1) for target in targets]).astype(np.int64),
        num_tokens=int(starts[-1]),
    )
