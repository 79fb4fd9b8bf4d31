"""dcpo (arXiv 2509.02333): smoothed advantages and their statistics, adaptive bounds, the sum of row means."""

import math

import pytest
import torch

from grpo_lightning.objective import load_objective
from tests.objective.options import compose, full, mask_of, ratio_of

NAN = float("nan")


def visit(objective, rewards, prompt=7, ids=None):
    n = len(rewards)
    ids = torch.zeros(n, dtype=torch.long) if ids is None else torch.tensor(ids)
    prompts = torch.tensor(prompt if isinstance(prompt, list) else [prompt] * n)
    a = objective.advantages(torch.tensor(rewards, dtype=torch.float64), ids, full(n, 1), prompt_ids=prompts)
    return a[:, 0].tolist()


def test_the_first_visit_is_the_standardised_reward():
    half = 3**0.5 / 2
    assert visit(compose(advantage="dcpo"), [1.0, 0, 0, 1]) == pytest.approx([half, -half, -half, half])


def test_a_group_without_spread_learns_from_the_earlier_ones():
    objective = compose(advantage="dcpo")
    visit(objective, [1.0, 0, 0, 1])
    # mean (1/2 + 1) / 2; variance (1/3 + 0 + 1/2 * 1/4) / 2 = 11/48; Z_tot = 1/4 / sqrt(11/48), A = Z_tot / 2
    expected = 0.25 / math.sqrt(11 / 48) / 2
    assert visit(objective, [1.0, 1, 1, 1]) == pytest.approx([expected] * 4)
    assert objective.state_dict()["advantage"]["seen"][7] == pytest.approx([2, 0.75, 11 / 48])
    # the third: mean 5/6 of [1, 1, 0, 1] with std 1/2
    seen = (2 * 11 / 48 + 0.25 + 2 / 3 * 0) / 3
    z_new, z_total = (0.25 / 0.5, 0.25 / seen**0.5)
    smaller = min((2 * z_new + z_total) / 3, (z_new + 2 * z_total) / 3, key=abs)
    assert visit(objective, [1.0, 1, 0, 1])[0] == pytest.approx(smaller)


def test_a_prompt_that_never_had_spread_is_exactly_zero():
    objective = compose(advantage="dcpo")
    for size in (3, 4, 7, 3):
        assert visit(objective, [0.1] * size) == [0.0] * size
    # the float64 mean of three times 0.1 is not 0.1
    assert objective.state_dict()["advantage"]["seen"][7] == [4, 0.1, 0.0]


def test_prompts_are_remembered_apart_and_evaluation_of_another_changes_nothing():
    objective, other = compose(advantage="dcpo"), compose(advantage="dcpo")
    visit(objective, [1.0, 0, 0, 1], prompt=7)
    assert visit(objective, [1.0, 1, 1, 1], prompt=8) == [0.0] * 4
    assert other.state_dict() == {"advantage": {"seen": {}}}


def test_two_groups_of_one_prompt_are_both_its_next_visit():
    first, second = [1.0, 0.0], [1.0, 0.5]
    together, apart = compose(advantage="dcpo"), compose(advantage="dcpo")
    visit(together, [0.0, 0.2])
    visit(apart, [0.0, 0.2])
    a = visit(together, first + second, ids=[0, 0, 1, 1])
    state = apart.state_dict()
    assert a[:2] == pytest.approx(visit(apart, first))
    again = compose(advantage="dcpo")
    again.load_state_dict(state)
    assert a[2:] == pytest.approx(visit(again, second))
    assert together.state_dict()["advantage"]["seen"][7][0] == 3
    with pytest.raises(ValueError, match="group 0 has more than one prompt id"):
        visit(together, first, prompt=[1, 2])


def test_the_state_survives_saving(tmp_path):
    objective = compose(advantage="dcpo")
    visit(objective, [1.0, 0, 0, 1], prompt=3)
    torch.save(objective.state_dict(), tmp_path / "state.pt")
    again = compose(advantage="dcpo")
    again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert visit(again, [1.0, 1, 0, 1], prompt=3) == visit(objective, [1.0, 1, 0, 1], prompt=3)


