"""What the actor service asks of whoever trains the policy."""

from pathlib import Path
from typing import Protocol

from shared.batch.block import Block, RowKey
from shared.gen.sextet.v1 import weights_pb2
from shared.rpc.role import RoleBackend

Metrics = dict[str, float]


class ActorBackend(RoleBackend, Protocol):
    """The policy in training. Rows of a block are independent; columns are described in shared/batch/columns.py.

    Where the replica has several ranks, each of them has the block of its own rows (`my_rows`) and an `outline` of all.

    Everything raises FailedPrecondition when `run` is not the configured one, and InvalidArgument, naming it, when a
    column is missing or does not fit.
    """

    def my_rows(self, run: str, step: int | None, outline: Block) -> list[RowKey]:
        """The rows of `outline` that this rank computes: in the update of a step, or (None) when they are scored."""
        ...

    async def logprobs(self, run: str, block: Block, outline: Block | None = None) -> tuple[Block, Metrics]:
        """Columns old_logprobs, entropy and sum_pi_squared of samples, under the policy as it is now."""
        ...

    async def advantages(self, run: str, block: Block) -> tuple[Block, Metrics]:
        """The training block, from samples, scores and whatever further columns the algorithm needs."""
        ...

    async def update(self, run: str, step: int, block: Block, outline: Block | None = None) -> tuple[int, Metrics]:
        """Trains on a training block, completely or not at all; returns the version.

        Raises:
            FailedPrecondition: a loss or gradient is not finite, or memory does not suffice; nothing has changed.
        """
        ...

    async def publish(self, run: str) -> weights_pb2.WeightsRef:
        """Makes the weights as they are now fetchable."""
        ...

    async def export(self, run: str, directory: Path) -> None:
        """Writes the policy and its tokenizer as a Hugging Face directory, completely or not at all."""
        ...
