"""The words of the house: frozen values that every room shares; no behaviour beyond derived properties.

Messages between actors live in ``messages.py``; settings live beside the component that they configure.
"""

from __future__ import annotations

from areal_actors.domain.arrays import Floats, Ints, array_equality, as_floats, as_ints
from areal_actors.domain.chat import (
    Answer,
    AnswerStarted,
    ChatMessage,
    CompletionRequest,
    Credential,
    Delta,
    InteractionId,
    ReasoningDelta,
    SessionId,
    TextDelta,
    Tool,
    ToolArgumentsDelta,
    ToolCall,
    ToolCallStarted,
    ToolChoice,
    Usage,
)
from areal_actors.domain.rows import DataPosition, Episode, Group, Problem, Trajectory, Untrained, UntrainedReason
from areal_actors.domain.sampling import (
    Chunk,
    Completion,
    EngineInfo,
    EngineRequest,
    EngineStatistics,
    FinishReason,
    PauseMode,
    SampleKey,
    Sampling,
    Snapshot,
    TopLogprob,
)
from areal_actors.domain.tree import ForkReason, GroupId, Interaction, InteractionStatus, SessionRecord

__all__ = [
    "Answer",
    "AnswerStarted",
    "ChatMessage",
    "Chunk",
    "Completion",
    "CompletionRequest",
    "Credential",
    "DataPosition",
    "Delta",
    "EngineInfo",
    "EngineRequest",
    "EngineStatistics",
    "Episode",
    "FinishReason",
    "Floats",
    "ForkReason",
    "Group",
    "GroupId",
    "Interaction",
    "InteractionId",
    "InteractionStatus",
    "Ints",
    "PauseMode",
    "Problem",
    "ReasoningDelta",
    "SampleKey",
    "Sampling",
    "SessionId",
    "SessionRecord",
    "Snapshot",
    "TextDelta",
    "Tool",
    "ToolArgumentsDelta",
    "ToolCall",
    "ToolCallStarted",
    "ToolChoice",
    "TopLogprob",
    "Trajectory",
    "Untrained",
    "UntrainedReason",
    "Usage",
    "array_equality",
    "as_floats",
    "as_ints",
]
