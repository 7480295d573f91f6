"""The settings of a Tinker server."""

from __future__ import annotations

from pathlib import Path

from attrs import field, frozen
from attrs.validators import ge, gt, le

from areal_actors.generation.torch.config import TorchEngineConfig
from areal_actors.lib.settings import check_host


@frozen(kw_only=True)
class TinkerConfig:
    """A server for one base model, which clients create adapters of.

    ``model`` is a name that ``areal-actors models`` lists, a directory, or a hub id; clients call it by one of
    ``names``, at first this one.
    """

    model: str
    served_names: tuple[str, ...] = ()
    """Further names by which clients may call the base model, such as its id on the hub."""
    fileroot: Path = Path("tinker")
    """Directory of the checkpoints."""
    host: str = field(default="127.0.0.1", validator=check_host)
    port: int = field(default=8000, validator=[ge(0), le(65535)])
    api_key: str | None = field(default=None, repr=False)
    """The key that clients send; without one, every key is accepted, and each has its own models."""
    engine: TorchEngineConfig = field(factory=lambda: TorchEngineConfig(dtype="float32"))
    """The engines that sample: one for the base model, and one for each checkpoint that is sampled from.

    They are in float32, as the weights that are trained, because the ratios of losses compare the two.
    """
    max_samplers: int = field(default=4, validator=ge(1))
    """Checkpoints that have an engine at a time, each with its own weights and cache."""
    max_packed_tokens: int = field(default=4096, validator=gt(0))
    """Tokens of one forward pass."""
    session_timeout_seconds: float = field(default=300.0, validator=gt(0))
    """How long a client may be silent before its models leave the memory."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the base model."""
        return (self.model, *self.served_names)
