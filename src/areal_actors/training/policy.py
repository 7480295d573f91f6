"""The policy that is trained: its model and adapter, optimiser, version, and the phase of its next step.

``TrainedPolicy`` is the state of a trainer. It is sharded over a gang, gathered for engines, saved and restored here;
the steps that change it are in ``trainer.py``. Everything blocks. In a gang each rank has a policy, and all of them get
the same calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from areal_actors.errors import ArealError, CheckpointError, GangError
from areal_actors.lib.precision import choose_dtype
from areal_actors.lib.telemetry import get_logger
from areal_actors.training.checkpoints import (
    Contents,
    agreed,
    generator_states,
    save_checkpoint,
    set_generator_states,
)
from areal_actors.training.config import Layout
from areal_actors.training.gang import Gang, guarded
from areal_actors.training.layers import cast_weights
from areal_actors.training.lora import ADAPTER_PART, Adapter, peft_name
from areal_actors.training.memory import device_bytes, free_bytes, plan_trainer, require_room
from areal_actors.training.model_checks import can_replay, require_supported
from areal_actors.training.optimizer import Optimizer
from areal_actors.training.passes import Scorer
from areal_actors.training.phases import Phase, check_phases, phase_of
from areal_actors.training.sharding import GatheredWeights, Rows, gather, shard
from areal_actors.training.stored_checkpoints import Checkpoint, find_checkpoint, find_latest
from areal_actors.training.tree_attention import attention_number, has_planned_attention, set_attention_number
from areal_actors.training.weights import digest, distinct_tensors, load_weights, tied_names

_log = get_logger(__name__)


class TrainedPolicy:
    """A model with what training keeps of it. ``PolicyTrainer`` describes the arguments and adds the steps."""

    engine_dtype = "float32"

    def __init__(
        self, model: Any, phases: Sequence[Phase], *, reference: Any | None, teacher: Any | None, max_length: int | None
    ) -> None:
        self._phases = tuple(phases)
        first = self._phases[0].config
        check_phases(self._phases, has_reference=reference is not None)
        # Evaluation mode, also in training: dropout would make every ratio of probabilities random.
        self.model = model.float().eval()
        self.version = 0
        self.progress: Counter[str] = Counter()
        """Counts the ``passes`` that have begun; read from other threads."""
        self.adapter = None if first.lora is None else Adapter.create(self.model, first.lora, seed=first.seed)
        self._scorer = Scorer(self.model)
        self._reference = Scorer(reference.eval()) if reference is not None else None
        self._teacher = Scorer(teacher.eval()) if teacher is not None else None
        self.gang = Gang.alone()
        self._max_length = max_length
        self.phase, self.config = self._phases[0], first
        self._dtype = self._choose_dtype()
        self.follow(self.phase)
        for each in self._phases:
            require_room(self.model, each.config, max_length=max_length)
        # Of all phases: a later one comes hours after the start.
        configs = [each.config for each in self._phases]
        limits = [require_supported(checked, configs, max_length=max_length) for checked in self._models]
        self._row_limit = min((limit for limit in limits if limit is not None), default=None)
        self._can_replay = can_replay(self.model, configs)
        # After the checks, which compare in float32.
        self._lower_base()
        self._optimizer = self._create_optimizer()
        self._set_activations()
        for frozen_model in filter(None, (reference, teacher)):
            cast_weights(frozen_model, self._dtype)
        self._num_updates_before = 0
        # A checkpoint whose moments are not read yet: in a gang, each rank reads its own rows.
        self._unread: Checkpoint | None = None
        self._writer: ThreadPoolExecutor | None = None
        self._write: Future[Any] | None = None

    @property
    def _models(self) -> list[Any]:
        """The models that score packs: the trained one, the reference and the teacher."""
        return [scorer.model for scorer in (self._scorer, self._reference, self._teacher) if scorer is not None]

    @property
    def is_planned(self) -> bool:
        """Whether all models attend by plan; otherwise rows are padded, since other layers would mix them in a pack."""
        return all(map(has_planned_attention, self._models))

    @property
    def layout(self) -> Layout:
        """The layout of the current phase, ``auto`` resolved."""
        if self.config.layout != Layout.AUTO:
            return self.config.layout
        return Layout.TREE if self.is_planned else Layout.FLAT

    @property
    def replays(self) -> bool:
        """Whether passes of the policy replay the experts that rows recorded."""
        return self._can_replay and self.config.router_replay is not False

    def follow(self, phase: Phase) -> None:
        """Take the settings of ``phase``."""
        self.phase, self.config = phase, phase.config

    def enter_phase(self) -> None:
        """Begin the phase of the next step, if it is another one, with a new optimiser."""
        phase = phase_of(self._phases, self.version + 1)
        if phase is not self.phase:
            self.follow(phase)
            self._optimizer = self._create_optimizer()
            # Moments of an earlier phase: each phase begins with a new optimiser.
            self._unread = None
            self._set_activations()

    @property
    def is_within_step(self) -> bool:
        """Whether a step failed after its first update, so that the weights belong to no version."""
        return self._optimizer.num_updates != self._num_updates_before

    def join(self, gang: Gang) -> None:
        """Shard the weights over ``gang`` and compute a part of each step from now on.

        All ranks of ``gang`` call this, with the same version and configuration. Weights are those of the first rank,
        and the models of the others may be on the meta device. If all ranks have restored a checkpoint, each reads its
        rows of the moments. From then on all of them have to receive the same calls in the same order: steps,
        log-probabilities, weights and checkpoints.

        Raises ``GangError`` if the ranks differ, and ``CheckpointError`` if one cannot read its part.
        """
        with gang.guard():
            digests = {"configuration": digest(repr(self.config)), "version": self.version}
            # Weights are gathered in it.
            digests["the data type of the engine"] = digest(self.engine_dtype)
            gang.require_equal(list(digests.values()), list(digests))
            is_read_by_each = int(gang.sum(np.array([float(self._unread is not None)]))[0]) == gang.size
            unreadable = "The moments of the checkpoint could not be read"
            with agreed(gang, unreadable):
                if not is_read_by_each and gang.rank == 0:
                    self.read_moments()
            moments = self._optimizer.state_dict() if gang.rank == 0 else None
            own = [self._optimizer.num_updates, int(self._can_replay), *map(attention_number, self._models)]
            num_updates, is_replayable, *numbers = gang.max(
                np.array(own if gang.rank == 0 else [-1] * len(own), dtype=np.float64)
            )
            self._can_replay = bool(is_replayable)
            for model, number in zip(self._models, numbers, strict=True):
                set_attention_number(model, int(number))
            self._dtype = self._choose_dtype(gang.device)
            self.follow(self.phase)  # what depends on the format
            self._lower_base()
            for scorer in filter(None, (self._reference, self._teacher)):
                cast_weights(scorer.model, self._dtype)
            for scorer in filter(None, (self._scorer, self._reference, self._teacher)):
                shard(scorer, gang, dtype=self._dtype)
            self.gang = gang
            self._optimizer = self._create_optimizer()
            if is_read_by_each:
                with agreed(gang, unreadable):
                    self.read_moments()
            else:
                self._optimizer.load_from_first(moments, num_updates=int(num_updates))
                self._unread = None
            self._num_updates_before = self._optimizer.num_updates
            self._set_activations()

    def state_dict(self) -> Mapping[str, Tensor]:
        """Return all weights by name, shared with the model: they change with the next ``train_step``.

        An adapter is merged into those that are read. In a gang they are gathered on the CPU of the first rank, in the
        engine's dtype unless an adapter is merged into them; the others get an empty dictionary.
        """
        if self.gang.is_alone:
            state = self.model.state_dict()
            return state if self.adapter is None else self.adapter.merge(state)
        with self.gang.guard():
            weights = self._gather_in_turn()
            if self.gang.rank > 0:
                weights.skip_rest()
                return {}
            whole = dict(weights)
        state = {name: whole[own] for name, own in tied_names(self.model).items()}
        return state if self.adapter is None else self.adapter.merge(state)

    @contextmanager
    def gathered(self) -> Iterator[Mapping[str, Tensor]]:
        """Yield all weights by name as ``state_dict``, but gather each when it is read: once, and in their order.

        So the first rank of a gang, which calls this, holds one whole tensor at a time. The other ranks call
        ``state_dict``, which gathers in the same order. What is not read in the block is gathered after it, so that the
        ranks stay in step.
        """
        if self.gang.is_alone:
            yield self.state_dict()
            return
        with self.gang.guard():
            weights = self._gather_in_turn()
            try:
                yield weights if self.adapter is None else self.adapter.merge(weights)
            except ArealError as error:
                if not isinstance(error, GangError):
                    weights.skip_rest()
                raise
            weights.skip_rest()

    def _gather_in_turn(self) -> GatheredWeights:
        tensors = distinct_tensors(self.model)
        # Merging a weight needs its factors, which are small.
        factors = {name: tensor for name, tensor in tensors.items() if ".lora_" in name}
        return GatheredWeights(
            tensors={name: tensor for name, tensor in tensors.items() if name not in factors},
            dtype=None if self.adapter is not None else getattr(torch, self.engine_dtype),
            whole=self._gather(factors),
        )

    @guarded
    def adapter_tensors(self) -> dict[str, Tensor]:
        """Return the factors of the adapter by peft's names, shared with the model.

        In a gang they are gathered on the CPU of the first rank; the others get an empty dictionary.
        """
        assert self.adapter is not None, "all weights are trained"
        return self._gather({peft_name(name): factor for name, factor in self.adapter.parameters().items()})

    def _gather(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return whole tensors; in a gang on the CPU, and only on its first rank."""
        if self.gang.is_alone:
            return dict(tensors)
        whole = {}
        for name, tensor in tensors.items():
            # One tensor at a time: the other ranks have no memory for all of them.
            found = gather(tensor).detach()
            if self.gang.rank == 0:
                whole[name] = found.to("cpu", copy=True)
        return whole

    # ---------------------------------------------------------------------------------------------- checkpoints

    @guarded
    def save(self, directory: Path, *, counters: Mapping[str, Any] | None = None, num_kept: int = 2) -> Checkpoint:
        """Write a checkpoint below ``directory``, with the caller's JSON ``counters``, and keep the last ``num_kept``.

        In a gang all ranks call this, and each writes its rows of weights and moments; the counters are those of the
        first one. A gang of any size, or one process, reads them.

        Raises ``CheckpointError`` if it cannot be written; older ones are untouched in that case.
        """
        self.finish_save()
        contents = self._contents(counters)
        return save_checkpoint(directory, contents, step=self.version, num_kept=num_kept, gang=self.gang)

    @guarded
    def begin_save(
        self, directory: Path, *, counters: Mapping[str, Any] | None = None, num_kept: int = 2
    ) -> Future[Checkpoint]:
        """Copy what ``save`` would write, and write it on a thread while training goes on.

        Waits for the previous write first, so that there is one copy at a time. The future ends with the write, and has
        its error; a process that exits waits for it.
        """
        self.finish_save()
        contents, step, gang = self._contents(counters).copied(), self.version, self.gang.background()

        def write() -> Checkpoint:
            try:
                with gang.guard():
                    return save_checkpoint(directory, contents, step=step, num_kept=num_kept, gang=gang)
            except ArealError as error:
                _log.error("checkpoint_failed", error=str(error))
                raise

        # One thread, which the interpreter joins when it exits.
        self._writer = self._writer or ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._write = future = self._writer.submit(write)
        return future

    def finish_save(self) -> None:
        """Wait until nothing is written any more. An error belongs to the future of ``begin_save``, and is logged."""
        if self._write is not None:
            wait([self._write])
            self._write = None

    def _contents(self, counters: Mapping[str, Any] | None) -> Contents:
        """Return the contents of a checkpoint, shared with the model and the optimiser."""
        self.read_moments()
        shards = {"optimizer": self._optimizer.rows()}
        parts = {"rng": generator_states()}
        if self.adapter is None:
            shards["model"] = {name: Rows.create(found) for name, found in distinct_tensors(self.model).items()}
        else:  # whole, as peft reads it
            parts[ADAPTER_PART] = self.adapter_tensors()
        return Contents(
            parts=parts,
            shards=dict(sorted(shards.items())),
            counters={
                "num_updates": self._optimizer.num_updates,
                "caller": dict(counters or {}),
            },
            documents={} if self.adapter is None else self.adapter.documents(),
        )

    def restore(self, directory: Path, *, step: int | None = None) -> Mapping[str, Any] | None:
        """Continue from the latest checkpoint below ``directory`` that is not damaged; return the caller's counters.

        With ``step`` it is the one of that step, which the controller of a run has chosen after it compared the
        digests: they are not compared again. The state is restored exactly. If this is to be a rank of a gang, the
        moments are read when it joins. Returns ``None`` and changes nothing if there is no checkpoint. Raises
        ``CheckpointError`` if it does not fit the model, if all are damaged, or if that of ``step`` is absent.
        """
        checkpoint = find_latest(directory) if step is None else find_checkpoint(directory, step)
        if checkpoint is None:
            return None
        if self.model.device.type == "meta":
            # Weights come from the first rank, and moments are read when this one joins.
            self.follow(phase_of(self._phases, max(checkpoint.step, 1)))
            set_generator_states(checkpoint.load("rng"))
            self.version, self._unread = checkpoint.step, checkpoint
            return dict(checkpoint.counters["caller"])
        if self.adapter is not None:
            if not checkpoint.has(ADAPTER_PART):
                raise CheckpointError(
                    f"{checkpoint.path} has all weights, and trainer.lora trains an adapter; leave trainer.lora out to "
                    "go on, or start a new run."
                )
            self.adapter.load(checkpoint.path)
        elif checkpoint.has(ADAPTER_PART):
            raise CheckpointError(f"{checkpoint.path} has an adapter only; set trainer.lora as the run had it.")
        else:
            load_weights(self.model, checkpoint)
        self.follow(phase_of(self._phases, max(checkpoint.step, 1)))
        self._optimizer = self._create_optimizer()
        self._optimizer.num_updates = checkpoint.counters["num_updates"]
        self._unread = checkpoint
        if not self.gang.is_alone or self.config.gang.num_processes == 1:
            self.read_moments()
        set_generator_states(checkpoint.load("rng"))
        self.version = checkpoint.step
        self._num_updates_before = self._optimizer.num_updates
        counters: Mapping[str, Any] = checkpoint.counters["caller"]
        return counters

    def read_moments(self) -> None:
        """Load the moments of a restored checkpoint, unless that was done; of sharded weights only this rank's rows."""
        if self._unread is None:
            return
        trained = dict(self.model.named_parameters())
        moments = self._unread.tensors("optimizer", like=lambda key: trained.get(key.split("/", 1)[1]))
        self._optimizer.load_state_dict(moments, num_updates=self._unread.counters["num_updates"])
        self._unread = None

    # ---------------------------------------------------------------------------------- formats, memory, optimiser

    def _choose_dtype(self, device: torch.device | None = None) -> torch.dtype:
        """Return the data type of forward and backward passes; trained weights and moments are always float32."""
        place = str(device or self.model.device)
        # Until it is in a gang, a model without weights stands for one on the CPU.
        dtype: torch.dtype = getattr(torch, choose_dtype(self.config.dtype, "cpu" if place == "meta" else place))
        return dtype

    def _set_activations(self) -> None:
        """Decide what passes keep for the backward pass, for the current device and number of ranks."""
        device = self.model.device
        plan = partial(
            plan_trainer,
            self.model,
            self.config,
            device_type=device.type,
            memory_bytes=device_bytes(device),
            teacher=None if self._teacher is None else self._teacher.model,
        )
        # A row that is longer than a pass gets one to itself.
        longest = max(self.config.max_packed_tokens, self._max_length or 0)
        self.activations = self._scorer.activations = plan(num_tokens=longest).kept
        # Weights, moments and an engine in this process are in use before a pass. Gradients that do not exist yet need
        # no room: those of a layer take the place of its activations, others are among what the output head needs.
        self._scorer.count_kept = lambda size: plan(num_tokens=size, free=free_bytes(device)).num_kept_layers
        self._scorer.is_compiled = self.config.compiles_layers(device.type)

    def _lower_base(self) -> None:
        """Convert weights that are not trained to the data type of the passes, after the checks in float32."""
        if self.adapter is not None and self._dtype is not torch.float32:
            self.adapter.lower(self._dtype)

    def _create_optimizer(self) -> Optimizer:
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        return Optimizer(trained, self.config.optimizer)
