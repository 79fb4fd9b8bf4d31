"""Which rows are silent: their loss is exactly zero, so that the forward pass may leave them out."""

import torch

from grpo_lightning.objective.checks import call
from grpo_lightning.objective.objective import Objective
from grpo_lightning.objective.pairs import named, trait


def silent_without_advantage(objective: Objective) -> bool:
    """Whether a row whose advantages are all 0 has a loss, and a gradient, of exactly 0 under this objective."""
    kl_in_loss = objective.needs_reference and not objective.kl_in_reward
    if kl_in_loss or trait(objective.entropy, "name") != "none":
        return False
    # By trial: a clip of the user's own may do anything.
    logp = torch.linspace(-3, -0.01, 32)[None].requires_grad_()
    old, mask = logp.detach().flip(1), torch.ones(1, 32, dtype=torch.bool)
    ratio, advantages = (logp - old).exp(), torch.zeros_like(old)
    loss = call(named("clip", objective.clip), objective.clip, ratio, advantages, logp, mask=mask, old_logp=old)
    (slope,) = torch.autograd.grad(loss.sum(), logp, allow_unused=True, materialize_grads=True)
    return not bool(loss.any() or slope.any())
