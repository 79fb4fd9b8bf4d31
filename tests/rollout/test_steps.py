"""From the steps of a text to positions of tokens, and from a reward of steps to advantages."""

import math

import pytest
import torch

from grpo_lightning.errors import RunError
from grpo_lightning.reward import RewardSet, Step
from grpo_lightning.reward.score import mean_rewards
from grpo_lightning.rollout.rows import step_positions
from tests.rollout.test_collect import FakeEngine, G, collector

WORDS = {1: "ab", 2: "c", 3: "\n", 0: "", 4: "déf", 5: " "}


def decode(ids):
    return "".join(WORDS[i] for i in ids)


@pytest.mark.parametrize(
    ("ids", "ends", "expected"),
    [
        ([1, 3, 2, 3, 0], [3, 5], [1, 4]),  # "ab\n", "c\n", and the end-of-sequence token goes along
        ([1, 3, 2], [3, 4], [1, 2]),
        ([1, 2, 3, 4], [1, 4, 7], [0, 2, 3]),  # a step may end inside of a token
        ([4], [3], [0]),
        ([0, 1, 0, 2, 0], [2, 3], [1, 4]),  # tokens without text belong to no step but the last
    ],
)
def test_a_step_ends_at_the_token_that_reaches_its_end(ids, ends, expected):
    steps = [Step(end, float(k)) for k, end in enumerate(ends)]
    assert step_positions(ids, steps, decode) == [(place, float(k)) for k, place in enumerate(expected)]


def test_a_character_of_several_tokens_ends_with_its_last():
    ids = list("a😀b".encode())
    steps = [Step(end, float(end)) for end in (1, 2, 3)]
    positions = step_positions(ids, steps, lambda some: bytes(some).decode(errors="replace"))
    assert positions == [(0, 1.0), (4, 2.0), (5, 3.0)]


def test_steps_without_a_verdict_are_left_out():
    steps = [Step(2, None), Step(3, 1.0)]
    assert step_positions([1, 2], steps, decode) == [(1, 1.0)]
    assert step_positions([1, 2], [], decode) == []


class Halves:
    """Two steps: the first token is the first step's reward (99: no verdict of the row), the second is right."""

    weight, correctness = 1.0, True

    def steps(self, batch):
        return [
            None if ids[0] == 99 else [Step(len(str(ids[0])), float(ids[0])), Step(len(text), 1.0)]
            for ids, text in zip(batch.completion_ids, batch.completions, strict=True)
        ]

    def __call__(self, batch):
        return mean_rewards(self.steps(batch))


def test_rewards_of_steps_become_advantages():
    made = collector(
        FakeEngine(lambda draw: (1, 0, 99, 0)), ["algorithm=process", "kl=none"],
        rewards=RewardSet({"halves": Halves()}),
    )  # fmt: skip
    rollout = made.collect(1)
    # steps (1, 1), (0, 1), (0, 1): mean 2/3, unbiased std of six .5164; the normalised are .6455 and -1.2910
    right, wrong = (1 / 3) / math.sqrt(4 / 15), (-2 / 3) / math.sqrt(4 / 15)
    lost = [wrong + right, right, right]
    expected = [[2 * right, right, right], lost, [0.0, 0.0, 0.0], lost]
    for group in rollout.groups:
        assert len(group.rows) == G
        for row, values in zip(group.rows, expected, strict=True):
            torch.testing.assert_close(row.advantage, torch.tensor(values), atol=1e-4, rtol=0)
    assert rollout.records[0]["steps"] == [[1, 1.0], [5, 1.0]]


def test_an_advantage_of_steps_without_a_reward_that_has_them_names_what_is_missing():
    made = collector(FakeEngine(lambda draw: (1, 0, 0, 0)), ["algorithm=process", "kl=none"])
    with pytest.raises(RunError, match="advantage=process needs `step_rewards`"):
        made.collect(1)


def test_the_command_refuses_before_the_model_is_loaded(command, run_dir):
    code, _, err = command("algorithm=process", "trainer=cpu", "logger=none", f"hydra.run.dir={run_dir}")
    assert code == 2 and "advantage=process needs rewards of steps" in err and "reward=[exact,process]" in err
    code, _, err = command(
        "algorithm=gtpo", "reward=[random]", "trainer=cpu", "logger=none", f"hydra.run.dir={run_dir}2"
    )
    assert code == 2 and "advantage=gtpo needs to know right from wrong" in err
