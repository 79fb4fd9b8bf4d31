"""The advantages of the family: by hand from the papers, against plain loops, in any layout."""

import math
import random
from dataclasses import replace
from itertools import chain

import pytest
import torch

from grpo_lightning.objective import load_objective
from grpo_lightning.objective.advantage import GAE
from grpo_lightning.objective.kl import K1
from tests.objective import reference_family as reference
from tests.objective.options import OPTIONS, compose, full, mask_of
from tests.objective.rollouts import NAN, draw

FAMILY = OPTIONS["advantage"][6:]
READS_NO_KL = ("process", "raft", "gdpo", "maxrl")


def advantages(objective, rewards, lengths, ids=None, **keywords):
    """A [N][n_i] of rows without padding on the left."""
    rewards = torch.tensor(rewards, dtype=torch.float64)
    ids = torch.zeros(len(rewards), dtype=torch.long) if ids is None else torch.tensor(ids)
    mask = mask_of(lengths, max(lengths))
    a = objective.advantages(rewards, ids, mask, **keywords)
    return [a[i, : lengths[i]].tolist() for i in range(len(lengths))]


def per_row(name, rewards, lengths=None, ids=None, **keywords):
    return [
        row[0] for row in advantages(compose(advantage=name), rewards, lengths or [1] * len(rewards), ids, **keywords)
    ]


def test_opo_weighs_the_baseline_by_length():
    assert per_row("opo", [1.0, 0.0], [1, 3]) == pytest.approx([0.75, -0.25])  # baseline (1 * 1 + 3 * 0) / 4


def test_gpg_scales_up_for_groups_that_teach_nothing():
    # 4 of 6 rewards in groups with spread: alpha = 6 / 4
    a = per_row("gpg", [1.0, 0, 1, 1, 1, 0], ids=[0, 0, 5, 5, 2, 2])
    assert a == pytest.approx([0.75, -0.75, 0, 0, 0.75, -0.75])
    assert per_row("gpg", [1.0, 1, 0, 0], ids=[0, 0, 1, 1]) == [0, 0, 0, 0]
    # a missing reward counts neither in B nor in M: alpha = 4 / 2
    assert per_row("gpg", [1.0, 0, NAN, 1, 1], ids=[0, 0, 0, 1, 1]) == pytest.approx([1, -1, 0, 0, 0])


def test_maxrl_divides_by_the_pass_rate():
    assert per_row("maxrl", [1.0, 0, 0, 0]) == pytest.approx([3, -1, -1, -1])
    assert per_row("maxrl", [1.0, 1, 0, 0]) == pytest.approx([1, 1, -1, -1])
    assert per_row("maxrl", [0.0, 0, 1, 1], ids=[0, 0, 1, 1]) == [0, 0, 0, 0]
    with pytest.raises(ValueError, match=r"advantage=maxrl needs rewards >= 0, that of row 1 is -0.5"):
        per_row("maxrl", [1.0, -0.5, 0.0])


def test_pass_at_k_reinforces_the_best_by_its_lead():
    assert per_row("pass_at_k", [1.0, 3, 0, 2]) == [0, 1, 0, 0]
    assert per_row("pass_at_k", [1.0, 1, 0, 0]) == [0, 0, 0, 0]
    assert per_row("pass_at_k", [NAN, 1, 0, NAN]) == [0, 1, 0, 0]
    assert per_row("pass_at_k", [NAN, 1, NAN]) == [0, 0, 0]


def test_raft_imitates_right_completions_and_takes_the_others_out():
    correct = torch.tensor([True, False, True, True])
    assert per_row("raft", [1.0, 0, NAN, 0.5], correct=correct) == [1, 0, 0, 1]
    objective, truncated = compose(advantage="raft"), torch.tensor([False] * 4)
    rewards, ids = torch.tensor([1.0, 0, NAN, 0.5]), torch.zeros(4, dtype=torch.long)
    assert objective.keep_rows(rewards, truncated, ids, correct=correct).tolist() == [True, False, False, True]
    with pytest.raises(ValueError, match="advantage=raft needs `correct`"):
        objective.keep_rows(rewards, truncated, ids)


