"""`python -m services.rollout`: the rollout service."""

import os

from services.rollout.backends import make_backend
from services.rollout.beside import beside
from services.rollout.kept import KeptSamples
from services.rollout.role import RolloutRole
from services.rollout.servicer import RolloutServicer
from services.rollout.settings import RolloutSettings
from services.rollout.weights import Weights, Wire
from shared.batch.spool import Spool
from shared.gen.sextet.v1 import rollout_pb2_grpc, weights_pb2_grpc
from shared.rpc.run import RoleContext, RoleParts, run_role
from shared.rpc.settings import split_address
from shared.weights.grpc import GrpcFetcher, GrpcPublisher, WeightsServicer


def build(context: RoleContext[RolloutSettings]) -> RoleParts:
    import torch

    torch.set_num_threads(context.settings.threads or len(os.sched_getaffinity(0)))
    publisher = GrpcPublisher(keep=1)
    timeout = context.settings.fetch_timeout
    wire = Wire(context.connections, context.settings.replica, timeout)
    weights = Weights(GrpcFetcher(context.connections), publisher, timeout, wire)
    kept = KeptSamples(Spool(context.settings.data_dir / "spool", context.settings.spool_bytes))
    role = RolloutRole(make_backend, weights, kept, context.settings.probe_deadline)

    def on_bound(endpoint: str) -> None:
        publisher.endpoint = endpoint
        wire.bind(split_address(endpoint)[0].strip("[]"))

    services = [
        (rollout_pb2_grpc.add_RolloutServiceServicer_to_server, RolloutServicer(context, role)),
        (weights_pb2_grpc.add_WeightsServiceServicer_to_server, WeightsServicer(publisher)),
    ]
    names = ["sextet.v1.RolloutService", "sextet.v1.WeightsService"]
    return RoleParts(
        role,
        services,
        names,
        on_bound=on_bound,
        on_stopped=lambda: role.release(""),
        beside=lambda face: beside(context, role, face),
    )


if __name__ == "__main__":
    run_role(RolloutSettings, build)
