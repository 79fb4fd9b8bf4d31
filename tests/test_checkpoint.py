"""No run lost: what a stop saves, what a checkpoint holds, and what happens when a disk is full or a file damaged."""

import csv
import errno
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch

from grpo_lightning import build as build_module
from grpo_lightning.callbacks import stop as stopping
from grpo_lightning.module import GRPOModule
from grpo_lightning.rollout.collect import Collector
from grpo_lightning.rollout.hf import HFEngine
from tests.models import llama

OPTIONS = [
    "algorithm=dapo", "update.minibatches=2", "trainer.max_epochs=4", "checkpoint.every=10", "callbacks=default",
    "+callbacks.draws._target_=tests.test_checkpoint.Draws",
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


@pytest.fixture(scope="module")
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


STOPS = {
    "generating rollout 1": (HFEngine, "generate", lambda: generating(1), 0),
    "generating rollout 3": (HFEngine, "generate", lambda: generating(3), 2),
    "collected rollout 2": (Collector, "collect", lambda: lambda collector, number: number == 2, 1),
    "validating after rollout 2": (HFEngine, "generate", lambda: validating(1), 2),
    "first step of rollout 3": (GRPOModule, "training_step", lambda: step(3, 0), 3),
    "last step of rollout 1": (GRPOModule, "training_step", lambda: step(1, 1), 1),
}


@pytest.mark.parametrize("when", STOPS)
def test_a_stop_saves_and_the_resumed_run_equals_the_run_that_was_never_stopped(when, command, toy, run_dir, whole, at):
    owner, name, condition, rollout = STOPS[when]
    done = at(owner, name, condition(), send)
    code, _, err = command(*toy, *OPTIONS, f"hydra.run.dir={run_dir}")
    assert done and code == 130 and f"resume={run_dir} goes on" in err and "Traceback" not in err
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["status"], summary["rollouts"]) == ("interrupted", rollout)
    assert [p.name for p in (run_dir / "checkpoints").iterdir()] == [f"rollout={rollout:06d}.ckpt"]
    code, out, err = command(f"resume={run_dir}")
    assert code == 0 and f"rollout={rollout:06d}.ckpt (step {2 * rollout})" in out, err
    assert_same_run(whole, run_dir)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2])
def test_the_other_signals_do_the_same_and_the_handlers_are_given_back(number, command, toy, run_dir, at):
    before = [signal.getsignal(n) for n in stopping.SIGNALS]
    at(HFEngine, "generate", generating(2), lambda: send(number))
    assert command(*toy, "checkpoint.every=10", f"hydra.run.dir={run_dir}")[0] == 130
    assert (run_dir / "checkpoints" / "rollout=000001.ckpt").exists()
    assert [signal.getsignal(n) for n in stopping.SIGNALS] == before


def test_a_stop_before_anything_was_trained_starts_from_the_beginning(command, toy, run_dir, whole, at):
    at(HFEngine, "generate", validating(0), send)
    code, _, err = command(*toy, *OPTIONS, f"hydra.run.dir={run_dir}")
    assert code == 130 and f"there is no checkpoint yet: resume={run_dir} starts from the beginning" in err
    assert not list((run_dir / "checkpoints").iterdir())
    assert command(f"resume={run_dir}")[0] == 0
    assert_same_run(whole, run_dir)


