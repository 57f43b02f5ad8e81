"""Derived randomness (law 7): every draw is named, so that a run gives the same samples however it is laid out."""

import hashlib
import json


def derive_seed(run_seed: int, step: int, uid: str, sample: int, purpose: str) -> int:
    """The seed of one draw: the first 63 bits of SHA-256 over the arguments as a JSON list.

    Args:
        run_seed: `RunConfig.seed`.
        step: flow step (or epoch, for a shuffle).
        uid: the prompt's uid; empty when the draw belongs to no prompt.
        sample: the sample's index within its prompt.
        purpose: what is drawn: "sample", "shuffle", "init", ...

    Returns:
        0 <= seed < 2**63, the same on every machine and version.
    """
    text = json.dumps([run_seed, step, uid, sample, purpose])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> 1
