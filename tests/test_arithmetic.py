"""The arithmetic task: what it asks, and that no held-out question can be trained on."""

import random
from itertools import islice

import pytest

from grpo_lightning.data.arithmetic import Arithmetic, carries, is_held_out, questions
from grpo_lightning.errors import UsageError

HELD_OUT = ["446+393=", "299+552=", "698+653="]


def pair(item):
    a, b = item.columns["a"], item.columns["b"]
    return min(a, b), max(a, b)


def test_items():
    train, held_out = Arithmetic(size=3000).load(256)
    assert (len(train), len(held_out)) == (3000, 256)
    for item in train + held_out:
        a, b = item.columns["a"], item.columns["b"]
        assert 100 <= a <= 999 and 100 <= b <= 999
        assert item.prompt == f"{a}+{b}="
        assert item.answer == str(a + b)
    assert len({item.prompt for item in train + held_out}) == 3256


def test_train_and_held_out_are_disjoint_even_as_mirror_images():
    train, held_out = Arithmetic(size=20_000).load(2000)
    assert not {pair(item) for item in train} & {pair(item) for item in held_out}
    assert all(is_held_out(*pair(item)) for item in held_out)
    assert not any(is_held_out(*pair(item)) for item in train)
    # about 400 of 20,000 would be held out by chance, so the split is what keeps them apart
    rng = random.Random(0)
    assert 300 < sum(is_held_out(rng.randint(100, 999), rng.randint(100, 999)) for _ in range(20_000)) < 500


def test_the_split_is_the_same_everywhere():
    train, held_out = Arithmetic(size=50).load(20)
    assert Arithmetic(size=50).load(20) == (train, held_out)
    longer_train, longer_held_out = Arithmetic(size=100).load(40)
    assert (longer_train[:50], longer_held_out[:20]) == (train, held_out)
    # Written down: the shipped model was pretrained with these left out.
    assert [item.prompt for item in held_out[:3]] == HELD_OUT
    assert is_held_out(*pair(held_out[0])) and is_held_out(*reversed(pair(held_out[0])))


def test_questions_are_spread_over_digits_and_carries():
    drawn = list(islice(questions(random.Random(1), held_out=True), 4000))
    assert all(is_held_out(a, b) for a, b in drawn)
    counts = [sum(carries(a, b) == n for a, b in drawn) for n in range(4)]
    assert min(counts) > 300
    assert {a // 100 for a, _ in drawn} == set(range(1, 10))
    assert {b % 10 for _, b in drawn} == set(range(10))


@pytest.mark.parametrize(
    ("a", "b", "expected"), [(347, 285, 2), (123, 456, 0), (500, 500, 1), (999, 999, 3), (909, 191, 3), (95, 5, 2)]
)
def test_carries(a, b, expected):
    assert carries(a, b) == expected


@pytest.mark.parametrize("size", [0, -1, 400_001, 1.5, "many", True])
def test_a_wrong_size_is_refused(size):
    with pytest.raises(UsageError, match=rf"data\.size must be a whole number from 1 to 400000, got {size!r}"):
        Arithmetic(size=size)


@pytest.mark.parametrize("prompts", [-1, 8001, 2.5, None])
def test_a_wrong_number_of_held_out_questions_is_refused(prompts):
    with pytest.raises(UsageError, match=rf"eval\.prompts must be a whole number from 0 to 8000 .*, got {prompts}"):
        Arithmetic(size=1).load(prompts)
