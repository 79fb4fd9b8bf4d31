"""rollout.ahead=1 (the next rollout is generated while the policy is updated) and update.old_logp=sampler."""

import json
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
import pytest
import torch

from grpo_lightning.callbacks import RolloutCallback
from grpo_lightning.rollout.buffer import Scores
from tests.rollout.engines import ThreadedHF
from tests.rollout.test_collect import DYNAMIC, FakeEngine, G, collector

THREADED = ["rollout=vllm_server", "rollout.engine._target_=tests.rollout.engines.ThreadedHF"]


class Submitting(FakeEngine):
    """Answers at once when asked to `submit`."""

    def submit(self, requests, params):
        future = Future()
        future.set_result(self.generate(requests, params))
        return future


def ahead_collector(overrides=("kl=none",), **changes):
    """A collector whose kept weights are seen in the log-probabilities scored with them: -9 instead of -0.75."""
    state = {"kept": False}

    @contextmanager
    def kept_weights():
        state["kept"] = True
        yield
        state["kept"] = False

    def score(rows, reference):
        return [
            Scores(torch.full((row.length,), -9.0 if state["kept"] else -0.75), torch.zeros(row.length), None)
            for row in rows
        ]

    plan = changes.pop("plan", lambda draw: (1, 0, 0, 1))
    return collector(Submitting(plan), overrides, kept_weights=kept_weights, score=score, **changes)


def test_a_draw_ahead_is_the_first_of_its_rollout_and_keeps_the_old_policy_that_sampled_it():
    made = ahead_collector()
    first = made.collect(1)
    made.start_ahead(2)
    made.engine.version = 5
    made.finish_ahead()
    second, third = made.collect(2), made.collect(3)
    assert [r.metrics["rollout/staleness_max"] for r in (first, second, third)] == [0, 1, 0]
    assert [r.records[0]["staleness"] for r in (first, second, third)] == [0, 1, 0]
    assert [r.rows[0].weights_version for r in (first, second, third)] == [0, 0, 5]
    assert [row.old_logp is None for row in (first.rows[0], third.rows[0])] == [True, True]
    assert all(row.old_logp.tolist() == [-9.0] * row.length for row in second.rows)
    # Nothing is drawn twice and nothing is left out.
    assert [g.rows[0].group_id for r in (first, second, third) for g in r.groups] == list(range(9))
    assert second.tokens_generated == 3 * G * 3 and second.metrics["speed/generated_tokens_per_s"] > 0


def test_a_draw_ahead_enters_its_rollout_even_where_surplus_groups_are_enough():
    made = ahead_collector(DYNAMIC, plan=lambda draw: (1, 0, 0, 1))
    made.collect(1)
    made.surplus = ahead_collector(DYNAMIC).collect(1).groups  # as many as a rollout takes
    for group in made.surplus:
        for row in group.rows:
            row.group_id += 1000
    made.start_ahead(2)
    made.finish_ahead()
    rollout = made.collect(2)
    assert rollout.metrics["sampling/groups_reused"] == 3 and rollout.metrics["sampling/draws"] == 1
    assert [group.rows[0].group_id for group in made.surplus] == [3, 4, 5]
    assert {record["status"] for record in rollout.records} == {"trained", "kept for the next rollout"}
    assert made.collect(3).metrics["rollout/staleness_max"] == 2  # one rollout kept, and sampled ahead of it


def test_a_draw_under_way_is_in_the_checkpoint_with_its_old_policy():
    whole, part = ahead_collector(), ahead_collector()
    for made in (whole, part):
        made.collect(1)
        made.start_ahead(2)
    resumed = ahead_collector()
    resumed.load_state_dict(part.state_dict())
    whole.finish_ahead()
    expected, got = whole.collect(2), resumed.collect(2)
    assert [row.record for row in got.rows] == [row.record for row in expected.rows]
    assert all(row.old_logp.tolist() == [-9.0] * row.length for row in got.rows)
    assert [g.rows[0].group_id for g in resumed.collect(3).groups] == [6, 7, 8]


def test_an_error_while_generating_ahead_is_raised_where_it_is_waited_for():
    made = ahead_collector()
    made.collect(1)
    made.start_ahead(2)
    failed = Future()
    failed.set_exception(RuntimeError("the engine broke"))
    made._ahead.completions = failed
    with pytest.raises(RuntimeError, match="the engine broke"):
        made.finish_ahead()


def test_the_engines_log_probabilities_serve_as_old_policy_where_that_is_chosen():
    made = collector(FakeEngine(lambda draw: (1, 0, 0, 1)), needs_old_logp=True, old_logp="sampler")
    rows = made.collect(1).rows
    assert all(row.old_logp is row.sampler_logp for row in rows)
    assert sum(count for count, _ in made.scored) == 0  # no forward pass
    surplus = collector(FakeEngine(lambda draw: (1, 0, 0, 1)), DYNAMIC, old_logp="sampler", prompts=2)
    surplus.surplus = []
    surplus.start = surplus._draw(1)
    surplus._ready = surplus.start
    surplus.prompts_per_rollout = 1
    surplus.collect(1)
    assert all(row.old_logp is row.sampler_logp for group in surplus.surplus for row in group.rows)


def read(folder: Path) -> pd.DataFrame:
    return pd.read_csv(folder / "metrics.csv")


def records(folder: Path, number: int) -> list[dict]:
    return [json.loads(line) for line in (folder / "rollouts" / f"{number:06d}.jsonl").read_text().splitlines()]


