"""Pipeline parallelism: passes of micro-batches through the stages of a model (see stages.py), as 1F1B.

torch.distributed.pipelining moves hidden states forward and their gradients back. Its tensors all have one shape, so
states are padded on the wire: stages compute what there is, and the padding's gradient is 0.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from shared.batch.block import Block

from .microbatch import row_totals
from .parallel import PP, Parallel
from .scorer import Scorer
from .sequences import collate
from .sharding import device_of, synchronise_on


def play(
    model: Scorer, micros: Sequence[Block], compute: Callable[[int], Tensor | None], parallel: Parallel, *, train: bool
) -> None:
    """Every stage's part in passes of some micro-batches, of which all ranks of a pipeline have the same.

    Args:
        compute: on the last stage, called with each micro-batch's place; calls the model. To train, its loss.
    """
    device = device_of(model, parallel)
    tokens = [_tokens(model, micro, parallel) for micro in micros]

    def run(place: int, arriving_ND: Tensor | None = None) -> Tensor:
        model.arriving_ND = None if arriving_ND is None else arriving_ND[: tokens[place]]
        try:
            if parallel.is_last:
                loss = compute(place)
                # Nobody looks at it where nothing is trained.
                made = torch.zeros(1, device=device) if loss is None else loss.float().reshape(1)
            else:
                made = model.hand_on(collate(micros[place], device), max(tokens))
        finally:
            model.arriving_ND = None
        if made.requires_grad:
            # Passes overlap: what holds for one's backward pass can't be said before it begins.
            made.register_hook(lambda _: synchronise_on(model, place == len(micros) - 1, parallel))
        return made

    width: int = model.backbone().config.hidden_size
    states = torch.empty(max(tokens), width, dtype=model.dtype, device="meta", requires_grad=train)
    end = torch.empty(1, device="meta", requires_grad=train)
    stage = PipelineStage(
        _Stage(run), parallel.stage, parallel.pp, device,
        # Shapes that are not given would be sent, pickled.
        input_args=(states,) if parallel.stage else (), output_args=(end,) if parallel.is_last else (states,),
        group=parallel.mesh[PP].get_group(),
    )  # fmt: skip
    # 1F1B needs a pass for every stage; with fewer, all forward passes come before the first backward pass anyway.
    kind = Schedule1F1B if train and len(micros) >= parallel.pp else ScheduleGPipe
    schedule = kind(stage, len(micros), loss_fn=(lambda loss, _: loss.sum()) if train else None, scale_grads=False)
    places = torch.arange(len(micros))
    try:
        schedule.step(place=places, target=places if train else None, return_outputs=False)
    except RuntimeError as error:
        # What goes wrong in a pass comes in the schedule's words.
        raise error.__cause__ or error from None


class _Stage(nn.Module):
    """What a schedule calls. The model is none of its modules: FSDP is told here, and not there, when to do what."""

    def __init__(self, run: Callable[..., Tensor]) -> None:
        super().__init__()
        self._run = run

    def forward(self, *arriving: Tensor, place: Tensor) -> Tensor:
        return self._run(int(place), *arriving)


def _tokens(model: Scorer, micro: Block, parallel: Parallel) -> int:
    """Tokens whose states this rank computes in a pass, padding included."""
    lengths = list(row_totals(micro).values())
    return len(lengths) * max(lengths) if model.padded else -(-sum(lengths) // parallel.cp)
