"""gtpo and grpo_s (arXiv 2508.04349): by hand, conserved rewards, both polarities, sets without spread."""

import random

import pytest
import torch

from grpo_lightning.objective import load_objective
from grpo_lightning.objective.advantage import GRPOS, GTPO
from tests.objective.options import compose, full, mask_of
from tests.objective.rollouts import NAN, draw

RIGHT = torch.tensor([True, True, False, False])
REWARDS = torch.tensor([1.0, 1, 0, 0], dtype=torch.float64)
IDS = torch.zeros(4, dtype=torch.long)


def test_gtpo_by_hand():
    # lengths 2, 1 | 1, 2; entropies of the right ones 1, 2 | 3, of the wrong ones 1 | 4, 5
    mask = torch.tensor([[True, True], [True, False], [True, False], [True, True]])
    entropy = torch.tensor([[1.0, 2], [3, NAN], [1, NAN], [4, 5]], dtype=torch.float64)
    shaped = GTPO(alpha1=0.9, alpha2=0.1).shaped(REWARDS, IDS, mask, RIGHT, entropy)
    # position 0: 0.9 + 0.1 * 2 * (1/4, 3/4); -0.9 - 0.1 * 2 * (1, 1/4) / (5/4). Position 1: one completion in each set
    assert shaped.tolist() == [
        pytest.approx([0.95, 1.0]),
        pytest.approx([1.05, 0.0]),
        pytest.approx([-1.06, 0.0]),
        pytest.approx([-0.94, -1.0]),
    ]
    objective = load_objective(["advantage=gtpo", "advantage.alpha1=0.9"])
    a = objective.advantages(REWARDS, IDS, mask, correct=RIGHT, entropy=entropy)
    # right: 0.95, 1, 1.05 have mean 1 and std 0.05; wrong: -1.06, -0.94, -1 have mean -1 and std 0.06
    assert a.flatten().tolist() == pytest.approx([-1, 0, 1, 0, -1, 0, 1, 0], abs=1e-4)
    together = load_objective(["advantage=gtpo", "advantage.alpha1=0.9", "advantage.together=true"])
    a = together.advantages(REWARDS, IDS, mask, correct=RIGHT, entropy=entropy)
    std = ((0.95**2 + 1 + 1.05**2 + 1.06**2 + 0.94**2 + 1) / 5) ** 0.5  # the mean of all six is 0
    assert a.flatten().tolist() == pytest.approx([x / std for x in (0.95, 1, 1.05, 0, -1.06, 0, -0.94, -1)], abs=1e-5)


def test_gtpo_compares_t_th_tokens_wherever_they_stand():
    # as by hand above, each row moved by another number of positions
    mask, entropy = torch.zeros(4, 5, dtype=torch.bool), torch.full((4, 5), NAN)
    for row, (start, values) in enumerate(((0, [1.0, 2]), (3, [3.0]), (1, [1.0]), (2, [4.0, 5]))):
        mask[row, start : start + len(values)] = True
        entropy[row, start : start + len(values)] = torch.tensor(values)
    shaped = GTPO(alpha1=0.9, alpha2=0.1).shaped(REWARDS, IDS, mask, RIGHT, entropy)
    assert shaped[mask].tolist() == pytest.approx([0.95, 1.0, 1.05, -1.06, -0.94, -1.0])


def test_gtpo_normalises_the_polarities_separately_and_each_group():
    rollout = draw(random.Random(5))
    rollout.rewards = [float(c) for c in rollout.correct]
    (rewards, ids, mask), keywords = rollout.arguments()
    a = compose(advantage="gtpo").advantages(rewards, ids, mask, **keywords)
    for group in ids.unique():
        for polarity in (True, False):
            tokens = a[mask & (ids == group)[:, None] & (keywords["correct"] == polarity)[:, None]]
            if tokens.abs().sum() > 0:
                assert tokens.mean().item() == pytest.approx(0, abs=1e-9)
                assert tokens.std().item() == pytest.approx(1, abs=1e-3)


def test_grpo_s_by_hand():
    # mean entropies 1, 3 of the right ones, 1, 4 of the wrong ones
    mask, entropy = full(4, 2), torch.tensor([[0.5, 1.5], [3, 3], [2, 0], [5, 3]], dtype=torch.float64)
    shaped = GRPOS(beta1=0.9, beta2=0.1).shaped(REWARDS, IDS, mask, RIGHT, entropy)
    assert shaped.tolist() == pytest.approx([0.95, 1.05, -1.06, -0.94])
    objective = load_objective(["advantage=grpo_s", "advantage.beta1=0.9"])
    a = objective.advantages(REWARDS, IDS, mask, correct=RIGHT, entropy=entropy)
    std = ((0.95**2 + 1.05**2 + 1.06**2 + 0.94**2) / 3) ** 0.5  # their mean is 0
    assert a[:, 0].tolist() == pytest.approx([0.95 / std, 1.05 / std, -1.06 / std, -0.94 / std], abs=1e-5)
    assert torch.equal(a[:, 0], a[:, 1])


