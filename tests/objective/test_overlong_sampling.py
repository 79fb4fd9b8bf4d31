import pytest
import torch

from grpo_lightning.objective import load_objective
from tests.objective.options import compose

NAN = float("nan")


def soft(*overrides):
    return load_objective(["overlong=soft", *overrides])


def shaped(objective, lengths, truncated=None, reward=0.0):
    rewards = torch.full((len(lengths),), reward)
    truncated = torch.tensor(truncated or [False] * len(lengths))
    return objective.shaped_rewards(rewards, torch.tensor(lengths), truncated)


def test_p67_t16_soft_punishment():
    objective = soft("overlong.max_length=100", "overlong.cache=20")
    lengths = [50, 80, 81, 90, 99, 100, 101, 110]
    assert shaped(objective, lengths).tolist() == pytest.approx([0, 0, -0.05, -0.5, -0.95, -1, -1, -1])
    assert shaped(objective, [90], reward=1.0).tolist() == [0.5]
    assert shaped(objective, [90], reward=NAN).isnan().all()


def test_p67_a_cache_of_zero_divides_nothing():
    objective = soft("overlong.max_length=100", "overlong.cache=0")
    assert shaped(objective, [99, 100, 101]).tolist() == [0, 0, -1]


def test_the_cache_is_a_fifth_of_the_length_by_default():
    assert shaped(soft("overlong.max_length=20480"), [16384, 18432, 20480]).tolist() == [0, -0.5, -1]


def test_a_length_that_was_not_given_is_named():
    with pytest.raises(ValueError, match=r"overlong=soft needs overlong.max_length"):
        shaped(soft(), [5])


def test_which_rows_stay():
    rewards, truncated = torch.tensor([1.0, NAN, 0.0, 1.0]), torch.tensor([False, False, True, True])
    for name, expected in {
        "none": [True, False, True, True],
        "soft": [True, False, True, True],
        "filter": [True, False, False, False],
        "soft_filter": [True, False, False, False],
    }.items():
        assert compose(overlong=name).keep_rows(rewards, truncated).tolist() == expected
    for name in ("none", "filter"):
        assert shaped(compose(overlong=name), [5, 10**6], [False, True], 0.25).tolist() == [0.25, 0.25]
    both = load_objective(["overlong=soft_filter", "overlong.max_length=10"])
    assert shaped(both, [9]).tolist() == [-0.5]


def test_p19_dynamic_keeps_groups_whose_rewards_differ():
    sampling = compose(sampling="dynamic").sampling
    rewards = torch.tensor([0.3] * 4 + [0.95] * 7 + [0.0, 1, 1, 1] + [NAN, 1.0] + [NAN, 0, 1], dtype=torch.float32)
    ids = torch.tensor([1] * 4 + [2] * 7 + [30] * 4 + [4] * 2 + [50] * 3)
    assert sampling.keep(rewards, ids) == {30, 50}
    assert sampling.keep(torch.tensor([0.1] * 3, dtype=torch.float64), torch.tensor([1] * 3)) == set()
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))
    assert sampling.keep(rewards[order], ids[order]) == {30, 50}
    assert (sampling.max_draws, sampling.keep_surplus) == (10, True)


def test_all_keeps_all_from_one_draw():
    sampling = compose(sampling="all").sampling
    assert sampling.keep(torch.tensor([1.0, 1.0, NAN]), torch.tensor([3, 3, 8])) == {3, 8}
    assert (sampling.max_draws, sampling.keep_surplus) == (1, False)


def test_dynamic_never_keeps_groups_of_one():
    with pytest.raises(ValueError, match=r"sampling=dynamic .*group_size must be at least 2"):
        compose(advantage="none", sampling="dynamic").check_group_size(1)
