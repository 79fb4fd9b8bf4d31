import random

import pytest
import torch

from grpo_lightning.objective import load_objective
from tests.objective import reference
from tests.objective.options import OPTIONS, compose, mask_of

IDS3 = torch.tensor([0, 0, 1])


def norm(name, length=7):
    extra = [f"loss_norm.length={length}"] if name == "constant" else []
    return load_objective([f"loss_norm={name}", "clip=unclipped", "kl=none", *extra])


def weighted(objective, losses, lengths, ids):
    losses = torch.as_tensor(losses, dtype=torch.float64)
    return (objective.weights(mask_of(lengths, losses.shape[1]), ids) * losses).sum().item()


def test_published_aggregation_cases():
    losses, lengths = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]], [2, 3, 1]
    assert weighted(norm("token"), losses, lengths, IDS3) == pytest.approx(5.0)
    assert weighted(norm("sequence_sum"), losses, lengths, IDS3) == pytest.approx(10.0)
    assert weighted(norm("sequence"), losses, lengths, IDS3) == pytest.approx(5.5)
    assert weighted(norm("constant", 4), losses, lengths, IDS3) == pytest.approx(2.5)
    assert weighted(norm("constant", 10), losses, lengths, IDS3) == pytest.approx(1.0)
    # groups {row 0, row 1} and {row 2}: (3 + 18) / 5 and 9, their mean
    assert weighted(norm("prompt"), losses, lengths, IDS3) == pytest.approx(6.6)
    mask = mask_of(lengths, 4)
    torch.testing.assert_close(norm("constant", 8).weights(mask, IDS3), mask.double() / 24)


def test_two_ranks_add_up_to_the_whole():
    losses = torch.arange(1.0, 13).reshape(4, 3)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 0, 1]], dtype=torch.bool)
    w = norm("constant", 6).weights(mask, torch.tensor([0, 0, 1, 1]))
    whole = (w * losses).sum()
    assert whole.item() == pytest.approx(53 / 24)
    # The gradients of two ranks are averaged: each multiplies its share by the world size of two.
    assert torch.stack([2 * (w[:2] * losses[:2]).sum(), 2 * (w[2:] * losses[2:]).sum()]).mean().item() == pytest.approx(
        53 / 24
    )


@pytest.mark.parametrize(("name", "expected"), [("sequence", 0.0), ("token", 0.5), ("constant", 0.25)])
def test_p01_the_mode_decides_whether_the_loss_is_zero(name, expected):
    objective = norm(name, 4)
    a = torch.tensor([[1.0], [-1.0]]).expand(2, 3)
    out = objective.loss(torch.zeros(2, 3), None, a, mask_of([1, 3], 3), torch.tensor([0, 0]))
    assert out.loss.item() == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize(("name", "expected"), [("token", 2.8), ("constant", 1.4)])
def test_p02_p08_the_divisor_is_counted_over_the_whole_step(name, expected):
    # one token of loss 1, nine of loss 3: -A with ratio 1
    objective = norm(name, 10)
    mask, ids = mask_of([1, 9], 9), torch.tensor([0, 1])
    a = torch.tensor([[-1.0], [-3.0]]).expand(2, 9)
    w = objective.weights(mask, ids)
    logp = torch.zeros(2, 9, requires_grad=True)
    whole = objective.loss(logp, None, a, mask, ids)
    assert whole.loss.item() == pytest.approx(expected)
    whole.loss.backward()
    cut = torch.zeros(2, 9, requires_grad=True)
    losses = [
        objective.loss(cut[i : i + 1], None, a[i : i + 1], mask[i : i + 1], ids[i : i + 1], weights=w[i : i + 1]).loss
        for i in (0, 1)
    ]
    sum(losses).backward()
    assert sum(losses).item() == pytest.approx(expected)
    torch.testing.assert_close(cut.grad, logp.grad)


