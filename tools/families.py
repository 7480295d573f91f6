"""Every causal language model of the installed transformers, tiny, in the variants that its configuration has.

``python -m tools.families [TYPE ...]`` prints a line for each variant: it is trained, published and sampled as plain
transformers computes it in float32, or refused in a sentence. It fails if one ends in anything else. ``--page FILE``
writes the table of all of them.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import json
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from attrs import frozen
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from areal_actors.domain import InteractionId, SessionId, Trajectory
from areal_actors.errors import ArealError
from areal_actors.generation.torch.config import TorchEngineConfig
from areal_actors.generation.torch.engine import plan_engine
from areal_actors.models import load_policy, require_fixed_rotation
from areal_actors.training.config import (
    Activations,
    ComputeDtype,
    Layout,
    LoraConfig,
    OptimizerConfig,
    OptimizerName,
    TrainerConfig,
)
from areal_actors.training.memory import plan_trainer
from areal_actors.training.model_checks import require_supported
from areal_actors.training.phases import sft_phase, supervised_group
from areal_actors.training.trainer import PolicyTrainer
from areal_actors.training.weights import export_model
from tools.family_engine import check_samples

TYPES = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
NUM_POSITIONS, VOCABULARY = 64, 97
_WIDTHS = dict.fromkeys(
    ("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "attention_hidden_size", "lru_width"), 32
)
_WIDTHS |= dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size", "encoder_ffn_dim", "decoder_ffn_dim"), 48)
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers")
_COUNTS = dict.fromkeys(_LAYERS, 2)
_COUNTS |= dict.fromkeys(
    ("num_attention_heads", "n_head", "n_heads", "encoder_attention_heads", "decoder_attention_heads"), 4
)
_COUNTS |= {"num_key_value_heads": 2, "vocab_size": VOCABULARY}
_COUNTS |= dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), NUM_POSITIONS)
_HEADS = dict.fromkeys(
    ("head_dim", "global_head_dim", "kv_channels", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8
)
_HEADS |= {"rotary_dim": 4, "q_lora_rank": 16, "kv_lora_rank": 16}
_EXPERTS = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4)
_EXPERTS |= dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1)
_EXPERTS |= {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
_STATES = dict.fromkeys(("linear_num_value_heads", "mamba_num_heads", "mamba_n_heads"), 4)
_STATES |= dict.fromkeys(("mamba_head_dim", "mamba_d_head", "ssm_state_size", "mamba_d_state", "state_size"), 16)
_STATES |= {"linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "mamba_d_ssm": 64}
_STATES |= {"n_groups": 1, "mamba_n_groups": 1, "linear_head_dim": 8, "linear_num_heads": 4}
_PERIODS = {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
_OTHERS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "sliding_window": 16, "initializer_range": 0.2}
_OTHERS |= {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY}
_OWN: Mapping[str, Mapping[str, Any]] = {
    # Each of these has a layer with attention beside one with a state.
    "bailing_hybrid": {"num_key_value_heads": 4},
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "kimi_linear": {"num_key_value_heads": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 4, "head_dim": 16},
    "zaya": {"num_experts_per_tok": 1},
    # It reads positions after the last token, too.
    "prophetnet": {"max_position_embeddings": NUM_POSITIONS + 8},
    "xlnet": {"d_head": 8},
}
"""Settings that only these types have, or take no other value of."""
_SMALL = _WIDTHS | _COUNTS | _HEADS | _EXPERTS | _STATES | _PERIODS | _OTHERS
_LEFT_OUT = (
    (),
    ("layers",),
    ("sliding_window",),
    ("num_key_value_heads",),
    ("head_dim",),
    ("head_dim", "num_key_value_heads"),
)
"""Settings that some families refuse together with the others; ``layers`` are those that differ by layer."""
_MAX_WEIGHTS = 30_000_000
_MAX_KINDS = 4
_LONG = {"original_max_position_embeddings": 32, "factor": 4.0}
_ROTATIONS: Mapping[str, Mapping[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": _LONG,
    "llama3": _LONG | {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "longrope": _LONG | {"short_factor": [1.0] * 4, "long_factor": [4.0, 6.0, 8.0, 10.0]},
    "partial": {"partial_rotary_factor": 0.5},
}
_NOT_OF_THE_MODEL = (
    *("output_", "use_cache", "return_dict", "is_encoder_decoder", "is_decoder", "use_mamba_kernels"),
    # It changes how weights begin, which transformers 5.23 repeats for weights of Mamba that it has loaded.
    "rescale_prenorm_residual",
)
_ROWS = ((12, 28), (12, 6), (12, 1), (0, 19))
"""The tokens of each row that it shares with others, and its own; the first row exceeds windows and rotations."""
_RATE = 1e3
"""The learning rate of the step whose gradient is compared: large, so that rounding of the new weights is not."""
TOLERANCE = 1e-5
_SLACK = 5
"""How far results may be from exact ones, by the error of transformers in float32, where that exceeds the tolerance."""


@frozen(kw_only=True)
class Cell:
    """A variant of a type of model: what differs from its tiny configuration."""

    model_type: str
    changes: Mapping[str, Any]

    def __str__(self) -> str:
        """Return the type and the change."""
        rotation = self.changes.get("rope_parameters")
        changes = {"rope": rotation} if isinstance(rotation, str) else self.changes
        return " ".join([self.model_type, *(f"{name}={value}" for name, value in changes.items())])


def cells_of(model_type: str) -> Iterator[Cell]:
    """Yield the variants of a type: each switch of its configuration turned over, rotations, and no window."""
    yield Cell(model_type=model_type, changes={})
    try:
        text = CONFIG_MAPPING[model_type]().get_text_config()
    except Exception:  # noqa: BLE001 - has no default, so that no model of it is built either
        return
    for name, value in sorted(vars(text).items()):
        if isinstance(value, bool) and not name.startswith(("_", *_NOT_OF_THE_MODEL)):
            yield Cell(model_type=model_type, changes={name: not value})
    if getattr(text, "sliding_window", None):
        yield Cell(model_type=model_type, changes={"sliding_window": None})
    if isinstance(getattr(text, "rope_parameters", None), Mapping):
        yield from (Cell(model_type=model_type, changes={"rope_parameters": kind}) for kind in _ROTATIONS)


def create_tiny_config(
    model_type: str, left_out: tuple[str, ...] = (), changes: Mapping[str, Any] | None = None
) -> Any:
    """A small configuration of this type with one layer of each kind; those that nest the text model's get its own."""
    kind = CONFIG_MAPPING[model_type]
    default = kind()
    text = default.get_text_config()
    names = {*inspect.signature(type(text).__init__).parameters, *vars(text), *type(text).attribute_map}
    hidden = {type(text).attribute_map[name] for name in _SMALL if name in type(text).attribute_map}
    chosen = {name: size for name, size in _SMALL.items() if name in names - hidden - {*left_out}}
    if "layers" not in left_out:
        chosen |= _one_layer_of_each_kind(text)
    chosen |= _OWN.get(text.model_type, {})
    chosen |= {name: value for name, value in (changes or {}).items() if name != "rope_parameters"}
    if changes and "rope_parameters" in changes:
        chosen["rope_parameters"] = _rotation(type(text)(**chosen).rope_parameters, changes["rope_parameters"])
    small = type(text)(**chosen)
    if text is default:
        return small
    key = next(name for name, value in vars(default).items() if value is text)
    return kind(**{key: small.to_dict()})


