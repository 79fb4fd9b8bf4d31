"""sampling: which prompts are drawn, and which groups of a rollout enter the buffer."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from grpo_lightning.objective.checks import check_bool, check_number
from grpo_lightning.objective.groups import group_moments


@dataclass(frozen=True)
class SampleAll:
    """Every group is kept, from one draw."""

    name: ClassVar[str] = "all"
    max_draws: ClassVar[int] = 1
    keep_surplus: ClassVar[bool] = False

    def keep(self, task_rewards: Tensor, group_ids: Tensor) -> set[int]:
        """task_rewards [N] float, group_ids [N] int -> ids of the groups that are kept: all."""
        return set(group_ids.tolist())


@dataclass(frozen=True)
class SampleDynamic:
    """A group is kept if max != min of its task rewards (NaN is left out), for at most max_draws draws.

    Source: DAPO (arXiv 2503.14476), eq. 11.

    max_draws: how often at most prompts are drawn to fill one rollout, an integer in [1, inf).
    keep_surplus: groups beyond the rollout's size are kept for the next one.
    """

    name: ClassVar[str] = "dynamic"
    max_draws: int = 10
    keep_surplus: bool = True

    def __post_init__(self) -> None:
        check_number("sampling.max_draws", self.max_draws, "[1, inf)", integer=True)
        check_bool("sampling.keep_surplus", self.keep_surplus)

    def keep(self, task_rewards: Tensor, group_ids: Tensor) -> set[int]:
        """task_rewards [N] float (NaN: none), group_ids [N] int -> ids of the groups that are kept."""
        return set(group_ids[group_moments(task_rewards, group_ids).varied].tolist())


@dataclass
class SampleFrontier:
    """P(prompt) = floor / n + (1 - floor) w / sum w,  w = 4 p (1 - p),  p its share of passes so far (unseen: 1/2).

    n training prompts; no prompt twice in one draw. After a visit p = rate p + (1 - rate) (share of the group that is
    correct); the first visit sets it. Every group is kept.
    Source: Learning to Reason at the Frontier of Learnability (arXiv 2502.12272), its p (1 - p); the rest is ours.

    floor in (0, 1]: 1 draws uniformly. rate in [0, 1): how much of the old pass rate stays.
    """

    name: ClassVar[str] = "frontier"
    max_draws: ClassVar[int] = 1
    keep_surplus: ClassVar[bool] = False
    needs_verdicts: ClassVar[bool] = True
    floor: float
    rate: float

    def __post_init__(self) -> None:
        check_number("sampling.floor", self.floor, "(0, 1]")
        check_number("sampling.rate", self.rate, "[0, 1)")
        self.pass_rates: dict[int, float] = {}  # by prompt id

    def keep(self, task_rewards: Tensor, group_ids: Tensor) -> set[int]:
        """As SampleAll.keep."""
        return set(group_ids.tolist())

    def choose(self, prompt_ids: list[int], n: int, key: tuple[int, int]) -> list[int]:
        """Places in `prompt_ids` of n different prompts; `key` (two ints >= 0) decides the draw."""
        p = np.array([self.pass_rates.get(prompt, 0.5) for prompt in prompt_ids])
        w = 4 * p * (1 - p)
        share = w / w.sum() if w.sum() > 0 else np.full(len(w), 1 / len(w))
        chance = self.floor / len(w) + (1 - self.floor) * share
        # The n largest of log chance + Gumbel noise are a draw without replacement.
        noisy = np.log(chance) + np.random.default_rng(key).gumbel(size=len(w))
        return [int(place) for place in np.argsort(-noisy, kind="stable")[:n]]

    def observe_groups(self, rates: list[tuple[int, float]]) -> None:
        """(prompt id, share of correct completions; NaN: unknown) of every group of a draw, once each."""
        for prompt, share in rates:
            if not math.isnan(share):
                before = self.pass_rates.get(prompt, share)
                self.pass_rates[prompt] = self.rate * before + (1 - self.rate) * share

    def state_dict(self) -> dict[str, Any]:
        return {"pass_rates": dict(self.pass_rates)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.pass_rates = dict(state["pass_rates"])
