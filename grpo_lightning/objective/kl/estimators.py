"""kl=k1, abs, k2, k3: estimates that depend on d = ref_logp - logp alone."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from grpo_lightning.objective.checks import check_bool, check_number

MAX_LOG_RATIO = 20.0
ROUNDING = 1e-5  # of a log-probability in float32


@dataclass(frozen=True)
class Penalty:
    """What the estimates share. beta: coefficient in [0, inf); in_reward: in the reward instead of in the loss."""

    needs_reference: ClassVar[bool] = True
    beta: float
    in_reward: bool = False

    def __post_init__(self) -> None:
        check_number("kl.beta", self.beta, "[0, inf)")
        check_bool("kl.in_reward", self.in_reward)


@dataclass(frozen=True)
class K1(Penalty):
    """beta * (-d), d = ref_logp - logp.

    In the loss its expected gradient is zero: it belongs in the reward.

    Source: Schulman, Approximating KL Divergence (2020), k1.
    """

    name: ClassVar[str] = "k1"

    def __call__(self, logp: Tensor, ref_logp: Tensor) -> Tensor:
        return logp - ref_logp


@dataclass(frozen=True)
class Abs(Penalty):
    """beta * |d|, d = ref_logp - logp, where |d| > 1e-5, else 0.

    Its gradient is +-beta however small d is; what two passes of the same weights round differently has none.

    Source: the penalty `abs` of verl.
    """

    name: ClassVar[str] = "abs"

    def __call__(self, logp: Tensor, ref_logp: Tensor) -> Tensor:
        size = (ref_logp - logp).abs()
        return size.where(size > ROUNDING, 0)


@dataclass(frozen=True)
class K2(Penalty):
    """beta * d^2 / 2, d = ref_logp - logp.

    On-policy its gradient is that of KL(policy || reference).

    Source: Schulman, Approximating KL Divergence (2020), k2.
    """

    name: ClassVar[str] = "k2"

    def __call__(self, logp: Tensor, ref_logp: Tensor) -> Tensor:
        return (ref_logp - logp).square() / 2


@dataclass(frozen=True)
class K3(Penalty):
    """beta * (exp(d) - d - 1), d = ref_logp - logp clamped to +-20 (gradient 0 outside).

    The value estimates KL(policy || reference); the gradient is that of KL(reference || policy).

    Source: DeepSeekMath (arXiv 2402.03300), eq. 4; Schulman (2020), k3.
    """

    name: ClassVar[str] = "k3"

    def __call__(self, logp: Tensor, ref_logp: Tensor) -> Tensor:
        d = (ref_logp - logp).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        return torch.expm1(d) - d