def test_a_sweep_that_is_ended_lets_its_job_save(toy, tmp_path):
    sweep = ["-m", *toy, "trainer.max_epochs=500", "checkpoint.every=1000", f"hydra.sweep.dir={tmp_path / 'sweep'}"]
    command = [sys.executable, str(ROOT / "train.py"), *sweep, "seed=0,1"]
    options = {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": str(ROOT)}, "text": True}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options) as child:
        deadline = time.monotonic() + 120
        while not list((tmp_path / "sweep").glob("*/rollouts/000002.jsonl")) and time.monotonic() < deadline:
            time.sleep(0.05)
        child.terminate()
        output = child.communicate(timeout=60)[0]
    assert child.returncode == 130, output
    [job] = [path for path in (tmp_path / "sweep").iterdir() if path.is_dir()]
    assert json.loads((job / "summary.json").read_text())["status"] == "interrupted"
    assert len(list((job / "checkpoints").glob("rollout=*.ckpt"))) == 1


def test_a_stop_while_the_model_is_built_is_an_interruption_too(command, toy, run_dir, monkeypatch):
    monkeypatch.setattr("grpo_lightning.build.load_tokenizer", lambda path: send())
    code, _, err = command(*toy, f"hydra.run.dir={run_dir}")
    assert code == 130 and err.count("grpo_lightning:") == 1
    assert json.loads((run_dir / "summary.json").read_text())["status"] == "interrupted"


def test_a_stop_in_the_last_rollout_lets_the_run_complete(command, toy, run_dir, at):
    at(GRPOModule, "training_step", step(3, 0), send)
    assert command(*toy, f"hydra.run.dir={run_dir}")[0] == 0
    assert json.loads((run_dir / "summary.json").read_text())["status"] == "completed"


@pytest.mark.parametrize("when", ["collected rollout 2", "first step of rollout 3"])
def test_a_stop_with_a_draw_under_way(when, command, toy, tmp_path, at):
    threaded = ["rollout=vllm_server", "rollout.engine._target_=tests.rollout.engines.ThreadedHF", "rollout.ahead=1"]
    run = [*toy, *OPTIONS, *threaded, "reward=[random]", "eval.reward=[exact]"]
    assert command(*run, f"hydra.run.dir={tmp_path / 'whole'}")[0] == 0
    owner, name, condition, rollout = STOPS[when]
    done = at(owner, name, condition(), send)
    assert command(*run, f"hydra.run.dir={tmp_path / 'part'}")[0] == 130 and done
    assert (tmp_path / "part" / "checkpoints" / f"rollout={rollout:06d}.ckpt").exists()
    assert command(f"resume={tmp_path / 'part'}")[0] == 0
    assert_same_run(tmp_path / "whole", tmp_path / "part")


def twice(seconds: float) -> None:
    send()
    time.sleep(seconds)
    send()


def test_one_request_that_arrives_twice_is_one(command, toy, run_dir, at):
    at(GRPOModule, "training_step", step(2, 0), lambda: twice(0))
    assert command(*toy, *OPTIONS, f"hydra.run.dir={run_dir}")[0] == 130
    assert [p.name for p in (run_dir / "checkpoints").iterdir()] == ["rollout=000002.ckpt"]


def test_a_second_signal_does_not_make_one_process_save_alone(command, toy, run_dir, at, monkeypatch):
    monkeypatch.setattr(stopping, "world_size", lambda: 2)  # saving takes all of them
    at(HFEngine, "generate", generating(2), lambda: twice(1.1))
    assert command(*toy, *OPTIONS, f"hydra.run.dir={run_dir}")[0] == 130
    assert not list((run_dir / "checkpoints").iterdir())


def test_a_second_signal_stops_at_once_and_saves_nothing(command, toy, run_dir, at):
    at(GRPOModule, "training_step", step(2, 0), lambda: twice(1.1))
    code, _, _ = command(*toy, *OPTIONS, f"hydra.run.dir={run_dir}")
    assert code == 130 and not list((run_dir / "checkpoints").iterdir())
    assert len(read(run_dir / "metrics.csv")) == 2
    assert json.loads((run_dir / "summary.json").read_text())["status"] == "interrupted"


def test_while_training_the_signals_are_ours_alone(command, toy, run_dir, at):
    # Lightning's handler of SIGTERM speaks with the other processes, which may be anywhere.
    handlers = []
    at(HFEngine, "generate", generating(1), lambda: handlers.extend(map(signal.getsignal, stopping.SIGNALS)))
    assert command(*toy, "trainer.max_epochs=1", f"hydra.run.dir={run_dir}")[0] == 0
    assert [handler.__name__ for handler in handlers] == ["_on_signal"] * len(stopping.SIGNALS)


def test_of_several_processes_none_stops_by_itself(command, toy, run_dir, whole, at, monkeypatch):
    # This process was told nothing, another one was, while rollout 3 was generated.
    told = []
    monkeypatch.setattr(stopping, "world_size", lambda: 2)
    monkeypatch.setattr(stopping, "gather", lambda value: [value, signal.SIGTERM if told else None])
    at(HFEngine, "generate", generating(3), lambda: told.append(True))
    assert command(*toy, *OPTIONS, f"hydra.run.dir={run_dir}")[0] == 130
    assert (run_dir / "rollouts" / "000003.jsonl").exists()  # at a place that all processes come to
    assert [p.name for p in (run_dir / "checkpoints").iterdir()] == ["rollout=000002.ckpt"]
    monkeypatch.undo()
    assert command(f"resume={run_dir}")[0] == 0
    assert_same_run(whole, run_dir)


def test_with_several_processes_a_signal_is_kept_until_all_are_asked(monkeypatch):
    monkeypatch.setattr(stopping, "world_size", lambda: 2)
    with stopping.StopRequest() as stop:
        assert not stop.agreed()
        send()
        assert stop.agreed() and not stop.twice


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """A SLURM job whose scontrol writes down what it is called with."""
    (tmp_path / "bin").mkdir()
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/scontrol.log\n')
    scontrol.chmod(0o755)
    for name, value in {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "SLURM_JOB_ID": "77", "SLURM_NTASKS": "1",
        "SLURM_JOB_NAME": "train", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
        "SLURM_JOB_NODELIST": "localhost", "SLURM_NNODES": "1", "SLURM_NTASKS_PER_NODE": "1",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    return tmp_path / "scontrol.log"


def test_slurms_warning_saves_and_requeues_and_the_same_command_goes_on(command, toy, run_dir, whole, at, slurm):
    run = [*toy, *OPTIONS, f"hydra.run.dir={run_dir}", "resume=auto"]
    at(HFEngine, "generate", generating(3), lambda: send(signal.SIGUSR1))
    code, _, err = command(*run)
    assert code == 130 and "SLURM job 77 was requeued" in err
    assert slurm.read_text() == "requeue 77\n"
    assert [p.name for p in (run_dir / "checkpoints").iterdir()] == ["rollout=000002.ckpt"]
    assert not list(run_dir.rglob("hpc_ckpt*"))  # Lightning's own
    assert command(*run)[0] == 0
    assert_same_run(whole, run_dir)


def test_only_a_warning_requeues_and_only_what_can_go_on(command, toy, run_dir, tmp_path, at, slurm, monkeypatch):
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "70")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "4")
    at(HFEngine, "generate", generating(1), send)  # scancel
    assert command(*toy, f"hydra.run.dir={run_dir}", "resume=auto")[0] == 130
    at(HFEngine, "generate", generating(1), lambda: send(signal.SIGUSR1))
    code, _, err = command(*toy, f"hydra.run.dir={tmp_path / 'other'}")
    assert code == 130 and "not requeued: the command line has to have resume=auto" in err and not slurm.exists()
    at(HFEngine, "generate", generating(1), lambda: send(signal.SIGUSR1))
    command(*toy, f"hydra.run.dir={run_dir}", "resume=auto")
    assert slurm.read_text() == "requeue 70_4\n"


