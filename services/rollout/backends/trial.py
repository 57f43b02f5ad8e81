"""A trial of a freshly loaded model in the slots: is its cache what we take it for, and is it batch-invariant here?"""

import structlog
import torch
from torch import Tensor

from services.rollout.backend import EngineError
from services.rollout.backends.decoder import Decoder

log = structlog.get_logger()

_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Of the largest logit. Another attention than we compute is off by about 1."""


@torch.inference_mode()
def try_out(decoder: Decoder, dtype: torch.dtype) -> bool:
    """Decodes a token in every slot, among equal and among other neighbours.

    Returns:
        The logits were bit-equal in every slot and whatever the neighbours, and the dtype is float32.

    Raises:
        EngineError: decoding does not give what the whole sequence gives at once.
    """
    vocabulary, slots = decoder.vocabulary, decoder.slots
    ids = [(7 * k + 1) % vocabulary for k in range(6)]
    wanted_V = decoder.probe(ids)[0]
    alike_BV = decoder.trial([ids] * slots)
    off = float((alike_BV[0] - wanted_V).abs().max() / wanted_V.abs().max())
    if not off < _TOLERANCE[dtype]:
        raise EngineError(
            f"the hf engine cannot decode this model: token by token its logits are {off:.2g} off the whole "
            "sequence's, so it keeps more than keys and values; use rollout.engine=vllm"
        )
    invariant = all(_alone(decoder, ids, slot, alike_BV[0]) for slot in {0, slots // 2, slots - 1})
    decoder.forget()
    if dtype is torch.float32 and not (invariant and bool((alike_BV == alike_BV[0]).all())):
        log.warning("this machine's kernels are not batch-invariant: samples depend on what shares their batch")
        return False
    return dtype is torch.float32


def _alone(decoder: Decoder, ids: list[int], slot: int, wanted_V: Tensor) -> bool:
    """The same row among neighbours of other lengths and tokens."""
    rows = [[(3 * k + 5 * i + 2) % decoder.vocabulary for k in range(2 + i % 3)] for i in range(decoder.slots)]
    rows[slot] = ids
    return torch.equal(decoder.trial(rows)[slot], wanted_V)
