"""correction: numbers by hand, a plain loop, what it must leave alone, and its metrics."""

import math

import pytest
import torch

from grpo_lightning.objective import load_objective
from tests.objective import reference
from tests.objective.options import OPTIONS, compose, corrected, full, mask_of, ratio_of

CORRECTIONS = OPTIONS["correction"][1:]
GARBAGE = (1e4, -1e4, float("inf"), float("-inf"), float("nan"))

# Four tokens at exp(d) = 0.4, 1, 1.5, 6: their product, the ratio of the row, is 3.6; without the last it is 0.6.
RATIOS = [0.4, 1.0, 1.5, 6.0]
BY_HAND = {
    "tis": ([0.4, 1, 1.5, 2], [0.4, 1, 1.5]),
    "icepop": ([0, 1, 1.5, 0], [0, 1, 1.5]),
    "sequence_mask": ([0, 0, 0, 0], [0.6, 0.6, 0.6]),
}


def engine(ratios):
    """The sampler's log-probabilities [1, T] where the old policy's are -2."""
    return -2 - torch.tensor([ratios], dtype=torch.float64).log()


def factor(name, ratios, mask=None, **values):
    """c of a row whose tokens have exp(old - sampler) = ratios."""
    options = [f"correction={name}", *(f"correction.{key}={value}" for key, value in values.items())]
    mask = full(1, len(ratios)) if mask is None else mask
    old = torch.full((1, len(ratios)), -2.0, dtype=torch.float64)
    return load_objective(options).correction(old, mask, sampler_logp=engine(ratios))[0].tolist()


@pytest.mark.parametrize("name", CORRECTIONS)
def test_numbers_by_hand(name):
    assert factor(name, RATIOS) == pytest.approx(BY_HAND[name][0])
    assert factor(name, RATIOS[:3]) == pytest.approx(BY_HAND[name][1])


def test_the_sum_over_the_row_counts_not_its_mean():
    # Twenty tokens at 1.1: the mean is far inside the bounds, the row is 1.1^20 = 6.7 times likelier.
    assert factor("sequence_mask", [1.1] * 20) == [0] * 20
    assert factor("sequence_mask", [1.1] * 11) == pytest.approx([1.1**11] * 11)  # 2.85


def test_only_tokens_under_the_mask_count_for_a_row():
    mask = torch.tensor([[True, False, True, False]])
    assert factor("sequence_mask", [0.4, 1e3, 1.5, 1e9], mask)[::2] == pytest.approx([0.6, 0.6])


def test_bounds_can_be_set():
    tight, k = 1e-9, 2.0
    assert factor("icepop", [k], high=k + tight) == pytest.approx([k])
    assert factor("icepop", [k], high=k - tight) == [0]
    assert factor("icepop", [0.5], low=0.5 + tight) == [0]
    assert factor("sequence_mask", [k, k], high=4 - tight) == [0, 0]
    assert factor("sequence_mask", [1e-6]) == pytest.approx([1e-6])  # no lower bound
    assert factor("sequence_mask", [0.2], low=0.25) == [0]
    assert factor("sequence_mask", [0.5, 0.6], low=0.25) == pytest.approx([0.3, 0.3])
    assert factor("tis", [7.0], cap=5) == pytest.approx([5])
    assert factor("tis", [1e-6]) == pytest.approx([1e-6])  # nothing is cut from below


@pytest.mark.parametrize("name", ["icepop", "sequence_mask"])
def test_a_ratio_exactly_on_a_bound_stays(name):
    old, one = torch.zeros(1, 1), full(1, 1)
    for bound, sampler in (("high", old - 0.7), ("low", old + 0.7)):
        k = (old - sampler).exp().item()
        correction = load_objective([f"correction={name}", f"correction.{bound}={k!r}"]).correction
        assert correction(old, one, sampler_logp=sampler).item() == k
        assert not correction.changed(old, one, sampler_logp=sampler)


def test_published_values():
    assert vars(compose(correction="tis").correction) == {"cap": 2.0}
    assert vars(compose(correction="icepop").correction) == {"low": 0.5, "high": 5.0}
    assert vars(compose(correction="sequence_mask").correction) == {"low": None, "high": 3.0}


