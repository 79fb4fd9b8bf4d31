"""Rows, and how a rollout is cut into minibatches of whole groups."""

import torch

from grpo_lightning.rollout.buffer import RolloutBuffer, Row


def row(prompt: int, completion: int, group: int = 0, token: int = 1) -> Row:
    ids = torch.full((prompt + completion,), token)
    return Row(
        token_ids=ids, loss_mask=torch.arange(len(ids)) >= prompt, start=prompt, group_id=group, prompt_id=group,
        sampler_logp=torch.zeros(completion), weights_version=0, advantage=torch.full((completion,), float(group)),
    )  # fmt: skip


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
