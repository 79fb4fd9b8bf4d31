"""gae: PPO's advantage, with a critic and without one."""

import pytest
import torch

from grpo_lightning.objective import load_objective
from grpo_lightning.objective.advantage import GAE
from tests.objective.options import full, mask_of

NAN = float("nan")


def test_by_hand():
    # reward 1 at the end, V 0.5 and 0.25, gamma 0.9, lambda 0.5: delta_1 = 1 - 0.25, delta_0 = 0.9 * 0.25 - 0.5
    option = GAE(gamma=0.9, lam=0.5, whiten=False)
    rewards, mask = torch.tensor([1.0]), full(1, 2)
    values = torch.tensor([[0.5, 0.25]])
    a = option(rewards, torch.tensor([0]), mask, values=values)
    assert a.tolist() == [pytest.approx([-0.275 + 0.45 * 0.75, 0.75])]
    returns = option.returns(rewards, mask, values)
    assert returns.tolist() == [pytest.approx([0.5 - 0.275 + 0.45 * 0.75, 1.0])]
    # with a KL of 0.1 on each token
    a = option(rewards, torch.tensor([0]), mask, values=values, kl_penalty=torch.full((1, 2), 0.1))
    assert a.tolist() == [pytest.approx([-0.375 + 0.45 * 0.65, 0.65])]


def test_lambda_one_targets_the_reward_and_lambda_zero_the_next_value():
    rewards, mask = torch.tensor([2.0]), full(1, 3)
    values = torch.tensor([[0.3, -1.0, 0.7]])
    assert GAE(lam=1.0).returns(rewards, mask, values).tolist() == [pytest.approx([2, 2, 2])]
    assert GAE(lam=0.0).returns(rewards, mask, values).tolist() == [pytest.approx([-1.0, 0.7, 2])]


def test_without_a_critic_it_is_the_discounted_reward_to_go():
    a = GAE(gamma=0.5, lam=1.0, whiten=False)(torch.tensor([1.0, NAN]), torch.tensor([0, 1]), full(2, 3))
    assert a.tolist() == [[0.25, 0.5, 1.0], [0, 0, 0]]
    assert load_objective(["algorithm=ppo"]).takes("values")
    assert not load_objective().takes("values")


def test_at_gamma_and_lambda_one_without_a_critic_it_is_reinforce_pp():
    rewards, ids, mask = torch.tensor([1.0, 0.0, 0.5]), torch.tensor([0, 1, 2]), mask_of([3, 1, 2], 3)
    same = load_objective(["advantage=reinforce_pp"]).advantages(rewards, ids, mask)
    alone = load_objective(["advantage=gae", "advantage.lam=1"])
    torch.testing.assert_close(alone.advantages(rewards, ids, mask), same)


def test_padding_and_holes_do_not_discount_and_values_there_do_not_count():
    option = GAE(gamma=0.9, lam=0.5, whiten=False)
    narrow = option(torch.tensor([1.0]), torch.tensor([0]), full(1, 2), values=torch.tensor([[0.5, 0.25]]))
    mask = torch.tensor([[False, True, False, True, False]])
    values = torch.tensor([[NAN, 0.5, NAN, 0.25, NAN]])
    wide = option(torch.tensor([1.0]), torch.tensor([0]), mask, values=values)
    assert wide[mask].tolist() == pytest.approx(narrow.flatten().tolist())
    assert wide[~mask].abs().sum() == 0
    assert option.returns(torch.tensor([1.0]), mask, values)[mask].tolist() == pytest.approx([0.5625, 1.0])


def test_whitening_is_over_all_tokens_of_the_rollout():
    # rewards 1 on one token, 0 on three: mean 1/4, squared deviations 12/16 over 3, std 1/2
    rewards, mask = torch.tensor([1.0, 0.0, NAN]), mask_of([1, 3, 2], 3)
    a = GAE(eps=0.0)(rewards, torch.tensor([0, 1, 2]), mask, values=torch.zeros(3, 3))
    assert a[mask].tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5, 0, 0])
