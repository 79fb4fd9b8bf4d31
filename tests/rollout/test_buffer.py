"""Rows, collating, and how a rollout is cut into minibatches of whole groups and micro-batches of rows."""

import torch

from grpo_lightning.rollout.buffer import RolloutBuffer, Row, collate, cut, loss_masks


def row(prompt: int, completion: int, group: int = 0, token: int = 1) -> Row:
    ids = torch.full((prompt + completion,), token)
    return Row(
        token_ids=ids, loss_mask=torch.arange(len(ids)) >= prompt, start=prompt, group_id=group, prompt_id=group,
        sampler_logp=torch.zeros(completion), weights_version=0, advantage=torch.full((completion,), float(group)),
    )  # fmt: skip


def test_collate_aligns_completions_and_masks_come_from_lengths_not_from_ids():
    # P28: the token is 0, the padding id; a mask taken from `ids != pad` would be empty.
    batch = collate([row(2, 3, 1, token=0), row(4, 1, 2, token=0)])
    assert batch.start == 4 and batch.input_ids.shape == (2, 7)
    assert batch.attention_mask.tolist() == [[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0]]
    assert batch.mask.tolist() == [[True, True, True], [True, False, False]]
    assert batch.advantages.tolist() == [[1, 1, 1], [2, 0, 0]]
    assert batch.group_ids.tolist() == [1, 2]
    assert batch.old_logp is None and batch.fresh.tolist() == [True, True]


def test_rows_with_an_old_log_probability_stand_beside_fresh_ones():
    kept = row(1, 2)
    kept.old_logp = torch.tensor([-1.0, -2.0])
    batch = collate([kept, row(1, 3)])
    assert batch.fresh.tolist() == [False, True]
    assert batch.old_logp.tolist() == [[-1, -2, 0], [0, 0, 0]]


def test_a_row_out_of_the_loss_has_an_empty_mask():
    gone = row(2, 2)
    gone.loss_mask = torch.zeros_like(gone.loss_mask)
    mask, _ = loss_masks([gone, row(1, 1)])
    assert mask.tolist() == [[False, False], [True, False]]


def test_micro_batches_hold_every_row_once_within_the_token_budget():
    rows = [row(p, c) for p, c in ((3, 9), (3, 1), (2, 2), (5, 20), (1, 1), (3, 8))]
    for budget in (1, 10, 24, 50, 1000):
        batches = cut(rows, budget)
        assert sorted(i for batch in batches for i in batch) == list(range(len(rows)))
        for batch in batches:
            padded = len(batch) * (max(rows[i].start for i in batch) + max(rows[i].length for i in batch))
            assert padded <= budget or len(batch) == 1
    assert len(cut(rows, 1000)) == 1 and len(cut(rows, 1)) == len(rows)


def test_minibatches_are_whole_groups_each_once_per_pass_in_a_keyed_order():
    rows = [row(1, 1, group) for group in range(10) for _ in range(3)]
    buffer = RolloutBuffer(epochs=2, minibatches=4, seed=3)
    assert len(buffer) == 8
    buffer.fill(rows, rollout=1)
    orders = []
    for epoch in range(2):
        parts = [[r.group_id for r in buffer.minibatch(epoch * 4 + k)] for k in range(4)]
        assert all(part.count(group) == 3 for part in parts for group in set(part))
        assert sorted(group for part in parts for group in set(part)) == list(range(10))
        orders.append(parts)
    assert orders[0] != orders[1], "each pass has its own order"
    again = RolloutBuffer(2, 4, 3)
    again.fill(rows, 1)
    assert [[r.group_id for r in again.minibatch(k)] for k in range(4)] == orders[0]
    again.fill(rows, 2)
    assert [[r.group_id for r in again.minibatch(k)] for k in range(4)] != orders[0]


def test_too_few_groups_leave_minibatches_empty():
    buffer = RolloutBuffer(1, 4, 0)
    buffer.fill([row(1, 1, 0)], 1)
    assert sorted(len(buffer.minibatch(k)) for k in range(4)) == [0, 0, 0, 1]
    buffer.fill([], 2)
    assert all(buffer.minibatch(k) == [] for k in range(4))
