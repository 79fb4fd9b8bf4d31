"""entropy=none: the token losses stay as they are."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor


@dataclass(frozen=True)
class NoEntropy:
    """No term. Source: DeepSeekMath (arXiv 2402.03300), eq. 3, which has none."""

    name: ClassVar[str] = "none"

    def __call__(self, token_losses: Tensor, mask: Tensor) -> Tensor:
        """token_losses [N, T] float, mask [N, T] bool -> token losses [N, T]."""
        return token_losses