def test_raft_is_the_mean_log_likelihood_of_the_completions_that_are_kept():
    objective = load_objective(["algorithm=raft"])
    rewards, ids, mask = torch.tensor([1.0, 0.0, 1.0]), torch.zeros(3, dtype=torch.long), mask_of([2, 3, 1], 3)
    correct = torch.tensor([True, False, True])
    kept = objective.keep_rows(rewards, torch.tensor([False] * 3), ids, correct=correct)
    a = objective.advantages(rewards, ids, mask, correct=correct)
    out = objective.loss(torch.full((3, 3), -2.0), None, a, mask & kept[:, None], ids)
    assert out.loss.item() == pytest.approx((2 * 2.0 + 1 * 2.0) / 2)


def test_p26_gdpo_standardises_each_component():
    objective = load_objective(["advantage=gdpo", "advantage.eps=1e-4"])
    components = {"a": torch.tensor([1.0, 1, 0, 0]), "b": torch.tensor([0.0, 10, 0, 10])}
    equal = {"a": 1.0, "b": 1.0}
    a = advantages(objective, [1.0, 11, 0, 10], [1] * 4, components=components, component_weights=equal)
    assert [row[0] for row in a] == pytest.approx([0, 1.22466, -1.22466, 0], abs=1e-4)
    # the sum standardised once, for comparison
    summed = advantages(load_objective(["advantage.eps=1e-4"]), [1.0, 11, 0, 10], [1] * 4)
    assert [row[0] for row in summed] == pytest.approx([-0.77554, 0.94788, -0.94788, 0.77554], abs=1e-5)
    # weights act after the components are standardised, so their scale does not matter
    large = {"a": components["a"] * 1000, "b": components["b"]}
    weighted = {"a": 2.0, "b": 0.0}
    a = advantages(objective, [1.0, 11, 0, 10], [1] * 4, components=large, component_weights=weighted)
    assert [row[0] for row in a] == pytest.approx([0.86594, 0.86594, -0.86594, -0.86594], abs=1e-3)


def test_p23_gdpo_leaves_missing_scores_out():
    components = {"a": torch.tensor([1.0, NAN, 0, 0]), "b": torch.tensor([NAN, NAN, NAN, NAN])}
    a = per_row("gdpo", [1.0, 0.5, 0, NAN], components=components, component_weights={"a": 1.0, "b": 1.0})
    # of the rows with a reward: scores 1, -, 0 standardise to +-1/sqrt 2 and 0; over the rollout 1, 0, -1 times that
    assert a == pytest.approx([1, 0, -1, 0], abs=1e-5)


