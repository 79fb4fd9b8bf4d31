"""advantage=grpo: the reward standardised within its group."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from grpo_lightning.objective.checks import check_bool, check_number
from grpo_lightning.objective.groups import group_moments, per_token


@dataclass(frozen=True)
class GRPO:
    """A_i = (r_i - mean_g) / (std_g + eps), the same on every token of the completion; 0 where max_g == min_g.

    Source: DeepSeekMath (arXiv 2402.03300), section 4.1.2. The paper leaves the kind of std open.

    unbiased: divide the squared deviations by n - 1 (true) or n (false).
    eps: added to std; in [0, inf).
    """

    name: ClassVar[str] = "grpo"
    group_baseline: ClassVar[bool] = True
    unbiased: bool = True
    eps: float = 1e-6

    def __post_init__(self) -> None:
        check_bool("advantage.unbiased", self.unbiased)
        check_number("advantage.eps", self.eps, "[0, inf)")

    def __call__(self, rewards: Tensor, group_ids: Tensor, mask: Tensor) -> Tensor:
        """rewards [N] float (NaN: none), group_ids [N] int, mask [N, T] bool -> A [N, T] in the moments' dtype."""
        group = group_moments(rewards, group_ids, unbiased=self.unbiased)
        advantage = (rewards - group.mean) / (group.std + self.eps)
        return per_token(advantage.where(group.varied, 0), mask)
