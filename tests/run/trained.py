"""Runs that have trained the tiny model for one step: what tests of trained models ask for by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from click.testing import CliRunner, Result
from transformers import AutoModelForCausalLM, AutoTokenizer

from areal_actors.cli import cli
from areal_actors.generation.model_host import ModelsConfig
from areal_actors.generation.torch.config import TorchEngineConfig
from areal_actors.run.inference import InferenceConfig

CONFIG = Path(__file__).parents[2] / "examples" / "tiny.yaml"
NAME = "my-model/2025-10-23-run-1"
QUESTION = "What is reinforcement learning?"
ENGINE = TorchEngineConfig(dtype="float32", device="cpu", max_concurrent=4, max_length=256)


def train(root: Path, name: str = NAME, *more: str) -> Result:
    """One step of the tiny job, as the run ``name`` below ``root``."""
    experiment, trial = name.split("/")
    settings = (
        f"experiment_name={experiment}",
        f"trial_name={trial}",
        f"fileroot={root}",
        "total_steps=1",
        "batch_size=2",
        "rollout.group_size=4",
        "eval_dataset=null",
        "engine.max_concurrent=8",
        "logging={trackers: [], display: plain}",
        "trainer.dtype=float32",
        "trainer.optimizer.num_warmup_steps=0",
    )
    return CliRunner().invoke(cli, ["train", str(CONFIG), *settings, *more])


def serving(root: Path, **models: Any) -> InferenceConfig:
    """Settings of a service that knows the trained models below ``root``."""
    return InferenceConfig(engine=ENGINE, models=ModelsConfig(fileroot=root, **models))


def greedy_text(weights: Path, question: str = QUESTION, *, num_tokens: int = 12) -> str:
    """What transformers answers by itself with the weights in a directory."""
    tokenizer = AutoTokenizer.from_pretrained(weights)
    model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32).eval()
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**prompt, do_sample=False, max_new_tokens=num_tokens)
    return str(tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))
