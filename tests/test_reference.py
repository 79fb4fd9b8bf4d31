"""The reference policy can follow the policy; parts of the objective adapt once per rollout; both are saved."""

import csv

import pytest
import torch

from tests.models import llama
from tests.test_module import Fill, fit, make_rows


class EndsRollouts(Fill):
    """Ends every rollout as the rollout callback does, and keeps what the reference was then."""

    def __init__(self, rows):
        super().__init__(rows, needs_old=True)
        self.reference, self.policy = [], []

    def on_train_epoch_end(self, trainer, pl_module):
        self.policy.append(flat(pl_module.policy))
        pl_module.end_rollout()
        self.reference.append(flat(pl_module.reference))


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


def run(tmp_path, **options):
    return fit(
        make_rows(), ["kl=k3"], tmp_path, reference=True, fill=EndsRollouts, rollouts=5, minibatches=2, lr=0.01,
        **options,
    )  # fmt: skip


def test_it_stays_as_it_is(tmp_path):
    _, fill = run(tmp_path)
    assert all(torch.equal(reference, flat(llama(1))) for reference in fill.reference)


def test_a_copy_at_the_first_rollout_end_after_every_so_many_steps(tmp_path):
    _, fill = run(tmp_path, reference_every=4)  # two steps a rollout: at the ends of the second and the fourth
    start = flat(llama(1))
    expected = [start, fill.policy[1], fill.policy[1], fill.policy[3], fill.policy[3]]
    for reference, other in zip(fill.reference, expected, strict=True):
        torch.testing.assert_close(reference, other, rtol=0, atol=0)


def test_a_moving_average(tmp_path):
    _, fill = run(tmp_path, reference_every=3, reference_mix=0.25)  # passes 3, 6 and 9 steps in rollouts 2, 3 and 5
    expected = flat(llama(1))
    for number, (reference, policy) in enumerate(zip(fill.reference, fill.policy, strict=True), start=1):
        if number in (2, 3, 5):
            expected = 0.25 * policy + 0.75 * expected
        torch.testing.assert_close(reference, expected, rtol=1e-6, atol=1e-7)


def timeless(folder):
    rows = csv.DictReader((folder / "metrics.csv").open())
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "speed/"))} for row in rows]


@pytest.mark.parametrize(
    "options",
    [
        ["kl=k3", "reference.every=3", "reference.mix=0.5", "update.minibatches=2"],
        ["kl=adaptive", "kl.horizon=100", "entropy=adaptive", "sampling=frontier"],
        ["algorithm=dcpo", "sampling=frontier"],
    ],
    ids=["reference", "adaptive", "dcpo"],
)
def test_a_resumed_run_equals_one_that_was_never_stopped(command, toy, run_dir, options):
    whole, parts = run_dir / "whole", run_dir / "parts"
    options = [*toy, "checkpoint.every=3", *options]
    assert command(*options, "trainer.max_epochs=4", f"hydra.run.dir={whole}")[0] == 0
    assert command(*options, "trainer.max_epochs=2", f"hydra.run.dir={parts}")[0] == 0
    assert command(*options, "trainer.max_epochs=4", "resume=auto", f"hydra.run.dir={parts}")[0] == 0
    assert timeless(whole) == timeless(parts)
    rollouts = [[path.read_text() for path in sorted((f / "rollouts").iterdir())] for f in (whole, parts)]
    assert rollouts[0] == rollouts[1]
    if "kl=adaptive" in options:
        betas = [float(row["kl/beta"]) for row in timeless(whole)]
        assert len(set(betas)) > 1 and "entropy/coef" in timeless(whole)[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["kl=none", "reference.every=5"], "reference.every moves the reference policy, but kl=none has none"),
        (["reference.every=0"], "reference.every must be a whole number of optimiser steps from 1, or null, got 0"),
        (["reference.mix=0.5"], "reference.mix=0.5 does nothing without reference.every"),
        (["reference.mix=0"], "reference.mix must be in (0, 1] (1: a copy of the policy), got 0"),
        (["reference.every=5", "model.lora.r=4"], "with model.lora the reference policy is the model without"),
        (["reference.every=x"], "reference.every"),
    ],
)
def test_what_is_refused(command, options, message, run_dir):
    code, _, err = command("trainer=cpu", *options, f"hydra.run.dir={run_dir}")
    assert code == 2 and message in err
