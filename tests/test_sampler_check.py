"""The warning about an engine that does not sample from the policy: when, how often, and with which cause."""

import logging
from types import SimpleNamespace

import pytest

from grpo_lightning.callbacks.sampler_check import SamplerCheck
from grpo_lightning.module import GRPOModule

STALE, DIFFERENT = "stale weights", "does not compute what the trainer does"


class Module(GRPOModule):
    """A module that has only measured."""

    def __init__(self) -> None:
        super(GRPOModule, self).__init__()


@pytest.fixture
def warned(caplog):
    """Lets a check see rollouts, each a list of the gaps of its steps (None: no step), and returns what it said."""

    def run(check, rollouts, start=0):
        caplog.clear()
        module = Module()
        with caplog.at_level(logging.WARNING):
            for number, gaps in enumerate(rollouts, start):
                trainer = SimpleNamespace(current_epoch=number)
                for gap in gaps:
                    module.step_metrics = {} if gap is None else {"policy/loss": 0.0, "sampler/logp_gap_mean": gap}
                    check.on_train_batch_end(trainer, module, None, None, 0)
                check.on_train_epoch_end(trainer, module)
        return [record.getMessage() for record in caplog.records]

    return run


@pytest.mark.parametrize(
    ("precision", "gap", "warns"),
    [
        ("32-true", 0.009, False),
        ("32-true", 0.011, True),
        (32, 0.011, True),
        ("64-true", 0.011, True),
        ("bf16-mixed", 0.011, False),
        ("bf16-mixed", 0.09, False),
        ("bf16-mixed", 0.11, True),
        ("16-mixed", 0.09, False),
    ],
)
def test_the_limit_depends_on_the_precision(warned, precision, gap, warns):
    assert bool(warned(SamplerCheck(precision), [[gap]])) == warns


def test_large_at_once_means_another_computation(warned):
    lines = warned(SamplerCheck("32-true"), [[0.5, 0.6], [0.5], [0.7]])
    assert len(lines) == 1
    assert lines[0].startswith("rollout 1: sampler/logp_gap_mean is 0.5, above 0.01 at precision 32-true; ")
    assert DIFFERENT in lines[0] and STALE not in lines[0]
    for where in ("model.path", "dtype", "rollout.temperature", "processed logits", "correction=tis"):
        assert where in lines[0]


def test_large_after_small_means_stale_weights(warned):
    lines = warned(SamplerCheck("32-true"), [[1e-5, 2e-5], [1e-5], [0.5], [0.6], [1e-5], [0.7]])
    assert len(lines) == 1
    assert lines[0].startswith("rollout 3:") and STALE in lines[0] and DIFFERENT not in lines[0]


def test_each_cause_is_said_once(warned):
    lines = warned(SamplerCheck("32-true"), [[0.5], [1e-5], [0.5], [0.5]])
    assert [DIFFERENT in lines[0], STALE in lines[1], len(lines)] == [True, True, 2]


def test_a_rollout_that_was_large_in_one_step_did_not_agree(warned):
    lines = warned(SamplerCheck("32-true"), [[0.5, 1e-5], [0.5]])
    assert len(lines) == 1 and DIFFERENT in lines[0]


def test_a_rollout_without_a_step_says_nothing_about_the_engine(warned):
    lines = warned(SamplerCheck("32-true"), [[None], [None, 0.5]])
    assert len(lines) == 1 and lines[0].startswith("rollout 2:") and DIFFERENT in lines[0]


def test_the_first_rollout_of_a_resumed_run_is_the_first_of_its_process(warned):
    lines = warned(SamplerCheck("32-true"), [[0.5]], start=7)
    assert len(lines) == 1 and lines[0].startswith("rollout 8:") and DIFFERENT in lines[0]
