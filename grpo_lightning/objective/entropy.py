"""entropy: what the entropy of the policy does to the loss of each token."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor


@dataclass(frozen=True)
class NoEntropy:
    """The token losses stay as they are."""

    name: ClassVar[str] = "none"

    def __call__(self, token_losses: Tensor, mask: Tensor) -> Tensor:
        """token_losses [N, T] float, mask [N, T] bool -> token losses [N, T]."""
        return token_losses
