"""A language model cut into stages of consecutive layers, for pipeline parallelism: each rank keeps one of them."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .errors import ModelError
from .models import is_tied
from .parallel import Parallel

EMBEDDING, LAYERS, NORM = "embed_tokens", "layers", "norm"
"""What a body is made of, by the names in transformers' plans for pipelines."""


class Elsewhere(nn.Module):
    """In place of what another stage computes: hands on what it is given."""

    def forward(self, hidden_states: Tensor, *_: object, **__: object) -> Tensor:
        return hidden_states


def cut(lm: PreTrainedModel, parallel: Parallel, key: str, *, tied: bool) -> None:
    """Leaves of a language model what this rank's stage computes; names stay as they are.

    Layers are consecutive and as many on each stage, or one more on the first ones. The last stage has the head.

    Args:
        tied: whether it matters that head and embedding may be one tensor.

    Raises:
        ModelError: it can't be cut, or not into so many stages.
    """
    body, setting = lm.base_model, f"parallel.pp={parallel.pp}"
    kind, plan = lm.config.model_type, lm.config.base_model_pp_plan or {}
    if set(plan) != {EMBEDDING, LAYERS, NORM}:
        raise ModelError(f"{key}: {kind} models have no plan for {setting}: set parallel.pp to 1")
    layers: Any = getattr(body, LAYERS)
    if parallel.pp > len(layers):
        raise ModelError(f"{key}: {setting} stages for {len(layers)} layers: set it to {len(layers)} at most")
    if tied and is_tied(lm):
        raise ModelError(
            f"{key}: this {kind} model's embedding is its head (tie_word_embeddings), but with {setting} they are on "
            "different stages: set parallel.pp to 1, and parallel.tp or parallel.dp higher"
        )
    _refuse_more(body, f"{key}: {kind} models do more between their layers than {setting} knows: set it to 1")
    first, end = (-(-len(layers) * stage // parallel.pp) for stage in (parallel.stage, parallel.stage + 1))
    for number in range(len(layers)):
        if not first <= number < end:
            layers[number] = Elsewhere()
    if parallel.stage:
        setattr(body, EMBEDDING, Elsewhere())
    if not parallel.is_last:
        setattr(body, NORM, Elsewhere())
        lm.set_output_embeddings(Elsewhere())


def _refuse_more(body: nn.Module, why: str) -> None:
    """Refuses a body that changes states outside of embedding, layers and norm: each stage would do it again."""
    layers: Any = getattr(body, LAYERS)
    parts = {LAYERS: layers, NORM: getattr(body, NORM)}
    given_1SD = torch.linspace(-1, 1, 4 * body.config.hidden_size).view(1, 4, -1)  # pyright: ignore
    setattr(body, LAYERS, nn.ModuleList(Elsewhere() for _ in layers))
    setattr(body, NORM, Elsewhere())
    try:
        with torch.no_grad():
            made_1SD = body(inputs_embeds=given_1SD, use_cache=False).last_hidden_state
    finally:
        for name, part in parts.items():
            setattr(body, name, part)
    if not torch.equal(made_1SD, given_1SD):
        raise ModelError(why)
