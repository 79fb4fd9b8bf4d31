"""What the advantages per token share: rewards placed on tokens, estimates walked backwards, whitening."""

import torch
from torch import Tensor

from grpo_lightning.objective.groups import exact_dtype, group_moments


def token_rewards(rewards: Tensor, mask: Tensor, kl_penalty: Tensor | None) -> Tensor:
    """Rewards [N] on the last completion token of each row, less kl_penalty [N, T] on every one; 0 for NaN, [N, T]."""
    last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)
    there = ~torch.isnan(rewards)[:, None]
    per_token = torch.zeros(mask.shape, dtype=exact_dtype(mask.device), device=mask.device)
    per_token = torch.where(last & there, rewards.to(per_token.dtype)[:, None], per_token)
    return per_token if kl_penalty is None else torch.where(mask & there, per_token - kl_penalty, per_token)


def gae(per_token: Tensor, values: Tensor | None, mask: Tensor, gamma: float, lam: float) -> Tensor:
    """sum_{s >= t} (gamma lam)^(s-t) (r_s + gamma V_{s+1} - V_s) [N, T] from rewards r and values V (None: 0), [N, T].

    s - t counts completion tokens, so padding and holes do not discount; V behind the last one is 0.
    """
    values = torch.zeros_like(per_token) if values is None else values.to(per_token.dtype)
    result = torch.zeros_like(per_token)
    ahead, next_value = torch.zeros_like(per_token[:, :1]).sum(1), torch.zeros_like(per_token[:, :1]).sum(1)
    for t in reversed(range(mask.shape[1])):
        here = per_token[:, t] + gamma * next_value - values[:, t] + gamma * lam * ahead
        result[:, t] = here.where(mask[:, t], 0)
        ahead = here.where(mask[:, t], ahead)
        next_value = values[:, t].where(mask[:, t], next_value)
    return result


def whiten(values: Tensor, counted: Tensor, *, unbiased: bool, eps: float) -> Tensor:
    """values [N, T] less their mean, divided by std + eps, over the tokens in `counted` [N, T]; 0 elsewhere.

    All of them equal: 0.
    """
    flat = values[counted]
    tokens = group_moments(flat, torch.zeros_like(flat, dtype=torch.long), unbiased=unbiased)
    whitened = ((flat - tokens.mean) / (tokens.std + eps)).where(tokens.varied, 0)
    return torch.zeros_like(values).masked_scatter(counted, whitened)
