"""advantage=dcpo: the group's standardised reward, smoothed with what the prompt's earlier groups were like."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from grpo_lightning.objective.checks import check_bool
from grpo_lightning.objective.groups import group_moments, per_token


class Seen(NamedTuple):
    """What is remembered of a prompt: how many groups, the mean of their rewards and its variance."""

    groups: int
    mean: float
    variance: float

    def plus(self, mean: float, variance: float) -> "Seen":
        """With one more group. Equal means stay exactly equal, so that a prompt without spread keeps variance 0."""
        n, shift = self.groups + 1, mean - self.mean
        between = self.groups / n * shift * shift
        return Seen(n, self.mean + shift / n, (self.groups * self.variance + variance + between) / n)


@dataclass
class DCPO:
    """A = the one of ((i-1) Z_new + Z_tot) / i and (Z_new + (i-1) Z_tot) / i with the smaller absolute value;
    Z_new = (r - mean_g) / std_g within this group, the i-th of its prompt, Z_tot with the moments of all i groups.

    They are merged as mean' = ((i-1) mean + mean_g) / i, var' = ((i-1) var + var_g + (i-1)/i (mean_g - mean)^2) / i. A
    term whose std is 0 is 0: a group without spread still learns from the earlier ones. Two groups of one prompt in one
    rollout both count as its next. A group with fewer than two rewards has A = 0 and is not remembered.

    Source: DCPO (arXiv 2509.02333), smooth advantage standardization; the merging is that of its released code.

    unbiased: divide the squared deviations by n - 1 (true) or n (false).
    """

    name: ClassVar[str] = "dcpo"
    group_baseline: ClassVar[bool] = True
    unbiased: bool = True

    def __post_init__(self) -> None:
        check_bool("advantage.unbiased", self.unbiased)
        self._seen: dict[int, Seen] = {}

    def state_dict(self) -> dict[str, Any]:
        """prompt id -> [groups, mean, variance]."""
        return {"seen": {prompt: list(seen) for prompt, seen in self._seen.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._seen = {int(prompt): Seen(*seen) for prompt, seen in state["seen"].items()}

    def __call__(self, rewards: Tensor, group_ids: Tensor, mask: Tensor, *, prompt_ids: Tensor) -> Tensor:
        """rewards [N] float (NaN: none), group_ids [N], mask [N, T], prompt_ids [N] int -> A [N, T].

        Every call is one rollout more in the statistics.
        """
        group = group_moments(rewards, group_ids, unbiased=self.unbiased)
        there = ~torch.isnan(rewards)
        values = rewards.to(group.mean.dtype)
        mean = group.mean.where(group.varied, values)  # of equal rewards exactly that reward, std exactly 0
        std = group.std.where(group.varied, 0)
        before, result = dict(self._seen), torch.zeros_like(values)
        for group_id in group_ids[there & (group.size > 1)].unique():
            rows = (group_ids == group_id) & there
            if len(prompt_ids[rows].unique()) > 1:
                raise ValueError(f"advantage=dcpo: group {group_id.item()} has more than one prompt id")
            prompt = int(prompt_ids[rows][0])
            mean_g, std_g = mean[rows][0].item(), std[rows][0].item()
            seen = before.get(prompt, Seen(0, 0.0, 0.0)).plus(mean_g, std_g**2)
            result[rows] = _smoothed(values[rows], mean_g, std_g, seen)
            self._seen[prompt] = self._seen.get(prompt, Seen(0, 0.0, 0.0)).plus(mean_g, std_g**2)
        return per_token(result, mask)


def _smoothed(rewards: Tensor, mean: float, std: float, seen: Seen) -> Tensor:
    new = (rewards - mean) / std if std > 0 else torch.zeros_like(rewards)
    total = (rewards - seen.mean) / seen.variance**0.5 if seen.variance > 0 else torch.zeros_like(rewards)
    by_new, by_total = ((seen.groups - 1) * new + total) / seen.groups, (new + (seen.groups - 1) * total) / seen.groups
    return torch.where(by_new.abs() < by_total.abs(), by_new, by_total)