def test_gdpo_a_group_in_which_no_component_varies_is_exactly_zero():
    # the mean over the rollout is 0 but for rounding, which must not become a signal
    for seed in range(10):
        scores = torch.rand(9, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        scores[6:] = 0.3
        ids, one = [0, 0, 0, 1, 1, 1, 2, 2, 2], {"a": 1.0}
        a = per_row("gdpo", scores.tolist(), ids=ids, components={"a": scores}, component_weights=one)
        assert a[6:] == [0.0] * 3 and a[0] != 0


def test_reinforce_pp_baseline_whitens_over_tokens():
    # +1/2 on one token, -1/2 on three: mean -1/4, squared deviations 9/16 + 3/16 over 3, std 1/2
    assert per_row("reinforce_pp_baseline", [1.0, 0.0], [1, 3]) == pytest.approx([1.5, -0.5], abs=1e-5)
    # A group without spread counts as zeros in the moments, and stays exactly zero.
    a = per_row("reinforce_pp_baseline", [1.0, 0, 0.3, 0.3], [1, 3, 2, 1], [0, 0, 1, 1])
    assert a[2:] == [0, 0]
    # tokens 1/2, -1/2 x 3, 0 x 3: mean -1/7, squared deviations (81 + 75 + 12) / 196 = 6/7, over 6: std sqrt(1/7)
    assert a[:2] == pytest.approx([9 / 14 * 7**0.5, -5 / 14 * 7**0.5], abs=1e-5)


def process_of(step_rewards, step_ends, rewards, mask, overrides=()):
    objective = load_objective(["advantage=process", *overrides])
    ids = torch.zeros(len(rewards), dtype=torch.long)
    steps = {"step_rewards": torch.tensor(step_rewards), "step_ends": torch.tensor(step_ends)}
    return objective.advantages(torch.tensor(rewards), ids, mask, **steps)


def test_process_adds_up_the_steps_that_are_still_to_end():
    # steps 1, 0 | 1: mean 2/3, squared deviations 1/9 + 4/9 + 1/9 over 2, std 1/sqrt 3: 1/sqrt 3, -2/sqrt 3, 1/sqrt 3
    a = process_of([[1.0, 0.0], [1.0, NAN]], [[1, 3], [2, -1]], [0.5, 1.0], full(2, 4), ["advantage.eps=0"])
    unit = 3**-0.5
    assert a[0].tolist() == pytest.approx([-unit, -unit, -2 * unit, -2 * unit])
    assert a[1].tolist() == pytest.approx([unit, unit, unit, 0])


def test_process_leaves_out_rows_without_a_reward_and_equal_steps():
    a = process_of([[1.0, 0.0], [1.0, 0.0], [0.0, 0.0]], [[0, 1]] * 3, [1.0, NAN, 0.0], full(3, 2))
    # steps 1, 0, 0, 0: mean 1/4, std 1/2
    assert a.flatten().tolist() == pytest.approx([1.0, -0.5, 0, 0, -1.0, -0.5], abs=1e-5)
    assert process_of([[1.0], [1.0]], [[1], [0]], [1.0, 0.0], full(2, 2)).tolist() == [[0, 0], [0, 0]]
    assert process_of([[NAN], [NAN]], [[-1], [-1]], [1.0, 0.0], full(2, 2)).tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize("name", ["process", "gtpo", "grpo_s", "dcpo", "gdpo", "raft"])
def test_what_an_option_needs_is_named(name):
    with pytest.raises(ValueError, match=f"advantage={name} needs `"):
        compose(advantage=name).advantages(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), full(2, 2))


@pytest.mark.parametrize("name", FAMILY)
def test_equals_the_plain_loop(name):
    dice = random.Random(name)
    history, objective = {}, compose(advantage=name)
    for _ in range(30):
        rollout = draw(dice)
        (rewards, ids, mask), keywords = rollout.arguments()
        plain, folded = list(rollout.rewards), {}
        if dice.random() < 0.5 and name not in READS_NO_KL:
            objective = replace(objective, kl=K1(beta=1.0, in_reward=True))
            keywords["kl_penalty"] = rollout.kl_penalty(mask)
            if name == "gae":
                folded = {"kl": rollout.kl}
            else:
                plain = [None if r is None else r - sum(k) for r, k in zip(plain, rollout.kl, strict=True)]
        else:
            objective = replace(objective, kl=compose().kl)
        if name == "gae":
            values = dice.choice((None, rollout.values))
            folded |= {"values": values, "gamma": dice.choice((1.0, 0.9)), "lam": dice.choice((1.0, 0.7, 0.0))}
            folded["whiten"] = dice.choice((True, False))
            advantage = GAE(gamma=folded["gamma"], lam=folded["lam"], whiten=folded["whiten"])
            objective = replace(objective, advantage=advantage)
            keywords["values"] = None if values is None else keywords["values"]
        if name == "dcpo":
            folded = {"history": history}
        expected = list(chain.from_iterable(getattr(reference, name)(rollout, plain, **folded)))
        a = objective.advantages(rewards, ids, mask, **keywords)
        assert a.dtype == torch.float64
        assert a[~mask].abs().sum() == 0
        assert a[mask].tolist() == pytest.approx(expected, rel=1e-8, abs=1e-8)


