"""advantage=maxrl: the reward minus the mean of its group, divided by that mean."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from grpo_lightning.objective.groups import group_moments, per_token


@dataclass(frozen=True)
class MaxRL:
    """A_i = (r_i - mean_g) / mean_g, rewards >= 0; 0 where max_g == min_g.

    With rewards 0 and 1 mean_g is the pass rate, and the sum is the gradient of log(pass rate) instead of that of the
    pass rate: hard questions weigh more.

    Source: MaxRL (arXiv 2602.02710), the estimator that subtracts the mean of the scores.
    """

    name: ClassVar[str] = "maxrl"
    group_baseline: ClassVar[bool] = True
    positive_rewards: ClassVar[bool] = True

    def __call__(self, rewards: Tensor, group_ids: Tensor, mask: Tensor) -> Tensor:
        """rewards [N] float (NaN: none), group_ids [N] int, mask [N, T] bool -> A [N, T] in the moments' dtype."""
        if (rewards < 0).any():
            row = int((rewards < 0).nonzero()[0])
            raise ValueError(f"advantage=maxrl needs rewards >= 0, that of row {row} is {rewards[row].item()}")
        group = group_moments(rewards, group_ids)
        # Where rewards differ and none is negative, their mean is above 0.
        return per_token(((rewards - group.mean) / group.mean).where(group.varied, 0), mask)