@pytest.mark.parametrize("name", CORRECTIONS)
def test_the_ratio_between_them_is_clamped(name):
    for ratio, low in ((math.exp(89), None), (math.exp(-89), math.exp(-20))):
        c = factor(name, [ratio])[0]
        assert c == pytest.approx({"tis": low or 2, "icepop": 0, "sequence_mask": low or 0}[name])
    # It is the sum of a row that is clamped, not each of its tokens: 50 - 49 = 1.
    c = factor("sequence_mask", [math.exp(50), math.exp(-49)])
    assert c == pytest.approx([math.e, math.e])


def sample(seed, dtype=torch.float64):
    """logp, old_logp, advantages, mask, ids, ref_logp, sampler_logp: [4, 5]."""
    g = torch.Generator().manual_seed(seed)
    old, noise, ref, gap = (torch.randn(4, 5, generator=g, dtype=dtype) for _ in range(4))
    a = torch.randn(4, 1, generator=g, dtype=dtype).expand(4, 5).clone()
    logp = old + 0.3 * noise
    return logp, old, a, mask_of([3, 5, 1, 4], 5), torch.tensor([0, 0, 1, 1]), logp + 0.3 * ref, old - 0.7 * gap


def loop(name, d):
    """c of a row with these differences: once more, in plain Python."""
    if name == "sequence_mask":
        k = math.exp(sum(d))
        return [k if k <= 3 else 0.0] * len(d)
    if name == "tis":
        return [min(math.exp(x), 2.0) for x in d]
    return [math.exp(x) if 0.5 <= math.exp(x) <= 5 else 0.0 for x in d]


@pytest.mark.parametrize("names", corrected(), ids=lambda names: "-".join(names.values()))
def test_the_loss_equals_the_plain_loop(names):
    objective, changed = compose(**names), 0
    for seed in range(6):
        logp, old, a, mask, ids, ref, sampler = sample(seed)
        lengths = mask.sum(1).tolist()
        w = reference.weights(names["loss_norm"], lengths, ids.tolist(), constant=7)
        expected = 0.0
        for i, n in enumerate(lengths):
            x = [(logp[i, t] - old[i, t]).item() for t in range(n)]
            d = [(old[i, t] - sampler[i, t]).item() for t in range(n)]
            c = loop(names["correction"], d)
            changed += sum(abs(v - math.exp(u)) > 1e-6 for v, u in zip(c, d, strict=True))
            for t in range(n):
                rho = math.exp(sum(x) / n if names["ratio"] == "sequence" else x[t])
                now, before = logp[i, t].item(), old[i, t].item()
                surrogate = reference.surrogate(names["clip"], rho, a[i, t].item(), now, before, {})
                kl = reference.kl("k3", now, ref[i, t].item(), before)
                expected += w[i] * (c[t] * surrogate + 0.04 * kl)
        out = objective.loss(logp, old, a, mask, ids, ref, sampler_logp=sampler)
        assert out.loss.item() == pytest.approx(expected, rel=1e-10, abs=1e-12)
    assert changed > 5


@pytest.mark.parametrize("norm", OPTIONS["loss_norm"])
@pytest.mark.parametrize("name", CORRECTIONS)
def test_the_weights_do_not_change(name, norm):
    _, _, _, mask, ids, _, _ = sample(0)
    weights = compose(correction=name, loss_norm=norm).weights(mask, ids)
    assert torch.equal(weights, compose(loss_norm=norm).weights(mask, ids))


@pytest.mark.parametrize("name", ["icepop", "sequence_mask"])
def test_what_is_masked_stays_in_the_denominator(name):
    # Rows of 2 tokens; the engine disagrees on all of the second row: half of the loss is left, not all of it.
    sampler = torch.tensor([[0.0, 0.0], [-9.0, -9.0]])
    arguments = (torch.zeros(2, 2), torch.zeros(2, 2), torch.ones(2, 2), full(2, 2), torch.tensor([0, 0]))
    for norm in ("token", "sequence", "prompt"):
        out = compose(correction=name, loss_norm=norm).loss(*arguments, sampler_logp=sampler)
        assert out.loss.item() == pytest.approx(-0.5)


@pytest.mark.parametrize("name", CORRECTIONS)
def test_the_kl_term_is_not_corrected(name):
    logp, old, _, mask, ids, ref, sampler = sample(1)
    for kl in ("k1", "k2", "k3"):
        plain, corrected_one = logp.clone().requires_grad_(), logp.clone().requires_grad_()
        compose(kl=kl).loss(plain, old, torch.zeros(4, 5), mask, ids, ref).loss.backward()
        objective = compose(kl=kl, correction=name)
        objective.loss(corrected_one, old, torch.zeros(4, 5), mask, ids, ref, sampler_logp=sampler).loss.backward()
        assert plain.grad.abs().sum() > 0
        assert torch.equal(corrected_one.grad, plain.grad)


