"""CompletionsTable: a wandb table of completions with their rewards and advantages."""

import lightning as L
from lightning.pytorch.loggers import WandbLogger

from grpo_lightning.callbacks.rollout import RolloutCallback

COLUMNS = ["rollout", "group_id", "prompt", "completion", "reward", "correct", "advantage", "length", "finish_reason"]


class CompletionsTable(L.Callback):
    """Logs `rows` completions of every `every`-th rollout (and the first) to wandb, where that is a logger."""

    def __init__(self, every: int = 10, rows: int = 32) -> None:
        self.every, self.rows = every, rows

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        number = trainer.current_epoch + 1
        if number != 1 and number % self.every:
            return
        callback = next(c for c in trainer.callbacks if isinstance(c, RolloutCallback))  # type: ignore[attr-defined]
        records = callback.rollout.records[: self.rows] if callback.rollout else []
        data = [[number, *(record[name] for name in COLUMNS[1:])] for record in records]
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger) and data:
                logger.log_table("rollouts/completions", columns=COLUMNS, data=data, step=trainer.global_step)
