"""advantage=reinforce_pp_baseline: the group's mean taken off, whitened over all tokens of the rollout."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from grpo_lightning.objective.advantage.tokens import whiten
from grpo_lightning.objective.checks import check_bool, check_number
from grpo_lightning.objective.groups import exact_dtype, group_moments


@dataclass(frozen=True)
class ReinforcePPBaseline:
    """A_i = (r_i - mean_g - mean_all) / (std_all + eps), the moments "all" being of r - mean_g; 0 where max_g == min_g.

    They are over every completion token of the rollout whose row has a reward, so that a row counts as often as it has
    tokens. Where max_g == min_g the shift by mean_all would be a signal that the rewards do not hold: A is 0 there.

    Source: REINFORCE++ (arXiv 2501.03262), REINFORCE++-baseline, a group mean before global normalisation.

    unbiased: divide the squared deviations by n - 1 (true) or n (false).
    eps: added to std; in [0, inf).
    """

    name: ClassVar[str] = "reinforce_pp_baseline"
    group_baseline: ClassVar[bool] = True
    unbiased: bool = True
    eps: float = 1e-6

    def __post_init__(self) -> None:
        check_bool("advantage.unbiased", self.unbiased)
        check_number("advantage.eps", self.eps, "[0, inf)")

    def __call__(self, rewards: Tensor, group_ids: Tensor, mask: Tensor) -> Tensor:
        """rewards [N] float (NaN: none), group_ids [N] int, mask [N, T] bool -> A [N, T] in the moments' dtype."""
        group = group_moments(rewards, group_ids)
        centred = (rewards.to(exact_dtype(mask.device)) - group.mean).where(group.varied, 0)[:, None].expand(mask.shape)
        counted = mask & ~torch.isnan(rewards)[:, None]
        return whiten(centred, counted, unbiased=self.unbiased, eps=self.eps).where(group.varied[:, None], 0)
