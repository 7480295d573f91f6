"""Every message between actors, grouped by the address that it is sent to: the process graph, from top to bottom.

::

    Accounts
      ▲ asks
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

from areal_actors.messages.accounts import Accounts as Accounts
from areal_actors.messages.accounts import AdmitUser as AdmitUser
from areal_actors.messages.accounts import CreateKey as CreateKey
from areal_actors.messages.accounts import IdentifyUser as IdentifyUser
from areal_actors.messages.accounts import ListKeys as ListKeys
from areal_actors.messages.accounts import RevokeKey as RevokeKey
from areal_actors.messages.accounts import TokensSampled as TokensSampled
from areal_actors.messages.capacity import AcquirePermit as AcquirePermit
from areal_actors.messages.capacity import Capacity as Capacity
from areal_actors.messages.capacity import CapacityView as CapacityView
from areal_actors.messages.capacity import ClaimPermit as ClaimPermit
from areal_actors.messages.capacity import DescribeCapacity as DescribeCapacity
from areal_actors.messages.capacity import LiftStalenessLimit as LiftStalenessLimit
from areal_actors.messages.capacity import Permit as Permit
from areal_actors.messages.capacity import RefundGroup as RefundGroup
from areal_actors.messages.capacity import ReservePermit as ReservePermit
from areal_actors.messages.capacity import RestorePermit as RestorePermit
from areal_actors.messages.capacity import SettlePermit as SettlePermit
from areal_actors.messages.capacity import VersionAdvanced as VersionAdvanced
from areal_actors.messages.directory import AwaitEndpoint as AwaitEndpoint
from areal_actors.messages.directory import AwaitGang as AwaitGang
from areal_actors.messages.directory import AwaitLapse as AwaitLapse
from areal_actors.messages.directory import AwaitProxies as AwaitProxies
from areal_actors.messages.directory import AwaitReady as AwaitReady
from areal_actors.messages.directory import AwaitWeights as AwaitWeights
from areal_actors.messages.directory import CountLostProxies as CountLostProxies
from areal_actors.messages.directory import Directory as Directory
from areal_actors.messages.directory import DismissWorker as DismissWorker
from areal_actors.messages.directory import EndpointChanged as EndpointChanged
from areal_actors.messages.directory import ExpectWorker as ExpectWorker
from areal_actors.messages.directory import FetchRoleSpec as FetchRoleSpec
from areal_actors.messages.directory import KeepLease as KeepLease
from areal_actors.messages.directory import Report as Report
from areal_actors.messages.directory import ReportFailure as ReportFailure
from areal_actors.messages.directory import ReportGang as ReportGang
from areal_actors.messages.directory import ReportReady as ReportReady
from areal_actors.messages.directory import RoleSpec as RoleSpec
from areal_actors.messages.directory import WeightsPublished as WeightsPublished
from areal_actors.messages.exports import AcknowledgeLease as AcknowledgeLease
from areal_actors.messages.exports import BeginGroup as BeginGroup
from areal_actors.messages.exports import DeliverGroup as DeliverGroup
from areal_actors.messages.exports import DiscardLease as DiscardLease
from areal_actors.messages.exports import Draw as Draw
from areal_actors.messages.exports import Drawn as Drawn
from areal_actors.messages.exports import Exports as Exports
from areal_actors.messages.exports import ExportSession as ExportSession
from areal_actors.messages.exports import Lease as Lease
from areal_actors.messages.exports import LeaseGroups as LeaseGroups
from areal_actors.messages.exports import SaveVersion as SaveVersion
from areal_actors.messages.exports import StoreEpisodes as StoreEpisodes
from areal_actors.messages.exports import UntrainedGroup as UntrainedGroup
from areal_actors.messages.generation import AddReplica as AddReplica
from areal_actors.messages.generation import DescribeEngine as DescribeEngine
from areal_actors.messages.generation import EngineView as EngineView
from areal_actors.messages.generation import Generate as Generate
from areal_actors.messages.generation import Generation as Generation
from areal_actors.messages.generation import PauseGeneration as PauseGeneration
from areal_actors.messages.generation import PublishWeights as PublishWeights
from areal_actors.messages.generation import Replicas as Replicas
from areal_actors.messages.generation import ResumeGeneration as ResumeGeneration
from areal_actors.messages.models import ListModels as ListModels
from areal_actors.messages.models import ModelInUse as ModelInUse
from areal_actors.messages.models import Models as Models
from areal_actors.messages.models import UseModel as UseModel
from areal_actors.messages.progress import EpisodeFinished as EpisodeFinished
from areal_actors.messages.progress import EvaluationFinished as EvaluationFinished
from areal_actors.messages.progress import GroupsTrained as GroupsTrained
from areal_actors.messages.progress import PhaseChanged as PhaseChanged
from areal_actors.messages.progress import Progress as Progress
from areal_actors.messages.progress import RowsTrained as RowsTrained
from areal_actors.messages.progress import RunEnded as RunEnded
from areal_actors.messages.progress import ServiceOpened as ServiceOpened
from areal_actors.messages.progress import SessionArchived as SessionArchived
from areal_actors.messages.progress import SessionsCounted as SessionsCounted
from areal_actors.messages.progress import StepFinished as StepFinished
from areal_actors.messages.rollouts import Evaluate as Evaluate
from areal_actors.messages.rollouts import Rollouts as Rollouts
from areal_actors.messages.rollouts import RunProblem as RunProblem
from areal_actors.messages.serving import DescribeEndpoint as DescribeEndpoint
from areal_actors.messages.serving import Endpoint as Endpoint
from areal_actors.messages.serving import Serving as Serving
from areal_actors.messages.sessions import CheckCredential as CheckCredential
from areal_actors.messages.sessions import CollectSession as CollectSession
from areal_actors.messages.sessions import Complete as Complete
from areal_actors.messages.sessions import CountTokens as CountTokens
from areal_actors.messages.sessions import DescribeAnswer as DescribeAnswer
from areal_actors.messages.sessions import DescribeOwner as DescribeOwner
from areal_actors.messages.sessions import DescribeSessions as DescribeSessions
from areal_actors.messages.sessions import EndSession as EndSession
from areal_actors.messages.sessions import ForgetSession as ForgetSession
from areal_actors.messages.sessions import Intake as Intake
from areal_actors.messages.sessions import LogNumbers as LogNumbers
from areal_actors.messages.sessions import OpenSession as OpenSession
from areal_actors.messages.sessions import SessionClosed as SessionClosed
from areal_actors.messages.sessions import SessionFinished as SessionFinished
from areal_actors.messages.sessions import SessionOpened as SessionOpened
from areal_actors.messages.sessions import SessionOwner as SessionOwner
from areal_actors.messages.sessions import Sessions as Sessions
from areal_actors.messages.sessions import SessionsView as SessionsView
from areal_actors.messages.sessions import SetReward as SetReward
from areal_actors.messages.sessions import SettleTaken as SettleTaken
from areal_actors.messages.sessions import StartSession as StartSession
from areal_actors.messages.sessions import StreamComplete as StreamComplete
from areal_actors.messages.sessions import TakenSession as TakenSession
from areal_actors.messages.sessions import TakeSession as TakeSession
from areal_actors.messages.sessions import TrainingEnded as TrainingEnded
from areal_actors.messages.sessions import WatchSessions as WatchSessions
from areal_actors.messages.training import AwaitTraining as AwaitTraining
from areal_actors.messages.training import GangMembers as GangMembers
from areal_actors.messages.training import GatherWeights as GatherWeights
from areal_actors.messages.training import JoinGang as JoinGang
from areal_actors.messages.training import Ranks as Ranks
from areal_actors.messages.training import RequestStop as RequestStop
from areal_actors.messages.training import SaveShards as SaveShards
from areal_actors.messages.training import SaveWeights as SaveWeights
from areal_actors.messages.training import TrainAlong as TrainAlong
from areal_actors.messages.training import Training as Training
from areal_actors.messages.training import TrainingSummary as TrainingSummary
