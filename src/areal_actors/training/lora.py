"""Low-rank adapters: the only module that knows peft.

peft puts its layers into the transformers model itself, so the rest of the trainer keeps using that model. The base
weights are frozen and never change, not even temporarily: merged weights ``W + alpha / rank * B A`` are computed in
float32 into new tensors, one at a time, when they are read. Adding a product to a weight and subtracting it again, as
peft's ``merge`` and ``unmerge`` do, would round the weight each time.

::

    <directory>/
        adapter_model.safetensors    A and B in float32, by peft's names
        adapter_config.json          peft's, so that peft, SGLang and vLLM load the directory
        base_model.json              name and fingerprint of the base model
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from attrs import field, frozen
from torch import Tensor

from areal_actors.errors import CheckpointError, ConfigError
from areal_actors.lib.checkpoint_tensors import LazyTensors
from areal_actors.lib.telemetry import get_logger
from areal_actors.models import model_shape
from areal_actors.training.config import LoraConfig
from areal_actors.training.directories import atomic_directory, write_tensors
from areal_actors.training.sharding import scatter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_log = get_logger(__name__)

ADAPTER_PART = "adapter_model"
"""Stem of the file of an adapter's tensors, which is also the name of its part of a checkpoint."""

_CONFIG, _BASE = "adapter_config.json", "base_model.json"
_ALL = "all-linear"
_NAME = "default"
"""The name under which peft keeps the one adapter."""
_START = "start"
"""The name, next to that of each factor's weight, under which its value at the start of the run is kept."""
_PREFIX = "base_model.model."
"""The prefix that peft puts before the names of a model's parameters in its files."""
_SAMPLED = 16
"""Numbers of each weight that the fingerprint looks at."""
_MAX_NAMED = 12
_FUSED = frozenset({"falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"})
"""Model types whose fused kernels read the weight of ``out_proj`` themselves, so that peft refuses an adapter there."""


@frozen(kw_only=True)
class _Target:
    """The names of a weight that has an adapter, and of its factors, in the state dict of the model with the adapter.

    ``num_experts`` is above 1 for the stacked weights of experts, and ``is_swapped`` says that these are stored as
    ``[experts, out, in]``.
    """

    weight: str
    a: str
    b: str
    scaling: float
    num_experts: int = 1
    is_swapped: bool = True

    def merge(self, state: Mapping[str, Tensor]) -> Tensor:
        """Return the merged weight in float32, in new memory."""
        weight, a, b = (state[name].detach().float() for name in (self.weight, self.a, self.b))
        if self.num_experts == 1:
            return torch.addmm(weight, b, a, alpha=self.scaling)
        a = a.reshape(self.num_experts, -1, a.shape[-1])  # [experts, rank, in]
        b = b.reshape(b.shape[0], -1, self.num_experts).permute(2, 0, 1)  # [experts, out, rank]
        factors = (b, a) if self.is_swapped else (a.mT, b.mT)
        return torch.baddbmm(weight, *factors, alpha=self.scaling)


@frozen(eq=False)
class _MergedWeights(LazyTensors):
    """The weights of the plain model by their own names; a merged one is computed each time that it is read."""

    state: Mapping[str, Tensor]
    names: Mapping[str, str]
    """For each name of the plain model, that in ``state``."""
    targets: Mapping[str, _Target]
    """The weights with an adapter, by their names in ``state``."""

    def __getitem__(self, name: str) -> Tensor:
        own = self.names[name]
        target = self.targets.get(own)
        return self.state[own] if target is None else target.merge(self.state)

    def like(self, name: str) -> Tensor:
        """Return the base weight, which has the shape of the merged one."""
        own = self.names[name]
        return self.state.like(own) if isinstance(self.state, LazyTensors) else self.state[own]

    def __contains__(self, name: object) -> bool:
        # A mapping would compute the weight to find that it is there.
        return name in self.names

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


