"""kl=k3_plus, kl=k3_corrected: the value of k3 with a gradient that points towards KL(policy || reference)."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from grpo_lightning.objective.kl.estimators import K2, K3, MAX_LOG_RATIO, Penalty


@dataclass(frozen=True)
class K3Plus(Penalty):
    """beta * (sg[k3 - k2] + k2), k3 = exp(d) - d - 1, k2 = d^2 / 2, d = ref_logp - logp; sg[.] without gradient.

    The value is that of k3, the gradient that of k2, which on-policy is the gradient of KL(policy || reference).

    Source: the straight-through `k3+` of verl.
    """

    name: ClassVar[str] = "k3_plus"

    def __call__(self, logp: Tensor, ref_logp: Tensor) -> Tensor:
        gradient = K2(self.beta)(logp, ref_logp)
        return gradient + (K3(self.beta)(logp, ref_logp) - gradient).detach()


@dataclass(frozen=True)
class K3Corrected(Penalty):
    """beta * rho * (exp(d) - d - 1), d = ref_logp - logp, rho = exp(logp - old_logp), both exponents clamped to +-20.

    The importance ratio makes the estimate unbiased for tokens that an older policy sampled, and its gradient, through
    rho as well, that of KL(policy || reference): on-policy -d per token. In the reward rho is 1.

    Source: DeepSeek-V3.2 (arXiv 2512.02556), unbiased KL estimate.
    """

    name: ClassVar[str] = "k3_corrected"

    def __call__(self, logp: Tensor, ref_logp: Tensor, *, log_ratio: Tensor) -> Tensor:
        return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp() * K3(self.beta)(logp, ref_logp)
