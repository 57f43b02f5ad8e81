"""How weights travel from the actor to every rollout replica: the two sides of a channel, whatever its wire."""

from collections.abc import Collection, Mapping
from typing import Protocol

import torch
from torch import Tensor

from shared.config import WeightsConfig
from shared.gen.sextet.v1 import weights_pb2
from shared.weights.codec import NOTHING, Kept


class Publisher(Protocol):
    """The sending side."""

    def publish(
        self,
        version: int,
        tensors: Mapping[str, Tensor],
        *,
        run: str,
        options: WeightsConfig | None = None,
        dtype: torch.dtype | None = None,
        exact: Collection[str] = (),
    ) -> weights_pb2.WeightsRef:
        """Makes a version fetchable, as the tensors are now: training may go on when this returns.

        It copies and hashes every byte, so call it where compute runs, never on the event loop. Publishing a version
        again replaces it; the oldest versions are dropped.

        Args:
            version: the optimizer step that made them.
            tensors: by Hugging Face state-dict name, any device. Tied names share one copy.
            run: the run they belong to.
            options: how it may travel besides the gRPC stream; None: not at all.
            dtype: of floating-point tensors when they travel; None: as they are.
            exact: tensors that travel as they are whatever `dtype` says.
        """
        ...

    def kept(self, run: str, version: int) -> Kept:
        """The tensors of a version that is held whole here. Raises NotFound."""
        ...

    def release(self, run: str) -> None:
        """Drops all versions of a run."""
        ...


class Fetcher(Protocol):
    """The receiving side."""

    async def fetch(self, ref: weights_pb2.WeightsRef, timeout: float, kept: Kept = NOTHING) -> dict[str, Tensor]:
        """The version's tensors on the CPU, every one verified; tied names share one tensor.

        Args:
            kept: tensors that are here already; those that are the version's do not travel, and are in the answer.

        Raises:
            NotFound: no holder has the version any more.
            Unavailable: no holder can be reached.
            Internal: what arrived is not what was sent; the tensor is named.
            DeadlineExceeded: not within `timeout` seconds.
        """
        ...
