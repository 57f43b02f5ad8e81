"""Losses that limit how far one update may move the policy: by clipping the ratio, softly, or by a divergence."""

import torch
from torch import Tensor

from .masking import blank, log_ratio, masked_mean
from .policy_losses import LossMap, PolicyLossInputs, PolicyLossOptions, count, finish_loss, register_policy_loss


def _start(inputs: PolicyLossInputs) -> tuple[Tensor, Tensor]:
    """Clamped log-ratio with gradient, and advantages; both 0 where masked."""
    return log_ratio(inputs.logprobs_BT, inputs.old_logprobs_BT, inputs.mask_BT), blank(
        inputs.advantages_BT, inputs.mask_BT
    )


@register_policy_loss("ppo")
def ppo(inputs: PolicyLossInputs, options: PolicyLossOptions) -> LossMap:
    """max(-A r, -A clip(r, 1 - low, 1 + high)), and with dual clip min(that, -A c) where A < 0.

    Sources: PPO (arXiv:1707.06347), clip-higher: DAPO (arXiv:2503.14476), dual clip (arXiv:1912.09729).

    Raises:
        ValueError: clip_ratio_c is not above 1.
    """
    log_ratio_BT, advantages_BT = _start(inputs)
    loss_BT, clipped_BT = _clip(log_ratio_BT.exp(), advantages_BT, options)
    metrics = {"clip_fraction_sum": count(clipped_BT, inputs)}
    if options.clip_ratio_c is not None:
        if options.clip_ratio_c <= 1:
            raise ValueError(f"clip_ratio_c is {options.clip_ratio_c}; dual clip needs a bound above 1")
        limit_BT = torch.where(advantages_BT < 0, -advantages_BT * options.clip_ratio_c, torch.inf)
        metrics["dual_clip_fraction_sum"] = count(limit_BT < loss_BT, inputs)
        loss_BT = torch.minimum(loss_BT, limit_BT)
    return finish_loss(loss_BT, log_ratio_BT, inputs, metrics)


@register_policy_loss("gspo")
def gspo(inputs: PolicyLossInputs, options: PolicyLossOptions) -> LossMap:
    """PPO's clip on the sequence's ratio s = exp(mean_t log r_t) (arXiv:2507.18071).

    In the form GSPO-token: the value of s on every token, the gradient of that token's log-prob. Aggregated with
    seq-mean-token-mean it has GSPO's value and gradient. Typical bounds are far tighter than PPO's (3e-4, 4e-4).
    """
    log_ratio_BT, advantages_BT = _start(inputs)
    sequence_B1 = masked_mean(log_ratio_BT, inputs.mask_BT, 1)[:, None].detach()
    logprobs_BT = blank(inputs.logprobs_BT, inputs.mask_BT)
    ratio_BT = (logprobs_BT - logprobs_BT.detach() + sequence_B1).exp()
    loss_BT, clipped_BT = _clip(ratio_BT, advantages_BT, options)
    return finish_loss(loss_BT, log_ratio_BT, inputs, {"clip_fraction_sum": count(clipped_BT, inputs)})


@register_policy_loss("geo_mean")
def geo_mean(inputs: PolicyLossInputs, options: PolicyLossOptions) -> LossMap:
    """-A exp(mean_t c_t) of the sequence, c_t the pessimistically clipped log-ratio (GMPO, arXiv:2507.20673).

    Bounds are of the LOG-ratio: c_t = log r_t clipped to [-low, high] where that lowers the objective (the paper: 0.4
    both). A is the row's mean advantage. The row's loss lies on each of its tokens.
    """
    log_ratio_BT, advantages_BT = _start(inputs)
    limited_BT = log_ratio_BT.clamp(-options.clip_ratio_low, options.clip_ratio_high)
    pessimistic_BT = torch.where(
        advantages_BT >= 0, torch.minimum(log_ratio_BT, limited_BT), torch.maximum(log_ratio_BT, limited_BT)
    )
    ratio_B = masked_mean(pessimistic_BT, inputs.mask_BT, 1).exp()
    loss_B = -masked_mean(advantages_BT, inputs.mask_BT, 1) * ratio_B
    clipped = {"clip_fraction_sum": count(pessimistic_BT != log_ratio_BT, inputs)}
    return finish_loss(loss_B[:, None].expand(log_ratio_BT.shape), log_ratio_BT, inputs, clipped)


