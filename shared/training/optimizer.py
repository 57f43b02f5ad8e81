"""AdamW with warm-up, decay and gradient clipping, counted in optimizer steps."""

import math
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shared.config import OptimizerConfig

from .errors import DamagedError, HalfStepError, NonFiniteError
from .parallel import ONE, Parallel
from .regions import as_part_of, local

MOMENTS = ("exp_avg", "exp_avg_sq", "step")
"""What torch's AdamW keeps for each parameter."""


class Optimizer:
    """Steps a model's parameters; `steps` counts the optimizer steps taken so far."""

    def __init__(self, model: nn.Module, config: OptimizerConfig, parallel: Parallel = ONE) -> None:
        self.config, self.steps, self._parallel = config, 0, parallel
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        by_kind: dict[tuple[bool, DeviceMesh | None], list[nn.Parameter]] = {}
        for p in self._parameters.values():
            # One call can't step tensors on different meshes.
            by_kind.setdefault((p.ndim >= 2, p.device_mesh if isinstance(p, DTensor) else None), []).append(p)
        # Biases and norm weights are not decayed: pulling them to 0 regularises nothing.
        groups = [
            {"params": params, "weight_decay": config.weight_decay if matrix else 0.0}
            for (matrix, _), params in by_kind.items()
        ]
        # On a GPU the default would need a copy of all parameters for a moment.
        self._fused = all(p.is_cuda for p in self._parameters.values())
        self._adamw = torch.optim.AdamW(
            groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=self._fused or None
        )

    def step(self) -> tuple[float, float]:
        """Clips the summed gradients, takes one step and clears them.

        Returns:
            The gradient's global norm before clipping, and the learning rate used.

        Raises:
            NonFiniteError: a gradient is NaN or infinite; parameters and state are unchanged.
            HalfStepError: the step itself failed (memory, device); parameters and state can be anything.
        """
        gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
        norm = over_stages(total_norm(gradients), self._parallel)
        if not torch.isfinite(norm):
            culprit = self._first_non_finite()
            self.clear()
            raise NonFiniteError(f"the gradient of {culprit} is not finite at optimizer step {self.steps + 1}")
        if self.config.clip_grad:
            _clip(gradients, self.config.clip_grad, norm)
        lr = learning_rate(self.steps, self.config)
        for group in self._adamw.param_groups:
            group["lr"] = lr
        try:
            self._adamw.step()
            self._begin_others()
        except Exception as error:
            raise HalfStepError(f"optimizer step {self.steps + 1} failed half-way: {error}") from error
        self.clear()
        self.steps += 1
        return float(norm), lr

    def _begin_others(self) -> None:
        """Gives parameters that had no gradient yet (experts that no token chose) the state AdamW begins with.

        So all of them have some after a step, and what a checkpoint lacks is missing.
        """
        for p in self._parameters.values():
            if p not in self._adamw.state:
                device = p.device if self._fused else torch.device("cpu")
                self._adamw.state[p] = {
                    "step": torch.zeros((), dtype=torch.float32, device=device),
                    "exp_avg": torch.zeros_like(p.detach(), memory_format=torch.preserve_format),
                    "exp_avg_sq": torch.zeros_like(p.detach(), memory_format=torch.preserve_format),
                }

    def clear(self) -> None:
        """Drops the gradients."""
        self._adamw.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """The moments as `moment/parameter name`: live tensors, of sharded parameters this rank's part."""
        kept = self._adamw.state
        return {
            f"{moment}/{name}": local(kept[p][moment])
            for name, p in self._parameters.items()
            if p in kept
            for moment in MOMENTS
        }

    def load_state(self, tensors: Mapping[str, Tensor], steps: int) -> None:
        """Takes over moments as `state` gives them (copied; into those that are there, where they fit).

        Raises:
            DamagedError: they are of another model, or missing.
        """
        self.check_names(tensors, steps)
        for key, tensor in tensors.items():
            moment, _, name = key.partition("/")
            if moment != "step" and tensor.shape != local(self._parameters[name]).shape:
                raise DamagedError(f"optimizer state {key!r} {list(tensor.shape)} does not belong to this model")
        found: dict[str, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            moment, _, name = key.partition("/")
            found.setdefault(name, {})[moment] = self._taken_over(self._parameters[name], moment, tensor.detach())
        self._adamw.state.clear()
        for name, moments in found.items():
            self._adamw.state[self._parameters[name]] = moments
        self.steps = steps

    def _taken_over(self, parameter: nn.Parameter, moment: str, tensor: Tensor) -> Tensor:
        """A moment's tensor with this content: no second one is made, for which there may be no room."""
        held = self._adamw.state.get(parameter, {}).get(moment)
        if held is not None and local(held).shape == tensor.shape and held.dtype == tensor.dtype:
            local(held).copy_(tensor)
            return held
        # AdamW keeps its step counts on the CPU, unless it is fused.
        device = torch.device("cpu") if moment == "step" and not self._fused else parameter.device
        copied = tensor.to(device, copy=True)
        return copied if moment == "step" else as_part_of(parameter, copied)

    def check_names(self, keys: Collection[str], steps: int) -> None:
        """Raises DamagedError when moments that are called so are of another model, or missing."""
        if steps and not keys:
            raise DamagedError(f"there is no optimizer state although {steps} optimizer steps were taken")
        for key in keys:
            moment, _, name = key.partition("/")
            if moment not in MOMENTS or name not in self._parameters:
                raise DamagedError(f"optimizer state {key!r} does not belong to this model")
        there = set(keys)
        for name in self._parameters:
            held = [moment for moment in MOMENTS if f"{moment}/{name}" in there]
            if steps and not held:
                raise DamagedError(
                    f"optimizer state of {name!r} is missing although {steps} optimizer steps were taken"
                )
            if 0 < len(held) < len(MOMENTS):
                raise DamagedError(f"optimizer state of {name!r} is incomplete: only {', '.join(sorted(held))}")

    def _first_non_finite(self) -> str:
        """The first parameter, in the model's order, whose gradient is not finite on any rank. All ranks together."""
        numbered = enumerate(self._parameters.items())
        bad = ((place, name) for place, (name, p) in numbered if p.grad is not None and not _is_finite(p.grad))
        told = self._parallel.group.exchange(next(bad, None))
        found = [(rank // self._parallel.each, *said) for rank, said in enumerate(told) if said]
        return repr(min(found)[2]) if found else "all parameters together"


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The norm of all gradients as one vector, on every rank; tensors on different meshes are put together."""
    by_mesh: dict[DeviceMesh | None, list[Tensor]] = {}
    for gradient in gradients:
        by_mesh.setdefault(gradient.device_mesh if isinstance(gradient, DTensor) else None, []).append(gradient)
    norms = [nn.utils.get_total_norm(group) for group in by_mesh.values()]
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    return whole[0] if len(whole) == 1 else torch.linalg.vector_norm(torch.stack(whole))


def over_stages(norm: Tensor, parallel: Parallel) -> Tensor:
    """The norm of the gradients of all stages, from that of this rank's."""
    if parallel.pp == 1:
        return norm
    norms = parallel.group.exchange(float(norm))[:: parallel.each]
    return torch.tensor(norms, dtype=torch.float64, device=norm.device).norm().to(norm.dtype)


def _is_finite(gradient: Tensor) -> bool:
    return bool(torch.isfinite(local(gradient)).all())


def _clip(gradients: Sequence[Tensor], limit: float, norm: Tensor) -> None:
    """Scales all gradients so that their norm is at most `limit`: torch's clip_grads_with_norm_ on each rank's part."""
    holders = [nn.Parameter(local(gradient), requires_grad=False) for gradient in gradients]
    for holder, gradient in zip(holders, gradients, strict=True):
        holder.grad = local(gradient)
    nn.utils.clip_grads_with_norm_(holders, limit, norm)


def learning_rate(steps: int, config: OptimizerConfig) -> float:
    """The rate of the step after `steps` optimizer steps.

    Warm-up rises linearly and is never 0 (the first step uses lr / warmup_steps); decay runs from the end of the
    warm-up to `min_lr_ratio` at `total_steps` and stays there.
    """
    if steps < config.warmup_steps:
        return config.lr * (steps + 1) / config.warmup_steps
    if config.schedule == "constant" or config.total_steps is None:
        return config.lr
    done = min(1.0, (steps - config.warmup_steps) / max(1, config.total_steps - config.warmup_steps))
    left = 1 - done if config.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * left)
