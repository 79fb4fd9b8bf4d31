"""A run to compare with: one that was never stopped, and something that happens at a chosen moment of another."""

import csv
import json
import os
import random
import signal
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch

OPTIONS = [
    "algorithm=dapo", "update.minibatches=2", "trainer.max_epochs=4", "checkpoint.every=10", "callbacks=default",
    "+callbacks.draws._target_=tests.whole_run.Draws",
]  # fmt: skip
ROOT = Path(__file__).parent.parent
TRAINING, VALIDATION = 0, 1  # the second part of a sampling key


class Draws(L.Callback):
    """Draws from every random number generator before each step, as a user's own part might."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        file = Path(trainer.default_root_dir) / "draws.json"
        known = json.loads(file.read_text()) if file.exists() else {}
        place = str(trainer.current_epoch * 2 + batch_idx)
        file.write_text(json.dumps(known | {place: drawn}))


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def assert_same_run(left: Path, right: Path) -> None:
    """The same completions, metrics (times and speeds aside), validations and weights, bit for bit."""
    rows = [read(folder / "metrics.csv") for folder in (left, right)]
    timeless = [[{k: v for k, v in r.items() if not k.startswith(("time/", "speed/"))} for r in t] for t in rows]
    assert timeless[0] == timeless[1] and len(rows[0]) > 3
    for name in ("rollouts", "validation"):
        files = [{p.name: p.read_text() for p in (folder / name).iterdir()} for folder in (left, right)]
        assert files[0] == files[1] and files[0]
    assert json.loads((left / "draws.json").read_text()) == json.loads((right / "draws.json").read_text())
    weights = [folder / "checkpoints" / "model" / "model.safetensors" for folder in (left, right)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (left, right)]
    for name in ("status", "steps", "rollouts", "tokens_generated", "tokens_trained", "val_accuracy", "val_greedy"):
        assert summaries[0][name] == summaries[1][name], name


@pytest.fixture(scope="session")
def place_of_whole(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("whole") / "run"


@pytest.fixture
def whole(command, toy, place_of_whole) -> Path:
    """The run that was never stopped; one for all tests."""
    if not place_of_whole.exists():
        assert command(*toy, *OPTIONS, f"hydra.run.dir={place_of_whole}")[0] == 0
    return place_of_whole


def send(number: int = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


@pytest.fixture
def at(monkeypatch):
    """Patches a method so that something is done at the first call whose arguments fulfil a condition; after
    `collect`, and before anything else."""

    def patch(owner, name, condition, action):
        original, done = getattr(owner, name), []

        def replacement(self, *arguments, **options):
            now = not done and condition(self, *arguments)
            if now:
                done.append(True)
            if now and name != "collect":
                action()
            result = original(self, *arguments, **options)
            if now and name == "collect":
                action()
            return result

        monkeypatch.setattr(owner, name, replacement)
        return done

    return patch


def generating(rollout):
    return lambda engine, requests, params: requests[0].key[1:3] == (TRAINING, rollout)


def validating(number):
    """The sampling of validation `number`, from 0, which is the one before training."""
    calls = []

    def condition(engine, requests, params):
        if requests[0].key[1] == VALIDATION and params.temperature:
            calls.append(True)
            return len(calls) == number + 1
        return False

    return condition


def step(rollout, number):
    return lambda module, minibatch, index: (module.current_epoch + 1, index) == (rollout, number)


