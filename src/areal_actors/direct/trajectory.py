"""The session behind a direct client: one trajectory, its rewards, and its way to training rows."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any, Protocol, cast
from weakref import WeakKeyDictionary

from attrs import evolve

from areal_actors.actors.capacity import CapacityGranter
from areal_actors.actors.exporter import Exporter
from areal_actors.actors.generation import GenerationActor
from areal_actors.actors.sessions import SessionManager
from areal_actors.cache import ConversationTree, backpropagate, export_trajectories
from areal_actors.core import Ref
from areal_actors.direct.inline import InlineRef
from areal_actors.direct.transport import App
from areal_actors.domain import ChatMessage, Completion, Interaction, InteractionId, SampleKey, Trajectory
from areal_actors.engines import Engine
from areal_actors.errors import ConfigError, NotFound
from areal_actors.messages import Generation, OpenSession, Sessions
from areal_actors.proxy import ProxyConfig
from areal_actors.proxy.app import create_app
from areal_actors.rendering import Renderer, create_renderer, load_renderer
from areal_actors.staleness import CapacityLimits, CapacityState
from areal_actors.workflows.engine import EpisodeEngine
from areal_actors.workflows.interactions import InteractionWithTokenLogpReward, ModelResponse

__all__ = ["DirectSession", "EngineLike", "TokenizerLike"]


class _Serving(Protocol):
    """Something that serves a model already, such as what ``open_inference`` gives."""

    @property
    def generation(self) -> Ref[Generation]: ...

    @property
    def renderer(self) -> Renderer: ...


EngineLike = Engine | Ref[Generation] | _Serving
TokenizerLike = Any
"""A fast tokenizer of transformers, the directory of a model, or a ``Renderer``."""

_renderers: WeakKeyDictionary[Any, Renderer] = WeakKeyDictionary()
"""Renderers of tokenizers that were met before: a client is made per episode, and a renderer takes long to make."""


class DirectSession:
    """One trajectory on an engine. ``app`` is the proxy's application in front of it, ``api_key`` opens it there.

    ``discount`` is the one that was applied last. ``completions`` holds the SDK's objects by interaction.
    """

    def __init__(
        self,
        engine: EngineLike | None,
        tokenizer: TokenizerLike = None,
        *,
        seed: int = 0,
        key: SampleKey | None = None,
        config: ProxyConfig | None = None,
    ) -> None:
        if engine is None:
            raise ConfigError("A direct client needs an engine: an Engine, a generation actor's ref, or an Inference.")
        renderer, generation = _renderer_of(tokenizer, engine), _generation_of(engine)
        manager = SessionManager(renderer=renderer, generation=generation, seed=seed)
        sessions: InlineRef[Sessions] = InlineRef(manager, name="sessions")
        capacity = InlineRef(CapacityGranter(CapacityState(limits=_ONE)), name="capacity")
        opened = manager.open_session(OpenSession(task="direct", key=key or _key_of(engine)))
        self.api_key = opened.api_key
        self.discount: float | None = None
        self.completions: dict[str, Any] = {}
        self._id = opened.session
        self._manager = manager
        self._is_ready = False
        self._app = create_app(
            sessions=sessions,
            exports=InlineRef(Exporter(sessions=sessions, capacity=capacity), name="exports"),
            capacity=capacity,
            generation=generation,
            config=config,
            decode=renderer.decode,
        )

    async def app(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        """The proxy, as an ASGI application."""
        if not self._is_ready:
            await self._manager.learn_engine()
            self._is_ready = True
        await cast("App", self._app)(scope, receive, send)

    @property
    def tree(self) -> ConversationTree:
        """The conversations so far."""
        return self._manager.tree(self._id)

    def set_reward(self, interaction_id: str | None, reward: Any) -> None:
        """Reward one interaction, or the last completed one; setting twice replaces.

        Raises:
            NotFound: there is no such interaction.
            RewardError: the reward is no finite number, or nothing was completed yet.
        """
        self.tree.set_reward(None if interaction_id is None else InteractionId(interaction_id), reward)

    def apply_discount(self, discount: float) -> dict[str, float]:
        """Let what is read from now on have the returns under ``discount``, which are the result.

        Raises:
            RewardError: the discount is not finite.
        """
        returns = backpropagate(self.tree.snapshot(), discount)
        self.discount = discount
        return {str(name): value for name, value in returns.items()}

    def interaction(self, interaction_id: str) -> InteractionWithTokenLogpReward:
        """One interaction with its ancestors, without a row.

        Raises:
            NotFound: there is no such interaction, or it was not completed.
        """
        return self._views(self.discount).view(InteractionId(interaction_id))

    def rows(self, *, style: str, discount: float | None) -> dict[str, InteractionWithTokenLogpReward]:
        """The training rows in a style of export, each by the interaction that it ends, in order.

        Without a ``discount`` (here or applied before), every turn keeps the reward that was assigned to it.
        """
        discount = self.discount if discount is None else discount
        views = self._views(discount)
        exported = export_trajectories(views.record, discount=discount or 0.0, style=style)
        return {row.interactions[-1]: views.view(row.interactions[-1], row=row) for row in exported.trajectories}

    def _views(self, discount: float | None) -> _Views:
        return _Views(self.tree, discount, self.completions)


class _Views:
    """Interactions in the names of workflow authors."""

    def __init__(self, tree: ConversationTree, discount: float | None, completions: Mapping[str, Any]) -> None:
        self.record = tree.snapshot()
        self._tree = tree
        self._interactions = {turn.id: turn for turn in self.record.interactions if turn.output is not None}
        self._completions = completions
        self._returns = None if discount is None else backpropagate(self.record, discount)
        self._made: dict[InteractionId, InteractionWithTokenLogpReward] = {}

    def view(self, name: InteractionId, *, row: Trajectory | None = None) -> InteractionWithTokenLogpReward:
        if name not in self._interactions:
            raise NotFound(f"There is no completed interaction {name}; look at the ids of the answers.")
        if name not in self._made:
            self._make(name)
        made = self._made[name]
        if row is None:
            return made
        others = tuple(map(self.view, row.interactions[:-1])) if row.predecessors is not None else ()
        return evolve(made, row=row, reward=row.reward, others=others)

    def _make(self, name: InteractionId) -> None:
        """Make the views of ``name`` and of its parents, the oldest first: conversations may be long."""
        line = [self._interactions[name]]
        while (parent := line[-1].parent) is not None and parent not in self._made and parent in self._interactions:
            line.append(self._interactions[parent])
        for turn in reversed(line):
            self._made[turn.id] = self._create(turn)

    def _create(self, turn: Interaction) -> InteractionWithTokenLogpReward:
        history = self._tree.history(turn)
        returns = self._returns
        return InteractionWithTokenLogpReward(
            interaction_id=turn.id,
            model_response=_response_of(self._tree, turn, cast("Completion", turn.completion)),
            assigned_reward=turn.reward,
            reward=turn.reward if returns is None else returns.get(turn.id),
            parent=None if turn.parent is None else self._made.get(turn.parent),
            messages=[_plain(message) for message in history[:-1]],
            output_message_list=[_plain(history[-1])],
            completion=self._completions.get(turn.id),
        )


def _response_of(tree: ConversationTree, turn: Interaction, completion: Completion) -> ModelResponse:
    return ModelResponse(
        input_tokens=tree.prompt_tokens(turn).tolist(),
        output_tokens=completion.token_ids.tolist(),
        output_logprobs=completion.logprobs.tolist(),
        output_versions=completion.versions.tolist(),
        stop_reason=completion.finish,
    )


def _plain(message: ChatMessage) -> dict[str, Any]:
    """A message in the shape of OpenAI's API."""
    plain: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        plain["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    extras = {"tool_call_id": message.tool_call_id, "name": message.name, "reasoning_content": message.reasoning}
    return plain | {name: value for name, value in extras.items() if value is not None}


_ONE = CapacityLimits(max_concurrent=1, batch_size=1)


def _key_of(engine: EngineLike) -> SampleKey | None:
    """The key of this client within an episode, where the engine is that of an episode."""
    return engine.next_client_key() if isinstance(engine, EpisodeEngine) else None


def _generation_of(engine: EngineLike) -> Ref[Generation]:
    if isinstance(engine, Ref):
        return engine
    generation = getattr(engine, "generation", None)
    if isinstance(generation, Ref):
        return generation
    return InlineRef(GenerationActor(cast("Engine", engine)), name="generation")


def _renderer_of(tokenizer: TokenizerLike, engine: EngineLike) -> Renderer:
    if tokenizer is None:
        tokenizer = getattr(engine, "renderer", None)
    if tokenizer is None:
        raise ConfigError("A direct client needs a tokenizer beside this engine: a tokenizer, a model's directory.")
    if hasattr(tokenizer, "open_stream"):
        return cast("Renderer", tokenizer)
    if isinstance(tokenizer, str | Path):
        return load_renderer(tokenizer)
    renderer = _renderers.get(tokenizer)
    if renderer is None:
        renderer = _renderers[tokenizer] = create_renderer(tokenizer)
    return renderer
