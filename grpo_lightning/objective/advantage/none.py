"""advantage=none: the reward itself, without a baseline."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from grpo_lightning.objective.groups import per_token


@dataclass(frozen=True)
class NoBaseline:
    """A_i = r_i on every token of the completion.

    Source: Williams (1992), REINFORCE with a baseline of zero.
    """

    name: ClassVar[str] = "none"
    group_baseline: ClassVar[bool] = False

    def __call__(self, rewards: Tensor, group_ids: Tensor, mask: Tensor) -> Tensor:
        """rewards [N] float (NaN: none), group_ids [N] int, mask [N, T] bool -> A [N, T] in the rewards' dtype."""
        return per_token(rewards, mask)
