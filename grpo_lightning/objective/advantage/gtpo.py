"""advantage=gtpo: the reward shared out among the tokens at each position by the entropy of the policy."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from grpo_lightning.objective.checks import check_bool, check_number
from grpo_lightning.objective.groups import exact_dtype, group_index, group_moments, group_sum

MIN_ENTROPY = 1e-8


@dataclass(frozen=True)
class GTPO:
    """A_{i,t} = (s_{i,t} - mean) / (std + eps), the moments over the tokens of the right (or the wrong) of the group;
    right: s_{i,t} = alpha1 * r_i + alpha2 * d_t H_{i,t} / sum_k H_{k,t};
    wrong: s_{i,t} = -alpha1 - alpha2 * d_t (1/H_{i,t}) / sum_k (1/H_{k,t}).

    The sums over k are over the completions of the group that are right (or wrong) and have a t-th token, d_t of them;
    H is the entropy of the old policy, at least 1e-8. So a right completion is rewarded most where the policy was
    undecided, a wrong one punished most where it was sure. A = 0 in a set whose s are all equal, and where the rewards
    of the group are. As printed the right and the wrong are normalised apart, so that about half of the tokens of right
    completions get a negative advantage, and what is left of the outcome is where the policy was undecided.

    Source: GTPO (arXiv 2508.04349 v6), eq. 3, 5 and 6.

    alpha1, alpha2: in [0, inf). With alpha1 + alpha2 = 1 and rewards of 1 the shaped rewards at each position add up to
    the unshaped ones.
    together: the moments are over all tokens of the group instead, right and wrong (ours: right ones stay positive).
    unbiased: divide the squared deviations by n - 1 (true) or n (false).
    eps: added to std; in (0, inf), because equal shares may differ by rounding.
    """

    name: ClassVar[str] = "gtpo"
    group_baseline: ClassVar[bool] = True
    rewards_read: ClassVar[str] = "right"
    varies_within_row: ClassVar[bool] = True
    alpha1: float = 1.0
    alpha2: float = 0.1
    together: bool = False
    unbiased: bool = True
    eps: float = 1e-6

    def __post_init__(self) -> None:
        check_number("advantage.alpha1", self.alpha1, "[0, inf)")
        check_number("advantage.alpha2", self.alpha2, "[0, inf)")
        check_bool("advantage.together", self.together)
        check_bool("advantage.unbiased", self.unbiased)
        check_number("advantage.eps", self.eps, "(0, inf)")

    def shaped(self, rewards: Tensor, group_ids: Tensor, mask: Tensor, correct: Tensor, entropy: Tensor) -> Tensor:
        """The shaped rewards s [N, T] of the tokens under the mask in rows with a reward; 0 elsewhere."""
        counted = mask & ~torch.isnan(rewards)[:, None]
        sets, _ = group_index(2 * group_index(group_ids)[0] + correct.bool())
        # Completions are compared at their t-th tokens, wherever those stand.
        at = mask.cumsum(1) - 1 + sets[:, None] * mask.shape[1]
        index, count = group_index(at[counted])
        right = correct.bool()[:, None].expand(mask.shape)[counted]
        h = entropy.to(exact_dtype(mask.device))[counted].clamp(min=MIN_ENTROPY)
        share = torch.where(right, h, 1 / h)
        # In this order a completion alone in its set has exactly 1.
        share = share * group_sum(torch.ones_like(h), index, count)[index] / group_sum(share, index, count)[index]
        outcome = rewards[:, None].expand(mask.shape)[counted].to(h.dtype)
        shaped = torch.where(right, self.alpha1 * outcome + self.alpha2 * share, -self.alpha1 - self.alpha2 * share)
        return torch.zeros(mask.shape, dtype=h.dtype, device=mask.device).masked_scatter(counted, shaped)

    def __call__(self, rewards: Tensor, group_ids: Tensor, mask: Tensor, *, correct: Tensor, entropy: Tensor) -> Tensor:
        """rewards [N] float (NaN: none), group_ids [N], mask [N, T], correct [N] bool, entropy [N, T] -> A [N, T]."""
        shaped = self.shaped(rewards, group_ids, mask, correct, entropy)
        counted = mask & ~torch.isnan(rewards)[:, None]
        sets = group_ids if self.together else 2 * group_index(group_ids)[0] + correct.bool()
        sets = sets[:, None].expand(mask.shape)[counted]
        tokens = group_moments(shaped[counted], sets, unbiased=self.unbiased)
        normalised = ((shaped[counted] - tokens.mean) / (tokens.std + self.eps)).where(tokens.varied, 0)
        informative = group_moments(rewards, group_ids).varied[:, None]
        return torch.zeros_like(shaped).masked_scatter(counted, normalised).where(informative, 0)
