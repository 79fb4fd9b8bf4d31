"""clip=symmetric, clip=higher, clip=gspo: the clipped surrogate of PPO, with one bound or with two."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from grpo_lightning.objective.checks import check_number


@dataclass(frozen=True)
class PPOClip:
    """-min(rho A, clip(rho, 1 - epsilon_low, 1 + epsilon_high) A).

    Sources: clip-higher, DAPO (arXiv 2503.14476), eq. 10; with ratio=sequence GSPO (arXiv 2507.18071), eq. 5.

    epsilon_low in (0, 1), epsilon_high in (0, inf).
    """

    name: ClassVar[str] = "higher"
    epsilon_low: float
    epsilon_high: float

    def __post_init__(self) -> None:
        check_number("clip.epsilon_low", self.epsilon_low, "(0, 1)")
        check_number("clip.epsilon_high", self.epsilon_high, "(0, inf)")

    def __call__(self, ratio: Tensor, advantages: Tensor, logp: Tensor) -> Tensor:
        """All [N, T] float -> surrogate [N, T]."""
        inside = ratio.clamp(1 - self.epsilon_low, 1 + self.epsilon_high)
        return -torch.minimum(ratio * advantages, inside * advantages)

    def clipped(self, ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        """Where the surrogate was clipped, low and high, bool [N, T]: the sign of A decides which bound can act."""
        low = (ratio < 1 - self.epsilon_low) & (advantages < 0)
        high = (ratio > 1 + self.epsilon_high) & (advantages > 0)
        return low, high


@dataclass(frozen=True)
class SymmetricClip:
    """-min(rho A, clip(rho, 1 - epsilon, 1 + epsilon) A).

    Source: PPO (arXiv 1707.06347), eq. 7; in GRPO DeepSeekMath (arXiv 2402.03300), eq. 3.

    epsilon in (0, 1).
    """

    name: ClassVar[str] = "symmetric"
    epsilon: float

    def __post_init__(self) -> None:
        check_number("clip.epsilon", self.epsilon, "(0, 1)")

    def __call__(self, ratio: Tensor, advantages: Tensor, logp: Tensor) -> Tensor:
        """All [N, T] float -> surrogate [N, T]."""
        return PPOClip(self.epsilon, self.epsilon)(ratio, advantages, logp)

    def clipped(self, ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        """As PPOClip.clipped."""
        return PPOClip(self.epsilon, self.epsilon).clipped(ratio, advantages)
