"""One exploration: groups, rewards, advantages, dynamic sampling, surplus, filters, and what is recorded."""

import math

import pytest
import torch

from grpo_lightning.clock import PhaseClock
from grpo_lightning.data.prompts import Prompt, PromptStream
from grpo_lightning.objective import load_objective
from grpo_lightning.reward import RewardSet
from grpo_lightning.rollout.buffer import Scores
from grpo_lightning.rollout.collect import Collector
from grpo_lightning.rollout.engine import Completion, SamplingParams

G = 4


class FakeEngine:
    """Completion k of draw d is the token `plan(d)[k]` (its reward) and then `length(d, k)` filler tokens."""

    name = "fake"
    shared = False

    def __init__(self, plan, length=lambda draw, k: 2, truncated=lambda draw, k: False):
        self.plan, self.length, self.truncated = plan, length, truncated
        self.version = 0
        self.keys = []

    def sync(self, policy, version):
        self.version = version

    def generate(self, requests, params):
        groups = []
        for request in requests:
            self.keys.append(request.key)
            draw = request.key[-1]
            groups.append([
                Completion([self.plan(draw)[k], *[9] * self.length(draw, k)], [-0.5] * (1 + self.length(draw, k)),
                           "length" if self.truncated(draw, k) else "stop", self.version)
                for k in range(request.n)
            ])  # fmt: skip
        return groups

    def close(self):
        pass


class FirstToken:
    """The reward is the first token; 99 stands for no reward."""

    weight, correctness = 1.0, True

    def __call__(self, batch):
        return [None if ids[0] == 99 else float(ids[0]) for ids in batch.completion_ids]


def collector(engine, overrides=("kl=none",), prompts=3, data=10, **changes):
    made = [Prompt(i, f"p{i}", (1, 2, 3), f"a{i}", {"source": "s"}) for i in range(data)]
    scored = []

    def score(rows, reference):
        scored.append((len(rows), reference))
        return [
            Scores(torch.full((row.length,), -1.0 if reference else -0.75), torch.zeros(row.length), None)
            for row in rows
        ]

    options = dict(
        engine=engine, stream=PromptStream(made, 0), rewards=RewardSet({"first": FirstToken()}),
        objective=load_objective(list(overrides)), sampling=SamplingParams(8, 1.0, (0,)),
        prompts_per_rollout=prompts, group_size=G, seed=5, needs_old_logp=False, score=score,
        decode=lambda ids: " ".join(map(str, ids)), clock=PhaseClock(),
    )  # fmt: skip
    result = Collector(**(options | changes))
    result.scored = scored  # type: ignore[attr-defined]
    return result


def test_a_rollout_has_whole_groups_with_advantages_of_their_own_rewards():
    engine = FakeEngine(lambda draw: [(1, 0, 0, 0), (1, 1, 0, 0), (1, 1, 1, 1)][draw % 3])
    engine.version = 7
    rollout = collector(engine).collect(1)
    assert [len(group.rows) for group in rollout.groups] == [G] * 3
    # r = [1,0,0,0]: mean .25, unbiased std .5, so 1.5 and -.5; [1,1,0,0]: mean .5, std .57735, so +-.866; all equal: 0.
    expected = [[1.5, -0.5, -0.5, -0.5], [0.8660, 0.8660, -0.8660, -0.8660], [0, 0, 0, 0]]
    for group, values in zip(rollout.groups, expected, strict=True):
        for row, value in zip(group.rows, values, strict=True):
            torch.testing.assert_close(row.advantage, torch.full((3,), float(value)), atol=1e-4, rtol=0)
            assert row.token_ids.tolist() == [1, 2, 3, row.token_ids[3].item(), 9, 9] and row.start == 3
            assert row.loss_mask.tolist() == [False] * 3 + [True] * 3
            assert row.weights_version == 7 and row.old_logp is None and row.sampler_logp.tolist() == [-0.5] * 3
    assert rollout.tokens_generated == 3 * G * 3
    assert rollout.metrics["reward/mean"] == pytest.approx(7 / 12)
    assert rollout.metrics["group/zero_std_fraction"] == pytest.approx(1 / 3)
    assert rollout.metrics["group/all_right_fraction"] == pytest.approx(1 / 3)
    assert rollout.metrics["group/all_wrong_fraction"] == 0


