"""`python -m services.critic`: the critic service."""

from services.critic.backends.torch import TorchCritic
from services.critic.servicer import CriticServicer
from services.critic.settings import CriticSettings
from shared.gen.sextet.v1 import critic_pb2_grpc
from shared.rpc.ranks import Handlers, Ranks
from shared.rpc.run import RoleContext, RoleParts
from shared.training.device import prepare
from shared.training.group import Group
from shared.training.launch import alone, run_training_role


def build_ranks(context: RoleContext[CriticSettings], group: Group, ranks: Ranks) -> tuple[RoleParts, Handlers]:
    prepare(context.settings.threads)
    backend = TorchCritic(lambda: context.operations.applied, group)
    add, servicer = critic_pb2_grpc.add_CriticServiceServicer_to_server, CriticServicer(context, backend, group, ranks)
    return RoleParts(backend, [(add, servicer)], ["sextet.v1.CriticService"], ranks=ranks), servicer.handlers


build = alone(build_ranks)

if __name__ == "__main__":
    run_training_role(CriticSettings, build_ranks)
