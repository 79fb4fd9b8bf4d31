"""entropy: bonus, adaptive bonus, the most uncertain tokens, the tokens of largest covariance."""

import math
import random

import pytest
import torch

from grpo_lightning.objective import load_objective
from grpo_lightning.objective.entropy import AdaptiveBonus, Bonus, ClipCov, KLCov, TopEntropy
from tests.objective.options import full, mask_of, ratio_of

IDS = torch.tensor([0, 0, 1])
MASK = mask_of([2, 3, 1], 4)


def values(seed, *, scale=1.0):
    return scale * torch.randn(3, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def top(fraction, entropy, lengths):
    mask = mask_of(lengths, len(entropy[0]))
    chosen = TopEntropy(fraction).select(mask.double(), mask.double(), mask, entropy=torch.tensor(entropy))
    return [tuple(place) for place in chosen.nonzero().tolist()]


# T1 to T4 of the reference: the share that is masked is 1 - fraction.
T1 = [[0.1, 0.2, 0.3, 0.4, 0.5, 0.6], [0.7, 0.8, 0.9, 1.0, 1.1, 1.2]]
T4 = [[0.1, 0.2, 0.3, 1.4, 0.5, 0.14], [0.5, 0.6, 0.7, 0.8, 0.9, 1.0]]


@pytest.mark.parametrize(
    ("masked", "entropy", "lengths", "expected"),
    [
        (0.8, T1, [6, 4], [(1, 2), (1, 3)]),
        (0.5, T1, [6, 4], [(0, 5), (1, 0), (1, 1), (1, 2), (1, 3)]),
        (0.0, T1, [6, 4], [(0, t) for t in range(6)] + [(1, t) for t in range(4)]),
        (1.0, T1, [6, 4], [(1, 3)]),
        (0.5, T1, [0, 0], []),
        (0.8, T4, [4, 4], [(0, 3), (1, 3)]),
    ],
)
def test_the_most_uncertain_tokens(masked, entropy, lengths, expected):
    assert top(1 - masked, entropy, lengths) == expected


def test_the_quantile_is_that_of_torch():
    for seed in range(20):
        entropy, fraction = values(seed).abs(), random.Random(seed).random()
        threshold = torch.quantile(entropy[MASK], 1 - fraction)
        chosen = TopEntropy(fraction).select(entropy, entropy, MASK, entropy=entropy)
        expected = MASK & (entropy >= threshold - 1e-12)
        assert chosen.tolist() == expected.tolist()


def test_masked_tokens_stay_in_the_denominator():
    objective = load_objective(["kl=none", "loss_norm=token", "clip=unclipped", "entropy=top", "entropy.fraction=0.5"])
    logp = torch.zeros(1, 4, requires_grad=True)
    entropy = torch.tensor([[0.1, 0.2, 0.3, 0.4]])
    out = objective.loss(logp, None, torch.ones(1, 4), full(1, 4), torch.tensor([0]), entropy=entropy)
    out.loss.backward()
    assert logp.grad.tolist() == [[0, 0, -0.25, -0.25]]
    assert ratio_of(out.metrics["entropy/selected_fraction"]) == 0.5
    with pytest.raises(ValueError, match="entropy=top needs `entropy`"):
        objective.loss(logp, None, torch.ones(1, 4), full(1, 4), torch.tensor([0]))


def test_bonus_by_hand_and_its_gradient():
    objective = load_objective(["kl=none", "loss_norm=sequence", "entropy=bonus", "entropy.coef=0.5"])
    assert objective.entropy_gradient and not load_objective([]).entropy_gradient
    entropy = torch.tensor([[0.4, 0.2]], requires_grad=True)
    out = objective.loss(torch.zeros(1, 2), None, torch.zeros(1, 2), full(1, 2), torch.tensor([0]), entropy=entropy)
    out.loss.backward()
    assert out.loss.item() == pytest.approx(-0.5 * 0.3)  # T8: (policy loss - loss) / mean entropy = coef
    assert entropy.grad.tolist() == [[-0.25, -0.25]]
    assert Bonus(0.5)(torch.ones(1, 1), full(1, 1), entropy=torch.tensor([[2.0]])).item() == 0


def test_adaptive_bonus_moves_towards_its_target():
    bonus = AdaptiveBonus(target=0.2, coef=0.01, delta=0.005, min=0.0, max=0.02)
    losses, entropy = torch.ones(1, 1), torch.tensor([[2.0]])
    for step, expected in enumerate((0.015, 0.02, 0.02)):
        bonus.observe({"policy/entropy": 0.1}, 8)
        assert bonus.coef == pytest.approx(expected), step
        assert bonus(losses, full(1, 1), entropy=entropy).item() == pytest.approx(1 - 2 * expected)
    bonus.observe({"policy/entropy": 0.2}, 8)
    assert bonus.coef == 0.02 and bonus.acts
    again = AdaptiveBonus(target=0.2, coef=0.01, delta=0.005, min=0.0, max=0.02)
    for _ in range(5):
        bonus.observe({"policy/entropy": 0.3}, 8)
    assert bonus.coef == pytest.approx(0, abs=1e-12) and bonus(losses, full(1, 1), entropy=entropy).item() == 1
    again.load_state_dict(bonus.state_dict())
    assert (again.coef, again.acts) == (bonus.coef, False)


def covariances_by_hand(logp, advantages):
    pairs = [(logp[i][t], advantages[i][t]) for i in range(3) for t in range(4) if MASK[i, t]]
    means = [sum(pair[k] for pair in pairs) / len(pairs) for k in range(2)]
    return {
        (i, t): (logp[i][t] - means[0]) * (advantages[i][t] - means[1])
        for i in range(3)
        for t in range(4)
        if MASK[i, t]
    }


def test_kl_cov_takes_the_largest_covariances():
    for seed in range(10):
        logp, advantages = values(seed), values(seed + 100)
        cov = covariances_by_hand(logp.tolist(), advantages.tolist())
        expected = sorted(cov, key=lambda place: -cov[place])[:2]  # floor(0.4 * 6)
        chosen = KLCov(fraction=0.4, coef=1.0).select(logp, advantages, MASK)
        assert sorted(map(tuple, chosen.nonzero().tolist())) == sorted(expected)
        assert int(KLCov(fraction=1e-4, coef=1.0).select(logp, advantages, MASK).sum()) == 1
    nothing = torch.zeros(3, 4, dtype=torch.bool)
    assert not KLCov(fraction=0.4, coef=1.0).select(logp, advantages, nothing).any()


def test_kl_cov_by_hand():
    objective = load_objective(
        ["kl=none", "loss_norm=token", "clip=unclipped", "entropy=kl_cov", "entropy.fraction=0.5", "entropy.coef=2"]
    )
    # means -2 and 1: the covariances are 2, 0 and 0, and floor(0.5 * 3) = 1 token is punished, in either direction
    for x in (0.5, -0.5):
        logp, old = torch.tensor([[-1.0, -2.0, -3.0]], requires_grad=True), torch.tensor([[-1.0 - x, -2.0, -2.0]])
        out = objective.loss(logp, old, torch.tensor([[3.0, -1.0, 1.0]]), full(1, 3), torch.tensor([0]))
        kl = math.exp(x) - x - 1
        assert out.loss.item() == pytest.approx((-3 * math.exp(x) + 2 * kl + 1 - math.exp(-1)) / 3)
        out.loss.backward()
        expected = [(-3 * math.exp(x) + 2 * (math.exp(x) - 1)) / 3, 1 / 3, -math.exp(-1) / 3]
        assert logp.grad.tolist()[0] == pytest.approx(expected)


def test_clip_cov_draws_among_the_candidates():
    for seed in range(10):
        logp, advantages = values(seed, scale=2), values(seed + 100, scale=2)
        cov = covariances_by_hand(logp.tolist(), advantages.tolist())
        inside = {place for place, value in cov.items() if 0.1 < value < 3}
        option = ClipCov(fraction=0.4, low=0.1, high=3.0, seed=7)
        chosen = {tuple(place) for place in option.select(logp, advantages, MASK, step=seed).nonzero().tolist()}
        assert chosen <= inside and len(chosen) == min(2, len(inside))
        order = [2, 0, 1]
        moved = option.select(logp[order], advantages[order], MASK[order], step=seed)
        assert {(order[i], t) for i, t in moved.nonzero().tolist()} == chosen
    drawn = {
        tuple(map(tuple, ClipCov(0.2, -100, 100).select(logp, advantages, MASK, step=step).nonzero().tolist()))
        for step in range(40)
    }
    assert len(drawn) == 6  # each token is drawn in some step


def test_clip_cov_takes_the_surrogate_of_a_token_away():
    objective = load_objective(
        ["kl=none", "loss_norm=token", "clip=unclipped", "entropy=clip_cov", "entropy.low=0.5", "entropy.fraction=0.9"]
    )
    logp = torch.tensor([[-1.0, -2.0, -3.0]], requires_grad=True)
    # means -2 and 1/3: covariances 2/3, 0, 4/3: two of them lie above 0.5
    out = objective.loss(logp, None, torch.tensor([[1.0, 1.0, -1.0]]), full(1, 3), torch.tensor([0]))
    out.loss.backward()
    assert logp.grad.tolist()[0] == pytest.approx([0, -1 / 3, 0])


@pytest.mark.parametrize("name", ["top", "clip_cov", "kl_cov", "bonus"])
def test_selection_comes_before_cutting(name):
    overrides = ["kl=none", f"entropy={name}"]
    overrides += ["entropy.fraction=0.4"] if name.endswith("_cov") else []
    overrides += ["entropy.low=0"] if name == "clip_cov" else []
    objective = load_objective(overrides)
    logp, old, advantages, entropy = (values(seed) for seed in range(4))
    entropy = entropy.abs()
    leaf = logp.clone().requires_grad_()
    weights = objective.weights(MASK, IDS)
    out = objective.loss(leaf, old, advantages, MASK, IDS, weights=weights, entropy=entropy)
    out.loss.backward()
    selected = objective.select(logp, advantages, MASK, entropy=entropy) if objective.selects else None
    cut = logp.clone().requires_grad_()
    for row in range(3):
        at = slice(row, row + 1)
        part = objective.loss(
            cut[at], old[at], advantages[at], MASK[at], IDS[at], weights=weights[at], entropy=entropy[at],
            selected=None if selected is None else selected[at],
        )  # fmt: skip
        part.loss.backward()
    torch.testing.assert_close(cut.grad, leaf.grad, rtol=1e-12, atol=1e-12)
    assert leaf.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["entropy=bonus", "entropy.coef=x"], "entropy.coef must be a number"),
        (["entropy=top", "entropy.fraction=2"], r"entropy.fraction must be in \[0, 1\]"),
        (["entropy=clip_cov", "entropy.high=0.5"], r"entropy.high must be in \(1.0, inf\)"),
        (["entropy=kl_cov", "entropy.coef=-1"], r"entropy.coef must be in \[0, inf\)"),
        (["entropy=adaptive", "entropy.coef=2"], r"entropy.coef must be in \[0.0, 1.0\]"),
        (["entropy=adaptive", "entropy.delta=0"], r"entropy.delta must be in \(0, inf\)"),
    ],
)
def test_a_wrong_value_is_named(overrides, message):
    with pytest.raises(ValueError, match=message):
        load_objective(overrides)
