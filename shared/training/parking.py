"""A model in training that leaves its GPU for a while, so that a rollout on the same one has the memory."""

import torch
from torch import Tensor, nn

from .device import free_memory, wait_for_copies
from .optimizer import Optimizer


class Parking:
    """Moves parameters, buffers and moments of one process to main memory, and back before anything is computed.

    The tensors stay the same objects. Their places in main memory are page-locked, and kept for the next time.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._away: list[tuple[Tensor, torch.device]] = []
        self._places: dict[int, Tensor] = {}

    def park(self) -> None:
        """Frees the GPU's memory; gradients must have been cleared."""
        moving = [tensor for tensor in self._tensors() if tensor.is_cuda]
        self._away = [(tensor, home) for tensor, home in self._away if not tensor.is_cuda]
        for tensor in moving:
            place = self._places.get(id(tensor))
            if place is None or place.shape != tensor.shape or place.dtype != tensor.dtype:
                place = self._places[id(tensor)] = torch.empty_like(tensor, device="cpu", pin_memory=True)
            place.copy_(tensor.detach(), non_blocking=True)
        wait_for_copies(moving)
        for tensor in moving:
            self._away.append((tensor, tensor.device))
            tensor.data = self._places[id(tensor)]
        free_memory()

    def fetch(self) -> None:
        """Brings back what was parked; all of it, or, where there is no room, none."""
        try:
            for tensor, home in self._away:
                tensor.data = tensor.data.to(home, non_blocking=True)
            wait_for_copies(tensor for tensor, _ in self._away)
        except BaseException:
            self.park()
            raise
        self._away.clear()

    def _tensors(self) -> list[Tensor]:
        return [*self._model.parameters(), *self._model.buffers(), *self._optimizer.state().values()]
