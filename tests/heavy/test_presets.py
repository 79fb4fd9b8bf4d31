"""Every preset trains the embedded model for two rollouts of four optimiser steps each."""

import csv
import json
import math

import pytest
from omegaconf import OmegaConf

from grpo_lightning.objective.load import conf_dir

pytestmark = pytest.mark.heavy

SMALL = [
    "trainer=cpu", "logger=none", "trainer.max_epochs=2", "rollout.prompts=8", "rollout.group_size=4", "eval.prompts=8",
    "eval.samples=2", "rollout.max_new_tokens=24", "update.epochs=2", "update.minibatches=2",
]  # fmt: skip
REWARDS = {"process": ["reward=[exact,process]"], "gdpo": ["reward=[exact,format]"]}
PRESETS = sorted(path.stem for path in (conf_dir() / "algorithm").glob("*.yaml"))


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_trains(command, run_dir, preset):
    code, _, err = command(f"algorithm={preset}", *REWARDS.get(preset, []), *SMALL, f"hydra.run.dir={run_dir}")
    assert code == 0, err
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["status"] == "completed" and summary["rollouts"] == 2
    rows = list(csv.DictReader((run_dir / "metrics.csv").open()))
    assert 1 <= len(rows) <= 8
    assert all(math.isfinite(float(row["policy/loss"])) for row in rows)
    assert any(float(row["policy/grad_norm"]) > 0 for row in rows)
    # What the preset names is what was run.
    chosen = [
        next(iter(entry.items())) for entry in OmegaConf.load(conf_dir() / "algorithm" / f"{preset}.yaml").defaults
    ]
    for group, option in chosen:
        assert summary["algorithm"][str(group).rpartition("/")[2]] == option
