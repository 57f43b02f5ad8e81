"""`python -m services.reference`: the reference service."""

from services.reference.backends.torch import TorchReference
from services.reference.servicer import ReferenceServicer
from services.reference.settings import ReferenceSettings
from shared.gen.sextet.v1 import reference_pb2_grpc
from shared.rpc.ranks import Handlers, Ranks
from shared.rpc.run import RoleContext, RoleParts
from shared.training.device import prepare
from shared.training.group import Group
from shared.training.launch import alone, run_training_role


def build_ranks(context: RoleContext[ReferenceSettings], group: Group, ranks: Ranks) -> tuple[RoleParts, Handlers]:
    prepare(context.settings.threads)
    backend = TorchReference(group)
    add, servicer = (
        reference_pb2_grpc.add_ReferenceServiceServicer_to_server,
        ReferenceServicer(context, backend, group, ranks),
    )
    return RoleParts(backend, [(add, servicer)], ["sextet.v1.ReferenceService"], ranks=ranks), servicer.handlers


build = alone(build_ranks)

if __name__ == "__main__":
    run_training_role(ReferenceSettings, build_ranks)
