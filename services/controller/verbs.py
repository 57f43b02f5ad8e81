"""Every role call that a flow can make: which RPC it is and what it takes."""

from dataclasses import dataclass
from typing import Any

from shared.gen.sextet.v1 import (
    actor_pb2,
    actor_pb2_grpc,
    critic_pb2,
    critic_pb2_grpc,
    reference_pb2,
    reference_pb2_grpc,
    reward_pb2,
    reward_pb2_grpc,
    role_pb2,
    role_pb2_grpc,
    rollout_pb2,
    rollout_pb2_grpc,
)

ROLES = ("rollout", "actor", "critic", "reward", "reference")
SPREAD = frozenset({"rollout", "reward", "reference"})
"""Roles whose replicas hold the same state, so that rows go to any of them."""
KEPT = frozenset({"actor", "critic"})
"""Roles that learn: one replica, restored from checkpoints."""


@dataclass(frozen=True)
class Verb:
    """One RPC of one role.

    Attributes:
        name: the operation's name and the call's name in metrics, "reward.score".
        stub: the generated stub class.
        method: its method.
        request: the request message class.
        mutates: changes the role's state, so that a step may do it once and with one payload only.
    """

    name: str
    stub: type
    method: str
    request: type
    mutates: bool = False

    @property
    def role(self) -> str:
        return self.name.partition(".")[0]

    def on(self, channel: Any) -> Any:
        """The RPC as a callable on this channel."""
        return getattr(self.stub(channel), self.method)


GENERATE = Verb("rollout.generate", rollout_pb2_grpc.RolloutServiceStub, "Generate", rollout_pb2.GenerateRequest)
PREPARE_WEIGHTS = Verb(
    "rollout.prepare_weights", rollout_pb2_grpc.RolloutServiceStub, "PrepareWeights", rollout_pb2.PrepareWeightsRequest
)
COMMIT_WEIGHTS = Verb(
    "rollout.commit_weights", rollout_pb2_grpc.RolloutServiceStub, "CommitWeights", rollout_pb2.CommitWeightsRequest
)
SCORE = Verb("reward.score", reward_pb2_grpc.ScoringServiceStub, "ScoreBatch", reward_pb2.ScoreBatchRequest)
REFERENCE_LOGPROBS = Verb(
    "reference.logprobs",
    reference_pb2_grpc.ReferenceServiceStub,
    "ComputeLogprobs",
    reference_pb2.ReferenceServiceComputeLogprobsRequest,
)
VALUES = Verb("critic.values", critic_pb2_grpc.CriticServiceStub, "ComputeValues", critic_pb2.ComputeValuesRequest)
CRITIC_UPDATE = Verb(
    "critic.update", critic_pb2_grpc.CriticServiceStub, "Update", critic_pb2.CriticServiceUpdateRequest, mutates=True
)
LOGPROBS = Verb(
    "actor.logprobs", actor_pb2_grpc.ActorServiceStub, "ComputeLogprobs", actor_pb2.ActorServiceComputeLogprobsRequest
)
ADVANTAGES = Verb(
    "actor.advantages", actor_pb2_grpc.ActorServiceStub, "ComputeAdvantages", actor_pb2.ComputeAdvantagesRequest
)
ACTOR_UPDATE = Verb(
    "actor.update", actor_pb2_grpc.ActorServiceStub, "Update", actor_pb2.ActorServiceUpdateRequest, mutates=True
)
HOLD = Verb("actor.hold", actor_pb2_grpc.ActorServiceStub, "HoldRows", actor_pb2.HoldRowsRequest)
PUBLISH_WEIGHTS = Verb(
    "actor.publish_weights", actor_pb2_grpc.ActorServiceStub, "PublishWeights", actor_pb2.PublishWeightsRequest
)
EXPORT = Verb("actor.export", actor_pb2_grpc.ActorServiceStub, "ExportModel", actor_pb2.ExportModelRequest)

FLOW_VERBS = (GENERATE, SCORE, REFERENCE_LOGPROBS, VALUES, CRITIC_UPDATE, LOGPROBS, ADVANTAGES, ACTOR_UPDATE)
"""What flows call."""
BY_ROW = frozenset({SCORE, REFERENCE_LOGPROBS, VALUES, LOGPROBS})
"""Whose answer for a row does not depend on which other rows are asked for."""
PROFILED = frozenset({LOGPROBS, ACTOR_UPDATE, VALUES, CRITIC_UPDATE, REFERENCE_LOGPROBS})
"""What a profiler can record: it has a field `profile`."""
PROFILED_ROLES = tuple(sorted({verb.role for verb in PROFILED}))


def configure(role: str) -> Verb:
    """Configure, of a role."""
    return Verb(f"{role}.configure", role_pb2_grpc.RoleServiceStub, "Configure", role_pb2.ConfigureRequest)


def stage(role: str) -> Verb:
    """StageCheckpoint, of a role."""
    return Verb(f"{role}.stage", role_pb2_grpc.RoleServiceStub, "StageCheckpoint", role_pb2.StageCheckpointRequest)


def checkpoint(role: str) -> Verb:
    """SaveCheckpoint, of a role."""
    return Verb(f"{role}.checkpoint", role_pb2_grpc.RoleServiceStub, "SaveCheckpoint", role_pb2.SaveCheckpointRequest)
