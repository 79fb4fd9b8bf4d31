"""The rollout file is written while the policy is updated, and is there before what relies on it."""

import signal
import threading
import time

import pytest

from grpo_lightning.callbacks.recorder import Recorder
from grpo_lightning.errors import RunError
from grpo_lightning.module import GRPOModule
from grpo_lightning.rollout.collect import Collector
from grpo_lightning.run_folder import RunFolder
from tests.whole_run import OPTIONS, assert_same_run, send, step


@pytest.fixture
def slow(monkeypatch):
    """Makes every rollout file take a while."""
    original = RunFolder.write_rows

    def write_rows(self, folder, number, records):
        if folder == self.rollouts:
            time.sleep(0.4)
        original(self, folder, number, records)

    monkeypatch.setattr(RunFolder, "write_rows", write_rows)


def test_an_update_does_not_wait_for_the_file(command, toy, run_dir, monkeypatch):
    stepping, waited = threading.Event(), []
    write, train = RunFolder.write_rows, GRPOModule.training_step

    def write_rows(self, folder, number, records):
        if folder == self.rollouts:
            waited.append(stepping.wait(30))
        write(self, folder, number, records)

    def training_step(self, *arguments):
        stepping.set()
        return train(self, *arguments)

    monkeypatch.setattr(RunFolder, "write_rows", write_rows)
    monkeypatch.setattr(GRPOModule, "training_step", training_step)
    assert command(*toy, "trainer.max_epochs=1", f"hydra.run.dir={run_dir}")[0] == 0
    assert waited == [True]


def test_the_file_is_there_before_the_row_of_its_rollout_and_its_checkpoint(command, toy, run_dir, slow, monkeypatch):
    rollouts = run_dir / "rollouts"
    before = []
    end, save = Recorder.on_train_epoch_end, RunFolder.write_checkpoint

    def on_train_epoch_end(self, trainer, module):
        before.append((rollouts / f"{trainer.current_epoch + 1:06d}.jsonl").exists())
        end(self, trainer, module)

    def write_checkpoint(self, path, checkpoint):
        before.append((rollouts / f"{self.rollout_of(path):06d}.jsonl").exists())
        save(self, path, checkpoint)

    monkeypatch.setattr(Recorder, "on_train_epoch_end", on_train_epoch_end)
    monkeypatch.setattr(RunFolder, "write_checkpoint", write_checkpoint)
    assert command(*toy, f"hydra.run.dir={run_dir}")[0] == 0
    assert before == [True] * 6


@pytest.mark.parametrize("when", ["collected rollout 2", "first step of rollout 3"])
def test_a_stop_while_the_file_is_written(when, command, toy, run_dir, whole, at, slow):
    if when.startswith("collected"):
        at(Collector, "collect", lambda collector, number: number == 2, send)
        left = ["000001.jsonl"]
    else:
        at(GRPOModule, "training_step", step(3, 0), send)
        left = ["000001.jsonl", "000002.jsonl", "000003.jsonl"]
    assert command(*toy, *OPTIONS, f"hydra.run.dir={run_dir}")[0] == 130
    assert sorted(p.name for p in (run_dir / "rollouts").iterdir()) == left
    assert command(f"resume={run_dir}")[0] == 0
    assert_same_run(whole, run_dir)


def test_a_second_signal_does_not_leave_a_file_that_appears_later(command, toy, run_dir, at, slow):
    def twice():
        send(signal.SIGTERM)
        time.sleep(1.1)
        send(signal.SIGTERM)

    at(GRPOModule, "training_step", step(2, 0), twice)
    assert command(*toy, *OPTIONS, f"hydra.run.dir={run_dir}")[0] == 130
    names = sorted(p.name for p in (run_dir / "rollouts").iterdir())
    time.sleep(0.6)
    assert sorted(p.name for p in (run_dir / "rollouts").iterdir()) == names == ["000001.jsonl", "000002.jsonl"]


def test_a_file_that_cannot_be_written_while_something_else_fails_is_said_too(command, toy, run_dir, monkeypatch):
    def write_rows(self, folder, number, records):
        if folder == self.rollouts:
            raise RunError("000001.jsonl could not be written (No space left on device)")

    def training_step(self, *arguments):
        raise RunError("the step failed")

    monkeypatch.setattr(RunFolder, "write_rows", write_rows)
    monkeypatch.setattr(GRPOModule, "training_step", training_step)
    code, out, err = command(*toy, f"hydra.run.dir={run_dir}")
    assert code == 1 and "the run failed: the step failed" in err and "could not be written (No space" in out + err
