"""clip=unclipped, clip=none: the policy gradient with the importance ratio, and without one."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor


@dataclass(frozen=True)
class Unclipped:
    """-rho A.

    Source: Schulman et al., PPO (arXiv 1707.06347), eq. 6, the surrogate before it is clipped.
    """

    name: ClassVar[str] = "unclipped"

    def __call__(self, ratio: Tensor, advantages: Tensor, logp: Tensor) -> Tensor:
        """All [N, T] float -> surrogate [N, T]."""
        return -ratio * advantages


@dataclass(frozen=True)
class NoClip:
    """-A logp: no ratio at all.

    Source: Williams (1992), REINFORCE.
    """

    name: ClassVar[str] = "none"

    def __call__(self, ratio: Tensor, advantages: Tensor, logp: Tensor) -> Tensor:
        """All [N, T] float -> surrogate [N, T]."""
        return -advantages * logp
