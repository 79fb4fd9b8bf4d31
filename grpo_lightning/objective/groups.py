"""Statistics of groups that are named by an explicit id, in any order."""

from typing import NamedTuple

import torch
from torch import Tensor


def exact_dtype(device: torch.device) -> torch.dtype:
    """The dtype for counts and moments: float64, except on Apple's MPS, which has none."""
    return torch.float32 if device.type == "mps" else torch.float64


def group_index(group_ids: Tensor) -> tuple[Tensor, int]:
    """Consecutive group numbers [N] (int64) for arbitrary ids [N], and how many groups there are."""
    ids, index = torch.unique(group_ids, return_inverse=True)
    return index, len(ids)


def group_sum(values: Tensor, index: Tensor, groups: int) -> Tensor:
    """Sum of `values` [N] in each group [groups]."""
    return torch.zeros(groups, dtype=values.dtype, device=values.device).index_add_(0, index, values)


class Moments(NamedTuple):
    """Of the group that each row belongs to, all [N]: how many rewards, their mean, std, and whether max != min."""

    size: Tensor
    mean: Tensor
    std: Tensor
    varied: Tensor


def group_moments(rewards: Tensor, group_ids: Tensor, *, unbiased: bool = True) -> Moments:
    """Moments of `rewards` [N] within each group of `group_ids` [N]; NaN rewards are left out.

    Two passes (mean, then squared deviations): E[x^2] - mean^2 loses every digit when rewards are nearly equal.
    A group with one reward, or none, has std 0 and is not varied. Nor is one whose rewards differ by their last digits.
    """
    index, groups = group_index(group_ids)
    there = ~torch.isnan(rewards)
    values = rewards.to(exact_dtype(rewards.device))
    count = group_sum(there.to(values.dtype), index, groups)
    mean = group_sum(values.where(there, 0), index, groups) / count.clamp(min=1)
    deviation = (values - mean[index]).where(there, 0)
    std = (group_sum(deviation.square(), index, groups) / (count - int(unbiased)).clamp(min=1)).sqrt()
    lowest = torch.full_like(mean, torch.inf).scatter_reduce(0, index, values.where(there, torch.inf), "amin")
    highest = torch.full_like(mean, -torch.inf).scatter_reduce(0, index, values.where(there, -torch.inf), "amax")
    # What weights and sums round off is no difference between rewards; divided by such a std it would be one of size 1.
    rounding = 16 * torch.finfo(rewards.dtype).eps * torch.maximum(highest.abs(), lowest.abs())
    return Moments(count[index], mean[index], std[index], (highest - lowest > rounding)[index])


def per_token(values: Tensor, mask: Tensor) -> Tensor:
    """Row values [N] on every position of `mask` [N, T], 0 elsewhere; NaN (a row without a reward) becomes 0."""
    return values.where(~torch.isnan(values), 0)[:, None].where(mask, 0)
