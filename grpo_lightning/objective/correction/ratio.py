"""The importance ratio between the old policy, as the trainer computes it, and the engine that sampled."""

from torch import Tensor

from grpo_lightning.objective.kl import MAX_LOG_RATIO


def sampler_ratio(old_logp: Tensor, sampler_logp: Tensor, mask: Tensor, *, per_row: bool = False) -> Tensor:
    """exp(d_{i,t}), or per row exp(sum_t d_{i,t}) on each of its tokens; [N, T], detached.

    d is 0 off the mask. What goes into exp, for a row the sum, is clamped to +-20.
    """
    d = (old_logp - sampler_logp).detach().where(mask, 0)
    if per_row:
        d = d.sum(dim=1, keepdim=True).expand_as(d)
    return d.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