def test_what_a_checkpoint_holds(command, toy, run_dir):
    assert command(*toy, "trainer.max_epochs=1", "logger=wandb", f"hydra.run.dir={run_dir}")[0] == 0
    state = torch.load(run_dir / "checkpoints" / "rollout=000001.ckpt", weights_only=False)
    assert {name.partition(".")[0] for name in state["state_dict"]} == {"policy"}  # never the reference
    assert len(state["optimizer_states"]) == 1 and state["global_step"] == 1 and state["config"]["seed"] == 0
    assert state["callbacks"]["RolloutCallback"]["collector"]["stream"]["position"] == 4
    [rng] = state["callbacks"]["RandomStates"]["ranks"]
    assert {"python", "numpy", "torch"} <= rng.keys()
    name = (run_dir / "wandb_id.txt").read_text().strip()
    assert command(f"resume={run_dir}", "trainer.max_epochs=2")[0] == 0
    runs = [p for p in (run_dir / "wandb").iterdir() if p.name.startswith("offline-run-")]
    assert len(runs) == 2 and all(p.name.endswith(f"-{name}") for p in runs)


def test_the_best_by_validation_is_kept_beside_the_newest(command, toy, run_dir, at):
    # Of these four validations, made up, the second is the best; the run is stopped after the third.
    values = iter([0.1, 0.2, 0.9, 0.5, 0.9])
    options = ["eval.every=1", "trainer.max_epochs=4", "checkpoint.best=val/accuracy", "checkpoint.keep=1"]
    with pytest.MonkeyPatch.context() as patch:
        evaluate = build_module.evaluate

        def made_up(*arguments, **others):
            result = evaluate(*arguments, **others)
            result.metrics["val/accuracy"] = next(values)
            return result

        patch.setattr(build_module, "evaluate", made_up)
        at(GRPOModule, "training_step", step(3, 0), send)
        assert command(*toy, *options, f"hydra.run.dir={run_dir}")[0] == 130
        assert json.loads((run_dir / "checkpoints" / "best.json").read_text()) == {"rollout": 2, "val/accuracy": 0.9}
        best = torch.load(run_dir / "checkpoints" / "best.ckpt", weights_only=False)
        assert command(f"resume={run_dir}")[0] == 0
    assert best["global_step"] == 2
    again = torch.load(run_dir / "checkpoints" / "best.ckpt", weights_only=False)
    assert again["global_step"] == 2  # an equal value later does not replace it
    names = {p.name for p in (run_dir / "checkpoints").iterdir()}
    assert names == {"best.ckpt", "best.json", "rollout=000004.ckpt", "model"}


