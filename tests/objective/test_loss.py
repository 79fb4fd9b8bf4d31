"""The whole loss: against a plain loop, with every extreme input, and its metrics."""

import math
import random

import pytest
import torch

from tests.objective import reference
from tests.objective.options import OPTIONS, combinations, compose, full, mask_of, ratio_of

IDS = torch.tensor([0, 0, 1, 1])
GARBAGE = (1e4, -1e4, float("inf"), float("-inf"), float("nan"))


def sample(seed, dtype=torch.float64, spread=0.6):
    g = torch.Generator().manual_seed(seed)
    mask = mask_of([3, 5, 1, 4], 5)
    logp, noise, ref = (torch.randn(4, 5, generator=g, dtype=dtype) for _ in range(3))
    advantages = torch.randn(4, 1, generator=g, dtype=dtype).expand(4, 5).clone()
    return logp - 2, logp - 2 + spread * noise, advantages, mask, IDS, logp - 2 + spread * ref


@pytest.mark.parametrize("names", combinations(), ids=lambda names: "-".join(names.values()))
def test_every_combination_equals_the_plain_loop(names):
    objective = compose(**names)
    for seed in range(3):
        logp, old, a, mask, ids, ref = sample(seed)
        rows = [
            [(logp[i, t].item(), old[i, t].item(), a[i, t].item(), ref[i, t].item()) for t in range(5) if mask[i, t]]
            for i in range(4)
        ]
        w = reference.weights(names["loss_norm"], mask.sum(1).tolist(), ids.tolist(), constant=7)
        expected = reference.loss(
            rows,
            w,
            clip=names["clip"],
            values=vars(objective.clip),
            ratio=names["ratio"],
            kl_name=names["kl"],
            beta=getattr(objective.kl, "beta", 0.0),
        )
        out = objective.loss(logp, old, a, mask, ids, ref_logp=ref)
        assert out.loss.dtype == torch.float64
        assert out.loss.item() == pytest.approx(expected, rel=1e-10, abs=1e-12)


@pytest.mark.parametrize("names", combinations(), ids=lambda names: "-".join(names.values()))
def test_a_log_ratio_of_89_stays_finite(names):
    objective = compose(**names)
    for sign in (1.0, -1.0):
        logp = torch.full((4, 5), sign * 89.0, requires_grad=True)
        a = torch.tensor([[1.0], [-1.0], [1.0], [-1.0]]).expand(4, 5)
        out = objective.loss(logp, torch.zeros(4, 5), a, full(4, 5), IDS, ref_logp=torch.zeros(4, 5))
        out.loss.backward()
        assert out.loss.isfinite() and logp.grad.isfinite().all()
        assert ratio_of(out.metrics["ratio/clamped_fraction"]) == 1
        assert all(v.isfinite() for pair in out.metrics.values() for v in pair)
        assert out.maxima["policy/ratio_max"].item() == pytest.approx(math.exp(20 * sign))


def test_the_clamp_has_gradient_zero_outside():
    logp = torch.tensor([[19.0, 21.0, -21.0]], requires_grad=True)
    out = compose(clip="unclipped").loss(logp, torch.zeros(1, 3), torch.ones(1, 3), full(1, 3), IDS[:1])
    out.loss.backward()
    assert logp.grad[0, 0].item() == pytest.approx(-math.exp(19) / 3, rel=1e-6)
    assert logp.grad[0, 1:].tolist() == [0, 0]
    assert [v.item() for v in out.metrics["ratio/clamped_fraction"]] == [2, 3]
    assert out.metrics["ratio/mean"][0].item() == pytest.approx(math.exp(19) + math.exp(20) + math.exp(-20), rel=1e-6)


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("kl", OPTIONS["kl"])
@pytest.mark.parametrize("clip", ["symmetric", "unclipped", "none"])
def test_masked_garbage_changes_nothing(clip, kl, garbage):
    for ratio in OPTIONS["ratio"] if clip != "none" else ("token",):
        objective = compose(clip=clip, kl=kl, ratio=ratio)
        logp, old, a, mask, ids, ref = sample(0, torch.float32)
        dirty = [x.clone().masked_fill_(~mask, garbage) for x in (logp, old, a, ref)]
        w = objective.weights(mask, ids).masked_fill(~mask, garbage)
        clean_leaf, dirty_leaf = logp.clone().requires_grad_(), dirty[0].requires_grad_()
        clean = objective.loss(clean_leaf, old, a, mask, ids, ref_logp=ref)
        out = objective.loss(dirty_leaf, dirty[1], dirty[2], mask, ids, ref_logp=dirty[3], weights=w)
        clean.loss.backward()
        out.loss.backward()
        assert torch.equal(out.loss, clean.loss)
        assert torch.equal(dirty_leaf.grad, clean_leaf.grad)
        assert dirty_leaf.grad[~mask].abs().sum() == 0
        assert {k: (s.item(), c.item()) for k, (s, c) in out.metrics.items()} == {
            k: (s.item(), c.item()) for k, (s, c) in clean.metrics.items()
        }
        assert torch.equal(out.maxima["policy/ratio_max"], clean.maxima["policy/ratio_max"])


@pytest.mark.parametrize("bad", GARBAGE[2:])
@pytest.mark.parametrize("index", range(4))
def test_an_unmasked_value_that_is_not_finite_is_named(index, bad):
    logp, old, a, mask, ids, ref = sample(0)
    tensors = [logp, old, a, ref]
    tensors[index][1, 3] = bad
    name = ("logp", "old_logp", "advantages", "ref_logp")[index]
    with pytest.raises(ValueError, match=f"^{name} is (inf|-inf|nan) at row 1, position 3$"):
        compose(kl="k3").loss(logp, old, a, mask, ids, ref_logp=ref)


