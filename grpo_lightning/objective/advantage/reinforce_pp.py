"""advantage=reinforce_pp: reward-to-go per token, whitened over all tokens of the rollout."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from grpo_lightning.objective.advantage.tokens import gae, token_rewards, whiten
from grpo_lightning.objective.checks import check_bool, check_number


@dataclass(frozen=True)
class ReinforcePP:
    """A_{i,t} = (R_{i,t} - mean) / (std + eps), R_{i,t} = sum_{s >= t} gamma^(s-t) (r_i [s is last] - kl_{i,s}).

    mean and std are over every completion token of the rollout whose row has a reward; all returns equal: A = 0.
    s - t counts completion tokens, so padding does not discount. `kl` is there only with kl.in_reward=true.

    Source: REINFORCE++ (arXiv 2501.03262), section 3.

    gamma: discount per token, in (0, 1].
    unbiased: divide the squared deviations by n - 1 (true) or n (false).
    eps: added to std; in [0, inf).
    """

    name: ClassVar[str] = "reinforce_pp"
    group_baseline: ClassVar[bool] = False
    gamma: float = 1.0
    unbiased: bool = True
    eps: float = 1e-6

    def __post_init__(self) -> None:
        check_number("advantage.gamma", self.gamma, "(0, 1]")
        check_bool("advantage.unbiased", self.unbiased)
        check_number("advantage.eps", self.eps, "[0, inf)")

    @property
    def varies_within_row(self) -> bool:
        return self.gamma != 1

    def __call__(self, rewards: Tensor, group_ids: Tensor, mask: Tensor, *, kl_penalty: Tensor | None = None) -> Tensor:
        """rewards [N] float (NaN: none), mask [N, T] bool, kl_penalty [N, T] = beta kl -> A [N, T], 0 off the mask."""
        returns = gae(token_rewards(rewards, mask, kl_penalty), None, mask, self.gamma, 1.0)
        return whiten(returns, mask & ~torch.isnan(rewards)[:, None], unbiased=self.unbiased, eps=self.eps)
