"""Train and held-out: disjoint by content, the same for every seed and order."""

import random

import pytest

from grpo_lightning.data.prompts import Item
from grpo_lightning.data.split import content, split
from grpo_lightning.errors import UsageError

ITEMS = [Item(f"What is {a} + {b}?", str(a + b), {"a": a}) for a in range(10) for b in range(10)]


def contents(items):
    return {content(item, "{prompt}") for item in items}


def test_disjoint_and_complete():
    parts = split(ITEMS, 30, "{prompt}")
    assert len(parts.train) == 70 and len(parts.held_out) == 30 and parts.duplicates == 0
    assert not contents(parts.train) & contents(parts.held_out)
    assert [item for item in ITEMS if item in parts.train] == parts.train  # the order of the file


def test_chosen_by_content_alone():
    expected = contents(split(ITEMS, 30, "{prompt}").held_out)
    for seed in range(3):
        shuffled = random.Random(seed).sample(ITEMS, len(ITEMS))
        random.seed(seed)
        assert contents(split(shuffled, 30, "{prompt}").held_out) == expected
    assert contents(split(ITEMS, 10, "{prompt}").held_out) < expected


def test_repetitions_count_as_one():
    repeated = [*ITEMS, Item("what is 1 +  1?\n", "2"), *ITEMS[:5]]
    parts = split(repeated, 30, "{prompt}")
    assert parts.duplicates == 6
    assert len(parts.train) == 70
    assert not contents(parts.train) & contents(parts.held_out)


def test_rows_that_differ_in_what_the_template_shows():
    items = [Item("How many?", str(i), {"story": f"There are {i}."}) for i in range(4)]
    assert split(items, 1, "{story} {prompt}").duplicates == 0
    with pytest.raises(UsageError, match="has 1 different prompts"):
        split(items, 1, "{prompt}")


def test_chat_messages():
    items = [Item([{"role": "user", "content": f"q{i % 3}"}], "1") for i in range(4)]
    parts = split(items, 1, "{prompt}")
    assert (len(parts.train), len(parts.held_out), parts.duplicates) == (2, 1, 1)


def test_a_held_out_set_of_its_own():
    held_out = [*ITEMS[:10], Item("What  is 0 + 0?", "0"), Item("new", "1")]
    parts = split(ITEMS, 5, "{prompt}", held_out)
    assert len(parts.train) == 90 and len(parts.held_out) == 5
    assert parts.duplicates == 11
    with pytest.raises(UsageError, match="no training prompt is left"):
        split(ITEMS[:10], 5, "{prompt}", held_out)


def test_none_held_out():
    assert split(ITEMS, 0, "{prompt}").held_out == []


@pytest.mark.parametrize("n", [100, 101])
def test_too_many_held_out(n):
    with pytest.raises(UsageError, match=rf"eval\.prompts={n}, but the data has 100 different prompts"):
        split(ITEMS, n, "{prompt}")


@pytest.mark.parametrize("n", [-1, 1.5, "3", True])
def test_bad_number(n):
    with pytest.raises(UsageError, match=r"eval\.prompts must be a whole number"):
        split(ITEMS, n, "{prompt}")
