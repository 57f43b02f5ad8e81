"""A policy for others: as tensors for the rollouts, as a Hugging Face directory, as facts."""

import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerBase

from .errors import CheckpointError
from .files import replacing
from .group import Group
from .lora import B, is_adapter, merged
from .models import Policy, ValueModel
from .parallel import ONE, Parallel
from .sharding import device_of
from .shards import on_all


def weights_of(policy: Policy) -> dict[str, Tensor]:
    """Tensors by Hugging Face state-dict name, in the dtype of the configuration; tied names share one tensor."""
    made: dict[int, Tensor] = {}
    weights = {}
    for name, tensor in policy.lm.state_dict().items():
        if is_adapter(name):
            continue
        if tensor.is_floating_point():
            layer, _, own = name.rpartition(".")
            whole = merged(policy.lm.get_submodule(layer), own, tensor)
            weights[name] = made.setdefault(tensor.data_ptr(), whole.to(policy.dtype))
        else:
            weights[name] = tensor
    return weights


def whole_weights_of(policy: Policy, parallel: Parallel) -> dict[str, Tensor]:
    """As `weights_of`, whole and in main memory of rank 0; every rank has to take part, the others get {}."""
    if parallel.group.size == 1:
        return weights_of(policy)
    whole: dict[str, Tensor] = {}
    made: dict[int, Tensor] = {}
    for name, tensor in policy.lm.state_dict(keep_vars=True).items():
        if is_adapter(name):
            continue
        if id(tensor) not in made:
            layer, _, own = name.rpartition(".")
            full = merged(policy.lm.get_submodule(layer), own, _full(tensor.detach()), _full)
            full = full.to(policy.dtype) if full.is_floating_point() else full
            made[id(tensor)] = full.cpu() if parallel.place == 0 else torch.empty(0)
        whole[name] = made[id(tensor)]
    held = whole if parallel.place == 0 else {}
    return held if parallel.pp == 1 else _of_all_stages(held, parallel.group)


def _of_all_stages(held: dict[str, Tensor], group: Group) -> dict[str, Tensor]:
    """On rank 0, what all ranks hold; on the others {}."""
    told = group.exchange({name: [list(t.shape), str(t.dtype).removeprefix("torch.")] for name, t in held.items()})
    for rank, tensors in enumerate(told[1:], 1):
        for name, (shape, dtype) in tensors.items():
            if group.rank == 0:
                held[name] = torch.empty(shape, dtype=getattr(torch, dtype))
                dist.recv(held[name].view(-1).view(torch.uint8), rank, group=group.control)
            elif group.rank == rank:
                dist.send(held[name].contiguous().view(-1).view(torch.uint8), 0, group=group.control)
    return held if group.rank == 0 else {}


def shards_of(policy: Policy) -> dict[str, Tensor]:
    """What this rank holds of each tensor, in the dtype of the master weights: plain tensors, or DTensors that say
    which part they are. Adapters are apart, as `merge_adapters` takes them; nothing else is copied.
    """
    shards = {}
    for name, tensor in policy.lm.state_dict().items():
        layer, _, own = name.rpartition(".")
        shards[name] = tensor * policy.lm.get_submodule(layer).scale if own == B else tensor
    return shards


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def export(policy: Policy, tokenizer: PreTrainedTokenizerBase, directory: Path, parallel: Parallel = ONE) -> None:
    """Writes model, generation settings and tokenizer so that `from_pretrained` loads them; replaces `directory`.

    Raises:
        CheckpointError: it could not be written; nothing has changed.
    """
    weights = whole_weights_of(policy, parallel)

    def write() -> None:
        if parallel.group.rank == 0:
            _write(policy, weights, tokenizer, directory)

    on_all(parallel.group, write)


def _write(policy: Policy, weights: dict[str, Tensor], tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    try:
        with replacing(directory) as draft:
            policy.lm.save_pretrained(draft, state_dict=weights)
            tokenizer.save_pretrained(draft)
            # save_pretrained notes the dtype of the master weights, not that of the tensors it was given.
            config = json.loads((draft / "config.json").read_text())
            config["dtype"] = str(policy.dtype).removeprefix("torch.")
            (draft / "config.json").write_text(json.dumps(config, indent=2))
    except OSError as error:
        raise CheckpointError(f"model {str(directory)!r} could not be written: {error}") from error


def describe(model: Policy | ValueModel, parallel: Parallel) -> dict[str, str]:
    """Facts for people. All ranks together."""
    ranks = {}
    if parallel.group.size > 1:
        stages = f"{parallel.pp} stages x " if parallel.pp > 1 else ""
        context = f" x cp {parallel.cp}" if parallel.cp > 1 else ""
        ranks["ranks"] = f"{stages}{parallel.copies} copies x {parallel.shards} shards{context} x tp {parallel.tp}"
    counts = [sum(p.numel() for p in model.parameters() if p.requires_grad or not only) for only in (False, True)]
    if parallel.pp > 1:
        counts = [sum(each) for each in zip(*parallel.group.exchange(counts)[:: parallel.each], strict=True)]
    return {
        **ranks,
        **({"micro_batch_tokens": model.budget} if model.budget else {}),
        "rows": f"padded: {model.padded}" if model.padded else "packed",
        "parameters": str(counts[0]),
        "trained": str(counts[1]),
        "dtype": str(model.dtype).removeprefix("torch."),
        # Where it computes, each once, in order of ranks.
        "device": ", ".join(dict.fromkeys(parallel.group.exchange(str(device_of(model, parallel))))),
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
    }
