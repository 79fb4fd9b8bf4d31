"""correction=tis: truncated importance sampling."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from grpo_lightning.objective.checks import check_number
from grpo_lightning.objective.correction.ratio import sampler_ratio


@dataclass(frozen=True)
class TIS:
    """c = min(exp(d), cap): truncated importance sampling, per token.

    Source: Yao et al., Your Efficient RL Framework Secretly Brings You Off-Policy RL Training (2025).

    cap: in [1, inf). Below 1 it would shrink the tokens on which engine and trainer agree.
    """

    name: ClassVar[str] = "tis"
    per_row: ClassVar[bool] = False
    cap: float

    def __post_init__(self) -> None:
        check_number("correction.cap", self.cap, "[1, inf)")

    def __call__(self, old_logp: Tensor, mask: Tensor, *, sampler_logp: Tensor) -> Tensor:
        """old_logp, sampler_logp [N, T] float, mask [N, T] bool -> c [N, T]."""
        return sampler_ratio(old_logp, sampler_logp, mask).clamp(max=self.cap)

    def changed(self, old_logp: Tensor, mask: Tensor, *, sampler_logp: Tensor) -> Tensor:
        """Where the ratio was truncated, bool [N, T]."""
        return sampler_ratio(old_logp, sampler_logp, mask) > self.cap