def test_missing_rewards_are_left_out_of_what_is_remembered():
    objective, without = compose(advantage="dcpo"), compose(advantage="dcpo")
    assert visit(objective, [1.0, NAN, 0]) == pytest.approx([0.5**0.5, 0, -(0.5**0.5)])
    visit(without, [1.0, 0.0])
    assert objective.state_dict() == without.state_dict()
    assert visit(objective, [NAN, 1.0], prompt=9) == [0, 0]
    assert 9 not in objective.state_dict()["advantage"]["seen"]


@pytest.mark.parametrize(
    ("q", "low", "high"),
    [
        (1.0, 0.8, 0.5 + 0.5 * 1.8**0.5),  # 1 - 0.64 = 0.36; 1 + 0.8
        (0.9, 0.5 + 0.5 * (1 - 0.64 / 0.9) ** 0.5, 0.5 + 0.5 * (1 + 0.8 / 0.9) ** 0.5),
        (0.01, 0.5, 5.0),  # 1 - 64 < 0; sqrt(1 + 80) = 9
        (1e-4, 0.5, 10.0),  # the limit
        (0.0, 0.5, 10.0),
    ],
)
def test_the_bounds_widen_as_the_old_probability_falls(q, low, high):
    clip = compose(clip="dcpo").clip
    old = torch.tensor([math.log(q) if q else -200.0])
    assert [bound.item() for bound in clip.bounds(old)] == pytest.approx([low, high], rel=1e-6)


def one_token(ratio, a, q, overrides=()):
    objective = load_objective(["clip=dcpo", "kl=none", *overrides])
    old = torch.tensor([[math.log(q)]], dtype=torch.float64)
    logp = (old + math.log(ratio)).requires_grad_()
    out = objective.loss(logp, old, torch.tensor([[a]]), full(1, 1), torch.tensor([0]))
    out.loss.backward()
    clipped = [ratio_of(out.metrics[f"clip/{side}_fraction"]) for side in ("low", "high")]
    return out.loss.item(), logp.grad.item(), clipped


def test_the_surrogate_by_hand():
    high = 0.5 + 0.5 * 1.8**0.5  # 1.1708 at q = 1
    assert one_token(1.15, 1.0, 1.0) == (pytest.approx(-1.15), pytest.approx(-1.15), [0, 0])
    assert one_token(1.2, 1.0, 1.0) == (pytest.approx(-high), 0, [0, 1])
    assert one_token(1.2, -1.0, 1.0) == (pytest.approx(1.2), pytest.approx(1.2), [0, 0])
    assert one_token(0.7, -1.0, 1.0) == (pytest.approx(0.8), 0, [1, 0])
    assert one_token(0.7, 1.0, 1.0) == (pytest.approx(-0.7), pytest.approx(-0.7), [0, 0])
    assert one_token(0.7, -1.0, 0.01) == (pytest.approx(0.7), pytest.approx(0.7), [0, 0])
    assert one_token(4.0, 1.0, 0.01) == (pytest.approx(-4), pytest.approx(-4), [0, 0])
    # dual clip, and that a smaller c leaves the limit of the upper bound where it is
    assert one_token(12.0, -1.0, 0.01)[:2] == (pytest.approx(10), 0)
    assert one_token(4.0, -1.0, 0.01, ["clip.c=3"])[:2] == (pytest.approx(3), 0)
    assert one_token(4.0, 1.0, 0.01, ["clip.c=3"])[:2] == (pytest.approx(-4), pytest.approx(-4))


def test_the_norm_adds_row_means_up():
    objective = compose(loss_norm="dcpo")
    w = objective.weights(mask_of([2, 3, 0, 1], 4), torch.tensor([0, 0, 1, 1]))
    assert w.sum(1).tolist() == pytest.approx([1, 1, 0, 1])
    assert w[0].tolist() == [0.5, 0.5, 0, 0]
