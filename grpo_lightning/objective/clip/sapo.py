"""clip=sapo: a sigmoid gate in the place of the clip, whose gradient fades as the ratio leaves 1."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from grpo_lightning.objective.checks import check_number


@dataclass(frozen=True)
class SAPO:
    """-(4 / tau) sigmoid(tau (rho - 1)) A, tau = tau_pos where A > 0, else tau_neg.

    At rho = 1 the gradient is that of -rho A, for every tau.

    Source: SAPO (arXiv 2511.20347); tau_neg > tau_pos lets negative advantages fade faster.

    tau_pos, tau_neg in (0, inf).
    """

    name: ClassVar[str] = "sapo"
    tau_pos: float
    tau_neg: float

    def __post_init__(self) -> None:
        check_number("clip.tau_pos", self.tau_pos, "(0, inf)")
        check_number("clip.tau_neg", self.tau_neg, "(0, inf)")

    def __call__(self, ratio: Tensor, advantages: Tensor, logp: Tensor) -> Tensor:
        """All [N, T] float -> surrogate [N, T]."""
        tau = torch.full_like(ratio, self.tau_neg).masked_fill(advantages > 0, self.tau_pos)
        return -(4 / tau) * torch.sigmoid(tau * (ratio - 1)) * advantages
