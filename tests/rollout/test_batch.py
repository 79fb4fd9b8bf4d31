"""How rows are put together: what the model sees in packs, what the objective sees in rows."""

import torch

from grpo_lightning.rollout.batch import PADDING, PROMPT, collate, loss_masks
from tests.rollout.test_buffer import row


def numbered(prompt: list[int], completion: list[int], group: int = 0):
    made = row(len(prompt), len(completion), group)
    made.token_ids = torch.tensor(prompt + completion)
    return made


def test_rows_of_their_own_are_padded_on_the_right_and_end_before_their_last_token():
    # P28: the tokens are 0, the padding id; a mask taken from `ids != pad` would be empty.
    batch = collate([row(2, 3, 1, token=0), row(4, 1, 2, token=0)])
    assert batch.input_ids.shape == (2, 4) and batch.segments is None
    assert batch.position_ids.tolist() == [[0, 1, 2, 3], [0, 1, 2, 3]]
    assert batch.mask.tolist() == [[True, True, True], [True, False, False]]
    assert batch.advantages.tolist() == [[1, 1, 1], [2, 0, 0]]
    assert batch.group_ids.tolist() == [1, 2]
    assert batch.old_logp is None and batch.fresh.tolist() == [True, True]
    assert batch.places.tolist() == [1, 2, 3, 7] and batch.slots.tolist() == [0, 1, 2, 3]


def test_a_pack_holds_its_prompt_once():
    # prompt 5 6 7; completions 1 2 3, 4 and 8 9: of each all but the last token is an input.
    rows = [numbered([5, 6, 7], [1, 2, 3]), numbered([5, 6, 7], [4]), numbered([5, 6, 7], [8, 9]), numbered([4], [2])]
    batch = collate(rows, [3, 1])
    assert batch.input_ids.tolist() == [[5, 6, 7, 1, 2, 8], [4, 0, 0, 0, 0, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 3], [0] * 6]
    assert batch.segments.tolist() == [[PROMPT] * 3 + [1, 1, 3], [PROMPT] + [PADDING] * 5]
    # The prompt's last token predicts the first token of all three rows.
    assert batch.places.tolist() == [2, 3, 4, 2, 2, 5, 6]
    assert batch.targets.tolist() == [1, 2, 3, 4, 8, 9, 2]
    assert batch.slots.tolist() == [0, 1, 2, 3, 6, 7, 9]
    spread = batch.spread(torch.arange(1.0, 8.0))
    assert spread.tolist() == [[1, 2, 3], [4, 0, 0], [5, 6, 0], [7, 0, 0]]
    assert batch.mask.tolist() == [[True] * 3, [True, False, False], [True, True, False], [True, False, False]]


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
