"""kl=adaptive: a coefficient that follows the measured KL."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from grpo_lightning.objective.checks import call, check_bool, check_number
from grpo_lightning.objective.kl.estimators import K1, K2, K3, Abs
from grpo_lightning.objective.kl.gradient import K3Corrected, K3Plus

ESTIMATORS = {estimator.name: estimator for estimator in (K1, Abs, K2, K3, K3Plus, K3Corrected)}


@dataclass
class AdaptiveKL:
    """b * estimator, b = beta at first; after a rollout b *= 1 + clip(measured / target - 1, -0.2, 0.2) * n / horizon.

    n / horizon is at most 1. measured is the mean of the estimate over the tokens that the rollout was trained on, n
    their number of completions.
    A rollout in which nothing was measured leaves b as it is. At run time b is the attribute beta.

    Source: Ziegler et al. (arXiv 1909.08593), section 2.2, whose KL is of a whole completion; per token as in verl.

    estimator: name of another kl option.
    beta: the first value, in (0, inf), from which it follows the measurements; a part of the checkpoint.
    target: KL per token, in (0, inf).
    horizon: completions, in (0, inf).
    in_reward: in the reward instead of in the loss.
    """

    name: ClassVar[str] = "adaptive"
    needs_reference: ClassVar[bool] = True
    estimator: str
    beta: float
    target: float
    horizon: float
    in_reward: bool = False

    def __post_init__(self) -> None:
        if self.estimator not in ESTIMATORS:
            raise ValueError(f"kl.estimator must be one of {', '.join(ESTIMATORS)}, got {self.estimator!r}")
        for field in ("beta", "target", "horizon"):
            check_number(f"kl.{field}", getattr(self, field), "(0, inf)")
        check_bool("kl.in_reward", self.in_reward)

    def __call__(self, logp: Tensor, ref_logp: Tensor, *, log_ratio: Tensor | None = None) -> Tensor:
        estimate = ESTIMATORS[self.estimator](self.beta)
        return call(f"kl.estimator={self.estimator}", estimate, logp, ref_logp, log_ratio=log_ratio)

    def observe(self, measured: Mapping[str, float], completions: int) -> None:
        """measured["policy/kl"]: mean of the estimate over a rollout's steps; completions: how many were trained on."""
        kl = measured.get("policy/kl", math.nan)
        if not math.isnan(kl):
            error = min(max(kl / self.target - 1, -0.2), 0.2)
            self.beta *= 1 + error * min(completions / self.horizon, 1.0)  # so that it stays above 0

    def state_dict(self) -> dict[str, Any]:
        return {"beta": self.beta}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.beta = state["beta"]