def _one_layer_of_each_kind(text: Any) -> dict[str, Any]:
    """Return the settings that differ by layer, cut to the first layer of each kind, and the number of those."""
    name = next((name for name in _LAYERS if name in vars(text)), None)
    if name is None:
        return {}
    num_layers = getattr(text, name)
    differing = {
        key: value for key, value in vars(text).items() if isinstance(value, list) and len(value) == num_layers
    }
    if not differing:
        return {}
    kinds = list(zip(*differing.values(), strict=True))
    chosen = sorted({kinds.index(kind) for kind in kinds})[:_MAX_KINDS]
    chosen = chosen if len(chosen) > 1 else [0, 0]
    return {name: len(chosen)} | {key: [value[index] for index in chosen] for key, value in differing.items()}


def _rotation(found: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return the rotation changed to ``kind``; that of each type of layer where they differ."""
    if found and all(isinstance(each, Mapping) for each in found.values()):
        return {name: _rotation(each, kind) for name, each in found.items()}
    return {"rope_theta": 1e4, **found, "rope_type": "default" if kind == "partial" else kind, **_ROTATIONS[kind]}


def create_tiny_model(model_type: str, changes: Mapping[str, Any] | None = None) -> Any | None:
    """A small random model of this type; ``None`` if these settings make none."""
    for left_out in _LEFT_OUT:
        try:
            config = create_tiny_config(model_type, left_out, changes)
            with torch.device("meta"):
                num_weights = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters())
            if num_weights > _MAX_WEIGHTS:
                return None
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
            with torch.no_grad():
                for weight in model.parameters():
                    if weight.ndim <= 1:  # biases, scales and sinks, which begin as zeros and ones
                        weight.add_(0.1 * torch.randn_like(weight))
                model(input_ids=torch.tensor([[3, 4, 5]]), use_cache=False)
        except Exception:  # noqa: BLE001 - the settings do not fit the family, which is what is tried here
            continue
        return model
    return None


# -------------------------------------------------------------------------------------------------------- checks


def create_rows(max_length: int) -> list[Trajectory]:
    """Rows of different lengths, most of which share their beginning; all but the first token are trained."""
    generator = np.random.default_rng(0)
    shared = generator.integers(3, VOCABULARY, NUM_POSITIONS)
    rows = []
    for number, (num_shared, num_own) in enumerate(_ROWS):
        own = generator.integers(3, VOCABULARY, num_own)
        ids = np.concatenate([shared[:num_shared], own])[:max_length].astype(np.int32)
        mask = (np.arange(len(ids)) > 0).astype(np.int32)
        rows.append(
            Trajectory(
                session=SessionId("s"),
                interactions=(InteractionId(f"{number}"),),
                input_ids=ids,
                loss_mask=mask,
                logprobs=-1.0 * mask,
                versions=mask - 1,
                returns=1.0 * mask,
                turns=mask - 1,
                reward=1.0,
            )
        )
    return rows


@frozen(kw_only=True)
class Results:
    """Log-probabilities of rows, and the gradients of their mean by name; ``None`` if they were not computed."""

    logprobs: Sequence[Any]
    gradients: Mapping[str, torch.Tensor] | None

    @classmethod
    def plain(cls, model: Any, rows: Sequence[Trajectory], dtype: torch.dtype = torch.float32) -> Results:
        """Return what transformers itself computes for each row alone."""
        model, found = copy.deepcopy(model).to(dtype), []
        if dtype is torch.float64:
            model.set_experts_implementation("eager")  # others have no kernel for it
        for row in rows:
            ids = torch.tensor(row.input_ids.astype(np.int64))[None]
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
            found.append(logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0])
        (-torch.cat(found).mean()).backward()
        gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
        return cls(logprobs=[values.detach().numpy() for values in found], gradients=gradients)

    def errors(self, exact: Results) -> tuple[float, float]:
        """Return the largest relative errors of the log-probabilities of a row, and of the gradient of a weight."""
        pairs = zip(self.logprobs, exact.logprobs, strict=True)
        error = max(float(np.abs(found - right).max() / np.abs(right).max()) for found, right in pairs)
        if self.gradients is None or exact.gradients is None:
            return error, 0.0
        # Of a gradient near 0, such as that of a bias of keys, there is nothing but rounding.
        least = 1e-2 * max(float(right.norm()) for right in exact.gradients.values())
        return error, max(
            float((self.gradients[name] - right).norm()) / max(float(right.norm()), least)
            for name, right in exact.gradients.items()
        )


@frozen(kw_only=True)
class Trial:
    """A model, and the results of transformers that everything else is compared with."""

    model: Any
    max_length: int
    rows: Sequence[Trajectory]
    plain: Results

    @classmethod
    def create(cls, model: Any) -> Trial:
        """Return the trial of a model, with rows up to the length that its rotation allows."""
        limit = require_fixed_rotation(model.config, max_length=1) or NUM_POSITIONS
        rows = create_rows(limit)
        return cls(model=model, max_length=limit, rows=rows, plain=Results.plain(model, rows))

    def judge(self, found: Results) -> str:
        """Return ``ok`` for what transformers computes, or for what is as near to the exact results in float64."""
        errors = found.errors(self.plain)
        if max(errors) <= TOLERANCE:
            return "ok"
        try:
            exact = Results.plain(self.model, self.rows, torch.float64)
        except RuntimeError:  # some layers compute in float32, and multiply that with weights
            exact = self.plain
        pairs = zip(found.errors(exact), self.plain.errors(exact), strict=True)
        if all(error <= max(TOLERANCE, _SLACK * rounding) for error, rounding in pairs):
            return "ok"
        return f"! log-probabilities differ by {errors[0]:.1e}, gradients by {errors[1]:.1e}"


def _config(layout: Layout, **settings: Any) -> TrainerConfig:
    optimizer = OptimizerConfig(
        name=OptimizerName.SGD, learning_rate=_RATE, num_warmup_steps=0, max_grad_norm=None, weight_decay=0.0
    )
    return TrainerConfig(dtype=ComputeDtype.FLOAT32, layout=layout, optimizer=optimizer, **settings)


def train(trial: Trial, config: TrainerConfig) -> str:
    """Score and train rows."""
    phases = [sft_phase(config)]
    trainer = PolicyTrainer(copy.deepcopy(trial.model), phases=phases, max_length=trial.max_length)
    if config.layout is Layout.TREE and not trainer.is_planned:
        return "as flat"
    logprobs = [values[1:] for values in trainer.logprobs(trial.rows)]
    before = {name: weight.detach().double() for name, weight in trainer.model.named_parameters()}
    trainer.train_step([supervised_group(trial.rows)])
    gradients = {name: (before[name] - weight.detach()) / _RATE for name, weight in trainer.model.named_parameters()}
    return trial.judge(Results(logprobs=logprobs, gradients=gradients))


def publish(trial: Trial) -> str:
    """Write the weights as a run does, and load them with transformers."""
    with tempfile.TemporaryDirectory() as directory:
        export_model(trial.model, Path(directory, "weights"))
        loaded = load_policy(Path(directory, "weights"))
    # As a run checks what it loads: transformers leaves some tensors of TrOCR without values.
    require_supported(loaded, [_config(Layout.FLAT)], max_length=trial.max_length)
    return trial.judge(Results.plain(loaded, trial.rows))


def adapt(trial: Trial) -> None:
    """Put an adapter into the model."""
    config = _config(Layout.FLAT, lora=LoraConfig(rank=4))
    PolicyTrainer(copy.deepcopy(trial.model), config, max_length=trial.max_length)


def plan(trial: Trial) -> None:
    """Predict the memory of trainer and engine."""
    config = _config(Layout.FLAT)
    for device in ("cpu", "cuda"):
        plan_trainer(trial.model, config, device_type=device, memory_bytes=1 << 34, num_tokens=NUM_POSITIONS)
    plan_engine(trial.model, TorchEngineConfig(), device_type="cpu")


def sample(trial: Trial) -> None:
    """Sample with the embedded engine, and compare with transformers."""
    check_samples(trial.model, max_length=min(trial.max_length, NUM_POSITIONS))


_ATTEMPTS: Mapping[str, Callable[[Trial], str | None]] = {
    "flat": partial(train, config=_config(Layout.FLAT)),
    "tree": partial(train, config=_config(Layout.TREE)),
    "reload": publish,
    "sample": sample,
}
_FIRST_ATTEMPTS: Mapping[str, Callable[[Trial], str | None]] = {
    "recomputed": partial(train, config=_config(Layout.AUTO, activations=Activations.RECOMPUTE)),
    "adapter": adapt,
    "plan": plan,
}
"""What depends on the type of a model, and not on the variant."""


def try_model(model: Any, *, is_first: bool = True) -> dict[str, str]:
    """Return for each attempt ``ok``, the sentence of a refusal, or anything else, marked with ``!``."""
    results, trial = {}, Trial.create(model)
    for name, attempt in (_ATTEMPTS | _FIRST_ATTEMPTS if is_first else _ATTEMPTS).items():
        try:
            results[name] = attempt(trial) or "ok"
        except ArealError as error:
            results[name] = str(error)
        except Exception as error:  # noqa: BLE001 - which is the finding
            results[name] = f"! {type(error).__name__}: {error}".split("\n", maxsplit=1)[0]
    return results


# ---------------------------------------------------------------------------------------------------------- page

_COLUMNS = {
    "Trained, `flat`": ("flat", "recomputed", "plan"),
    "Trained, `tree`": ("tree",),
    "Adapter": ("adapter",),
    "Published": ("reload",),
    "Embedded engine": ("sample",),
}
_HEAD = """# Model families

`nox -s families` builds every causal language model class of transformers {version} with a few thousand random
weights, in each variant that its configuration has: every switch turned over, every kind of rotary embedding, and no
window. Each is compared with what transformers computes for one row at a time: log-probabilities and gradients of
packed rows that share their beginning and exceed windows, within a relative error of {tolerance:g} in float32, or of
five times that of transformers itself. This page is what it writes.

* *Trained*: log-probabilities and gradients are right. In `tree`, *as flat* means that layers other than attention mix
  tokens, or that the family makes its own masks: `trainer.layout: auto` takes `flat`, and rows are padded.
* *Adapter*: `trainer.lora` accepts the model. *Published*: what is written loads in transformers and computes the same.
* *Embedded engine*: for what it refuses, generate with SGLang or vLLM.

*Yes* holds for all variants; otherwise the number of those is given. What is refused is refused at the start of a run,
before anything is sampled, in the sentences below the table.
"""


def format_page(results: Mapping[str, Mapping[str, str]]) -> str:
    """Return the page of results by the names of cells."""
    lines = [_HEAD.format(version=transformers.__version__, tolerance=TOLERANCE)]
    lines += ["| Type | Variants | " + " | ".join(_COLUMNS) + " |", "|---|---|" + "---|" * len(_COLUMNS)]
    refusals: dict[str, set[str]] = {}
    for model_type in TYPES:
        found = [results[name] for name in results if name.split(" ")[0] == model_type]
        if not found:
            continue
        cells = [_summarise([_worst(each, parts) for each in found if parts[0] in each]) for parts in _COLUMNS.values()]
        lines.append(f"| {model_type} | {len(found)} | " + " | ".join(cells) + " |")
        for sentence in {result for each in found for result in each.values() if result not in ("ok", "as flat")}:
            refusals.setdefault(_without_names(sentence), set()).add(model_type)
    for title, is_wrong in (("What is refused", False), ("What is wrong", True)):
        lines += ["", f"## {title}", ""]
        for sentence, types in sorted(refusals.items()):
            if sentence.startswith("! ") is is_wrong:
                lines += [f"* {sentence.removeprefix('! ')}", f"  ({', '.join(sorted(types))})"]
    absent = [model_type for model_type in TYPES if model_type not in {name.split(" ")[0] for name in results}]
    lines += ["", f"Not built, because no small configuration was found: {', '.join(absent)}."]
    return "\n".join(lines) + "\n"


def _worst(results: Mapping[str, str], parts: Sequence[str]) -> str:
    return next((results[part] for part in parts if results.get(part, "ok") != "ok"), "ok")


def _summarise(results: Sequence[str]) -> str:
    right = [result for result in results if result in ("ok", "as flat")]
    if not right:
        return "no"
    word = "as flat" if "as flat" in right else "yes"
    return word if len(right) == len(results) else f"{word}, {len(right)}"


def _without_names(sentence: str) -> str:
    """Return the first line of a sentence without names of classes, directories and numbers, which differ by family."""
    line = sentence.split("\n", maxsplit=1)[0]
    line = re.sub(r"\b\w*(ForCausalLM|LMHeadModel|Attention|Decoder|ForConditionalGeneration)\b", "The model", line)
    return re.sub(r"(differ by|model in) \S+", r"\1 …", re.sub(r"<class '[^']*'>", "…", line))


def main(arguments: Sequence[str]) -> int:
    """Try the variants of these types, or of all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*", default=TYPES)
    parser.add_argument(
        "--results", type=Path, help="a JSON file of results, which are added to and not computed again"
    )
    parser.add_argument("--page", type=Path, help="where to write the table")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    results: dict[str, dict[str, str]] = {}
    if options.results is not None and options.results.exists():
        results = json.loads(options.results.read_text(encoding="utf-8"))
    # One variant of each type first: a whole run takes an hour.
    cells = [Cell(model_type=name, changes={}) for name in options.types]
    more = (cell for name in options.types if name in results for cell in list(cells_of(name))[1:])
    for cell in chain(cells, more):
        if str(cell) in results:
            continue
        model = create_tiny_model(cell.model_type, cell.changes)
        if model is None:
            continue
        results[str(cell)] = found = try_model(model, is_first=not cell.changes)
        sys.stdout.write(f"{cell}: {' | '.join(f'{name}: {result[:90]}' for name, result in found.items())}\n")
        sys.stdout.flush()
        if options.results is not None:
            options.results.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if options.page is not None:
        options.page.write_text(format_page(results), encoding="utf-8")
    wrong = [name for name, found in results.items() if any(result.startswith("!") for result in found.values())]
    sys.stdout.write(f"{len(results)} variants, {len(wrong)} of them wrong: {', '.join(wrong)}\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
