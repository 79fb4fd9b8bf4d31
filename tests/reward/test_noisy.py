"""reward=noisy: the rates, what decides which rows flip, and what stays as it is."""

import math

import pytest

from grpo_lightning.errors import UsageError
from grpo_lightning.reward import RewardBatch, RewardSet
from grpo_lightning.reward.exact import Exact
from grpo_lightning.reward.noisy import Noisy
from grpo_lightning.reward.random import Random
from grpo_lightning.reward.score import Unscored
from tests.reward.test_score import Fixed

KEYS = [(0, 1, rollout, prompt, k) for rollout in range(5) for prompt in range(25) for k in range(16)]


def batch(keys=KEYS) -> RewardBatch:
    return RewardBatch(["q"] * len(keys), ["5"] * len(keys), ["5"] * len(keys), keys=keys)


def flipped(score: float, keys=KEYS, **options) -> list[float]:
    return Noisy(Fixed(lambda rows: [score] * len(rows)), **options)(batch(keys))


def test_each_rate_flips_its_own_side():
    n = len(KEYS)  # 2000: a rate of 0.2 is met to 0.036 (4 standard deviations)
    assert sum(s == 0.0 for s in flipped(1.0, false_negative=0.2, false_positive=0.0)) / n == pytest.approx(
        0.2, abs=0.036
    )
    assert sum(s == 1.0 for s in flipped(0.0, false_positive=0.2, false_negative=0.0)) / n == pytest.approx(
        0.2, abs=0.036
    )
    assert flipped(0.0, false_positive=0.0, false_negative=1.0) == [0.0] * n
    assert flipped(1.0, false_positive=1.0, false_negative=0.0) == [1.0] * n
    assert flipped(1.0, false_positive=0.0, false_negative=1.0) == [0.0] * n
    assert flipped(0.5, false_positive=1.0, false_negative=0.0) == [1.0] * n  # partial credit is not right
    assert set(flipped(0.5, false_positive=0.2, false_negative=1.0)) == {0.5, 1.0}
    assert set(flipped(2.0, false_positive=1.0, false_negative=0.2)) == {0.0, 2.0}


def test_what_flips_follows_from_the_key_and_the_seed_alone():
    scores = flipped(1.0)
    assert flipped(1.0, KEYS[::-1]) == scores[::-1]
    assert flipped(1.0, KEYS[300:500]) == scores[300:500]
    assert flipped(1.0, seed=1) != scores
    assert [s == 0 for s in flipped(1.0, false_negative=0.1)] == [s == 1 for s in flipped(0.0, false_positive=0.1)]
    more = flipped(1.0, false_negative=0.3)
    assert all(b == 0 for a, b in zip(scores, more, strict=True) if a == 0)


def test_it_does_not_follow_what_the_placebo_draws():
    paid = Random(0.5)(batch())
    flips = [s == 0 for s in flipped(1.0, false_negative=0.5)]
    together = sum(a == 1 and b for a, b in zip(paid, flips, strict=True)) / len(KEYS)
    assert together == pytest.approx(0.25, abs=0.04)


def test_rows_without_a_verdict_stay_so():
    values = [None, math.nan, "bad", math.inf, Unscored("slow"), 0]
    rewards = RewardSet({"noisy": Noisy(Fixed(values), false_positive=1.0, false_negative=1.0)})
    result = rewards(batch(KEYS[:6]))
    assert all(math.isnan(score) for score in result.total[:5]) and result.total[5] == 1
    assert [line.split(": ")[1] for line in result.errors] == ["row 2", "row 3", "row 4"]


def test_it_is_a_correctness_reward_like_what_it_wraps():
    rewards = RewardSet({"noisy": Noisy(Exact(), false_positive=0.0, false_negative=0.0)})
    assert rewards.has_correctness and set(rewards(batch()).correct) == {True}


def test_what_it_wraps_is_closed_and_keeps_its_thread():
    of = Fixed([1])
    of.calling_thread = True
    noisy = Noisy(of)
    assert noisy.calling_thread and not Noisy(Exact()).calling_thread
    noisy.close()
    assert of.closed
    Noisy(Exact()).close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"of": 3}, r"reward\.noisy\.of: int is not a reward component"),
        ({"of": Exact(weight=0.5)}, r"reward\.noisy\.of\.weight has no effect: set reward\.noisy\.weight"),
        ({"false_positive": 1.1}, r"reward\.noisy\.false_positive must be a number from 0 to 1, got 1\.1"),
        ({"false_negative": True}, r"reward\.noisy\.false_negative must be a number from 0 to 1"),
        ({"seed": 0.5}, r"reward\.noisy\.seed must be a whole number"),
    ],
)
def test_options(options, message):
    with pytest.raises(UsageError, match=message):
        Noisy(**{"of": Exact()} | options)
