"""What the reference service asks of whoever holds the frozen policy."""

from typing import Protocol

from shared.batch.block import Block, RowKey
from shared.rpc.role import RoleBackend

Metrics = dict[str, float]


class ReferenceBackend(RoleBackend, Protocol):
    """The frozen policy. Columns are described in shared/batch/columns.py."""

    def my_rows(self, run: str, outline: Block) -> list[RowKey]:
        """The rows of `outline` that this rank computes, of a replica that has several."""
        ...

    async def logprobs(self, run: str, block: Block, outline: Block | None = None) -> tuple[Block, Metrics]:
        """Column ref_logprobs of samples, at the sampling temperature.

        Raises:
            FailedPrecondition: `run` is not the configured one.
            InvalidArgument: a column is missing or does not fit.
        """
        ...
