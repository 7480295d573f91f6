"""Every causal language model of the installed transformers, tiny: trained and sampled, or refused by name.

``python -m tools.families [TYPE ...]`` prints a line for each, and fails if one ends in any other error.
"""

from __future__ import annotations

import copy
import inspect
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from areal_actors.errors import ArealError
from areal_actors.generation.torch.config import TorchEngineConfig
from areal_actors.generation.torch.engine import plan_engine
from areal_actors.training.config import ComputeDtype, Layout, LoraConfig, TrainerConfig
from areal_actors.training.memory import plan_trainer
from areal_actors.training.trainer import PolicyTrainer
from tools.family_engine import check_samples

TYPES = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
MAX_LENGTH = 32
_WIDTHS = dict.fromkeys(
    ("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "attention_hidden_size", "lru_width"), 32
)
_WIDTHS |= dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size", "encoder_ffn_dim", "decoder_ffn_dim"), 48)
_COUNTS = dict.fromkeys(
    ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2
)
_COUNTS |= dict.fromkeys(
    ("num_attention_heads", "n_head", "n_heads", "encoder_attention_heads", "decoder_attention_heads"), 4
)
_COUNTS |= {"num_key_value_heads": 2, "max_position_embeddings": 64, "n_positions": 64, "vocab_size": 97}
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
_STATES |= {"n_groups": 1, "mamba_n_groups": 1}
_OTHERS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "sliding_window": 16}
_OTHERS |= {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97}
_SMALL = _WIDTHS | _COUNTS | _HEADS | _EXPERTS | _STATES | _OTHERS
_LEFT_OUT = ((), ("sliding_window",), ("num_key_value_heads",), ("head_dim",), ("head_dim", "num_key_value_heads"))
"""Settings that some families refuse together with the others."""
_MAX_WEIGHTS = 30_000_000


def create_tiny_config(model_type: str, left_out: tuple[str, ...] = ()) -> Any:
    """A small configuration of this type; those that nest the text model's get its small one."""
    kind = CONFIG_MAPPING[model_type]
    default = kind()
    text = default.get_text_config()
    names = {*inspect.signature(type(text).__init__).parameters, *vars(text), *type(text).attribute_map}
    hidden = {type(text).attribute_map[name] for name in _SMALL if name in type(text).attribute_map}
    chosen = {name: size for name, size in _SMALL.items() if name in names - hidden - {*left_out}}
    small = type(text)(**chosen)
    if text is default:
        return small
    key = next(name for name, value in vars(default).items() if value is text)
    return kind(**{key: small.to_dict()})


def create_tiny_model(model_type: str) -> Any | None:
    """A small random model of this type; ``None`` if these settings make none."""
    for left_out in _LEFT_OUT:
        try:
            config = create_tiny_config(model_type, left_out)
            with torch.device("meta"):
                num_weights = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters())
            if num_weights > _MAX_WEIGHTS:
                return None
            model = AutoModelForCausalLM.from_config(config).eval()
            with torch.no_grad():
                model(input_ids=torch.tensor([[3, 4, 5]]), use_cache=False)
        except Exception:  # noqa: BLE001 - the settings do not fit the family, which is what is tried here
            continue
        return model
    return None


def attempts(model: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield what a run does with a model, by name."""
    plain = TrainerConfig(dtype=ComputeDtype.FLOAT32)

    def train(config: TrainerConfig) -> None:
        PolicyTrainer(copy.deepcopy(model), config, max_length=MAX_LENGTH)

    def plan() -> None:
        for device in ("cpu", "cuda"):
            plan_trainer(model, plain, device_type=device, memory_bytes=1 << 34, num_tokens=MAX_LENGTH)
        plan_engine(model, TorchEngineConfig(), device_type="cpu")

    for layout in Layout:
        config = TrainerConfig(dtype=ComputeDtype.FLOAT32, layout=layout)
        yield f"train {layout}", lambda config=config: train(config)
    lora = TrainerConfig(dtype=ComputeDtype.FLOAT32, layout=Layout.FLAT, lora=LoraConfig(rank=4))
    yield "adapter", lambda: train(lora)
    yield "plan", plan
    yield "sample", lambda: check_samples(model, max_length=MAX_LENGTH)


def try_model(model: Any) -> dict[str, str]:
    """Return for each attempt ``ok``, the sentence of a refusal, or the error that is neither, marked with ``!``."""
    results = {}
    for name, attempt in attempts(model):
        try:
            attempt()
            results[name] = "ok"
        except ArealError as error:
            results[name] = str(error)
        except Exception as error:  # noqa: BLE001 - which is the finding
            results[name] = f"! {type(error).__name__}: {error}".split("\n", maxsplit=1)[0]
    return results


def main(types: list[str]) -> int:
    """Try the models of these types, or all."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    for model_type in types or TYPES:
        model = create_tiny_model(model_type)
        results = {} if model is None else try_model(model)
        counts["not built" if model is None else "built"] += 1
        for name, result in results.items():
            kind = "ok" if result == "ok" else "raw error" if result.startswith("!") else "refused"
            counts[f"{name}: {kind}"] += 1
        found = " | ".join(f"{name}: {result[:90]}" for name, result in results.items())
        sys.stdout.write(f"{model_type} {found}\n")
        sys.stdout.flush()
    sys.stdout.write(f"{dict(sorted(counts.items()))}\n")
    return int(any(name.endswith("raw error") for name in counts))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
