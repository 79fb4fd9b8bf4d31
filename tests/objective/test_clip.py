import pytest
import torch

from grpo_lightning.objective import load_objective
from tests.objective.options import compose, full, ratio_of

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
    assert vars(compose(clip="dual").clip) == {"epsilon_low": 0.2, "epsilon_high": 0.2, "c": 3.0}
