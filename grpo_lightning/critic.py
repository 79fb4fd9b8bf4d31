"""critic: what GRPO left out of PPO, an estimate of the return from every position of a completion.

V_{i,t} is the value of the state before token t: the prompt and the tokens of the completion before it. With it
advantage=gae compares what a token brought with what was expected there, and so needs no group.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn

from grpo_lightning.logps import hidden_states
from grpo_lightning.model import load_policy
from grpo_lightning.objective.checks import check_number
from grpo_lightning.rollout.batch import Batch


def check_options(*, coef: float, lr: float | None, epsilon: float | None) -> None:
    """Raise ValueError, naming the option, where a number of the critic is out of its range."""
    check_number("critic.coef", coef, "(0, inf)")
    if lr is not None:
        check_number("critic.lr", lr, "[0, inf)")
    if epsilon is not None:
        check_number("critic.epsilon", epsilon, "(0, inf)")


class Critic(nn.Module):
    """A linear map of hidden states to values; it begins at zero, so that the first values are all 0.

    value loss = coef / N * sum_{i,t} 1/2 max((V - R)^2, (V_c - R)^2), V_c = clip(V, V_old - epsilon, V_old + epsilon),
    over the N loss tokens of the minibatch; R is what the advantage says was returned. epsilon null: (V - R)^2 alone.
    Source: PPO (arXiv 1707.06347), eq. 9, its squared-error value loss; the clipping is that of its released code.

    Args:
        policy: the model whose hidden states are taken, or that the trunk is shaped like.
        trunk: a model of its own without an output layer; None takes the hidden states of the policy, into which the
            gradient of the value loss then goes, too.
        coef: in (0, inf). lr: learning rate, in [0, inf); null is that of the policy. epsilon: in (0, inf), or null.
    """

    def __init__(
        self, policy: nn.Module, *, coef: float, lr: float | None, epsilon: float | None, trunk: nn.Module | None = None
    ) -> None:
        super().__init__()
        check_options(coef=coef, lr=lr, epsilon=epsilon)
        self.coef, self.lr, self.epsilon, self.trunk = coef, lr, epsilon, trunk
        width = policy.get_output_embeddings().weight.shape[1]  # type: ignore[operator]
        self.head = nn.Linear(width, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def values(self, batch: Batch, policy: nn.Module, hidden: Tensor) -> Tensor:
        """V [N, T] float32 of the batch; hidden [K, D] is what the policy predicted its completion tokens with."""
        if self.trunk is not None:
            hidden = hidden_states(self.trunk, batch, policy).flatten(0, 1)[batch.places]
        values: Tensor = self.head(hidden.to(self.head.weight.dtype)).squeeze(-1)
        return batch.spread(values.float())

    def loss(self, values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, tokens: int) -> Tensor:
        """The share of these rows, all [N, T], in the value loss of a minibatch with `tokens` loss tokens."""
        error = (values - returns).square()
        if self.epsilon is not None:
            near = old_values + (values - old_values).clamp(-self.epsilon, self.epsilon)
            error = torch.maximum(error, (near - returns).square())
        return self.coef * error.where(mask, 0).sum() / 2 / tokens


def head(policy: nn.Module, path: str, attn_implementation: str | None, **options: Any) -> Critic:
    """critic=head: a linear layer on the policy's own hidden states, trained together with it."""
    return Critic(policy, **options)


def model(policy: nn.Module, path: str, attn_implementation: str | None, **options: Any) -> Critic:
    """critic=model: a model of its own that begins as the policy does; its memory is what GRPO saves."""
    own = load_policy(path, attn_implementation=attn_implementation)
    return Critic(policy, trunk=cast(nn.Module, own.base_model).train(), **options)  # dropout is off in either mode