@register_policy_loss("sapo", tau_pos=1.0, tau_neg=1.05)
def sapo(inputs: PolicyLossInputs, options: PolicyLossOptions) -> LossMap:
    """-A (4 / tau) sigmoid(tau (r - 1)): a soft gate instead of a clip (arXiv:2511.20347).

    tau is tau_pos where A > 0, else tau_neg. The paper aggregates with seq-mean-token-mean.
    """
    log_ratio_BT, advantages_BT = _start(inputs)
    tau_BT = _by_sign(advantages_BT, options.extra["tau_pos"], options.extra["tau_neg"])
    gate_BT = torch.sigmoid(tau_BT * (log_ratio_BT.exp() - 1)) * 4 / tau_BT
    return finish_loss(-advantages_BT * gate_BT, log_ratio_BT, inputs)


@register_policy_loss("cispo")
def cispo(inputs: PolicyLossInputs, options: PolicyLossOptions) -> LossMap:
    """-sg(clip(r, 1 - low, 1 + high)) A log p: the weight is clipped, no token loses its gradient (arXiv:2506.13585).

    TRL clips from above only: clip_ratio_low=1 gives that.
    """
    log_ratio_BT, advantages_BT = _start(inputs)
    ratio_BT = log_ratio_BT.exp().detach()
    weight_BT = ratio_BT.clamp(1 - options.clip_ratio_low, 1 + options.clip_ratio_high)
    loss_BT = -weight_BT * advantages_BT * blank(inputs.logprobs_BT, inputs.mask_BT)
    return finish_loss(loss_BT, log_ratio_BT, inputs, {"clip_fraction_sum": count(weight_BT != ratio_BT, inputs)})


@register_policy_loss("dppo_tv")
def dppo_tv(inputs: PolicyLossInputs, options: PolicyLossOptions) -> LossMap:
    """Trust region by total variation of (this token, any other): |p - p_old| (arXiv:2602.04879).

    A token carries gradient unless it has already moved beyond the bound in the direction A pushes: p - p_old > high
    where A > 0, p_old - p > low where A <= 0. Bounds are divergences, not ratios.
    """
    p_BT, old_BT = _probabilities(inputs)
    moved_BT = p_BT - old_BT
    positive_BT = inputs.advantages_BT > 0
    outside_BT = torch.where(positive_BT, moved_BT > options.clip_ratio_high, -moved_BT > options.clip_ratio_low)
    return _dppo(outside_BT, inputs, options)


@register_policy_loss("dppo_kl")
def dppo_kl(inputs: PolicyLossInputs, options: PolicyLossOptions) -> LossMap:
    """As dppo_tv with the binary KL(old || new) = p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p))."""
    p_BT, old_BT = _probabilities(inputs)
    log_ratio_BT = log_ratio(inputs.logprobs_BT, inputs.old_logprobs_BT, inputs.mask_BT).detach()
    # The floor: a token of probability 1 in float32 has exactly 0 left for the others.
    rest_BT = (1 - old_BT).clamp(min=1e-8).log() - (1 - p_BT).clamp(min=1e-8).log()
    divergence_BT = -old_BT * log_ratio_BT + (1 - old_BT) * rest_BT
    bound_BT = _by_sign(blank(inputs.advantages_BT, inputs.mask_BT), options.clip_ratio_high, options.clip_ratio_low)
    pushed_BT = torch.where(inputs.advantages_BT > 0, p_BT > old_BT, p_BT < old_BT)
    return _dppo(pushed_BT & (divergence_BT > bound_BT), inputs, options)


