"""entropy=bonus, entropy=adaptive: the entropy of the policy as a term of the loss, with a coefficient or a target."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from grpo_lightning.objective.checks import check_number


@dataclass(frozen=True)
class Bonus:
    """l_{i,t} - coef H_{i,t}.

    H is the entropy of the policy at the position, in nats; it is weighed by `loss_norm` as the surrogate is.
    Source: Mnih et al., A3C (arXiv 1602.01783), section 4.

    coef in (-inf, inf): positive keeps the policy uncertain.
    """

    name: ClassVar[str] = "bonus"
    differentiates: ClassVar[bool] = True
    coef: float

    def __post_init__(self) -> None:
        check_number("entropy.coef", self.coef, "(-inf, inf)")

    def __call__(self, token_losses: Tensor, mask: Tensor, *, entropy: Tensor) -> Tensor:
        """token_losses, entropy [N, T] float, mask [N, T] bool -> token losses [N, T]."""
        return token_losses - self.coef * entropy


@dataclass
class AdaptiveBonus:
    """l_{i,t} - coef H_{i,t}, or l_{i,t} where the mean entropy is > target.

    H is the entropy of the policy at the position, in nats. After each rollout coef += delta where its mean entropy was
    below the target, coef -= delta where above, within [min, max].
    Source: Skywork Open Reasoner 1 (arXiv 2505.22312), adaptive entropy control, there at every step.

    target: nats a token, in [0, inf). coef: at the start. delta in (0, inf). min <= coef <= max, each in [0, inf).
    """

    name: ClassVar[str] = "adaptive"
    differentiates: ClassVar[bool] = True
    target: float
    coef: float
    delta: float
    min: float
    max: float

    def __post_init__(self) -> None:
        check_number("entropy.target", self.target, "[0, inf)")
        check_number("entropy.delta", self.delta, "(0, inf)")
        check_number("entropy.max", self.max, "[0, inf)")
        check_number("entropy.min", self.min, f"[0, {self.max}]")
        check_number("entropy.coef", self.coef, f"[{self.min}, {self.max}]")
        self.acts = True  # whether the entropy measured last was not above the target

    def __call__(self, token_losses: Tensor, mask: Tensor, *, entropy: Tensor) -> Tensor:
        """token_losses, entropy [N, T] float, mask [N, T] bool -> token losses [N, T]."""
        return token_losses - self.coef * entropy if self.acts else token_losses

    def observe(self, measured: Mapping[str, float], completions: int) -> None:
        """Move the coefficient by what a rollout's steps measured as "policy/entropy"."""
        entropy = measured["policy/entropy"]
        step = self.delta if entropy < self.target else -self.delta if entropy > self.target else 0.0
        self.coef = min(max(self.coef + step, self.min), self.max)
        self.acts = entropy <= self.target

    def state_dict(self) -> dict[str, Any]:
        return {"coef": self.coef, "acts": self.acts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.coef, self.acts = state["coef"], state["acts"]