def test_bfloat16_is_computed_in_float32():
    logp, old, a, mask, ids, ref = (x.bfloat16() if x.is_floating_point() else x for x in sample(3))
    leaf = logp.clone().requires_grad_()
    out = compose(kl="k3", clip="unclipped").loss(leaf, old, a, mask, ids, ref_logp=ref)
    wide = compose(kl="k3", clip="unclipped").loss(
        logp.float(), old.float(), a.float(), mask, ids, ref_logp=ref.float()
    )
    assert out.loss.dtype == torch.float32
    assert torch.equal(out.loss, wide.loss)
    out.loss.backward()
    assert leaf.grad.dtype == torch.bfloat16 and leaf.grad.isfinite().all()


def test_inputs_of_one_dtype_each_do_not_lower_the_precision():
    logp, old, a, mask, ids, ref = sample(4)
    expected = compose(kl="k3").loss(logp, old, a.float().double(), mask, ids, ref_logp=ref)
    out = compose(kl="k3").loss(logp, old, a.float(), mask, ids, ref_logp=ref)
    assert out.loss.dtype == torch.float64
    assert out.loss.item() == expected.loss.item()


def test_old_logp_none_is_the_policy_itself_with_a_ratio_of_one():
    logp, _, a, mask, ids, _ = sample(5)
    for clip in ("symmetric", "unclipped"):
        one, two = logp.clone().requires_grad_(), logp.clone().requires_grad_()
        first = compose(clip=clip).loss(one, None, a, mask, ids)
        second = compose(clip="none").loss(two, None, a, mask, ids)
        first.loss.backward()
        second.loss.backward()
        torch.testing.assert_close(one.grad, two.grad)  # at ratio 1 every surrogate has the gradient of REINFORCE
        assert ratio_of(first.metrics["ratio/mean"]) == 1
        assert first.maxima["policy/ratio_max"].item() == 1


def test_nothing_but_logp_gets_a_gradient():
    logp, old, a, mask, ids, ref = sample(6)
    others = [x.clone().requires_grad_() for x in (old, a, ref)]
    out = compose(kl="k2").loss(logp.requires_grad_(), others[0], others[1], mask, ids, ref_logp=others[2])
    out.loss.backward()
    assert all(x.grad is None for x in others)
    assert not any(v.requires_grad for pair in out.metrics.values() for v in pair)
    assert not out.maxima["policy/ratio_max"].requires_grad


def test_metrics_add_up_over_any_cut():
    dice = random.Random(0)
    for ratio in OPTIONS["ratio"]:
        objective = compose(clip="symmetric", kl="k3", ratio=ratio)
        logp, old, a, mask, ids, ref = sample(7)
        whole = objective.loss(logp, old, a, mask, ids, ref_logp=ref)
        order = dice.sample(range(4), 4)
        parts = [
            objective.loss(logp[i], old[i], a[i], mask[i], ids[i], ref_logp=ref[i]) for i in (order[:1], order[1:])
        ]
        for name, (total, count) in whole.metrics.items():
            assert sum(p.metrics[name][0] for p in parts).item() == pytest.approx(total.item())
            assert sum(p.metrics[name][1] for p in parts) == count
        assert max(p.maxima["policy/ratio_max"] for p in parts) == whole.maxima["policy/ratio_max"]


def test_metric_names_do_not_depend_on_the_rows():
    for names in combinations():
        logp, old, a, mask, ids, ref = sample(8)
        some = compose(**names).loss(logp, old, a, mask, ids, ref_logp=ref)
        none = compose(**names).loss(logp, old, a, torch.zeros_like(mask), ids, ref_logp=ref)
        assert list(some.metrics) == list(none.metrics)
        assert none.loss.item() == 0
        assert none.maxima["policy/ratio_max"].item() == 0


def test_shapes_are_checked_and_nothing_is_broadcast():
    logp, old, a, mask, ids, ref = sample(9)
    objective = compose(kl="k3")
    for changed, name in (
        ((logp[:, :1], old, a, mask, ids, ref), "logp"),
        ((logp, old[:, :1], a, mask, ids, ref), "old_logp"),
        ((logp, old, a[:, 0], mask, ids, ref), "advantages"),
        ((logp, old, a, mask, ids, ref[:1]), "ref_logp"),
        ((logp, old, a, mask, ids[:1], ref), "group_ids"),
    ):
        with pytest.raises(ValueError, match=f"^{name} must have shape"):
            objective.loss(*changed)
    with pytest.raises(ValueError, match=r"^weights must have shape"):
        objective.loss(logp, old, a, mask, ids, ref, weights=torch.ones(4))
    with pytest.raises(ValueError, match="mask must be a bool tensor"):
        objective.loss(logp, old, a, mask.int(), ids, ref)


def test_no_rows_and_no_positions():
    for n, t in ((0, 3), (2, 0)):
        empty = torch.zeros(n, t, requires_grad=True)
        for ratio in OPTIONS["ratio"]:
            out = compose(ratio=ratio).loss(
                empty, None, torch.zeros(n, t), full(n, t), torch.zeros(n, dtype=torch.long)
            )
            out.loss.backward()
            assert out.loss.item() == 0