def _by_sign(advantages_BT: Tensor, positive: float, other: float) -> Tensor:
    """One number where A > 0, another elsewhere, in the advantages' dtype."""
    return torch.full_like(advantages_BT, other).masked_fill(advantages_BT > 0, positive)


def _probabilities(inputs: PolicyLossInputs) -> tuple[Tensor, Tensor]:
    mask_BT = inputs.mask_BT
    return blank(inputs.logprobs_BT.detach(), mask_BT).exp(), blank(inputs.old_logprobs_BT, mask_BT).exp()


def _dppo(outside_BT: Tensor, inputs: PolicyLossInputs, options: PolicyLossOptions) -> LossMap:
    """-sg(min(r, c)) A log p inside the trust region, 0 outside; c is clip_ratio_c or 20, as in the paper."""
    log_ratio_BT, advantages_BT = _start(inputs)
    weight_BT = log_ratio_BT.exp().detach().clamp(max=20.0 if options.clip_ratio_c is None else options.clip_ratio_c)
    loss_BT = -weight_BT * advantages_BT * blank(inputs.logprobs_BT, inputs.mask_BT)
    metrics = {"clip_fraction_sum": count(outside_BT, inputs)}
    return finish_loss(blank(loss_BT, ~outside_BT), log_ratio_BT, inputs, metrics)


def _clip(ratio_BT: Tensor, advantages_BT: Tensor, options: PolicyLossOptions) -> tuple[Tensor, Tensor]:
    """PPO's pessimistic loss, and where the clip decided it."""
    plain_BT = -advantages_BT * ratio_BT
    clipped_BT = -advantages_BT * ratio_BT.clamp(1 - options.clip_ratio_low, 1 + options.clip_ratio_high)
    return torch.maximum(plain_BT, clipped_BT), clipped_BT > plain_BT


@register_policy_loss("clip_cov", clip_cov_ratio=0.0002, clip_cov_lb=1.0, clip_cov_ub=5.0)
def clip_cov(inputs: PolicyLossInputs, options: PolicyLossOptions) -> LossMap:
    """PPO's loss, without gradient on the selected tokens of high covariance (Clip-Cov, arXiv:2505.22617).

    The selection is drawn on the whole mini-batch from the log-probs at its start; verl draws per micro-batch from the
    current ones, so its result changes with the micro-batch size.
    """
    selection_BT = _selection(inputs, "clip_cov")
    log_ratio_BT, advantages_BT = _start(inputs)
    loss_BT, clipped_BT = _clip(log_ratio_BT.exp(), advantages_BT, options)
    metrics = {"clip_fraction_sum": count(clipped_BT, inputs), "selected_sum": count(selection_BT, inputs)}
    return finish_loss(blank(loss_BT, ~selection_BT), log_ratio_BT, inputs, metrics)


@register_policy_loss("kl_cov", kl_cov_ratio=0.0002, ppo_kl_coef=1.0)
def kl_cov(inputs: PolicyLossInputs, options: PolicyLossOptions) -> LossMap:
    """-A r, plus coef |log r| on the tokens of highest covariance (KL-Cov, arXiv:2505.22617). No clip.

    ppo_kl_coef is the paper's 1 (verl's configuration says 0.1).
    """
    selection_BT = _selection(inputs, "kl_cov")
    log_ratio_BT, advantages_BT = _start(inputs)
    penalty_BT = blank(options.extra["ppo_kl_coef"] * log_ratio_BT.abs(), selection_BT)
    metrics = {"selected_sum": count(selection_BT, inputs)}
    return finish_loss(-advantages_BT * log_ratio_BT.exp() + penalty_BT, log_ratio_BT, inputs, metrics)


def _selection(inputs: PolicyLossInputs, name: str) -> Tensor:
    if inputs.selection_BT is None:
        raise ValueError(f"policy loss {name!r} needs selection_BT: call select_tokens on the whole mini-batch")
    return inputs.selection_BT
