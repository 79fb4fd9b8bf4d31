"""advantage=grpo_s: the reward shared out among the completions of a group by the entropy of the policy."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from grpo_lightning.objective.advantage.gtpo import MIN_ENTROPY
from grpo_lightning.objective.checks import check_bool, check_number
from grpo_lightning.objective.groups import exact_dtype, group_index, group_moments, group_sum, per_token


@dataclass(frozen=True)
class GRPOS:
    """A_i = (s_i - mean_g) / (std_g + eps), 0 where max_g == min_g, the same on every token of the completion;
    right: s_i = beta1 * r_i + beta2 * n H_i / sum_k H_k; wrong: s_i = -beta1 - beta2 * n (1/H_i) / sum_k (1/H_k).

    The sums are over the n completions of the group that are right (or wrong); H_i is the mean entropy of the old
    policy over the tokens of completion i, at least 1e-8. The moments are of s over the whole group, max and min of the
    rewards.

    Source: GRPO-S (arXiv 2508.04349 v6), eq. 9, whose advantage is normalised within the group.

    beta1, beta2: in [0, inf). With beta1 + beta2 = 1 and rewards of 1 the shaped rewards add up to the unshaped ones.
    unbiased: divide the squared deviations by n - 1 (true) or n (false).
    eps: added to std; in (0, inf), because equal shares may differ by rounding.
    """

    name: ClassVar[str] = "grpo_s"
    group_baseline: ClassVar[bool] = True
    rewards_read: ClassVar[str] = "right"
    beta1: float = 1.0
    beta2: float = 0.1
    unbiased: bool = True
    eps: float = 1e-6

    def __post_init__(self) -> None:
        check_number("advantage.beta1", self.beta1, "[0, inf)")
        check_number("advantage.beta2", self.beta2, "[0, inf)")
        check_bool("advantage.unbiased", self.unbiased)
        check_number("advantage.eps", self.eps, "(0, inf)")

    def shaped(self, rewards: Tensor, group_ids: Tensor, mask: Tensor, correct: Tensor, entropy: Tensor) -> Tensor:
        """The shaped rewards s [N]; NaN where there is no reward."""
        right, there = correct.bool(), ~torch.isnan(rewards)
        h = entropy.to(exact_dtype(mask.device)).where(mask, 0).sum(1) / mask.sum(1).clamp(min=1)
        h = h.clamp(min=MIN_ENTROPY)
        share = torch.where(right, h, 1 / h).where(there, 0)
        index, sets = group_index(2 * group_index(group_ids)[0] + right)
        size = group_sum(there.to(h.dtype), index, sets)
        total = group_sum(share, index, sets)
        share = share * size[index] / total.where(total > 0, 1)[index]
        shaped = torch.where(right, self.beta1 * rewards + self.beta2 * share, -self.beta1 - self.beta2 * share)
        return shaped.where(there, torch.nan)

    def __call__(self, rewards: Tensor, group_ids: Tensor, mask: Tensor, *, correct: Tensor, entropy: Tensor) -> Tensor:
        """rewards [N] float (NaN: none), group_ids [N], mask [N, T], correct [N] bool, entropy [N, T] -> A [N, T]."""
        shaped = self.shaped(rewards, group_ids, mask, correct, entropy)
        group = group_moments(shaped, group_ids, unbiased=self.unbiased)
        advantage = (shaped - group.mean) / (group.std + self.eps)
        varied = group.varied & group_moments(rewards, group_ids).varied
        return per_token(advantage.where(varied, 0), mask)
