"""Evaluation: sampled, greedy and pass@k, from completions alone."""

import itertools

import pytest

from grpo_lightning.data.prompts import Prompt
from grpo_lightning.evaluation import EVAL_STREAM, evaluate, pass_at_k
from grpo_lightning.reward import RewardSet
from grpo_lightning.rollout.collect import TRAIN_STREAM
from grpo_lightning.rollout.engine import Completion, SamplingParams


class Engine:
    """Sampled completion k of prompt p is right iff (p + k) % 4 == 0; greedy is right for prompt 1 alone."""

    name = "fake"
    shared = False

    def __init__(self):
        self.requests = []

    def generate(self, requests, params):
        self.requests += [(request, params) for request in requests]
        return [
            [
                Completion([int(prompt == 1 if params.temperature == 0 else (prompt + k) % 4 == 0)] * 2, [0.0] * 2,
                           "length" if k == 3 else "stop", 0)
                for k in range(request.n)
            ]
            for request in requests
            for prompt in [request.token_ids[0]]
        ]  # fmt: skip


class Score:
    weight, correctness = 2.0, True

    def __call__(self, batch):
        return [float(ids[0]) for ids in batch.completion_ids]


def test_accuracy_greedy_and_pass_at_k_are_those_of_the_completions():
    engine = Engine()
    prompts = [Prompt(i, f"p{i}", (i,), "a", {}) for i in range(3)]
    params = SamplingParams(8, 0.7, (0,))
    result = evaluate(engine, prompts, RewardSet({"s": Score()}), params, str, samples=4, seed=9)
    assert result.metrics["val/accuracy"] == pytest.approx(3 / 12)  # one right sample for each prompt
    assert result.metrics["val/pass@4"] == 1.0
    assert result.metrics["val/greedy"] == pytest.approx(1 / 3)
    assert result.metrics["val/reward"] == pytest.approx(2 * 3 / 12)
    assert result.metrics["val/length_mean"] == 2 and result.metrics["val/truncated_fraction"] == pytest.approx(3 / 12)
    assert len(result.records) == 12 + 3 and sum(r["greedy"] for r in result.records) == 3
    # Sampled at temperature 1 whatever training does; the keys are apart from those of training.
    assert {p.temperature for _, p in engine.requests} == {1.0, 0.0}
    assert all(r.key == (9, EVAL_STREAM, r.token_ids[0]) for r, _ in engine.requests) and EVAL_STREAM != TRAIN_STREAM


def test_pass_at_k_is_the_share_of_all_draws_without_replacement():
    for n, c, k in ((4, 1, 2), (5, 2, 3), (6, 6, 1), (6, 0, 6), (7, 3, 7)):
        draws = list(itertools.combinations([True] * c + [False] * (n - c), k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws))
