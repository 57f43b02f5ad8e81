"""Pipeline parallelism: passes of micro-batches through the stages of a model (see stages.py), as 1F1B.

torch.distributed.pipelining moves hidden states forward and their gradients back. Its tensors all have one shape, so
states are padded on the wire: stages compute what there is, and the padding's gradient is 0.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from shared.batch.block import Block

from .device import free_memory
from .microbatch import enough_memory, row_totals
from .parallel import PP, Parallel
from .scorer import Scorer
from .sequences import collate
from .sharding import device_of, synchronise_on

T = TypeVar("T")
Gradients = tuple[tuple[Tensor | None, ...], list[dict[str, Any]] | None]
"""What a stage's backward pass gives: those of its inputs, and nothing."""


def play(
    model: Scorer, micros: Sequence[Block], compute: Callable[[int], Tensor | None], parallel: Parallel, *, train: bool
) -> None:
    """Every stage's part in passes of some micro-batches, of which all ranks of a pipeline have the same.

    Args:
        compute: on the last stage, called with each micro-batch's place; calls the model. To train, its loss.

    Raises:
        MemoryError: on all ranks, if a pass did not fit on one; only there if it can't keep step (see `_Memory`).
    """
    device = device_of(model, parallel)
    tokens = [_tokens(model, micro, parallel) for micro in micros]
    width: int = model.backbone().config.hidden_size
    states = torch.empty(max(tokens), width, dtype=model.dtype, device="meta", requires_grad=train)
    end = torch.empty(1, device="meta", requires_grad=train)
    output = end if parallel.is_last else states
    memory = _Memory(model, parallel)

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

    def forward(place: int, *arriving: Tensor) -> Tensor:
        made = memory.attempt(micros[place], lambda: run(place, *arriving))
        return torch.zeros_like(output, device=device, requires_grad=train) if made is None else made

    stage = _Stage(
        _Forward(forward), parallel.stage, parallel.pp, device,
        # Shapes that are not given would be sent, pickled.
        input_args=(states,) if parallel.stage else (), output_args=(output,), group=parallel.mesh[PP].get_group(),
    )  # fmt: skip
    stage.attempt = partial(memory.attempt, micros[0])
    # 1F1B needs a pass for every stage; with fewer, all forward passes come before the first backward pass anyway.
    kind = Schedule1F1B if train and len(micros) >= parallel.pp else ScheduleGPipe
    schedule = kind(stage, len(micros), loss_fn=(lambda loss, _: loss.sum()) if train else None, scale_grads=False)
    places = torch.arange(len(micros))
    with _in_own_words():
        schedule.step(place=places, target=places if train else None, return_outputs=False)
    memory.agree()


@contextlib.contextmanager
def _in_own_words() -> Iterator[None]:
    """What goes wrong in a pass comes in the schedule's words: raises what it was."""
    try:
        yield
    except RuntimeError as error:
        raise error.__cause__ or error from None


class _Memory:
    """Whether this rank's memory has sufficed so far.

    Other stages wait for what this one sends. If it is one rank, it goes on with zeros when a pass does not fit,
    computes nothing more, and says so when all are done. In a larger stage, other ranks are in the middle of a pass
    with this one, and nothing but their end takes them out of it: there, the error goes on.
    """

    def __init__(self, model: Scorer, parallel: Parallel) -> None:
        self._model, self._parallel, self._said = model, parallel, ""
        # FSDP keeps gradients that are not yet summed where nobody can clear them; older ones can't leave a pass.
        whole = parallel.config.accumulate == "whole"
        self._goes_on = parallel.each == 1 and not whole and hasattr(FSDPModule, "reset_iter_state")

    def attempt(self, micro: Block, work: Callable[[], T]) -> T | None:
        """What a pass results in; None if it did not fit, or an earlier one."""
        if self._said:
            return None
        try:
            with enough_memory(micro):
                return work()
        except MemoryError as error:
            if not self._goes_on:
                raise
            self._said = str(error)
        # Only now the error's frames are gone, and the tensors that they refer to.
        self._leave_pass()
        return None

    def _leave_pass(self) -> None:
        """Lets go of what is half done."""
        for p in self._model.parameters():
            p.grad = None
        if isinstance(self._model, FSDPModule):
            self._model.reset_iter_state()
        free_memory()

    def agree(self) -> None:
        """Raises MemoryError on all ranks if it did not suffice on one."""
        for rank, said in enumerate(self._parallel.group.exchange(self._said)):
            if said:
                raise MemoryError(f"{said} (rank {rank})")


class _Stage(PipelineStage):
    """Where memory does not suffice for a backward pass, zeros are what goes back."""

    attempt: Callable[[Callable[[], Gradients]], Gradients | None]

    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Gradients:
        def work() -> Gradients:
            with _in_own_words():
                return super(_Stage, self).backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)

        if (made := self.attempt(work)) is not None:
            return made
        values = bwd_kwargs["input_values"]
        return tuple(torch.zeros_like(value) if value.requires_grad else None for value in values), None


class _Forward(nn.Module):
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
