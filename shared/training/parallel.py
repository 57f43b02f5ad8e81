"""Where each rank of a replica stands: copies of the model x shards of a copy x context x tensor-parallel ranks."""

from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shared.config import ParallelConfig

from .group import ALONE, Group

COPIES, SHARDS, TP = "copies", "shards", "tp"
DP, CP = "dp", "cp"


@dataclass(frozen=True)
class Parallel:
    """A group's ranks on the mesh of one model: rank = ((copy x shards + shard) x cp + stretch) x tp + place in tp."""

    group: Group = ALONE
    copies: int = 1
    shards: int = 1
    tp: int = 1
    cp: int = 1
    config: ParallelConfig = field(default_factory=ParallelConfig)

    @property
    def dp(self) -> int:
        """Ranks that share the rows of a batch."""
        return self.copies * self.shards

    @property
    def alike(self) -> int:
        """Ranks, one after the other, that have the same rows."""
        return self.cp * self.tp

    @property
    def dp_rank(self) -> int:
        """Which share of the rows this rank computes."""
        return self.group.rank // self.alike

    @property
    def tp_rank(self) -> int:
        """Which part of every layer this rank computes."""
        return self.group.rank % self.tp

    @cached_property
    def mesh(self) -> DeviceMesh:
        """Dimensions copies, shards, tp. Made by all ranks together.

        Ranks that share a sequence hold shards like those that have other rows: gradients are summed over both.
        """
        shape = self.copies, self.shards * self.cp, self.tp
        return init_device_mesh(_device(), shape, mesh_dim_names=(COPIES, SHARDS, TP))

    @cached_property
    def context(self) -> dist.ProcessGroup | None:
        """The ranks that share this one's sequences, if there are any. Made by all ranks together."""
        if self.cp == 1:
            return None
        mesh = init_device_mesh(_device(), (self.dp, self.cp, self.tp), mesh_dim_names=(DP, CP, TP))
        return mesh[CP].get_group()


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


ONE = Parallel()
"""A replica that is one process."""


def plan_parallel(config: ParallelConfig, group: Group, key: str) -> Parallel:
    """How `config` divides the group's ranks.

    Args:
        key: the configuration section, for messages.

    Raises:
        ValueError: the product is not the number of ranks; the text has the arithmetic.
    """
    size, tp, cp = group.size, config.tp, config.cp
    if size % (tp * cp):
        cut = f".tp={tp}" if cp == 1 else f": tp {tp} x cp {cp} = {tp * cp}"
        raise ValueError(f"{key}{cut} does not divide the {size} ranks of this service (--world-size)")
    dp = config.dp or size // (tp * cp)
    if (product := dp * tp * cp) != size:
        context = f" x cp {cp}" if cp > 1 else ""
        raise ValueError(
            f"{key}: dp {dp} x tp {tp}{context} = {product} ranks, but this service has {size}: "
            f"start it with --world-size {product}, or set {key}.dp to {size // (tp * cp)}"
        )
    shards = config.shard or dp
    if dp % shards:
        raise ValueError(f"{key}.shard={shards} does not divide dp {dp}: dp = copies x shard")
    return Parallel(group, dp // shards, shards, tp, cp, config)
