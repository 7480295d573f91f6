"""Find the files of a model by its name, and load a policy from them.

A model is a directory in the layout of transformers (``config.json``, safetensors, a tokenizer), an id of the Hugging
Face hub, or one of the names in ``BUILT_IN``, which are created once and cached. ``rendering`` checks the tokenizer and
its chat template, and may be given another template.

An id of the hub is ``owner/name``, with a branch, tag or commit after ``@`` if not the newest. A model that is in the
hub's cache on this machine is used as it is, without asking the hub whether there is a newer one: all parts of a run
have to see the same files, and a resumed run those that it began with.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, NoReturn

from attrs import frozen

from areal_actors.errors import ModelError
from areal_actors.lib.telemetry import quiet_transformers
from areal_actors.models.built_in import convert_smollm2, create_tiny

BUILT_IN: Mapping[str, Callable[[Path], Path]] = {"smollm2-135m-instruct": convert_smollm2, "tiny": create_tiny}
"""Names that require no files from the user, with the function that creates a model in a cache directory."""

_PARTS: Mapping[str, Sequence[str]] = {
    "config.json": ("config.json",),
    "its weights (*.safetensors)": ("*.safetensors", "pytorch_model*.bin"),
    "its tokenizer (tokenizer.json)": ("tokenizer.json", "tokenizer.model", "tokenizer_config.json"),
}
"""The parts of a model by their names in messages. A file must match one of the patterns of each."""

_TOKENIZER = "its tokenizer (tokenizer.json)"


@frozen(kw_only=True)
class ModelFiles:
    """A model on disk. ``path`` is a directory that transformers and inference servers load without changes."""

    name: str
    path: Path


def cache_directory(environment: Mapping[str, str] | None = None) -> Path:
    """Return the directory for converted models.

    It is ``$AREAL_CACHE`` if set, else ``areal_actors`` in the user's cache directory.
    """
    environment = os.environ if environment is None else environment
    if environment.get("AREAL_CACHE"):
        return Path(environment["AREAL_CACHE"]).expanduser().absolute()
    return Path(environment.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute() / "areal_actors"


def resolve_model(name: str, *, cache: Path | None = None, has_tokenizer: bool = True) -> ModelFiles:
    """Return the files of a built-in name, of a directory, or of an id of the hub.

    Blocks while a built-in model is created for the first time, or a model is downloaded. ``has_tokenizer`` is false
    for a model whose tokenizer is elsewhere. Raises ``ModelError`` with the missing parts, and how to get them.
    """
    parts = [part for part in _PARTS if has_tokenizer or part != _TOKENIZER]
    return _resolve(name, cache=cache, parts=parts, what="model")


def resolve_tokenizer(name: str, *, cache: Path | None = None) -> ModelFiles:
    """Return the files of a tokenizer: a built-in model, or a directory or an id of the hub that needs no weights.

    Raises ``ModelError`` if there is none.
    """
    return _resolve(name, cache=cache, parts=(_TOKENIZER,), what="tokenizer")


def _resolve(name: str, *, cache: Path | None, parts: Sequence[str], what: str) -> ModelFiles:
    if name in BUILT_IN:
        return ModelFiles(name=name, path=BUILT_IN[name](cache or cache_directory()))
    path, short = Path(name).expanduser(), None
    if not path.exists() and is_hub_id(name):
        path, short = (
            fetch_snapshot(name, has_weights=what == "model", has_tokenizer=_TOKENIZER in parts),
            name.partition("@")[0].rpartition("/")[2],
        )
    if not path.is_dir():
        if path.is_file():
            raise ModelError(f"The {what} {name!r} is a file; name the directory that holds it and its config.json.")
        near = get_close_matches(name.lower(), BUILT_IN, n=1, cutoff=0.7)
        hint = (
            f"did you mean {near[0]!r}?"
            if near
            else "name a directory on this machine, or owner/name on the Hugging Face hub."
        )
        raise ModelError(
            f"There is no {what} {name!r}, neither a directory nor one of {', '.join(sorted(BUILT_IN))}: {hint}"
        )
    missing = [part for part in parts if not any(any(path.glob(pattern)) for pattern in _PARTS[part])]
    if missing:
        raise ModelError(
            f"{path} holds no complete {what}: it lacks {', '.join(missing)}. "
            "Save model and tokenizer there with save_pretrained()."
        )
    return ModelFiles(name=short or path.resolve().name, path=path.resolve())


def create_empty_policy(path: Path) -> Any:
    """Return the model at ``path`` without its weights: they are on the meta device, and buffers on the CPU.

    It takes the memory of its largest weight for a moment. Raises ``ModelError`` if its configuration cannot be read.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    factory: Any = AutoModelForCausalLM
    register = torch.nn.Module.register_parameter

    def register_empty(module: torch.nn.Module, name: str, param: Any) -> None:
        if param is not None and not param.is_meta:
            param = torch.nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        register(module, name, param)

    # ``torch.device("meta")`` would take buffers along, whose values (frequencies of positions) are in no file.
    torch.nn.Module.register_parameter = register_empty  # type: ignore[method-assign, assignment]
    try:
        with quiet_transformers(), no_init_weights():
            config = AutoConfig.from_pretrained(path, local_files_only=True)
            model = factory.from_config(config, dtype=torch.float32).eval()
            # This is usually a part of the initialisation, which is left out here.
            model.tie_weights()
            return model
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelError(f"The model in {path} cannot be read: {error}") from error
    finally:
        torch.nn.Module.register_parameter = register  # type: ignore[method-assign]


