"""Convert the weights of a model between their form in memory and that of checkpoints. No other module knows both.

transformers arranges the weights of some models differently in memory and in files: the experts of a Mixtral are one
tensor in memory and three tensors per expert on disk. Training, embedded engines and inference servers all convert
weights with these functions, so that every way of publishing gives the same names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor

from areal_actors.errors import ModelError
from areal_actors.lib.telemetry import quiet_transformers

_IN_LAYER = re.compile(r"(?:[^.]+\.)*?\d+\.")
"""The name of a weight up to the number of its layer."""
_SAMPLED = 16
"""Numbers of each tensor in a file that its digest looks at."""


def weight_files(directory: Path) -> dict[str, Sequence[str]]:
    """Return the names of the safetensors files with the weights of ``directory``, and the tensors that each must have.

    As in transformers a single ``model.safetensors`` comes before an index, and the files of an index before others
    that lie next to them, such as the consolidated weights of Mistral. Without either, all files belong to the weights.
    Raises ``OSError``, ``ValueError`` or ``KeyError`` if the index cannot be read.
    """
    index = directory / "model.safetensors.index.json"
    if (directory / "model.safetensors").is_file():
        return {"model.safetensors": ()}
    if not index.is_file():
        return {path.name: () for path in sorted(directory.glob("*.safetensors"))}
    files: dict[str, list[str]] = {}
    for tensor, file in sorted(json.loads(index.read_text(encoding="utf-8"))["weight_map"].items()):
        files.setdefault(file, []).append(tensor)
    return dict(sorted(files.items()))


class LazyTensors(Mapping[str, Tensor]):
    """Tensors by name that are computed each time that they are read."""

    def like(self, name: str) -> Tensor:
        """Return a tensor with the shape and the kind of the one called ``name``, without computing that."""
        return self[name]


def to_checkpoint_tensors(
    model: Any | None, state: Mapping[str, Tensor], *, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Return the weights on the CPU, each once, contiguous, by their names in checkpoints.

    Tied weights keep their first name; programs that load them tie them again.

    Args:
        model: A transformers model of the architecture, on any device; its own weights are not read. With ``None``,
            names are unchanged.
        state: The weights by their names in the model's state dict.
        dtype: The dtype to which floating-point tensors are cast; ``None`` leaves them unchanged.

    Raises:
        ModelError: A value of ``state`` is not a tensor.
    """
    buckets = checkpoint_buckets(model, state, dtype=dtype)
    return {name: tensor for bucket in buckets for name, tensor in bucket.items()}


def checkpoint_buckets(
    model: Any | None, state: Mapping[str, Tensor], *, dtype: torch.dtype | None = None
) -> Iterator[dict[str, Tensor]]:
    """Yield what ``to_checkpoint_tensors`` returns in parts: the weights of one layer, or one weight outside of layers.

    Each tensor of ``state`` is read once, in the order of ``state``, and only when its part is asked for.
    """

    def read(name: str) -> Tensor:
        tensor = state[name].detach()
        # Cast on the device, one tensor at a time, so that fewer bytes leave it.
        cast = tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
        return cast.cpu()

    for names in _bucket_names(model, state):
        # No name for the tensors: a generator that waits would hold them while it makes the next ones.
        yield _reverted(model, {name: read(name) for name in names})


