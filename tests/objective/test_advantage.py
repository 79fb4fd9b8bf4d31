import random
from dataclasses import replace
from itertools import chain, product

import pytest
import torch

from grpo_lightning.objective import load_objective
from grpo_lightning.objective.advantage import ReinforcePP
from grpo_lightning.objective.kl import K1
from tests.objective import reference
from tests.objective.options import OPTIONS, compose, full, mask_of

EARLIER = OPTIONS["advantage"][:6]  # the others are in test_advantage_family.py
NAN = float("nan")
ROOT_HALF = 0.5**0.5


def rows(objective, rewards, ids, **keywords):
    """One advantage per row, from completions of one token."""
    dtype = keywords.pop("dtype", torch.float32)
    mask = full(len(rewards), 1)
    return objective.advantages(torch.tensor(rewards, dtype=dtype), torch.tensor(ids), mask, **keywords)[:, 0].tolist()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # rewards [1, 0, 0, 1 | 2, 2]: mean 1/2, squared deviations 4 * 1/4 = 1, std sqrt(1/3); group 2 has no spread
        ("grpo", [3**0.5 / 2, -(3**0.5) / 2, -(3**0.5) / 2, 3**0.5 / 2, 0, 0]),
        ("dr_grpo", [0.5, -0.5, -0.5, 0.5, 0, 0]),
        ("rloo", [2 / 3, -2 / 3, -2 / 3, 2 / 3, 0, 0]),
        # all rewards: mean 1, squared deviations 0 + 1 + 1 + 0 + 1 + 1 = 4, std sqrt(4/5)
        ("batch_std", [0.5 / 0.8**0.5, -0.5 / 0.8**0.5, -0.5 / 0.8**0.5, 0.5 / 0.8**0.5, 0, 0]),
        # one token per row: whitened over the six rewards
        ("reinforce_pp", [0, -1 / 0.8**0.5, -1 / 0.8**0.5, 0, 1 / 0.8**0.5, 1 / 0.8**0.5]),
        ("none", [1, 0, 0, 1, 2, 2]),
    ],
)
def test_closed_form(name, expected):
    assert rows(compose(advantage=name), [1.0, 0, 0, 1, 2, 2], [7, 7, 7, 7, 3, 3]) == pytest.approx(expected, abs=1e-5)


def test_std_is_unbiased_by_default_and_biased_on_request():
    assert rows(load_objective(), [1.0, 3.0], [0, 0]) == pytest.approx([-ROOT_HALF, ROOT_HALF], abs=1e-5)
    biased = load_objective(["advantage.unbiased=false", "advantage.eps=0"])
    assert rows(biased, [1.0, 3.0], [0, 0]) == pytest.approx([-1.0, 1.0])  # T15


def test_eps_is_added_to_std():
    damped = 1 / (1 + 2**0.5)
    assert rows(load_objective(["advantage.eps=1"]), [0.0, 2.0], [0, 0]) == pytest.approx([-damped, damped])
    # P26: batch std with eps 1e-4
    batch = load_objective(["advantage=batch_std", "advantage.eps=1e-4"])
    assert rows(batch, [1.0, 0, 1, 1], [0, 0, 1, 1]) == pytest.approx([0.9998, -0.9998, 0, 0], abs=1e-5)


def test_a_group_without_spread_is_exactly_zero():
    # A mean that is off by rounding would leave noise, which the division by eps makes large.
    for name, value in product(("grpo", "dr_grpo", "rloo", "batch_std"), (0.3, 0.95, 1 / 3, 1e8 / 3)):
        assert rows(compose(advantage=name), [value] * 7 + [0.0, 1.0], [0] * 7 + [1, 1])[:7] == [0.0] * 7
        # the float64 mean of three times 0.1 is not 0.1
        assert (
            rows(compose(advantage=name), [0.1] * 3 + [0.0, 1.0], [0] * 3 + [1, 1], dtype=torch.float64)[:3]
            == [0.0] * 3
        )
    assert rows(compose(advantage="reinforce_pp"), [0.95] * 7, [0] * 7) == [0.0] * 7
    assert rows(compose(advantage="reinforce_pp"), [0.1] * 3, [0] * 3, dtype=torch.float64) == [0.0] * 3


def test_p13_a_group_of_one_is_an_error_where_a_group_is_the_baseline():
    for name in ("grpo", "dr_grpo", "rloo", "batch_std"):
        objective = compose(advantage=name)
        with pytest.raises(ValueError, match=f"advantage={name} .*group_size must be at least 2"):
            objective.check_group_size(1)
        objective.check_group_size(2)
        with pytest.raises(ValueError, match=f"advantage={name} needs at least 2 completions .* group 9 has 1"):
            rows(objective, [1.0, 0.0, 1.0], [4, 4, 9])
        with pytest.raises(ValueError, match="has 1"):
            rows(objective, [1.0, 0.0, 1.0], [0, 1, 2])  # an id per rollout instead of per group
    for name in ("none", "reinforce_pp"):
        compose(advantage=name).check_group_size(1)
        assert len(rows(compose(advantage=name), [1.0, 0.0], [0, 1])) == 2


