import math

import pytest
import torch

from grpo_lightning.objective import load_objective
from grpo_lightning.objective.checks import call
from tests.objective.options import OPTIONS, compose, full, ratio_of


# P46: d = ref - logp; values and derivatives by logp
@pytest.mark.parametrize(
    ("name", "logp", "ref", "value", "slope"),
    [
        ("none", -1.0, -2.0, 0.0, 0.0),
        ("k1", -1.0, -2.0, 1.0, 1.0),
        ("k2", -1.0, -2.0, 0.5, 1.0),
        ("k3", -1.0, -2.0, 0.367879, 0.632121),
        ("abs", -1.0, -2.0, 1.0, 1.0),
        ("k3_plus", -1.0, -2.0, 0.367879, 1.0),  # the value of k3, the slope of k2
        ("k3_corrected", -1.0, -2.0, 0.367879, 1.0),  # on-policy logp - ref_logp
        ("adaptive", -1.0, -2.0, 0.367879, 0.632121),
        ("none", -2.0, -1.0, 0.0, 0.0),
        ("k1", -2.0, -1.0, -1.0, 1.0),
        ("k2", -2.0, -1.0, 0.5, -1.0),
        ("k3", -2.0, -1.0, 0.718282, -1.718282),
        ("abs", -2.0, -1.0, 1.0, -1.0),
        ("k3_plus", -2.0, -1.0, 0.718282, -1.0),
        ("k3_corrected", -2.0, -1.0, 0.718282, -1.0),
        ("adaptive", -2.0, -1.0, 0.718282, -1.718282),
    ],
)
def test_p46_p49_every_name_gives_its_number(name, logp, ref, value, slope):
    x = torch.tensor([[logp]], dtype=torch.float64, requires_grad=True)
    option, ref_logp = compose(kl=name).kl, torch.tensor([[ref]], dtype=torch.float64)
    estimate = call("kl", option, x, ref_logp, log_ratio=x - x.detach())
    assert estimate.item() == pytest.approx(value, abs=1e-6)
    if estimate.requires_grad:
        estimate.backward()
        assert x.grad.item() == pytest.approx(slope, abs=1e-6)
    else:
        assert slope == 0


def test_the_term_in_the_loss_is_beta_times_the_estimate():
    for name, value in (("k1", 1.0), ("k2", 0.5), ("k3", math.exp(-1))):
        objective = load_objective([f"kl={name}", "kl.beta=0.3"])
        logp, zero = torch.tensor([[-1.0]]), torch.zeros(1, 1)
        out = objective.loss(logp, None, zero, full(1, 1), torch.tensor([0]), ref_logp=torch.tensor([[-2.0]]))
        assert out.loss.item() == pytest.approx(0.3 * value)
        assert ratio_of(out.metrics["policy/kl"]) == pytest.approx(value)


def test_in_the_reward_the_loss_has_no_kl_term_but_the_metric():
    objective = load_objective(["kl=k2", "kl.in_reward=true"])
    assert objective.needs_reference and objective.kl_in_reward
    logp = torch.tensor([[-1.0]], requires_grad=True)
    arguments = (logp, None, torch.ones(1, 1), full(1, 1), torch.tensor([0]))
    out = objective.loss(*arguments, ref_logp=torch.tensor([[-2.0]]))
    assert out.loss.item() == -1
    assert ratio_of(out.metrics["policy/kl"]) == pytest.approx(0.5)
    assert "policy/kl" not in objective.loss(*arguments).metrics


def test_without_kl_the_reference_is_not_needed_and_may_be_monitored():
    objective = compose(kl="none")
    assert not objective.needs_reference and not objective.kl_in_reward
    arguments = (torch.tensor([[-1.0]]), None, torch.zeros(1, 1), full(1, 1), torch.tensor([0]))
    assert "policy/kl" not in objective.loss(*arguments).metrics
    out = objective.loss(*arguments, ref_logp=torch.tensor([[-2.0]]))
    assert out.loss.item() == 0
    assert ratio_of(out.metrics["policy/kl"]) == pytest.approx(math.exp(-1))


@pytest.mark.parametrize("name", ["k1", "k2", "k3", "abs", "k3_plus", "k3_corrected", "adaptive"])
def test_a_missing_reference_is_named(name):
    with pytest.raises(ValueError, match=f"kl={name} needs `ref_logp`"):
        compose(kl=name).loss(torch.zeros(1, 1), None, torch.zeros(1, 1), full(1, 1), torch.tensor([0]))


def test_k3_is_clamped_with_gradient_zero_outside():
    logp = torch.tensor([[-100.0, -1.0]], requires_grad=True)
    out = compose(kl="k3").loss(
        logp, None, torch.zeros(1, 2), full(1, 2), torch.tensor([0]), torch.tensor([[-1.0, -1.0]])
    )
    assert out.loss.item() == pytest.approx(0.04 / 2 * (math.exp(20) - 21), rel=1e-6)
    out.loss.backward()
    assert logp.grad.tolist() == [[0, 0]]


def test_k3_is_exact_near_zero():
    d = 1e-3
    value = compose(kl="k3").kl(torch.tensor([-1.0]), torch.tensor([-1.0 + d]))
    assert value.item() == pytest.approx(d * d / 2, rel=1e-2)