def test_the_prompt_order_and_sampling_keys_follow_the_draw():
    engine = FakeEngine(lambda draw: (1, 0, 0, 0))
    made = collector(engine, prompts=3, data=3)
    first, second = made.collect(1), made.collect(2)
    assert sorted(g.rows[0].prompt_id for g in first.groups) == [0, 1, 2]  # each prompt once per pass (P52)
    assert sorted(g.rows[0].prompt_id for g in second.groups) == [0, 1, 2]
    assert [g.rows[0].group_id for g in first.groups + second.groups] == list(range(6))  # never the prompt's text (P16)
    assert len(set(engine.keys)) == 6 and all(key[0] == 5 for key in engine.keys)


def test_records_hold_every_completion_with_its_reward_and_advantage():
    rollout = collector(FakeEngine(lambda draw: (1, 0, 99, 1))).collect(1)
    assert len(rollout.records) == 3 * G
    for row, record in zip(rollout.rows, rollout.records, strict=True):  # P73: aligned rows
        assert record["completion"].split()[0] == str(int(row.token_ids[3]))
        assert record["group_id"] == row.group_id and record["prompt_id"] == row.prompt_id
        assert record["prompt"] == f"p{row.prompt_id}" and record["answer"] == f"a{row.prompt_id}"
        assert record["advantage"] == pytest.approx(float(row.advantage[0]))
        assert record["length"] == 3 and record["finish_reason"] == "stop"
    assert [r["reward"] for r in rollout.records[:G]] == [1, 0, None, 1]
    assert [r["correct"] for r in rollout.records[:G]] == [True, False, None, True]


def test_the_sampled_ids_are_trained_on_whatever_they_decode_to():
    # P38: two different token sequences decode to the same text; decoding and encoding again would lose one.
    engine = FakeEngine(lambda draw: (1, 0, 3, 1), length=lambda draw, k: k)
    rollout = collector(engine, decode=lambda ids: "hello").collect(1)
    for group in rollout.groups:
        for k, row in enumerate(group.rows):
            assert row.token_ids.tolist() == [1, 2, 3, (1, 0, 3, 1)[k], *[9] * k]
            assert len(row.sampler_logp) == row.length == 1 + k and row.record["completion"] == "hello"


def test_a_missing_reward_leaves_the_statistics_and_the_loss():
    # P22: [1, None, 0, 1] without std: .333, 0, -.667, .333
    rollout = collector(FakeEngine(lambda draw: (1, 99, 0, 1)), ["kl=none", "advantage=dr_grpo"]).collect(1)
    rows = rollout.groups[0].rows
    assert [round(float(row.advantage[0]), 3) for row in rows] == [0.333, 0, -0.667, 0.333]
    assert [bool(row.loss_mask.any()) for row in rows] == [True, False, True, True]
    assert [row.record["status"] for row in rows] == ["trained", "out of the loss", "trained", "trained"]
    assert rollout.metrics["reward/mean"] == pytest.approx(2 / 3)  # P74: a missing value is not a zero
    assert rollout.metrics["reward/first/missing_fraction"] == pytest.approx(1 / 4)


DYNAMIC = ["kl=none", "sampling=dynamic"]


def test_dynamic_sampling_draws_until_enough_groups_have_varied_rewards():
    # Every second draw is flat: 3 prompts a draw give 1 or 2 varied groups.
    engine = FakeEngine(lambda draw: (1, 0, 0, 1) if draw % 2 else (1, 1, 1, 1))
    made = collector(engine, DYNAMIC)
    rollout = made.collect(1)
    assert [g.rows[0].group_id for g in rollout.groups] == [1, 3, 5]
    assert rollout.metrics["sampling/draws"] == 2 and rollout.metrics["sampling/groups"] == 3
    # Metrics are over all that was drawn: dropping flat groups must not make the reward look better.
    assert rollout.metrics["reward/mean"] == pytest.approx(0.75)
    assert sorted({r["status"] for r in rollout.records}) == ["dropped", "trained"]
    assert len(rollout.records) == 6 * G


