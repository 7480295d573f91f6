"""The session behind a direct client: one trajectory, its rewards, and its training rows."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, Self, cast
from weakref import WeakKeyDictionary

from attrs import evolve

from areal_actors.cache import ConversationTree, backpropagate, export_trajectories
from areal_actors.cache.interactions import InteractionViews, InteractionWithTokenLogpReward
from areal_actors.direct.in_process import App, InlineRef, create_http_client, http_library_of
from areal_actors.domain import InteractionId, SampleKey
from areal_actors.errors import ConfigError
from areal_actors.generation import Engine
from areal_actors.generation.actor import GenerationActor
from areal_actors.kernel import Ref
from areal_actors.messages import Generation, OpenSession, Sessions
from areal_actors.proxy import ProxyConfig
from areal_actors.proxy.app import create_app
from areal_actors.rendering import Renderer, create_renderer, load_renderer
from areal_actors.rollouts.capacity import CapacityGranter
from areal_actors.rollouts.exporter import Exporter
from areal_actors.rollouts.staleness import CapacityLimits, CapacityState
from areal_actors.sessions.manager import SessionManager
from areal_actors.workflows.engine import EpisodeEngine


class _Serving(Protocol):
    """An object that already serves a model, such as the result of ``open_inference``."""

    @property
    def generation(self) -> Ref[Generation]: ...

    @property
    def renderer(self) -> Renderer: ...


EngineLike = Engine | Ref[Generation] | _Serving
TokenizerLike = Any
"""A fast tokenizer of transformers, the directory of a model, or a ``Renderer``."""

_renderers: WeakKeyDictionary[Any, Renderer] = WeakKeyDictionary()
"""Cache of renderers by tokenizer."""


class DirectSession:
    """One trajectory on an engine. ``app`` is the proxy's application in front of it, and ``api_key`` its key there.

    ``discount`` is the last one that was applied. ``completions`` holds the SDK's objects by interaction.
    """

    def __init__(
        self,
        engine: EngineLike | None,
        tokenizer: TokenizerLike = None,
        *,
        seed: int = 0,
        key: SampleKey | None = None,
        config: ProxyConfig | None = None,
        max_length: int | None = None,
    ) -> None:
        if max_length is not None and max_length < 1:
            raise ConfigError(f"engine_max_tokens must be >= 1, not {max_length}.")
        if engine is None:
            raise ConfigError("A direct client needs an engine: an Engine, a generation actor's ref, or an Inference.")
        renderer = _renderer_of(tokenizer, engine)
        generation = engine if isinstance(engine, Ref) else getattr(engine, "generation", None)
        if not isinstance(generation, Ref):
            generation = InlineRef(GenerationActor(cast("Engine", engine)), name="generation")
        if key is None and isinstance(engine, EpisodeEngine):
            key = engine.next_client_key()
        manager = SessionManager(renderer=renderer, generation=generation, seed=seed)
        sessions: InlineRef[Sessions] = InlineRef(manager, name="sessions")
        capacity = InlineRef(CapacityGranter(CapacityState(limits=_ONE)), name="capacity")
        opening = OpenSession(task="direct", key=key)
        if isinstance(engine, EpisodeEngine):
            opening = evolve(opening, max_tokens=engine.max_tokens, limits=engine.budget.limits)
        opened = manager.open_session(opening)
        self.api_key = opened.api_key
        self.discount: float | None = None
        self.completions: dict[str, Any] = {}
        self._id = opened.session
        self._manager = manager
        self._is_ready = False
        self._max_length = max_length
        self._app = create_app(
            sessions=sessions,
            exports=InlineRef(Exporter(sessions=sessions, capacity=capacity), name="exports"),
            capacity=capacity,
            generation=generation,
            config=config,
            token_bytes=renderer.token_bytes,
        )

    async def app(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        """Serve a request: the proxy as an ASGI application."""
        # Not in ``__init__``, which cannot wait for the engine's description.
        if not self._is_ready:
            await self._manager.learn_engine(max_length=self._max_length)
            self._is_ready = True
        await cast("App", self._app)(scope, receive, send)

    def client_options(self, sdk: ModuleType, *, base_url: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of a client of ``sdk`` that sends its requests to ``app``; ``given`` ones win."""
        options = {"api_key": self.api_key, "base_url": base_url, **given}
        if options.get("http_client") is None:
            options["http_client"] = create_http_client(self.app, http_library_of(sdk))
        return options

    @property
    def tree(self) -> ConversationTree:
        """The conversations so far."""
        return self._manager.tree(self._id)

    def views(self, discount: float | None) -> InteractionViews:
        """Return the interactions so far, with the returns under ``discount``; ``None`` keeps assigned rewards."""
        return InteractionViews(self.tree.snapshot(), discount=discount, completions=self.completions)


