"""What is said of many rows is said once."""

import csv

from grpo_lightning.callbacks.rollout import _together


def test_the_same_message_of_several_rows_is_one_line():
    errors = [f"reward.http: row {i}: nobody there" for i in range(3)]
    errors += ["reward.f: row 1: ValueError: x\nrow 5: y", "something else", "something else"]
    assert _together(errors) == [
        "reward.http: 3 rows: nobody there",
        "reward.f: row 1: ValueError: x\nrow 5: y",
        "something else",
    ]


def test_a_rollout_without_an_advantage_is_said(command, toy, run_dir):
    code, _, _ = command(*toy, "reward=[random]", "reward.random.rate=1", "kl=none", f"hydra.run.dir={run_dir}")
    assert code == 0
    log = (run_dir / "train.log").read_text()
    assert log.count("every advantage is 0, so nothing is learnt from its rewards") == 3
    assert all(float(row["policy/grad_norm"]) == 0 for row in csv.DictReader((run_dir / "metrics.csv").open()))