def load_policy(path: Path, *, dtype: Literal["float32", "bfloat16", "float16"] = "float32") -> Any:
    """Load the model at ``path`` as a transformers causal LM in evaluation mode, on the CPU.

    Raises ``ModelError`` if it cannot be read, or if its files lack weights, which transformers would initialise
    randomly.
    """
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    factory: Any = AutoModelForCausalLM
    try:
        with quiet_transformers():
            model, report = factory.from_pretrained(
                path, dtype=getattr(torch, dtype), local_files_only=True, output_loading_info=True
            )
    except (OSError, ValueError, RuntimeError, KeyError, ImportError, SafetensorError) as error:
        raise ModelError(f"The model in {path} cannot be read: {error}") from error
    if missing := sorted(report["missing_keys"]):
        raise ModelError(f"The files in {path} lack {len(missing)} weights, {missing[0]} among them; save it again.")
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if (
        getattr(model.config, "tie_word_embeddings", False)
        and head is not None
        and head.weight is not embeddings.weight
    ):
        # The files hold another head, and transformers did not tie it. Servers go by the configuration that is saved.
        model.config.tie_word_embeddings = False
    return model.eval()


_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")

_TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.jinja",
    "config.json",
)
_WEIGHT_FILES = ("*.json", "*.safetensors", "*.model", "*.txt")


def is_hub_id(name: str) -> bool:
    """Return whether ``name`` has the form of an id."""
    return _ID.fullmatch(name) is not None and len(name) <= 200  # noqa: PLR2004 - ids have at most 96, revisions fewer


def fetch_snapshot(name: str, *, has_weights: bool, has_tokenizer: bool = True) -> Path:
    """Return the directory of a model or, without weights, of a tokenizer. Blocks while files are downloaded.

    ``has_tokenizer`` is false for a model whose tokenizer is elsewhere.

    Weights in safetensors are taken if there are some, files in sub-directories never. Raises ``ModelError`` if the hub
    does not have it or cannot be reached.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    repository, _, revision = name.partition("@")
    endpoint = os.environ.get("HF_ENDPOINT")

    def fetch(patterns: Sequence[str], *, is_local: bool = False) -> Path:
        found = snapshot_download(
            repository,
            revision=revision or None,
            endpoint=endpoint,
            allow_patterns=list(patterns),
            ignore_patterns=["*/*"],
            local_files_only=is_local,
        )
        return Path(found)

    def is_complete(path: Path) -> bool:
        """Return whether no file is missing; an interrupted download has only some."""
        names = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
        lacks_tokenizer = has_tokenizer and not any((path / name).exists() for name in names)
        return not lacks_tokenizer and (_has_weights(path) or not has_weights)

    patterns = (*_TOKENIZER_FILES, *_WEIGHT_FILES) if has_weights else _TOKENIZER_FILES
    try:
        cached = fetch(patterns, is_local=True)
    except (OSError, ValueError):
        # The model is not in the cache, or only a part of it.
        cached = None
    if cached is not None and is_complete(cached):
        return cached
    try:
        path = fetch(patterns)
        return path if is_complete(path) else fetch((*patterns, "pytorch_model*.bin"))
    except GatedRepoError:
        raise ModelError(
            f"{repository} is gated: accept its terms on the hub, and log in with 'hf auth login'."
        ) from None
    except RepositoryNotFoundError:
        raise ModelError(
            f"There is no model {repository!r}: neither a directory here nor a model on the hub. "
            "If it is private, log in with 'hf auth login'."
        ) from None
    except RevisionNotFoundError:
        raise ModelError(f"{repository} has no revision {revision!r} on the hub.") from None
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, HfHubHTTPError, OSError) as error:
        _refuse_offline(repository, error)


def _refuse_offline(repository: str, error: Exception) -> NoReturn:
    from huggingface_hub.constants import HF_HUB_OFFLINE

    cause = error.__cause__ or error
    # The first line of the cause: huggingface_hub appends paragraphs of advice about its own settings.
    reason = (
        "HF_HUB_OFFLINE is set" if HF_HUB_OFFLINE else f"{type(cause).__name__}: {str(cause).partition(chr(10))[0]}"
    )
    raise ModelError(
        f"{repository!r} is neither a directory here nor complete in the cache of the hub, and the hub cannot be "
        f"reached ({reason}). With a network, run 'hf download {repository} --local-dir DIRECTORY', and name that "
        "directory here."
    ) from error


def _has_weights(path: Path) -> bool:
    try:
        index = json.loads((path / "model.safetensors.index.json").read_text(encoding="utf-8"))
        shards = set(index["weight_map"].values())
    except (OSError, ValueError, KeyError):
        shards = set()
    found = {file.name for pattern in ("*.safetensors", "pytorch_model*.bin") for file in path.glob(pattern)}
    return (path / "config.json").exists() and bool(found) and shards <= found
