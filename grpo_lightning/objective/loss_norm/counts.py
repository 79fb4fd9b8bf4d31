"""What the weights are counted from."""

from torch import Tensor

from grpo_lightning.objective.groups import exact_dtype


def counts(mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """m [N, T], n_i [N, 1] and B, none of the divisors below 1."""
    m = mask.to(exact_dtype(mask.device))
    return m, m.sum(1, keepdim=True).clamp(min=1), mask.any(1).sum().clamp(min=1)
