"""advantage=gae: generalised advantage estimation, PPO's advantage from the values of a critic."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from grpo_lightning.objective.advantage.tokens import gae, token_rewards, whiten
from grpo_lightning.objective.checks import check_bool, check_number
from grpo_lightning.objective.groups import exact_dtype


@dataclass(frozen=True)
class GAE:
    """A_{i,t} = sum_{s >= t} (gamma * lam)^(s-t) delta_{i,s}, delta_{i,s} = r_{i,s} + gamma * V_{i,s+1} - V_{i,s};
    with whiten then (A - mean) / (std + eps) over the tokens of the rollout.

    r_{i,s} = r_i [s is last] - kl_{i,s}, with kl only at kl.in_reward=true. V is the critic's value before token s, and
    0 behind the last one, of truncated completions as well. Without a critic V is 0: the reward-to-go, discounted by
    gamma lam. s - t counts completion tokens. whiten: A over all those of the rollout less its mean, by std + eps.

    Source: GAE (arXiv 1506.02438), eq. 16; in PPO (arXiv 1707.06347), eq. 11.

    gamma: discount per token, in (0, 1].
    lam: lambda in [0, 1]; 0 trusts the critic alone, 1 the rewards alone.
    whiten: the advantages, not the value targets.
    unbiased: divide the squared deviations by n - 1 (true) or n (false), in whitening.
    eps: added to std; in [0, inf).
    """

    name: ClassVar[str] = "gae"
    group_baseline: ClassVar[bool] = False
    varies_within_row: ClassVar[bool] = True
    gamma: float = 1.0
    lam: float = 1.0
    whiten: bool = True
    unbiased: bool = True
    eps: float = 1e-6

    def __post_init__(self) -> None:
        check_number("advantage.gamma", self.gamma, "(0, 1]")
        check_number("advantage.lam", self.lam, "[0, 1]")
        check_bool("advantage.whiten", self.whiten)
        check_bool("advantage.unbiased", self.unbiased)
        check_number("advantage.eps", self.eps, "[0, inf)")

    def __call__(
        self,
        rewards: Tensor,
        group_ids: Tensor,
        mask: Tensor,
        *,
        kl_penalty: Tensor | None = None,
        values: Tensor | None = None,
    ) -> Tensor:
        """rewards [N] float (NaN: none), mask [N, T] bool, kl_penalty [N, T] = beta kl, values [N, T] -> A [N, T]."""
        counted = mask & ~torch.isnan(rewards)[:, None]
        advantages = gae(token_rewards(rewards, mask, kl_penalty), values, mask, self.gamma, self.lam).where(counted, 0)
        return whiten(advantages, counted, unbiased=self.unbiased, eps=self.eps) if self.whiten else advantages

    def returns(self, rewards: Tensor, mask: Tensor, values: Tensor, *, kl_penalty: Tensor | None = None) -> Tensor:
        """What the critic is trained towards [N, T]: A before whitening + V; 0 off the mask and without a reward."""
        counted = mask & ~torch.isnan(rewards)[:, None]
        advantages = gae(token_rewards(rewards, mask, kl_penalty), values, mask, self.gamma, self.lam)
        return (advantages + values.to(exact_dtype(mask.device))).where(counted, 0)
