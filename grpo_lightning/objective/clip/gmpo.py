"""clip=gmpo: the geometric mean of a row's clipped token ratios, one surrogate per row."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from grpo_lightning.objective.checks import check_number


@dataclass(frozen=True)
class GMPO:
    """-A exp((1 / n_i) sum_t y_t), y_t = min(log rho_t, epsilon_high) where A > 0, else max(log rho_t, -epsilon_low).

    The same on every token of the row. Against ratio=sequence the clip acts on each token, in the logarithm and wider.

    Source: GMPO (arXiv 2507.20673), with its clip to (exp(-0.4), exp(0.4)).

    epsilon_low, epsilon_high in (0, inf), of the log-ratio.
    """

    name: ClassVar[str] = "gmpo"
    per_row: ClassVar[bool] = True
    token_ratio: ClassVar[bool] = True
    epsilon_low: float
    epsilon_high: float

    def __post_init__(self) -> None:
        check_number("clip.epsilon_low", self.epsilon_low, "(0, inf)")
        check_number("clip.epsilon_high", self.epsilon_high, "(0, inf)")

    def __call__(self, ratio: Tensor, advantages: Tensor, logp: Tensor, *, mask: Tensor) -> Tensor:
        """ratio, advantages (constant in a row), logp [N, T] float, mask [N, T] bool -> surrogate [N, T]."""
        x = ratio.log()
        y = torch.where(advantages > 0, x.clamp(max=self.epsilon_high), x.clamp(min=-self.epsilon_low))
        mean = y.where(mask, 0).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
        return -advantages * mean.exp()

    def clipped(self, ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        """Which token ratios were clipped, low (only where A < 0) and high (only where A > 0), bool [N, T]."""
        x = ratio.log()
        return (x < -self.epsilon_low) & (advantages < 0), (x > self.epsilon_high) & (advantages > 0)
