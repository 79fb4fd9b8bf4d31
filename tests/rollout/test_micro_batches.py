"""How a minibatch is cut into micro-batches, and which rows share a prompt."""

import itertools

import pytest
import torch

from grpo_lightning.rollout.micro_batches import cut_for, packs_of, without_loss
from tests.rollout.test_batch import numbered
from tests.rollout.test_buffer import row

ROWS = [row(p, c) for p, c in ((3, 9), (3, 1), (2, 2), (5, 20), (1, 1), (3, 8))]
GROUPS = [numbered([p] * (2 + p), [1] * c) for p in range(1, 6) for c in (3, 9, 1, 30, 12, 12, 7, 2)]


def lines(batch, rows):
    """The rows of each pack."""
    ends = list(itertools.accumulate(batch.packs))
    return [[rows[i] for i in batch.rows[end - size : end]] for end, size in zip(ends, batch.packs, strict=True)]


@pytest.mark.parametrize("attention", [None, 0.0, 1e-3, 1.0])
@pytest.mark.parametrize("processes", [1, 2, 3, 7])
@pytest.mark.parametrize("budget", [1, 10, 24, 50, 1000])
@pytest.mark.parametrize("rows", [ROWS, GROUPS])
def test_every_row_is_in_one_micro_batch_within_the_token_budget(rows, budget, processes, attention):
    batches = [cut_for(rows, budget, process, processes, attention) for process in range(processes)]
    assert len({len(own) for own in batches}) == 1, "sharded models need all processes to take part in each"
    counted = [i for own in batches for batch in own if batch.counts for i in batch.rows]
    assert sorted(counted) == list(range(len(rows)))
    for batch in itertools.chain.from_iterable(batches):
        assert sum(batch.packs) == len(batch.rows)
        packs = lines(batch, rows)
        for pack in packs:
            assert len({tuple(r.token_ids[: r.start].tolist()) for r in pack}) == 1, "rows of a pack share their prompt"
            assert len(pack) == 1 or attention is not None
        padded = len(packs) * max(p[0].start + sum(r.length - 1 for r in p) for p in packs)
        assert padded <= budget or len(batch.rows) == 1
        assert batch.counts or len(batch.rows) == 1
    assert cut_for([], budget, 0, processes, attention) == []


def test_prompts_are_shared_where_it_pays():
    # A prompt of 100 and ten completions of 11 (10 inputs): all behind one prompt is 200 tokens, apart they are 1100.
    rows = [numbered([1] * 100, [2] * 11) for _ in range(10)]
    sizes = lambda attention, most=10_000: sorted(map(len, packs_of(rows, most, attention)))  # noqa: E731
    assert sizes(0.0) == [10] and sizes(None) == [1] * 10
    # n packs of L = 100 + 100 / n tokens cost n L (1 + a L). a = 0.01: 600, 750, 933, ... for n = 1, 2, 3.
    assert sizes(0.01) == [10]
    assert sizes(0.0, most=150) == [5, 5] and sizes(0.0, most=105) == [1] * 10
    # A prompt of 1 and ten of 101 inputs-and-one: n packs of L = 1 + 1000 / n; with a = 0.01, 10 packs of 101 cost
    # 10 * 101 * 2.01 = 2030, 9 cost more (9 * 112.1 * 2.12 = 2139): nothing is shared.
    rows = [numbered([1], [2] * 101) for _ in range(10)]
    assert sizes(0.01) == [1] * 10
    assert sizes(0.0) == [10]


def test_rows_without_a_loss_token_are_in_no_pass():
    rows = [row(1, 2, group) for group in range(4)]  # group 0 has advantage 0
    rows[2].loss_mask = torch.zeros_like(rows[2].loss_mask)
    assert without_loss(rows, True) == ([1, 3], [0])
    assert without_loss(rows, False) == ([0, 1, 3], [])
    assert without_loss(rows[:1], True) == ([0], []), "one gives every weight its gradient of zero"


def test_a_prompt_is_what_its_tokens_are_not_its_number_or_length():
    rows = [numbered([1, 2], [3]), numbered([2, 1], [3]), numbered([1, 2], [4]), numbered([1, 2, 3], [4])]
    rows[2].group_id = rows[2].prompt_id = 9
    assert sorted(map(sorted, packs_of(rows, 100, 0.0))) == [[0, 2], [1], [3]]


def test_processes_get_about_as_much_each():
    # One prompt: its rows in one pack would leave all processes but one without work.
    rows = [numbered([1] * 50, [2] * 20) for _ in range(16)]
    own = [cut_for(rows, 10_000, process, 4, 0.0) for process in range(4)]
    assert all(len(batches) == 1 and batches[0].counts for batches in own)
    loads = [len(batches[0].rows) for batches in own]
    assert sum(loads) == 16 and max(loads) <= 1.5 * min(loads)
