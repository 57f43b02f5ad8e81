"""`python -m services.actor`: the actor service."""

from services.actor.backends.torch import TorchActor
from services.actor.servicer import ActorServicer
from services.actor.settings import ActorSettings
from shared.gen.sextet.v1 import actor_pb2_grpc, weights_pb2_grpc
from shared.rpc.ranks import Handlers, Ranks
from shared.rpc.run import RoleContext, RoleParts
from shared.rpc.settings import split_address
from shared.training.device import prepare
from shared.training.group import Group
from shared.training.launch import alone, run_training_role
from shared.weights.gather import Gatherings
from shared.weights.grpc import GrpcPublisher, WeightsServicer
from shared.weights.maker import MakerRanks


def build_ranks(context: RoleContext[ActorSettings], group: Group, ranks: Ranks) -> tuple[RoleParts, Handlers]:
    prepare(context.settings.threads)
    makers = MakerRanks(group)
    publisher = GrpcPublisher(keep=context.settings.weight_versions, ranks=makers)
    gatherings = Gatherings(ranks=makers)
    backend = TorchActor(publisher, lambda: context.operations.applied, group)
    servicer = ActorServicer(context, backend, group, ranks)
    services = [
        (actor_pb2_grpc.add_ActorServiceServicer_to_server, servicer),
        (weights_pb2_grpc.add_WeightsServiceServicer_to_server, WeightsServicer(publisher, gatherings)),
    ]
    names = ["sextet.v1.ActorService", "sextet.v1.WeightsService"]

    def on_bound(endpoint: str) -> None:
        publisher.endpoint = endpoint
        gatherings.bind(split_address(endpoint)[0].strip("[]"))

    parts = RoleParts(backend, services, names, on_bound=on_bound, on_stopped=gatherings.close, ranks=ranks)
    return parts, servicer.handlers


build = alone(build_ranks)

if __name__ == "__main__":
    run_training_role(ActorSettings, build_ranks)
