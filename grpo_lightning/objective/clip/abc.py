"""clip=abc: the ratio bounded on both sides at either sign of A, without PPO's minimum."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from grpo_lightning.objective.checks import check_number


@dataclass(frozen=True)
class ABC:
    """-clip(rho, 1 - epsilon_2, 1 + epsilon_1) A where A > 0, else -clip(rho, 1 - epsilon_4, 1 + epsilon_3) A.

    Outside of its bounds a token has no gradient, even one that would lead back inside.

    Source: ABC-GRPO (arXiv 2601.03895), eq. 5 and 6; its experiments set all four to 0.2. (Its public code does not
    contain them.)

    epsilon_1, epsilon_3 in (0, inf), upper bounds; epsilon_2, epsilon_4 in (0, 1), lower bounds.
    """

    name: ClassVar[str] = "abc"
    epsilon_1: float
    epsilon_2: float
    epsilon_3: float
    epsilon_4: float

    def __post_init__(self) -> None:
        for field, interval in (("1", "(0, inf)"), ("2", "(0, 1)"), ("3", "(0, inf)"), ("4", "(0, 1)")):
            check_number(f"clip.epsilon_{field}", getattr(self, f"epsilon_{field}"), interval)

    def __call__(self, ratio: Tensor, advantages: Tensor, logp: Tensor) -> Tensor:
        """All [N, T] float -> surrogate [N, T]."""
        positive = ratio.clamp(1 - self.epsilon_2, 1 + self.epsilon_1)
        negative = ratio.clamp(1 - self.epsilon_4, 1 + self.epsilon_3)
        return -torch.where(advantages > 0, positive, negative) * advantages

    def clipped(self, ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        """Where the ratio was clipped, low and high, bool [N, T]: at either sign of A."""
        positive, negative = advantages > 0, advantages < 0
        low = ((ratio < 1 - self.epsilon_2) & positive) | ((ratio < 1 - self.epsilon_4) & negative)
        high = ((ratio > 1 + self.epsilon_1) & positive) | ((ratio > 1 + self.epsilon_3) & negative)
        return low, high