def test_surplus_groups_are_kept_for_one_rollout_with_the_old_policy_they_came_from():
    engine = FakeEngine(lambda draw: (1, 0, 0, 1) if draw % 3 else (1, 1, 1, 1))  # draws 1,2 4,5 7,8 vary
    made = collector(engine, DYNAMIC)
    first = made.collect(1)
    assert [g.rows[0].group_id for g in first.groups] == [1, 2, 4] and first.metrics[
        "sampling/groups_kept_for_next"
    ] == 1
    # The surplus row's old_logp was computed now; the rows trained on right away are this policy's own.
    assert made.scored == [(G, False)] and all(row.old_logp is None for row in first.rows)
    kept = [r for r in first.records if r["status"] == "kept for the next rollout"]
    assert {r["group_id"] for r in kept} == {5} and all(r["advantage"] is None for r in kept)
    engine.sync(None, 1)
    second = made.collect(2)
    assert [g.rows[0].group_id for g in second.groups] == [5, 7, 8]
    assert second.metrics["sampling/groups_reused"] == 1
    reused = second.groups[0].rows
    assert all(row.weights_version == 0 and row.old_logp.tolist() == [-0.75] * 3 for row in reused)
    assert all(row.old_logp is None for group in second.groups[1:] for row in group.rows)
    assert all(r["status"] == "trained" and r["advantage"] is not None for r in second.records if r["group_id"] == 5)


def test_a_surplus_group_older_than_one_rollout_is_dropped():
    varied = {1, 2, 3, 4}
    engine = FakeEngine(lambda draw: (1, 0, 0, 1) if draw in varied or draw > 20 else (0, 0, 0, 0))
    made = collector(engine, DYNAMIC, prompts=2)
    made.collect(1)  # draws 0,1 | 2,3: trains on 1,2 and keeps 3
    made.surplus[0].rollout = 0
    rollout = made.collect(2)
    assert 3 not in [g.rows[0].group_id for g in rollout.groups]
    made = collector(engine, [*DYNAMIC, "sampling.keep_surplus=false"], prompts=2)
    made.collect(1)
    assert made.surplus == []


def test_at_max_draws_it_trains_on_what_there_is_and_warns(caplog):
    engine = FakeEngine(lambda draw: (1, 0, 0, 1) if draw == 2 else (0, 0, 0, 0))
    rollout = collector(engine, [*DYNAMIC, "sampling.max_draws=3"]).collect(1)
    assert len(rollout.groups) == 1 and rollout.metrics["sampling/draws"] == 3
    assert "sampling.max_draws" in caplog.text
    empty = collector(FakeEngine(lambda draw: (0,) * G), [*DYNAMIC, "sampling.max_draws=2"]).collect(1)
    assert empty.groups == [] and empty.rows == [] and empty.metrics["group/zero_std_fraction"] == 1
    assert len(empty.records) == 6 * G


def test_dynamic_sampling_looks_at_the_task_reward_not_at_the_shaped_one():
    # Flat task rewards whose lengths differ: shaped by soft overlong they would look varied.
    engine = FakeEngine(lambda draw: (1, 1, 1, 1), length=lambda draw, k: k * 2)
    overrides = [*DYNAMIC, "overlong=soft", "overlong.max_length=8", "overlong.cache=4", "sampling.max_draws=1"]
    assert collector(engine, overrides).collect(1).groups == []


def test_soft_overlong_shapes_the_advantage_but_not_the_reported_reward():
    # L=8, cache 4: lengths 1+2k = 1, 3, 5, 7 give 0, 0, -.25, -.75 on top of a reward of 1.
    engine = FakeEngine(lambda draw: (1, 1, 1, 1), length=lambda draw, k: k * 2)
    overrides = ["kl=none", "overlong=soft", "overlong.max_length=8", "overlong.cache=4", "advantage=dr_grpo"]
    rollout = collector(engine, overrides).collect(1)
    assert [r["shaped_reward"] for r in rollout.records[:G]] == pytest.approx([1, 1, 0.75, 0.25])
    assert [float(row.advantage[0]) for row in rollout.rows[:G]] == pytest.approx([0.25, 0.25, 0, -0.5])
    assert rollout.metrics["reward/mean"] == 1 and rollout.records[3]["reward"] == 1


def test_overlong_filtering_takes_truncated_rows_out_of_the_loss_but_not_out_of_the_baseline():
    engine = FakeEngine(lambda draw: (1, 0, 0, 0), truncated=lambda draw, k: k == 1)
    rollout = collector(engine, ["kl=none", "overlong=filter"]).collect(1)
    rows = rollout.groups[0].rows
    assert [bool(row.loss_mask.any()) for row in rows] == [True, False, True, True]
    assert float(rows[0].advantage[0]) == pytest.approx(1.5, abs=1e-4)  # mean and std over all four
    assert rollout.metrics["completion/truncated_fraction"] == 0.25


