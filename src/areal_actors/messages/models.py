"""Messages to the host of trained models, which lends what answers in the place of the policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attrs import frozen

from areal_actors.core import Message, Ref, StreamMessage
from areal_actors.domain import Credential, TrainedModel
from areal_actors.messages.sessions import Sessions

__all__ = [
    "ListModels",
    "ModelInUse",
    "Models",
    "UseModel",
]


class Models:
    """Address of the host of trained models: what answers a request for other weights than the policy's."""


@frozen(kw_only=True)
class ModelInUse:
    """What answers in the place of the policy: sessions, the one that is open there, and the text of token ids."""

    sessions: Ref[Sessions]
    credential: Credential
    decode: Callable[[Sequence[int]], str]


@frozen(kw_only=True)
class UseModel(StreamMessage[Models, ModelInUse]):
    """Borrow the model called ``experiment/trial``: one item once it is loaded, none if there is no such model.

    It stays open until the stream is left, which may be at any time. Raises ``Unprocessable`` for weights that cannot
    be loaded, and ``Unavailable`` where no place became free in time.
    """

    name: str


@frozen(kw_only=True)
class ListModels(Message[Models, tuple[TrainedModel, ...]]):
    """All models that can be borrowed, loaded or not, by name."""
