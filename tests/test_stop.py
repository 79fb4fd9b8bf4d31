"""Stops: what a signal saves, and that the resumed run is the run that was never stopped."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from grpo_lightning.callbacks import stop as stopping
from grpo_lightning.module import GRPOModule
from grpo_lightning.rollout.collect import Collector
from grpo_lightning.rollout.hf import HFEngine
from tests.whole_run import OPTIONS, ROOT, assert_same_run, generating, read, send, step, validating

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
    assert told and not (run_dir / "rollouts" / "000003.jsonl").exists()  # it was generated, but not trained on
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


