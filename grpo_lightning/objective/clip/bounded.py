"""clip=dual, clip=two_sided: the clipped surrogate with one more bound, for negative advantages and large ratios.

For A < 0 the minimum of PPO leaves -rho A without an upper bound: one token that became far likelier dominates the
loss. With c = delta the two options are the same function (delta only acts where A < 0).
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from grpo_lightning.objective.checks import check_number
from grpo_lightning.objective.clip.ppo import PPOClip


@dataclass(frozen=True)
class DualClip(PPOClip):
    """A < 0: min(ppo, -c * A); else ppo, where ppo = -min(rho A, clip(rho, 1 - epsilon_low, 1 + epsilon_high) A).

    Source: Ye et al., Mastering Complex Control in MOBA Games (arXiv 1912.09729), dual-clip PPO.

    c in (1, inf); the others as in PPOClip.
    """

    name: ClassVar[str] = "dual"
    c: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("clip.c", self.c, "(1, inf)")

    def __call__(self, ratio: Tensor, advantages: Tensor, logp: Tensor) -> Tensor:
        """All [N, T] float -> surrogate [N, T]."""
        ppo = super().__call__(ratio, advantages, logp)
        return torch.where(advantages < 0, torch.minimum(ppo, -self.c * advantages), ppo)


@dataclass(frozen=True)
class TwoSidedClip(PPOClip):
    """-min(min(rho, delta) A, clip(rho, 1 - epsilon_low, 1 + epsilon_high) A).

    Source: INTELLECT-2 (arXiv 2505.07291), two-sided GRPO clipping.

    delta > 1 + epsilon_high: below, it would take over the bound of positive advantages. The others as in PPOClip.
    """

    name: ClassVar[str] = "two_sided"
    delta: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("clip.delta", self.delta, f"({1 + self.epsilon_high}, inf)")

    def __call__(self, ratio: Tensor, advantages: Tensor, logp: Tensor) -> Tensor:
        """All [N, T] float -> surrogate [N, T]."""
        return super().__call__(ratio.clamp(max=self.delta), advantages, logp)
