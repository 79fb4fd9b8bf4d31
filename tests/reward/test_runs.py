"""Whole runs in which scoring goes wrong, or goes by steps."""

import csv
import json
from pathlib import Path


def column(run_dir: Path, name: str) -> list[str]:
    with (run_dir / "metrics.csv").open() as file:
        return [row[name] for row in csv.DictReader(file)]


def test_a_scorer_that_is_down_does_not_stop_a_run(toy, command, run_dir):
    code, _out, err = command(
        *toy, "rollout=hf", "reward=[exact,http]", "reward.http.url=http://127.0.0.1:1/score", "reward.http.retries=1",
        "reward.http.backoff=0.01", f"hydra.run.dir={run_dir}",
    )  # fmt: skip
    assert code == 0, err
    assert set(column(run_dir, "reward/http/missing_fraction")) == {"1.0"}
    assert set(column(run_dir, "reward/exact/missing_fraction")) == {"0.0"}
    records = [json.loads(line) for line in (run_dir / "rollouts" / "000001.jsonl").read_text().splitlines()]
    assert all(row["rewards"]["http"] is None and row["reward"] == row["rewards"]["exact"] for row in records)


def test_steps_of_the_embedded_task_are_a_reward_of_the_main_job(command, run_dir):
    code, _out, err = command(
        "rollout=hf", "trainer=cpu", "trainer.max_epochs=2", "rollout.prompts=4", "rollout.group_size=4",
        "eval.prompts=4", "eval.samples=1", "logger=none", "reward=[exact,process,noisy,length,repetition]",
        "reward.process.weight=0.5", f"hydra.run.dir={run_dir}", "eval.reward=[exact]",
    )  # fmt: skip
    assert code == 0, err
    rows = [json.loads(line) for line in (run_dir / "rollouts" / "000001.jsonl").read_text().splitlines()]
    for row in rows:
        assert 0 <= row["rewards"]["process"] <= 1
        if "<think>" not in row["completion"]:
            assert row["rewards"]["process"] == row["rewards"]["exact"]  # one step: the answer
    assert set(column(run_dir, "reward/process/missing_fraction")) == {"0.0"}
