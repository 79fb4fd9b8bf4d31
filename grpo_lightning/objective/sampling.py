"""sampling: which groups of a rollout enter the buffer."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from grpo_lightning.objective.checks import check_bool, check_number
from grpo_lightning.objective.groups import group_moments


@dataclass(frozen=True)
class SampleAll:
    """Every group is kept, from one draw."""

    name: ClassVar[str] = "all"
    max_draws: ClassVar[int] = 1
    keep_surplus: ClassVar[bool] = False

    def keep(self, task_rewards: Tensor, group_ids: Tensor) -> set[int]:
        """task_rewards [N] float, group_ids [N] int -> ids of the groups that are kept: all."""
        return set(group_ids.tolist())


@dataclass(frozen=True)
class SampleDynamic:
    """A group is kept if its task rewards are not all the same (max != min; NaN is left out).

    Source: DAPO (arXiv 2503.14476), eq. 11.

    max_draws: how often at most prompts are drawn to fill one rollout, an integer in [1, inf).
    keep_surplus: groups beyond the rollout's size are kept for the next one.
    """

    name: ClassVar[str] = "dynamic"
    max_draws: int = 10
    keep_surplus: bool = True

    def __post_init__(self) -> None:
        check_number("sampling.max_draws", self.max_draws, "[1, inf)", integer=True)
        check_bool("sampling.keep_surplus", self.keep_surplus)

    def keep(self, task_rewards: Tensor, group_ids: Tensor) -> set[int]:
        """task_rewards [N] float (NaN: none), group_ids [N] int -> ids of the groups that are kept."""
        return set(group_ids[group_moments(task_rewards, group_ids).varied].tolist())