@frozen(eq=False)
class Adapter:
    """The adapter of a model, which is in ``model`` from ``create`` on. ``targets`` are by names of weights."""

    model: PreTrainedModel
    config: LoraConfig
    base: Mapping[str, str]
    """Name and fingerprint of the base model."""
    document: Mapping[str, Any] = field(repr=False)
    """The contents of ``adapter_config.json``."""
    targets: Mapping[str, _Target] = field(repr=False)

    @classmethod
    def create(cls, model: PreTrainedModel, config: LoraConfig, *, seed: int = 0) -> Adapter:
        """Put an adapter that changes nothing yet, or that of ``config.path``, into ``model``, and freeze the rest.

        ``seed`` determines its initial factors. ``model`` is in float32.

        Raises ``ConfigError`` if peft is absent, if the model has no such targets, or if the adapter of ``config.path``
        is of another base model or has another shape.
        """
        try:
            peft: Any = import_module("peft")
        except ImportError as error:
            raise ConfigError("trainer.lora needs the package peft; run: pip install 'areal_actors[lora]'") from error
        shapes = find_adapted(model, config)
        linear = sorted({name.rpartition(".")[2] for name, shape in shapes.items() if len(shape) == 2})  # noqa: PLR2004
        gates = [name for name in _find_linear(model) if name not in shapes] if config.target_modules == (_ALL,) else []
        if gates:
            _log.info(
                "gates_have_no_adapter",
                layers=", ".join(sorted({name.rpartition(".")[2] for name in gates})),
                reason="they are narrower than a head of the attention; trainer.lora.target_modules can name them",
            )
        base = {"name": str(model.config.name_or_path), "fingerprint": fingerprint(model)}
        settings = peft.LoraConfig(
            r=config.rank,
            lora_alpha=config.alpha,
            target_modules=linear if config.target_modules == (_ALL,) else list(config.target_modules),
            target_parameters=list(config.target_parameters) or None,
            # Only those that a name in ``target_modules`` would find, since engines may not know this field.
            exclude_modules=[name for name in gates if name.rpartition(".")[2] in linear] or None,
            task_type="CAUSAL_LM",
            base_model_name_or_path=base["name"],
        )
        # The factors do not depend on what was drawn before, and what is drawn later not on them.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            try:
                peft.inject_adapter_in_model(settings, model, adapter_name=_NAME)
            except (ValueError, TypeError, RuntimeError, NotImplementedError) as error:
                # For some families peft knows layers that cannot have an adapter, such as out_proj of a Mamba.
                raise ConfigError(
                    f"trainer.lora.target_modules: peft cannot adapt {type(model).__name__}: {error}"
                ) from error
        document = {
            name: sorted(value) if isinstance(value, set) else value for name, value in settings.to_dict().items()
        }
        adapter = cls(model, config, base, document | {"inference_mode": True}, _find_targets(model))
        model.eval()
        if config.path is not None and base["fingerprint"]:
            try:
                adapter.load(config.path)
            except CheckpointError as error:
                raise ConfigError(f"trainer.lora.path: {error}") from error
        if config.path is not None:
            adapter._keep_start()
        return adapter

    def _keep_start(self) -> None:
        """Keep the factors as they are now, as frozen weights of the model, which are sharded with the others."""
        for name, factor in self.parameters().items():
            holder = self.model.get_submodule(name.rpartition(".")[0])
            holder.register_parameter(_START, torch.nn.Parameter(factor.detach().clone(), requires_grad=False))

    def lower(self, dtype: torch.dtype) -> None:
        """Keep the frozen matrices in ``dtype``, in which the passes compute.

        Nothing is lost by it: they are never updated, and autocast would convert them in each pass. Factors stay in
        float32, in which the optimiser updates them, and vectors too, since they are small.
        """
        trained = set(self.parameters())
        for name, parameter in self.model.named_parameters():
            if name not in trained and not name.endswith(f".{_START}") and parameter.ndim > 1:
                parameter.data = parameter.data.to(dtype)
        for layer in self._layers():
            # Autocast converts factors and inputs; peft would convert each input to float32 first.
            layer.cast_input_dtype_enabled = dtype is torch.float32

    def parameters(self) -> dict[str, Tensor]:
        """Return the factors by their names in the model."""
        return {
            name: parameter
            for name, parameter in self.model.named_parameters()
            if ".lora_" in name and not name.endswith(f".{_START}")
        }

    @contextmanager
    def at_start(self) -> Iterator[None]:
        """Compute during the block as at the start of the run, without gradients, also in a run that was resumed.

        That is with the adapter of ``config.path``, or without any: a new adapter changes nothing.
        """
        if self.config.path is None:
            with self.disabled():
                yield
            return
        kept = dict(self.model.named_parameters())
        factors = self.parameters()
        now = {name: factor.detach().clone() for name, factor in factors.items()}
        with torch.no_grad():
            for name, factor in factors.items():
                factor.copy_(kept[f"{name.rpartition('.')[0]}.{_START}"])
        try:
            yield
        finally:
            with torch.no_grad():
                for name, factor in factors.items():
                    factor.copy_(now[name])

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Compute without the adapter during the block: as the base model."""
        for layer in self._layers():
            layer.enable_adapters(enabled=False)
        try:
            yield
        finally:
            for layer in self._layers():
                layer.enable_adapters(enabled=True)

    def _layers(self) -> list[Any]:
        """Return peft's layers."""
        from peft.tuners.lora.layer import LoraLayer

        return [module for module in self.model.modules() if isinstance(module, LoraLayer)]

    def merge(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the weights of the plain model for ``state``, a state dict of the model with the adapter.

        Weights without an adapter are shared with ``state``; the others are computed in float32 when they are read.
        """
        names = {plain_name(name): name for name in state if ".lora_" not in name}
        return _MergedWeights(state, names, self.targets)

    def save(self, directory: Path, documents: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        """Write the adapter, whole in this process, with further ``documents``; see ``write_adapter``."""
        tensors = {peft_name(name): factor for name, factor in self.parameters().items()}
        write_adapter(directory, tensors, {**self.documents(), **(documents or {})})

    def documents(self) -> dict[str, Mapping[str, Any]]:
        """Return the JSON documents next to the tensors of an adapter, by the names of their files."""
        return {_CONFIG: self.document, _BASE: self.base}

    @torch.no_grad()
    def load(self, directory: Path) -> None:
        """Load the factors from ``directory``, which may be one that peft has written.

        Raises ``CheckpointError`` if they do not fit, or were trained on another base model; nothing is changed then.
        """
        self._require_settings(directory)
        found, own = load_adapter_tensors(directory), self.parameters()
        wanted = {peft_name(name): parameter for name, parameter in own.items()}
        misfits = list(wanted.keys() ^ found.keys())
        misfits += [name for name in wanted.keys() & found.keys() if wanted[name].shape != found[name].shape]
        if misfits:
            name = min(misfits)
            have, want = (tuple(part[name].shape) if name in part else "absent" for part in (found, wanted))
            raise CheckpointError(
                f"The adapter in {directory} does not fit the model: {name} is {have} there and {want} here "
                f"({len(misfits)} tensors differ). Set target_modules and rank as it has them, or another model."
            )
        for name, parameter in wanted.items():
            parameter.copy_(scatter(found[name], parameter))

    def _require_settings(self, directory: Path) -> None:
        """Raise ``CheckpointError`` unless the adapter in ``directory`` computes as this one, on the same base."""
        saved = _read(directory / _CONFIG)
        for key, name in (("r", "rank"), ("lora_alpha", "alpha")):
            if saved.get(key) != self.document[key]:
                raise CheckpointError(
                    f"The adapter in {directory} has {name} {saved.get(key)}, and trainer.lora.{name} is "
                    f"{self.document[key]}; set it to that of the adapter."
                )
        for key in ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "modules_to_save"):
            if saved.get(key):
                raise CheckpointError(f"The adapter in {directory} has {key}, which is not supported.")
        if not self.base["fingerprint"]:
            return  # this rank had no weights when it was created; the first one compares them
        if (directory / _BASE).is_file():
            base = _read(directory / _BASE)
            is_same = base.get("fingerprint") == self.base["fingerprint"]
        else:  # written by peft, which only knows the name
            base = {"name": saved.get("base_model_name_or_path") or ""}
            is_same = Path(base["name"]).name in ("", Path(self.base["name"]).name)
        if not is_same:
            raise CheckpointError(
                f"The adapter in {directory} was trained on the base model {base.get('name')!r}, which is not "
                f"{self.base['name']!r}; an adapter means nothing on other weights. Set model to its base."
            )


def write_adapter(directory: Path, tensors: Mapping[str, Tensor], documents: Mapping[str, Mapping[str, Any]]) -> None:
    """Write an adapter, with ``tensors`` by peft's names, as a directory that appears when it is complete.

    Raises ``CheckpointError`` if it cannot be written.
    """
    with atomic_directory(directory, num_bytes=sum(tensor.nbytes for tensor in tensors.values())) as partial:
        write_tensors(partial / f"{ADAPTER_PART}.safetensors", tensors)
        for name, document in documents.items():
            (partial / name).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def load_adapter_tensors(directory: Path) -> dict[str, Tensor]:
    """Return the tensors of an adapter by peft's names, on the CPU. Raises ``CheckpointError``."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = directory / f"{ADAPTER_PART}.safetensors"
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}. Name a directory that peft has written.") from error


