"""advantage=rloo: the reward minus the mean of the others in its group."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from grpo_lightning.objective.groups import group_moments, per_token


@dataclass(frozen=True)
class RLOO:
    """A_i = r_i - mean_{j != i} r_j = (r_i - mean_g) * n / (n - 1), n rewards in the group; 0 where max_g == min_g.

    Source: the leave-one-out estimator of Kool et al. (2019), for language models Ahmadian et al. (arXiv 2402.14740).
    """

    name: ClassVar[str] = "rloo"
    group_baseline: ClassVar[bool] = True

    def __call__(self, rewards: Tensor, group_ids: Tensor, mask: Tensor) -> Tensor:
        """rewards [N] float (NaN: none), group_ids [N] int, mask [N, T] bool -> A [N, T] in the moments' dtype."""
        group = group_moments(rewards, group_ids)
        advantage = (rewards - group.mean) * group.size / (group.size - 1).clamp(min=1)
        return per_token(advantage.where(group.varied, 0), mask)
