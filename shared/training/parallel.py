"""Where each rank of a replica stands: stages x copies of a stage x shards of a copy x context x tensor parallel."""

from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shared.config import ParallelConfig

from .group import ALONE, Group

PP, COPIES, SHARDS, TP = "pp", "copies", "shards", "tp"
DP, CP = "dp", "cp"


@dataclass(frozen=True)
class Parallel:
    """A group's ranks on the mesh of one model: rank = stage x `each` + place in the stage, and that place =
    ((copy x shards + shard) x cp + stretch) x tp + place in tp.
    """

    group: Group = ALONE
    copies: int = 1
    shards: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    config: ParallelConfig = field(default_factory=ParallelConfig)

    @property
    def dp(self) -> int:
        """Ranks that share the rows of a batch."""
        return self.copies * self.shards

    @property
    def alike(self) -> int:
        """Ranks of a stage, one after the other, that have the same rows."""
        return self.cp * self.tp

    @property
    def each(self) -> int:
        """Ranks of one stage."""
        return self.dp * self.alike

    @property
    def stage(self) -> int:
        """Which of the model's stages this rank computes."""
        return self.group.rank // self.each

    @property
    def is_last(self) -> bool:
        """Whether results are made here: on the last stage."""
        return self.stage == self.pp - 1

    @property
    def place(self) -> int:
        """This rank's among those of its stage."""
        return self.group.rank % self.each

    @property
    def telling(self) -> slice:
        """The ranks whose results count: on the last stage, of those that have the same rows one."""
        return slice((self.pp - 1) * self.each, None, self.alike)

    @property
    def dp_rank(self) -> int:
        """Which share of the rows this rank computes."""
        return self.place // self.alike

    @property
    def tp_rank(self) -> int:
        """Which part of every layer this rank computes."""
        return self.group.rank % self.tp

    @cached_property
    def mesh(self) -> DeviceMesh:
        """Dimensions pp, copies, shards, tp. Made by all ranks together.

        Ranks that share a sequence hold shards like those that have other rows: gradients are summed over both.
        """
        shape = self.pp, self.copies, self.shards * self.cp, self.tp
        return init_device_mesh(_device(), shape, mesh_dim_names=(PP, COPIES, SHARDS, TP))

    @cached_property
    def context(self) -> dist.ProcessGroup | None:
        """The ranks that share this one's sequences, if there are any. Made by all ranks together."""
        if self.cp == 1:
            return None
        shape = self.pp, self.dp, self.cp, self.tp
        mesh = init_device_mesh(_device(), shape, mesh_dim_names=(PP, DP, CP, TP))
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
    size, cuts = group.size, {"tp": config.tp, "cp": config.cp, "pp": config.pp}
    cut = config.tp * config.cp * config.pp
    if size % cut:
        named = [f"{name} {ranks}" for name, ranks in cuts.items() if ranks > 1]
        said = f": {' x '.join(named)} = {cut}" if len(named) > 1 else f".{named[0].replace(' ', '=')}"
        raise ValueError(f"{key}{said} does not divide the {size} ranks of this service (--world-size)")
    dp = config.dp or size // cut
    if (product := dp * cut) != size:
        others = "".join(f" x {name} {ranks}" for name, ranks in cuts.items() if ranks > 1 or name == "tp")
        raise ValueError(
            f"{key}: dp {dp}{others} = {product} ranks, but this service has {size}: "
            f"start it with --world-size {product}, or set {key}.dp to {size // cut}"
        )
    shards = config.shard or dp
    if dp % shards:
        raise ValueError(f"{key}.shard={shards} does not divide dp {dp}: dp = copies x shard")
    return Parallel(group, dp // shards, shards, config.tp, config.cp, config.pp, config)
