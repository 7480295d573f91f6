"""Every message between actors, grouped by the address that it is sent to: the process graph, from top to bottom.

::

    Host ──borrows──▶ Hosting (a process for each trial, everything below in it)
      │ asks
      ▼
    Accounts
      ▲ asks                               ┌──asks──▶ Weights (beside Training)
    Proxy ──asks──▶ Sessions ──asks──▶ Generation ◀──publishes── Training ──leads──▶ Ranks
      ├──borrows──▶ Models (each with Sessions and Generation of its own)
      │                ▲                                            │ ▲
      │                │ collects                             tells │ │ leases
      ├──asks──▶ Exports ◀──delivers── Rollouts ──asks──▶ Capacity ◀┘ Exports
      │            ▲                      ▲                   ▲
      │            └──delivers── Intake ──│──asks─────────────┘
      │                            ▲      │
      └──asks──────────────────────┤   Training asks (evaluation)
              Sessions tell ───────┘                       everybody ──tells──▶ Progress

What is asked of an actor is named in the imperative (``EndSession``); what it is told is named as news, in the past
tense (``VersionAdvanced``). Each message declares the type of its reply, and an actor class declares the addresses
whose messages it handles.

There is one module per address. Addresses that are reached through another address share its module: ``Intake`` is in
``sessions``, ``Replicas`` in ``generation``, ``Ranks`` in ``training``. Import everything from this package. On the
wire, a message is identified by its address and its own name, independent of its module.
"""

from __future__ import annotations

from areal_actors.messages.accounts import (
    Accounts,
    AdmitUser,
    CreateKey,
    HasKeys,
    IdentifyUser,
    ListKeys,
    RevokeKey,
    TokensSampled,
)
from areal_actors.messages.capacity import (
    AcquirePermit,
    Capacity,
    CapacityView,
    ClaimPermit,
    DescribeCapacity,
    Permit,
    RefundGroup,
    ReservePermit,
    RestorePermit,
    SettlePermit,
    VersionAdvanced,
)
from areal_actors.messages.directory import (
    AwaitEndpoint,
    AwaitGang,
    AwaitLapse,
    AwaitReady,
    AwaitWeights,
    Directory,
    DismissWorker,
    EndpointChanged,
    ExpectWorker,
    FetchOrder,
    KeepLease,
    Order,
    Report,
    ReportFailure,
    ReportGang,
    ReportReady,
    TakeFailure,
    WeightsPublished,
)
from areal_actors.messages.exports import (
    AcknowledgeLease,
    BeginGroup,
    DeliverGroup,
    Draw,
    Drawn,
    Exports,
    ExportSession,
    Lease,
    LeaseGroups,
    SaveVersion,
)
from areal_actors.messages.generation import (
    AddReplica,
    DescribeEngine,
    DescribeReplicas,
    EngineView,
    Generate,
    Generation,
    PauseGeneration,
    PublishWeights,
    RemoveReplica,
    Replicas,
    ReplicaState,
    ReplicaView,
    ResumeGeneration,
)
from areal_actors.messages.hosting import (
    Hosting,
    ListServices,
    ServiceInUse,
    StopServices,
    UseService,
    VisitSession,
)
from areal_actors.messages.models import (
    ListModels,
    ModelInUse,
    Models,
    UseModel,
)
from areal_actors.messages.progress import (
    EpisodeFinished,
    EvaluationFinished,
    PhaseChanged,
    Progress,
    SessionArchived,
    StepFinished,
)
from areal_actors.messages.rollouts import (
    Evaluate,
    Rollouts,
    RunProblem,
)
from areal_actors.messages.serving import (
    DescribeEndpoint,
    Endpoint,
    Serving,
)
from areal_actors.messages.sessions import (
    CheckCredential,
    CollectSession,
    Complete,
    CountTokens,
    DescribeOwner,
    DescribeSessions,
    EndSession,
    ForgetSession,
    Intake,
    LogNumbers,
    OpenSession,
    SessionClosed,
    SessionFinished,
    SessionOpened,
    SessionOwner,
    Sessions,
    SessionsView,
    SetReward,
    SettleTaken,
    StartSession,
    StreamComplete,
    TakenSession,
    TakeSession,
    WatchSessions,
)
from areal_actors.messages.training import (
    AwaitTraining,
    GatherWeights,
    JoinGang,
    Ranks,
    RequestStop,
    SaveWeights,
    TrainAlong,
    Training,
    TrainingSummary,
)
from areal_actors.messages.weights import (
    DescribeWeights,
    GroupPlace,
    Receiver,
    SendWeights,
    TensorBucket,
    Weights,
    WriteWeights,
)

__all__ = [
    "Accounts",
    "AcknowledgeLease",
    "AcquirePermit",
    "AddReplica",
    "AdmitUser",
    "AwaitEndpoint",
    "AwaitGang",
    "AwaitLapse",
    "AwaitReady",
    "AwaitTraining",
    "AwaitWeights",
    "BeginGroup",
    "Capacity",
    "CapacityView",
    "CheckCredential",
    "ClaimPermit",
    "CollectSession",
    "Complete",
    "CountTokens",
    "CreateKey",
    "DeliverGroup",
    "DescribeCapacity",
    "DescribeEndpoint",
    "DescribeEngine",
    "DescribeOwner",
    "DescribeReplicas",
    "DescribeSessions",
    "DescribeWeights",
    "Directory",
    "DismissWorker",
    "Draw",
    "Drawn",
    "EndSession",
    "Endpoint",
    "EndpointChanged",
    "EngineView",
    "EpisodeFinished",
    "Evaluate",
    "EvaluationFinished",
    "ExpectWorker",
    "ExportSession",
    "Exports",
    "FetchOrder",
    "ForgetSession",
    "GatherWeights",
    "Generate",
    "Generation",
    "GroupPlace",
    "HasKeys",
    "Hosting",
    "IdentifyUser",
    "Intake",
    "JoinGang",
    "KeepLease",
    "Lease",
    "LeaseGroups",
    "ListKeys",
    "ListModels",
    "ListServices",
    "LogNumbers",
    "ModelInUse",
    "Models",
    "OpenSession",
    "Order",
    "PauseGeneration",
    "Permit",
    "PhaseChanged",
    "Progress",
    "PublishWeights",
    "Ranks",
    "Receiver",
    "RefundGroup",
    "RemoveReplica",
    "ReplicaState",
    "ReplicaView",
    "Replicas",
    "Report",
    "ReportFailure",
    "ReportGang",
    "ReportReady",
    "RequestStop",
    "ReservePermit",
    "RestorePermit",
    "ResumeGeneration",
    "RevokeKey",
    "Rollouts",
    "RunProblem",
    "SaveVersion",
    "SaveWeights",
    "SendWeights",
    "ServiceInUse",
    "Serving",
    "SessionArchived",
    "SessionClosed",
    "SessionFinished",
    "SessionOpened",
    "SessionOwner",
    "Sessions",
    "SessionsView",
    "SetReward",
    "SettlePermit",
    "SettleTaken",
    "StartSession",
    "StepFinished",
    "StopServices",
    "StreamComplete",
    "TakeFailure",
    "TakeSession",
    "TakenSession",
    "TensorBucket",
    "TokensSampled",
    "TrainAlong",
    "Training",
    "TrainingSummary",
    "UseModel",
    "UseService",
    "VersionAdvanced",
    "VisitSession",
    "WatchSessions",
    "Weights",
    "WeightsPublished",
    "WriteWeights",
]
