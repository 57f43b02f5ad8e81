"""An advantage estimator and a policy loss of your own: name them in the run's configuration.

flow: grpo
algorithm:
  advantage: examples/custom_algorithm.py:median_centred
  policy_loss: examples/custom_algorithm.py:squared_ratio
  options: {limit: 2.0}
actor: {loss: {options: {beta: 0.1}}}
"""

import torch

from shared.algo import (
    AdvantageInputs,
    AdvantageOptions,
    Advantages,
    PolicyLossInputs,
    PolicyLossOptions,
    log_ratio,
    register_advantage,
    register_policy_loss,
)
from shared.algo.advantages import finish, spread
from shared.algo.policy_losses import LossMap, finish_loss


@register_advantage("median_centred", grouped=True, limit=3.0)
def median_centred(inputs: AdvantageInputs, options: AdvantageOptions) -> Advantages:
    """Each answer's score minus the median of its prompt's answers, cut at +-limit."""
    advantages_B = torch.zeros_like(inputs.scores_B)
    for group in inputs.groups_B.unique():
        part_B = inputs.taking_part_B & (inputs.groups_B == group)
        if part_B.any():
            # An agent's conversation may be several rows, which count as one answer.
            advantages_B[part_B] = inputs.scores_B[part_B] - inputs.scores_B[part_B & inputs.counted_B].median()
    limit = options.extra["limit"]
    return finish(spread(advantages_B.clamp(-limit, limit), inputs), inputs)


@register_policy_loss("squared_ratio", beta=0.1)
def squared_ratio(inputs: PolicyLossInputs, options: PolicyLossOptions) -> LossMap:
    """-A r + beta (log r)^2: a quadratic penalty in place of a clip."""
    log_ratio_BT = log_ratio(inputs.logprobs_BT, inputs.old_logprobs_BT, inputs.mask_BT)
    loss_BT = -inputs.advantages_BT * log_ratio_BT.exp() + options.extra["beta"] * log_ratio_BT.square()
    return finish_loss(loss_BT, log_ratio_BT, inputs)
