import math

import pytest
import torch

from grpo_lightning.objective import load_objective
from tests.objective.options import OPTIONS, compose, full, ratio_of


# P46: d = ref - logp; values and derivatives by logp
@pytest.mark.parametrize(
    ("name", "logp", "ref", "value", "slope"),
    [
        ("none", -1.0, -2.0, 0.0, 0.0),
        ("k1", -1.0, -2.0, 1.0, 1.0),
        ("k2", -1.0, -2.0, 0.5, 1.0),
        ("k3", -1.0, -2.0, 0.367879, 0.632121),
        ("none", -2.0, -1.0, 0.0, 0.0),
        ("k1", -2.0, -1.0, -1.0, 1.0),
        ("k2", -2.0, -1.0, 0.5, -1.0),
        ("k3", -2.0, -1.0, 0.718282, -1.718282),
    ],
)
def test_p46_p49_every_name_gives_its_number(name, logp, ref, value, slope):
    x = torch.tensor([[logp]], dtype=torch.float64, requires_grad=True)
    estimate = compose(kl=name).kl(x, torch.tensor([[ref]], dtype=torch.float64))
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


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
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
    assert {name for name in OPTIONS["kl"] if compose(kl=name).needs_reference} == {"k1", "k2", "k3"}
