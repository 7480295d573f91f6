"""Train the model behind any agent. This package exports the names that most programs need.

``import areal_actors`` loads neither torch nor starlette: a name is imported from its module when it is first used.
Other names are imported from their modules, such as ``areal_actors.domain`` or ``areal_actors.testing``.
"""

from __future__ import annotations

# Type checkers take the name for that of typing, whose import would be most of the time before `__main__` can see to it
# that Ctrl-C leaves without a traceback.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from areal_actors.cache.interactions import InteractionWithTokenLogpReward, ModelResponse
    from areal_actors.cache.rewards import RewardTree, backpropagate
    from areal_actors.client import AgentRunner, AgentSession, OpenAIProxyClient
    from areal_actors.config import RunConfig, create_config, load_config
    from areal_actors.dashboard import RunSummary
    from areal_actors.direct import ArealAnthropic, ArealOpenAI
    from areal_actors.errors import ArealError
    from areal_actors.kernel import Actor, ActorSystem, Context, Message, Ref, StreamMessage
    from areal_actors.run.conversations import conversations_to_rows
    from areal_actors.run.inference import EmbeddedSession, Inference, InferenceConfig, open_inference
    from areal_actors.run.remote_engine import GeneratedText, RemoteSGLangEngine
    from areal_actors.run.serving import Server, serve
    from areal_actors.run.training import Trainer, TrainingRun, train
    from areal_actors.workflows import OpenAIProxyWorkflow, ProxyWorkflow
    from areal_actors.workflows.engine import GenerationConfig, ModelRequest
    from areal_actors.workflows.rewards import AsyncRewardWrapper
    from areal_actors.workflows.rollout import GroupedRolloutWorkflow, RolloutWorkflow

__all__ = [
    "Actor",
    "ActorSystem",
    "AgentRunner",
    "AgentSession",
    "ArealAnthropic",
    "ArealError",
    "ArealOpenAI",
    "AsyncRewardWrapper",
    "Context",
    "EmbeddedSession",
    "GeneratedText",
    "GenerationConfig",
    "GroupedRolloutWorkflow",
    "Inference",
    "InferenceConfig",
    "InteractionWithTokenLogpReward",
    "Message",
    "ModelRequest",
    "ModelResponse",
    "OpenAIProxyClient",
    "OpenAIProxyWorkflow",
    "ProxyWorkflow",
    "Ref",
    "RemoteSGLangEngine",
    "RewardTree",
    "RolloutWorkflow",
    "RunConfig",
    "RunSummary",
    "Server",
    "StreamMessage",
    "Trainer",
    "TrainingRun",
    "__version__",
    "backpropagate",
    "conversations_to_rows",
    "create_config",
    "load_config",
    "open_inference",
    "serve",
    "train",
]

__version__ = "0.2.0"

_HOMES = {
    "areal_actors.cache.rewards": ("RewardTree", "backpropagate"),
    "areal_actors.client": ("AgentRunner", "AgentSession", "OpenAIProxyClient"),
    "areal_actors.config": ("RunConfig", "create_config", "load_config"),
    "areal_actors.kernel": ("Actor", "ActorSystem", "Context", "Message", "Ref", "StreamMessage"),
    "areal_actors.direct": ("ArealAnthropic", "ArealOpenAI"),
    "areal_actors.errors": ("ArealError",),
    "areal_actors.dashboard": ("RunSummary",),
    "areal_actors.run.serving": ("Server", "serve"),
    "areal_actors.run.training": ("Trainer", "TrainingRun", "train"),
    "areal_actors.workflows.engine": ("GenerationConfig", "ModelRequest"),
    "areal_actors.workflows.rewards": ("AsyncRewardWrapper",),
    "areal_actors.workflows": ("OpenAIProxyWorkflow", "ProxyWorkflow"),
    "areal_actors.workflows.rollout": ("GroupedRolloutWorkflow", "RolloutWorkflow"),
    "areal_actors.cache.interactions": ("InteractionWithTokenLogpReward", "ModelResponse"),
    "areal_actors.run.remote_engine": ("GeneratedText", "RemoteSGLangEngine"),
    "areal_actors.run.conversations": ("conversations_to_rows",),
    "areal_actors.run.inference": ("EmbeddedSession", "Inference", "InferenceConfig", "open_inference"),
}
"""The module of each name; type checkers read the same from the imports above."""

# Hidden from type checkers, for which a module with ``__getattr__`` has every attribute, misspelt ones included.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Import ``name`` from its module on first use, and keep it."""
        from importlib import import_module

        home = next((module for module, names in _HOMES.items() if name in names), None)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(home), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        """Return all exported names, imported or not."""
        return sorted(__all__)