def test_a_best_of_rollouts_that_are_done_again_is_not_held_against_them(command, toy, run_dir):
    options = ["eval.every=1", "checkpoint.best=val/accuracy", "trainer.max_epochs=1"]
    assert command(*toy, *options, f"hydra.run.dir={run_dir}")[0] == 0
    best = run_dir / "checkpoints" / "best.json"
    best.write_text(json.dumps({"rollout": 2, "val/accuracy": 2.0}))  # of a rollout after the newest checkpoint
    assert command(f"resume={run_dir}", "trainer.max_epochs=2")[0] == 0
    assert json.loads(best.read_text())["val/accuracy"] <= 1
    code, _, err = command(*toy, "checkpoint.best=val/length", f"hydra.run.dir={run_dir}2")
    assert code == 2 and "checkpoint.best must be null or one of val/accuracy, val/greedy, val/pass@2" in err


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != "train.log"
    }


@pytest.fixture
def full_disk(monkeypatch):
    """Makes the disk full for files of a name: what is written is cut off."""

    def fill(ending):
        original = os.fsync

        def fsync(descriptor):
            if os.readlink(f"/proc/self/fd/{descriptor}").endswith(ending):
                os.ftruncate(descriptor, os.fstat(descriptor).st_size - 1)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            original(descriptor)

        monkeypatch.setattr(os, "fsync", fsync)

    return fill


@pytest.mark.parametrize(
    ("ending", "named"),
    [
        ("rollout=000002.ckpt.part", "checkpoints/rollout=000002.ckpt"),
        ("metrics.csv", "metrics.csv"),
        ("000002.jsonl.part", "rollouts/000002.jsonl"),
    ],
)
def test_a_full_disk_is_one_line_and_nothing_is_overwritten(ending, named, command, toy, run_dir, full_disk):
    assert command(*toy, "trainer.max_epochs=1", "checkpoint.keep=1", f"hydra.run.dir={run_dir}")[0] == 0
    before = contents(run_dir)
    full_disk(ending)
    code, _, err = command(f"resume={run_dir}", "trainer.max_epochs=3")
    assert code == 1 and len(err.strip().splitlines()) == 1 and "Traceback" not in err
    assert f"{run_dir / named} could not be written (No space left on device)" in err
    after = contents(run_dir)
    assert after["checkpoints/rollout=000001.ckpt"] == before["checkpoints/rollout=000001.ckpt"]
    assert after["rollouts/000001.jsonl"] == before["rollouts/000001.jsonl"]
    assert after["metrics.csv"].startswith(before["metrics.csv"]) and after["metrics.csv"].endswith(b"\n")
    assert len({line.count(b",") for line in after["metrics.csv"].splitlines()}) == 1  # no half row
    assert not [name for name in after if name.endswith(".part")] and "traceback.txt" not in after
    assert json.loads(after["summary.json"])["status"] == "failed"


def test_after_a_checkpoint_that_could_not_be_written_the_older_one_is_gone_on_from(command, toy, run_dir, whole):
    run = [*toy, *OPTIONS, "checkpoint.every=1", "checkpoint.keep=1"]
    assert command(*run, "trainer.max_epochs=1", "eval.every=10", f"hydra.run.dir={run_dir}")[0] == 0
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        code, _, err = command(f"resume={run_dir}", "trainer.max_epochs=4", "eval.every=2")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code == 1 and len(err.strip().splitlines()) == 1, err
    assert "rollout=000002.ckpt could not be written (File too large)" in err
    assert [p.name for p in (run_dir / "checkpoints").glob("*ckpt*")] == ["rollout=000001.ckpt"]
    assert command(f"resume={run_dir}", "trainer.max_epochs=4")[0] == 0
    assert [r["policy/loss"] for r in read(whole / "metrics.csv")] == [
        r["policy/loss"] for r in read(run_dir / "metrics.csv")
    ]


def test_a_folder_that_cannot_be_written_is_one_line(command, toy, tmp_path):
    (tmp_path / "file").write_text("")
    code, _, err = command(*toy, f"hydra.run.dir={tmp_path / 'file' / 'run'}")
    assert code == 2 and len(err.strip().splitlines()) == 1
    assert f"hydra.run.dir={tmp_path / 'file' / 'run'} cannot be written: {tmp_path / 'file'}" in err


