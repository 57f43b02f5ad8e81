"""Losses without a trust region: for on-policy updates, and for tools that drive training themselves."""

from .masking import blank, log_ratio
from .policy_losses import LossMap, PolicyLossInputs, PolicyLossOptions, finish_loss, register_policy_loss


@register_policy_loss("reinforce")
def reinforce(inputs: PolicyLossInputs, options: PolicyLossOptions) -> LossMap:
    """-A log p (Williams 1992). Off-policy it needs rollout weights."""
    mask_BT = inputs.mask_BT
    loss_BT = -blank(inputs.advantages_BT, mask_BT) * blank(inputs.logprobs_BT, mask_BT)
    return finish_loss(loss_BT, log_ratio(inputs.logprobs_BT, inputs.old_logprobs_BT, mask_BT), inputs)


@register_policy_loss("gpg")
def gpg(inputs: PolicyLossInputs, options: PolicyLossOptions) -> LossMap:
    """-A log p with GPG's advantages (arXiv:2504.02546)."""
    return reinforce(inputs, options)


@register_policy_loss("importance_sampling")
def importance_sampling(inputs: PolicyLossInputs, options: PolicyLossOptions) -> LossMap:
    """-A r, unclipped (Tinker's importance_sampling, which sums: aggregate with token-sum)."""
    log_ratio_BT = log_ratio(inputs.logprobs_BT, inputs.old_logprobs_BT, inputs.mask_BT)
    return finish_loss(-blank(inputs.advantages_BT, inputs.mask_BT) * log_ratio_BT.exp(), log_ratio_BT, inputs)


@register_policy_loss("cross_entropy")
def cross_entropy(inputs: PolicyLossInputs, options: PolicyLossOptions) -> LossMap:
    """-log p; advantages are not read, a weight per token goes into `rollout_weights_BT` (supervised training)."""
    log_ratio_BT = log_ratio(inputs.logprobs_BT, inputs.old_logprobs_BT, inputs.mask_BT)
    return finish_loss(-blank(inputs.logprobs_BT, inputs.mask_BT), log_ratio_BT, inputs)


@register_policy_loss("dro", beta=0.05)
def dro(inputs: PolicyLossInputs, options: PolicyLossOptions) -> LossMap:
    """-A log p + beta / 2 (log r)^2: off-policy with a quadratic pull to the old policy (DRO, arXiv:2405.19107).

    Per token, as Tinker's dro; the paper writes it for whole sequences.
    """
    mask_BT = inputs.mask_BT
    log_ratio_BT = log_ratio(inputs.logprobs_BT, inputs.old_logprobs_BT, mask_BT)
    gain_BT = blank(inputs.advantages_BT, mask_BT) * blank(inputs.logprobs_BT, mask_BT)
    return finish_loss(options.extra["beta"] / 2 * log_ratio_BT.square() - gain_BT, log_ratio_BT, inputs)
