import math

import pytest
import torch

from grpo_lightning.objective import load_objective
from tests.objective.options import compose, full, ratio_of


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


# Surrogates by hand at rho 0.5, 1, 1.5, 5 for A = +1 and A = -1 (dual c = 3, delta = 4, logp = -2 everywhere).
RATIOS = [0.5, 1.0, 1.5, 5.0]
EXPECTED = {
    "symmetric": ([-0.5, -1, -1.2, -1.2], [0.8, 1, 1.5, 5]),
    "higher": ([-0.5, -1, -1.28, -1.28], [0.8, 1, 1.5, 5]),
    "gspo": ([-0.5, -1, -1.0004, -1.0004], [0.9997, 1, 1.5, 5]),
    "dual": ([-0.5, -1, -1.2, -1.2], [0.8, 1, 1.5, 3]),
    "two_sided": ([-0.5, -1, -1.2, -1.2], [0.8, 1, 1.5, 4]),
    "unclipped": ([-0.5, -1, -1.5, -5], [0.5, 1, 1.5, 5]),
    "none": ([2, 2, 2, 2], [-2, -2, -2, -2]),
    "cispo": ([1, 2, 3, 10], [-1, -2, -3, -10]),
    "sapo": (
        [-4 * sigmoid(rho - 1) for rho in RATIOS],
        [4 / 1.05 * sigmoid(1.05 * (rho - 1)) for rho in RATIOS],
    ),
    "abc": ([-0.8, -1, -1.2, -1.2], [0.8, 1, 1.2, 1.2]),
}
# Derivative by logp: rho A' where the unclipped branch holds, 0 where a bound does; -A without a ratio.
SLOPES = {
    "symmetric": ([-0.5, -1, 0, 0], [0, 1, 1.5, 5]),
    "higher": ([-0.5, -1, 0, 0], [0, 1, 1.5, 5]),
    "gspo": ([-0.5, -1, 0, 0], [0, 1, 1.5, 5]),
    "dual": ([-0.5, -1, 0, 0], [0, 1, 1.5, 0]),
    "two_sided": ([-0.5, -1, 0, 0], [0, 1, 1.5, 0]),
    "unclipped": ([-0.5, -1, -1.5, -5], [0.5, 1, 1.5, 5]),
    "none": ([-1, -1, -1, -1], [1, 1, 1, 1]),
    "cispo": ([-0.5, -1, -1.5, -5], [0.5, 1, 1.5, 5]),
    # rho times 4 sigmoid (1 - sigmoid), which is 1 at rho = 1 for every tau
    "sapo": (
        [-rho * 4 * sigmoid(rho - 1) * sigmoid(1 - rho) for rho in RATIOS],
        [rho * 4 * sigmoid(1.05 * (rho - 1)) * sigmoid(1.05 * (1 - rho)) for rho in RATIOS],
    ),
    "abc": ([0, -1, 0, 0], [0, 1, 0, 0]),
}


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.parametrize("sign", [0, 1])
def test_closed_form(name, sign):
    clip = compose(clip=name, ratio="token").clip
    logp = torch.full((4,), -2.0, dtype=torch.float64, requires_grad=True)
    old = logp.detach() - torch.tensor(RATIOS, dtype=torch.float64).log()
    surrogate = clip((logp - old).exp(), torch.full((4,), 1.0 - 2 * sign, dtype=torch.float64), logp)
    assert surrogate.tolist() == pytest.approx(EXPECTED[name][sign])
    surrogate.sum().backward()
    assert logp.grad.tolist() == pytest.approx(SLOPES[name][sign])


def one_token(objective, ratio, advantage):
    logp = torch.zeros(1, 1)
    old = logp - torch.tensor([[ratio]]).log()
    return objective.loss(logp, old, torch.tensor([[advantage]]), full(1, 1), torch.tensor([0]))


def test_p76_two_sided_bounds_negative_advantages():
    assert one_token(
        load_objective(["clip=two_sided", "clip.delta=4", "kl=none"]), 5.0, -1.0
    ).loss.item() == pytest.approx(4)