@pytest.mark.parametrize("old_given", [True, False])
@pytest.mark.parametrize("name", CORRECTIONS)
def test_the_gradient_does_not_flow_through_the_factor(name, old_given):
    # The derivative of -w c rho A, rho = exp(logp - old), is itself only where nothing flows through c. With
    # old_logp=None c is made of logp.
    logp, old, a, mask, ids, _, sampler = sample(2)
    old = old if old_given else logp
    leaf, engines = logp.clone().requires_grad_(), sampler.requires_grad_()
    objective = compose(clip="unclipped", correction=name)
    objective.loss(leaf, old if old_given else None, a, mask, ids, sampler_logp=engines).loss.backward()
    c = objective.correction(old, mask, sampler_logp=sampler)
    torch.testing.assert_close(leaf.grad, -objective.weights(mask, ids) * c * (logp - old).exp() * a)
    assert engines.grad is None and not c.requires_grad
    assert not objective.correction(leaf, mask, sampler_logp=engines).requires_grad


@pytest.mark.parametrize("name", CORRECTIONS)
def test_an_engine_that_agrees_changes_nothing(name):
    logp, old, a, mask, ids, _, _ = sample(3)
    plain = compose().loss(logp, old, a, mask, ids)
    out = compose(correction=name).loss(logp, old, a, mask, ids, sampler_logp=old)
    assert torch.equal(out.loss, plain.loss)
    assert (
        ratio_of(out.metrics["sampler/ratio_mean"]) == 1 and ratio_of(out.metrics["correction/changed_fraction"]) == 0
    )


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("name", CORRECTIONS)
def test_garbage_off_the_mask_changes_nothing(name, garbage):
    logp, old, a, mask, ids, _, sampler = sample(4)
    outputs, gradients = [], []
    for old_used, sampler_used in ((old, sampler), (x.masked_fill(~mask, garbage) for x in (old, sampler))):
        leaf = logp.clone().requires_grad_()
        out = compose(correction=name).loss(leaf, old_used, a, mask, ids, sampler_logp=sampler_used)
        out.loss.backward()
        numbers = {name: (total.item(), count.item()) for name, (total, count) in out.metrics.items()}
        outputs.append((out.loss.item(), numbers, {name: value.item() for name, value in out.maxima.items()}))
        gradients.append(leaf.grad)
    assert outputs[0] == outputs[1]
    assert torch.equal(*gradients)


@pytest.mark.parametrize("name", ["tis", "icepop"])
def test_with_a_sequence_ratio_the_row_is_weighed_by_the_mean_of_its_factors(name):
    objective = compose(ratio="sequence", clip="unclipped", correction=name)
    assert [line for line in objective.warnings if f"ratio=sequence with correction={name}" in line]
    logp, old, a, mask, ids, _, sampler = sample(5)
    plain, leaf = logp.clone().requires_grad_(), logp.clone().requires_grad_()
    compose(ratio="sequence", clip="unclipped").loss(plain, old, a, mask, ids).loss.backward()
    objective.loss(leaf, old, a, mask, ids, sampler_logp=sampler).loss.backward()
    c = objective.correction(old, mask, sampler_logp=sampler).where(mask, 0)
    mean = c.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True)
    torch.testing.assert_close(leaf.grad, mean * plain.grad)


def test_no_other_pair_warns():
    for names in corrected():
        expected = names["ratio"] == "sequence" and names["correction"] != "sequence_mask"
        assert any("correction=" in line for line in compose(**names).warnings) == expected


def test_metrics_by_hand():
    # Row 1: the four tokens above; row 2: one token at 0.6; the rest is padding, and the third row has no token.
    sampler = torch.cat([engine(RATIOS), engine([0.6, 9, 9, 9]), engine([9.0] * 4)])
    mask = mask_of([4, 1, 0], 4)
    arguments = (torch.zeros(3, 4), torch.full((3, 4), -2.0), torch.ones(3, 4), mask, torch.tensor([0, 0, 0]))
    for name, changed in (("tis", [1, 5]), ("icepop", [2, 5]), ("sequence_mask", [1, 2]), ("none", None)):
        out = compose(correction=name).loss(*arguments, sampler_logp=sampler)
        total, count = out.metrics["sampler/ratio_mean"]
        assert (total.item(), count.item()) == pytest.approx((0.4 + 1 + 1.5 + 6 + 0.6, 5))
        assert out.maxima["sampler/ratio_max"].item() == pytest.approx(6)
        found = out.metrics.get("correction/changed_fraction")
        assert (found and [v.item() for v in found]) == changed
        assert not any(v.requires_grad for pair in out.metrics.values() for v in pair)


