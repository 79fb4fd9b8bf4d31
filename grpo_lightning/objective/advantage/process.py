"""advantage=process: every step of a completion has its own reward."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from grpo_lightning.objective.checks import check_bool, check_number
from grpo_lightning.objective.groups import group_moments


@dataclass(frozen=True)
class Process:
    """A_{i,t} = sum_{j: end_{i,j} >= t} (s_{i,j} - mean_g) / (std_g + eps), end_{i,j} the last token of step j.

    s_{i,j} is the reward of step j of completion i; mean_g and std_g are over all steps of all completions of the
    group. All of them equal: A = 0. Tokens behind the last step have A = 0. The total reward only decides, where it is
    missing, that the row has none.

    Source: DeepSeekMath (arXiv 2402.03300), section 4.1.3, process supervision.

    unbiased: divide the squared deviations by n - 1 (true) or n (false).
    eps: added to std; in [0, inf).
    """

    name: ClassVar[str] = "process"
    group_baseline: ClassVar[bool] = True
    varies_within_row: ClassVar[bool] = True
    rewards_read: ClassVar[str] = "none"
    unbiased: bool = True
    eps: float = 1e-6

    def __post_init__(self) -> None:
        check_bool("advantage.unbiased", self.unbiased)
        check_number("advantage.eps", self.eps, "[0, inf)")

    def __call__(
        self, rewards: Tensor, group_ids: Tensor, mask: Tensor, *, step_rewards: Tensor, step_ends: Tensor
    ) -> Tensor:
        """rewards [N] (NaN: none), group_ids [N], mask [N, T], step_rewards [N, S] float (NaN: no such step),
        step_ends [N, S] int, the position of the step's last token (-1: no such step) -> A [N, T]."""
        there = (step_ends >= 0) & ~torch.isnan(rewards)[:, None]
        scores = step_rewards.where(there, torch.nan)
        ids = group_ids[:, None].expand(scores.shape)
        group = group_moments(scores.flatten(), ids.flatten(), unbiased=self.unbiased)
        normalised = ((scores.flatten() - group.mean) / (group.std + self.eps)).where(group.varied, 0)
        normalised = normalised.nan_to_num().view(scores.shape)
        at_ends = torch.zeros(mask.shape, dtype=normalised.dtype, device=mask.device)
        at_ends = at_ends.scatter_add(1, step_ends.clamp(min=0), normalised) if mask.shape[1] else at_ends
        return at_ends.flip(1).cumsum(1).flip(1).where(mask, 0)
