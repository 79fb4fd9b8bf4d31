"""entropy=clip_cov, entropy=kl_cov: tokens that drive the entropy down most are held back.

The change of the entropy in a policy gradient step is minus the covariance of log-probability and advantage; a token's
share of it is Cov_{i,t} = (logp_{i,t} - mean logp) (A_{i,t} - mean A), the means over the tokens of the minibatch.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from grpo_lightning.objective.checks import check_number
from grpo_lightning.objective.groups import exact_dtype
from grpo_lightning.objective.kl import MAX_LOG_RATIO


def covariances(logp: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Cov [N, T] of every token, 0 off the mask."""
    dtype = exact_dtype(mask.device)
    tokens = mask.sum().clamp(min=1)
    centred = [v.to(dtype) - v.to(dtype).where(mask, 0).sum() / tokens for v in (logp, advantages)]
    return (centred[0] * centred[1]).where(mask, 0)


@dataclass(frozen=True)
class ClipCov:
    """0 for max(1, floor(fraction N)) tokens, drawn at random among those with low < Cov_{i,t} < high; else l_{i,t}.

    Fewer where fewer are there. Source: The Entropy Mechanism (arXiv 2505.22617), eq. 11 and 12; at least one token, as
    in its released code.

    fraction in (0, 1); low < high. seed: of the draw, which also depends on the number of the optimiser step.
    """

    name: ClassVar[str] = "clip_cov"
    fraction: float
    low: float
    high: float
    seed: int = 0

    def __post_init__(self) -> None:
        check_number("entropy.fraction", self.fraction, "(0, 1)")
        check_number("entropy.low", self.low, "(-inf, inf)")
        check_number("entropy.high", self.high, f"({self.low}, inf)")
        check_number("entropy.seed", self.seed, "[0, inf)", integer=True)

    def select(self, logp: Tensor, advantages: Tensor, mask: Tensor, *, step: int) -> Tensor:
        """logp, advantages [N, T] of a whole minibatch, mask [N, T] bool, step int -> what is held back, bool."""
        cov = covariances(logp, advantages, mask)
        candidates = (mask & (cov > self.low) & (cov < self.high)).flatten().nonzero().flatten()
        # In the order of their covariance, so that the draw does not depend on where a row lies.
        candidates = candidates[cov.flatten()[candidates].argsort(stable=True)]
        draw = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(self.seed * 2**32 + step))
        count = max(1, int(self.fraction * int(mask.sum())))
        return _places(candidates[draw[:count].to(candidates.device)], mask)

    def __call__(self, token_losses: Tensor, mask: Tensor, *, selected: Tensor) -> Tensor:
        """token_losses [N, T] float, mask and selected [N, T] bool -> token losses [N, T]."""
        return token_losses.masked_fill(selected, 0)


@dataclass(frozen=True)
class KLCov:
    """l_{i,t} + coef (exp(x) - x - 1), x = logp - old_logp, for the max(1, floor(fraction N)) tokens of largest Cov.

    That is the k3 estimate of KL(old || current): 0, with its gradient, where they are the same, as in the first step
    after a rollout. (The released code takes |x| for it, whose gradient at x = 0 is up to rounding.)

    Source: The Entropy Mechanism (arXiv 2505.22617), eq. 13 and 14; at least one token, as in its released code.

    fraction in (0, 1). coef: of the KL, in [0, inf).
    """

    name: ClassVar[str] = "kl_cov"
    fraction: float
    coef: float

    def __post_init__(self) -> None:
        check_number("entropy.fraction", self.fraction, "(0, 1)")
        check_number("entropy.coef", self.coef, "[0, inf)")

    def select(self, logp: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        """logp, advantages [N, T] of a whole minibatch, mask [N, T] bool -> the tokens that are punished, bool."""
        cov = covariances(logp, advantages, mask).masked_fill(~mask, -torch.inf).flatten()
        count = min(max(1, int(self.fraction * int(mask.sum()))), int(mask.sum()))
        return _places(cov.topk(count).indices, mask)

    def __call__(
        self, token_losses: Tensor, mask: Tensor, *, selected: Tensor, logp: Tensor, old_logp: Tensor
    ) -> Tensor:
        """All [N, T], float but for the bool mask and selected -> token losses [N, T]."""
        x = (logp - old_logp).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        return token_losses + self.coef * (torch.expm1(x) - x).where(selected, 0)


def _places(indices: Tensor, mask: Tensor) -> Tensor:
    chosen = torch.zeros(mask.numel(), dtype=torch.bool, device=mask.device)
    chosen[indices] = True
    return chosen.view(mask.shape)