_ONE = CapacityLimits(max_concurrent=1, batch_size=1)


def _renderer_of(tokenizer: TokenizerLike, engine: EngineLike) -> Renderer:
    if tokenizer is None:
        tokenizer = getattr(engine, "renderer", None)
    if tokenizer is None:
        raise ConfigError(
            "A direct client needs a tokenizer in addition to this engine: a tokenizer, a model's directory."
        )
    if hasattr(tokenizer, "open_stream"):
        return cast("Renderer", tokenizer)
    if isinstance(tokenizer, str | Path):
        return load_renderer(tokenizer)
    # A client is created per episode, and creating a renderer is slow.
    renderer = _renderers.get(tokenizer)
    if renderer is None:
        renderer = _renderers[tokenizer] = create_renderer(tokenizer)
    return renderer


class DirectClient:
    """A mixin for an SDK's client: rewards, token data and training rows, none of which waits.

    ``direct`` is its trajectory. A client created by ``copy`` or ``with_options`` belongs to the same trajectory.
    """

    direct: DirectSession

    def copy(self, **options: Any) -> Self:
        """Return a client with other options and the same trajectory."""
        # The SDK passes these to the constructor of the copy.
        options["_extra_kwargs"] = {**options.get("_extra_kwargs", {}), "direct": self.direct}
        client: Self = cast("Any", super()).copy(**options)
        return client

    with_options = copy

    async def request(self, *args: Any, **kwargs: Any) -> Any:
        """Send a request, and keep the SDK's object of its answer, to be read together with its tokens."""
        answer = await cast("Any", super()).request(*args, **kwargs)
        name = getattr(answer, "id", None)
        if isinstance(name, str):
            self.direct.completions[name] = answer
        return answer

    def set_reward(self, interaction_id: str, reward: Any) -> None:
        """Reward one answer by its id; setting it again replaces the reward.

        Raises:
            NotFound: no answer of this client has the id.
            RewardError: the reward is not a finite number.
        """
        self.direct.tree.set_reward(InteractionId(interaction_id), reward)

    def set_last_reward(self, reward: Any) -> None:
        """Reward the answer that was completed last. Raises ``RewardError`` if there is none."""
        self.direct.tree.set_reward(None, reward)

    def apply_reward_discount(self, turn_discount: float = 1.0) -> dict[str, float]:
        """Propagate rewards backwards: ``return(n) = reward(n) + turn_discount * mean(return(children))``.

        Assigned rewards do not change, so another discount can be applied later, and late rewards are included. Later
        exports and reads contain the returns.

        Returns:
            The return of every completed interaction.

        Raises:
            RewardError: the discount is not finite.
        """
        returns = backpropagate(self.direct.tree.snapshot(), turn_discount)
        self.direct.discount = turn_discount
        return {str(name): value for name, value in returns.items()}

    def get_interaction(self, interaction_id: str) -> InteractionWithTokenLogpReward:
        """Return one answer with its tokens. Raises ``NotFound`` unless a completed answer has this id."""
        return self.direct.views(self.direct.discount).view(InteractionId(interaction_id))

    def get_completions(self, completion_id: str) -> InteractionWithTokenLogpReward:
        """Return one answer with its tokens; an alias of ``get_interaction``."""
        return self.get_interaction(completion_id)

    def export_interactions(
        self, style: str = "individual", reward_discount: float | None = None
    ) -> dict[str, InteractionWithTokenLogpReward]:
        """Return the training rows in order of request, each by the id of the interaction that it ends with.

        Without ``reward_discount``, the discount of ``apply_reward_discount`` is used; without that either, every turn
        keeps its assigned reward. Nothing is consumed: exporting again returns the same rows.

        Raises:
            ExportError: there is no such style.
        """
        discount = self.direct.discount if reward_discount is None else reward_discount
        views = self.direct.views(discount)
        exported = export_trajectories(views.record, discount=discount or 0.0, style=style)
        return views.rows(exported.trajectories)

    def export_completions(self, turn_discount: float = 1.0) -> dict[str, InteractionWithTokenLogpReward]:
        """Return one training row per answer, with rewards propagated backwards under ``turn_discount``."""
        return self.export_interactions(reward_discount=turn_discount)
