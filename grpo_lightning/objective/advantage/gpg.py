"""advantage=gpg: the reward minus the mean of its group, scaled up for the groups that teach nothing."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from grpo_lightning.objective.groups import group_moments, per_token


@dataclass(frozen=True)
class GPG:
    """A_i = alpha (r_i - mean_g), alpha = B / (B - M); 0 where max_g == min_g.

    B counts the rewards of the rollout, M those of groups where max_g == min_g: the mean over all B is diluted by the
    M rows without a gradient, and alpha undoes that. The paper's F_norm is 1, its recommended value.

    Source: GPG (arXiv 2504.02546), eq. 7. Its B - M counts, in its code too, the rows of groups with spread.
    """

    name: ClassVar[str] = "gpg"
    group_baseline: ClassVar[bool] = True

    def __call__(self, rewards: Tensor, group_ids: Tensor, mask: Tensor) -> Tensor:
        """rewards [N] float (NaN: none), group_ids [N] int, mask [N, T] bool -> A [N, T] in the moments' dtype."""
        group = group_moments(rewards, group_ids)
        there = (~torch.isnan(rewards)).to(group.mean.dtype)
        alpha = there.sum() / (there * group.varied).sum().clamp(min=1)
        return per_token((alpha * (rewards - group.mean)).where(group.varied, 0), mask)
