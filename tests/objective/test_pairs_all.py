"""Any two options of different groups compose, and train on finite numbers, or refuse with both names."""

import itertools
from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from grpo_lightning.objective.pairs import named
from tests.objective.options import OPTIONS, mask_of, option, plain

GROUPS = tuple(OPTIONS)
N, T = 6, 5
IDS = torch.tensor([0, 0, 0, 1, 1, 1])
MASK = mask_of([3, 1, 5, 2, 4, 4], T)


def noise(seed: int) -> torch.Tensor:
    return torch.randn(N, T, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def run(objective) -> None:
    """A whole rollout's way: shaped rewards, filter, advantages, selection, loss, its gradient."""
    lengths = MASK.sum(1)
    task, correct = (
        torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0, 0.0], dtype=torch.float64),
        IDS.new_tensor([1, 0, 1, 0, 1, 0]),
    )
    truncated = torch.tensor([False, False, True, False, False, False])
    old = noise(1) - 2
    ref, sampler, logp = old + noise(2), old + 0.1 * noise(3), (old + 0.3 * noise(4)).requires_grad_()
    assert objective.sampling.keep(task, IDS) == {0, 1}
    rewards = objective.shaped_rewards(task, lengths, truncated)
    penalty = objective.kl_penalty(old, ref, MASK) if objective.kl_in_reward else None
    entropy = noise(5).abs()
    advantages = objective.advantages(
        rewards, IDS, MASK, correct=correct.bool(), components={"exact": task, "format": 1 - task},
        component_weights={"exact": 1.0, "format": 0.5}, kl_penalty=penalty,
        step_rewards=torch.stack([task, 1 - task], 1), step_ends=torch.stack([lengths // 2, lengths - 1], 1),
        entropy=entropy, prompt_ids=IDS, values=noise(6),
    )  # fmt: skip
    assert advantages.isfinite().all() and not advantages[~MASK].any()
    keep = objective.keep_rows(rewards, truncated, IDS, correct=correct.bool())
    mask = MASK & keep[:, None]
    selected = objective.select(logp, advantages, mask, entropy=entropy, step=3) if objective.selects else None
    out = objective.loss(
        logp, old, advantages, mask, IDS, ref, objective.weights(mask, IDS), sampler_logp=sampler, entropy=entropy,
        selected=selected,
    )  # fmt: skip
    out.loss.backward()
    assert out.loss.isfinite() and logp.grad.isfinite().all() and not logp.grad[~mask].any()
    assert all(total.isfinite() and count >= 0 for total, count in out.metrics.values())


@pytest.mark.parametrize(("first", "second"), list(itertools.combinations(GROUPS, 2)), ids=lambda group: group)
def test_two_options_compose_or_refuse_by_name(first, second):
    for name, other in itertools.product(OPTIONS[first], OPTIONS[second]):
        parts = {first: deepcopy(option(first, name)), second: deepcopy(option(second, other))}
        if hasattr(parts.get("overlong"), "max_length"):
            parts["overlong"] = replace(parts["overlong"], max_length=5)
        try:
            objective = deepcopy(replace(plain(), **parts))
        except ValueError as error:
            for group, part in parts.items():
                assert named(group, part) in str(error), f"{first}={name} {second}={other}: {error}"
            continue
        try:
            run(objective)
        except ValueError as error:
            raise AssertionError(f"{first}={name} with {second}={other}: {error}") from error
