"""loss_norm=sequence, sequence_sum, luspo, constant, dcpo: each row on its own, then their mean or sum."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from grpo_lightning.objective.checks import check_number
from grpo_lightning.objective.loss_norm.counts import counts


@dataclass(frozen=True)
class SequenceNorm:
    """w = m / (B n_i): the mean over rows of each row's mean.

    Source: DeepSeekMath (arXiv 2402.03300), eq. 3.
    """

    name: ClassVar[str] = "sequence"
    rows_weigh_equally: ClassVar[bool] = True

    def __call__(self, mask: Tensor, group_ids: Tensor) -> Tensor:
        m, n, rows = counts(mask)
        return m / (rows * n)


@dataclass(frozen=True)
class SequenceSumNorm:
    """w = m / B: the mean over rows of each row's sum, a completion being one action.

    Source: RLOO (arXiv 2402.14740).
    """

    name: ClassVar[str] = "sequence_sum"
    rows_weigh_equally: ClassVar[bool] = False

    def __call__(self, mask: Tensor, group_ids: Tensor) -> Tensor:
        m, _, rows = counts(mask)
        return m / rows


@dataclass(frozen=True)
class LUSPONorm(SequenceSumNorm):
    """w = m / B, which multiplies the one surrogate of a row at ratio=sequence by the row's length n_i.

    The weights are those of sequence_sum. That GSPO divides each row by n_i and this does not is LUSPO's whole change,
    so weighing by length is meant, and not warned of.

    Source: LUSPO (arXiv 2602.05261).
    """

    name: ClassVar[str] = "luspo"
    rows_weigh_equally: ClassVar[bool] = True


@dataclass(frozen=True)
class ConstantNorm:
    """w = m / (B * length): each row's sum over a constant, L = length.

    Source: Dr. GRPO (arXiv 2503.20783), section 3.2, the constant being the generation budget.

    length: L > 0 in tokens, the longest completion allowed; None is an error when the weights are wanted, because the
    padded width would change from batch to batch.
    """

    name: ClassVar[str] = "constant"
    rows_weigh_equally: ClassVar[bool] = False
    length: float | None = None

    def __post_init__(self) -> None:
        if self.length is not None:
            check_number("loss_norm.length", self.length, "(0, inf)")

    def __call__(self, mask: Tensor, group_ids: Tensor) -> Tensor:
        if self.length is None:
            raise ValueError("loss_norm=constant needs loss_norm.length, the longest completion in tokens (L)")
        m, _, rows = counts(mask)
        return m / (rows * self.length)


@dataclass(frozen=True)
class RowSumNorm:
    """w = m / n_i: the sum over rows of each row's mean, without a mean over the rows.

    The loss grows with the number of rows in a minibatch, so the learning rate belongs to that number. The released
    code divides each micro-batch by its own tokens, which is this where a micro-batch is one row.

    Source: DCPO (arXiv 2509.02333), only token mean (OTM).
    """

    name: ClassVar[str] = "dcpo"
    rows_weigh_equally: ClassVar[bool] = True

    def __call__(self, mask: Tensor, group_ids: Tensor) -> Tensor:
        m, n, _ = counts(mask)
        return m / n
