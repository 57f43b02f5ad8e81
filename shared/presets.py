"""Named algorithms: `algorithm: dapo` fills in what its paper sets, wherever the user has not set it. Torch-free."""

import difflib
from collections.abc import Mapping
from typing import Any

_KL_LOSS = {"algorithm.kl.placement": "loss", "algorithm.kl.estimator": "k3"}
_KL_REWARD = {"algorithm.kl.placement": "reward", "algorithm.kl.estimator": "k1"}

PRESETS: dict[str, dict[str, Any]] = {
    "ppo": {"flow": "ppo", "algorithm.advantage": "gae", "algorithm.policy_loss": "ppo"},
    # DeepSeekMath, arXiv 2402.03300: KL coefficient 0.04, sequence means.
    "grpo": {
        "flow": "grpo",
        "algorithm.advantage": "grpo",
        "actor.loss.aggregation": "seq-mean-token-mean",
        **_KL_LOSS,
        "algorithm.kl.coef": 0.04,
    },
    # arXiv 2503.20783: neither the group's deviation nor the answer's length divides.
    "dr_grpo": {
        "flow": "grpo",
        "algorithm.advantage": "dr_grpo",
        "actor.loss.aggregation": "seq-mean-token-sum-norm",
    },
    # arXiv 2402.14740: KL in the reward.
    "rloo": {"flow": "grpo", "algorithm.advantage": "rloo", **_KL_REWARD},
    # arXiv 2501.03262.
    "reinforce_plus_plus": {"flow": "grpo", "algorithm.advantage": "reinforce_plus_plus", **_KL_REWARD},
    "reinforce_plus_plus_baseline": {
        "flow": "grpo",
        "algorithm.advantage": "reinforce_plus_plus_baseline",
        "algorithm.kl.placement": "loss",
        "algorithm.kl.estimator": "k2",
    },
    # arXiv 2310.10505: the greedy answer is the baseline.
    "remax": {"flow": "remax", "algorithm.advantage": "remax", **_KL_REWARD},
    # arXiv 2503.14476: clip-higher, token mean, dynamic sampling, no KL. Its soft overlong penalty depends on the
    # answers' length: set algorithm.overlong_buffer (the paper: a fifth of rollout.max_tokens).
    "dapo": {
        "flow": "dapo",
        "algorithm.advantage": "grpo",
        "actor.loss.clip_ratio_low": 0.2,
        "actor.loss.clip_ratio_high": 0.28,
        "actor.loss.aggregation": "token-mean",
        "algorithm.kl.placement": "none",
    },
    # arXiv 2507.18071: one ratio a sequence, clipped in ten-thousandths.
    "gspo": {
        "flow": "grpo",
        "algorithm.advantage": "grpo",
        "algorithm.policy_loss": "gspo",
        "actor.loss.clip_ratio_low": 3e-4,
        "actor.loss.clip_ratio_high": 4e-4,
        "actor.loss.aggregation": "seq-mean-token-mean",
    },
    # arXiv 2506.13585; clipped from above only, as in TRL and ScaleRL.
    "cispo": {
        "flow": "grpo",
        "algorithm.advantage": "grpo",
        "algorithm.policy_loss": "cispo",
        "actor.loss.clip_ratio_low": 1.0,
        "actor.loss.clip_ratio_high": 4.0,
        "actor.loss.aggregation": "token-mean",
    },
    # arXiv 2505.23585: the baseline is weighted by length.
    "opo": {"flow": "grpo", "algorithm.advantage": "opo", "algorithm.kl.placement": "none"},
}


def preset_of(tree: Mapping[str, Any]) -> str | None:
    """The preset that a configuration tree names: `algorithm: dapo` or `algorithm: {preset: dapo, ...}`."""
    algorithm = tree.get("algorithm")
    named = algorithm.get("preset") if isinstance(algorithm, Mapping) else algorithm
    # What is neither is refused with the rest, by name.
    return named if isinstance(named, str) else None


def preset_settings(name: str) -> dict[str, Any]:
    """Dotted keys and values of a preset.

    Raises:
        ValueError: there is none of that name; names the nearest.
    """
    if name in PRESETS:
        return dict(PRESETS[name])
    near = difflib.get_close_matches(name, PRESETS, 1)
    hint = f"did you mean {near[0]!r}?" if near else f"known presets: {', '.join(PRESETS)}"
    raise ValueError(f"algorithm: unknown preset {name!r}; {hint}")


def describe_preset(name: str, tree: Mapping[str, Any]) -> str:
    """One line for people: what became of the keys that a preset sets, in a whole configuration's tree."""
    return f"algorithm: {name} with " + ", ".join(f"{key}={_value(tree, key)}" for key in preset_settings(name))


def _value(tree: Mapping[str, Any], key: str) -> Any:
    for name in key.split("."):
        tree = tree[name]
    return tree