def test_reference_and_old_log_probabilities_are_computed_where_they_are_needed():
    plan = FakeEngine(lambda draw: (1, 0, 0, 1))
    with_reference = collector(plan, ["kl=k3"])
    rows = with_reference.collect(1).rows
    assert with_reference.scored[-1] == (3 * G, True) and rows[0].ref_logp.tolist() == [-1.0] * 3
    several_updates = collector(plan, needs_old_logp=True)
    assert several_updates.collect(1).rows[0].old_logp.tolist() == [-0.75] * 3
    assert all(not reference for _, reference in several_updates.scored)


def test_kl_in_the_reward_lowers_it_by_beta_times_the_sum_over_tokens():
    # k1(old, ref) = old - ref = .25 per token, 3 tokens, beta .1: every reward falls by .075, equal over the group
    # except that longer rows fall more: row 3 has 6 tokens.
    engine = FakeEngine(lambda draw: (1, 1, 1, 1), length=lambda draw, k: 5 if k == 3 else 2)
    made = collector(engine, ["kl=k1", "kl.beta=0.1", "kl.in_reward=true", "advantage=dr_grpo"])
    rollout = made.collect(1)
    assert [float(row.advantage[0]) for row in rollout.rows[:G]] == pytest.approx([0.01875] * 3 + [-0.05625], abs=1e-6)
    assert rollout.metrics["reward/mean"] == 1


def test_state_goes_on_where_it_stopped():
    engine = FakeEngine(lambda draw: (1, 0, 0, 1) if draw % 3 else (1, 1, 1, 1))
    whole, part = collector(engine, DYNAMIC), collector(engine, DYNAMIC)
    whole.collect(1)
    expected = whole.collect(2)
    part.collect(1)
    resumed = collector(engine, DYNAMIC)
    resumed.load_state_dict(part.state_dict())
    got = resumed.collect(2)
    assert [g.rows[0].group_id for g in got.groups] == [g.rows[0].group_id for g in expected.groups]
    assert math.isclose(got.metrics["reward/mean"], expected.metrics["reward/mean"])


def test_a_critic_gives_values_and_learns_what_was_returned():
    def score(rows, reference):
        assert not reference
        return [
            Scores(torch.full((row.length,), -0.75), torch.zeros(row.length), torch.tensor([0.5, 0.25, 0.0]))
            for row in rows
        ]

    chosen = ["kl=none", "advantage=gae", "advantage.lam=0.5", "advantage.whiten=false"]
    made = collector(FakeEngine(lambda draw: (1, 0, 99, 1)), chosen, score=score, has_critic=True)
    for group in made.collect(1).groups:
        # deltas (0.25 - 0.5, 0 - 0.25, r - 0) with lambda 1/2, from the back: r, -0.25 + r/2, -0.25 - 0.125 + r/4
        for row, r in zip(group.rows, (1.0, 0.0, None, 1.0), strict=True):
            expected = torch.zeros(3) if r is None else torch.tensor([r / 4 - 0.375, r / 2 - 0.25, r])
            torch.testing.assert_close(row.advantage, expected)
            returns = torch.zeros(3) if r is None else expected + torch.tensor([0.5, 0.25, 0.0])
            torch.testing.assert_close(row.returns, returns)
            assert row.values.tolist() == [0.5, 0.25, 0.0] and row.old_logp is None


def test_entropies_are_scored_where_the_advantage_takes_them_and_stay_with_surplus_rows():
    chosen = ["algorithm=gtpo", "kl=none", "sampling=dynamic"]
    made = collector(FakeEngine(lambda draw: (1, 0, 0, 1)), chosen, prompts=2)
    rows = made.collect(1).rows
    assert all(row.entropy is not None and row.old_logp is None for row in rows)
    assert made.scored == [(2 * G, False)]
    without = collector(FakeEngine(lambda draw: (1, 0, 0, 1)), ["kl=none"])
    assert all(row.entropy is None for row in without.collect(1).rows) and without.scored == []


def test_a_row_without_a_verdict_is_left_out_where_right_and_wrong_matter():
    class Length:
        weight, correctness = 1.0, False

        def __call__(self, batch):
            return [0.25 for _ in batch.completions]

    rewards = RewardSet({"first": FirstToken(), "length": Length()})
    engine = FakeEngine(lambda draw: (1, 99, 0, 1))
    for chosen, kept in ((["algorithm=gtpo"], False), (["advantage=grpo"], True)):
        rows = collector(engine, [*chosen, "kl=none"], rewards=rewards).collect(1).groups[0].rows
        assert [bool(row.loss_mask.any()) for row in rows] == [True, kept, True, True]
        assert bool(rows[1].advantage.any()) == kept
