"""Messages to the host of trained models, which lends models that answer instead of the policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attrs import frozen

from areal_actors.domain import Credential, TrainedModel
from areal_actors.kernel import Message, Ref, StreamMessage
from areal_actors.messages.sessions import Sessions


class Models:
    """Address of the host of trained models, which answers requests for weights other than the policy's."""


@frozen(kw_only=True)
class ModelInUse:
    """A borrowed model: its session manager, a session that is open there, and a decoder of token ids."""

    sessions: Ref[Sessions]
    credential: Credential
    token_bytes: Callable[..., Sequence[bytes]]


@frozen(kw_only=True)
class UseModel(StreamMessage[Models, ModelInUse]):
    """Borrow the model called ``experiment/trial``.

    The stream yields one item once the model is loaded, and none if there is no such model. The model stays open until
    the stream is left, which may be at any time. Raises ``Unprocessable`` for weights that cannot be loaded,
    ``Unavailable`` if no place became free in time.
    """

    name: str


@frozen(kw_only=True)
class ListModels(Message[Models, tuple[TrainedModel, ...]]):
    """Return all models that can be borrowed, loaded or not, by name."""
