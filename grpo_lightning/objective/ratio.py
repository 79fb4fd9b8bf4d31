"""ratio: the level at which the policy is compared with the one that sampled.

Every option turns the log-ratios of the tokens, x = logp - old_logp [N, T] (0 off the mask), into the logarithm of the
importance ratio [N, T] that the clip sees. The objective clamps it to +-20 and takes the exponential.
`per_row` says that the ratio is one number per row, gradient and all, so that the advantage must be one number per row
too and statistics count rows instead of tokens. `of_row` says that at least its value is the row's.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenRatio:
    """log rho_{i,t} = x_{i,t}.

    Source: DeepSeekMath (arXiv 2402.03300), eq. 3.
    """

    name: ClassVar[str] = "token"
    per_row: ClassVar[bool] = False

    def __call__(self, log_ratio: Tensor, mask: Tensor) -> Tensor:
        """log_ratio [N, T] float, mask [N, T] bool -> log of the ratio [N, T]."""
        return log_ratio


@dataclass(frozen=True)
class SequenceRatio:
    """log s_i = (1 / n_i) sum_t m_{i,t} x_{i,t}: the geometric mean of the row's token ratios, on each of its tokens.

    The gradient goes through the mean.

    Source: GSPO (arXiv 2507.18071), eq. 7.
    """

    name: ClassVar[str] = "sequence"
    per_row: ClassVar[bool] = True
    of_row: ClassVar[bool] = True

    def __call__(self, log_ratio: Tensor, mask: Tensor) -> Tensor:
        """log_ratio [N, T] float, mask [N, T] bool -> log of the ratio [N, T], constant along each row."""
        return _mean(log_ratio, mask).expand_as(log_ratio)


@dataclass(frozen=True)
class SequenceTokenRatio:
    """log s_{i,t} = sg[(1 / n_i) sum_t m_{i,t} x_{i,t}] + x_{i,t} - sg[x_{i,t}], sg[.] without gradient.

    The value is that of ratio=sequence, the gradient goes to each token on its own, so that advantages may vary within
    a row. Where they do not, loss and gradient are those of ratio=sequence.

    Source: GSPO-token (arXiv 2507.18071), eq. 14.
    """

    name: ClassVar[str] = "sequence_token"
    per_row: ClassVar[bool] = False
    of_row: ClassVar[bool] = True

    def __call__(self, log_ratio: Tensor, mask: Tensor) -> Tensor:
        """log_ratio [N, T] float, mask [N, T] bool -> log of the ratio [N, T]."""
        return _mean(log_ratio.detach(), mask) + (log_ratio - log_ratio.detach())


@dataclass(frozen=True)
class SequenceArithmeticRatio:
    """log w_i = log((1 / n_i) sum_t m_{i,t} exp(x_{i,t})): the arithmetic mean of the row's token ratios.

    On each token of the row; the gradient goes through the mean.

    Source: GRPO-S (arXiv 2508.04349 v6), eq. 10.
    """

    name: ClassVar[str] = "sequence_arithmetic"
    per_row: ClassVar[bool] = True
    of_row: ClassVar[bool] = True

    def __call__(self, log_ratio: Tensor, mask: Tensor) -> Tensor:
        """log_ratio [N, T] float, mask [N, T] bool -> log of the ratio [N, T], constant along each row."""
        counted = mask | ~mask.any(dim=1, keepdim=True)  # a row without tokens keeps a sum that is finite
        total = torch.logsumexp(log_ratio.where(mask, 0).masked_fill(~counted, -torch.inf), dim=1, keepdim=True)
        lengths = counted.sum(dim=1, keepdim=True).clamp(min=1).to(total.dtype)
        return (total - lengths.log()).expand_as(log_ratio)


def _mean(log_ratio: Tensor, mask: Tensor) -> Tensor:
    lengths = mask.sum(dim=1, keepdim=True).clamp(min=1)
    return log_ratio.where(mask, 0).sum(dim=1, keepdim=True) / lengths
