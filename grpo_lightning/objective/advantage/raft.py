"""advantage=raft: imitate the right completions, leave the others out."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from grpo_lightning.objective.groups import per_token


@dataclass(frozen=True)
class RAFT:
    """A_i = 1 where completion i is correct; the other rows leave the loss, numerator and denominators alike.

    Source: RAFT (arXiv 2304.06767), for rewards that say right or wrong as in Xiong et al. (arXiv 2504.11343): all
    right completions are kept, not only the best of a group.
    """

    name: ClassVar[str] = "raft"
    group_baseline: ClassVar[bool] = False
    rewards_read: ClassVar[str] = "none"

    def keep(self, rewards: Tensor, group_ids: Tensor, *, correct: Tensor) -> Tensor:
        """rewards [N] float (NaN: none), group_ids [N] int, correct [N] bool -> the rows that stay in the loss [N]."""
        return correct.bool() & ~torch.isnan(rewards)

    def __call__(self, rewards: Tensor, group_ids: Tensor, mask: Tensor, *, correct: Tensor) -> Tensor:
        """rewards [N] float (NaN: none), group_ids [N], mask [N, T] bool, correct [N] bool -> A [N, T]."""
        return per_token(self.keep(rewards, group_ids, correct=correct).to(rewards.dtype), mask)