def test_dual_equals_two_sided_at_the_same_bound():
    dual = load_objective(["clip=dual", "clip.c=4"]).clip
    two_sided = load_objective(["clip=two_sided", "clip.delta=4"]).clip
    ratio = torch.linspace(0.01, 8, 200).repeat(2)
    advantage = torch.cat([torch.full((200,), 0.7), torch.full((200,), -1.3)])
    torch.testing.assert_close(dual(ratio, advantage, ratio), two_sided(ratio, advantage, ratio))


@pytest.mark.parametrize("name", ["symmetric", "higher", "dual", "two_sided", "gspo"])
@pytest.mark.parametrize(
    ("ratio", "advantage", "low", "high"),
    [
        (1.5, 1.0, 0, 1),
        (1.5, -1.0, 0, 0),
        (0.5, -1.0, 1, 0),
        (0.5, 1.0, 0, 0),
        (1.0, 1.0, 0, 0),
        (1.5, 0.0, 0, 0),
        (0.5, 0.0, 0, 0),
    ],
)
def test_p76_low_needs_a_negative_and_high_a_positive_advantage(name, ratio, advantage, low, high):
    metrics = one_token(compose(clip=name), ratio, advantage).metrics
    assert (ratio_of(metrics["clip/low_fraction"]), ratio_of(metrics["clip/high_fraction"])) == (low, high)


@pytest.mark.parametrize("name", ["unclipped", "none"])
def test_without_a_clip_range_there_are_no_clip_fractions(name):
    assert not [key for key in one_token(compose(clip=name), 1.5, 1.0).metrics if key.startswith("clip/")]


def test_clip_fractions_count_tokens_or_with_a_sequence_ratio_rows():
    mask = torch.tensor([[True, True, True, True], [True, False, False, False], [False] * 4])
    x = torch.tensor([[0.5, 0.5, 0.5, -0.1], [-0.5, 9.0, 9.0, 9.0], [9.0] * 4])
    advantages = torch.tensor([[1.0], [-1.0], [1.0]]).expand(3, 4)
    arguments = (x, torch.zeros(3, 4), advantages, mask, torch.tensor([0, 0, 0]))
    token = compose(clip="symmetric").loss(*arguments).metrics
    assert [v.item() for v in token["clip/high_fraction"]] == [3, 5]
    assert [v.item() for v in token["clip/low_fraction"]] == [1, 5]
    row = compose(clip="symmetric", ratio="sequence").loss(*arguments).metrics
    assert [v.item() for v in row["clip/high_fraction"]] == [1, 2]
    assert [v.item() for v in row["clip/low_fraction"]] == [1, 2]
    assert row["ratio/mean"][0].item() == pytest.approx(2.718281828**0.35 + 2.718281828**-0.5)
    assert row["ratio/mean"][1].item() == 2


def test_published_values():
    assert vars(compose(clip="symmetric").clip) == {"epsilon": 0.2}
    assert vars(compose(clip="higher").clip) == {"epsilon_low": 0.2, "epsilon_high": 0.28}
    assert vars(compose(clip="gspo").clip) == {"epsilon_low": 3e-4, "epsilon_high": 4e-4}
    assert type(compose(clip="gspo").clip) is type(compose(clip="higher").clip)
    assert vars(compose(clip="cispo").clip) == {"epsilon_low": 1.0, "epsilon_high": 4.0}
    assert vars(compose(clip="sapo").clip) == {"tau_pos": 1.0, "tau_neg": 1.05}
    assert vars(compose(clip="gmpo").clip) == {"epsilon_low": 0.4, "epsilon_high": 0.4}
    assert vars(compose(clip="dcpo").clip) == {"epsilon_low": 0.16, "epsilon_high": 0.2, "c": 10.0}
    assert vars(compose(clip="abc").clip) == {f"epsilon_{k}": 0.2 for k in range(1, 5)}
    assert vars(compose(clip="dual").clip) == {"epsilon_low": 0.2, "epsilon_high": 0.2, "c": 3.0}


