"""advantage=pass_at_k: only the best completion of a group is reinforced, by what it is better than the next."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from grpo_lightning.objective.groups import exact_dtype, group_index, per_token


@dataclass(frozen=True)
class PassAtK:
    """A_i = max_j r_j - max_{j != i} r_j over the group: best minus second for the best completion, 0 for the others.

    The objective is the best reward of a group, so its size is k, and the baseline leaves completion i out. Two equal
    best completions: A = 0. (verl also divides by the group's std.)

    Source: Tang et al. (arXiv 2503.19595), pass@k with a leave-one-out baseline.
    """

    name: ClassVar[str] = "pass_at_k"
    group_baseline: ClassVar[bool] = True

    def __call__(self, rewards: Tensor, group_ids: Tensor, mask: Tensor) -> Tensor:
        """rewards [N] float (NaN: none), group_ids [N] int, mask [N, T] bool -> A [N, T] in the moments' dtype."""
        index, groups = group_index(group_ids)
        values = rewards.to(exact_dtype(mask.device)).where(~torch.isnan(rewards), -torch.inf)
        none = torch.full((groups,), -torch.inf, dtype=values.dtype, device=values.device)
        best = none.scatter_reduce(0, index, values, "amax")[index]
        is_best = (values == best) & ~torch.isnan(rewards)
        second = none.scatter_reduce(0, index, values.where(~is_best, -torch.inf), "amax")[index]
        alone = torch.zeros_like(none).index_add(0, index, is_best.to(none.dtype))[index] == 1
        # A second reward of -inf: there is none to compare with.
        return per_token((best - second).where(is_best & alone & ~torch.isinf(second), 0), mask)
