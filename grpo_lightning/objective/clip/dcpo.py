"""clip=dcpo: bounds that widen as the old probability of the token falls."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from grpo_lightning.objective.checks import check_number


@dataclass(frozen=True)
class DCPOClip:
    """-min(rho A, clip(rho, low, high) A), where A < 0 at most -c * A; with q = exp(old_logp)
    low = 1/2 + 1/2 sqrt(max(1 - 4 * epsilon_low / q, 0)),
    high = min(1/2 + 1/2 sqrt(1 + 4 * epsilon_high / q), max(c, 10)).

    Source: DCPO (arXiv 2509.02333), dynamic adaptive clipping; the dual clip at c and the limit of high are from its
    released code.

    epsilon_low in (0, 1), epsilon_high in (0, inf), c in (1, inf).
    """

    name: ClassVar[str] = "dcpo"
    token_ratio: ClassVar[bool] = True
    epsilon_low: float
    epsilon_high: float
    c: float

    def __post_init__(self) -> None:
        check_number("clip.epsilon_low", self.epsilon_low, "(0, 1)")
        check_number("clip.epsilon_high", self.epsilon_high, "(0, inf)")
        check_number("clip.c", self.c, "(1, inf)")

    def bounds(self, old_logp: Tensor) -> tuple[Tensor, Tensor]:
        """low and high [N, T] for old_logp [N, T]."""
        inverse = (-old_logp.detach()).exp()  # inf for a token that was all but impossible: low 1/2, high the limit
        low = 0.5 + 0.5 * (1 - 4 * self.epsilon_low * inverse).clamp(min=0).sqrt()
        high = 0.5 + 0.5 * (1 + 4 * self.epsilon_high * inverse).sqrt()
        return low, high.clamp(max=max(self.c, 10.0))

    def __call__(self, ratio: Tensor, advantages: Tensor, logp: Tensor, *, old_logp: Tensor) -> Tensor:
        """All [N, T] float -> surrogate [N, T]."""
        low, high = self.bounds(old_logp)
        inside = torch.minimum(torch.maximum(ratio, low), high)
        ppo = -torch.minimum(ratio * advantages, inside * advantages)
        return torch.where(advantages < 0, torch.minimum(ppo, -self.c * advantages), ppo)

    def clipped(self, ratio: Tensor, advantages: Tensor, *, old_logp: Tensor) -> tuple[Tensor, Tensor]:
        """Where low and high acted, bool [N, T]: low only where A < 0, high only where A > 0."""
        low, high = self.bounds(old_logp)
        return (ratio < low) & (advantages < 0), (ratio > high) & (advantages > 0)
