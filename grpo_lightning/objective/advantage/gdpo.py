"""advantage=gdpo: every reward component standardised within the group on its own, then added and whitened."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from grpo_lightning.objective.checks import check_bool, check_number
from grpo_lightning.objective.groups import exact_dtype, group_moments, per_token


@dataclass(frozen=True)
class GDPO:
    """A_i = (S_i - mean_all) / (std_all + eps), S_i = sum_k w_k (r_{k,i} - mean_{k,g}) / (std_{k,g} + eps).

    r_{k,i} is the score of component k, w_k its weight; a component without a score, or with max == min in the group,
    adds nothing. mean_all and std_all are over the completions of the rollout that have a reward. A = 0 in groups
    where no component varies.

    Source: GDPO (arXiv 2601.05242).

    unbiased: divide the squared deviations by n - 1 (true) or n (false).
    eps: added to std; in [0, inf).
    """

    name: ClassVar[str] = "gdpo"
    group_baseline: ClassVar[bool] = True
    rewards_read: ClassVar[str] = "none"
    unbiased: bool = True
    eps: float = 1e-6

    def __post_init__(self) -> None:
        check_bool("advantage.unbiased", self.unbiased)
        check_number("advantage.eps", self.eps, "[0, inf)")

    def __call__(
        self,
        rewards: Tensor,
        group_ids: Tensor,
        mask: Tensor,
        *,
        components: Mapping[str, Tensor],
        component_weights: Mapping[str, float],
    ) -> Tensor:
        """rewards [N] (NaN: none), group_ids [N], mask [N, T], components {name: [N]} (NaN: none) and their weights."""
        there = ~torch.isnan(rewards)
        total = torch.zeros(len(rewards), dtype=exact_dtype(mask.device), device=mask.device)
        varied = torch.zeros_like(there)
        for component, scores in components.items():
            weight = component_weights[component]
            group = group_moments(scores.where(there, torch.nan), group_ids, unbiased=self.unbiased)
            counts = group.varied & (weight != 0)
            standard = ((scores - group.mean) / (group.std + self.eps)).nan_to_num()
            total = total + (weight * standard).where(counts, 0)
            varied = varied | counts
        total = total.where(there, torch.nan)
        everything = group_moments(total, torch.zeros_like(group_ids), unbiased=self.unbiased)
        whitened = (total - everything.mean) / (everything.std + self.eps)
        return per_token(whitened.where(varied & everything.varied, 0), mask)
