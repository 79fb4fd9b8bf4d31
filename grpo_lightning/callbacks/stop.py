"""StopRequest: what SIGINT, SIGTERM and SLURM's warning signals ask for, and when it can be done."""

import os
import signal
import subprocess
import threading
import time
from types import FrameType
from typing import Any

import lightning as L

from grpo_lightning.distributed import gather, rank, world_size

WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)  # sent ahead of a job's time limit: sbatch --signal=USR1@120, submitit
SIGNALS = (signal.SIGINT, signal.SIGTERM, *WARNINGS)


class Stop(BaseException):
    """Ends a run that was asked to stop. No Exception, so that nothing takes it for a failure it could handle."""


class StopRequest(L.Callback):
    """Takes the signals while it is entered as a context; the first of the callbacks, to take them back from Lightning.

    The first signal asks the run to stop. One process alone stops where it is while `at_once` is set, that is, while
    nothing but completions would be lost; otherwise, and with several processes, the run asks `agreed` where it can
    stop. A second signal, `twice`, stops without saving. As these signals have a handler already, Lightning's own
    requeueing of SLURM jobs, which saves in the middle of a rollout, stays off.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self.at_once = True
        self.twice = False
        self._since = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        self._install()
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._install()  # Lightning's own handler has taken SIGTERM; with several processes it could hang in there

    def _install(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                before = signal.signal(number, self._on_signal)
                self._before.setdefault(number, signal.SIG_DFL if before is None else before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signal is None:
            self.signal, self._since = number, now
            if self.at_once and world_size() == 1:
                raise Stop
            if rank() == 0:  # not print, which may be in the middle of printing
                os.write(2, b"\ngrpo_lightning: stopping at the end of this rollout; once more: at once, unsaved\n")
        elif now - self._since > 1:  # a terminal and a launcher may both pass on one and the same signal
            self.twice = True
            raise Stop

    def agreed(self) -> bool:
        """Whether any process was asked to stop. All processes have to ask this together."""
        asked = [number for number in gather(self.signal) if number is not None]
        if asked:
            self.signal = asked[0]
        return bool(asked)

    @property
    def wants_requeue(self) -> bool:
        """Whether SLURM has warned of the end of this job."""
        return self.signal in WARNINGS and "SLURM_JOB_ID" in os.environ


def requeue() -> str:
    """Put this SLURM job into the queue once more; returns what to tell the user."""
    job = os.environ["SLURM_JOB_ID"]
    if "SLURM_ARRAY_JOB_ID" in os.environ:  # a plain id may name the whole array
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    try:
        done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"SLURM job {job} was not requeued: {error}"
    if done.returncode:
        return f"SLURM job {job} was not requeued: {' '.join((done.stderr or done.stdout).split())}"
    return f"SLURM job {job} was requeued"
