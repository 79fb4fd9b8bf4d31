"""advantage=dr_grpo: the reward minus the mean of its group."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from grpo_lightning.objective.groups import group_moments, per_token


@dataclass(frozen=True)
class DrGRPO:
    """A_i = r_i - mean_g, the same on every token of the completion; 0 where max_g == min_g.

    Source: Dr. GRPO (arXiv 2503.20783), section 3.2: without the std, questions of every difficulty weigh the same.
    """

    name: ClassVar[str] = "dr_grpo"
    group_baseline: ClassVar[bool] = True

    def __call__(self, rewards: Tensor, group_ids: Tensor, mask: Tensor) -> Tensor:
        """rewards [N] float (NaN: none), group_ids [N] int, mask [N, T] bool -> A [N, T] in the moments' dtype."""
        group = group_moments(rewards, group_ids)
        return per_token((rewards - group.mean).where(group.varied, 0), mask)