def test_cispo_clips_the_weight_and_keeps_the_gradient():
    objective = load_objective(["clip=cispo", "clip.epsilon_low=0.2", "clip.epsilon_high=1", "kl=none"])
    for ratio, a, weight, low, high in (
        (5.0, 1.0, 2, 0, 1),
        (5.0, -1.0, 2, 0, 1),
        (0.5, 1.0, 0.8, 1, 0),
        (1.5, 1, 1.5, 0, 0),
    ):
        logp = torch.full((1, 1), -2.0, requires_grad=True)
        old = torch.tensor([[-2.0 - math.log(ratio)]])
        out = objective.loss(logp, old, torch.tensor([[float(a)]]), full(1, 1), torch.tensor([0]))
        out.loss.backward()
        assert out.loss.item() == pytest.approx(2 * weight * a, rel=1e-6)
        assert logp.grad.item() == pytest.approx(-weight * a, rel=1e-6)
        assert [ratio_of(out.metrics[f"clip/{side}_fraction"]) for side in ("low", "high")] == [low, high]


def test_abc_has_a_bound_of_its_own_in_each_quadrant():
    values = ["clip.epsilon_1=0.1", "clip.epsilon_2=0.3", "clip.epsilon_3=0.5", "clip.epsilon_4=0.7"]
    objective = load_objective(["clip=abc", "kl=none", *values])
    for ratio, a, bounded, low, high in (
        (2.0, 1.0, 1.1, 0, 1),
        (0.1, 1.0, 0.7, 1, 0),
        (2.0, -1.0, 1.5, 0, 1),
        (0.1, -1.0, 0.3, 1, 0),
        (1.05, 1.0, 1.05, 0, 0),
        (2.0, 0.0, 0.0, 0, 0),
    ):
        out = one_token(objective, ratio, a)
        assert out.loss.item() == pytest.approx(-bounded * a)
        assert [ratio_of(out.metrics[f"clip/{side}_fraction"]) for side in ("low", "high")] == [low, high]


@pytest.mark.parametrize(
    ("x", "a", "mean", "slopes", "low", "high"),
    [
        ([0.5, -0.2], 1.0, 0.1, [0, 1], 0, 0.5),  # 0.4 and -0.2
        ([0.5, -0.2], -1.0, 0.15, [1, 1], 0, 0),  # nothing bounds what makes it worse
        ([-0.5, 0.2], -1.0, -0.1, [0, 1], 0.5, 0),  # -0.4 and 0.2
        ([-0.5, 0.2], 2.0, -0.15, [1, 1], 0, 0),
    ],
)
def test_gmpo_takes_the_geometric_mean_of_clipped_ratios(x, a, mean, slopes, low, high):
    logp = torch.tensor([[*x, 9.0]], dtype=torch.float64, requires_grad=True)
    mask, zero = torch.tensor([[True, True, False]]), torch.zeros(1, 3, dtype=torch.float64)
    out = load_objective(["algorithm=gmpo"]).loss(logp, zero, torch.full((1, 3), a), mask, torch.tensor([0]))
    out.loss.backward()
    assert out.loss.item() == pytest.approx(-a * math.exp(mean))
    assert logp.grad[0].tolist() == pytest.approx([*(-a * math.exp(mean) / 2 * s for s in slopes), 0])
    assert [ratio_of(out.metrics[f"clip/{side}_fraction"]) for side in ("low", "high")] == [low, high]
    assert out.metrics["clip/low_fraction"][1] == 1  # rows are counted


def test_gmpo_unclipped_is_the_ratio_of_gspo():
    g = torch.Generator().manual_seed(4)
    x, a = 0.1 * torch.randn(4, 3, generator=g), torch.randn(4, 1, generator=g).expand(4, 3)
    arguments = (x, torch.zeros(4, 3), a, torch.rand(4, 3, generator=g) < 0.7, torch.tensor([0, 0, 1, 1]))
    gspo = compose(ratio="sequence", clip="unclipped").loss(*arguments).loss
    torch.testing.assert_close(load_objective(["algorithm=gmpo"]).loss(*arguments).loss, gspo)


def test_gmpo_refuses_an_advantage_that_varies_within_a_row():
    with pytest.raises(ValueError, match="clip=gmpo needs one advantage per row, that of row 0 varies"):
        a = torch.tensor([[1.0, 2.0]])
        compose(clip="gmpo").loss(torch.zeros(1, 2), None, a, full(1, 2), torch.tensor([0]))