@pytest.mark.parametrize("name", FAMILY)
def test_order_padding_holes_and_ids_do_not_matter(name):
    dice = random.Random(name)
    for _ in range(10):
        rollout, objective, again = draw(dice), compose(advantage=name), compose(advantage=name)
        order = dice.sample(range(len(rollout)), len(rollout))
        layout = {"left": dice.randint(0, 3), "right": dice.randint(0, 3), "hole": dice.random() < 0.5}
        for _ in range(2):  # the second time with what the first left behind
            (rewards, ids, mask), keywords = rollout.arguments()
            expected = objective.advantages(rewards, ids, mask, **keywords)
            arguments, keywords = rollout.arguments(order, **layout, ids={3: 100, 70: -3, 9: 0}.get)
            a = again.advantages(*arguments, **keywords)
            for k, i in enumerate(order):
                torch.testing.assert_close(a[k, arguments[2][k]], expected[i, mask[i]], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", FAMILY)
def test_a_rollout_without_rewards_and_an_empty_one(name):
    rollout = draw(random.Random(0))
    rollout.rewards = [None] * len(rollout)
    arguments, keywords = rollout.arguments()
    assert compose(advantage=name).advantages(*arguments, **keywords).abs().sum() == 0
    one = {"correct": True, "prompt_ids": 1}
    nothing = {key: torch.zeros(2, dtype=torch.long) for key in one} | {"correct": torch.zeros(2, dtype=torch.bool)}
    nothing |= {key: torch.zeros(2, 0) for key in ("entropy", "values", "step_rewards")}
    nothing |= {"step_ends": torch.zeros(2, 0, dtype=torch.long), "components": {}, "component_weights": {}}
    empty = compose(advantage=name).advantages(torch.tensor([1.0, 0]), torch.tensor([0, 0]), full(2, 0), **nothing)
    assert empty.shape == (2, 0)


@pytest.mark.parametrize("name", FAMILY)
def test_extreme_rewards_stay_finite(name):
    rollout = draw(random.Random(1))
    rollout.rewards = [1e8 if i % 2 else 0.0 for i in range(len(rollout))]
    rollout.components = {"exact": rollout.rewards, "format": [1e-12 * r for r in rollout.rewards]}
    rollout.entropy = [[0.0 if i % 2 else 1e4 for _ in row] for i, row in enumerate(rollout.entropy)]
    (rewards, ids, mask), keywords = rollout.arguments()
    a = compose(advantage=name).advantages(rewards.float(), ids, mask, **keywords)
    assert a.dtype == torch.float32 and a.isfinite().all()


def test_groups_of_one_are_an_error_where_a_group_is_compared():
    for name in FAMILY:
        objective = compose(advantage=name)
        if name in ("raft", "gae"):
            objective.check_group_size(1)
        else:
            with pytest.raises(ValueError, match=f"advantage={name} .*group_size must be at least 2"):
                objective.check_group_size(1)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"correct": torch.ones(2)}, r"correct must have shape \[4\], got \[2\]"),
        ({"correct": torch.tensor([1, 0, NAN, 1])}, "correct is nan at row 2"),
        ({"prompt_ids": torch.zeros(3)}, r"prompt_ids must have shape \[4\]"),
        ({"components": {"mine": torch.ones(5)}}, r"mine must have shape \[4\]"),
        ({"components": {"mine": torch.tensor([1, math.inf, 0, 0])}}, "mine is infinite at row 1"),
        ({"step_rewards": torch.ones(4, 2), "step_ends": torch.ones(4, 1)}, r"step_ends must have shape \[4, 2\]"),
        ({"step_rewards": torch.ones(4, 1), "step_ends": torch.full((4, 1), 7)}, "behind the last of 3: 7"),
        ({"step_rewards": torch.full((4, 1), math.inf), "step_ends": torch.ones(4, 1)}, "step_rewards is infinite"),
    ],
)
def test_keywords_of_another_shape_are_named(keywords, message):
    with pytest.raises(ValueError, match=message):
        compose(advantage="grpo").advantages(torch.ones(4), torch.tensor([0, 0, 1, 1]), full(4, 3), **keywords)
