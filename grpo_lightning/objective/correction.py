"""correction: a factor c on the surrogate, for a sampler that is not quite the old policy.

The engine that samples and the trainer compute the same policy with other kernels, or in another precision, so they
differ in every token by d = old_logp - sampler_logp. The factor is made of the importance ratio exp(d) between the two.
It has no gradient and leaves the KL term and the weights w alone: a token with c = 0 stays in the denominators.

An option that truncates or masks also has `changed`, called like the option: where c is not the plain ratio, bool
[N, T]. `per_row` says that this is one answer per row, so that its statistics count rows instead of tokens.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from grpo_lightning.objective.checks import check_number
from grpo_lightning.objective.kl import MAX_LOG_RATIO


def sampler_ratio(old_logp: Tensor, sampler_logp: Tensor, mask: Tensor, *, per_row: bool = False) -> Tensor:
    """exp(d_{i,t}), or per row exp(sum_t d_{i,t}) on each of its tokens; [N, T], detached.

    d is 0 off the mask. What goes into exp, for a row the sum, is clamped to +-20.
    """
    d = (old_logp - sampler_logp).detach().where(mask, 0)
    if per_row:
        d = d.sum(dim=1, keepdim=True).expand_as(d)
    return d.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


@dataclass(frozen=True)
class NoCorrection:
    """c = 1: the sampler is taken to be the old policy."""

    name: ClassVar[str] = "none"

    def __call__(self, old_logp: Tensor, mask: Tensor) -> Tensor:
        """old_logp [N, T] float, mask [N, T] bool -> c [N, T]."""
        return torch.ones_like(old_logp)


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


@dataclass(frozen=True)
class Masked:
    """c = k where low <= k <= high, else 0. What icepop and sequence_mask share; k is the ratio per token or per row.

    low in [0, 1) or null (no lower bound), high in (1, inf): where engine and trainer agree nothing is masked.
    """

    per_row: ClassVar[bool]
    low: float | None
    high: float

    def __post_init__(self) -> None:
        if self.low is not None:
            check_number("correction.low", self.low, "[0, 1)")
        check_number("correction.high", self.high, "(1, inf)")

    def __call__(self, old_logp: Tensor, mask: Tensor, *, sampler_logp: Tensor) -> Tensor:
        """old_logp, sampler_logp [N, T] float, mask [N, T] bool -> c [N, T]."""
        outside = self.changed(old_logp, mask, sampler_logp=sampler_logp)
        return sampler_ratio(old_logp, sampler_logp, mask, per_row=self.per_row).masked_fill(outside, 0)

    def changed(self, old_logp: Tensor, mask: Tensor, *, sampler_logp: Tensor) -> Tensor:
        """What is masked, bool [N, T]."""
        k = sampler_ratio(old_logp, sampler_logp, mask, per_row=self.per_row)
        return (k < (self.low or 0)) | (k > self.high)


@dataclass(frozen=True)
class IcePop(Masked):
    """c = k where low <= k <= high, else 0, with k = exp(d_{i,t}).

    Tokens on which the two disagree are masked, the others multiplied by their ratio.

    Source: Every Step Evolves, the report of Ring-1T (arXiv 2510.18855), IcePop.
    """

    name: ClassVar[str] = "icepop"
    per_row: ClassVar[bool] = False


@dataclass(frozen=True)
class SequenceMask(Masked):
    """c = k where low <= k <= high, else 0, with k = exp(sum_t d_{i,t}) on every token of row i.

    Rows on which the two disagree are masked.

    A row inside the bounds is multiplied by its ratio, not by 1: otherwise the rows that are kept would still be
    weighed as the sampler drew them. Source: TRL 1.x, vllm_importance_sampling_mode="sequence_mask", which does so too.
    """

    name: ClassVar[str] = "sequence_mask"
    per_row: ClassVar[bool] = True
