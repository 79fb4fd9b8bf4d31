"""correction=none: the sampler is taken to be the old policy."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor


@dataclass(frozen=True)
class NoCorrection:
    """c = 1: the sampler is taken to be the old policy."""

    name: ClassVar[str] = "none"

    def __call__(self, old_logp: Tensor, mask: Tensor) -> Tensor:
        """old_logp [N, T] float, mask [N, T] bool -> c [N, T]."""
        return torch.ones_like(old_logp)
