"""clip=cispo: the importance weight is clipped, not the update: every token keeps a gradient."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from grpo_lightning.objective.checks import check_number


@dataclass(frozen=True)
class CISPO:
    """-sg[clip(rho, 1 - epsilon_low, 1 + epsilon_high)] A logp, sg[.] without gradient.

    Source: MiniMax-M1 (arXiv 2506.13585), CISPO; ScaleRL (arXiv 2510.13786) takes the minimum of rho and 5.

    epsilon_low in (0, 1], 1 being no lower bound; epsilon_high in (0, inf).
    """

    name: ClassVar[str] = "cispo"
    epsilon_low: float
    epsilon_high: float

    def __post_init__(self) -> None:
        check_number("clip.epsilon_low", self.epsilon_low, "(0, 1]")
        check_number("clip.epsilon_high", self.epsilon_high, "(0, inf)")

    def __call__(self, ratio: Tensor, advantages: Tensor, logp: Tensor) -> Tensor:
        """All [N, T] float -> surrogate [N, T]."""
        return -ratio.detach().clamp(1 - self.epsilon_low, 1 + self.epsilon_high) * advantages * logp

    def clipped(self, ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        """Where the weight was clipped, low and high, bool [N, T]: at either sign of A."""
        acts = advantages != 0
        return (ratio < 1 - self.epsilon_low) & acts, (ratio > 1 + self.epsilon_high) & acts
