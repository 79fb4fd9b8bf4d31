"""Progress: what a person watches: a bar, sample completions with their rewards, and a table at the end."""

import math
from typing import Any

import lightning as L
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from grpo_lightning.callbacks.evaluation import EvaluationCallback
from grpo_lightning.callbacks.recorder import Recorder
from grpo_lightning.module import GRPOModule


class Progress(L.Callback):
    """A rich bar on a terminal; one line per rollout where output goes to a file.

    Args:
        samples: completions shown at each validation; 0 shows none.
    """

    def __init__(self, samples: int = 3) -> None:
        self.samples = samples
        self.console = Console(highlight=False)
        self._bar: Bar | None = None
        self._accuracy = "-"

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, GRPOModule)
        done = trainer.current_epoch
        if not done:
            self._show_validation(trainer, "before training")
        self._accuracy = _figure(_find(trainer, EvaluationCallback).last["val/accuracy"])
        if self.console.is_terminal:
            self._bar = Bar(
                TextColumn("[bold]{task.fields[phase]:<10}"),
                TextColumn("{task.completed:.0f}/{task.total:.0f}"),
                BarColumn(bar_width=max(5, min(40, self.console.width - 80))),
                TextColumn("{task.fields[values]}"),
                TimeRemainingColumn(compact=True),
                TextColumn("left"),
                console=self.console,
            )
            self._bar.start()
            task = self._bar.add_task("", total=trainer.max_epochs, completed=done, phase="start", values="")
            bar = self._bar
            pl_module.clock.on_change = lambda phase: bar.update(task, phase=phase)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, GRPOModule)
        metrics = pl_module.rollout_metrics
        validated = "val/accuracy" in metrics
        if validated:
            self._accuracy = _figure(metrics["val/accuracy"])
        speed = _figure(metrics["speed/generated_tokens_per_s"], ",.0f")
        values = (
            f"reward {_figure(metrics['reward/mean'])} acc {_figure(metrics['train/accuracy'])} "
            f"held-out {self._accuracy} {speed} tok/s"
        )
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], advance=1, values=values)
        else:
            self.console.print(f"rollout {trainer.current_epoch + 1}/{trainer.max_epochs}  {values}", soft_wrap=True)
        if validated:
            self._show_validation(trainer, f"after rollout {trainer.current_epoch + 1}")

    def _show_validation(self, trainer: L.Trainer, when: str) -> None:
        callback = _find(trainer, EvaluationCallback)
        metrics = callback.last
        self.console.print(
            f"held-out {when}: accuracy {metrics['val/accuracy']:.3f}, greedy {metrics['val/greedy']:.3f}, "
            f"length {metrics['val/length_mean']:.1f}",
            soft_wrap=True,
        )
        one_each = {record["prompt_id"]: record for record in callback.samples if not record["greedy"]}
        for record in list(one_each.values())[: self.samples]:
            mark = Text("right ", "green") if record["correct"] else Text("wrong ", "red")
            reward = "none" if record["reward"] is None else f"{record['reward']:g}"
            self.console.print(
                Text("  ") + mark + Text(f"reward {reward}  "), Text(_end(record["prompt"], 60), "dim"),
                Text(_one_line(record["completion"], 100)), soft_wrap=True,
            )  # fmt: skip

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._stop()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, GRPOModule)
        self._stop()
        callback = _find(trainer, EvaluationCallback)
        table = Table(title=f"{trainer.current_epoch} rollouts, {trainer.global_step} optimiser steps")
        for name in ("held-out", "before", "after"):
            table.add_column(name, justify="left" if name == "held-out" else "right")
        for name, label in (
            ("val/accuracy", "accuracy, sampled"),
            ("val/greedy", "accuracy, greedy"),
            ("val/length_mean", "completion length"),
            ("val/truncated_fraction", "truncated"),
        ):
            table.add_row(label, f"{callback.start[name]:.3f}", f"{callback.last[name]:.3f}")
        self.console.print(table)
        total = _find(trainer, Recorder).seconds
        seconds = pl_module.clock.seconds(total)
        self.console.print("seconds: " + "  ".join(f"{phase} {value:.1f}" for phase, value in seconds.items()))

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _find(trainer: L.Trainer, kind: type) -> Any:
    return next(callback for callback in trainer.callbacks if isinstance(callback, kind))  # type: ignore[attr-defined]


def _figure(value: float, form: str = ".3f") -> str:
    return "-" if math.isnan(value) else format(value, form)


def _end(text: str, width: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= width else "..." + text[3 - width :]


def _one_line(text: str, width: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= width else text[: width - 3] + "..."