@pytest.mark.parametrize("name", OPTIONS["loss_norm"])
def test_p04_p11_one_row_at_a_time_is_four_rows_at_once(name):
    objective, ids = norm(name), torch.tensor([0, 0, 1, 1])
    mask = mask_of([2, 4, 1, 3], 4)
    logp = torch.randn(4, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()
    a = torch.tensor([[1.0], [-1.0], [0.5], [-0.5]]).expand(4, 4)
    whole = torch.autograd.grad(objective.loss(logp, None, a, mask, ids).loss, logp)[0]
    w, accumulated = objective.weights(mask, ids), torch.zeros(4, 4)
    for i in range(4):
        part = objective.loss(
            logp[i : i + 1], None, a[i : i + 1], mask[i : i + 1], ids[i : i + 1], weights=w[i : i + 1]
        )
        accumulated += torch.autograd.grad(part.loss, logp)[0]
    torch.testing.assert_close(accumulated, whole)


@pytest.mark.parametrize("name", OPTIONS["loss_norm"])
def test_p05_a_row_that_left_the_loss_leaves_the_denominators(name):
    objective = norm(name, 3)
    a = torch.full((2, 5), -1.0)
    mask, ids = mask_of([3, 5], 5), torch.tensor([0, 1])
    kept = objective.keep_rows(torch.zeros(2), torch.tensor([False, True]))
    assert kept.all()  # without overlong filtering truncated rows stay
    kept = load_objective(["overlong=filter"]).keep_rows(torch.zeros(2), torch.tensor([False, True]))
    logp = torch.zeros(2, 5, requires_grad=True)
    out = objective.loss(logp, None, a, mask & kept[:, None], ids)
    assert out.loss.item() == pytest.approx(3.0 if name in ("sequence_sum", "luspo") else 1.0)
    nothing = objective.loss(logp, None, a, torch.zeros_like(mask), ids)
    nothing.loss.backward()
    assert nothing.loss.item() == 0
    assert logp.grad.tolist() == [[0.0] * 5] * 2
    assert all(count == 0 for _, count in nothing.metrics.values())


@pytest.mark.parametrize("name", OPTIONS["loss_norm"])
def test_p07_padding_is_no_part_of_any_weight(name):
    objective, ids = norm(name), torch.tensor([0, 0, 1])
    narrow, wide = mask_of([2, 3, 1], 4), mask_of([2, 3, 1], 8)
    w = objective.weights(wide, ids)
    torch.testing.assert_close(w[:, :4], objective.weights(narrow, ids))
    assert w[:, 4:].abs().sum() == 0


def test_p07_constant_divides_by_rows_and_length():
    mask = mask_of([2, 4, 0], 4)
    assert norm("constant", 100).weights(mask, IDS3)[1].tolist() == pytest.approx([1 / 200] * 4)


def test_a_constant_that_was_not_given_is_named():
    objective = load_objective(["algorithm=dr_grpo"])
    with pytest.raises(ValueError, match=r"loss_norm=constant needs loss_norm.length"):
        objective.weights(mask_of([1], 2), torch.tensor([0]))


@pytest.mark.parametrize("name", OPTIONS["loss_norm"])
def test_equals_the_plain_loop(name):
    dice = random.Random(name)
    for _ in range(30):
        n, width = dice.randint(1, 8), 6
        lengths = [dice.randint(0, width) for _ in range(n)]
        ids = [dice.choice((1, 5, 70)) for _ in range(n)]
        mask = mask_of(lengths, width)
        expected = reference.weights(name, lengths, ids, constant=7)
        w = compose(loss_norm=name).weights(mask, torch.tensor(ids))
        torch.testing.assert_close(w, torch.tensor(expected, dtype=torch.float64)[:, None] * mask, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", ["sequence", "token", "prompt"])
def test_means_weigh_one_in_all(name):
    assert compose(loss_norm=name).weights(
        mask_of([2, 0, 5, 1], 5), torch.tensor([3, 1, 3, 8])
    ).sum().item() == pytest.approx(1)


def test_luspo_multiplies_the_surrogate_of_a_row_by_its_length():
    # rows of 1 and 3 tokens, A = 1 and -1, ratios e^0.1 and e^-0.2: -(1 * e^0.1 - 3 * e^-0.2) / 2
    objective = load_objective(["algorithm=luspo", "clip=unclipped"])
    x = torch.tensor([[0.1, 9.0, 9.0], [-0.2, -0.5, 0.1]])
    a = torch.tensor([[1.0], [-1.0]]).expand(2, 3)
    out = objective.loss(x, torch.zeros(2, 3), a, mask_of([1, 3], 3), torch.tensor([0, 0]))
    assert out.loss.item() == pytest.approx(-(2.718281828**0.1 - 3 * 2.718281828**-0.2) / 2)
    gspo = load_objective(["algorithm=gspo", "clip=unclipped"])
    out = gspo.loss(x, torch.zeros(2, 3), a, mask_of([1, 3], 3), torch.tensor([0, 0]))
    assert out.loss.item() == pytest.approx(-(2.718281828**0.1 - 2.718281828**-0.2) / 2)
    mask = mask_of([2, 5, 0, 1], 5)
    ids = torch.tensor([0, 0, 1, 1])
    assert torch.equal(objective.weights(mask, ids), compose(loss_norm="sequence_sum").weights(mask, ids))


def test_dapo_as_printed_and_as_coded_differ_where_prompts_have_different_lengths():
    mask, ids = mask_of([1, 1, 3, 5], 5), torch.tensor([0, 0, 1, 1])
    printed, coded = (compose(loss_norm=name).weights(mask, ids).sum(1).tolist() for name in ("prompt", "token"))
    assert printed == pytest.approx([1 / 4, 1 / 4, 3 / 16, 5 / 16])  # half of the weight for each prompt
    assert coded == pytest.approx([1 / 10, 1 / 10, 3 / 10, 5 / 10])
