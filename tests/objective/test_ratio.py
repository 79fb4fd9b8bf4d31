import math

import pytest
import torch

from tests.objective.options import compose, full

X = torch.tensor([[0.1, 0.5, 9e9], [-0.2, 0.0, 0.2]], dtype=torch.float64)
MASK = torch.tensor([[True, True, False], [True, True, True]])


def test_token_is_the_log_ratio_itself():
    assert compose(ratio="token").ratio(X, MASK)[MASK].tolist() == [0.1, 0.5, -0.2, 0.0, 0.2]


def test_sequence_is_the_geometric_mean_on_every_token():
    log_ratio = compose(ratio="sequence").ratio(X, MASK)
    assert log_ratio[MASK].tolist() == pytest.approx([0.3, 0.3, 0, 0, 0])
    assert compose(ratio="sequence").ratio(X[:, :0], MASK[:, :0]).shape == (2, 0)


def test_the_gradient_goes_through_the_mean():
    # One row of two tokens, A = 1, unclipped, sequence norm: loss -s, d loss / d logp_t = -s / 2 for both tokens.
    objective = compose(ratio="sequence", clip="unclipped")
    logp = torch.tensor([[0.1, 0.5]], dtype=torch.float64, requires_grad=True)
    out = objective.loss(logp, torch.zeros(1, 2, dtype=torch.float64), torch.ones(1, 2), full(1, 2), torch.tensor([0]))
    out.loss.backward()
    assert out.loss.item() == pytest.approx(-math.exp(0.3))
    assert logp.grad.tolist() == [pytest.approx([-math.exp(0.3) / 2] * 2)]


def test_gspo_clips_whole_rows():
    # s = exp(0.3) is above 1 + 4e-4: with A > 0 the whole row is clipped, with A < 0 none of it.
    objective = compose(ratio="sequence", clip="gspo")
    for advantage, loss, slope in ((1.0, -1.0004, 0.0), (-1.0, math.exp(0.3), math.exp(0.3) / 2)):
        logp = torch.tensor([[0.1, 0.5]], requires_grad=True)
        out = objective.loss(logp, torch.zeros(1, 2), torch.full((1, 2), advantage), full(1, 2), torch.tensor([0]))
        out.loss.backward()
        assert out.loss.item() == pytest.approx(loss)
        assert logp.grad.tolist() == [pytest.approx([slope] * 2)]


def test_sequence_refuses_an_advantage_that_varies_within_a_row():
    a = torch.tensor([[1.0, 1.0, 5.0], [1.0, 2.0, 1.0]])
    with pytest.raises(ValueError, match="ratio=sequence needs one advantage per row, that of row 1 varies"):
        compose(ratio="sequence").loss(torch.zeros(2, 3), None, a, MASK, torch.tensor([0, 0]))


def test_p43_a_metric_counts_each_row_once():
    out = compose(ratio="sequence").loss(torch.zeros(2, 3), None, torch.ones(2, 3), MASK, torch.tensor([0, 0]))
    assert [v.item() for v in out.metrics["ratio/mean"]] == [2.0, 2.0]
    token = compose().loss(torch.zeros(2, 3), None, torch.ones(2, 3), MASK, torch.tensor([0, 0]))
    assert [v.item() for v in token.metrics["ratio/mean"]] == [5.0, 5.0]
