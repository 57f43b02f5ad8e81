"""Every estimator and every loss, several updates per batch, learns a two-token task from 1 in 36 to almost always."""

import pytest
import torch
from torch import Tensor

from shared.algo import (
    ADVANTAGES,
    POLICY_LOSSES,
    AdvantageInputs,
    AdvantageOptions,
    PolicyLossInputs,
    PolicyLossOptions,
    Totals,
    aggregate,
    policy_loss,
    select_tokens,
    token_rewards,
    uniform_noise,
)

TARGET = torch.tensor([4, 1])
PROMPTS, N = 8, 8
LIMITS = {
    "gspo": {"clip_ratio_low": 0.1, "clip_ratio_high": 0.1},
    "geo_mean": {"clip_ratio_low": 0.4, "clip_ratio_high": 0.4},
    "dppo_kl": {"clip_ratio_low": 0.05, "clip_ratio_high": 0.05},
}


def sample(logits_TV: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    ids_BT = torch.multinomial(logits_TV.softmax(-1), PROMPTS * N, replacement=True, generator=generator).T
    return ids_BT, logprobs(logits_TV, ids_BT).detach()


def logprobs(logits_TV: Tensor, ids_BT: Tensor) -> Tensor:
    return logits_TV.log_softmax(-1)[torch.arange(2), ids_BT]


def advantages(name: str, logits_TV: Tensor, ids_BT: Tensor, old_BT: Tensor) -> Tensor:
    right_BT = (ids_BT == TARGET).float()
    mask_BT, scores_B = torch.ones_like(ids_BT, dtype=torch.bool), right_BT.mean(1)
    greedy = (logits_TV.argmax(-1) == TARGET).float().mean()
    inputs = AdvantageInputs(
        scores_B=scores_B,
        mask_BT=mask_BT,
        valid_B=mask_BT.any(1),
        groups_B=torch.arange(PROMPTS).repeat_interleave(N),
        token_rewards_BT=token_rewards(scores_B, None, 0.0, mask_BT),
        values_BT=torch.zeros(len(ids_BT), 2),
        score_parts={"first": right_BT[:, 0], "second": right_BT[:, 1]},
        baseline_scores_B=greedy.expand(len(ids_BT)),
        old_logprobs_BT=old_BT,
        sum_pi_squared_BT=logits_TV.softmax(-1).square().sum(-1).detach().expand(len(ids_BT), 2),
    )
    return ADVANTAGES[name](inputs, AdvantageOptions()).advantages_BT


def train(estimator: str, loss: str, steps: int = 120) -> float:
    """Probability of the right answer at the end."""
    generator = torch.Generator().manual_seed(0)
    logits_TV = torch.zeros(2, 6, requires_grad=True)
    optimizer = torch.optim.Adam([logits_TV], lr=0.1)
    options = PolicyLossOptions(**LIMITS.get(loss, {}))
    for step in range(steps):
        ids_BT, old_BT = sample(logits_TV, generator)
        mask_BT = torch.ones_like(ids_BT, dtype=torch.bool)
        advantages_BT = advantages(estimator, logits_TV, ids_BT, old_BT)
        totals = Totals.count(mask_BT, mask_BT.any(1))
        # Supervised training on the right answers: the weight per token is all it reads.
        weights_BT = (ids_BT == TARGET).float() if loss == "cross_entropy" else None
        noise_BT = uniform_noise(torch.arange(len(ids_BT)) + 1000 * step, 2)
        for _ in range(2):
            x_BT = logprobs(logits_TV, ids_BT)
            extra = dict(POLICY_LOSSES.defaults[loss])
            chosen_BT = select_tokens(loss, x_BT.detach(), advantages_BT, mask_BT, noise_BT, extra)
            inputs = PolicyLossInputs(x_BT, old_BT, advantages_BT, mask_BT, weights_BT, chosen_BT)
            optimizer.zero_grad()
            aggregate(policy_loss(loss)(inputs, options)[0], mask_BT, mask_BT.any(1), "token-mean", totals).backward()
            optimizer.step()
    return logprobs(logits_TV, TARGET[None]).sum().exp().item()


@pytest.mark.parametrize("estimator", sorted(set(ADVANTAGES) - {"grpo_passk"}))
def test_every_estimator_learns(estimator: str) -> None:
    assert train(estimator, "ppo") > 0.9


def test_pass_at_k_learns_what_it_is_for() -> None:
    """One right answer among eight: there is nothing to gain once two of eight are right."""
    assert 1 - (1 - train("grpo_passk", "ppo")) ** N > 0.999


@pytest.mark.parametrize("loss", sorted(POLICY_LOSSES))
def test_every_loss_learns(loss: str) -> None:
    assert train("grpo", loss) > 0.9
