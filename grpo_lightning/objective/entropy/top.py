"""entropy=top: the surrogate of the most uncertain tokens alone."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from grpo_lightning.objective.checks import check_number


@dataclass(frozen=True)
class TopEntropy:
    """l_{i,t} [H_{i,t} >= the quantile of order 1 - fraction of H over the minibatch's tokens].

    The quantile interpolates linearly between the two nearest. The others stay in the denominators; KL is not masked.
    Source: Beyond the 80/20 Rule (arXiv 2506.01939), eq. 5, there with fraction 0.2.

    fraction: of the tokens that are kept, in [0, 1].
    """

    name: ClassVar[str] = "top"
    fraction: float

    def __post_init__(self) -> None:
        check_number("entropy.fraction", self.fraction, "[0, 1]")

    def select(self, logp: Tensor, advantages: Tensor, mask: Tensor, *, entropy: Tensor) -> Tensor:
        """All [N, T] of a whole minibatch -> the tokens that are kept [N, T] bool."""
        values = entropy[mask].double().sort().values
        if not len(values):
            return mask
        # torch.quantile does the same for at most 16 million values.
        place = (1 - self.fraction) * (len(values) - 1)
        below, above = values[int(place)], values[min(int(place) + 1, len(values) - 1)]
        return mask & (entropy.double() >= torch.lerp(below, above, place - int(place)))

    def __call__(self, token_losses: Tensor, mask: Tensor, *, selected: Tensor) -> Tensor:
        """token_losses [N, T] float, mask and selected [N, T] bool -> token losses [N, T]."""
        return token_losses.where(selected, 0)