def test_a_run_ahead_is_one_rollout_stale_and_its_ratio_is_to_the_weights_that_sampled(command, toy, run_dir):
    ThreadedHF.log.clear()
    code, _, err = command(
        *toy, *THREADED, "reward=[random]", "eval.reward=[exact]", "rollout.ahead=1", "trainer.max_epochs=4",
        "+rollout.engine.delay=0.05",
        f"hydra.run.dir={run_dir}",
    )  # fmt: skip
    assert code == 0, err
    metrics = read(run_dir)
    assert metrics["rollout/staleness_max"].tolist() == [0, 1, 1, 1]
    assert [{r["weights_version"] for r in records(run_dir, n)} for n in (1, 2, 3, 4)] == [{0}, {0}, {1}, {2}]
    assert [{r["staleness"] for r in records(run_dir, n)} for n in (1, 2, 3, 4)] == [{0}, {1}, {1}, {1}]
    # old_logp is the trainer's at the weights that sampled: the gap to the engine's is rounding, while the policy has
    # moved on by a step, which the importance ratio shows.
    assert (metrics["sampler/logp_gap_max"] < 1e-4).all()
    ratio = metrics["policy/ratio_max"]
    assert ratio[0] == 1 and (ratio[1:] > 1.001).all()
    # Weights never change under a rollout, and none is begun after the last.
    train = [line for line in ThreadedHF.log if line.startswith(("submit", "sync"))]
    assert train == [
        "sync 0", "sync 0", "submit rollout 2", "sync 1", "submit rollout 3", "sync 2", "sync 2", "submit rollout 4",
        "sync 3", "sync 4",
    ]  # fmt: skip


def test_without_the_kept_weights_the_gap_of_a_run_ahead_shows_it(command, toy, run_dir, monkeypatch):
    monkeypatch.setattr("grpo_lightning.module.GRPOModule._exchange_weights", lambda self: None)
    run = [*toy, *THREADED, "reward=[random]", "eval.reward=[exact]", "rollout.ahead=1"]
    assert command(*run, f"hydra.run.dir={run_dir}")[0] == 0
    assert (read(run_dir)["sampler/logp_gap_max"][1:] > 1e-3).all()


@pytest.mark.parametrize("options", [[], ["algorithm=dapo", "update.minibatches=2"]], ids=["grpo", "dapo"])
def test_a_resumed_run_ahead_equals_the_run_that_was_never_stopped(options, command, toy, tmp_path):
    run = [*toy, *THREADED, *options, "reward=[random]", "eval.reward=[exact]", "rollout.ahead=1"]
    run += ["trainer.max_epochs=4"]
    assert command(*run, f"hydra.run.dir={tmp_path / 'whole'}")[0] == 0
    with pytest.MonkeyPatch.context() as patch:
        fill = RolloutCallback.on_train_epoch_start

        def interrupted(self, trainer, module):
            if trainer.current_epoch == 2:
                raise KeyboardInterrupt
            fill(self, trainer, module)

        patch.setattr(RolloutCallback, "on_train_epoch_start", interrupted)
        assert command(*run, f"hydra.run.dir={tmp_path / 'part'}")[0] == 130
    assert command(f"resume={tmp_path / 'part'}")[0] == 0
    whole, part = read(tmp_path / "whole"), read(tmp_path / "part")
    names = [name for name in whole if not name.startswith(("time/", "speed/"))]
    pd.testing.assert_frame_equal(whole[names], part[names], check_exact=True)
    for number in range(1, 5):
        assert records(tmp_path / "whole", number) == records(tmp_path / "part", number)
    weights = [tmp_path / run / "checkpoints" / "model" / "model.safetensors" for run in ("whole", "part")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_the_sampler_as_old_policy_trains_alike_where_both_agree(command, toy, run_dir, tmp_path):
    # In float32 the in-process engine and the trainer compute the same log-probabilities but for rounding.
    several = [*toy, "reward=[random]", "eval.reward=[exact]", "update.minibatches=2", "trainer.max_epochs=2"]
    assert command(*several, f"hydra.run.dir={run_dir}")[0] == 0
    assert command(*several, "update.old_logp=sampler", f"hydra.run.dir={tmp_path / 'sampler'}")[0] == 0
    trainer, sampler = read(run_dir), read(tmp_path / "sampler")
    for name in ("policy/grad_norm", "policy/ratio_max"):
        assert sampler[name].tolist() == pytest.approx(trainer[name].tolist(), rel=1e-3)
    # After the rollout's first step the trainer has no log-probabilities at the weights that sampled.
    gap = sampler["sampler/logp_gap_max"]
    assert gap.isna().tolist() == [False, True, False, True] and (gap.dropna() < 1e-4).all()
    assert sampler["sampler/logp_gap_mean"].isna().tolist() == [False, True, False, True]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["rollout.ahead=1"], "rollout.ahead=1 samples while the policy is updated, which needs rollout=vllm_server"),
        (["rollout=vllm_server", "rollout.ahead=2"], "rollout.ahead must be 0 or 1, got 2"),
        (["update.old_logp=engine"], "update.old_logp must be trainer or sampler, got engine"),
        (["update.old_logp=sampler", "correction=tis"], "correction=none, or update.old_logp=trainer"),
        (["rollout=hf", "+rollout.launch=true"], "rollout.launch belongs to rollout=vllm_server"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(options, message, command, toy, run_dir):
    code, _, err = command(*toy, *options, f"hydra.run.dir={run_dir}")
    assert code == 2 and message in err and len(err.strip().splitlines()) == 1