def test_what_a_kill_left_half_written_is_removed_when_the_run_goes_on(command, toy, run_dir):
    assert command(*toy, "trainer.max_epochs=1", f"hydra.run.dir={run_dir}")[0] == 0
    # Of rollouts that this shorter run will not come to, so that nothing else removes them.
    leftovers = ["checkpoints/rollout=000007.ckpt.part", "rollouts/000007.jsonl.part", "validation/000007.jsonl.part"]
    for name in leftovers:
        (run_dir / name).write_text("{")
    (run_dir / "checkpoints" / "model.part").mkdir()
    assert command(f"resume={run_dir}", "trainer.max_epochs=2")[0] == 0
    assert not list(run_dir.rglob("*.part"))


def test_where_no_checkpoint_can_be_read_the_run_says_so_and_stays_as_it_is(command, toy, run_dir):
    assert command(*toy, f"hydra.run.dir={run_dir}")[0] == 0
    checkpoints = sorted((run_dir / "checkpoints").glob("*.ckpt"))
    for path in checkpoints:
        path.write_bytes(path.read_bytes()[:-5000])
    before = contents(run_dir)
    code, out, err = command(f"resume={run_dir}", "trainer.max_epochs=5")
    assert code == 1 and "no checkpoint in" in err and "put back a whole one" in err and "Traceback" not in err
    assert all(f"{path} cannot be read" in out for path in checkpoints)
    assert contents(run_dir) == before


def test_the_last_whole_checkpoint_outlives_a_damaged_newer_one(command, toy, run_dir, at):
    assert command(*toy, f"hydra.run.dir={run_dir}")[0] == 0
    newest = run_dir / "checkpoints" / "rollout=000003.ckpt"
    newest.write_bytes(newest.read_bytes()[:1000])
    newest.rename(run_dir / "checkpoints" / "rollout=000005.ckpt")
    seen = []
    at(GRPOModule, "training_step", step(5, 0), lambda: seen.extend((run_dir / "checkpoints").glob("*.ckpt")))
    assert command(f"resume={run_dir}", "trainer.max_epochs=6", "checkpoint.keep=1", "checkpoint.every=4")[0] == 0
    assert [p.name for p in seen] == ["rollout=000004.ckpt"]
    names = {p.name for p in (run_dir / "checkpoints").glob("*ckpt*")}
    assert names == {"rollout=000006.ckpt", "rollout=000005.ckpt.damaged"}


def test_a_checkpoint_of_another_model_or_configuration_is_named(command, toy, run_dir, tmp_path):
    one = [*toy, "trainer.max_epochs=1"]
    assert command(*one, f"hydra.run.dir={run_dir}")[0] == 0
    assert command(*one, "clip.epsilon=0.3", f"hydra.run.dir={tmp_path / 'clip'}")[0] == 0
    name = "checkpoints/rollout=000001.ckpt"
    original = (run_dir / name).read_bytes()
    shutil.copy(tmp_path / "clip" / name, run_dir / name)
    before = contents(run_dir)
    code, _, err = command(f"resume={run_dir}", "trainer.max_epochs=2")
    assert code == 2 and len(err.strip().splitlines()) == 1 and "clip.epsilon differs from the run in" in err
    assert contents(run_dir) == before
    (run_dir / name).write_bytes(original)
    model = Path(next(o for o in toy if o.startswith("model.path=")).partition("=")[2])
    shutil.copytree(model, tmp_path / "kept")
    try:
        llama(0, hidden_size=16).save_pretrained(model)  # under the same name
        before = contents(run_dir)
        code, _, err = command(f"resume={run_dir}", "trainer.max_epochs=2")
    finally:
        shutil.rmtree(model)
        shutil.copytree(tmp_path / "kept", model)
    assert code == 2 and len(err.strip().splitlines()) == 1 and "Traceback" not in err
    assert "policy.model.embed_tokens.weight is [11, 32] there and [11, 16] in this one" in err
    assert contents(run_dir) == before


def test_fewer_rollouts_than_there_are_is_one_line(command, toy, run_dir, at):
    at(GRPOModule, "training_step", step(2, 0), send)
    assert command(*toy, f"hydra.run.dir={run_dir}")[0] == 130
    code, _, err = command(f"resume={run_dir}", "trainer.max_epochs=1")
    assert code == 2 and "trainer.max_epochs=1" in err and "has 2 rollouts" in err