def test_beta_of_deepseekmath():
    assert compose(kl="k3").kl.beta == 0.04
    assert [name for name in OPTIONS["kl"] if not compose(kl=name).needs_reference] == ["none"]


def test_k3_corrected_weighs_by_the_ratio_and_through_it():
    # old -2, logp -1: rho = e; ref -2: d = -1, k3 = 1/e, dk3/dlogp = 1 - 1/e: value 1, slope e (1/e + 1 - 1/e) = e
    objective = load_objective(["kl=k3_corrected", "kl.beta=0.5"])
    logp, two = torch.tensor([[-1.0]], requires_grad=True), torch.tensor([[-2.0]])
    out = objective.loss(logp, two, torch.zeros(1, 1), full(1, 1), torch.tensor([0]), ref_logp=two)
    out.loss.backward()
    assert out.loss.item() == pytest.approx(0.5)
    assert logp.grad.item() == pytest.approx(0.5 * math.e)
    # off-policy it estimates KL(policy || reference), which the mean of k3 over samples of the old policy does not
    generator = torch.Generator().manual_seed(0)
    old, policy, ref = (torch.randn(5, generator=generator, dtype=torch.float64).log_softmax(0) for _ in range(3))
    estimate = call("kl", objective.kl, policy, ref, log_ratio=policy - old)
    assert (old.exp() * estimate).sum().item() == pytest.approx((policy.exp() * (policy - ref)).sum().item())


def test_in_the_reward_the_correction_is_one():
    old, ref, mask = torch.tensor([[-1.0, -3.0]]), torch.tensor([[-2.0, -2.5]]), full(1, 2)
    penalties = [
        load_objective([f"kl={name}", "kl.in_reward=true"]).kl_penalty(old, ref, mask)
        for name in ("k3", "k3_plus", "k3_corrected")
    ]
    torch.testing.assert_close(penalties[1], penalties[0])
    torch.testing.assert_close(penalties[2], penalties[0])


def test_the_adaptive_coefficient_follows_the_measured_kl():
    objective = load_objective(["kl=adaptive", "kl.beta=0.5", "kl.target=0.1", "kl.horizon=1000"])
    for kl, completions, factor in ((0.11, 100, 1.01), (5.0, 100, 1.02), (0.0, 500, 0.9), (0.1, 500, 1.0)):
        before = objective.kl.beta
        objective.observe({"policy/kl": kl}, completions)
        assert objective.kl.beta == pytest.approx(before * factor)
    before = objective.kl.beta
    objective.observe({}, 0)
    objective.observe({"policy/kl": float("nan")}, 0)
    assert objective.kl.beta == before
    again = load_objective(["kl=adaptive"])
    again.load_state_dict(objective.state_dict())
    assert again.kl.beta == before
    # the coefficient of the loss is the present one
    logp, zero = torch.tensor([[-1.0]]), torch.zeros(1, 1)
    out = again.loss(logp, None, zero, full(1, 1), torch.tensor([0]), ref_logp=torch.tensor([[-2.0]]))
    assert out.loss.item() == pytest.approx(before * math.exp(-1))


@pytest.mark.parametrize("estimator", ["k1", "abs", "k2", "k3", "k3_plus", "k3_corrected"])
def test_the_adaptive_coefficient_goes_with_every_estimator_and_in_the_reward(estimator):
    choice = [f"kl.estimator={estimator}", "kl.beta=0.3"]
    old, ref, mask = torch.tensor([[-1.0]]), torch.tensor([[-2.0]]), full(1, 1)
    objective = load_objective(["kl=adaptive", "kl.in_reward=true", *choice])
    alone = load_objective([f"kl={estimator}", "kl.in_reward=true", "kl.beta=0.3"])
    assert objective.kl_in_reward
    assert objective.kl_penalty(old, ref, mask) == alone.kl_penalty(old, ref, mask)
    objective.observe({"policy/kl": 9.0}, 10000)
    assert objective.kl_penalty(old, ref, mask).item() == pytest.approx(1.2 * alone.kl_penalty(old, ref, mask).item())


def test_an_estimator_that_does_not_exist_is_named():
    with pytest.raises(ValueError, match=r"kl.estimator must be one of k1, abs, k2, .*, got 'k9'"):
        load_objective(["kl=adaptive", "kl.estimator=k9"])


def test_abs_has_no_gradient_where_only_rounding_parts_the_two():
    logp = torch.tensor([-1.0, -1.0 + 3e-6, -1.0 - 3e-6, -1.1], requires_grad=True)
    kl = load_objective(["kl=abs", "kl.beta=1"]).kl(logp, torch.full((4,), -1.0))
    kl.sum().backward()
    assert logp.grad.tolist() == [0, 0, 0, -1] and kl[:3].tolist() == [0, 0, 0]


def test_the_adaptive_coefficient_stays_above_zero():
    kl = load_objective(["kl=adaptive", "kl.horizon=100", "kl.beta=1"]).kl
    kl.observe({"policy/kl": 0.0}, 1024)
    assert kl.beta == pytest.approx(0.8)
    kl.observe({"policy/kl": 1.0}, 1024)
    assert kl.beta == pytest.approx(0.96)
