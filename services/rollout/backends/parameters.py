"""Puts a version's tensors into a Hugging Face model, keeping what is tied tied."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from services.rollout.backend import EngineError

Staged = dict[str, Tensor]


def stage(model: nn.Module, tensors: Mapping[str, Tensor]) -> Staged:
    """The new tensors by the model's own names, on its device and in its dtypes; the model is not changed.

    A tied tensor may come under any or all of its names. A float32 tensor for a float32 model on the CPU is not copied.

    Raises:
        EngineError: a tensor is missing, unknown, of another shape, or differs between names that are tied here.
    """
    targets = model.state_dict(keep_vars=True)
    pairs = [(names[0], tensor) for names, tensor in matched(model, tensors)]
    return {name: tensor.to(device=targets[name].device, dtype=targets[name].dtype) for name, tensor in pairs}


def matched(model: nn.Module, tensors: Mapping[str, Tensor]) -> list[tuple[list[str], Tensor]]:
    """Each tensor of the model: the names it has (several where tied), and its new value. Raises as `stage`."""
    targets = model.state_dict(keep_vars=True)
    unknown = sorted(set(tensors) - set(targets))
    if unknown:
        raise EngineError(f"the model has no tensor {unknown[0]!r} ({len(unknown)} such); is it another architecture?")
    pairs = []
    for names in _tied(targets):
        given = [name for name in names if name in tensors]
        if not given:
            raise EngineError(f"the weights lack {names[0]!r}")
        target, source = targets[names[0]], tensors[given[0]]
        if source.shape != target.shape:
            raise EngineError(f"{given[0]!r} is {tuple(source.shape)}, the model has {tuple(target.shape)}")
        if any(not torch.equal(source, tensors[other]) for other in given[1:]):
            raise EngineError(f"{' and '.join(given)} are tied in this model, but came with different values")
        pairs.append((names, source))
    return pairs


@torch.no_grad()
def swap(model: nn.Module, staged: Staged) -> None:
    """Makes the staged tensors the model's; nothing is copied."""
    targets = model.state_dict(keep_vars=True)
    for name, tensor in staged.items():
        # The parameter object stays, so every module that shares it sees the new values.
        targets[name].data = tensor


def _tied(targets: Mapping[str, Tensor]) -> list[list[str]]:
    groups: dict[int, list[str]] = {}
    for name, tensor in targets.items():
        groups.setdefault(id(tensor), []).append(name)
    return list(groups.values())
