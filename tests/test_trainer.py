"""trainer=...: activation checkpointing, what several processes need, and how the command starts and watches them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from grpo_lightning import distributed, launch
from grpo_lightning.sums import Sums

ROOT = Path(__file__).parents[1]
LEARNS = ["reward=[random]", "eval.reward=[exact]"]


@pytest.mark.parametrize("lora", [[], ["model.lora.r=4"]], ids=["full", "lora"])
def test_activation_checkpointing_takes_the_same_steps(lora, command, toy, tmp_path, monkeypatch):
    recomputed = []
    checkpoint = transformers.modeling_utils.checkpoint

    def counted(function, *args, **kwargs):
        recomputed.append(1)
        return checkpoint(function, *args, **kwargs)

    monkeypatch.setattr(transformers.modeling_utils, "checkpoint", counted)
    weights = []
    for name, options in (("plain", []), ("checkpointed", ["trainer.activation_checkpointing=true"])):
        code, _, err = command(*toy, *LEARNS, *lora, *options, f"hydra.run.dir={tmp_path / name}")
        assert code == 0, err
        assert bool(recomputed) == (name == "checkpointed")
        weights.append(load_file(tmp_path / name / "checkpoints" / "model" / "model.safetensors"))
    start = load_file(Path(toy[0].partition("=")[2]) / "model.safetensors")
    moved = max(float((weights[0][name] - before).abs().max()) for name, before in start.items())
    assert moved > 1e-3
    for name in start:
        torch.testing.assert_close(weights[1][name], weights[0][name], rtol=0, atol=1e-3 * moved)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["trainer.devices=2"], "2 devices (trainer.devices, trainer.num_nodes): add trainer=ddp or trainer=fsdp"),
        (["trainer=ddp", "trainer.devices=some"], "trainer.devices must be a whole number of at least 1, or auto, got"),
        (["trainer=ddp", "trainer.devices=0"], "trainer.devices must be a whole number of at least 1, or auto, got 0"),
        (["trainer=ddp", "trainer.devices=5"], "rollout.prompts=4 is less than the 5 processes"),
        (["trainer=ddp", "trainer.devices=1", "trainer.num_nodes=2"], "start the command on every node, through"),
        (["trainer.strategy=deepspeed"], "trainer.strategy must be auto (one process), ddp or fsdp, got deepspeed"),
        (["trainer=ddp", "trainer.devices=2", "rollout=vllm"], "rollout=vllm runs in one process alone"),
        (["trainer.activation_checkpointing=2"], "trainer.activation_checkpointing: true or false, got 2"),
        (
            ["trainer=fsdp", "trainer.devices=2", "rollout=vllm_server", "rollout.engine.weights=nccl"],
            "rollout.engine.weights=nccl sends from one process alone",
        ),
    ],
)  # fmt: skip
def test_what_several_processes_need_is_refused_in_one_line(options, message, command, toy, run_dir):
    code, _, err = command(*toy, *options, "trainer.accelerator=cpu", f"hydra.run.dir={run_dir}")
    assert code == 2 and message in err and len(err.strip().splitlines()) == 1


def test_sums_are_divided_once_and_fillers_count_for_nothing():
    sums = Sums()
    sums.take(1.0, {"a": (2.0, 4.0), "none": (0.0, 0.0)}, {"top": 3.0}, True)
    sums.take(0.5, {"a": (7.0, 2.0), "none": (0.0, 0.0)}, {"top": 1.0}, True)
    sums.take(9.0, {"a": (9.0, 9.0), "none": (9.0, 9.0)}, {"top": 9.0}, False)
    values = sums.over_processes(torch.device("cpu"))
    assert values["policy/loss"] == 1.5 and values["a"] == 1.5 and values["top"] == 3.0  # 9 / 6, not the mean of means
    assert values["none"] != values["none"]


@pytest.mark.parametrize(
    ("environment", "outside"),
    [
        ({}, False),
        ({"LOCAL_RANK": "0"}, True),
        ({"SLURM_NTASKS": "8", "SLURM_JOB_NAME": "train"}, True),
        ({"SLURM_NTASKS": "1", "SLURM_JOB_NAME": "train"}, False),
        ({"SLURM_NTASKS": "8", "SLURM_JOB_NAME": "interactive"}, False),
    ],
)
def test_torchrun_and_srun_start_the_processes_themselves(environment, outside, monkeypatch):
    for name in ("LOCAL_RANK", "SLURM_NTASKS", "SLURM_JOB_NAME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert launch.started_from_outside() == outside


def test_one_process_alone_shares_and_gathers_nothing():
    assert distributed.share([1, 2, 3]) == [1, 2, 3] == distributed.join([1, 2, 3])
    assert (distributed.rank(), distributed.world_size(), distributed.gather("x")) == (0, 1, ["x"])


PROGRAM = """
import sys, time, os, signal
from grpo_lightning import launch
what = sys.argv[1]
code = "import sys, os, time, signal; rank = int(os.environ['LOCAL_RANK'])\\n" + {
    "fails": "sys.exit(3) if rank == 1 else time.sleep(60)",
    "usage": "sys.exit(2) if rank == 0 else time.sleep(60)",
    "signal": "signal.signal(signal.SIGTERM, lambda *_: sys.exit(10 + rank)); os.write(1, b'ready' + bytes([10])); time.sleep(60)",
    "orphan": "from grpo_lightning import launch; launch.end_with_parent(); os.write(1, str(os.getpid()).encode() + bytes([10])); time.sleep(60)",
    "well": "assert os.environ['WORLD_SIZE'] == '2' and os.environ['MASTER_PORT']",
}[what]
launch.GRACE = 0.5
real = launch.subprocess.Popen
launch.subprocess.Popen = lambda command, **options: real([sys.executable, "-c", code], **options)
ended = launch.launch([], 2)
print((ended.codes, ended.first, ended.stopped), flush=True)
"""  # noqa: E501


def start(what: str) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-c", PROGRAM, what], cwd=ROOT, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("what", "codes"),
    [("well", "([0, 0], None, False)"), ("fails", "([-9, 3], 1, False)"), ("usage", "([2, -9], 0, False)")],
)
def test_when_one_process_fails_the_others_are_ended_and_the_codes_tell(what, codes):
    with start(what) as parent:
        assert parent.communicate(timeout=60)[0].strip() == codes


def test_a_signal_is_passed_on_once_to_each_process():
    with start("signal") as parent:
        assert parent.stdout is not None
        assert [parent.stdout.readline().strip() for _ in range(2)] == ["ready", "ready"]
        parent.send_signal(signal.SIGTERM)
        out = parent.communicate(timeout=60)[0].strip()
        assert out.startswith("([10, 11], ") and out.endswith("True)")


def test_the_processes_end_with_the_one_that_watches_them():
    with start("orphan") as parent:
        assert parent.stdout is not None
        children = [int(parent.stdout.readline()) for _ in range(2)]
        parent.kill()
    deadline = time.monotonic() + 15
    while any(_runs(child) for child in children):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