@pytest.mark.parametrize("share", [0.1, 0.5, 0.0])
def test_the_reward_is_conserved_where_the_coefficients_add_up_to_one(share):
    dice = random.Random(3)
    for _ in range(20):
        rollout = draw(dice)
        rollout.rewards = [float(c) for c in rollout.correct]
        (rewards, ids, mask), keywords = rollout.arguments()
        correct, entropy = keywords["correct"], keywords["entropy"]
        by_token = GTPO(alpha1=1 - share, alpha2=share).shaped(rewards, ids, mask, correct, entropy)
        by_row = GRPOS(beta1=1 - share, beta2=share).shaped(rewards, ids, mask, correct, entropy)
        for group in ids.unique():
            for polarity, sign in ((True, 1), (False, -1)):
                rows = (ids == group) & (correct == polarity)
                # at every position they share among them as much as they are, the wrong ones below 0
                torch.testing.assert_close(by_token[rows].sum(0), sign * mask[rows].sum(0).double())
                assert by_row[rows].sum().item() == pytest.approx(sign * rows.sum().item())


@pytest.mark.parametrize("name", ["gtpo", "grpo_s"])
def test_right_is_what_is_correct_and_not_a_reward_of_one(name):
    entropy = torch.tensor([[1.0], [2.0], [1.0], [3.0]])
    rewards = torch.tensor([0.7, 0.9, 1.0, 0.2])
    shaped = compose(advantage=name).advantage.shaped(rewards, IDS, full(4, 1), RIGHT, entropy).flatten()
    assert (shaped > 0).tolist() == RIGHT.tolist()
    # outcome of its own: 0.7 + 0.1 * 2 * 1/3, 0.9 + 0.1 * 2 * 2/3
    assert shaped[:2].tolist() == pytest.approx([0.7 + 0.2 / 3, 0.9 + 0.4 / 3])


@pytest.mark.parametrize("name", ["gtpo", "grpo_s"])
def test_without_spread_the_advantage_is_zero(name):
    objective, entropy = compose(advantage=name), torch.rand(4, 3, generator=torch.Generator().manual_seed(0))
    mask = mask_of([3, 2, 3, 1], 3)
    for correct in (True, False):  # rewards of a group all equal: 0, though the entropies differ
        every = torch.full((4,), correct)
        a = objective.advantages(torch.full((4,), 0.3), IDS, mask, correct=every, entropy=entropy)
        assert a.abs().sum() == 0


def test_gtpo_a_completion_alone_in_its_set_has_no_signal_of_its_own():
    # H / H = 1 at each of its positions: all its shaped rewards are equal, 0 / 0 in the paper
    entropy = torch.rand(4, 3, generator=torch.Generator().manual_seed(0))
    alone = torch.tensor([True, False, False, False])
    objective = compose(advantage="gtpo")
    a = objective.advantages(torch.tensor([1.0, 0, 0, 0]), IDS, full(4, 3), correct=alone, entropy=entropy)
    assert a[0].tolist() == [0, 0, 0]
    assert a[1:].abs().sum() > 1
    # three equal entropies: shares that differ by rounding at most stay next to 0
    same = torch.full((4, 3), 0.1)
    a = objective.advantages(torch.tensor([0.0, 1, 1, 1]), IDS, full(4, 3), correct=~alone, entropy=same)
    assert a.abs().max() < 1e-6


@pytest.mark.parametrize("name", ["gtpo", "grpo_s"])
def test_an_entropy_of_zero_is_floored(name):
    # right: 1e-8 and 1: shares 1e-8 and 1; wrong: 1e8 and 1: shares 1 and 1e-8
    entropy = torch.tensor([[0.0], [1.0], [0.0], [1.0]])
    shaped = compose(advantage=name).advantage.shaped(REWARDS, IDS, full(4, 1), RIGHT, entropy).flatten()
    assert shaped.tolist() == pytest.approx([1.0, 1.2, -1.2, -1.0], abs=1e-7)


@pytest.mark.parametrize("name", ["gtpo", "grpo_s"])
def test_a_row_without_a_reward_is_in_no_set(name):
    entropy, mask = torch.rand(5, 2, generator=torch.Generator().manual_seed(1)), full(5, 2)
    rewards, correct = torch.tensor([1.0, 1, 0, 0, NAN]), torch.tensor([True, True, False, False, True])
    option = compose(advantage=name)
    ids = torch.zeros(5, dtype=torch.long)
    a = option.advantages(rewards, ids, mask, correct=correct, entropy=entropy)
    without = option.advantages(rewards[:4], ids[:4], mask[:4], correct=correct[:4], entropy=entropy[:4])
    torch.testing.assert_close(a[:4], without)
    assert a[4].abs().sum() == 0