def test_metric_names_depend_on_the_configuration_alone():
    logp, old, a, mask, ids, _, sampler = sample(6)
    plain = compose().loss(logp, old, a, mask, ids)
    assert not [name for name in (*plain.metrics, *plain.maxima) if name.startswith(("sampler/", "correction/"))]
    for name in OPTIONS["correction"]:
        objective = compose(correction=name)
        some = objective.loss(logp, old, a, mask, ids, sampler_logp=sampler)
        none = objective.loss(logp, old, a, mask & False, ids, sampler_logp=sampler)
        assert list(some.metrics) == list(none.metrics) and list(some.maxima) == list(none.maxima)
        assert list(plain.metrics) == [key for key in some.metrics if key in plain.metrics]
        assert none.maxima["sampler/ratio_max"].item() == 0
        empty = torch.zeros(2, 0)
        nothing = objective.loss(empty, None, empty, full(2, 0), torch.zeros(2, dtype=torch.long), sampler_logp=empty)
        assert nothing.loss.item() == 0 and list(nothing.maxima) == list(some.maxima)


def test_metrics_add_up_over_a_cut():
    for name in CORRECTIONS:
        objective = compose(correction=name)
        logp, old, a, mask, ids, _, sampler = sample(7)
        whole = objective.loss(logp, old, a, mask, ids, sampler_logp=sampler)
        parts = [
            objective.loss(logp[i], old[i], a[i], mask[i], ids[i], sampler_logp=sampler[i]) for i in ([2], [3, 0, 1])
        ]
        for key, (total, count) in whole.metrics.items():
            assert sum(p.metrics[key][0] for p in parts).item() == pytest.approx(total.item())
            assert sum(p.metrics[key][1] for p in parts) == count
        assert max(p.maxima["sampler/ratio_max"] for p in parts) == whole.maxima["sampler/ratio_max"]


@pytest.mark.parametrize("name", CORRECTIONS)
def test_the_samplers_log_probabilities_are_needed_and_named(name):
    logp, old, a, mask, ids, _, sampler = sample(8)
    objective = load_objective([f"correction={name}", "kl=none"])
    assert objective.needs("sampler_logp")
    with pytest.raises(ValueError, match=f"correction={name} needs `sampler_logp`, which was not given"):
        objective.loss(logp, old, a, mask, ids)
    with pytest.raises(ValueError, match="sampler_logp must have shape"):
        objective.loss(logp, old, a, mask, ids, sampler_logp=sampler[:, :4])
    sampler[1, 3] = float("-inf")
    with pytest.raises(ValueError, match="sampler_logp is -inf at row 1, position 3"):
        objective.loss(logp, old, a, mask, ids, sampler_logp=sampler)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["correction=tis", "correction.cap=0.9"], r"correction.cap must be in \[1, inf\), got 0.9"),
        (["correction=tis", "correction.cap=inf"], r"correction.cap must be in \[1, inf\)"),
        (["correction=tis", "correction.cap=two"], "correction.cap must be a number"),
        (["correction=icepop", "correction.low=5"], r"correction.low must be in \[0, 1\), got 5"),
        (["correction=icepop", "correction.low=-0.1"], "correction.low must be in"),
        (["correction=icepop", "correction.high=0.5"], r"correction.high must be in \(1, inf\), got 0.5"),
        (["correction=icepop", "correction.high=1"], "correction.high must be in"),
        (["correction=sequence_mask", "correction.low=3"], r"correction.low must be in \[0, 1\), got 3"),
        (["correction=sequence_mask", "correction.high=null"], "correction.high must be a number"),
        (["correction=sequence_mask", "correction.high=0"], "correction.high must be in"),
    ],
)
def test_a_wrong_value_is_named_with_what_would_be_right(overrides, message):
    with pytest.raises(ValueError, match=message):
        load_objective(overrides)
