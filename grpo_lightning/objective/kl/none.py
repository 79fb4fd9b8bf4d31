"""kl=none: no KL term."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor


@dataclass(frozen=True)
class NoKL:
    """0: no KL term; the reference policy is not even loaded.

    Source: DAPO (arXiv 2503.14476), section 2.3.
    """

    name: ClassVar[str] = "none"
    needs_reference: ClassVar[bool] = False
    beta: ClassVar[float] = 0.0
    in_reward: ClassVar[bool] = False

    def __call__(self, logp: Tensor, ref_logp: Tensor) -> Tensor:
        return torch.zeros_like(logp)
