"""loss_norm: the weight w [N, T] of every token, so that loss = sum w * (token losses).

Counted over one whole minibatch (all micro-batches and ranks) from the loss mask m alone: n_i tokens of row i, B rows
with at least one, P groups with such a row, N_q tokens of group q, N tokens in all. Every option is called with mask
[N, T] bool and group_ids [N] int and returns w [N, T] float64.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from grpo_lightning.objective.checks import check_number
from grpo_lightning.objective.groups import exact_dtype, group_index, group_sum


def _counts(mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """m [N, T], n_i [N, 1] and B, none of the divisors below 1."""
    m = mask.to(exact_dtype(mask.device))
    return m, m.sum(1, keepdim=True).clamp(min=1), mask.any(1).sum().clamp(min=1)


@dataclass(frozen=True)
class SequenceNorm:
    """w = m / (B n_i): the mean over rows of each row's mean. Source: DeepSeekMath (arXiv 2402.03300), eq. 3."""

    name: ClassVar[str] = "sequence"
    rows_weigh_equally: ClassVar[bool] = True

    def __call__(self, mask: Tensor, group_ids: Tensor) -> Tensor:
        m, n, rows = _counts(mask)
        return m / (rows * n)


@dataclass(frozen=True)
class TokenNorm:
    """w = m / N: the mean over all tokens. Source: the released code of DAPO (arXiv 2503.14476)."""

    name: ClassVar[str] = "token"
    rows_weigh_equally: ClassVar[bool] = False

    def __call__(self, mask: Tensor, group_ids: Tensor) -> Tensor:
        return _counts(mask)[0] / mask.sum().clamp(min=1)


@dataclass(frozen=True)
class PromptNorm:
    """w = m / (P N_q): the mean over groups of each group's token mean.

    Source: DAPO (arXiv 2503.14476), eq. 8 as printed; its released code is `token`.
    """

    name: ClassVar[str] = "prompt"
    rows_weigh_equally: ClassVar[bool] = False

    def __call__(self, mask: Tensor, group_ids: Tensor) -> Tensor:
        index, groups = group_index(group_ids)
        m = _counts(mask)[0]
        tokens = group_sum(m.sum(1), index, groups)
        return m / ((tokens > 0).sum().clamp(min=1) * tokens.clamp(min=1)[index][:, None])


@dataclass(frozen=True)
class ConstantNorm:
    """w = m / (B L). Source: Dr. GRPO (arXiv 2503.20783), section 3.2, the constant being the generation budget.

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
        m, _, rows = _counts(mask)
        return m / (rows * self.length)


@dataclass(frozen=True)
class SequenceSumNorm:
    """w = m / B: the mean over rows of each row's sum, a completion being one action.

    Source: RLOO (arXiv 2402.14740).
    """

    name: ClassVar[str] = "sequence_sum"
    rows_weigh_equally: ClassVar[bool] = False

    def __call__(self, mask: Tensor, group_ids: Tensor) -> Tensor:
        m, _, rows = _counts(mask)
        return m / rows
