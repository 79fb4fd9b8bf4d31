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


def test_sequence_arithmetic_is_the_mean_of_the_ratios():
    ratio = compose(ratio="sequence_arithmetic").ratio
    values = ratio(X, MASK).exp()
    first, second = (math.exp(0.1) + math.exp(0.5)) / 2, (math.exp(-0.2) + 1 + math.exp(0.2)) / 3
    assert values[MASK].tolist() == pytest.approx([first] * 2 + [second] * 3)
    x = X.clone().requires_grad_()
    ratio(x, MASK).exp()[:, 0].sum().backward()
    assert x.grad[0].tolist() == pytest.approx([math.exp(0.1) / 2, math.exp(0.5) / 2, 0])
    # a row without tokens, no positions, and what exp alone would not survive
    empty = torch.zeros(1, 3, requires_grad=True)
    value = ratio(empty, torch.zeros(1, 3, dtype=torch.bool))
    value.sum().backward()
    assert value.isfinite().all() and empty.grad.abs().sum() == 0
    assert ratio(X[:, :0], MASK[:, :0]).shape == (2, 0)
    assert ratio(torch.tensor([[800.0, -800.0]]), full(1, 2))[0, 0].item() == pytest.approx(800 - math.log(2))


def test_sequence_token_has_the_value_of_the_row_and_the_gradient_of_the_token():
    objective = compose(ratio="sequence_token", clip="unclipped")
    logp = torch.tensor([[0.1, 0.5]], dtype=torch.float64, requires_grad=True)
    a = torch.tensor([[1.0, -3.0]])  # varies within the row
    out = objective.loss(logp, torch.zeros(1, 2, dtype=torch.float64), a, full(1, 2), torch.tensor([0]))
    out.loss.backward()
    assert out.loss.item() == pytest.approx(math.exp(0.3))  # -(1 - 3) / 2
    assert logp.grad.tolist() == [pytest.approx([-math.exp(0.3) / 2, 3 * math.exp(0.3) / 2])]


@pytest.mark.parametrize("clip", ["gspo", "unclipped", "symmetric"])
def test_sequence_token_is_sequence_where_the_advantage_does_not_vary(clip):
    g = torch.Generator().manual_seed(2)
    x, a = 0.3 * torch.randn(6, 3, generator=g), torch.randn(6, 1, generator=g).expand(6, 3)
    mask, ids = torch.rand(6, 3, generator=g) < 0.7, torch.tensor([0, 0, 0, 1, 1, 1])
    results = []
    for ratio in ("sequence", "sequence_token"):
        logp = x.clone().requires_grad_()
        loss = compose(ratio=ratio, clip=clip).loss(logp, torch.zeros(6, 3), a, mask, ids).loss
        loss.backward()
        results.append((loss.detach(), logp.grad))
    torch.testing.assert_close(results[1], results[0])


def test_sequence_arithmetic_refuses_an_advantage_that_varies_within_a_row():
    with pytest.raises(ValueError, match="ratio=sequence_arithmetic needs one advantage per row"):
        a = torch.tensor([[1.0, 2.0]])
        compose(ratio="sequence_arithmetic").loss(torch.zeros(1, 2), None, a, full(1, 2), torch.tensor([0]))
