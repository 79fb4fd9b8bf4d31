"""ratio: the level at which the policy is compared with the one that sampled.

Every option turns the log-ratios of the tokens, x = logp - old_logp [N, T] (0 off the mask), into the logarithm of the
importance ratio [N, T] that the clip sees. The objective clamps it to +-20 and takes the exponential.
`per_row` says that the ratio is one number per row, so that statistics count rows instead of tokens.
"""

from dataclasses import dataclass
from typing import ClassVar

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

    The gradient goes through the mean. Source: GSPO (arXiv 2507.18071), eq. 7.
    """

    name: ClassVar[str] = "sequence"
    per_row: ClassVar[bool] = True

    def __call__(self, log_ratio: Tensor, mask: Tensor) -> Tensor:
        """log_ratio [N, T] float, mask [N, T] bool -> log of the ratio [N, T], constant along each row."""
        lengths = mask.sum(dim=1, keepdim=True).clamp(min=1)
        return (log_ratio.where(mask, 0).sum(dim=1, keepdim=True) / lengths).expand_as(log_ratio)
