"""Low-rank adapters (LoRA, Hu et al. 2021): a linear layer computes W x + alpha / rank * B A x, and only A and B learn.

B starts at zero, so that an untrained policy equals its reference. Outside of training nobody sees adapters: exported
weights are W + alpha / rank * B A under the layer's own name, and who receives published ones adds them up.
"""

import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from shared.config import LoraConfig
from shared.seeds import derive_seed

from .errors import ModelError

A, B = "lora_A", "lora_B"


class LoraLinear(nn.Linear):
    """A linear layer with an adapter; `weight` keeps its name, so that files of the model fit."""

    lora_A: nn.Parameter
    """[rank, in_features]"""
    lora_B: nn.Parameter
    """[out_features, rank]"""
    scale: float

    def forward(self, input: Tensor) -> Tensor:
        plain = F.linear(input, self.weight, self.bias)
        return plain + F.linear(F.linear(input, self.lora_A), self.lora_B) * self.scale


def add_lora(lm: PreTrainedModel, config: LoraConfig) -> None:
    """Gives the named layers adapters and freezes everything else; values come from `initial_value`.

    Raises:
        ModelError: a name that no linear layer of the model's body has; the ones there are named.
    """
    layers = {name: module for name, module in lm.base_model.named_modules() if type(module) is nn.Linear}
    names = {name.rpartition(".")[2] for name in layers}
    if unknown := sorted(set(config.targets) - names):
        raise ModelError(
            f"lora.targets: no linear layer is called {unknown[0]!r}; there are {', '.join(sorted(names))}"
        )
    lm.requires_grad_(False)
    for name, layer in layers.items():
        if name.rpartition(".")[2] in config.targets:
            _adapt(layer, config)


def _adapt(layer: nn.Linear, config: LoraConfig) -> None:
    """Makes a layer one with an adapter, in place: whoever holds it keeps it."""
    layer.__class__ = LoraLinear
    assert isinstance(layer, LoraLinear)
    layer.scale = config.alpha / config.rank
    like = layer.weight
    layer.lora_A = nn.Parameter(torch.zeros(config.rank, layer.in_features, device=like.device, dtype=like.dtype))
    layer.lora_B = nn.Parameter(torch.zeros(layer.out_features, config.rank, device=like.device, dtype=like.dtype))


def is_adapter(name: str) -> bool:
    """Whether a parameter is part of an adapter."""
    return name.rpartition(".")[2] in (A, B)


def initial_value(name: str, shape: torch.Size, seed: int) -> Tensor:
    """What an adapter's parameter starts with, from the run's seed and its name: B zero, A uniform as in nn.Linear."""
    if name.endswith(B):
        return torch.zeros(shape)
    # torch's generators take 64 bits; the same on any device, as it is made on the CPU.
    generator = torch.Generator().manual_seed(derive_seed(seed, 0, name, 0, "lora"))
    return (2 * torch.rand(shape, generator=generator) - 1) / math.sqrt(shape[1])


def merged(
    layer: nn.Module, name: str, weight: Tensor, whole: Callable[[Tensor], Tensor] = lambda tensor: tensor
) -> Tensor:
    """`weight` with the adapter of its layer added, if it has one.

    Args:
        name: the parameter's own, of the layer.
        whole: makes tensors that are cut over ranks whole.
    """
    if not isinstance(layer, LoraLinear) or name != "weight":
        return weight
    return weight + (layer.scale * whole(layer.lora_B.detach())) @ whole(layer.lora_A.detach())


def merge_adapters(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by state-dict name, adapters added to the weights of their layers, as in `merged`.

    Args:
        tensors: lora_B times its scale. Adapters may have another dtype, in which the sum is made then.

    Raises:
        ModelError: an adapter without its other factor or its weight, or of other sizes.
    """
    whole = {name: tensor for name, tensor in tensors.items() if not is_adapter(name)}
    for name, scaled_B in tensors.items():
        layer, _, own = name.rpartition(".")
        if own == B:
            weight, factor_A = whole.get(f"{layer}.weight"), tensors.get(f"{layer}.{A}")
            if weight is None or factor_A is None or not _fit(weight, scaled_B, factor_A):
                raise ModelError(f"adapter {name!r} fits no weight of the model")
            whole[f"{layer}.weight"] = (weight.to(scaled_B) + scaled_B @ factor_A).to(weight.dtype)
    return whole


def _fit(weight: Tensor, scaled_B: Tensor, factor_A: Tensor) -> bool:
    rank = len(factor_A)
    return (tuple(scaled_B.shape), tuple(factor_A.shape)) == ((len(weight), rank), (rank, weight.shape[-1]))