def checkpoint_layout(
    model: Any | None, state: Mapping[str, Tensor], *, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Return tensors without numbers with the names, shapes, formats and order of ``checkpoint_buckets``."""
    buckets = (_reverted(model, _shapes(state, names, dtype)) for names in _bucket_names(model, state))
    return {name: tensor for bucket in buckets for name, tensor in bucket.items()}


def _bucket_names(model: Any | None, state: Mapping[str, Tensor]) -> list[list[str]]:
    """Return the names of the weights, each once, by the parts that are converted together."""
    # Held until the end: what is freed gives its identity to the next one.
    tensors = {name: _alike(state, name) for name in state}
    distinct: dict[int, str] = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise ModelError(f"{name} of the snapshot is a {type(tensor).__name__} and no tensor.")
        # Empty tensors, and those without numbers, all have the address 0.
        distinct.setdefault(tensor.data_ptr() or id(tensor), name)
    parts: dict[str, list[str]] = {}
    for name in distinct.values():
        layer = _IN_LAYER.match(name)
        parts.setdefault(layer[0] if layer else name, []).append(name)
    buckets = list(parts.values())
    if model is None or not getattr(model, "_weight_conversions", True):
        return buckets
    # A conversion that combines weights of several parts would give other names.
    names = [name for bucket in buckets for name in bucket]
    apart = {name for bucket in buckets for name in _reverted(model, _shapes(state, bucket, None))}
    return buckets if apart == _reverted(model, _shapes(state, names, None)).keys() else [names]


def _alike(state: Mapping[str, Tensor], name: str) -> Tensor:
    return state.like(name) if isinstance(state, LazyTensors) else state[name]


def _shapes(state: Mapping[str, Tensor], names: Sequence[str], dtype: torch.dtype | None) -> dict[str, Tensor]:
    found = {name: _alike(state, name) for name in names}
    formats = {name: dtype if dtype and tensor.is_floating_point() else tensor.dtype for name, tensor in found.items()}
    return {name: torch.empty(tensor.shape, dtype=formats[name], device="meta") for name, tensor in found.items()}


def _reverted(model: Any | None, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    renamed: Mapping[str, Tensor] = tensors
    if model is not None:
        from transformers.core_model_loading import revert_weight_conversion

        renamed = revert_weight_conversion(model, tensors)
    return {name: tensor.contiguous() for name, tensor in renamed.items()}


def pack_names(tensors: Mapping[str, Tensor], max_bytes: int) -> Iterator[list[str]]:
    """Yield the names of ``tensors`` in their order, in parts of at most ``max_bytes``; a larger tensor is one part."""
    names: list[str] = []
    size = 0
    for name, tensor in tensors.items():
        if names and size + tensor.nbytes > max_bytes:
            yield names
            names, size = [], 0
        names.append(name)
        size += tensor.nbytes
    if names:
        yield names


def read_checkpoint(directory: Path) -> dict[str, Tensor]:
    """Return the weights in ``directory`` by their names in the model's state dict, on the CPU, in their dtype.

    A model whose checkpoints are arranged differently is loaded by transformers, which temporarily takes the memory of
    a second copy.

    Raises:
        ModelError: There are no such files, one cannot be read, or weights are missing.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        files = [directory / name for name in weight_files(directory)]
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"The index of {directory} cannot be read: {error}. Save it again; the old weights stay."
        ) from error
    if not files:
        raise ModelError(f"{directory} has no *.safetensors files; save the model there with save_pretrained.")
    skeleton = open_skeleton(directory)
    if skeleton is not None:
        # Imported late: a directory without a configuration needs no transformers.
        from transformers.conversion_mapping import get_model_conversion_mapping

        if get_model_conversion_mapping(skeleton, add_legacy=False):
            try:
                with quiet_transformers():
                    loaded, report = type(skeleton).from_pretrained(
                        directory, local_files_only=True, dtype="auto", output_loading_info=True
                    )
            except (OSError, ValueError, RuntimeError, SafetensorError) as error:
                raise ModelError(
                    f"{directory} cannot be loaded: {error}. Save it again; the old weights stay."
                ) from error
            # transformers would initialise them at random.
            if missing := sorted(report["missing_keys"]):
                raise ModelError(f"The files in {directory} lack {len(missing)} weights, {missing[0]} among them.")
            converted: dict[str, Tensor] = loaded.state_dict()
            return converted
    state: dict[str, Tensor] = {}
    for file in files:
        try:
            state.update(load_file(file))
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{file} cannot be read: {error}. Save it again; the old weights stay.") from error
    return state


