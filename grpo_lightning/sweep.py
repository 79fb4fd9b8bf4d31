"""Multirun: each job in a child process of its own, completed jobs skipped, and one table at the end.

A child process, because much of what a run touches cannot be undone in a process: wandb, CUDA, vLLM, process groups.
It works under any Hydra launcher, since it is the job function that starts the child.
"""

import math
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from grpo_lightning.config import quote
from grpo_lightning.run_folder import read_summary


def run_child() -> float:
    """Run the current job of a sweep in a child process and return its held-out accuracy to the sweeper.

    A job that fails returns NaN, so that the others still run; the table at the end and the exit code say so.
    """
    hydra = HydraConfig.get()
    folder = Path(hydra.runtime.output_dir)
    console = Console(highlight=False, soft_wrap=True, markup=False)
    name = f"job {hydra.job.num}: {hydra.job.override_dirname or 'defaults'}"
    summary = read_summary(folder)
    if summary and summary["status"] == "completed":
        console.print(f"{name}: completed before, skipped", style="dim")
        return _metric(summary)
    console.print(name, style="bold")
    (folder / "summary.json").unlink(missing_ok=True)
    command = [
        sys.executable, "-m", "grpo_lightning.train", *hydra.overrides.task,
        f"hydra.run.dir={quote(str(folder))}", f"sweep={quote(folder.parent.name)}", "resume=auto",
    ]  # fmt: skip
    with subprocess.Popen(command, cwd=hydra.runtime.cwd) as child, _passed_on(child):
        while (code := _wait(child)) is None:
            pass
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    return _metric(read_summary(folder))


INTERRUPTED = 130


@contextmanager
def _passed_on(child: "subprocess.Popen[bytes]") -> Iterator[None]:
    """Pass signals to stop on to the child, which saves and ends with INTERRUPTED."""
    before = {}
    if threading.current_thread() is threading.main_thread():  # some launchers run jobs in threads
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            before[number] = signal.signal(number, lambda number, frame: child.send_signal(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(child: subprocess.Popen[bytes]) -> int | None:
    """The child's exit code; None at Ctrl-C, which the terminal sends to the child as well: it ends by itself."""
    try:
        return child.wait()
    except KeyboardInterrupt:
        return None


def _metric(summary: dict[str, Any] | None) -> float:
    value = (summary or {}).get("val_accuracy")
    return math.nan if value is None else value


class SweepTable(Callback):
    """A Hydra callback: prints the jobs of a finished sweep; `failed` counts those that did not complete."""

    failed = 0

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        folder = Path(config.hydra.sweep.dir)
        table = Table(title=escape(str(folder)))
        for column in ("job", "status", "before", "after", "greedy", "seconds"):
            table.add_column(column, justify="left" if column in ("job", "status") else "right")
        # A launcher keeps notes of its own in a hidden folder.
        folders = folder.iterdir() if folder.exists() else ()
        jobs = sorted(path for path in folders if path.is_dir() and not path.name.startswith("."))
        SweepTable.failed = 0
        for job in jobs:
            summary = read_summary(job) or {"status": "failed", "message": "ended without a summary"}
            SweepTable.failed += summary["status"] != "completed"
            figures = [summary.get(key) for key in ("val_accuracy_start", "val_accuracy", "val_greedy")]
            cells = ["-" if value is None else f"{value:.3f}" for value in figures]
            seconds = (summary.get("seconds") or {}).get("total")
            status = summary["status"] + (f": {summary['message']}" if summary["status"] == "failed" else "")
            table.add_row(escape(job.name), escape(status), *cells, "-" if seconds is None else f"{seconds:.0f}")
        Console(highlight=False).print(table)
