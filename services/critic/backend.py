"""What the critic service asks of whoever trains the value model."""

from typing import Protocol

from shared.batch.block import Block, RowKey
from shared.rpc.role import RoleBackend

Metrics = dict[str, float]


class CriticBackend(RoleBackend, Protocol):
    """The value model in training. Columns are described in shared/batch/columns.py.

    Where the replica has several ranks, each of them has the block of its own rows (`my_rows`) and an `outline` of all.

    Everything raises FailedPrecondition when `run` is not the configured one, and InvalidArgument, naming it, when a
    column is missing or does not fit.
    """

    def my_rows(self, run: str, step: int | None, outline: Block) -> list[RowKey]:
        """The rows of `outline` that this rank computes: in the update of a step, or (None) when they are scored."""
        ...

    async def values(self, run: str, block: Block, outline: Block | None = None) -> tuple[Block, Metrics]:
        """Column values of samples: the value of the state before each response token."""
        ...

    async def update(self, run: str, step: int, block: Block, outline: Block | None = None) -> tuple[int, Metrics]:
        """Trains on a training block, completely or not at all; returns the optimizer steps taken so far.

        Raises:
            FailedPrecondition: a loss or gradient is not finite, or memory does not suffice; nothing has changed.
        """
        ...
