"""vLLM's worker processes as the receiving side of a wire transfer: the weights never pass through this process."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from services.rollout.backends.parameters import matched
from shared.gen.sextet.v1 import weights_pb2
from shared.training.lora import is_adapter
from shared.weights.codec import DTYPES
from shared.weights.gather import usable_channels
from shared.weights.group import WireError
from shared.weights.part import GRACE_SECONDS

_POLL_SECONDS = 0.01


class VllmReceiver:
    """See shared/weights/join.py. Workers receive in a thread of their own and go on generating.

    Args:
        call: runs a method of SextetWorker in every worker, and answers what they return, in order of rank.
        shape: the model without memory.
        places: what sextet_place answers.
        host: address of this machine that the sender reaches.
        keep: whether workers keep what they take, so that what stays the same need not travel again.
        engines: data-parallel ones. Only the first of several answers a call, so that their weights come by gRPC.
    """

    tensors: Mapping[str, Tensor] | None = None

    def __init__(
        self,
        call: Callable[..., Awaitable[list[Any]]],
        shape: nn.Module,
        places: list[dict[str, Any]],
        host: str,
        keep: bool,
        engines: int = 1,
    ) -> None:
        self._engines = engines
        self._call, self._shape, self._places, self._host, self._keep = call, shape, places, host, keep

    @property
    def channels(self) -> list[str]:
        return usable_channels(torch.device(self._places[0]["type"])) if self._engines == 1 else []

    @property
    def holds(self) -> str:
        names = {place["holds"] for place in self._places}
        return names.pop() if len(names) == 1 else ""

    @property
    def has(self) -> Mapping[str, str]:
        first, *others = (place["has"] for place in self._places)
        return {name: digest for name, digest in first.items() if all(has.get(name) == digest for has in others)}

    def ranks(self) -> list[weights_pb2.WeightRank]:
        return [
            weights_pb2.WeightRank(host=place["host"], device=place["device"], sees=place["sees"])
            for place in self._places
        ]

    async def receive(self, answer: weights_pb2.JoinResponse) -> list[weights_pb2.WeightPiece]:
        """Raises EngineError, before anything travels, when the tensors are not this model's."""
        infos = [info for info in answer.manifest.tensors if not info.alias_of and not is_adapter(info.name)]
        matched(
            self._shape,
            {i.name: torch.empty(tuple(i.shape), dtype=DTYPES[i.dtype], device="meta") for i in infos},
        )
        deadline = time.monotonic() + answer.seconds + GRACE_SECONDS
        await self._call("sextet_receive", answer.SerializeToString(), answer.first_rank, self._host, self._keep)
        while True:
            states = await self._call("sextet_received")
            if failed := next((state["error"] for state in states if state["error"]), ""):
                raise WireError(failed)
            if all(state["done"] for state in states):
                pieces = [piece for state in states for piece in state["pieces"]]
                return [weights_pb2.WeightPiece.FromString(piece) for piece in pieces]
            if time.monotonic() > deadline:
                raise WireError("vLLM's workers have not received the weights in time")
            await asyncio.sleep(_POLL_SECONDS)
