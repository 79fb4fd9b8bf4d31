"""Several devices on one machine: the command starts a process for each and watches over them."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from types import FrameType

import torch
from lightning.pytorch.plugins.environments import SLURMEnvironment
from omegaconf import DictConfig

from grpo_lightning.errors import UsageError

PARENT = "GRPO_LIGHTNING_PARENT"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
GRACE = 30.0  # seconds that the others have to end by themselves once a process has failed


def devices(trainer: DictConfig) -> int:
    """Devices on this machine: what trainer.devices says, or the GPUs that are there.

    Raises:
        UsageError: it is neither a number nor "auto".
    """
    count = trainer.devices
    if count in ("auto", -1):
        return max(1, torch.cuda.device_count()) if trainer.accelerator != "cpu" else 1
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise UsageError(f"trainer.devices must be a whole number of at least 1, or auto, got {count}")
    return count


def processes(trainer: DictConfig) -> int:
    """Processes of the whole run, on all nodes."""
    return devices(trainer) * int(trainer.num_nodes)


def started_from_outside() -> bool:
    """Whether torchrun, srun or this module has started this process as one of several."""
    # sbatch with one task and several devices is a machine like any other.
    tasks = int(os.environ.get("SLURM_NTASKS", "1"))
    return "LOCAL_RANK" in os.environ or (SLURMEnvironment.detect() and tasks > 1)


@dataclass(frozen=True)
class Ended:
    """How the processes ended: their exit codes, negative where a signal ended one; the first of them to fail, if any
    did; and whether they had been asked to stop."""

    codes: list[int]
    first: int | None
    stopped: bool


def launch(overrides: list[str], count: int) -> Ended:
    """Run the command with these overrides in `count` processes.

    A signal to stop is passed on to each. When one fails the others, which would wait for it forever, are ended.
    """
    port = _free_port()
    threads = str(max(1, (os.cpu_count() or 1) // count))
    command = [sys.executable, "-m", "grpo_lightning.train", *overrides]
    children = []
    for number in range(count):
        environment = {
            "OMP_NUM_THREADS": threads, **_without_slurm(), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            "NODE_RANK": "0", "RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(count),
            PARENT: str(os.getpid()),
        }  # fmt: skip
        # In sessions of their own: Ctrl-C reaches them through this process alone, and so only once.
        children.append(subprocess.Popen(command, env=environment, start_new_session=True))

    asked = []

    def forward(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        for child in children:
            child.send_signal(number)

    before = {number: signal.signal(number, forward) for number in SIGNALS}
    try:
        first = _watch(children)
        return Ended([child.returncode for child in children], first, bool(asked))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _without_slurm() -> dict[str, str]:
    """The environment, but for what would make Lightning count tasks of SLURM instead of these processes."""
    return {name: value for name, value in os.environ.items() if not name.startswith("SLURM_NTASKS")}


def _watch(children: "list[subprocess.Popen[bytes]]") -> int | None:
    """Wait for all; returns the first to fail."""
    failed_at, first, patience = 0.0, None, GRACE
    while True:
        running = any(child.poll() is None for child in children)
        failed = [number for number, child in enumerate(children) if child.returncode]
        if first is None and failed:
            # Of several that failed at once, the one that a signal ended is the cause.
            first = min(failed, key=lambda number: children[number].returncode)
            failed_at = time.monotonic()
            # One that was stopped has saved; the others may still send logs away or stop a server.
            patience = GRACE * (10 if children[first].returncode == 130 else 1)
        if not running:
            return first
        usage = any(child.poll() == 2 for child in children)  # before the others had anything to finish
        if first is not None and time.monotonic() - failed_at > (1.0 if usage else patience):
            for child in children:
                child.kill()
        time.sleep(0.1)


def end_with_parent() -> None:
    """In a process that `launch` started: end it when the one that watches over it is gone."""
    parent = os.environ.get(PARENT)

    def watch() -> None:
        while str(os.getppid()) == parent:
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)

    if parent is not None:
        threading.Thread(target=watch, daemon=True).start()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