def test_p14_moments_in_two_passes():
    rloo = compose(advantage="rloo")
    assert rows(rloo, [0.0] + [0.95] * 7, [0] * 8)[0] == pytest.approx(-0.95, abs=1e-6)
    assert rows(rloo, [1.0, 0, 0, 0], [0] * 4) == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])
    # E[x^2] - mean^2 of these is noise even in float64
    shifted = rows(compose(advantage="grpo"), [1e8, 1e8 + 1, 1e8, 1e8 + 1], [0] * 4, dtype=torch.float64)
    assert shifted == pytest.approx([-(3**0.5) / 2, 3**0.5 / 2] * 2, abs=1e-5)


def test_p16_one_prompt_drawn_twice_is_two_groups():
    for name in ("grpo", "dr_grpo", "rloo"):
        assert rows(compose(advantage=name), [0.0] * 16 + [1.0] * 16, [3] * 16 + [8] * 16) == [0.0] * 32


@pytest.mark.parametrize("name", EARLIER)
def test_p17_order_does_not_matter(name):
    generator = torch.Generator().manual_seed(0)
    rewards = torch.rand(12, generator=generator)
    ids = torch.tensor([5, 2, 9, 5, 2, 9, 5, 2, 9, 5, 2, 9])
    mask = mask_of([3, 1, 4, 2, 5, 3, 1, 2, 4, 5, 1, 2], 5)
    expected = compose(advantage=name).advantages(rewards, ids, mask)
    order = torch.randperm(12, generator=generator)
    torch.testing.assert_close(
        compose(advantage=name).advantages(rewards[order], ids[order], mask[order]), expected[order]
    )


def test_p20_rows_that_leave_the_loss_count_in_the_statistics():
    # The second completion is truncated and will be filtered: its reward counts all the same.
    objective = compose(advantage="dr_grpo", overlong="filter")
    rewards, truncated = torch.tensor([1.0, 1, 0, 0]), torch.tensor([False, True, False, False])
    a = objective.advantages(rewards, torch.zeros(4, dtype=torch.long), full(4, 1))
    assert a[:, 0].tolist() == [0.5, 0.5, -0.5, -0.5]
    assert objective.keep_rows(rewards, truncated).tolist() == [True, False, True, True]


def test_p22_a_missing_reward_is_left_out():
    objective = compose(advantage="dr_grpo")
    rewards = [1.0, NAN, 0.0, 1.0]
    assert rows(objective, rewards, [0] * 4) == pytest.approx([1 / 3, 0, -2 / 3, 1 / 3])
    assert objective.keep_rows(torch.tensor(rewards), torch.zeros(4, dtype=torch.bool)).tolist() == [
        True,
        False,
        True,
        True,
    ]
    assert rows(compose(advantage="rloo"), rewards, [0] * 4) == pytest.approx([0.5, 0, -1, 0.5])
    assert rows(compose(advantage="none"), rewards, [0] * 4) == [1, 0, 0, 1]
    for name in ("grpo", "dr_grpo", "rloo", "batch_std", "reinforce_pp"):
        assert rows(compose(advantage=name), [NAN, 2.0], [0, 0]) == [0, 0]  # T15
        assert rows(compose(advantage=name), [NAN, NAN], [0, 0]) == [0, 0]


def test_reinforce_pp_discounts_completion_tokens():
    objective = load_objective(["advantage=reinforce_pp", "advantage.gamma=0.5", "advantage.eps=0"])
    # returns [1/4, 1/2, 1] and [2]; mean 15/16; squared deviations (121 + 49 + 1 + 289) / 256 = 460/256, over n - 1 = 3
    std = (460 / 256 / 3) ** 0.5
    expected = [(r - 15 / 16) / std for r in (0.25, 0.5, 1.0, 2.0)]
    # The hole in the first row is, say, a tool's answer; it neither discounts nor counts.
    mask = torch.tensor([[True, True, False, True], [False, True, False, False]])
    a = objective.advantages(torch.tensor([1.0, 2.0]), torch.tensor([0, 1]), mask)
    assert a[mask].tolist() == pytest.approx(expected)
    assert a[~mask].abs().sum() == 0


