"""reward=length and reward=repetition against the values of TRL's tests, by hand, and an independent loop."""

import math
import random

import pytest

from grpo_lightning.errors import UsageError
from grpo_lightning.reward import RewardBatch, RewardSet
from grpo_lightning.reward.exact import Exact
from grpo_lightning.reward.length import Cosine, Repetition
from tests.reward.test_score import Fixed


def batch(*ids: list[int]) -> RewardBatch:
    n = len(ids)
    return RewardBatch(["q"] * n, ["x"] * n, ["5"] * n, completion_ids=list(ids))


def cosine(score: object, length: int, **options) -> float | None:
    return Cosine(Fixed([score]), **{"max_length": 100} | options)(batch([7] * length))[0]


@pytest.mark.parametrize(
    ("score", "length", "expected"),
    [
        (1, 0, 1.0), (1, 25, 0.92678), (1, 50, 0.75), (1, 75, 0.57322), (1, 100, 0.5), (1, 200, 0.5),
        (0, 0, -1.0), (0, 25, -0.92678), (0, 50, -0.75), (0, 75, -0.57322), (0, 100, -0.5), (0, 200, -0.5),
        (0.9, 25, -0.92678), (2, 25, 0.92678),
    ],
)  # fmt: skip
def test_cosine(score, length, expected):
    assert cosine(score, length) == pytest.approx(expected, abs=5e-6)


def test_cosine_values_of_ones_own():
    # from 3 at no token to 1 at the end: 1 + 2/2 (1 + cos(pi/3)) = 2.5 a third of the way
    assert cosine(1, 30, max_length=90, right_short=3.0, right_long=1.0) == pytest.approx(2.5)
    assert cosine(0, 30, max_length=90, wrong_short=0.0, wrong_long=-2.0) == pytest.approx(-2 + 1.5)


def test_cosine_has_no_score_where_there_is_no_verdict():
    assert cosine(None, 5) is None
    result = RewardSet({"length": Cosine(Fixed([None, "bad", 1]), 100)})(batch([1], [1], []))
    assert math.isnan(result.total[0]) and math.isnan(result.total[1]) and result.total[2] == 1
    assert result.errors == ["reward.length: row 1: ValueError: the score 'bad' is not a number"]
    assert result.correct == [None] * 3  # it shapes


def test_cosine_passes_on_what_it_wraps():
    of = Fixed([1])
    of.calling_thread = True
    component = Cosine(of, 10)
    assert component.calling_thread and not Cosine(Exact(), 10).calling_thread
    component.close()
    Cosine(Exact(), 10).close()
    assert of.closed


@pytest.mark.parametrize(
    ("ids", "n", "expected"),
    [
        ([5, 5, 5, 5, 5], 2, -0.75),
        ([1, 2, 1, 2, 1, 2], 2, -0.6),
        ([1, 2, 3, 1, 2, 3], 2, -0.4),
        ([1, 2, 3, 1, 2, 3], 3, -0.25),
        ([1, 2, 3], 2, 0),
        ([1], 2, 0),
        ([], 2, 0),
        ([1, 1], 2, 0),  # one pair is no repetition
        ([4, 4, 4], 1, -2 / 3),
    ],
)
def test_repetition(ids, n, expected):
    assert Repetition(n)(batch(ids)) == [pytest.approx(expected)]
    assert Repetition(n, max_penalty=-0.5)(batch(ids)) == [pytest.approx(expected / 2)]


def test_repetition_against_counting():
    rng = random.Random(0)
    for _ in range(200):
        n, ids = rng.randint(1, 4), [rng.randrange(3) for _ in range(rng.randrange(12))]
        seen, repeated, count = [], 0, 0
        for i in range(len(ids)):
            if i + n > len(ids):
                break
            count += 1
            gram = ids[i : i + n]
            repeated += gram in seen
            seen.append(gram)
        assert Repetition(n)(batch(ids))[0] == pytest.approx(-repeated / count if count else 0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Cosine(3, 10), r"reward\.length\.of: int is not a reward component"),
        (
            lambda: Cosine(Exact(weight=2.0), 10),
            r"reward\.length\.of\.weight has no effect: set reward\.length\.weight",
        ),
        (lambda: Cosine(Exact(), 0), r"reward\.length\.max_length must be a whole number from 1, got 0"),
        (lambda: Cosine(Exact(), 10, right_long=math.inf), r"reward\.length\.right_long must be a finite number"),
        (lambda: Cosine(Exact(), 10, wrong_short="a"), r"reward\.length\.wrong_short must be a finite number"),
        (lambda: Repetition(0), r"reward\.repetition\.ngram must be a whole number from 1, got 0"),
        (
            lambda: Repetition(max_penalty=0.5),
            r"reward\.repetition\.max_penalty must be a number of at most 0, got 0\.5",
        ),
        (lambda: Repetition(max_penalty=-math.inf), r"reward\.repetition\.max_penalty"),
        (lambda: Repetition(max_penalty=math.nan), r"reward\.repetition\.max_penalty"),
    ],
)
def test_options(make, message):
    with pytest.raises(UsageError, match=message):
        make()
