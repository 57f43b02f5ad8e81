"""`python -m services.reward`: the reward service."""

from functools import partial

from services.reward.backends import make_backend
from services.reward.role import RewardRole
from services.reward.servicer import ScoringServicer
from services.reward.settings import RewardSettings
from shared.gen.sextet.v1 import reward_pb2_grpc
from shared.rpc.run import RoleContext, RoleParts, run_role


def build(context: RoleContext[RewardSettings]) -> RoleParts:
    settings = context.settings
    open_backend = partial(make_backend, grader_memory_bytes=settings.grader_memory_bytes)
    role = RewardRole(open_backend, settings.reward_endpoint)
    servicer = ScoringServicer(context.operations, context.store, context.reader, role, settings.read_timeout)
    add = reward_pb2_grpc.add_ScoringServiceServicer_to_server
    return RoleParts(role, [(add, servicer)], ["sextet.v1.ScoringService"])


if __name__ == "__main__":
    run_role(RewardSettings, build)
