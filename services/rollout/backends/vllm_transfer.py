"""vLLM's weight-transfer interface with Sextet's wire behind it: what takes new weights inside vLLM's workers.

vLLM calls it in the order of its interface: `init_transfer_engine` begins a transfer, `start_weight_update`,
`receive_weights` and `finish_weight_update` put what has arrived into the model. Where the kernels use weights as a
checkpoint has them, they are copied straight into place; others are taken layer by layer by vLLM's own reload, which
repacks them and copies twice. In 0.23 the worker itself begins and ends that reload; later ones ask the engine to.
"""

# vLLM is an extra: most environments that check types do not have it.
# pyright: reportMissingImports=false

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from services.rollout.backends.vllm_weights import TRANSFER
from shared.gen.sextet.v1 import weights_pb2
from shared.training.lora import merge_adapters
from shared.weights.codec import NOTHING, Kept, by_every_name
from shared.weights.part import WirePart


@dataclass
class Begin(WeightTransferInitInfo):
    """A transfer that this worker is to take part in.

    Attributes:
        answer: a JoinResponse.
        rank: in it.
        host: address of this machine that others reach.
        device: where tensors go.
        keep: what is taken stays in main memory, so that what does not change need not travel again.
    """

    answer: bytes
    rank: int
    host: str
    device: torch.device
    keep: bool


@dataclass
class Take(WeightTransferUpdateInfo):
    """Weights to take, by checkpoint names: those of a safetensors file, or, without one, those that arrived."""

    path: str


class SextetTransfer(WeightTransferEngine[Begin, Take]):
    """See the module.

    Attributes:
        part: this process's part in transfers; None before the first.
        kept: what of the last version is kept.
        arriving: the transfer that was begun last, until it is taken.
    """

    init_info_cls, update_info_cls = Begin, Take
    part: WirePart | None = None
    arriving: "Arriving | None" = None
    kept: Kept = NOTHING

    def init_transfer_engine(self, init_info: Begin) -> None:
        """Returns at once: generation goes on meanwhile."""
        self.part = self.part or WirePart(init_info.host)
        self.arriving = None
        self.arriving = Arriving(self.part, init_info, self.kept)

    @cached_property
    def in_place(self) -> bool:
        """Whether weights are copied straight to where the kernels read them: on GPUs, as far as layers are known."""
        on_gpu = all(parameter.device.type == "cuda" for parameter in self.model.parameters())
        return on_gpu and used_as_loaded(self.model)

    def start_weight_update(self) -> None:
        if not self.in_place:
            initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: Take, load_weights: Any = None) -> None:
        """`load_weights` is the model's own, which vLLM 0.23 hands over."""
        self.model.load_weights(_read(update_info.path) if update_info.path else self._arrived())

    def finish_weight_update(self) -> None:
        if not self.in_place:
            finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        if self.part:
            self.part.close()

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Raises RuntimeError: vLLM 0.23 wants this method, but actors send by shared/weights."""
        raise RuntimeError("Sextet's actors send weights by their own service (shared/weights), not by this method")

    def _arrived(self) -> Iterable[tuple[str, Tensor]]:
        arriving, self.arriving = self.arriving, None
        if arriving is None or not arriving.done:
            raise RuntimeError("no weights have arrived")
        self.kept = arriving.now
        return arriving.tensors.items()


def used_as_loaded(model: nn.Module) -> bool:
    """Whether a GPU's kernels use weights as the model's loader puts them: nothing is computed from them afterwards.

    Not so with quantization, mixtures of experts and latent attention, nor, to be safe, with layers unknown here.
    """
    return all(type(each) in _UNCHANGED for module in model.modules() for each in _processors(module))


_UNCHANGED = (Attention, UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
"""What vLLM asks to process weights after loading, and leaves them as they are on GPUs."""


def _processors(module: nn.Module) -> list[Any]:
    """What vLLM asks to process a module's weights after loading."""
    asked = (module, getattr(module, "quant_method", None))
    return [each for each in asked if hasattr(each, "process_weights_after_loading")]


def _read(path: str) -> Iterator[tuple[str, Tensor]]:
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a mapping
            yield name, file.get_tensor(name)


class Arriving:
    """A version on its way into this worker, in a thread.

    Attributes:
        error: why it failed; "" if it has not.
        pieces: WeightPieces that arrived, serialized.
        tensors: by every name, adapters merged.
        now: what is kept of it.
    """

    def __init__(self, part: WirePart, begin: Begin, kept: Kept) -> None:
        self._part, self._begin, self._kept, self.now = part, begin, kept, NOTHING
        self.error = ""
        self.pieces: list[bytes] = []
        self.tensors: dict[str, Tensor] = {}
        self._answer = weights_pb2.JoinResponse.FromString(begin.answer)
        self._thread = threading.Thread(target=self._run, name="weights", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            received, pieces = self._part.receive(self._answer, self._begin.rank, self._begin.device)
            self._keep_and_merge(received)
            self.pieces = [piece.SerializeToString() for piece in pieces]
        except Exception as error:  # noqa: BLE001 - whoever asks must hear of it
            self.error = str(error) or type(error).__name__

    def _keep_and_merge(self, received: dict[str, Tensor]) -> None:
        manifest = self._answer.manifest
        here = {name: self._kept.tensors[name] for name in self._answer.ranks[self._begin.rank].keeps}
        # By every name, as vLLM keeps an old head otherwise.
        tensors = by_every_name(manifest, {**here, **received})
        if self._begin.keep:
            digests = {info.name: info.digest for info in manifest.tensors}
            self.now = Kept(digests, {name: tensor.cpu() for name, tensor in tensors.items()})
        self.tensors = merge_adapters(tensors)
        if self._begin.device.type == "cuda":
            # Sums of adapters are made on this thread's stream; the worker's may be another one.
            torch.cuda.current_stream(self._begin.device).synchronize()


WeightTransferEngineFactory.register_engine(TRANSFER, SextetTransfer)
