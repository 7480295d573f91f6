"""Models of the Hugging Face hub by their ids: from its cache on this machine, or else downloaded into it.

An id is ``owner/name``, with a branch, tag or commit after ``@`` if not the newest. A model that is in the cache is
used as it is, without asking the hub whether there is a newer one: all parts of a run have to see the same files, and
a resumed run those that it began with.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from areal_actors.errors import ModelError

__all__ = ["fetch_snapshot", "is_hub_id"]

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")

_TOKENIZER = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.jinja",
    "config.json",
)
_WEIGHTS = ("*.json", "*.safetensors", "*.model", "*.txt")


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
        return (_has_tokenizer(path) or not has_tokenizer) and (_has_weights(path) or not has_weights)

    patterns = (*_TOKENIZER, *_WEIGHTS) if has_weights else _TOKENIZER
    try:
        cached = fetch(patterns, is_local=True)
    except (OSError, ValueError):  # not in the cache, or only a part
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
    reason = (
        "HF_HUB_OFFLINE is set" if HF_HUB_OFFLINE else f"{type(cause).__name__}: {str(cause).partition(chr(10))[0]}"
    )
    raise ModelError(
        f"{repository!r} is neither a directory here nor complete in the cache of the hub, and the hub cannot be "
        f"reached ({reason}). With a network, run 'hf download {repository} --local-dir DIRECTORY', and name that "
        "directory here."
    ) from error


def _has_tokenizer(path: Path) -> bool:
    return any((path / name).exists() for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json"))


def _has_weights(path: Path) -> bool:
    try:
        index = json.loads((path / "model.safetensors.index.json").read_text(encoding="utf-8"))
        shards = set(index["weight_map"].values())
    except (OSError, ValueError, KeyError):
        shards = set()
    found = {file.name for pattern in ("*.safetensors", "pytorch_model*.bin") for file in path.glob(pattern)}
    return (path / "config.json").exists() and bool(found) and shards <= found
