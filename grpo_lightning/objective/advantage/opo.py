"""advantage=opo: the reward minus the mean of its group, weighted by length."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from grpo_lightning.objective.groups import exact_dtype, group_index, group_moments, group_sum, per_token


@dataclass(frozen=True)
class OPO:
    """A_i = r_i - sum_j n_j r_j / sum_j n_j over the group, n_j the tokens of completion j; 0 where max_g == min_g.

    Source: OPO (arXiv 2505.23585), the baseline of least variance where the gradient of a completion grows with its
    length.
    """

    name: ClassVar[str] = "opo"
    group_baseline: ClassVar[bool] = True

    def __call__(self, rewards: Tensor, group_ids: Tensor, mask: Tensor) -> Tensor:
        """rewards [N] float (NaN: none), group_ids [N] int, mask [N, T] bool -> A [N, T] in the moments' dtype."""
        index, groups = group_index(group_ids)
        values = rewards.to(exact_dtype(mask.device))
        lengths = mask.sum(1).to(values.dtype).where(~torch.isnan(values), 0)
        weighted = group_sum(lengths * values.nan_to_num(), index, groups)
        baseline = weighted / group_sum(lengths, index, groups).clamp(min=1)
        return per_token((values - baseline[index]).where(group_moments(rewards, group_ids).varied, 0), mask)
