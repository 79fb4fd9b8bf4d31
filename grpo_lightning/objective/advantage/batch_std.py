"""advantage=batch_std: the group's mean taken off, divided by the std of all rewards of the rollout."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from grpo_lightning.objective.checks import check_bool, check_number
from grpo_lightning.objective.groups import group_moments, per_token


@dataclass(frozen=True)
class BatchStd:
    """A_i = (r_i - mean_g) / (std_all + eps), std_all over every reward of the rollout; 0 where max_g == min_g.

    Source: Lite PPO (arXiv 2508.08221), its group-level mean with batch-level standard deviation.

    unbiased: divide the squared deviations by n - 1 (true) or n (false).
    eps: added to std; in [0, inf).
    """

    name: ClassVar[str] = "batch_std"
    group_baseline: ClassVar[bool] = True
    unbiased: bool = True
    eps: float = 1e-6

    def __post_init__(self) -> None:
        check_bool("advantage.unbiased", self.unbiased)
        check_number("advantage.eps", self.eps, "[0, inf)")

    def __call__(self, rewards: Tensor, group_ids: Tensor, mask: Tensor) -> Tensor:
        """rewards [N] float (NaN: none), group_ids [N] int, mask [N, T] bool -> A [N, T] in the moments' dtype."""
        group = group_moments(rewards, group_ids)
        everything = group_moments(rewards, torch.zeros_like(group_ids), unbiased=self.unbiased)
        advantage = (rewards - group.mean) / (everything.std + self.eps)
        return per_token(advantage.where(group.varied, 0), mask)
