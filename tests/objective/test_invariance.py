"""The gradient of every combination is that of the whole minibatch, however it is cut, ordered, padded and masked."""

import random

import pytest
import torch

from tests.objective.options import OPTIONS, combinations, compose, corrected

GARBAGE = (0.0, 1e4, -1e4, float("inf"), float("-inf"), float("nan"))
LENGTHS = [3, 1, 5, 2, 0, 4]
IDS = [7, 2, 7, 2, 9, 9]


class Minibatch:
    """Ragged rows, laid out as padded tensors in any way. Gradients come back per token, in the order of the rows."""

    def __init__(self, dtype):
        g = torch.Generator().manual_seed(0)
        self.dtype, self.tokens = dtype, sum(LENGTHS)
        self.start = [sum(LENGTHS[:i]) for i in range(len(LENGTHS))]
        base = torch.randn(self.tokens, generator=g, dtype=torch.float64) - 2
        noise = [0.5 * torch.randn(self.tokens, generator=g, dtype=torch.float64) for _ in range(2)]
        row_advantage = torch.randn(len(LENGTHS), generator=g, dtype=torch.float64)
        self.values = {
            "logp": base,
            "old": base + noise[0],
            "ref": base + noise[1],
            "sampler": base + noise[0] + torch.randn(self.tokens, generator=g, dtype=torch.float64),
            "a": row_advantage.repeat_interleave(torch.tensor(LENGTHS)),
        }

    def lay_out(self, rows, *, left=0, right=0, hole=False, garbage=0.0):
        """Where each token of `rows` goes: (mask [n, T], flat index of the tokens under the mask)."""
        width = left + max((LENGTHS[i] for i in rows), default=0) + right + int(hole)
        mask = torch.zeros(len(rows), width, dtype=torch.bool)
        for k, i in enumerate(rows):
            at = left if right or not left else width - LENGTHS[i]  # left padding alone: rows end at the right edge
            places = [at + t + int(hole and t > 0) for t in range(LENGTHS[i])]  # a hole after the first token
            mask[k, places] = True
        index = torch.tensor([self.start[i] + t for i in rows for t in range(LENGTHS[i])], dtype=torch.long)
        return mask, index

    def spread(self, flat, mask, index, garbage):
        return torch.full(mask.shape, garbage, dtype=flat.dtype).index_put((mask,), flat[index])

    def gradient(self, objective, cuts, **layout):
        garbage = layout.get("garbage", 0.0)
        leaf = self.values["logp"].to(self.dtype).requires_grad_()
        # Weights of the whole minibatch, counted before it is cut and in another order and layout.
        everything = list(range(len(LENGTHS)))
        mask, index = self.lay_out(everything)
        flat_weights = torch.empty(self.tokens, dtype=torch.float64)
        flat_weights[index] = objective.weights(mask, torch.tensor(IDS))[mask]
        total = 0.0
        for rows in cuts:
            mask, index = self.lay_out(rows, **layout)
            flat = {name: v.to(self.dtype) for name, v in self.values.items()} | {"logp": leaf, "w": flat_weights}
            x = {name: self.spread(v, mask, index, garbage) for name, v in flat.items()}
            ids = torch.tensor([IDS[i] for i in rows], dtype=torch.long)
            out = objective.loss(x["logp"], x["old"], x["a"], mask, ids, x["ref"], x["w"], sampler_logp=x["sampler"])
            out.loss.backward()
            total += out.loss.item()
        return leaf.grad, total


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("names", combinations() + corrected(), ids=lambda names: "-".join(names.values()))
def test_gradient_invariance(names, dtype):
    objective, batch, dice = compose(**names), Minibatch(dtype), random.Random(str(names))
    tolerance = 1e-5 if dtype == torch.float32 else 1e-10
    everything = list(range(len(LENGTHS)))
    expected, loss = batch.gradient(objective, [everything])
    assert expected.abs().sum() > 0

    # `weights=None` counts the rows given: the same, where they are the whole minibatch.
    mask, index = batch.lay_out(everything)
    leaf = batch.values["logp"].to(dtype).requires_grad_()
    x = {name: batch.spread(v.to(dtype), mask, index, 0.0) for name, v in batch.values.items()}
    logp = batch.spread(leaf, mask, index, 0.0)
    ids = torch.tensor(IDS)
    objective.loss(logp, x["old"], x["a"], mask, ids, x["ref"], sampler_logp=x["sampler"]).loss.backward()
    assert_same(leaf.grad, expected, tolerance)

    order = dice.sample(everything, len(everything))
    at = dice.randint(1, 4)
    for cuts, layout in (
        ([order], {}),
        ([[i] for i in order], {}),
        ([order[:at], order[at:]], {"right": 4}),
        ([order], {"left": 3}),
        ([order[:at], order[at:]], {"left": 2, "right": 3}),
        ([order[:at], order[at:], []], {"hole": True}),
    ):
        gradient, total = batch.gradient(objective, cuts, garbage=dice.choice(GARBAGE), **layout)
        assert_same(gradient, expected, tolerance)
        assert total == pytest.approx(loss, rel=tolerance * 10, abs=tolerance)


@pytest.mark.parametrize("name", OPTIONS["advantage"][:6])
def test_advantages_do_not_depend_on_padding_order_or_ids(name):
    objective = compose(advantage=name)
    rewards = torch.tensor([0.1, 0.9, 0.4, 0.7, 0.2, 0.3], dtype=torch.float64)
    batch = Minibatch(torch.float64)
    mask, _ = batch.lay_out(range(6))
    expected = objective.advantages(rewards, torch.tensor(IDS), mask)
    order = [4, 2, 5, 0, 3, 1]
    wide, _ = batch.lay_out(order, left=3, right=2)
    renamed = torch.tensor([{7: 100, 2: -3, 9: 0}[IDS[i]] for i in order])
    a = objective.advantages(rewards[order], renamed, wide)
    for k, i in enumerate(order):
        torch.testing.assert_close(a[k, wide[k]], expected[i, mask[i]], rtol=1e-12, atol=1e-12)


def assert_same(gradient, expected, tolerance):
    assert torch.linalg.vector_norm(gradient - expected) <= tolerance * torch.linalg.vector_norm(expected)
