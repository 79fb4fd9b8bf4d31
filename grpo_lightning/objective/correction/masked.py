"""correction=icepop, correction=sequence_mask: what the engine and the trainer disagree on is masked."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from grpo_lightning.objective.checks import check_number
from grpo_lightning.objective.correction.ratio import sampler_ratio


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