def open_skeleton(directory: Path) -> Any | None:
    """Return the model of ``directory`` without weights (on the device ``meta``), for the arrangement of its tensors.

    Returns ``None`` if the directory has no ``config.json``; its tensors are then used unchanged. Raises ``ModelError``
    if the configuration is not that of a causal language model of transformers.
    """
    path = directory / "config.json"
    if not path.is_file():
        return None
    try:
        return _build_skeleton(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{path} describes no causal language model of transformers: {error}") from error


@lru_cache(maxsize=8)
def _build_skeleton(config: str) -> Any:
    # Cached by content: every published version is another directory with the same configuration.
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    document = json.loads(config)
    with quiet_transformers(), torch.device("meta"):
        return AutoModelForCausalLM.from_config(CONFIG_MAPPING[document["model_type"]].from_dict(document))


@frozen(kw_only=True)
class _Stored:
    """A tensor of the model and the tensors of the files that it is made of.

    ``sources`` are their names, by the pattern of transformers that they match. Without a ``converter`` there is one,
    which has the same contents. Otherwise the tensor is the one called ``name`` among those that the converter makes
    for ``target``. With ``is_by_rows`` each source is one row of it, as the experts of a layer are.
    """

    name: str
    shape: torch.Size
    target: str
    sources: Mapping[str, Sequence[str]]
    converter: Any = field(default=None, repr=False)
    is_by_rows: bool = False


class StoredModel:
    """The weights of ``model`` in ``directory``, of which only those rows are read that are asked for.

    Names are those of the model's state dict, tensors have the format of the file. ``model`` may be on the meta device.
    Nothing is held in memory: files are mapped, and rows of a tensor that transformers does not convert are views.

    Raises ``ModelError`` if a file is missing or incomplete, or if the tensors in it do not fit the model.
    """

    def __init__(self, directory: Path, model: Any) -> None:
        self.directory = directory
        self._model = model
        with self._reading():
            self._files = self._open()
        self._stored: dict[str, _Stored] = {}
        self._collect()
        own = model.state_dict(keep_vars=True)
        # Files have one of several tied tensors.
        tied: dict[int, str] = {}
        for name in (name for name in self._stored if name in own):
            first = tied.setdefault(id(own[name]), name)
            if first != name and not self._is_equal(first, name):
                raise ModelError(
                    f"By config.json {first} and {name} are one tensor, and the files in {directory} hold two "
                    "different ones. Set tie_word_embeddings to false in config.json, or save the model again."
                )
        self._names = {name: tied[id(tensor)] for name, tensor in own.items() if id(tensor) in tied}
        if missing := sorted(own.keys() - self._names.keys()):
            raise ModelError(
                f"The files in {directory} lack {len(missing)} weights, {missing[0]} among them; save it again."
            )
        for name, found in self._names.items():
            shape = self._stored[found].shape
            if shape != own[name].shape:
                raise ModelError(
                    f"{found} in {directory} has the shape {tuple(shape)}, and {tuple(own[name].shape)} by its "
                    "config.json. Save weights and configuration of one model there."
                )

    def _is_equal(self, first: str, second: str) -> bool:
        """Whether two tensors of the files, which the model ties, are equal."""
        stored = [self._stored[name] for name in (first, second)]
        if any(found.converter is not None for found in stored):
            return True  # embeddings and heads are stored as they are
        with self._reading():
            whole = [self._tensor(found.sources[found.target][0]) for found in stored]
        return torch.equal(*whole)

    def shape(self, name: str) -> torch.Size:
        """Return the shape of a tensor."""
        return self._stored[self._names[name]].shape

    def rows(self, name: str, first: int, stop: int) -> Tensor:
        """Return the rows of a tensor from ``first`` to before ``stop``, on the CPU; a scalar is one row."""
        stored = self._stored[self._names[name]]
        with self._reading():
            if stored.converter is None:
                (key,) = stored.sources[stored.target]
                part: Tensor = self._files[key].get_slice(key)[first:stop] if stored.shape else self._tensor(key)
                return part
            if first >= stop:
                (first_key, *_), *_ = stored.sources.values()
                return self._tensor(first_key).new_empty((0, *stored.shape[1:]))
            if stored.is_by_rows:
                return self._convert(stored, slice(first, stop))[stored.name]
            return self._convert(stored)[stored.name][first:stop]

    def digest(self) -> str:
        """Return a hash of the names, formats and shapes in the files, and of some numbers of each tensor.

        It is equal for two copies of a model, and reads one page of each tensor.
        """
        found = sha256()
        with self._reading():
            for key in sorted(self._files):
                file = self._files[key].get_slice(key)
                shape = file.get_shape()
                found.update(f"{key} {file.get_dtype()} {shape}\n".encode())
                some = (file[0:1] if shape else self._tensor(key)).reshape(-1)[:_SAMPLED].contiguous()
                found.update(some.view(torch.uint8).numpy().data)
        return found.hexdigest()

    @contextmanager
    def _reading(self) -> Iterator[None]:
        from safetensors import SafetensorError

        try:
            yield
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            raise ModelError(
                f"The model in {self.directory} cannot be read: {error}. Download or save it again."
            ) from error

    def _open(self) -> dict[str, Any]:
        """Return the open file of each tensor, by its name there."""
        from safetensors import safe_open

        expected = weight_files(self.directory)
        if absent := [name for name in expected if not (self.directory / name).is_file()]:
            raise OSError(
                f"{len(absent)} of the files in model.safetensors.index.json are absent, {absent[0]} among them"
            )
        files: dict[str, Any] = {}
        for name, tensors in expected.items():
            try:
                # Raises for a file that is shorter than its header says, as an interrupted download leaves it.
                file: Any = safe_open(self.directory / name, framework="pt")
            except Exception as error:
                raise OSError(f"{name}: {error}") from error
            files.update(dict.fromkeys(file.keys(), file))
            if lost := sorted(set(tensors) - set(file.keys())):
                raise OSError(f"{name} has no {lost[0]}, which model.safetensors.index.json says that it has")
        return files

    def _collect(self) -> None:
        """Find the tensors of the files that each tensor of the model is made of, as transformers does."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

        model, own = self._model, self._model.state_dict()
        mapping = get_model_conversion_mapping(model)
        renamings = [found for found in mapping if isinstance(found, WeightRenaming)]
        converters = [found for found in mapping if isinstance(found, WeightConverter)]
        by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        converted: dict[str, tuple[Any, dict[str, list[str]]]] = {}
        for key in sorted(self._files, key=dot_natural_key):
            name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, own)
            if name not in own and key in own:
                name, pattern = key, None
            if name not in own:
                continue  # such as rotary frequencies in old files; transformers ignores them, too
            if pattern is None:
                shape = torch.Size(self._files[key].get_slice(key).get_shape())
                self._stored[name] = _Stored(name=name, shape=shape, target=name, sources={name: (key,)})
            else:
                converted.setdefault(name, (by_pattern[pattern], {}))[1].setdefault(pattern, []).append(key)
        for target, (converter, sources) in converted.items():
            stored = _Stored(name=target, shape=torch.Size(()), target=target, sources=sources, converter=converter)
            # Whether the converter stacks its sources, one for each row, and computes each row from its own.
            first, *rest = converter.operations
            changed = {getattr(operation, name, None) for operation in rest for name in ("dim", "dim0", "dim1")}
            is_stacked = type(first).__name__ == "MergeModulelist" and first.dim == 0 and 0 not in changed
            for name, tensor in self._convert(stored, is_meta=True).items():
                found = _Stored(
                    name=name,
                    shape=tensor.shape,
                    target=target,
                    sources=sources,
                    converter=converter,
                    is_by_rows=is_stacked and all(len(keys) == tensor.shape[0] for keys in sources.values()),
                )
                self._stored[name] = found
        # ``from_pretrained`` notes them, and ``revert_weight_conversion`` reads the note.
        model._weight_conversions = [found for found in mapping if found.was_used()]  # noqa: SLF001

    def _convert(self, stored: _Stored, rows: slice = slice(None), *, is_meta: bool = False) -> dict[str, Tensor]:
        """Return the tensors that transformers makes of the ``rows`` of the sources; with ``is_meta`` their shapes."""
        converter = deepcopy(stored.converter)
        for pattern, keys in stored.sources.items():
            for key in keys[rows]:
                tensor = self._tensor(key)
                converter.add_tensor(stored.target, key, pattern, tensor.to("meta") if is_meta else tensor)
        made = converter.convert(stored.target, model=self._model, config=self._model.config)
        return {name: found[0] if isinstance(found, list) else found for name, found in made.items()}

    def _tensor(self, key: str) -> Tensor:
        tensor: Tensor = self._files[key].get_tensor(key)
        return tensor