def test_kl_in_reward_is_folded_before_the_advantages():
    overrides = ["kl=k1", "kl.beta=0.5", "kl.in_reward=true"]
    objective = load_objective([*overrides, "advantage=dr_grpo"])
    old = torch.tensor([[-1.0, -1.0], [-1.0, 1e4]])
    ref = torch.tensor([[-2.0, -3.0], [-1.5, float("nan")]])
    mask = torch.tensor([[True, True], [True, False]])
    penalty = objective.kl_penalty(old.requires_grad_(), ref, mask)
    assert penalty.tolist() == [[0.5, 1.0], [0.25, 0.0]]
    assert not penalty.requires_grad
    a = objective.advantages(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), mask, kl_penalty=penalty)
    # rewards 1 - 1.5 and 0 - 0.25, mean -3/8
    assert a.tolist() == [[-0.125, -0.125], [0.125, 0.0]]

    per_token = load_objective([*overrides, "advantage=reinforce_pp", "advantage.eps=0"])
    a = per_token.advantages(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), mask, kl_penalty=penalty)
    # returns 1 - 1 - 0.5 = -0.5, then 1 - 1 = 0; and -0.25: mean -1/4, std 1/4
    assert a.tolist() == [pytest.approx([-1.0, 1.0]), pytest.approx([0.0, 0.0])]

    with pytest.raises(ValueError, match=r"kl_penalty.*kl.in_reward"):
        objective.advantages(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), mask)
    with pytest.raises(ValueError, match=r"kl_penalty.*kl.in_reward"):
        compose().advantages(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), mask, kl_penalty=penalty)


@pytest.mark.parametrize("name", EARLIER)
def test_equals_the_plain_loop(name):
    dice = random.Random(name)
    for _ in range(20):
        n, width = dice.randint(2, 6) * 2, 6
        ids = (
            [10 + i // 2 for i in range(n)]
            if dice.random() < 0.5
            else [dice.choice((3, 44)) for _ in range(n - 4)] + [3, 44] * 2
        )
        dice.shuffle(ids)
        lengths = [dice.randint(1, width) for _ in range(n)]
        rewards = [dice.choice((None, 0.0, 1.0, dice.random())) for _ in range(n)]
        if all(r is None for r in rewards):
            continue
        kl = [[dice.random() for _ in range(k)] for k in lengths] if dice.random() < 0.5 else None
        mask = mask_of(lengths, width)
        objective, keywords, gamma = compose(advantage=name), {}, dice.choice((1.0, 0.7))
        if name == "reinforce_pp":
            objective = replace(objective, advantage=ReinforcePP(gamma=gamma))
        if kl:
            objective = replace(objective, kl=K1(beta=1.0, in_reward=True))
            penalty = torch.full(mask.shape, NAN, dtype=torch.float64)
            penalty[mask] = torch.tensor(list(chain.from_iterable(kl)), dtype=torch.float64)
            keywords["kl_penalty"] = penalty
        given = torch.tensor([NAN if r is None else r for r in rewards], dtype=torch.float64)
        a = objective.advantages(given, torch.tensor(ids), mask, **keywords)
        assert a.dtype == torch.float64
        assert a[~mask].abs().sum() == 0
        expected = list(chain.from_iterable(reference.advantages(name, rewards, ids, lengths, kl=kl, gamma=gamma)))
        assert a[mask].tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_dtypes():
    mask, ids = full(4, 2), torch.zeros(4, dtype=torch.long)
    for dtype, expected in (
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ):
        for name in EARLIER:
            rewards = torch.tensor([1, 0, 0, 1], dtype=dtype)
            assert compose(advantage=name).advantages(rewards, ids, mask).dtype == expected


def test_bad_input_is_named():
    objective, ids, mask = compose(), torch.zeros(2, dtype=torch.long), full(2, 3)
    with pytest.raises(ValueError, match="reward of row 1 is infinite"):
        objective.advantages(torch.tensor([0.0, float("inf")]), ids, mask)
    with pytest.raises(ValueError, match=r"rewards must have shape \[2\], got \[3\]"):
        objective.advantages(torch.zeros(3), ids, mask)
    with pytest.raises(ValueError, match=r"group_ids must have shape \[2\], got \[1\]"):
        objective.advantages(torch.zeros(2), ids[:1], mask)
    with pytest.raises(ValueError, match="mask must be a bool tensor"):
        objective.advantages(torch.zeros(2), ids, mask.float())


def test_rewards_that_differ_by_rounding_are_equal():
    # P19: 0.1 + 0.2 is not 0.3; divided by its own std the difference would be an advantage of size 1.
    rewards = torch.tensor([0.3, 0.1 + 0.2, 0.3, 0.3], dtype=torch.float64)
    assert rewards.max() > rewards.min()
    ids, mask = torch.zeros(4, dtype=torch.long), full(4, 2)
    keywords = dict(
        correct=torch.zeros(4), entropy=torch.rand(4, 2, generator=torch.Generator().manual_seed(0)), prompt_ids=ids
    )
    for name in ("grpo", "dr_grpo", "rloo", "gtpo", "grpo_s", "dcpo", "maxrl", "opo", "pass_at_k"):
        assert compose(advantage=name).advantages(rewards, ids, mask, **keywords).abs().max() < 1e-15, name
    near = torch.tensor([2.0, 2.00001])  # in float32, and well above its rounding
    a = compose(advantage="grpo").advantages(near, ids[:2], mask[:2])
    assert a[:, 0].tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5], rel=0.2)