def peft_name(name: str) -> str:
    """Return the name in peft's files of a factor called ``name`` in the model."""
    return _PREFIX + name.replace(f".{_NAME}.", ".")


def plain_name(name: str) -> str:
    """Return the name in the plain model of a weight called ``name`` in the model with an adapter."""
    return name.replace(".base_layer", "")


def fingerprint(model: PreTrainedModel) -> str:
    """Return a hash of the names and shapes of a model's weights, and of some numbers of each.

    It is equal for float32 and bfloat16 copies of the same weights, and cheap for any size.
    """
    found = sha256()
    if any(weight.is_meta for weight in model.parameters()):
        return ""  # a rank that receives its weights from the first one, which compares them
    samples = []
    for name, tensor in sorted(model.state_dict().items()):
        found.update(f"{plain_name(name)} {tuple(tensor.shape)}\n".encode())
        flat = tensor.detach().reshape(-1)
        chosen = flat[:: max(1, flat.numel() // _SAMPLED)][:_SAMPLED]
        # In bfloat16, so that float32 and bfloat16 copies of the same weights have one fingerprint.
        samples.append(chosen.to(torch.bfloat16))
    found.update(torch.cat(samples).cpu().view(torch.uint8).numpy().data)
    return found.hexdigest()[:32]


# ------------------------------------------------------------------------------------------------------ targets


def find_adapted(model: PreTrainedModel, config: LoraConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights to adapt, by the names of their linear modules and of stacked parameters.

    ``all-linear`` leaves out gates and routers, which have fewer outputs than a head of the attention: one for a shared
    expert, or one for each expert or head. Servers have no adapters for them, and there is little to adapt.

    Raises ``ConfigError`` for unknown ones.
    """
    linear = _find_linear(model)
    stacked = {
        name: tuple(parameter.shape)
        for name, parameter in model.named_parameters()
        if parameter.ndim > 2  # noqa: PLR2004
    }
    known = sorted({name.rpartition(".")[2] for name in linear})
    modules = known if config.target_modules == (_ALL,) else list(config.target_modules)
    for wanted in modules:
        if not _is_among(wanted, linear):
            raise ConfigError(_explain_unknown(model, "target_modules", wanted, [*known, _ALL]))
    for wanted in config.target_parameters:
        if not _is_among(wanted, stacked):
            names = sorted({".".join(name.split(".")[-3:]) for name in stacked})
            raise ConfigError(_explain_unknown(model, "target_parameters", wanted, names))
    shapes: dict[str, tuple[int, ...]] = {
        name: shape for name, shape in linear.items() if any(_is_among(wanted, [name]) for wanted in modules)
    }
    if config.target_modules == (_ALL,):
        narrowest = model_shape(model.config).min_head_dim
        # Routers that are linear layers of another class return more than one product.
        shapes = {
            name: shape
            for name, shape in shapes.items()
            if min(shape) >= narrowest
            and type(model.get_submodule(name)) is torch.nn.Linear
            and not (name.endswith(".out_proj") and model.config.model_type in _FUSED)
        }
        if not shapes and not config.target_parameters:
            raise ConfigError(
                f"trainer.lora.target_modules: {type(model).__name__} has no linear layers that all-linear could "
                "adapt; leave trainer.lora out, or take another model."
            )
    shapes |= {
        name: shape for name, shape in stacked.items() if any(_is_among(x, [name]) for x in config.target_parameters)
    }
    return shapes


def _find_linear(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights of all linear modules but the output head, by the names of the modules."""
    ends = (model.get_output_embeddings(), model.get_input_embeddings())
    return {
        name: (module.out_features, module.in_features)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and not any(module is end for end in ends)
    }


def _is_among(wanted: str, names: Iterable[str]) -> bool:
    """Return whether ``wanted`` is one of ``names`` or its end, as peft compares them."""
    return any(name == wanted or name.endswith(f".{wanted}") for name in names)


def _explain_unknown(model: PreTrainedModel, setting: str, wanted: str, known: Sequence[str]) -> str:
    close = get_close_matches(wanted, known, n=2, cutoff=0.5)
    hint = f"; did you mean {' or '.join(close)}?" if close else "."
    listed = ", ".join(known[:_MAX_NAMED]) or "none"
    return f"trainer.lora.{setting}: {type(model).__name__} has no {wanted!r} to adapt{hint} It has {listed}."


def _find_targets(model: PreTrainedModel) -> dict[str, _Target]:
    """Return the adapted weights by their names in the state dict."""
    from peft.tuners.lora import layer as layers

    found = {}
    for name, module in model.named_modules():
        if not isinstance(module, layers.LoraLayer):
            continue
        a, b = f"{name}.lora_A.{_NAME}.weight", f"{name}.lora_B.{_NAME}.weight"
        common = {"a": a, "b": b, "scaling": module.scaling[_NAME]}
        if isinstance(module, layers.ParamWrapper):
            # Wrappers of several parameters of one module are nested.
            inner = name
            while isinstance(model.get_submodule(inner), layers.ParamWrapper):
                inner = f"{inner}.base_layer"
            weight = f"{inner}.{module.parameter_name}"
            # Private, but peft has no other word for it; merged weights are compared with peft's own in the tests.
            swapped = module._did_swap_in_out_features  # noqa: SLF001
            found[weight] = _Target(weight=weight, num_experts=module.num_experts, is_swapped=swapped, **common)
        else:
            weight = f"{name}.base_layer.weight"
            found[weight] = _Target(weight=weight, **common)
    return found


def _read(path: Path) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}. Name a directory that peft has written.") from error
    return document
