"""Recorder: one row of metrics.csv per optimiser step, and the same row to every logger."""

import math
import time
from collections.abc import Callable
from typing import Any

import lightning as L

from grpo_lightning.clock import PHASES
from grpo_lightning.module import GRPOModule
from grpo_lightning.run_folder import RunFolder


class Recorder(L.Callback):
    """Rollout and validation values go into the last row of their rollout, so a row is written once its place is known.

    Args:
        val_names: the metrics of a validation, for the header: they first appear rollouts later.
        begin: called with the step and the rollout that training begins after, once a checkpoint has been loaded.
    """

    def __init__(self, folder: RunFolder, val_names: list[str], begin: Callable[[int, int], None]) -> None:
        self.folder, self.val_names, self.begin = folder, val_names, begin
        self.rollouts = 0
        self.rollouts_without_step = 0
        self.reward_mean = math.nan
        self.seconds_before = 0.0
        self._pending: dict[str, Any] | None = None
        self._started = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds of training with its validations, those before a resume included."""
        return self.seconds_before + time.perf_counter() - self._started

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._started = time.perf_counter()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, GRPOModule)
        self.begin(trainer.global_step, trainer.current_epoch)
        pl_module.clock.lap()  # the validation before training belongs to no rollout

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, GRPOModule)
        if pl_module.step_metrics:
            self._write(trainer, pl_module)
            rollout = trainer.current_epoch + 1
            self._pending = {"step": trainer.global_step, "rollout": rollout, **pl_module.step_metrics}

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, GRPOModule)
        seconds = pl_module.clock.lap()
        times = {f"time/{phase}_s": seconds.get(phase, 0.0) for phase in PHASES}
        metrics = pl_module.rollout_metrics
        self.reward_mean = metrics["reward/mean"]
        self.rollouts = trainer.current_epoch + 1
        if self._pending is None:
            # No optimiser step, no row; the loggers still show what the rollout was like.
            self.rollouts_without_step += 1
            self._log(trainer, metrics | {"sampling/rollouts_without_step": self.rollouts_without_step})
            return
        update = times["time/update_s"]
        self._pending |= metrics | times
        self._pending |= {
            "time/total_s": self.seconds,
            "speed/trained_tokens_per_s": pl_module.rollout_tokens_trained / update if update else math.nan,
            "sampling/rollouts_without_step": self.rollouts_without_step,
        }
        self._write(trainer, pl_module)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        assert isinstance(pl_module, GRPOModule)
        self._write(trainer, pl_module)  # the row of a step that was taken

    def _write(self, trainer: L.Trainer, pl_module: GRPOModule) -> None:
        if self._pending is None:
            return
        row, self._pending = self._pending, None
        known = ["step", "rollout", *(k for k in pl_module.step_metrics), *pl_module.rollout_metrics, *self.val_names]
        known += [f"time/{phase}_s" for phase in PHASES]
        known += ["time/total_s", "speed/trained_tokens_per_s"]
        self.folder.write_metrics(row, [*known, "sampling/rollouts_without_step"])
        self._log(trainer, row)

    def _log(self, trainer: L.Trainer, row: dict[str, Any]) -> None:
        present = {k: v for k, v in row.items() if not (isinstance(v, float) and math.isnan(v))}
        for logger in trainer.loggers:
            logger.log_metrics(present, step=row.get("step", trainer.global_step))

    def state_dict(self) -> dict[str, Any]:
        return {
            "rollouts": self.rollouts,
            "rollouts_without_step": self.rollouts_without_step,
            "seconds": self.seconds,
            "reward": self.reward_mean,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rollouts, self.rollouts_without_step = state_dict["rollouts"], state_dict["rollouts_without_step"]
        self.seconds_before, self.reward_mean = state_dict["seconds"], state_dict["reward"]
